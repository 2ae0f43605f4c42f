/* Experts that compute, in C with status codes, on any number of ranks: y = w * 2 * x for each row x that an expert receives, with
   the weight w that the token's sender gave it, and its backward. Nothing it calls throws. */
#define _POSIX_C_SOURCE 200809L
#include "rendezvous.h"

#include <cuda_runtime_api.h>
#include <nvte_ep_status.h>

enum { TOKENS = 8, LOCAL_EXPERTS = 4, TOP_K = 2, HIDDEN = 64 };

/* Leave the calling function, which returns 0, where a call failed. */
#define TRY(call)                                                                          \
  do {                                                                                     \
    const NVTEEpStatus status_ = (call);                                                   \
    if (status_ != NVTE_EP_SUCCESS) {                                                      \
      fprintf(stderr, "%s: %s\n", nvte_ep_status_string(status_), nvte_ep_last_error());   \
      return 0;                                                                            \
    }                                                                                      \
  } while (0)
#define CUDA(call)                                                  \
  do {                                                              \
    const cudaError_t code_ = (call);                               \
    if (code_ != cudaSuccess) {                                     \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code_)); \
      return 0;                                                     \
    }                                                               \
  } while (0)
#define NCCL(call)                                                  \
  do {                                                              \
    const ncclResult_t code_ = (call);                              \
    if (code_ != ncclSuccess) {                                     \
      fprintf(stderr, "%s: %s\n", #call, ncclGetErrorString(code_)); \
      return 0;                                                     \
    }                                                               \
  } while (0)

/* What is on the device, each with a tensor that describes it. */
enum { MEMORY, IDX, X, W, COUNTS, RECV_X, RECV_W, Y, G, GRAD_ROWS, GRAD_RECV_W, GRAD_X, GRAD_W, ARRAYS };
typedef struct Array {
  void* data;
  size_t bytes;
  NVTETensor tensor;
} Array;

typedef struct Rank {
  int rank, size;
  ncclComm_t comm;
  cudaStream_t stream;
  uint64_t layer;
  size_t rows; /* that hold any routing */
  Array arrays[ARRAYS];
} Rank;

/* Allocates `rows` times `columns` values (0: a vector), and describes them. */
static int make(Array* array, NVTEDType dtype, size_t width, size_t rows, size_t columns) {
  const size_t sizes[2] = {rows, columns};
  NVTEBasicTensor basic;
  array->bytes = rows * (columns == 0 ? 1 : columns) * width;
  CUDA(cudaMalloc(&array->data, array->bytes));
  basic.data_ptr = array->data;
  basic.dtype = dtype;
  TRY(nvte_ep_try_make_shape(sizes, columns == 0 ? 1 : 2, &basic.shape));
  TRY(nvte_ep_try_create_tensor(NVTE_DELAYED_TENSOR_SCALING, &array->tensor));
  TRY(nvte_ep_try_set_tensor_param_v2(array->tensor, kNVTERowwiseData, &basic, sizeof basic));
  return 1;
}

/* The inputs, small whole numbers, so that sums are exact: token values, the gradient of the result, weights, experts. */
static float x_of(const Rank* me, int token, int h) { return (float)((me->rank + token + h) % 5); }
static float g_of(const Rank* me, int token, int h) { return (float)((2 * me->rank + token + 3 * h) % 7); }
static float w_of(int token, int k) { return 0.5f * (float)(1 + (token + k) % 3); }
static int64_t expert_of(const Rank* me, int token, int k) {
  const int experts = LOCAL_EXPERTS * me->size;
  return (me->rank + token + k * (experts / 2)) % experts;
}

static int start(Rank* me) {
  ncclUniqueId id;
  int devices = 0;
  size_t handle_bytes = 0;
  NVTEEpGroupConfig group = {0};
  NVTEEpLayerConfig layer = {0};
  CUDA(cudaGetDeviceCount(&devices));
  CUDA(cudaSetDevice(find_local_rank() % devices));
  CUDA(cudaStreamCreate(&me->stream));
  if (!share_id(&id, me->rank)) {
    fprintf(stderr, "rank 0's ncclUniqueId did not come\n");
    return 0;
  }
  NCCL(ncclCommInitRank(&me->comm, me->size, id, me->rank));
  forget_id(me->rank);
  group.ep_size = me->size;
  group.num_experts = LOCAL_EXPERTS * me->size;
  group.max_tokens_per_rank = TOKENS;
  group.max_recv_tokens_per_rank = (int)me->rows;
  group.hidden_dim = HIDDEN;
  group.max_token_dtype = kNVTEFloat32;
  TRY(nvte_ep_try_initialize(me->comm, group));
  layer.top_k = TOP_K;
  TRY(nvte_ep_try_register_layer(layer, &handle_bytes, &me->layer));
  return make(&me->arrays[MEMORY], kNVTEByte, 1, handle_bytes, 0) &&
         make(&me->arrays[IDX], kNVTEInt64, 8, TOKENS, TOP_K) && make(&me->arrays[X], kNVTEFloat32, 4, TOKENS, HIDDEN) &&
         make(&me->arrays[W], kNVTEFloat32, 4, TOKENS, TOP_K) && make(&me->arrays[COUNTS], kNVTEInt32, 4, LOCAL_EXPERTS, 0) &&
         make(&me->arrays[RECV_X], kNVTEFloat32, 4, me->rows, HIDDEN) && make(&me->arrays[RECV_W], kNVTEFloat32, 4, me->rows, 0) &&
         make(&me->arrays[Y], kNVTEFloat32, 4, TOKENS, HIDDEN) && make(&me->arrays[G], kNVTEFloat32, 4, TOKENS, HIDDEN) &&
         make(&me->arrays[GRAD_ROWS], kNVTEFloat32, 4, me->rows, HIDDEN) &&
         make(&me->arrays[GRAD_RECV_W], kNVTEFloat32, 4, me->rows, 0) &&
         make(&me->arrays[GRAD_X], kNVTEFloat32, 4, TOKENS, HIDDEN) && make(&me->arrays[GRAD_W], kNVTEFloat32, 4, TOKENS, TOP_K);
}

static int put(const Array* array, const void* values) {
  CUDA(cudaMemcpy(array->data, values, array->bytes, cudaMemcpyHostToDevice));
  return 1;
}

/* Memory of the caller's with the array's values; NULL where that failed. */
static void* get(const Array* array) {
  void* values = malloc(array->bytes);
  if (values != NULL && cudaMemcpy(values, array->data, array->bytes, cudaMemcpyDeviceToHost) == cudaSuccess) return values;
  free(values);
  return NULL;
}

/* How many rows this rank's experts have received: their slabs follow each other, each of counts[e] rows. */
static size_t received(const Rank* me) {
  int32_t* const counts = get(&me->arrays[COUNTS]);
  size_t sum = 0, e;
  for (e = 0; e < LOCAL_EXPERTS && counts != NULL; e++) sum += (size_t)counts[e];
  free(counts);
  return sum;
}

/* The experts' forward, in place: y = w * 2 * x. Theirs is the product with w, since combine only adds. A real program launches
   kernels on the stream here, and waits for nothing; this one computes on the host. */
static int experts(const Rank* me, float* kept_x) {
  const Array *rows = &me->arrays[RECV_X], *weights = &me->arrays[RECV_W];
  float *x, *w;
  size_t i, count;
  int is_right;
  CUDA(cudaStreamSynchronize(me->stream));
  x = get(rows);
  w = get(weights);
  count = received(me);
  is_right = x != NULL && w != NULL;
  for (i = 0; i < count * HIDDEN && is_right; i++) {
    kept_x[i] = x[i]; /* for the backward */
    x[i] *= 2 * w[i / HIDDEN];
  }
  is_right = is_right && put(rows, x);
  free(x);
  free(w);
  return is_right;
}

/* The experts' backward: of the gradient g of y the gradient of x, w * 2 * g, in place, and that of w, the sum of 2 * x * g. */
static int experts_bwd(const Rank* me, const float* kept_x) {
  const Array *rows = &me->arrays[GRAD_ROWS], *weights = &me->arrays[RECV_W], *grad_weights = &me->arrays[GRAD_RECV_W];
  float *g, *w, *grad_w;
  size_t i, count;
  int is_right;
  CUDA(cudaStreamSynchronize(me->stream));
  g = get(rows);
  w = get(weights);
  grad_w = calloc(me->rows, sizeof *grad_w);
  count = received(me);
  is_right = g != NULL && w != NULL && grad_w != NULL;
  for (i = 0; i < count * HIDDEN && is_right; i++) {
    grad_w[i / HIDDEN] += 2 * kept_x[i] * g[i];
    g[i] *= 2 * w[i / HIDDEN];
  }
  is_right = is_right && put(rows, g) && put(grad_weights, grad_w);
  free(g);
  free(w);
  free(grad_w);
  return is_right;
}

static int step(Rank* me, float* kept_x) {
  static NVTECommWindow none; /* all zero: no symmetric memory */
  const Array* const a = me->arrays;
  NVTEEpHandle handle;
  NVTEEpStatus status;
  handle.id = me->layer;
  handle.mem = a[MEMORY].tensor;
  TRY(nvte_ep_try_prepare(handle, a[IDX].tensor, a[COUNTS].tensor, 0, me->stream));

  /* A mistake is told, and nothing has happened. */
  status = nvte_ep_try_combine(handle, a[X].tensor, none, a[Y].tensor, me->stream);
  if (me->rank == 0) printf("%s: %s\n", nvte_ep_status_string(status), nvte_ep_last_error());
  if (status == NVTE_EP_SUCCESS) return 0;

  TRY(nvte_ep_try_dispatch(handle, a[IDX].tensor, a[X].tensor, none, a[W].tensor, none, a[RECV_X].tensor, none, a[RECV_W].tensor,
                           none, me->stream));
  if (!experts(me, kept_x)) return 0;
  TRY(nvte_ep_try_combine(handle, a[RECV_X].tensor, none, a[Y].tensor, me->stream));

  /* Backward, from the gradient of the result to those of the tokens and of their weights. */
  TRY(nvte_ep_try_combine_bwd(handle, a[G].tensor, none, a[GRAD_ROWS].tensor, none, me->stream));
  if (!experts_bwd(me, kept_x)) return 0;
  TRY(nvte_ep_try_dispatch_bwd(handle, a[GRAD_ROWS].tensor, none, a[GRAD_RECV_W].tensor, none, a[GRAD_X].tensor, a[GRAD_W].tensor,
                               me->stream));
  CUDA(cudaStreamSynchronize(me->stream));
  return 1;
}

static int set_inputs(const Rank* me) {
  int64_t idx[TOKENS * TOP_K];
  float x[TOKENS * HIDDEN], g[TOKENS * HIDDEN], w[TOKENS * TOP_K];
  int t, i;
  for (t = 0; t < TOKENS; t++) {
    for (i = 0; i < TOP_K; i++) idx[t * TOP_K + i] = expert_of(me, t, i), w[t * TOP_K + i] = w_of(t, i);
    for (i = 0; i < HIDDEN; i++) x[t * HIDDEN + i] = x_of(me, t, i), g[t * HIDDEN + i] = g_of(me, t, i);
  }
  return put(&me->arrays[IDX], idx) && put(&me->arrays[X], x) && put(&me->arrays[G], g) && put(&me->arrays[W], w);
}

/* How many values are wrong; -1 where they cannot be had. */
static int check(const Rank* me) {
  float *y = get(&me->arrays[Y]), *grad_x = get(&me->arrays[GRAD_X]), *grad_w = get(&me->arrays[GRAD_W]);
  int wrong = y == NULL || grad_x == NULL || grad_w == NULL ? -1 : 0, t, i;
  for (t = 0; t < TOKENS && wrong >= 0; t++) {
    float sum = 0, dot = 0;
    for (i = 0; i < TOP_K; i++) sum += w_of(t, i);
    for (i = 0; i < HIDDEN; i++) {
      wrong += y[t * HIDDEN + i] != 2 * sum * x_of(me, t, i);
      wrong += grad_x[t * HIDDEN + i] != 2 * sum * g_of(me, t, i);
      dot += 2 * x_of(me, t, i) * g_of(me, t, i);
    }
    for (i = 0; i < TOP_K; i++) wrong += grad_w[t * TOP_K + i] != dot;
  }
  free(y);
  free(grad_x);
  free(grad_w);
  return wrong;
}

/* Gives back what there is. */
static int end(Rank* me) {
  int i;
  TRY(nvte_ep_try_shutdown());
  for (i = 0; i < ARRAYS; i++) {
    TRY(nvte_ep_try_destroy_tensor(me->arrays[i].tensor));
    CUDA(cudaFree(me->arrays[i].data));
  }
  NCCL(ncclCommDestroy(me->comm));
  CUDA(cudaStreamDestroy(me->stream));
  return 1;
}

int main(void) {
  Rank me = {0};
  float* kept_x;
  int wrong = -1;
  me.rank = find_rank();
  me.size = find_size();
  me.rows = (size_t)(me.size * TOKENS * TOP_K);
  kept_x = calloc(me.rows * HIDDEN, sizeof *kept_x);
  /* A rank that fails ends at once, and its launcher ends the others. */
  if (kept_x == NULL || !start(&me) || !set_inputs(&me) || !step(&me, kept_x)) return 1;
  wrong = check(&me);
  if (!end(&me)) return 1;
  free(kept_x);
  printf("rank %d: %d values wrong\n", me.rank, wrong);
  return wrong != 0;
}
