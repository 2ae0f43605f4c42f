// A library that is wrong on purpose, for the test of te_differential: libtransformer_engine.so, but for one byte of
// what nvte_ep_combine sums. Functions that are not here are found in that library, which this one needs.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <transformer_engine/ep.h>

extern "C" void nvte_ep_combine(NVTETensor handle_mem, NVTETensor expert_out, NVTECommWindow expert_out_win,
                                NVTETensor result, cudaStream_t stream) {
  const auto right = reinterpret_cast<decltype(&nvte_ep_combine)>(dlsym(RTLD_NEXT, "nvte_ep_combine"));
  right(handle_mem, expert_out, expert_out_win, result, stream);
  void* const data = nvte_tensor_data(result);
  if (data != nullptr) static_cast<void>(cudaMemsetAsync(static_cast<unsigned char*>(data) + 5, 0x5b, 1, stream));
}
