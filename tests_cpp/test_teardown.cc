// One order of ending a program a run: test_teardown ORDER, under mpirun. The process has to exit with 0 on every rank.
// --list prints the orders.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ep/graph.h"
#include "ep/low_latency.h"
#include "support/ep.h"
#include "support/host_stats.h"

// Whether the system has no thread left for the library; the host runtime needs some of its own.
static std::atomic<bool> no_more_threads{false};

extern "C" int pthread_create(pthread_t* made, const pthread_attr_t* attributes, void* (*run)(void*), void* data) {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  Dl_info caller = {};
  const bool is_known = no_more_threads && dladdr(__builtin_return_address(0), &caller) != 0;
  if (is_known && std::strstr(caller.dli_fname, "/libnvte_ep.so") != nullptr) return EAGAIN;
  return create(made, attributes, run, data);
}

namespace test {
namespace {

bool failed = false;

void Fail(const char* what) {
  std::fprintf(stderr, "[rank %d] %s\n", World::Get().rank(), what);
  failed = true;
}

Routing SomeRouting(const Group& group, std::uint64_t seed) {
  return RandomRouting(std::vector<int>(World::Get().size(), 11), 2, group.config().num_experts, seed);
}

void CheckValues() {
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) Fail("a step gave wrong values");
}

void RunSteps(const Group& group) {
  Layer first(2, 1), second(2, 8);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Step<BFloat16>(group, first, SomeRouting(group, seed), seed).ForwardAndBackward();
    Step<BFloat16>(group, second, SomeRouting(group, seed), seed).ForwardAndBackward();
  }
  CheckValues();
}

GroupShape Shape() {
  GroupShape shape;
  shape.alignment = 8;
  return shape;
}

// All that was created has to be gone. Says nothing on real hardware.
void CheckNothingIsLeft(std::uint64_t groups) {
  const std::optional<HostStats> stats = ReadHostStats();
  if (!stats) return;
  std::printf("[rank %d] groups %" PRIu64 " created %" PRIu64 " destroyed, handles %" PRIu64 " created %" PRIu64
              " destroyed\n",
              World::Get().rank(), stats->groups_created, stats->groups_destroyed, stats->handles_created,
              stats->handles_destroyed);
  std::fflush(stdout);
  const char* const backend = std::getenv("NVTE_EP_BACKEND");
  if (backend != nullptr && std::strcmp(backend, "native") == 0) {
    // Its groups are made of a window each.
    if (stats->groups_created != 0 || stats->windows_live != 0) Fail("a group is left");
    return;
  }
  if (stats->groups_created != groups || stats->groups_destroyed != groups) Fail("a group is left");
  if (stats->handles_created != 2 * groups || stats->handles_destroyed != 2 * groups) Fail("a handle is left");
}

// 1 if a rank failed, on every rank.
int AnyFailed() {
  const int mine = failed ? 1 : 0;
  int any = 0;
  MPI_Allreduce(&mine, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return any;
}

int Leave() {
  const int any = AnyFailed();
  return World::Stop() ? any : 1;
}

// Where group and communicator cannot be given back.
[[noreturn]] void LeaveWithoutShutdown() {
  const int any = AnyFailed();
  MPI_Finalize();
  std::_Exit(any);
}

int ShutdownThenDestroy() {
  Group group(Shape());
  RunSteps(group);
  group.Shutdown();
  World::Get().DestroyComm();
  CheckNothingIsLeft(1);
  return Leave();
}

int ShutdownTwice() {
  Group group(Shape());
  RunSteps(group);
  group.Shutdown();
  nvte_ep_shutdown();
  CheckNothingIsLeft(1);
  return Leave();
}

int ShutdownInitializeShutdown() {
  for (std::uint64_t groups = 1; groups <= 2; ++groups) {
    GroupShape shape = Shape();
    shape.hidden = groups == 1 ? 256 : 128;
    Group group(shape);
    RunSteps(group);
    group.Shutdown();
    CheckNothingIsLeft(groups);
  }
  return Leave();
}

// What the process writes to stderr while this lives.
class Stderr {
 public:
  Stderr() : file_(std::tmpfile()), before_(dup(STDERR_FILENO)) { dup2(fileno(file_), STDERR_FILENO); }
  ~Stderr() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    std::fclose(file_);
  }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;

  std::string Text() const {
    std::string text;
    char bytes[4096];
    std::rewind(file_);
    while (const std::size_t count = std::fread(bytes, 1, sizeof bytes, file_)) text.append(bytes, count);
    return text;
  }

 private:
  std::FILE* file_;
  int before_;
};

