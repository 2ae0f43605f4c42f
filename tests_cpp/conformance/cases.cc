#include "conformance/cases.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

namespace conformance {

namespace {

constexpr int kCasesPerGroup = 10;

// SplitMix64. The C++ library's distributions differ between platforms, and a table must not.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next() {
    std::uint64_t word = state_ += 0x9e3779b97f4a7c15ull;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
    return word ^ (word >> 31);
  }
  int Between(int least, int most) { return least + static_cast<int>(Next() % (most - least + 1)); }
  bool Percent(int percent) { return Between(0, 99) < percent; }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Next() % values.size()];
  }

 private:
  std::uint64_t state_;
};

constexpr Kernels kKernels[] = {
    {512, DType::kBFloat16, 2, 4},   {512, DType::kBFloat16, 8, 4},   {128, DType::kFloat32, 4, 4},
    {256, DType::kFloat16, 4, 4},    {256, DType::kBFloat16, 1, 196}, {384, DType::kFloat32, 3, 4},
    {1024, DType::kBFloat16, 6, 68}, {128, DType::kFloat16, 2, 4},
};

struct Plan {
  int kernels;
  Mode mode;
  bool zero_copy;
};

// Staged groups first: should a machine fail on windows, the record has all the rest.
constexpr Plan kPlans[] = {
    {0, Mode::kFixed, false}, {1, Mode::kFixed, false}, {2, Mode::kFixed, false}, {3, Mode::kFixed, false},
    {4, Mode::kFixed, false}, {5, Mode::kFixed, false}, {6, Mode::kFixed, false}, {7, Mode::kFixed, false},
    {0, Mode::kEager, false}, {1, Mode::kEager, false}, {3, Mode::kEager, false}, {5, Mode::kEager, false},
    {7, Mode::kEager, false}, {0, Mode::kDrop, false},  {1, Mode::kDrop, false},  {2, Mode::kDrop, false},
    {3, Mode::kDrop, false},  {4, Mode::kDrop, false},  {6, Mode::kDrop, false},  {0, Mode::kFixed, true},
    {2, Mode::kFixed, true},  {0, Mode::kDrop, true},   {2, Mode::kDrop, true},   {0, Mode::kEager, true},
};

std::size_t RoundUp(std::size_t value, std::size_t unit) {
  return unit <= 1 ? value : (value + unit - 1) / unit * unit;
}

Group DrawGroup(Dice& dice, const Plan& plan, int ranks, int number) {
  Group group = {};
  group.number = number;
  group.ranks = ranks;
  group.kernels = kKernels[plan.kernels];
  const int top_k = group.kernels.top_k;
  do {
    // Routing rows are moved by four experts, and duplicates are written for powers of two only.
    group.local_experts = plan.zero_copy ? dice.OneOf({1, 2, 4, 8}) : dice.OneOf({1, 2, 3, 4, 6, 8, 12});
  } while (group.experts() % 4 != 0 || group.experts() < std::max(top_k, 4));
  const int least = group.kernels.least_max_tokens;
  // NCCL EP 0.1.0 aborts at other limits on one to three ranks.
  group.max_tokens = 4 * dice.Between((least + 3) / 4, (least + 63) / 64 * 64 / 4);
  group.alignment = dice.OneOf<std::size_t>({0, 1, 2, 4, 8, 16, 32, 128});
  if (group.local_experts > 4) group.alignment = std::min<std::size_t>(group.alignment, 32);
  group.mode = plan.mode;
  group.zero_copy = plan.zero_copy ? ZeroCopy::kOn : dice.OneOf({ZeroCopy::kAuto, ZeroCopy::kOff});
  const std::size_t padding = group.local_experts * (group.alignment > 1 ? group.alignment - 1 : 0);
  const std::size_t rows = ranks * group.max_tokens * std::min(top_k, group.local_experts);
  group.capacity = rows + padding;
  if (plan.mode == Mode::kFixed) group.capacity += dice.Between(0, 9);
  if (plan.mode == Mode::kDrop) {
    group.capacity = std::max<std::size_t>(group.max_tokens, group.capacity / dice.OneOf({3, 5, 8}));
    // Otherwise padding may be written behind the buffer.
    if (plan.zero_copy) group.capacity = RoundUp(group.capacity, group.alignment);
  }
  if (plan.mode == Mode::kEager && plan.zero_copy) {
    // NCCL EP's own limit leaves no room for padding there.
    group.alignment = dice.OneOf<std::size_t>({0, 1});
    group.capacity = rows;
  }
  group.window_offset = plan.zero_copy ? dice.OneOf<std::size_t>({0, 256, 4096}) : 0;
  return group;
}

