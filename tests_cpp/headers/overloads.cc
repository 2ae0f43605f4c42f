// Codes of CUDA's runtime, of its driver and of NCCL are types of their own, by which programs overload their checks.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <type_traits>

namespace {
constexpr int Library(cudaError_t) { return 1; }
constexpr int Library(CUresult) { return 2; }
constexpr int Library(ncclResult_t) { return 3; }
}  // namespace

static_assert(Library(cudaSuccess) == 1 && Library(CUDA_SUCCESS) == 2 && Library(ncclSuccess) == 3, "");
static_assert(std::is_enum<cudaError>::value && std::is_enum<cudaMemcpyKind>::value, "");
static_assert(std::is_enum<ncclDataType_t>::value && std::is_enum<ncclRedOp_t>::value, "");
static_assert(!std::is_same<ncclDataType_t, ncclRedOp_t>::value, "");
