// The expert indices that NCCL EP gets to see. It uses an index as an offset unchecked, reads int64 only from memory that
// is opened again, and where a token names an expert twice it takes the weight of either mention. So prepare copies the
// caller's indices, and the copy holds, as int64: the expert; or -1 for a negative index, for one that is no expert, which
// is counted, for the step and for the log, and for an expert that the token has named before.
//
// kernels/topk_idx.ptx is generated from this: cargo run -p nvte-ep-codegen -- kernels --nvrtc "$(qa/nvrtc.sh)"

template <typename Index>
__device__ void copy_topk_idx(const Index* given, long long* copied, unsigned* not_experts, unsigned long long* log,
                              unsigned tokens, unsigned top_k, unsigned num_experts) {
  __shared__ unsigned found_here;
  if (threadIdx.x == 0) found_here = 0;
  __syncthreads();
  unsigned found = 0;
  // One thread a token, which compares its own few indices.
  for (unsigned token = blockIdx.x * blockDim.x + threadIdx.x; token < tokens; token += gridDim.x * blockDim.x) {
    const Index* row = given + static_cast<unsigned long long>(token) * top_k;
    long long* out = copied + static_cast<unsigned long long>(token) * top_k;
    for (unsigned k = 0; k < top_k; ++k) {
      const long long index = row[k];
      long long kept = index;
      if (index < 0) {
        kept = -1;
      } else if (index >= num_experts) {
        kept = -1;
        ++found;
      } else {
        for (unsigned earlier = 0; earlier < k; ++earlier) {
          if (row[earlier] == row[k]) kept = -1;
        }
      }
      out[k] = kept;
    }
  }
  if (found != 0) atomicAdd(&found_here, found);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (found_here != 0) atomicAdd(not_experts, found_here);
  __threadfence();
  // Host memory is far away (1 us an addition), so the last block adds what all of them have found.
  unsigned* done = not_experts + 1;
  if (atomicAdd(done, 1) + 1 != gridDim.x) return;
  const unsigned found_in_all = atomicAdd(not_experts, 0);
  if (found_in_all != 0) atomicAdd_system(log, found_in_all);
}

extern "C" __global__ void nvte_ep_copy_topk_idx_i32(const int* given, long long* copied, unsigned* not_experts,
                                                     unsigned long long* log, unsigned tokens, unsigned top_k, unsigned num_experts) {
  copy_topk_idx(given, copied, not_experts, log, tokens, top_k, num_experts);
}

extern "C" __global__ void nvte_ep_copy_topk_idx_i64(const long long* given, long long* copied, unsigned* not_experts,
                                                     unsigned long long* log, unsigned tokens, unsigned top_k, unsigned num_experts) {
  copy_topk_idx(given, copied, not_experts, log, tokens, top_k, num_experts);
}