// Indices that are no expert are in the log: at the next prepare, and what came since at the end.
int IndicesThatAreNoExperts() {
  setenv("NVTE_EP_LOG", "warn", 1);
  const Stderr messages;
  {
    Group group(Shape());
    const int rank = World::Get().rank(), experts = group.config().num_experts;
    Layer layer(2, 1);
    const auto run = [&](const std::function<int(int)>& lost) {
      // The first entries of each rank are no experts, then come masked ones.
      const Routing routing =
          MakeRouting(std::vector<int>(World::Get().size(), 11), 2, [&](int source, int row, int k) {
            return 2 * row + k < lost(source) + 4 ? -1 : (source + row + k) % experts;
          });
      Step<BFloat16> step(group, layer, routing, 7);
      std::vector<std::int64_t> given = routing.expert[rank];
      for (int i = 0; i < lost(rank); ++i) given[i] = experts + i * 1000;
      step.not_experts = lost(rank);
      step.topk_idx.Upload(given);
      step.ForwardAndBackward();
      World::Get().Wait();
    };
    run([](int source) { return 3 + source; });
    run([](int) { return 5; });
  }
  CheckValues();
  const std::string text = messages.Text();
  const auto count = [&](const std::string& part) {
    int found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  const std::string said = " indices of topk_idx in the steps so far were num_experts or more";
  if (count(std::to_string(3 + World::Get().rank()) + said) != 1) Fail("the first step is not in the log");
  if (count(std::to_string(8 + World::Get().rank()) + said) != 1) Fail("the second step is not in the log");
  if (count(said) != 2) Fail("the log has something else");
  if (failed) std::fprintf(stderr, "%s", text.c_str());
  return Leave();
}

// Nobody asked for a log: the first of a kind is said all the same, and no more of it for a minute.
int IndicesByDefault() {
  unsetenv("NVTE_EP_LOG");
  const Stderr messages;
  {
    Group group(Shape());
    Layer layer(2, 1);
    for (int i = 0; i < 3; ++i) {
      const Routing routing = MakeRouting(std::vector<int>(World::Get().size(), 11), 2,
                                          [](int, int row, int k) { return row == 0 ? -1 : (row + k) % 4; });
      Step<BFloat16> step(group, layer, routing, 7);
      std::vector<std::int64_t> given = routing.expert[World::Get().rank()];
      given[0] = group.config().num_experts;
      step.not_experts = 1;
      step.topk_idx.Upload(given);
      step.ForwardAndBackward();
      World::Get().Wait();
    }
  }
  CheckValues();
  const std::string text = messages.Text();
  const std::string said = "nvte_ep: warning: 1 indices of topk_idx in the steps so far were num_experts or more";
  const std::size_t at = text.find(said);
  if (at == std::string::npos) Fail("the indices are not on stderr");
  if (text.find("indices of topk_idx", at + said.size()) != std::string::npos) Fail("they are there more than once");
  if (failed) std::fprintf(stderr, "%s", text.c_str());
  return Leave();
}

// Signals are the program's: no thread of the library takes one.
int SignalsAreThePrograms() {
  Group group(Shape());
  RunSteps(group);
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string line, name;
    std::uint64_t blocked = 0;
    while (std::getline(status, line)) {
      if (line.rfind("Name:\t", 0) == 0) name = line.substr(6);
      if (line.rfind("SigBlk:\t", 0) == 0) blocked = std::stoull(line.substr(8), nullptr, 16);
    }
    if (name != "nvte_ep_watch") continue;
    ++found;
    for (int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGCHLD, SIGPROF}) {
      if ((blocked >> (signal - 1) & 1) == 0) Fail("a thread of the library takes signals");
    }
  }
  if (found != 1) Fail("the watching thread was not found");
  group.Shutdown();
  return Leave();
}

// The system has no thread for what watches the calls: no group without it, on any rank.
int NoThreadForTheWatch() {
  no_more_threads = World::Get().rank() == 0;
  try {
    Initialize(World::Get().comm(), Shape().Config());
    Fail("initialize went through");
  } catch (const std::exception& error) {
    const char* const own =
        "nvte_ep_initialize: rank 0 cannot take part: the thread that watches the group's calls could not "
        "be started (";
    if (std::strstr(error.what(), own) != error.what()) Fail(error.what());
  }
  no_more_threads = false;
  return Leave();
}

// An exception leaves the scope that owns group, layer and step.
int Exception() {
  try {
    Group group(Shape());
    RunSteps(group);
    throw std::logic_error("the training loop failed");
  } catch (const std::logic_error&) {
  }
  CheckNothingIsLeft(1);
  return Leave();
}

// The library's own exception leaves that scope.
int LibraryException() {
  bool caught = false;
  try {
    Group group(Shape());
    RunSteps(group);
    NVTEEpLayerConfig config = {};
    nvte_ep_register_layer(config, nullptr);
  } catch (const std::runtime_error&) {
    caught = true;
  }
  if (!caught) Fail("no exception");
  CheckNothingIsLeft(1);
  return Leave();
}

