// One MoE step under mpirun, in which the experts pass their tokens through. docs/start.md has the commands.
#define OMPI_SKIP_MPICXX  // MPI's old C++ interface, which is of no use here
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>
#include <transformer_engine/ep.h>

#include <cstdio>
#include <exception>
#include <vector>

namespace {

// A tensor over fresh device memory, filled from host where that is given.
NVTETensor tensor(NVTEDType dtype, size_t element, std::vector<size_t> sizes, const void* host = nullptr) {
  size_t bytes = element;
  for (size_t size : sizes) bytes *= size;
  NVTEBasicTensor basic = {nullptr, dtype, nvte_make_shape(sizes.data(), sizes.size())};
  cudaMalloc(&basic.data_ptr, bytes);
  if (host != nullptr) cudaMemcpy(basic.data_ptr, host, bytes, cudaMemcpyHostToDevice);
  NVTETensor made = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  nvte_set_tensor_param_v2(made, kNVTERowwiseData, &basic, sizeof basic);
  return made;
}

// Returns how many values of the step's result are wrong.
int step(ncclComm_t comm, int rank, int ranks, cudaStream_t stream) {
  const size_t T = 8, H = 64, K = 2;              // tokens of this rank, hidden size, experts per token
  const size_t E = 4 * ranks, C = ranks * T * K;  // experts; rows that hold any routing
  std::vector<int64_t> experts(T * K);            // token t goes to experts g and g + E/2
  std::vector<float> weights(T * K, 0.5f), rows(T * H);
  for (size_t i = 0; i < T * K; i++) experts[i] = (rank * T + i / K + i % K * (E / 2)) % E;
  for (size_t i = 0; i < T * H; i++) rows[i] = float(rank * T + i / H);

  nvte_ep_initialize(comm, {ranks, int(E), int(T), int(C), int(H), 0, 0, kNVTEFloat32, 0});
  size_t bytes;
  const uint64_t layer = nvte_ep_register_layer({0, int(K), 0}, &bytes);
  const NVTEEpHandle handle = {layer, tensor(kNVTEByte, 1, {bytes})};
  const NVTETensor topk_idx = tensor(kNVTEInt64, 8, {T, K}, experts.data());
  const NVTETensor topk_weights = tensor(kNVTEFloat32, 4, {T, K}, weights.data());
  const NVTETensor tokens = tensor(kNVTEFloat32, 4, {T, H}, rows.data());
  const NVTETensor counts = tensor(kNVTEInt32, 4, {E / ranks});
  const NVTETensor recv_tokens = tensor(kNVTEFloat32, 4, {C, H});
  const NVTETensor recv_weights = tensor(kNVTEFloat32, 4, {C});
  const NVTETensor result = tensor(kNVTEFloat32, 4, {T, H});

  nvte_ep_prepare(handle, topk_idx, counts, 0, stream);
  nvte_ep_dispatch(handle, topk_idx, tokens, {}, topk_weights, {}, recv_tokens, {}, recv_weights, {}, stream);
  // Here the experts work, each on its slab of recv_tokens, counts[e] rows long, and multiply by recv_weights.
  nvte_ep_combine(handle, recv_tokens, {}, result, stream);
  cudaStreamSynchronize(stream);

  std::vector<float> sums(T * H);
  cudaMemcpy(sums.data(), nvte_tensor_data(result), T * H * 4, cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (size_t i = 0; i < T * H; i++) wrong += sums[i] != K * rows[i];
  nvte_ep_shutdown();
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0, devices = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) MPI_Abort(MPI_COMM_WORLD, 2);
  cudaSetDevice(rank % devices);
  ncclUniqueId id;
  if (rank == 0) ncclGetUniqueId(&id);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  if (ncclCommInitRank(&comm, ranks, id, rank) != ncclSuccess) MPI_Abort(MPI_COMM_WORLD, 2);
  cudaStreamCreate(&stream);
  int wrong = 1;
  try {
    wrong = step(comm, rank, ranks, stream);
    std::printf("rank %d: %d values wrong\n", rank, wrong);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  ncclCommDestroy(comm);
  MPI_Finalize();
  return wrong != 0;
}
