// Configurations that carry their own size, and the rules of the fields that only TransformerEngine's ABI has.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ep/rig.h"

namespace test {
namespace {

// A copy of the first `bytes` bytes of a structure, which end where readable memory ends. What is longer than the
// structure is garbage.
class AtTheEndOfMemory {
 public:
  AtTheEndOfMemory(const void* structure, std::size_t size, std::size_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    memory_ = mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    unsigned char* const base = static_cast<unsigned char*>(memory_);
    std::memset(base, 0xa5, page_);
    copy_ = base + page_ - bytes;
    std::memcpy(copy_, structure, bytes < size ? bytes : size);
    mprotect(base + page_, page_, PROT_NONE);
  }
  ~AtTheEndOfMemory() { munmap(memory_, 2 * page_); }
  AtTheEndOfMemory(const AtTheEndOfMemory&) = delete;
  AtTheEndOfMemory& operator=(const AtTheEndOfMemory&) = delete;

  template <typename Structure>
  const Structure* As() const {
    return reinterpret_cast<const Structure*>(copy_);
  }

 private:
  std::size_t page_;
  void* memory_ = nullptr;
  unsigned char* copy_ = nullptr;
};

constexpr std::size_t kGroupBase = 40;
constexpr std::size_t kLayerBase = 24;
static_assert(sizeof(NVTEEpGroupConfig) == 48 && sizeof(NVTEEpLayerConfig) == 24);

class TeGroupSize : public testing::Test {
 protected:
  // Initializes from a structure of `bytes` bytes that says `struct_size`.
  static void Make(NVTEEpGroupConfig config, std::size_t struct_size, std::size_t bytes) {
    config.struct_size = struct_size;
    const AtTheEndOfMemory copy(&config, sizeof config, bytes);
    nvte_ep_initialize(World::Get().comm(), copy.As<NVTEEpGroupConfig>());
  }
  // The group works: its handle memory has a size.
  static void Works() {
    EXPECT_GT(Register(2, 0).bytes, 0u);
    nvte_ep_shutdown();
  }
  void TearDown() override {
    Group group{GroupShape()};
    Layer layer(2, 1);
    Step<BFloat16>(group, layer, RandomRouting(UnevenRows(9), 2, Experts(group), 6400), 6400).ForwardAndBackward();
  }
};

TEST_F(TeGroupSize, BaseIsReadAloneAndTheRestIsZero) {
  NVTEEpGroupConfig config = GroupShape().Config();
  // Each would be refused if it were read.
  config.num_topk = -7;
  config.drop_on_overflow = 1;
  Make(config, kGroupBase, kGroupBase);
  Works();
  Make(config, 0, kGroupBase);
  Works();
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"num_topk", "-7"}, [&] { Make(config, sizeof config, sizeof config); }));
}

TEST_F(TeGroupSize, Current) {
  NVTEEpGroupConfig config = GroupShape().Config();
  config.num_topk = 2;
  Make(config, sizeof config, sizeof config);
  EXPECT_TRUE(Throws("nvte_ep_handle_mem_size", {"top_k", "num_topk", "2", "got 3"}, [] { Register(3, 0); }));
  Works();
}

TEST_F(TeGroupSize, ANewerCallersIsTruncated) {
  NVTEEpGroupConfig config = GroupShape().Config();
  config.num_topk = 2;
  for (const std::size_t more : {8, 64}) {
    Make(config, sizeof config + more, sizeof config + more);
    EXPECT_TRUE(Throws("nvte_ep_handle_mem_size", {"top_k", "num_topk"}, [] { Register(3, 0); }));
    Works();
  }
}

TEST_F(TeGroupSize, BelowTheBase) {
  for (const std::size_t size : {1, 8, 39}) {
    EXPECT_TRUE(Throws("nvte_ep_initialize", {"group_config->struct_size", "40", "got " + std::to_string(size)},
                       [&] { Make(GroupShape().Config(), size, sizeof(NVTEEpGroupConfig)); }));
  }
}

