// How errors cross from the library into C++: one process, on the host runtime or without any runtime.

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/ep_calls.h"
#include "support/expect_error.h"
#include "support/single.h"

namespace test {
namespace {

std::size_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

bool HaveGpu() { return access("/dev/nvidiactl", F_OK) == 0; }

// The file that a library was loaded from.
std::string FileOf(const char* library, const char* function) {
  Dl_info info = {};
  dladdr(reinterpret_cast<void*>(SharedLibrary(library).Get<void()>(function)), &info);
  return std::filesystem::canonical(info.dli_fname);
}

// A communicator of one rank on the host runtime.
class OneRank {
 public:
  OneRank() {
    struct Id {
      char bytes[128];
    } id;
    Check(library_.Get<int(Id*)>("ncclGetUniqueId")(&id), "ncclGetUniqueId");
    Check(library_.Get<int(void**, int, Id, int)>("ncclCommInitRank")(&comm_, 1, id, 0), "ncclCommInitRank");
  }
  ~OneRank() { library_.Get<int(void*)>("ncclCommDestroy")(comm_); }
  OneRank(const OneRank&) = delete;
  OneRank& operator=(const OneRank&) = delete;

  void* get() const { return comm_; }

 private:
  static void Check(int status, const char* call) {
    if (status != 0) throw std::runtime_error(std::string(call) + " returned " + std::to_string(status));
  }

  SharedLibrary library_{"libnccl.so.2"};
  void* comm_ = nullptr;
};

// A group of one rank with one layer of 4 tokens, and a handle that is registered and not prepared yet.
struct OneLayer {
  OneLayer() {
    nvte_ep_initialize(comm.get(), EpCalls().config());
    NVTEEpLayerConfig layer = {};
    layer.top_k = 2;
    std::size_t bytes = 0;
    handle.id = nvte_ep_register_layer(layer, &bytes);
    mem = Tensor(device.Allocate(bytes), kNVTEByte, {bytes});
    handle.mem = mem.get();
  }

  // Returns when the device has the routing.
  void Prepare(const std::array<std::int64_t, 8>& experts) {
    device.Write(nvte_tensor_data(topk_idx.get()), experts.data(), sizeof experts);
    nvte_ep_prepare(handle, topk_idx.get(), counts.get(), 0, nullptr);
    device.Read(nvte_tensor_data(counts.get()), 16);
  }

  const OneRank comm;
  Device device;
  NVTEEpHandle handle = {};
  Tensor mem;
  const Tensor topk_idx{device.Allocate(64), kNVTEInt64, {4, 2}};
  const Tensor counts{device.Allocate(16), kNVTEInt32, {4}};
};

TEST(Boundary, EveryCallButShutdownThrowsBeforeInitialize) {
  EpCalls calls;
  for (const EpCalls::Call& call : calls.NeedingGroup()) {
    EXPECT_TRUE(Throws(call.name, {"nvte_ep_initialize"}, call.run));
  }
  for (const EpCalls::Call& call : calls.NeedingGroupWithNulls()) EXPECT_TRUE(Throws(call.name, {}, call.run));
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"ep_comm", "null"}, [&] { nvte_ep_initialize(nullptr, calls.config()); }));
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"ep_size", "got 0"}, [] { nvte_ep_initialize(nullptr, {}); }));
}

TEST(Boundary, ShutdownBeforeInitializeIsNothing) {
  EXPECT_NO_THROW(nvte_ep_shutdown());
  EXPECT_NO_THROW(nvte_ep_shutdown());
}

TEST(Boundary, CaughtAsStdException) {
  EpCalls calls;
  for (const EpCalls::Call& call : calls.NeedingGroup()) {
    bool caught = false;
    try {
      call.run();
    } catch (const std::exception& error) {
      caught = true;
      EXPECT_NE(dynamic_cast<const std::runtime_error*>(&error), nullptr);
      EXPECT_EQ(std::string(error.what()).rfind(call.name + ": ", 0), 0u) << error.what();
    }
    EXPECT_TRUE(caught) << call.name;
  }
}