// Nobody shuts down anything: neither group nor communicator nor stream.
int ExitWithoutShutdown() {
  // Owned by nobody on purpose.
  Group* group = new Group(Shape());
  RunSteps(*group);
  MPI_Finalize();
  return failed ? 1 : 0;
}

// Shut down by a handler of exit, after main has returned.
int ShutdownAtExit() {
  Group* group = new Group(Shape());
  RunSteps(*group);
  MPI_Finalize();
  std::atexit([] {
    try {
      nvte_ep_shutdown();
      CheckNothingIsLeft(1);
    } catch (const std::exception& error) {
      Fail(error.what());
    }
    if (failed) std::_Exit(1);
  });
  return failed ? 1 : 0;
}

// Shut down by a destructor of static storage, which runs in the order of construction reversed: after everything that
// the library constructed during the run.
struct StaticOwner {
  bool armed = false;
  ~StaticOwner() {
    if (!armed) return;
    try {
      nvte_ep_shutdown();
      CheckNothingIsLeft(1);
    } catch (const std::exception& error) {
      Fail(error.what());
    }
    if (failed) std::_Exit(1);
  }
} static_owner;

int ShutdownInStaticDestructor() {
  Group* group = new Group(Shape());
  RunSteps(*group);
  MPI_Finalize();
  static_owner.armed = true;
  return failed ? 1 : 0;
}

int OneRankLate() {
  Group group(Shape());
  RunSteps(group);
  if (World::Get().rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(1));
  group.Shutdown();
  CheckNothingIsLeft(1);
  return Leave();
}

// Work is still queued when shutdown begins, and it has to have been done when shutdown returns.
int ShutdownWithQueuedWork() {
  Group group(Shape());
  Layer first(2, 1), second(2, 8);
  Step<BFloat16> a(group, first, SomeRouting(group, 5), 5);
  Step<BFloat16> b(group, second, SomeRouting(group, 6), 6);
  for (int i = 0; i < 20; ++i) {
    a.Prepare();
    b.Prepare();
    a.Dispatch();
    b.Dispatch();
    a.CombineBwd();
    b.CombineBwd();
  }
  group.Shutdown();
  a.CheckReceived();
  b.CheckReceived();
  a.CheckCombineBwd();
  b.CheckCombineBwd();
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) Fail("queued work was lost");
  CheckNothingIsLeft(1);
  return Leave();
}

// A framework's thread pool: the thread that shuts down is not the one that worked.
int ShutdownFromAnotherThread() {
  Group group(Shape());
  RunSteps(group);
  int device = 0;
  TEST_CUDA(cudaGetDevice(&device));
  std::thread([&] {
    try {
      TEST_CUDA(cudaSetDevice(device));
      group.Shutdown();
    } catch (const std::exception& error) {
      Fail(error.what());
    }
  }).join();
  CheckNothingIsLeft(1);
  return Leave();
}

// A forked child runs the parent's exit handlers over a copy of its memory, without CUDA, NCCL or their threads.
int ShutdownInForkedChild() {
  Group group(Shape());
  RunSteps(group);
  const pid_t child = fork();
  if (child == 0) {
    try {
      nvte_ep_shutdown();
    } catch (const std::exception&) {
      _exit(3);
    }
    try {
      Register(2, 0);
    } catch (const std::exception& error) {
      _exit(std::strstr(error.what(), "was forked off one that has used an EP group") == nullptr ? 4 : 0);
    }
    _exit(5);
  }
  int status = -1;
  for (int tenths = 0; tenths < 100 && waitpid(child, &status, WNOHANG) == 0; ++tenths) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    kill(child, SIGKILL);
    Fail("the child did not get through shutdown, or was not refused a call");
  }
  RunSteps(group);
  group.Shutdown();
  return Leave();
}

// Waits ten seconds at most for a child, which has to end with 0.
void AwaitChild(pid_t child, const char* what) {
  int status = -1;
  for (int tenths = 0; tenths < 100 && waitpid(child, &status, WNOHANG) == 0; ++tenths) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  kill(child, SIGKILL);
  std::fprintf(stderr, "[rank %d] the child's status is %#x\n", World::Get().rank(), status);
  Fail(what);
}

