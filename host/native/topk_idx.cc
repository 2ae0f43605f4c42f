// kernels/topk_idx.cu for the host runtime (host/src/kernels.rs): its blocks one after the other, of one thread each.

namespace {

struct Index3 {
  unsigned x;
};
struct uint2 {
  unsigned x, y;
};
Index3 threadIdx{0}, blockDim{1};
thread_local Index3 blockIdx, gridDim;

void __syncthreads() {}
void atomicAdd(unsigned* sum, unsigned value) { *sum += value; }
// The host reads it at any time, and other streams add to it.
void atomicAdd_system(unsigned long long* sum, unsigned long long value) {
  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

}  // namespace

#define __device__
#define __global__
#define __shared__ thread_local
#define __restrict__ __restrict
#include "topk_idx.cu"

extern "C" void nvte_ep_host_copy_topk_idx(const void* given, unsigned width, long long* copied, unsigned* header,
                                           unsigned long long* log, unsigned first_word, unsigned second_word,
                                           unsigned tokens, unsigned top_k, unsigned num_experts, unsigned blocks) {
  const uint2 words{first_word, second_word};
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (width == 4) {
      nvte_ep_copy_topk_idx_i32(static_cast<const int*>(given), copied, header, log, words, tokens, top_k, num_experts);
    } else {
      nvte_ep_copy_topk_idx_i64(static_cast<const long long*>(given), copied, header, log, words, tokens, top_k,
                                num_experts);
    }
  }
}