TEST(Boundary, CaughtByEllipsisAndRethrown) {
  EpCalls calls;
  const EpCalls::Call call = calls.NeedingGroup().back();
  std::exception_ptr kept;
  try {
    call.run();
  } catch (...) {
    kept = std::current_exception();
  }
  ASSERT_TRUE(kept != nullptr);
  // The text belongs to the exception: it outlives other errors.
  for (int i = 0; i < 100; ++i) EXPECT_THROW(nvte_ep_register_layer({}, nullptr), std::runtime_error);
  EXPECT_TRUE(Throws(call.name, {"nvte_ep_initialize"}, [&] { std::rethrow_exception(kept); }));
}

struct Counted {
  explicit Counted(int* count) : count(count) { ++*count; }
  ~Counted() { --*count; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  int* count;
};

int Nested(int depth, int* live, const EpCalls::Call& call) {
  const Counted counted(live);
  const std::string text(1000, 'x');
  const std::vector<int> numbers(1000, depth);
  if (depth == 0) {
    EXPECT_EQ(*live, 21);
    call.run();
    return 0;
  }
  return Nested(depth - 1, live, call) + static_cast<int>(text.size() + numbers.size());
}

TEST(Boundary, DestructorsOfTheCallerRun) {
  EpCalls calls;
  for (const EpCalls::Call& call : calls.NeedingGroup()) {
    int live = 0;
    EXPECT_THROW(Nested(20, &live, call), std::runtime_error) << call.name;
    EXPECT_EQ(live, 0) << call.name;
  }
}

// A destructor that runs because of one exception may call into the library and catch another.
TEST(Boundary, ThrowsWhileAnotherExceptionUnwinds) {
  EpCalls calls;
  const EpCalls::Call call = calls.NeedingGroup().back();
  struct Inner {
    const EpCalls::Call& call;
    int* caught;
    ~Inner() {
      try {
        call.run();
      } catch (const std::runtime_error&) {
        ++*caught;
      }
    }
  };
  int caught = 0;
  try {
    const Inner inner{call, &caught};
    call.run();
  } catch (const std::runtime_error&) {
    ++caught;
  }
  EXPECT_EQ(caught, 2);
}

TEST(Boundary, ManyThrowsKeepNoMemory) {
  EpCalls calls;
  const std::vector<EpCalls::Call> all = calls.NeedingGroup();
  int caught = 0;
  const auto throw_often = [&](int times) {
    for (int i = 0; i < times; ++i) {
      try {
        all[i % all.size()].run();
      } catch (const std::runtime_error&) {
        ++caught;
      }
    }
  };
  throw_often(5000);
  const std::size_t before = ResidentBytes();
  throw_often(100000);
  const std::size_t after = ResidentBytes();
  EXPECT_EQ(caught, 105000);
  EXPECT_LT(after, before + (std::size_t{1} << 20));
}

TEST(Boundary, ThreadsThrowAtTheSameTime) {
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&right] {
      EpCalls calls;
      const std::vector<EpCalls::Call> all = calls.NeedingGroup();
      for (int i = 0; i < 3000; ++i) {
        const EpCalls::Call& call = all[i % all.size()];
        try {
          call.run();
        } catch (const std::runtime_error& error) {
          // Every thread gets its own text.
          if (std::string(error.what()).rfind(call.name + ": ", 0) == 0) ++right;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4 * 3000);
}

TEST(Boundary, VersionNamesLibraryAndInterface) {
  const std::string version = nvte_ep_ext_version();
  EXPECT_NE(version.find("libnvte_ep"), std::string::npos) << version;
  EXPECT_NE(version.find("register_layer"), std::string::npos) << version;
  EXPECT_EQ(nvte_ep_ext_version(), nvte_ep_ext_version()) << "the string is static";
}

TEST(Boundary, TheNextValidCallWorks) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs NVTE_EP_RUNTIME=host";
  EpCalls calls;
  const OneRank comm;
  for (int round = 0; round < 3; ++round) {
    for (const EpCalls::Call& call : calls.NeedingGroup()) EXPECT_THROW(call.run(), std::runtime_error);
    NVTEEpGroupConfig bad = calls.config();
    bad.hidden_dim = 7;
    EXPECT_TRUE(Throws("nvte_ep_initialize", {"hidden_dim", "7"}, [&] { nvte_ep_initialize(comm.get(), bad); }));
    ASSERT_NO_THROW(nvte_ep_initialize(comm.get(), calls.config()));
    EXPECT_TRUE(
        Throws("nvte_ep_initialize", {"nvte_ep_shutdown"}, [&] { nvte_ep_initialize(comm.get(), calls.config()); }));
    NVTEEpLayerConfig layer = {};
    layer.top_k = 99;
    std::size_t bytes = 0;
    EXPECT_TRUE(Throws("nvte_ep_register_layer", {"top_k", "99"}, [&] { nvte_ep_register_layer(layer, &bytes); }));
    layer.top_k = 2;
    EXPECT_NE(nvte_ep_register_layer(layer, &bytes), 0u);
    EXPECT_GT(bytes, 0u);
    ASSERT_NO_THROW(nvte_ep_shutdown());
  }
}

// The same with a group behind the calls, whose locks a throw must not leave held.
TEST(Boundary, ThreadsThrowWithAGroup) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs NVTE_EP_RUNTIME=host";
  EpCalls calls;
  const OneRank comm;
  nvte_ep_initialize(comm.get(), calls.config());
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&right, thread] {
      NVTEEpLayerConfig layer = {};
      for (int i = 0; i < 500; ++i) {
        layer.top_k = -1 - thread;
        std::size_t bytes = 0;
        try {
          nvte_ep_register_layer(layer, &bytes);
        } catch (const std::runtime_error& error) {
          if (std::string(error.what()).find("got " + std::to_string(layer.top_k)) != std::string::npos) ++right;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 4 * 500);
  NVTEEpLayerConfig layer = {};
  layer.top_k = 2;
  std::size_t bytes = 0;
  EXPECT_NE(nvte_ep_register_layer(layer, &bytes), 0u);
  ASSERT_NO_THROW(nvte_ep_shutdown());
}

// In a process of its own: the environment is read at initialize.
TEST(Boundary, UnknownRuntimeIsRefusedByName) {
  // Started anew, not forked off: earlier tests have used a group.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("NVTE_EP_RUNTIME", "gpu", 1);
        EpCalls calls;
        char not_a_communicator[4096] = {};
        const testing::AssertionResult result =
            Throws("nvte_ep_initialize", {"NVTE_EP_RUNTIME", "cuda", "host", "got gpu"},
                   [&] { nvte_ep_initialize(not_a_communicator, calls.config()); });
        std::fprintf(stderr, "%s\n", result.message());
        _exit(result ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// The folder host_runtime is on the library path, and the variable is forgotten.
TEST(Boundary, TheHostRuntimeThatNobodyAskedForIsNamed) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs the library path of the host runtime";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        unsetenv("NVTE_EP_RUNTIME");
        EpCalls calls;
        const OneRank comm;
        const testing::AssertionResult result = Throws(
            "nvte_ep_initialize", {"the CUDA driver is the host runtime here (", "/lib", "set NVTE_EP_RUNTIME=host"},
            [&] { nvte_ep_initialize(comm.get(), calls.config()); });
        std::fprintf(stderr, "%s\n", result.message());
        _exit(result ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Boundary, TwoCopiesOfTheHostRuntimeAreNamed) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs NVTE_EP_RUNTIME=host";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const std::string own = FileOf("libnccl.so.2", "ncclCommCount");
        const std::string folder = testing::TempDir() + "nvte_ep_copies_" + std::to_string(getpid());
        const std::string copy = folder + "/libnccl_copy.so";
        std::filesystem::create_directory(folder);
        std::filesystem::copy_file(own, copy);
        setenv("NVTE_EP_HOST_LIB", copy.c_str(), 1);
        EpCalls calls;
        const OneRank comm;
        const testing::AssertionResult result =
            Throws("nvte_ep_initialize", {"two copies of the host runtime", own, copy, "lead to one file"},
                   [&] { nvte_ep_initialize(comm.get(), calls.config()); });
        std::filesystem::remove_all(folder);
        std::fprintf(stderr, "%s\n", result.message());
        _exit(result ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

int Occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Combines rows that nobody has written; whether the error and the one line on stderr name the caller's function and
// argument.
bool UnwrittenRowsAreReportedInOurNames() {
  testing::internal::CaptureStderr();
  OneLayer one;
  const Tensor expert_out(one.device.Allocate(1024), kNVTEBFloat16, {8, 64});
  const Tensor result(one.device.Allocate(512), kNVTEBFloat16, {4, 64});
  one.Prepare({0, 1, 1, 2, 2, 3, 3, 0});
  nvte_ep_combine(one.handle, expert_out.get(), {}, result.get(), nullptr);
  const testing::AssertionResult thrown = Throws(
      "nvte_ep_shutdown", {"rank 0, nvte_ep_combine: expert_out: row 0 is read", "ncclEpCombine: inputs.tokens)"},
      &nvte_ep_shutdown);
  const std::string printed = testing::internal::GetCapturedStderr();
  std::fprintf(stderr, "%s\n%s\n", thrown.message(), printed.c_str());
  return thrown && Occurrences(printed, "unwritten-memory") == 1;
}

TEST(Boundary, ReportsNameTheCallersArguments) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs the contract checker";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(_exit(UnwrittenRowsAreReportedInOurNames() ? 0 : 1), testing::ExitedWithCode(0), "");
}

// Prepares a handle for other tokens before the gradients of its step; whether that is one report, in the caller's
// names. The dispatch has no routing weights, which NCCL EP takes for a backward pass.
bool GradientsOfAnotherRoutingAreReported() {
  testing::internal::CaptureStderr();
  OneLayer one;
  const std::vector<char> zeroes(1024);
  const auto rows = [&](std::size_t count) {
    void* const data = one.device.Allocate(count * 128);
    one.device.Write(data, zeroes.data(), count * 128);
    return Tensor(data, kNVTEBFloat16, {count, 64});
  };
  const Tensor tokens = rows(4), received = rows(8), result = rows(4);
  one.Prepare({0, 1, 1, 2, 2, 3, 3, 0});
  nvte_ep_dispatch(one.handle, one.topk_idx.get(), tokens.get(), {}, nullptr, {}, received.get(), {}, nullptr, {},
                   nullptr);
  nvte_ep_combine(one.handle, received.get(), {}, result.get(), nullptr);
  one.Prepare({3, 2, 2, 1, 1, 0, 0, 3});
  nvte_ep_combine_bwd(one.handle, result.get(), {}, received.get(), {}, nullptr);
  nvte_ep_shutdown();
  const std::string printed = testing::internal::GetCapturedStderr();
  std::fprintf(stderr, "%s\n", printed.c_str());
  return Occurrences(printed, "routing-changed") == 1 &&
         Occurrences(printed,
                     "nvte_ep_combine_bwd: handle_mem holds the routing of operation 4, which no forward pass") == 1;
}

TEST(Boundary, GradientsOfAnotherRoutingAreReported) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs the contract checker";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(_exit(GradientsOfAnotherRoutingAreReported() ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(Boundary, WithoutAGpuTheErrorNamesTheHostRuntime) {
  if (OnHostRuntime()) GTEST_SKIP() << "NVTE_EP_RUNTIME=host";
  if (HaveGpu()) GTEST_SKIP() << "this machine has a GPU";
  EpCalls calls;
  char not_a_communicator[4096] = {};
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Throws("nvte_ep_initialize", {"NVTE_EP_RUNTIME=host"},
                       [&] { nvte_ep_initialize(not_a_communicator, calls.config()); }));
  }
  EXPECT_NO_THROW(nvte_ep_shutdown());
  for (const EpCalls::Call& call : calls.NeedingGroup()) {
    EXPECT_TRUE(Throws(call.name, {"nvte_ep_initialize"}, call.run));
  }
}

}  // namespace
}  // namespace test