// A child that ends as a program does, with exit handlers and destructors, while a step of the parent's is under way:
// neither is harmed. A data loader's worker is one.
int ForkedChildExits() {
  if (!ReadHostStats()) {
    std::printf(
        "skipped: NCCL 2.30.7 aborts a forked child that runs exit handlers, in its own destructor of a thread\n");
    return Leave();
  }
  Group group(Shape());
  RunSteps(group);
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, SomeRouting(group, 7), 7);
  for (int i = 0; i < 3; ++i) {
    step.Prepare();
    step.Dispatch();
    std::fflush(nullptr);
    const pid_t child = fork();
    // std::exit runs what the library, the C library and this program registered, but not MPI's end.
    if (child == 0) std::exit(0);
    step.CombineBwd();
    AwaitChild(child, "the child did not get through exit");
    step.CheckReceived();
    step.CheckCombineBwd();
  }
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) Fail("a child harmed the parent's step");
  RunSteps(group);
  group.Shutdown();
  return Leave();
}

// A forked child has neither CUDA nor NCCL: every call but shutdown is refused at once.
int CallsInForkedChild() {
  Group group(Shape());
  Layer layer(2, 1);
  auto* const step = new Step<BFloat16>(group, layer, SomeRouting(group, 8), 8);
  step->Forward();
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    int wrong = 0;
    const auto refused = [&](const char* function, const std::function<void()>& call) {
      try {
        call();
        std::fprintf(stderr, "%s went through in a forked child\n", function);
      } catch (const std::exception& error) {
        if (std::strstr(error.what(), "was forked off one that has used an EP group") != nullptr) return;
        std::fprintf(stderr, "in a forked child: %s\n", error.what());
      }
      ++wrong;
    };
    refused("nvte_ep_initialize", [&] { Initialize(World::Get().comm(), Shape().Config()); });
    refused("the layer's function", [] { Register(2, 1); });
    refused("nvte_ep_prepare", [&] { step->prepare_args().Call(); });
    refused("nvte_ep_dispatch", [&] { step->dispatch_args().Call(); });
    refused("nvte_ep_combine", [&] { step->combine_args().Call(); });
    refused("nvte_ep_dispatch_bwd", [&] { step->dispatch_bwd_args().Call(); });
    refused("nvte_ep_combine_bwd", [&] { step->combine_bwd_args().Call(); });
    _exit(wrong == 0 ? 0 : 3);
  }
  AwaitChild(child, "a call went through in the child");
  delete step;
  RunSteps(group);
  group.Shutdown();
  return Leave();
}

// Rank 0 ends without a word, long before the others shut down: they are told within their limit, and end.
int Rank0ExitsEarly() {
  setenv("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "2000", 1);
  Group* group = new Group(Shape());
  RunSteps(*group);
  const int rank = World::Get().rank();
  MPI_Finalize();
  if (rank == 0) return failed ? 1 : 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  const auto start = std::chrono::steady_clock::now();
  try {
    nvte_ep_shutdown();
    Fail("shutdown met a rank that is gone");
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), "nvte_ep_shutdown: ") != error.what()) Fail(error.what());
  }
  if (std::chrono::steady_clock::now() - start > std::chrono::seconds(10)) Fail("shutdown took more than its limit");
  // The group is gone for this process; once more is nothing.
  nvte_ep_shutdown();
  // As a program ends that noticed.
  std::_Exit(failed ? 1 : 0);
}

// A layer that one rank skips. The others get an error that names it, within the run time's limit, then every call ends
// quickly, and so does shutdown.
int SkippedLayer() {
  if (!ReadHostStats() && !OnNativeEngine()) {
    std::printf("skipped: on a GPU the kernels spin until the process ends\n");
    return Leave();
  }
  setenv("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "2000", 1);
  // The native engine's kernels have no limit but the library's.
  if (OnNativeEngine()) setenv("NVTE_EP_TIMEOUT_MS", "2000", 1);
  auto* const group = new Group(Shape());
  RunSteps(*group);
  auto* const layer = new Layer(2, 1);
  auto* const step = new Step<BFloat16>(*group, *layer, SomeRouting(*group, 9), 9);
  const int rank = World::Get().rank(), last = World::Get().size() - 1;
  step->Prepare();
  if (rank != last) {
    step->Dispatch();
    const cudaError_t error = cudaStreamSynchronize(World::Get().stream());
    const std::string name = "rank " + std::to_string(last);
    if (OnNativeEngine()) {
      // They end, and what they leave is void: the next call says so.
      if (error != cudaSuccess) Fail(cudaGetErrorString(error));
    } else {
      if (error == cudaSuccess) Fail("the dispatch met nobody and went through");
      if (std::strstr(cudaGetErrorString(error), name.c_str()) == nullptr) Fail(cudaGetErrorString(error));
    }
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 3; ++i) {
      try {
        step->Dispatch();
        Fail("a later call went through");
      } catch (const std::exception& error) {
        // What to do about an overflow is no help here.
        if (std::strstr(error.what(), "overflow = drop") != nullptr) Fail(error.what());
        if (OnNativeEngine() && std::strstr(error.what(), name.c_str()) == nullptr) Fail(error.what());
      }
    }
    try {
      nvte_ep_shutdown();
      Fail("shutdown went through");
    } catch (const std::exception& error) {
      if (std::strstr(error.what(), "nvte_ep_shutdown: ") != error.what()) Fail(error.what());
    }
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(5)) Fail("later calls waited");
  }
  LeaveWithoutShutdown();
}

