#include "support/world.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

namespace test {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFailureTag = 77;
constexpr std::chrono::seconds kGraceAfterPeerFailure(5);

World* world = nullptr;

std::chrono::seconds WaitLimit() {
  const char* text = std::getenv("NVTE_EP_TEST_WAIT_SECONDS");
  const long seconds = text == nullptr ? 0 : std::strtol(text, nullptr, 10);
  return std::chrono::seconds(seconds > 0 ? seconds : 120);
}

}  // namespace

void CheckCuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

void CheckNccl(ncclResult_t status, const char* call) {
  if (status == ncclSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + ncclGetErrorString(status) + ": " + ncclGetLastError(nullptr));
}

void World::Start(int* argc, char*** argv) {
  MPI_Init(argc, argv);
  world = new World;
  MPI_Comm_rank(MPI_COMM_WORLD, &world->rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &world->size_);
  MPI_Comm local;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, world->rank_, MPI_INFO_NULL, &local);
  int local_rank = 0;
  MPI_Comm_rank(local, &local_rank);
  MPI_Comm_free(&local);
  try {
    int devices = 0;
    TEST_CUDA(cudaGetDeviceCount(&devices));
    if (devices == 0) throw std::runtime_error("no device");
    TEST_CUDA(cudaSetDevice(local_rank % devices));
    TEST_CUDA(cudaStreamCreateWithFlags(&world->stream_, cudaStreamNonBlocking));
    world->comm_ = world->MakeComm(world->size_);
  } catch (const std::exception& error) {
    world->GiveUp(error.what());
  }
}

World& World::Get() { return *world; }

ncclComm_t World::MakeComm(int ranks) {
  ncclUniqueId id;
  if (rank_ == 0) TEST_NCCL(ncclGetUniqueId(&id));
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm = nullptr;
  if (rank_ < ranks) TEST_NCCL(ncclCommInitRank(&comm, ranks, id, rank_));
  return comm;
}

void World::DestroyComm() {
  if (comm_ != nullptr) TEST_NCCL(ncclCommDestroy(comm_));
  comm_ = nullptr;
}

bool World::Stop() {
  bool stopped = true;
  try {
    world->DestroyComm();
    TEST_CUDA(cudaStreamDestroy(world->stream_));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[rank %d] %s\n", world->rank_, error.what());
    stopped = false;
  }
  delete world;
  world = nullptr;
  MPI_Finalize();
  return stopped;
}

void World::Wait(cudaStream_t stream) {
  const Clock::time_point start = Clock::now();
  Clock::time_point peer_failed_at = Clock::time_point::max();
  for (int polls = 0;; ++polls) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) CheckCuda(status, "waiting for the stream");
    const Clock::time_point now = Clock::now();
    if (peer_failed_at == Clock::time_point::max() && PeerFailed()) peer_failed_at = now;
    if (peer_failed_at != Clock::time_point::max() && now - peer_failed_at > kGraceAfterPeerFailure) {
      GiveUp("the test failed on another rank, and the work on this one waits for that rank");
    }
    if (now - start > WaitLimit()) GiveUp("the stream's work does not end (NVTE_EP_TEST_WAIT_SECONDS)");
    if (polls < 16) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(polls * 4, 500)));
    }
  }
}

bool World::PeerFailed() {
  int found = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, kFailureTag, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
  return found != 0;
}

void World::GiveUp(const std::string& why) {
  std::fprintf(stderr, "[rank %d] %s\n", rank_, why.c_str());
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

void World::AnnounceFailure() {
  if (announced_) return;
  announced_ = true;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Request request;
    MPI_Isend(nullptr, 0, MPI_BYTE, peer, kFailureTag, MPI_COMM_WORLD, &request);
    MPI_Request_free(&request);
  }
}

bool World::SettleFailures(bool failed_here, std::string* who) {
  if (failed_here) AnnounceFailure();
  const int mine = failed_here ? 1 : 0;
  std::vector<int> failed(size_);
  MPI_Allgather(&mine, 1, MPI_INT, failed.data(), 1, MPI_INT, MPI_COMM_WORLD);
  for (int peer = 0; peer < size_; ++peer) {
    if (failed[peer] == 0) continue;
    *who += (who->empty() ? "" : ", ") + std::to_string(peer);
    if (peer != rank_) MPI_Recv(nullptr, 0, MPI_BYTE, peer, kFailureTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  announced_ = false;
  return !who->empty();
}

}  // namespace test
