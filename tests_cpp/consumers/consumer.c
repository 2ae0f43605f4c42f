/* A C program that takes a whole step, one rank on the host runtime: the headers are C, and need no CUDA. */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nvte_ep_ext.h>
#include <stdio.h>
#include <stdlib.h>
#include <transformer_engine/ep.h>

enum { TOKENS = 8, EXPERTS = 4, TOP_K = 2, HIDDEN = 64, ROWS = TOKENS * TOP_K };

static void check(int code, const char* what) {
  if (code == 0) return;
  fprintf(stderr, "%s returned %d\n", what, code);
  exit(1);
}

/* A device tensor of rows x columns (columns 0: one dimension), with a copy of values if there are any. */
static NVTETensor tensor(NVTEDType dtype, size_t bytes, size_t rows, size_t columns, const void* values) {
  const size_t sizes[2] = {rows, columns};
  const NVTEShape shape = nvte_make_shape(sizes, columns == 0 ? 1 : 2);
  const size_t extent = bytes * rows * (columns == 0 ? 1 : columns);
  NVTEBasicTensor basic = {NULL, dtype, shape};
  const NVTETensor result = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  check(cudaMalloc(&basic.data_ptr, extent), "cudaMalloc");
  if (values != NULL) check(cudaMemcpy(basic.data_ptr, values, extent, cudaMemcpyHostToDevice), "cudaMemcpy");
  nvte_set_tensor_param_v2(result, kNVTERowwiseData, &basic, sizeof basic);
  return result;
}

static void fetch(void* to, NVTETensor from) {
  check(cudaMemcpy(to, nvte_tensor_data(from), nvte_tensor_size_bytes(from), cudaMemcpyDeviceToHost), "cudaMemcpy");
}

int main(void) {
  int64_t experts[TOKENS * TOP_K];
  float rows[TOKENS * HIDDEN], got[TOKENS * HIDDEN];
  int32_t count[EXPERTS];
  ncclUniqueId id;
  ncclComm_t comm;
  cudaStream_t stream;
  size_t bytes = 0;
  const NVTECommWindow none = {0};
  const NVTEEpGroupConfig group = {1, EXPERTS, TOKENS, ROWS, HIDDEN, 0, 0, kNVTEFloat32, 0};
  const NVTEEpLayerConfig layer = {0, TOP_K, 0};
  NVTEEpHandle handle;
  NVTETensor topk_idx, tokens, counts, recv_tokens, result;
  int i;

  puts(nvte_ep_ext_version());
  for (i = 0; i < TOKENS * TOP_K; i++) experts[i] = (i / TOP_K + 2 * (i % TOP_K)) % EXPERTS;
  for (i = 0; i < TOKENS * HIDDEN; i++) rows[i] = (float)(1 + i);
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  check(ncclCommInitRank(&comm, 1, id, 0), "ncclCommInitRank");

  nvte_ep_initialize(comm, group);
  handle.id = nvte_ep_register_layer(layer, &bytes);
  handle.mem = tensor(kNVTEByte, 1, bytes, 0, NULL);
  topk_idx = tensor(kNVTEInt64, 8, TOKENS, TOP_K, experts);
  tokens = tensor(kNVTEFloat32, 4, TOKENS, HIDDEN, rows);
  counts = tensor(kNVTEInt32, 4, EXPERTS, 0, NULL);
  recv_tokens = tensor(kNVTEFloat32, 4, ROWS, HIDDEN, NULL);
  result = tensor(kNVTEFloat32, 4, TOKENS, HIDDEN, NULL);
  nvte_ep_prepare(handle, topk_idx, counts, 0, stream);
  nvte_ep_dispatch(handle, topk_idx, tokens, none, NULL, none, recv_tokens, none, NULL, none, stream);
  nvte_ep_combine(handle, recv_tokens, none, result, stream);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");

  /* Each expert has a quarter of the rows; each token comes back once from each of its two experts. */
  fetch(count, counts);
  fetch(got, result);
  for (i = 0; i < EXPERTS; i++) check(count[i] != ROWS / EXPERTS, "an expert's count");
  for (i = 0; i < TOKENS * HIDDEN; i++) check(got[i] != TOP_K * rows[i], "an element of the result");
  nvte_ep_shutdown();
  check(ncclCommDestroy(comm), "ncclCommDestroy");
  puts("step exact");
  return 0;
}