// One rank gives up waiting for another in initialize. The late one is told within its own limit, neither hangs in the
// group's creation, the communicator is known to be spoilt, and a new one serves.
int LateInitialize() {
  if (!ReadHostStats()) {
    std::printf("skipped: it leaves a collective behind, which on a GPU spins until the process ends\n");
    return Leave();
  }
  const auto refused = [](ncclComm_t comm, const Options& options, const char* text) {
    const NVTEEpGroupConfig config = Shape().Config();
    try {
      nvte_ep_ext_initialize(comm, &config, options.raw());
      Fail("initialize went through");
    } catch (const std::exception& error) {
      if (std::strstr(error.what(), text) == nullptr) Fail(error.what());
    }
  };
  const int rank = World::Get().rank();
  if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  refused(World::Get().comm(), Options{{"timeout_ms", "500"}},
          rank == 1 ? "all ranks to go on with nvte_ep_initialize" : "all ranks to call nvte_ep_initialize");
  MPI_Barrier(MPI_COMM_WORLD);
  setenv("NVTE_EP_TIMEOUT_MS", "500", 1);
  if (rank != 1) refused(World::Get().comm(), Options(), "make a new communicator");
  unsetenv("NVTE_EP_TIMEOUT_MS");
  MPI_Barrier(MPI_COMM_WORLD);
  ncclComm_t comm = World::Get().MakeComm(World::Get().size());
  {
    Group group(Shape().Config(), comm);
    RunSteps(group);
  }
  CheckNothingIsLeft(1);
  // The first communicator cannot be destroyed: a rank's call is still on it.
  MPI_Finalize();
  return failed ? 1 : 0;
}

// The same in nvte_ep_ext_symm_alloc: the late rank gets no memory that its peers do not have.
int LateSymmAlloc() {
  if (!ReadHostStats()) {
    std::printf("skipped: it leaves a collective behind, which on a GPU spins until the process ends\n");
    return Leave();
  }
  auto* const group = new Group(Shape().Config(), Options{{"timeout_ms", "500"}});
  const auto alloc = [] {
    void* data = nullptr;
    nvte_ep_ext_symm_alloc(4096, &data, nullptr, nullptr);
  };
  const auto refused = [&](const char* text) {
    try {
      alloc();
      Fail("nvte_ep_ext_symm_alloc went through");
    } catch (const std::exception& error) {
      if (std::strstr(error.what(), text) == nullptr) Fail(error.what());
    }
  };
  alloc();
  if (World::Get().rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  refused("ms for all ranks to call nvte_ep_ext_symm_alloc");
  refused("an earlier call did not end");
  NVTEEpExtMemoryUsage usage = {};
  usage.struct_size = sizeof usage;
  nvte_ep_ext_memory_usage(&usage);
  if (usage.symm_allocations != 1) Fail("the late call left an allocation");
  static_cast<void>(group);
  // The group cannot be shut down: a rank's call is still on its communicator.
  LeaveWithoutShutdown();
}

// The last rank leaves a call out. The others' device waits for it: their group ends with its name, their calls throw,
// and shutdown returns. A call that was refused before is told too.
int MissingRank() {
  if (!ReadHostStats() && std::getenv("NVTE_EP_TEST_LEAVE_KERNELS") == nullptr) {
    std::printf("skipped: kernels spin until the process ends, which processes that share a GPU do not outlive\n");
    return Leave();
  }
  setenv("NVTE_EP_TIMEOUT_MS", "1500", 1);
  setenv("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "30000", 1);
  auto* const group = new Group(Shape());
  // Kernels are compiled and loaded before time counts: 30 calls.
  RunSteps(*group);
  auto* const layer = new Layer(2, 1);
  auto* const step = new Step<BFloat16>(*group, *layer, SomeRouting(*group, 1), 1);
  const auto refused = [](const std::function<void()>& call, const std::vector<const char*>& texts) {
    try {
      call();
      Fail("a call of a group that has ended went through");
    } catch (const std::exception& error) {
      for (const char* text : texts) {
        if (std::strstr(error.what(), text) == nullptr) Fail(error.what());
      }
    }
  };
  const int last = World::Get().size() - 1;
  const std::string missing = "rank " + std::to_string(last);
  step->Prepare();
  World::Get().Wait();
  const auto start = std::chrono::steady_clock::now();
  if (World::Get().rank() == last) {
    DispatchArgs args = step->dispatch_args();
    args.tokens = nullptr;
    refused([&] { args.Call(); }, {"nvte_ep_dispatch: tokens"});
    std::this_thread::sleep_for(std::chrono::milliseconds(4000));
    // The others have given up, so this one's call cannot end either.
    step->Dispatch();
    std::this_thread::sleep_for(std::chrono::milliseconds(2000));
  } else {
    step->Dispatch();
    std::this_thread::sleep_for(std::chrono::milliseconds(3000));
    const std::string made = missing + " has made 31 calls, and its next was refused: nvte_ep_dispatch: tokens";
    refused([&] { step->Combine(); },
            {"nvte_ep_combine: the group has ended: nvte_ep_dispatch", "call 32", made.c_str()});
    refused([&] { step->Prepare(); }, {"the group has ended"});
    refused([] { nvte_ep_shutdown(); }, {"the group has ended", made.c_str()});
  }
  if (std::chrono::steady_clock::now() - start > std::chrono::seconds(20)) Fail("the ends took too long");
  static_cast<void>(group);
  LeaveWithoutShutdown();
}

// The last rank leaves a dispatch of a low-latency group out and shuts it down. The others' device waits for it; every
// rank's shutdown ends with what the other ranks did.
int LowLatencyMissingRank() {
  if (!ReadHostStats()) {
    std::printf("skipped: kernels spin until the process ends\n");
    return Leave();
  }
  // Long enough that none of the texts below can come from a limit.
  setenv("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "600000", 1);
  auto* const group = new LlGroup(LlGroup::Config(64, 4));
  auto* const handle = new LlHandle;
  auto* const step = new LlStep<BFloat16>(*group, RandomRouting(EvenRows(3), 4, 64, 1), 1);
  step->Run(*handle);
  World::Get().Wait();
  const int last = World::Get().size() - 1;
  const bool is_missing = World::Get().rank() == last;
  if (!is_missing) step->Dispatch(*handle);
  const std::string theirs =
      is_missing ? "rank 0 "
                 : "rank " + std::to_string(last) + " made another call as its number 3, nvte_ep_ext_ll_shutdown";
  try {
    nvte_ep_ext_ll_shutdown();
    Fail("a shutdown went through");
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), theirs.c_str()) == nullptr) Fail(error.what());
  }
  LeaveWithoutShutdown();
}

