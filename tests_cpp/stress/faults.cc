// A rank that fails, hangs or dies at a call that NVTE_EP_HOST_FAULT names: its peers, and it itself where it lives,
// have to come out of their calls with an error, or without one where it was only late, in bounded time. Started with
// mpirun --enable-recovery, which leaves the others alone when a rank dies. Host runtime only.
//
// Every rank that comes to its end prints one line: "fault: rank R raised after N ms: TEXT" or "fault: rank R
// finished".

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "ep/routings.h"
#include "stress/stress.h"
#include "support/host_stats.h"

namespace test {
namespace {

// So long may a call take that waits for a rank that does not come: the time-outs that the script sets, and some slack.
constexpr double kBoundSeconds = 12;
constexpr unsigned kHangSeconds = 40;

void OnHang(int) {
  constexpr char kText[] = "fault: HANG\n";
  static_cast<void>(!write(STDERR_FILENO, kText, sizeof kText - 1));
  _exit(9);
}

// Calls `call`; whether it raised, in which case the line is printed.
template <typename Call>
bool Raises(const char* what, Call&& call) {
  const double start = Now();
  try {
    call();
    return false;
  } catch (const std::exception& error) {
    const double took = Now() - start;
    std::printf("fault: rank %d raised after %d ms in %s: %s\n", World::Get().rank(), static_cast<int>(took * 1e3),
                what, error.what());
    if (took > kBoundSeconds) {
      std::printf("fault: rank %d TOO LATE\n", World::Get().rank());
    }
    std::fflush(stdout);
    return true;
  }
}

void StepsOfAGroup() {
  GroupShape shape;
  shape.alignment = 8;
  shape.max_tokens = 16;
  const NVTEEpGroupConfig config = shape.Config();
  // Not ended by a destructor: shutdown is a call as the others.
  auto* const group = new Group(config);
  Layer layer(2, 8);
  for (std::uint64_t i = 0; i < 4; ++i) {
    Step<BFloat16>(*group, layer, RandomRouting(EvenRows(9), 2, Experts(*group), i), i).ForwardAndBackward();
  }
  group->Shutdown();
}

}  // namespace

int RunFaults() {
  if (!ReadHostStats()) Fail("faults are the host runtime's");
  std::vector<int> pids(Ranks());
  const int pid = getpid();
  MPI_Allgather(&pid, 1, MPI_INT, pids.data(), 1, MPI_INT, MPI_COMM_WORLD);
  signal(SIGALRM, OnHang);
  alarm(kHangSeconds);
  const bool raised = Raises("a step", StepsOfAGroup);
  // Whatever happened, shutdown returns, and says so if it could not end in peace.
  if (raised) Raises("shutdown", [] { nvte_ep_shutdown(); });
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) {
    std::printf("fault: rank %d has WRONG VALUES\n", World::Get().rank());
  }
  std::printf("fault: rank %d ended%s\n", World::Get().rank(), raised ? ", raised" : ", nothing raised");
  std::fflush(stdout);
  // A rank that was stopped would keep mpirun waiting. Its peers have ended by themselves by the time this one does it:
  // after as long as each of them may take.
  const char* const stopped = std::getenv("NVTE_EP_STRESS_STOPPED_RANK");
  if (stopped != nullptr && std::atoi(stopped) != World::Get().rank()) {
    sleep(4);
    kill(pids[std::atoi(stopped)], SIGKILL);
  }
  // MPI cannot end without the rank that is gone.
  _exit(0);
}

}  // namespace test
