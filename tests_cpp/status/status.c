/* A C program that only calls what returns a status: 200 invalid calls, each with its kind and its text, and then a step that
   is right, one rank on the host runtime. no_exceptions.cc compiles it as C++ without exceptions, and both are built for
   each ABI. */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nvte_ep_status.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 8, EXPERTS = 4, TOP_K = 2, HIDDEN = 64, ROWS = TOKENS * TOP_K, INVALID_CALLS = 200 };

static int failures = 0;

static void check(int right, const char* what) {
  if (right) return;
  fprintf(stderr, "wrong: %s (%s)\n", what, nvte_ep_last_error());
  ++failures;
}

static void must(NVTEEpStatus status, const char* what) {
  if (status == NVTE_EP_SUCCESS) return;
  fprintf(stderr, "%s: %s: %s\n", what, nvte_ep_status_string(status), nvte_ep_last_error());
  exit(1);
}

/* The kind of an error, the function that its text begins with, and a part of the text. */
static void refused(NVTEEpStatus status, NVTEEpStatus kind, const char* function, const char* part) {
  const char* text = nvte_ep_last_error();
  const size_t length = strlen(function);
  if (status == kind && strncmp(text, function, length) == 0 && text[length] == ':' && strstr(text, part) != NULL) return;
  fprintf(stderr, "wrong: %d instead of %d, \"%s\" without %s or %s\n", (int)status, (int)kind, text, function, part);
  ++failures;
}

static NVTETensor tensor(NVTEDType dtype, size_t bytes, size_t rows, size_t columns, const void* values) {
  size_t sizes[2];
  const size_t extent = bytes * rows * (columns == 0 ? 1 : columns);
  NVTEBasicTensor basic;
  NVTETensor made = NULL;
  sizes[0] = rows;
  sizes[1] = columns;
  basic.data_ptr = NULL;
  basic.dtype = dtype;
  must(nvte_ep_try_make_shape(sizes, columns == 0 ? 1 : 2, &basic.shape), "make_shape");
  if (cudaMalloc(&basic.data_ptr, extent) != cudaSuccess) exit(1);
  if (values != NULL && cudaMemcpy(basic.data_ptr, values, extent, cudaMemcpyHostToDevice) != cudaSuccess) exit(1);
  must(nvte_ep_try_create_tensor(NVTE_DELAYED_TENSOR_SCALING, &made), "create_tensor");
  must(nvte_ep_try_set_tensor_param_v2(made, kNVTERowwiseData, &basic, sizeof basic), "set_tensor_param_v2");
  return made;
}

static void release(NVTETensor made) {
  void* data = NULL;
  must(nvte_ep_try_tensor_data(made, &data), "tensor_data");
  if (cudaFree(data) != cudaSuccess) exit(1);
  must(nvte_ep_try_destroy_tensor(made), "destroy_tensor");
}

static void fetch(void* to, NVTETensor from, size_t bytes) {
  void* data = NULL;
  must(nvte_ep_try_tensor_data(from, &data), "tensor_data");
  if (cudaMemcpy(to, data, bytes, cudaMemcpyDeviceToHost) != cudaSuccess) exit(1);
}

struct Step {
#ifdef NVTE_EP_TEST_TE
  NVTETensor handle;
  NVTEEpLayerConfig layer;
#else
  NVTEEpHandle handle;
#endif
  NVTETensor mem, topk_idx, tokens, counts, recv_tokens, result;
  cudaStream_t stream;
};

static NVTECommWindow none; /* All zero. */

static NVTEEpStatus prepare(const struct Step* step, NVTETensor topk_idx) {
#ifdef NVTE_EP_TEST_TE
  return nvte_ep_try_prepare(step->handle, topk_idx, step->counts, NULL, &step->layer, step->stream);
#else
  return nvte_ep_try_prepare(step->handle, topk_idx, step->counts, 0, step->stream);
#endif
}

static NVTEEpStatus dispatch(const struct Step* step, NVTETensor tokens) {
  return nvte_ep_try_dispatch(step->handle, step->topk_idx, tokens, none, NULL, none, step->recv_tokens, none, NULL, none,
                              step->stream);
}

static NVTEEpStatus combine(const struct Step* step, NVTETensor result) {
  return nvte_ep_try_combine(step->handle, step->recv_tokens, none, result, step->stream);
}

static NVTEEpStatus initialize(void* comm, int experts) {
  NVTEEpGroupConfig group;
  memset(&group, 0, sizeof group);
#ifdef NVTE_EP_TEST_TE
  group.struct_size = sizeof group;
#endif
  group.ep_size = 1;
  group.num_experts = experts;
  group.max_tokens_per_rank = TOKENS;
  group.max_recv_tokens_per_rank = ROWS;
  group.hidden_dim = HIDDEN;
  group.max_token_dtype = kNVTEFloat32;
#ifdef NVTE_EP_TEST_TE
  return nvte_ep_try_initialize(comm, &group);
#else
  return nvte_ep_try_initialize(comm, group);
#endif
}

static NVTEEpStatus register_layer(int top_k, size_t* bytes, uint64_t* id) {
  NVTEEpLayerConfig layer;
  memset(&layer, 0, sizeof layer);
  layer.top_k = top_k;
#ifdef NVTE_EP_TEST_TE
  (void)id;
  return nvte_ep_try_handle_mem_size(&layer, bytes);
#else
  return nvte_ep_try_register_layer(layer, bytes, id);
#endif
}

#ifdef NVTE_EP_TEST_TE
#define REGISTER "nvte_ep_handle_mem_size"
#else
#define REGISTER "nvte_ep_register_layer"
#endif