// A call of the last rank is refused, and the exception shuts the group down on its way, as that of nvte_ep::Group
// does. Nobody has seen the exception yet, so the shutdown says early what was refused. The others are told it too, and
// the last rank's shutdown ends as soon as one of them makes another call, with nothing left on its device.
int RefusedOnOneRank() {
  if (!ReadHostStats()) {
    std::printf("skipped: kernels spin until the process ends\n");
    return Leave();
  }
  // Long enough that none of the texts below can come from a limit.
  setenv("NVTE_EP_SHUTDOWN_TIMEOUT_MS", "600000", 1);
  auto* const group = new Group(Shape());
  RunSteps(*group);
  auto* const layer = new Layer(2, 1);
  auto* const step = new Step<BFloat16>(*group, *layer, SomeRouting(*group, 1), 1);
  const int last = World::Get().size() - 1;
  const auto refused = [&]() -> std::string {
    DispatchArgs args = step->dispatch_args();
    args.tokens = args.topk_idx;
    try {
      args.Call();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  const auto until = [](const std::function<bool()>& holds, const char* what) {
    const auto start = std::chrono::steady_clock::now();
    while (!holds()) {
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(20)) return Fail(what);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  step->Prepare();
  World::Get().Wait();
  const std::string refusal = "nvte_ep_dispatch: tokens must ";
  if (World::Get().rank() == last) {
    const Stderr messages;
    if (refused().find(refusal) != 0) Fail("the dispatch was not refused");
    int device = 0;
    TEST_CUDA(cudaGetDevice(&device));
    std::string end;
    std::thread shutdown([&] {
      TEST_CUDA(cudaSetDevice(device));
      try {
        nvte_ep_shutdown();
      } catch (const std::exception& error) {
        end = error.what();
      }
    });
    until(
        [&] {
          return messages.Text().find("; on this rank, this was refused before: " + refusal) != std::string::npos;
        },
        "the shutdown that waits did not say what was refused");
    if (messages.Text().find(": rank 0 has made 31 calls") == std::string::npos) Fail("nor for whom it waits");
    MPI_Barrier(MPI_COMM_WORLD);
    shutdown.join();
    if (end.find("nvte_ep_shutdown: ") != 0 || end.find("made another call as its number 32") == std::string::npos)
      Fail(("the shutdown ended otherwise: " + end).c_str());
    // Would wait for a collective that nobody else joins.
    TEST_CUDA(cudaDeviceSynchronize());
  } else {
    MPI_Barrier(MPI_COMM_WORLD);
    step->Dispatch();
    std::string text;
    until([&] { return (text = refused()).find("the group has ended") != std::string::npos; }, "the group did not end");
    const std::string cause =
        "rank " + std::to_string(last) +
        " made another call as its number 32, nvte_ep_shutdown, after this was refused: " + refusal;
    if (text.find(cause) == std::string::npos) Fail(text.c_str());
  }
  static_cast<void>(group);
  LeaveWithoutShutdown();
}

// The last rank stops in the middle of more calls than are watched one by one.
int MissingRankFarAhead() {
  if (!ReadHostStats()) {
    std::printf("skipped: kernels spin until the process ends\n");
    return Leave();
  }
  setenv("NVTE_EP_TIMEOUT_MS", "1500", 1);
  auto* const group = new Group(Shape());
  auto* const layer = new Layer(2, 1);
  auto* const step = new Step<BFloat16>(*group, *layer, SomeRouting(*group, 1), 1);
  const bool last = World::Get().rank() == World::Get().size() - 1;
  step->Prepare();
  for (int i = 0; i < (last ? 90 : 120); ++i) step->DispatchWithoutWeights();
  std::this_thread::sleep_for(std::chrono::milliseconds(4000));
  if (!last) {
    try {
      step->Prepare();
      Fail("a call of a group that has ended went through");
    } catch (const std::exception& error) {
      if (std::strstr(error.what(), " has made 91 calls") == nullptr) Fail(error.what());
    }
  }
  static_cast<void>(group);
  LeaveWithoutShutdown();
}

// One rank replays a graph where the others call, and ranks are late afterwards: nothing is wrong with that, though
// their numbers of calls differ. Nor is it with a call that failed on one rank and is made again.
int GraphsMeetCalls() {
  Group group(Shape());
  Layer layer(2, 1);
  Step<BFloat16> step(group, layer, SomeRouting(group, 1), 1);
  const bool first = World::Get().rank() == 0;
  const auto late = [&] {
    if (!first) std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  };
  step.ForwardAndBackward();
  std::unique_ptr<Graph> graph;
  if (first) graph = std::make_unique<Graph>([&] { step.dispatch_args().Call(); });
  for (int i = 0; i < 3; ++i) {
    step.Prepare();
    if (first) {
      graph->Launch();
    } else {
      step.Dispatch();
    }
    step.Combine();
    World::Get().Wait();
  }
  late();
  step.ForwardAndBackward();
  late();
  CheckValues();
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) Fail("a step gave wrong values");
  return Leave();
}

// A mistake, and the library says so: the communicator has to outlive shutdown.
int DestroyThenShutdown() {
  if (!ReadHostStats()) {
    std::printf("skipped: NCCL does not recognise a communicator that is gone\n");
    return Leave();
  }
  Group* group = new Group(Shape());
  RunSteps(*group);
  World::Get().DestroyComm();
  try {
    nvte_ep_shutdown();
    Fail("shutdown went through without a communicator");
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), "nvte_ep_shutdown: ") != error.what()) Fail(error.what());
    if (std::strstr(error.what(), "is not a live communicator") == nullptr) Fail(error.what());
  }
  nvte_ep_shutdown();
  return Leave();
}

