/* Status codes: a C program, one rank, that handles an error and goes on: a step forward and backward. Nothing it calls
   throws. */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nvte_ep_status.h>
#include <stdio.h>

enum { TOKENS = 8, EXPERTS = 4, TOP_K = 2, HIDDEN = 64, ROWS = TOKENS * TOP_K };

/* Leaves the calling function where a call failed. */
#define TRY(call) \
  do { \
    const NVTEEpStatus status = (call); \
    if (status != NVTE_EP_SUCCESS) { \
      fprintf(stderr, "%s: %s\n", nvte_ep_status_string(status), nvte_ep_last_error()); \
      return 0; \
    } \
  } while (0)

/* A view of device memory; 0 where that failed. */
static int view(NVTETensor* made, void* data, NVTEDType dtype, size_t rows, size_t columns) {
  size_t sizes[2];
  NVTEBasicTensor basic;
  sizes[0] = rows;
  sizes[1] = columns;
  basic.data_ptr = data;
  basic.dtype = dtype;
  TRY(nvte_ep_try_make_shape(sizes, columns == 0 ? 1 : 2, &basic.shape));
  TRY(nvte_ep_try_create_tensor(NVTE_DELAYED_TENSOR_SCALING, made));
  TRY(nvte_ep_try_set_tensor_param_v2(*made, kNVTERowwiseData, &basic, sizeof basic));
  return 1;
}

enum { MEMORY, IDX, IN, COUNTS, RECV, OUT, GRAD_ROWS, GRAD_IN, TENSORS };

/* The step over a group that is there. */
static int step(NVTETensor tensors[], void* data[], uint64_t layer, size_t bytes, cudaStream_t stream) {
  static NVTECommWindow none; /* all zero */
  NVTEEpHandle handle;
  NVTEEpStatus status;
  if (!view(&tensors[MEMORY], data[MEMORY], kNVTEByte, bytes, 0) || !view(&tensors[IDX], data[IDX], kNVTEInt64, TOKENS, TOP_K) ||
      !view(&tensors[IN], data[IN], kNVTEFloat32, TOKENS, HIDDEN) || !view(&tensors[COUNTS], data[COUNTS], kNVTEInt32, EXPERTS, 0) ||
      !view(&tensors[RECV], data[RECV], kNVTEFloat32, ROWS, HIDDEN) || !view(&tensors[OUT], data[OUT], kNVTEFloat32, TOKENS, HIDDEN) ||
      !view(&tensors[GRAD_ROWS], data[GRAD_ROWS], kNVTEFloat32, ROWS, HIDDEN) || !view(&tensors[GRAD_IN], data[GRAD_IN], kNVTEFloat32, TOKENS, HIDDEN))
    return 0;
  handle.id = layer;
  handle.mem = tensors[MEMORY];
  TRY(nvte_ep_try_prepare(handle, tensors[IDX], tensors[COUNTS], 0, stream));

  /* A mistake is told, and nothing has happened. */
  status = nvte_ep_try_dispatch(handle, tensors[IDX], tensors[RECV], none, NULL, none, tensors[RECV], none, NULL, none, stream);
  printf("%s: %s\n", nvte_ep_status_string(status), nvte_ep_last_error());
  if (status != NVTE_EP_INVALID_ARGUMENT) return 0;

  TRY(nvte_ep_try_dispatch(handle, tensors[IDX], tensors[IN], none, NULL, none, tensors[RECV], none, NULL, none, stream));
  TRY(nvte_ep_try_combine(handle, tensors[RECV], none, tensors[OUT], stream));

  /* Backward. The gradient of the result is here what the tokens are; a rank that sends no weights has no gradients of them. */
  TRY(nvte_ep_try_combine_bwd(handle, tensors[IN], none, tensors[GRAD_ROWS], none, stream));
  TRY(nvte_ep_try_dispatch_bwd(handle, tensors[GRAD_ROWS], none, NULL, none, tensors[GRAD_IN], NULL, stream));
  return 1;
}

int main(void) {
  int64_t experts[TOKENS * TOP_K];
  float rows[TOKENS * HIDDEN], got[TOKENS * HIDDEN], grad[TOKENS * HIDDEN];
  size_t extents[TENSORS] = {0, sizeof experts, sizeof rows, EXPERTS * sizeof(int32_t), ROWS * HIDDEN * sizeof(float), sizeof got, ROWS * HIDDEN * sizeof(float), sizeof grad};
  void* data[TENSORS] = {NULL};
  NVTETensor tensors[TENSORS] = {NULL};
  const NVTEEpGroupConfig group = {1, EXPERTS, TOKENS, ROWS, HIDDEN, 0, 0, kNVTEFloat32, 0};
  const NVTEEpLayerConfig config = {0, TOP_K, 0};
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  cudaStream_t stream = NULL;
  uint64_t layer = 0;
  int i, wrong = 0, is_right = 1;

  for (i = 0; i < TOKENS * TOP_K; i++) experts[i] = (i / TOP_K + 2 * (i % TOP_K)) % EXPERTS;
  for (i = 0; i < TOKENS * HIDDEN; i++) rows[i] = (float)i;
  if (cudaStreamCreate(&stream) != cudaSuccess || ncclGetUniqueId(&id) != ncclSuccess) return 1;
  if (ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess) return 1;
  if (nvte_ep_try_initialize(comm, group) != NVTE_EP_SUCCESS ||
      nvte_ep_try_register_layer(config, &extents[MEMORY], &layer) != NVTE_EP_SUCCESS) {
    fprintf(stderr, "%s\n", nvte_ep_last_error());
    return 1;
  }
  for (i = 0; i < TENSORS; i++) is_right &= cudaMalloc(&data[i], extents[i]) == cudaSuccess;
  is_right &= cudaMemcpy(data[IDX], experts, sizeof experts, cudaMemcpyHostToDevice) == cudaSuccess;
  is_right &= cudaMemcpy(data[IN], rows, sizeof rows, cudaMemcpyHostToDevice) == cudaSuccess;
  is_right = is_right && step(tensors, data, layer, extents[MEMORY], stream);
  is_right &= cudaStreamSynchronize(stream) == cudaSuccess;
  is_right &= cudaMemcpy(got, data[OUT], sizeof got, cudaMemcpyDeviceToHost) == cudaSuccess;
  is_right &= cudaMemcpy(grad, data[GRAD_IN], sizeof grad, cudaMemcpyDeviceToHost) == cudaSuccess;
  for (i = 0; i < TOKENS * HIDDEN; i++) wrong += (got[i] != TOP_K * rows[i]) + (grad[i] != TOP_K * rows[i]);

  is_right &= nvte_ep_try_shutdown() == NVTE_EP_SUCCESS;
  is_right &= nvte_ep_try_destroy_tensors(tensors, TENSORS) == NVTE_EP_SUCCESS;
  for (i = 0; i < TENSORS; i++) is_right &= cudaFree(data[i]) == cudaSuccess;
  is_right &= ncclCommDestroy(comm) == ncclSuccess && cudaStreamDestroy(stream) == cudaSuccess;
  printf("%d values wrong\n", wrong);
  return !is_right || wrong != 0;
}