TEST_F(TeGroupSize, Null) {
  EXPECT_TRUE(
      Throws("nvte_ep_initialize", {"group_config", "null"}, [] { nvte_ep_initialize(World::Get().comm(), nullptr); }));
}

class TeLayerSize : public ErrorTest {
 protected:
  static void EveryCall(std::size_t struct_size, std::size_t bytes) {
    NVTEEpLayerConfig config = LayerConfig(kTopK, kAlignment);
    config.struct_size = struct_size;
    const AtTheEndOfMemory copy(&config, sizeof config, bytes);
    const NVTEEpLayerConfig* const layer_cfg = copy.As<NVTEEpLayerConfig>();
    EXPECT_EQ(nvte_ep_handle_mem_size(layer_cfg), rig().layer.memory().size());
    const PrepareArgs args = step().prepare_args();
    nvte_ep_prepare(args.handle, args.topk_idx, args.token_counts, args.total, layer_cfg, World::Get().stream());
    step().CheckCounts();
    step().Dispatch();
    step().CheckReceived();
  }
};

TEST_F(TeLayerSize, AcceptedSizes) {
  for (const std::size_t size : {kLayerBase, kLayerBase + 8, kLayerBase + 64}) {
    SCOPED_TRACE(std::to_string(size) + " bytes");
    EveryCall(size, size);
  }
  EveryCall(0, kLayerBase);
}

TEST_F(TeLayerSize, BelowTheBase) {
  for (const std::size_t size : {1, 8, 23}) {
    NVTEEpLayerConfig config = LayerConfig(kTopK, kAlignment);
    config.struct_size = size;
    const std::vector<std::string> parts = {"layer_cfg->struct_size", "24", "got " + std::to_string(size)};
    const PrepareArgs args = step().prepare_args();
    Refuses("nvte_ep_handle_mem_size", parts, [&] { nvte_ep_handle_mem_size(&config); });
    Refuses("nvte_ep_prepare", parts, [&] {
      nvte_ep_prepare(args.handle, args.topk_idx, args.token_counts, args.total, &config, World::Get().stream());
    });
  }
}

class TeGroupErrors : public GroupConfigTest {};

TEST_F(TeGroupErrors, EagerMode) {
  const auto eager = [](NVTEEpGroupConfig& config) {
    config.max_recv_tokens_per_rank = 0;
    config.num_topk = 2;
  };
  Refuses(
      [&](NVTEEpGroupConfig& config) {
        eager(config);
        config.zero_copy = 1;
      },
      {"group_config.zero_copy", "eager"});
  Refuses(
      [&](NVTEEpGroupConfig& config) {
        eager(config);
        config.drop_on_overflow = 1;
      },
      {"group_config.drop_on_overflow", "eager"});
  Refuses(
      [&](NVTEEpGroupConfig& config) {
        eager(config);
        config.num_topk = 0;
      },
      {"group_config.num_topk", "eager", "got 0"});
}

TEST_F(TeGroupErrors, NumTopk) {
  Refuses([](NVTEEpGroupConfig& config) { config.num_topk = -1; }, {"group_config.num_topk", "-1"});
  const int experts = 4 * Ranks();
  Refuses([&](NVTEEpGroupConfig& config) { config.num_topk = experts + 1; },
          {"group_config.num_topk", std::to_string(experts), std::to_string(experts + 1)});
}

// Flags are true or false, as in C.
TEST_F(TeGroupErrors, FlagsOfAnyValueAreTrue) {
  GroupShape shape;
  for (const int flag : {1, 2, -1}) {
    NVTEEpGroupConfig config = Dropping(shape, 64).Config();
    config.drop_on_overflow = flag;
    Group group(config);
    Layer layer(2, 1);
    // Twice as many rows as rank 0 takes.
    const Routing routing =
        MakeRouting(EvenRows(64 / Ranks()), 2, [&](int, int row, int k) { return (row + k) % group.local_experts(); });
    Step<BFloat16>(group, layer, routing, 6410).ForwardAndBackward();
  }
}

}  // namespace
}  // namespace test