// The communicator was aborted, as a framework does that has lost a rank. Shutdown says that it is gone, and a group
// over another one works.
int AbortThenShutdown() {
  if (!ReadHostStats()) {
    std::printf("skipped: NCCL does not recognise a communicator that is gone\n");
    return Leave();
  }
  ncclComm_t comm = World::Get().MakeComm(World::Get().size());
  auto* const aborted = new Group(Shape().Config(), comm);
  RunSteps(*aborted);
  MPI_Barrier(MPI_COMM_WORLD);
  TEST_NCCL(ncclCommAbort(comm));
  try {
    nvte_ep_shutdown();
    Fail("shutdown went through without a communicator");
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), "nvte_ep_shutdown: ") != error.what()) Fail(error.what());
    if (std::strstr(error.what(), "communicator") == nullptr) Fail(error.what());
  }
  nvte_ep_shutdown();
  {
    Group group(Shape());
    RunSteps(group);
  }
  return Leave();
}

// More rows than rank 0 takes, in a group that traps: its device fails for good, and every later call says why it may
// have, rather than abort in a library below.
int OverflowThatTraps() {
  GroupShape shape = Shape();
  NVTEEpGroupConfig config = shape.Config();
  config.max_recv_tokens_per_rank = 64;
  auto* const group = new Group(config);
  auto* const layer = new Layer(2, 1);
  const Routing routing =
      MakeRouting(std::vector<int>(World::Get().size(), 64), 2, [](int, int row, int k) { return (row + k) % 4; });
  auto* const step = new Step<BFloat16>(*group, *layer, routing, 9);
  if (OnNativeEngine()) {
    // No trap: the rank's next call throws, and the steps after it work.
    step->Prepare();
    World::Get().Wait();
    if (World::Get().rank() == 0) {
      try {
        step->Dispatch();
        Fail("the overflow was not told");
      } catch (const std::exception& error) {
        for (const char* part : {"nvte_ep_dispatch", "needed", "max_recv_tokens_per_rank, 64", "overflow = drop"}) {
          if (std::strstr(error.what(), part) == nullptr) Fail(error.what());
        }
      }
    }
    const Routing few =
        MakeRouting(std::vector<int>(World::Get().size(), 4), 2, [](int, int row, int k) { return (row + k) % 4; });
    Step<BFloat16>(*group, *layer, few, 10).ForwardAndBackward();
    delete step;
    delete layer;
    delete group;
    CheckNothingIsLeft(1);
    return Leave();
  }
  if (World::Get().rank() != 0) {
    step->Prepare();
  } else {
    try {
      step->Prepare();
    } catch (const std::exception& error) {
      // The device was quicker than the call.
      if (std::strstr(error.what(), "overflow = drop") == nullptr) Fail(error.what());
    }
    const auto explains = [](const char* function, const std::function<void()>& call) {
      try {
        call();
        Fail(function);
      } catch (const std::exception& error) {
        for (const char* part : {function, "max_recv_tokens_per_rank, 64", "overflow = drop"}) {
          if (std::strstr(error.what(), part) == nullptr) Fail(error.what());
        }
      }
    };
    NVTEEpExtRecvTotals totals = {};
    totals.struct_size = sizeof totals;
    explains("nvte_ep_ext_recv_totals",
             [&] { nvte_ep_ext_recv_totals(HandleMemory(layer->handle()), &totals, World::Get().stream()); });
    explains("nvte_ep_prepare", [&] { step->Prepare(); });
    explains("nvte_ep_dispatch", [&] { step->Dispatch(); });
    explains("nvte_ep_shutdown", [] { nvte_ep_shutdown(); });
  }
  // Nothing can be given back to a device that has failed, nor to a group without rank 0.
  LeaveWithoutShutdown();
}