/* Twelve invalid calls with a group. */
static int invalid(const struct Step* step, void* comm) {
  NVTEEpExtOptions* options = NULL;
  NVTEEpExtMemoryUsage usage;
  NVTEDType dtype = kNVTEByte;
  NVTETensor made = NULL;
  size_t bytes = 0;
  uint64_t id = 0;
  int symmetric = 0;
  memset(&usage, 0, sizeof usage);
  refused(initialize(comm, EXPERTS), NVTE_EP_WRONG_ORDER, "nvte_ep_initialize", "has an EP group already");
  refused(register_layer(0, &bytes, &id), NVTE_EP_INVALID_ARGUMENT, REGISTER, "top_k");
  refused(prepare(step, NULL), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_prepare", "topk_idx must be a tensor");
  refused(prepare(step, step->tokens), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_prepare", "topk_idx");
  refused(dispatch(step, NULL), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_dispatch", "tokens must be a tensor");
  refused(combine(step, (NVTETensor)(size_t)12345), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_combine", "result must be a live");
  refused(nvte_ep_try_create_tensor((NVTEScalingMode)77, &made), NVTE_EP_INVALID_ARGUMENT, "nvte_create_tensor", "got 77");
  refused(nvte_ep_try_tensor_type(step->tokens, NULL), NVTE_EP_INVALID_ARGUMENT, "nvte_tensor_type", "result must not");
  refused(nvte_ep_try_tensor_type((NVTETensor)(size_t)7, &dtype), NVTE_EP_INVALID_ARGUMENT, "nvte_tensor_type", "0x7");
  refused(nvte_ep_try_ext_options_set(options, "eager", "on"), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_ext_options_set", "options");
  refused(nvte_ep_try_ext_memory_usage(&usage), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_ext_memory_usage", "struct_size");
  refused(nvte_ep_try_ext_symm_free(&usage), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_ext_symm_free", "ptr");
  must(nvte_ep_try_ext_is_symmetric(&usage, &symmetric), "is_symmetric");
  check(symmetric == 0 && made == NULL && bytes == 0, "what a refused call leaves");
  return 12;
}

int main(void) {
  int64_t experts[TOKENS * TOP_K];
  float rows[TOKENS * HIDDEN], got[TOKENS * HIDDEN];
  int32_t count[EXPERTS];
  ncclUniqueId id;
  ncclComm_t comm;
  struct Step step;
  size_t bytes = 0;
  uint64_t layer = 0;
  int i, calls = 0;

  check(strcmp(nvte_ep_last_error(), "") == 0, "no error yet");
  check(strcmp(nvte_ep_status_string(NVTE_EP_TIME_OUT), "time-out") == 0, "a status in words");
  check(strcmp(nvte_ep_status_string(99), "not a status") == 0, "a number that is no status");
  memset(&step, 0, sizeof step);
  refused(prepare(&step, NULL), NVTE_EP_WRONG_ORDER, "nvte_ep_prepare", "call nvte_ep_initialize first");
  refused(initialize(NULL, EXPERTS), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_initialize", "ep_comm");
  for (i = 0; i < TOKENS * TOP_K; i++) experts[i] = (i / TOP_K + 2 * (i % TOP_K)) % EXPERTS;
  for (i = 0; i < TOKENS * HIDDEN; i++) rows[i] = (float)(1 + i);
  if (cudaStreamCreate(&step.stream) != cudaSuccess || ncclGetUniqueId(&id) != ncclSuccess) return 1;
  if (ncclCommInitRank(&comm, 1, id, 0) != ncclSuccess) return 1;
  refused(initialize(comm, 3), NVTE_EP_INVALID_ARGUMENT, "nvte_ep_initialize", "num_experts");

  must(initialize(comm, EXPERTS), "initialize");
  must(register_layer(TOP_K, &bytes, &layer), "register_layer");
  step.mem = tensor(kNVTEByte, 1, bytes, 0, NULL);
#ifdef NVTE_EP_TEST_TE
  step.handle = step.mem;
  step.layer.struct_size = sizeof step.layer;
  step.layer.top_k = TOP_K;
#else
  step.handle.id = layer;
  step.handle.mem = step.mem;
#endif
  step.topk_idx = tensor(kNVTEInt64, 8, TOKENS, TOP_K, experts);
  step.tokens = tensor(kNVTEFloat32, 4, TOKENS, HIDDEN, rows);
  step.counts = tensor(kNVTEInt32, 4, EXPERTS, 0, NULL);
  step.recv_tokens = tensor(kNVTEFloat32, 4, ROWS, HIDDEN, NULL);
  step.result = tensor(kNVTEFloat32, 4, TOKENS, HIDDEN, NULL);
  for (calls = 3; calls < INVALID_CALLS;) calls += invalid(&step, comm);

  must(prepare(&step, step.topk_idx), "prepare");
  must(dispatch(&step, step.tokens), "dispatch");
  must(combine(&step, step.result), "combine");
  if (cudaStreamSynchronize(step.stream) != cudaSuccess) return 1;

  /* Each expert has a quarter of the rows; each token comes back once from each of its two experts. */
  fetch(count, step.counts, sizeof count);
  fetch(got, step.result, sizeof got);
  for (i = 0; i < EXPERTS; i++) check(count[i] == ROWS / EXPERTS, "an expert's count");
  for (i = 0; i < TOKENS * HIDDEN; i++) check(got[i] == TOP_K * rows[i], "an element of the result");
  must(nvte_ep_try_shutdown(), "shutdown");
  release(step.mem);
  release(step.topk_idx);
  release(step.tokens);
  release(step.counts);
  release(step.recv_tokens);
  release(step.result);
  if (ncclCommDestroy(comm) != ncclSuccess || cudaStreamDestroy(step.stream) != cudaSuccess) return 1;
  if (failures == 0) printf("%d invalid calls survived, step exact\n", calls);
  return failures != 0;
}