// The routing as frameworks make it, and as tests and failures do: masked entries are any negative number.
void DrawRouting(Dice& dice, const Group& group, Case* out) {
  const int experts = group.experts(), top_k = group.kernels.top_k;
  // Where rows are to be dropped, there have to be many.
  const bool many = group.mode == Mode::kDrop;
  std::vector<int> rows;
  const bool nobody = dice.Percent(4);
  for (int rank = 0; rank < group.ranks; ++rank) {
    const int any = dice.Between(0, group.max_tokens);
    rows.push_back(nobody || dice.Percent(15) ? 0 : dice.Percent(many ? 70 : 20) ? group.max_tokens : any);
  }
  out->masked_percent = many ? dice.OneOf({0, 0, 0, 10, 50}) : dice.OneOf({0, 0, 10, 50, 95});
  out->duplicate_percent = top_k == 1 ? 0 : dice.OneOf({0, 0, 0, 15, 60});
  const int kind = dice.Between(0, many ? 3 : 4);
  out->routing_name = kind == 0 ? "one" : kind == 1 ? "moving" : "uniform";
  const int start = dice.Between(0, experts - 1);
  std::vector<std::int64_t> deck(experts), row_experts(top_k);
  out->routing = test::MakeRouting(rows, top_k, [&](int, int row, int k) -> std::int64_t {
    if (k == 0) {
      std::iota(deck.begin(), deck.end(), 0);
      for (int i = 0; i < top_k; ++i) {
        if (kind == 0) {
          row_experts[i] = (start + i) % experts;
        } else if (kind == 1) {
          row_experts[i] = (start + row / 8 + i) % experts;
        } else {
          std::swap(deck[i], deck[i + dice.Between(0, experts - i - 1)]);
          row_experts[i] = deck[i];
        }
        if (i > 0 && dice.Percent(out->duplicate_percent)) row_experts[i] = row_experts[dice.Between(0, i - 1)];
      }
    }
    return dice.Percent(out->masked_percent) ? dice.OneOf<std::int64_t>({-1, -1, -2, -77}) : row_experts[k];
  });
}

Case DrawCase(Dice& dice, const Group& group, int number, bool first) {
  Case one = {};
  one.number = number;
  one.seed = dice.Next();
  DrawRouting(dice, group, &one);
  const Kernels& kernels = group.kernels;
  one.mxfp8 = kernels.dtype == DType::kBFloat16 && kernels.hidden % 512 == 0 && dice.Percent(35);
  // Quantised rows belong to the forward pass, which has weights.
  one.weights = dice.Percent(85) || one.mxfp8;
  one.wide_indices = dice.Percent(60);
  one.wide_counters = dice.Percent(50);
  one.counters = dice.OneOf({Memory::kDevice, Memory::kPinned});
  one.counts = dice.Percent(85);
  one.offsets = dice.Percent(70);
  // The caller of eager mode sizes its buffers by it.
  one.total = dice.Percent(85) || group.mode == Mode::kEager;
  one.handle = dice.OneOf({HandleFrom::kLast, HandleFrom::kLast, HandleFrom::kInitOwn, HandleFrom::kInitOwn,
                           HandleFrom::kInitLibrary, HandleFrom::kCreate});
  if (first && one.handle == HandleFrom::kLast) one.handle = HandleFrom::kInitOwn;
  one.window_only = group.writes_duplicates() && dice.Percent(50);
  return one;
}

const char* NameOf(DType dtype) { return dtype == DType::kFloat32 ? "f32" : dtype == DType::kFloat16 ? "f16" : "bf16"; }

const char* NameOf(HandleFrom handle) {
  switch (handle) {
    case HandleFrom::kLast:
      return "last";
    case HandleFrom::kInitOwn:
      return "init";
    case HandleFrom::kInitLibrary:
      return "init_library";
    case HandleFrom::kCreate:
      return "create";
  }
  return "";
}

}  // namespace

std::size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

std::vector<Group> MakeTable(int ranks) {
  std::vector<Group> groups;
  int number = 0;
  for (const Plan& plan : kPlans) {
    Dice dice(test::Mix(0xc0f, ranks, groups.size()));
    Group group = DrawGroup(dice, plan, ranks, static_cast<int>(groups.size()));
    for (int i = 0; i < kCasesPerGroup; ++i) group.cases.push_back(DrawCase(dice, group, number++, i == 0));
    groups.push_back(group);
  }
  return groups;
}

std::string Describe(const Group& group, const Case& one) {
  const auto word = [](const char* name, auto value) {
    using std::to_string;
    return std::string(" ") + name + "=" + to_string(value);
  };
  std::string text = "case" + std::string(" ") + std::to_string(one.number);
  text += word("group", group.number) + word("ranks", group.ranks) + word("experts", group.experts());
  text += word("hidden", group.kernels.hidden) + " dtype=" + NameOf(group.kernels.dtype);
  text += word("top_k", group.kernels.top_k) + word("max_tokens", group.max_tokens);
  text += word("alignment", group.alignment) + word("capacity", group.capacity);
  text += group.mode == Mode::kFixed ? " mode=fixed" : group.mode == Mode::kEager ? " mode=eager" : " mode=drop";
  text += " zero_copy=";
  text += group.zero_copy == ZeroCopy::kOn ? "on" : group.zero_copy == ZeroCopy::kOff ? "off" : "auto";
  if (group.writes_duplicates()) {
    text += word("window_offset", group.window_offset) + (one.window_only ? " named_by=window" : " named_by=address");
  }
  text += " rows=";
  for (int rank = 0; rank < group.ranks; ++rank) {
    text += (rank == 0 ? "" : ",") + std::to_string(one.routing.rows[rank]);
  }
  text += " routing=" + one.routing_name + word("masked", one.masked_percent);
  text += word("duplicates", one.duplicate_percent);
  text += one.mxfp8 ? " payload=mxfp8" : " payload=plain";
  text += one.weights ? " weights=yes" : " weights=no";
  text += one.wide_indices ? " index=int64" : " index=int32";
  text += one.wide_counters ? " counters=int64" : " counters=int32";
  text += one.counters == Memory::kPinned ? "/pinned" : "/device";
  text += " handle=" + std::string(NameOf(one.handle));
  return text;
}

}  // namespace conformance
