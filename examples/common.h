// What the examples share: finding the other ranks without MPI, owners of CUDA's and NCCL's objects, and a step whose
// right values are known.
#ifndef NVTE_EP_EXAMPLES_COMMON_H_
#define NVTE_EP_EXAMPLES_COMMON_H_

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "rendezvous.h"

inline void check_cuda(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}
inline void check_nccl(ncclResult_t code) {
  if (code != ncclSuccess) throw std::runtime_error(ncclGetErrorString(code));
}

// ---- finding the other ranks ----

// A rank's place, from the variables of torchrun and `nvte-ep launch`, or of Open MPI's mpirun. One rank without any.
struct Place {
  int rank = find_rank();
  int size = find_size();
  int local_rank = find_local_rank();
};

// The communicator of all ranks, each on a device of its own as far as there are enough.
class Communicator {
 public:
  explicit Communicator(const Place& place) {
    int devices = 0;
    check_cuda(cudaGetDeviceCount(&devices));
    check_cuda(cudaSetDevice(place.local_rank % devices));
    ncclUniqueId id;
    if (!share_id(&id, place.rank)) throw std::runtime_error("rank 0's ncclUniqueId did not come");
    const ncclResult_t code = ncclCommInitRank(&comm_, place.size, id, place.rank);
    forget_id(place.rank);
    check_nccl(code);
  }
  ~Communicator() { ncclCommDestroy(comm_); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  operator ncclComm_t() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};

// ---- owners ----

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreate(&stream_)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Device memory of `count` values, filled from the host's where those are given.
template <typename T>
class Device {
 public:
  explicit Device(std::size_t count) : count_(count) {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, count == 0 ? 1 : count * sizeof(T)));
    data_ = static_cast<T*>(data);
  }
  explicit Device(const std::vector<T>& values) : Device(values.size()) { set(values); }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  T* data() const { return data_; }
  void set(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> values(count_);
    check_cuda(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

// ---- a step ----

// Every token goes to two experts, on different ranks where there are two, and the experts pass rows through: so the
// result is twice the token.
struct Problem {
  explicit Problem(const Place& place)
      : rank(static_cast<std::size_t>(place.rank)), ranks(static_cast<std::size_t>(place.size)) {}

  const std::size_t rank, ranks;
  const std::size_t T = 8, H = 512, K = 2;  // tokens of a rank, hidden size, experts per token
  const std::size_t L = 4, E = L * ranks;   // experts of a rank, and of all
  const std::size_t C = ranks * T * K;      // rows that hold any routing

  std::size_t expert(std::size_t of_rank, std::size_t token, std::size_t k) const {
    return (of_rank * T + token + k * (E / 2)) % E;
  }
  std::vector<std::int64_t> experts() const {
    std::vector<std::int64_t> all(T * K);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(expert(rank, i / K, i % K));
    return all;
  }
  std::vector<float> weights() const {
    std::vector<float> all(T * K);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = 0.25f * static_cast<float>(1 + i % K);
    return all;
  }
  // Small whole numbers, so that sums are exact; another `seed` gives others.
  std::vector<float> rows(std::size_t seed = 0) const {
    std::vector<float> all(T * H);
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = static_cast<float>((rank * T + i / H + i % H + seed * 7) % 64);
    return all;
  }
};

// How many values are not `factor` times the expected ones.
inline int wrong(const std::vector<float>& got, const std::vector<float>& expected, float factor) {
  int count = 0;
  for (std::size_t i = 0; i < got.size(); ++i) count += got[i] != factor * expected[i];
  return count;
}

// Runs an example's step as a rank of the run; the process's exit status.
template <typename Step>
int run(Step step) {
  const Place place;
  try {
    const int count = step(place);
    std::printf("rank %d: %d values wrong\n", place.rank, count);
    return count != 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", place.rank, error.what());
    return 1;
  }
}

#endif  // NVTE_EP_EXAMPLES_COMMON_H_