struct Order {
  const char* name;
  int (*run)();
};

constexpr Order kOrders[] = {
    {"shutdown_then_destroy", ShutdownThenDestroy},
    {"exit_without_shutdown", ExitWithoutShutdown},
    {"shutdown_twice", ShutdownTwice},
    {"shutdown_initialize_shutdown", ShutdownInitializeShutdown},
    {"indices_that_are_no_experts", IndicesThatAreNoExperts},
    {"indices_by_default", IndicesByDefault},
    {"signals_are_the_programs", SignalsAreThePrograms},
    {"no_thread_for_the_watch", NoThreadForTheWatch},
    {"exception", Exception},
    {"library_exception", LibraryException},
    {"shutdown_at_exit", ShutdownAtExit},
    {"shutdown_in_static_destructor", ShutdownInStaticDestructor},
    {"one_rank_late", OneRankLate},
    {"shutdown_with_queued_work", ShutdownWithQueuedWork},
    {"shutdown_from_another_thread", ShutdownFromAnotherThread},
    {"shutdown_in_forked_child", ShutdownInForkedChild},
    {"forked_child_exits", ForkedChildExits},
    {"calls_in_forked_child", CallsInForkedChild},
    {"rank_0_exits_early", Rank0ExitsEarly},
    {"skipped_layer", SkippedLayer},
    {"late_initialize", LateInitialize},
    {"late_symm_alloc", LateSymmAlloc},
    {"missing_rank", MissingRank},
    {"low_latency_missing_rank", LowLatencyMissingRank},
    {"refused_on_one_rank", RefusedOnOneRank},
    {"missing_rank_far_ahead", MissingRankFarAhead},
    {"graphs_meet_calls", GraphsMeetCalls},
    {"destroy_then_shutdown", DestroyThenShutdown},
    {"abort_then_shutdown", AbortThenShutdown},
    // Last: on a GPU that ranks share, this fails the device for all of its processes.
    {"overflow_that_traps", OverflowThatTraps},
};

}  // namespace
}  // namespace test

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const test::Order& order : test::kOrders) std::printf("%s\n", order.name);
    return 0;
  }
  for (const test::Order& order : test::kOrders) {
    if (argc != 2 || std::strcmp(argv[1], order.name) != 0) continue;
    test::World::Start(&argc, &argv);
    try {
      return order.run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[rank %d] %s: %s\n", test::World::Get().rank(), order.name, error.what());
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  std::fprintf(stderr, "usage: %s --list | ORDER, one of\n", argv[0]);
  for (const test::Order& order : test::kOrders) std::fprintf(stderr, "  %s\n", order.name);
  return 2;
}
