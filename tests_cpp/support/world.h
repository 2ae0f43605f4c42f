// The ranks of a test program: MPI, one device and one NCCL communicator a rank, and waiting that cannot hang for ever.

#ifndef NVTE_EP_TESTS_SUPPORT_WORLD_H_
#define NVTE_EP_TESTS_SUPPORT_WORLD_H_

#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>

#include <string>

namespace test {

void CheckCuda(cudaError_t status, const char* call);
void CheckNccl(ncclResult_t status, const char* call);

#define TEST_CUDA(call) ::test::CheckCuda((call), #call)
#define TEST_NCCL(call) ::test::CheckNccl((call), #call)

class World {
 public:
  // Joins MPI, selects the device and makes the communicator and the stream. Collective.
  static void Start(int* argc, char*** argv);
  // Destroys communicator and stream and leaves MPI. Collective. False, with a message, if CUDA or NCCL refuse: after
  // an error of the device they refuse everything.
  static bool Stop();
  static World& Get();

  int rank() const { return rank_; }
  int size() const { return size_; }
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }

  // A communicator over the first `ranks` ranks, or nullptr on the other ranks. Collective over all.
  ncclComm_t MakeComm(int ranks);
  // Destroys the communicator now and keeps going without one (for teardown orders).
  void DestroyComm();

  // Waits for the stream's work. Work that waits for a rank whose test has failed never ends: then, and when nothing
  // moves for NVTE_EP_TEST_WAIT_SECONDS (default 120), the whole program is ended with a message.
  void Wait(cudaStream_t stream);
  void Wait() { Wait(stream_); }

  // The ranks meet at the end of every test and, through MakeComm, at the start of some; a test that met them in its
  // middle would hang them when it fails on one.

  // Tells every other rank that the running test failed here.
  void AnnounceFailure();
  // Ends a test on all ranks: true on every rank if the test failed on any; `who` names these. Collective.
  bool SettleFailures(bool failed_here, std::string* who);

 private:
  bool PeerFailed();
  [[noreturn]] void GiveUp(const std::string& why);

  int rank_ = 0;
  int size_ = 1;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool announced_ = false;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_WORLD_H_
