// What a prepare does in front of NCCL EP, in one launch.
//
// The expert indices that NCCL EP gets to see: it uses an index as an offset unchecked, reads int64 only from memory that is
// opened again, and where a token names an expert twice it takes the weight of either mention. So prepare copies the caller's
// indices, and the copy holds, as int64: the expert; or -1 for a negative index, for one that is no expert, which is counted,
// for the step and for the log, and for an expert that the token has named before.
//
// The header of the handle memory: its two words, a total of zero, of which NCCL EP writes as much as its type has, and the
// count of indices that are no expert, one word a block. The host adds them, so that no block waits for another and no word
// has to be zero before. src/backend/routing/header.rs has the layout.
//
// kernels/topk_idx.ptx is generated from this: cargo run -p nvte-ep-codegen -- kernels --nvrtc "$(qa/nvrtc.sh)"

/// Indices of a token that are read at a time: all of them, for most layers.
constexpr unsigned kAtOnce = 8;

/// Copies a token's indices; how many of them are no expert.
template <typename Index>
__device__ unsigned copy_row(const Index* __restrict__ row, long long* __restrict__ out, unsigned top_k, unsigned num_experts) {
  unsigned found = 0;
  for (unsigned first = 0; first < top_k; first += kAtOnce) {
    Index named[kAtOnce];
#pragma unroll
    for (unsigned k = 0; k < kAtOnce; ++k) named[k] = first + k < top_k ? row[first + k] : Index(-1);
#pragma unroll
    for (unsigned k = 0; k < kAtOnce; ++k) {
      if (first + k >= top_k) break;
      const bool beyond = named[k] >= static_cast<long long>(num_experts);
      bool kept = named[k] >= 0 && !beyond;
#pragma unroll
      for (unsigned earlier = 0; earlier < k; ++earlier) kept = kept && named[earlier] != named[k];
      for (unsigned earlier = 0; earlier < first; ++earlier) kept = kept && row[earlier] != named[k];
      out[first + k] = kept ? static_cast<long long>(named[k]) : -1;
      found += beyond;
    }
  }
  return found;
}

template <typename Index>
__device__ void copy_topk_idx(const Index* __restrict__ given, long long* __restrict__ copied, unsigned* __restrict__ header,
                              unsigned long long* log, uint2 words, unsigned tokens, unsigned top_k, unsigned num_experts) {
  __shared__ unsigned found_here;
  if (threadIdx.x == 0) found_here = 0;
  __syncthreads();
  unsigned found = 0;
  for (unsigned token = blockIdx.x * blockDim.x + threadIdx.x; token < tokens; token += gridDim.x * blockDim.x) {
    const unsigned long long first = static_cast<unsigned long long>(token) * top_k;
    found += copy_row(given + first, copied + first, top_k, num_experts);
  }
  if (found != 0) atomicAdd(&found_here, found);
  __syncthreads();
  if (threadIdx.x != 0) return;
  header[4 + blockIdx.x] = found_here;
  // Host memory is far away, but indices that are no expert are rare.
  if (found_here != 0) atomicAdd_system(log, found_here);
  if (blockIdx.x != 0) return;
  header[0] = words.x;
  header[1] = words.y;
  header[2] = 0;
  header[3] = 0;
}

extern "C" __global__ void nvte_ep_copy_topk_idx_i32(const int* given, long long* copied, unsigned* header, unsigned long long* log,
                                                     uint2 words, unsigned tokens, unsigned top_k, unsigned num_experts) {
  copy_topk_idx(given, copied, header, log, words, tokens, top_k, num_experts);
}

extern "C" __global__ void nvte_ep_copy_topk_idx_i64(const long long* given, long long* copied, unsigned* header,
                                                     unsigned long long* log, uint2 words, unsigned tokens, unsigned top_k,
                                                     unsigned num_experts) {
  copy_topk_idx(given, copied, header, log, words, tokens, top_k, num_experts);
}
