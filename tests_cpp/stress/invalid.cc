// Random invalid calls: a valid one with one to three things changed, each of which the contract refuses by itself.
// Each has to throw a std::runtime_error that names function and argument, and to leave everything as it was: valid
// steps follow, over the same layers and in between.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep/graph.h"
#include "ep/routings.h"
#include "stress/stress.h"
#include "support/host_stats.h"
#include "support/symm.h"

namespace test {
namespace {

using T = BFloat16;

// What a tensor is to its call, which decides what is wrong for it.
enum class Part { kIndices, kCounts, kSource, kRecv, kWeights, kRecvWeights };

struct Argument {
  const char* name;
  NVTETensor* tensor;
  Part part;
  void* data;
  NVTEDType dtype;
  std::vector<std::size_t> shape;
  // Null for those that take no window.
  NVTECommWindow* window = nullptr;
  // A null tensor here means that the rule is about this other one.
  const char* partner = nullptr;
  bool optional = false;
};

const char* const kFunctions[] = {"nvte_ep_prepare",      "nvte_ep_dispatch",    "nvte_ep_combine",
                                  "nvte_ep_dispatch_bwd", "nvte_ep_combine_bwd", "nvte_ep_prepare_and_dispatch"};
constexpr int kPrepareAndDispatch = 5;
constexpr int kLastFunction = kPreparesAndDispatches ? 5 : 4;

bool Prepares(int function) { return function == 0 || function == kPrepareAndDispatch; }

// A valid call of a step, to be changed.
class Victim {
 public:
  Victim(int function, Step<T>& step)
      : function_(function),
        prepare(step.prepare_args()),
        dispatch(step.dispatch_args()),
        combine(step.combine_args()),
        dispatch_bwd(step.dispatch_bwd_args()),
        combine_bwd(step.combine_bwd_args()) {
    const std::size_t rows = step.rows(), hidden = step.hidden(), top_k = step.top_k(), recv = step.recv_rows();
    const NVTEDType type = DTypeOf<T>();
    const std::vector<Argument> of_prepare = {
        {"topk_idx", &prepare.topk_idx, Part::kIndices, step.topk_idx.data(), kNVTEInt64, {rows, top_k}},
        {kCounts,
         &prepare.token_counts,
         Part::kCounts,
         step.counts.data(),
         kNVTEInt32,
         {step.counts.size()},
         nullptr,
         nullptr,
         /*optional=*/kReportsTotal}};
    const std::vector<Argument> of_dispatch = {
        {"topk_idx", &dispatch.topk_idx, Part::kIndices, step.topk_idx.data(), kNVTEInt64, {rows, top_k}},
        {"tokens",
         &dispatch.tokens,
         Part::kSource,
         step.tokens.data(),
         type,
         {rows, hidden},
         &dispatch.tokens_win,
         "recv_tokens"},
        {"topk_weights",
         &dispatch.topk_weights,
         Part::kWeights,
         step.weights.data(),
         kNVTEFloat32,
         {rows, top_k},
         &dispatch.topk_weights_win,
         "recv_topk_weights"},
        {"recv_tokens",
         &dispatch.recv_tokens,
         Part::kRecv,
         step.recv_tokens.data(),
         type,
         {recv, hidden},
         &dispatch.recv_tokens_win,
         "tokens"},
        {"recv_topk_weights",
         &dispatch.recv_topk_weights,
         Part::kRecvWeights,
         step.recv_weights.data(),
         kNVTEFloat32,
         {recv},
         &dispatch.recv_topk_weights_win,
         "topk_weights"}};
    switch (function) {
      case 0:
        arguments = of_prepare;
        break;
      case 1:
        arguments = of_dispatch;
        break;
      case kPrepareAndDispatch:
        // The indices are those of prepare.
        arguments = of_prepare;
        arguments.insert(arguments.end(), of_dispatch.begin() + 1, of_dispatch.end());
        break;
      case 2:
        arguments = {{"expert_out",
                      &combine.expert_out,
                      Part::kRecv,
                      step.expert_out.data(),
                      type,
                      {recv, hidden},
                      &combine.expert_out_win,
                      "result"},
                     {"result",
                      &combine.result,
                      Part::kSource,
                      step.result.data(),
                      type,
                      {rows, hidden},
                      nullptr,
                      "expert_out"}};
        break;
      case 3:
        arguments = {{"grad",
                      &dispatch_bwd.grad,
                      Part::kRecv,
                      step.slot_grad.data(),
                      type,
                      {recv, hidden},
                      &dispatch_bwd.grad_win,
                      "grad_tokens"},
                     {"g_recv_topk_weights",
                      &dispatch_bwd.g_recv_topk_weights,
                      Part::kRecvWeights,
                      step.g_recv_weights.data(),
                      kNVTEFloat32,
                      {recv},
                      &dispatch_bwd.g_recv_topk_weights_win,
                      "grad_topk_weights"},
                     {"grad_tokens",
                      &dispatch_bwd.grad_tokens,
                      Part::kSource,
                      step.grad_tokens.data(),
                      type,
                      {rows, hidden},
                      nullptr,
                      "grad"},
                     {"grad_topk_weights",
                      &dispatch_bwd.grad_topk_weights,
                      Part::kWeights,
                      step.grad_weights.data(),
                      kNVTEFloat32,
                      {rows, top_k},
                      nullptr,
                      "g_recv_topk_weights"}};
        break;
      default:
        arguments = {{"grad",
                      &combine_bwd.grad,
                      Part::kSource,
                      step.grad.data(),
                      type,
                      {rows, hidden},
                      &combine_bwd.grad_win,
                      "grad_expert_out"},
                     {"grad_expert_out",
                      &combine_bwd.grad_expert_out,
                      Part::kRecv,
                      step.grad_expert_out.data(),
                      type,
                      {recv, hidden},
                      &combine_bwd.grad_expert_out_win,
                      "grad"}};
        break;
    }
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;

  void Call() const {
    switch (function_) {
      case 0:
        return prepare.Call();
      case 1:
        return dispatch.Call();
      case 2:
        return combine.Call();
      case 3:
        return dispatch_bwd.Call();
      case kPrepareAndDispatch:
        return CallPrepareAndDispatch(prepare, dispatch, World::Get().stream());
      default:
        return combine_bwd.Call();
    }
  }
  Handle& handle() {
    switch (function_) {
      case 0:
      case kPrepareAndDispatch:
        return prepare.handle;
      case 1:
        return dispatch.handle;
      case 2:
        return combine.handle;
      case 3:
        return dispatch_bwd.handle;
      default:
        return combine_bwd.handle;
    }
  }

  // What was changed, in words, and what the refusal may name.
  void Changed(const std::string& name, const std::string& what) {
    names += (names.empty() ? "" : "|") + name;
    changes += (changes.empty() ? "" : "; ") + name + " " + what;
  }
  void Put(const Argument& argument, Tensor tensor, const std::string& what) {
    *argument.tensor = tensor.get();
    kept.push_back(std::move(tensor));
    Changed(argument.name, what);
  }
  Refusal refusal() const {
    return {kFunctions[function_], names, changes, [this] { Call(); }};
  }

 private:
  const int function_;

 public:
  PrepareArgs prepare;
  DispatchArgs dispatch;
  CombineArgs combine;
  DispatchBwdArgs dispatch_bwd;
  CombineBwdArgs combine_bwd;
  std::vector<Argument> arguments;
  std::vector<Tensor> kept;
  std::string names;
  std::string changes;
};

std::string Text(const std::vector<std::size_t>& shape) {
  std::string text = "[";
  for (const std::size_t size : shape) text += (text.size() == 1 ? "" : ", ") + std::to_string(size);
  return text + "]";
}

// A value that is no live tensor.
NVTETensor NoTensor(Dice& dice) {
  static int local = 0;
  switch (dice.Between(0, 5)) {
    case 0:
      return reinterpret_cast<NVTETensor>(std::uintptr_t{0x1});
    case 1:
      return reinterpret_cast<NVTETensor>(~std::uintptr_t{0});
    case 2:
      return reinterpret_cast<NVTETensor>(&local);
    case 3:
      return reinterpret_cast<NVTETensor>(std::uintptr_t{0xdeadbeef});
    default: {
      // Destroyed: its slot may be another tensor's by the time it is used.
      const Tensor gone(nullptr, kNVTEByte, {0});
      return gone.get();
    }
  }
}

std::size_t ElementBytes(NVTEDType dtype) { return dtype == kNVTEInt64 ? 8 : dtype == DTypeOf<T>() ? 2 : 4; }

// A type that no tensor of this part may have, whatever the others have.
NVTEDType WrongType(Dice& dice, Part part, int function) {
  switch (part) {
    case Part::kIndices:
      // Of either width prepare takes, dispatch takes the one that was prepared.
      if (function == 1 && dice.Percent(30)) return kNVTEInt32;
      return dice.OneOf<NVTEDType>({kNVTEFloat32, kNVTEInt16, kNVTEByte, kNVTEBFloat16, kNVTEFloat8E4M3});
    case Part::kCounts:
      return dice.OneOf<NVTEDType>({kNVTEFloat32, kNVTEInt16, kNVTEByte, kNVTEBFloat16, kNVTEFloat8E8M0});
    case Part::kSource:
    case Part::kRecv:
      return dice.OneOf<NVTEDType>(
          {kNVTEInt16, kNVTEInt32, kNVTEInt64, kNVTEByte, kNVTEFloat8E4M3, kNVTEFloat8E5M2, kNVTEFloat8E8M0});
    default:
      return dice.OneOf<NVTEDType>({kNVTEInt32, kNVTEFloat16, kNVTEBFloat16, kNVTEInt64, kNVTEByte});
  }
}

// Something that is wrong with one argument whatever the others are.
void Spoil(Dice& dice, Victim& victim, int function, const Argument& argument, std::size_t max_tokens) {
  std::vector<std::size_t> shape = argument.shape;
  // Dispatch does not read the indices again, so it takes any address for them.
  const bool unread = argument.part == Part::kIndices && function == 1;
  const auto as = [&](const std::vector<std::size_t>& other, const std::string& what) {
    victim.Put(argument, Tensor(argument.data, argument.dtype, other), what + " " + Text(other));
  };
  for (;;) {
    switch (dice.Between(0, 9)) {
      case 0:
        if (argument.optional) continue;
        // Both of a pair of optional tensors may be absent; one alone may not, and either may be named.
        if (!victim.changes.empty()) continue;
        *argument.tensor = nullptr;
        victim.Changed(argument.name, "is the null tensor");
        if (argument.partner != nullptr) victim.names += std::string("|") + argument.partner;
        return;
      case 1: {
        const int form = dice.Between(0, 3);
        if (form == 0) {
          shape.insert(shape.begin(), 1);
        } else if (form == 1) {
          shape.push_back(1);
        } else if (form == 2) {
          shape.assign(15, 1);
        } else if (shape.size() == 2) {
          shape = {shape[0] * shape[1]};
        } else {
          shape = {};
        }
        return as(shape, "has the dimensions");
      }
      case 2:
        // Rows of this rank's tokens are given by the routing, received ones by the group.
        switch (argument.part) {
          case Part::kIndices:
            if (Prepares(function)) {
              shape[0] = max_tokens + dice.Between(1, 3);
              return as(shape, "has more tokens than the group");
            }
            [[fallthrough]];
          case Part::kSource:
          case Part::kWeights:
            shape[0] = dice.OneOf<std::size_t>({shape[0] - 1, shape[0] + 1, 0, max_tokens + 1, std::size_t{1} << 40});
            if (shape[0] == argument.shape[0]) continue;
            return as(shape, "has other rows");
          case Part::kCounts:
            shape[0] -= dice.Between(1, static_cast<int>(shape[0]) - 1);
            return as(shape, "is short");
          default:
            shape[0] -= dice.Between(1, static_cast<int>(shape[0]) - 1);
            return as(shape, "has too few rows");
        }
      case 3:
        if (argument.part == Part::kIndices || argument.part == Part::kWeights) {
          shape[1] = dice.OneOf<std::size_t>({shape[1] + 1, shape[1] - 1, shape[1] * 2});
          return as(shape, "has another top_k");
        }
        if (argument.part != Part::kSource) continue;
        // Off the unit that rows are copied by, or longer than the group's rows.
        shape[1] = dice.OneOf<std::size_t>({shape[1] - 1, shape[1] + 1, 4, 0, shape[1] * 4});
        victim.names += (victim.names.empty() ? "" : "|") + std::string(argument.partner);
        return as(shape, "has another width");
      case 4: {
        const NVTEDType dtype = WrongType(dice, argument.part, function);
        victim.Put(argument, Tensor(argument.data, dtype, shape), "has type " + std::to_string(dtype));
        if (argument.partner != nullptr) victim.names += std::string("|") + argument.partner;
        return;
      }
      case 5: {
        if (unread) continue;
        const bool rows = argument.part == Part::kSource || argument.part == Part::kRecv;
        const std::size_t unit = rows ? 16 : ElementBytes(argument.dtype);
        const std::size_t off = unit / 2 > 1 && dice.Percent(50) ? unit / 2 : 1;
        victim.Put(argument, Tensor(static_cast<std::uint8_t*>(argument.data) + off, argument.dtype, shape),
                   "starts " + std::to_string(off) + " bytes off");
        return;
      }
      case 6:
        if (unread) continue;
        victim.Put(argument, Tensor(nullptr, argument.dtype, shape), "has no data");
        return;
      case 7:
        *argument.tensor = NoTensor(dice);
        victim.Changed(argument.name, "is no live tensor");
        return;
      case 8: {
        // MXFP8 is a way to give rows, but not rows of this type; the others are none for anything.
        const bool rows = argument.part == Part::kSource || argument.part == Part::kRecv;
        NVTEScalingMode mode = dice.OneOf<NVTEScalingMode>(
            {NVTE_BLOCK_SCALING_1D, NVTE_BLOCK_SCALING_2D, NVTE_NVFP4_1D_SCALING, NVTE_INVALID_SCALING});
        if (rows && dice.Percent(40)) mode = NVTE_MXFP8_1D_SCALING;
        const NVTETensor raw = nvte_create_tensor(mode);
        const NVTEBasicTensor basic = MakeBasicTensor(argument.data, argument.dtype, shape);
        nvte_set_tensor_param_v2(raw, kNVTERowwiseData, &basic, sizeof basic);
        Tensor tensor = Tensor::Adopt(raw);
        victim.Put(argument, std::move(tensor), "has scaling mode " + std::to_string(mode));
        if (argument.partner != nullptr) victim.names += std::string("|") + argument.partner;
        return;
      }
      default: {
        const std::size_t huge = dice.OneOf<std::size_t>({~std::size_t{0}, std::size_t{1} << 63, std::size_t{1} << 62});
        shape.assign(argument.shape.size(), huge);
        return as(shape, "has a size beyond memory");
      }
    }
  }
}

// Something that is wrong with an argument beside the others.
bool SpoilBeside(Dice& dice, Victim& victim, const Argument& argument) {
  std::vector<std::size_t> shape = argument.shape;
  if (argument.part != Part::kSource && argument.part != Part::kRecv) return false;
  victim.names += (victim.names.empty() ? "" : "|") + std::string(argument.partner);
  if (dice.Percent(50)) {
    shape[1] = dice.OneOf<std::size_t>({shape[1] - 8, shape[1] + 8, shape[1] / 2});
    victim.Put(argument, Tensor(argument.data, argument.dtype, shape), "has a width of its own, " + Text(shape));
  } else {
    const NVTEDType dtype = dice.OneOf<NVTEDType>({kNVTEFloat16, kNVTEFloat32});
    victim.Put(argument, Tensor(argument.data, dtype, shape), "has a type of its own, " + std::to_string(dtype));
  }
  return true;
}

// A wrong place in symmetric memory: `room` is a small allocation.
bool SpoilWindow(Dice& dice, Victim& victim, const Argument& argument, const SymmBuffer& room) {
  if (argument.window == nullptr) return false;
  victim.names += (victim.names.empty() ? "" : "|") + std::string(argument.name) + "_win";
  // NCCL does not check windows that it has not made; the host runtime does, and prints that it did.
  const int form = EveryShapeIsCheap() && dice.Percent(3) ? 4 : dice.Between(0, 3);
  if (form == 0) {
    *argument.window = room.At(dice.OneOf<std::uint64_t>({0, 16, 32}));
    victim.Changed(argument.name, "has a window and an address elsewhere");
    return true;
  }
  victim.Put(argument, Tensor(nullptr, argument.dtype, argument.shape), "in a window");
  switch (form) {
    case 1:
      *argument.window = room.At(dice.OneOf<std::uint64_t>({1, 2, 4088}));
      victim.Changed(argument.name, "with an offset off the unit");
      break;
    case 2:
      *argument.window = room.At(room.bytes());
      victim.Changed(argument.name, "behind its allocation");
      break;
    case 3:
      *argument.window = room.At(dice.OneOf<std::uint64_t>({std::uint64_t{1} << 40, ~std::uint64_t{0} - 4095}));
      victim.Changed(argument.name, "with an offset beyond everything");
      break;
    default:
      *argument.window = MakeWindow(reinterpret_cast<ncclWindow_t>(std::uintptr_t{0x1230}), 0);
      victim.Changed(argument.name, "with a window of nobody");
      break;
  }
  return true;
}

// A handle that no call takes.
void SpoilHandle(Dice& dice, Victim& victim, int function, const Layer& layer, const Layer& other,
                 const DeviceBuffer<std::uint8_t>& fresh) {
  const std::size_t bytes = layer.memory().size();
  std::uint8_t* const memory = layer.memory().data();
  const auto put = [&](Tensor mem, const std::string& what) {
    victim.handle() = layer.HandleOver(mem);
    victim.kept.push_back(std::move(mem));
    victim.Changed(kHandleMem, what);
  };
  for (;;) {
    switch (dice.Between(0, 9)) {
      case 0:
        return put(Tensor(), "is the null tensor");
      case 1:
        return put(Tensor(nullptr, kNVTEByte, {bytes}), "has no data");
      case 2: {
        const std::size_t less = dice.OneOf<std::size_t>({bytes - 1, bytes / 2, 1, 0});
        return put(Tensor(memory, kNVTEByte, {less}), "has " + std::to_string(less) + " bytes");
      }
      case 3:
        return put(Tensor(memory, dice.OneOf<NVTEDType>({kNVTEFloat32, kNVTEInt64, kNVTEFloat8E4M3}), {bytes}),
                   "has another type");
      case 4:
        return put(Tensor(memory, kNVTEByte, {1, bytes}), "is 2D");
      case 5:
        return put(Tensor(fresh.data() + dice.OneOf<int>({1, 16, 128}), kNVTEByte, {bytes}), "is off its unit");
      case 6: {
        const NVTETensor gone = NoTensor(dice);
        victim.handle() = MakeHandle(layer.id(), gone);
        return victim.Changed(kHandleMem, "is no live tensor");
      }
      case 7:
        // Prepare may take fresh memory, the others need what it left there.
        if (Prepares(function)) continue;
        put(Tensor(fresh.data(), kNVTEByte, {bytes}), "was never prepared");
        // Memory that may hold anything, which a capture does not let the library look into.
        victim.names += "|captures a graph";
        return;
      default:
        // Only where layers have ids.
        if (layer.id() == 0) continue;
        victim.Changed("handle", "is of another layer, or of none");
        // Of another layer's, prepare may first find that its alignment or its top_k is not the one.
        if (function == 0) victim.names += "|dispatch_output_per_expert_alignment|topk_idx";
        const std::uint64_t id = dice.OneOf<std::uint64_t>({0, layer.id() + 100000, ~std::uint64_t{0}, other.id()});
        const NVTETensor mem = HandleMemory(victim.handle());
        victim.handle() = MakeHandle(id, mem);
        return;
    }
  }
}

struct Rig {
  explicit Rig(Dice& dice) : shape(Shape(dice)), group(shape), room(4096), fresh(std::size_t{1} << 20) {
    TEST_NCCL(ncclMemAlloc(&registered, std::size_t{2} << 20));
    nvte_ep_ext_window_register(registered, std::size_t{2} << 20, nullptr);
    for (int i = 0; i < 3; ++i) {
      const int top_k = EveryShapeIsCheap() ? dice.Between(2, shape.top_k) : 2;
      const std::size_t alignment = dice.OneOf<std::size_t>({0, 1, 4, 16});
      layers.push_back(std::make_unique<Layer>(top_k, alignment));
      std::vector<int> rows;
      for (int rank = 0; rank < Ranks(); ++rank) rows.push_back(dice.Between(2, shape.max_tokens - 1));
      steps.push_back(std::make_unique<Step<T>>(group, *layers.back(),
                                                RandomRouting(rows, top_k, Experts(group), dice.Number(), 10),
                                                dice.Number() % 100000));
      steps.back()->Prepare();
    }
    warm.resize(steps.size());
    World::Get().Wait();
  }
  ~Rig() { static_cast<void>(ncclMemFree(registered)); }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  static GroupShape Shape(Dice& dice) {
    GroupShape shape;
    shape.experts_per_rank = dice.OneOf<int>({4, 8});
    shape.max_tokens = dice.Between(4, 24);
    shape.hidden = EveryShapeIsCheap() ? dice.OneOf<int>({64, 128}) : 256;
    shape.top_k = EveryShapeIsCheap() ? dice.Between(2, 4) : 2;
    shape.alignment = 16;
    shape.dtype = kNVTEBFloat16;
    return shape;
  }

  GroupShape shape;
  Group group;
  SymmBuffer room;
  // Handle memory that nobody has prepared.
  DeviceBuffer<std::uint8_t> fresh;
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::unique_ptr<Step<T>>> steps;
  // Which of them have made every call once.
  std::vector<bool> warm;
  // Memory that is a window until the group ends.
  void* registered = nullptr;
};

// A call over memory that holds what was prepared, but is new to the library: it would have to be read, which a capture
// forbids. `moved` is that memory.
void RefuseMovedMemory(Dice& dice, Rig& rig, std::size_t i, const DeviceBuffer<std::uint8_t>& moved, bool mine) {
  const int function = dice.Between(1, 4);
  Victim victim(function, *rig.steps[i]);
  Tensor mem = moved.View({moved.size()});
  victim.handle() = rig.layers[i]->HandleOver(mem);
  victim.kept.push_back(std::move(mem));
  // Where memory may not move at all, that is the reason.
  victim.Changed(std::string("captures a graph|") + kHandleMem, "was moved before a capture");
  if (mine) Refuse(victim.refusal());
}

// One refused call of layer `i`; drawn alike on every rank, made on `only`, or on all of them.
void RefuseOne(Dice& dice, Rig& rig, std::size_t i, int only, bool capturing = false) {
  Step<T>& step = *rig.steps[i];
  const int kind = dice.Between(0, 99);
  const bool mine = only < 0 || only == World::Get().rank();
  if (kind < 6) {
    const Refusal refusal =
        DrawAbiRefusal(dice, step.prepare_args(), step.dispatch_args(), rig.group.config().num_experts);
    if (mine) Refuse(refusal);
    return;
  }
  if (kind < 12) {
    const int experts = rig.group.config().num_experts;
    const bool top_k = dice.Percent(50);
    const int wrong_top_k = dice.OneOf<int>({0, -1, 33, experts + 1, -2147483647});
    const std::size_t wrong = dice.OneOf<std::size_t>({3, 12, 127, std::size_t{1} << 31, ~std::size_t{0}});
    if (!mine) return;
    if (top_k) {
      return Refuse(
          {kLayerFunction, "top_k", "top_k " + std::to_string(wrong_top_k), [=] { Register(wrong_top_k, 1); }});
    }
    return Refuse({kLayerFunction, "dispatch_output_per_expert_alignment", "alignment " + std::to_string(wrong),
                   [=] { Register(2, wrong); }});
  }
  if (kind < 15) {
    GroupShape shape;
    if (mine) {
      Refuse({"nvte_ep_initialize", "nvte_ep_shutdown", "a second group",
              [shape] { Initialize(World::Get().comm(), shape.Config()); }});
    }
    return;
  }
  if (kind < 27) {
    const Refusal refusal = DrawExtRefusal(dice, rig.room, rig.fresh, capturing);
    if (mine) Refuse(refusal);
    return;
  }
  if (kind < 30) {
    const NVTETensor mem = HandleMemory(step.prepare_args().handle);
    if (capturing) {
      const Refusal refusal = TotalsRefusal("captures a graph", "in a capture", mem, sizeof(NVTEEpExtRecvTotals));
      if (mine) Refuse(refusal);
    } else if (only < 0) {
      Refuse(DrawCollectiveRefusal(dice, rig.room, rig.registered, rig.fresh));
    } else {
      const std::size_t size = dice.OneOf<std::size_t>({0, 1, 8, 39});
      if (mine) Refuse(TotalsRefusal("totals->struct_size", "struct_size " + std::to_string(size), mem, size));
    }
    return;
  }
  const int function = dice.Between(0, kLastFunction);
  Victim victim(function, step);
  const std::size_t other = (i + 1) % rig.layers.size();
  const int form = dice.Between(0, 84);
  if (form < 15) {
    SpoilHandle(dice, victim, function, *rig.layers[i], *rig.layers[other], rig.fresh);
  } else {
    const Argument& first = victim.arguments[dice.Between(0, static_cast<int>(victim.arguments.size()) - 1)];
    // What is wrong beside other arguments comes alone: more could undo it.
    const bool spoilt =
        (form < 30 && SpoilWindow(dice, victim, first, rig.room)) || (form < 45 && SpoilBeside(dice, victim, first));
    if (!spoilt) {
      Spoil(dice, victim, function, first, rig.shape.max_tokens);
      // More that is wrong, with other arguments.
      for (const Argument& argument : victim.arguments) {
        if (&argument == &first || !dice.Percent(25)) continue;
        // With an absent tensor the others' rules may change.
        if (*first.tensor == nullptr) break;
        Spoil(dice, victim, function, argument, rig.shape.max_tokens);
      }
    }
  }
  if (mine) Refuse(victim.refusal());
}

template <typename U>
bool Untouched(const DeviceBuffer<U>& buffer) {
  const std::vector<U> values = buffer.Download();
  return SameBits(values, Unwritten<U>(values.size()), 1) && buffer.GuardIntact();
}

bool OutputsUntouched(Step<T>& step) {
  return Untouched(step.counts) && Untouched(step.total) && Untouched(step.recv_tokens) &&
         Untouched(step.recv_weights) && Untouched(step.result) && Untouched(step.grad_expert_out) &&
         Untouched(step.grad_tokens) && Untouched(step.grad_weights);
}

bool InputGuardsIntact(Rig& rig, std::size_t i) {
  const Step<T>& step = *rig.steps[i];
  return step.topk_idx.GuardIntact() && step.tokens.GuardIntact() && step.weights.GuardIntact() &&
         step.expert_out.GuardIntact() && step.grad.GuardIntact() && step.slot_grad.GuardIntact() &&
         step.g_recv_weights.GuardIntact() && rig.layers[i]->memory().GuardIntact() && rig.fresh.GuardIntact() &&
         Untouched(rig.fresh);
}

// A valid step, or most of one, with refused calls between its calls: of all ranks, or of one, whose peers go on.
void StepWithRefusals(Dice& dice, Rig& rig, std::size_t i) {
  Step<T>& step = *rig.steps[i];
  const auto refuse_some = [&] {
    const int only = dice.Percent(70) ? -1 : dice.Between(0, Ranks() - 1);
    for (int count = dice.Between(0, 4); count > 0; --count) {
      RefuseOne(dice, rig, dice.Between(0, static_cast<int>(rig.steps.size()) - 1), only);
    }
  };
  ClearOutputs(step);
  for (int count = dice.Between(4, 24); count > 0; --count) RefuseOne(dice, rig, i, -1);
  if (dice.Percent(50) && !OutputsUntouched(step)) Fail("a refused call wrote something");
  // Half of the time the routing of before, which refused calls leave alone.
  if (dice.Percent(50)) {
    step.Prepare();
    step.CheckCounts();
  }
  refuse_some();
  step.Dispatch();
  refuse_some();
  step.CheckReceived();
  step.Combine();
  refuse_some();
  step.CheckCombined();
  step.CombineBwd();
  refuse_some();
  step.CheckCombineBwd();
  step.DispatchBwd();
  refuse_some();
  step.CheckDispatchBwd();
  if (!InputGuardsIntact(rig, i)) Fail("a write behind an input, or into memory that no valid call was given");
  rig.warm[i] = true;
  ++TheFigures().steps;
  FailIfWrong();
}

// A step whose calls are captured, with refused calls in between, of all ranks or of one: the capture stays whole.
void CaptureWithRefusals(Dice& dice, Rig& rig, std::size_t i) {
  Step<T>& step = *rig.steps[i];
  World::Get().Wait();
  const std::size_t other = (i + 1) % rig.layers.size();
  const DeviceBuffer<std::uint8_t> moved(rig.layers[other]->memory().Download());
  UploadInputs(step);
  const auto refuse_some = [&] {
    const int only = dice.Percent(70) ? -1 : dice.Between(0, Ranks() - 1);
    for (int count = dice.Between(0, 3); count > 0; --count) {
      if (dice.Percent(15)) {
        RefuseMovedMemory(dice, rig, other, moved, only < 0 || only == World::Get().rank());
      } else {
        RefuseOne(dice, rig, dice.Between(0, static_cast<int>(rig.steps.size()) - 1), only, /*capturing=*/true);
      }
    }
  };
  ClearOutputs(step);
  const Graph graph([&] {
    refuse_some();
    step.prepare_args().Call();
    refuse_some();
    step.dispatch_args().Call();
    refuse_some();
    step.combine_args().Call();
    refuse_some();
    step.combine_bwd_args().Call();
    refuse_some();
    step.dispatch_bwd_args().Call();
    refuse_some();
  });
  if (!OutputsUntouched(step)) Fail("a call in a capture, or one that was refused there, wrote something");
  for (int launches = dice.Between(1, 2); launches > 0; --launches) {
    ReplayAs(step, graph,
             RandomRouting(step.reference().routing().rows, static_cast<int>(step.top_k()), Experts(rig.group),
                           dice.Number(), 10),
             dice.Number() % 100000);
    ++TheFigures().replays;
  }
  if (!InputGuardsIntact(rig, i)) Fail("a write behind an input, or into memory that no valid call was given");
  ++TheFigures().steps;
  FailIfWrong();
}

// What a group refuses to be; each is wrong by itself.
std::vector<ConfigChange> ConfigChanges() {
  using Config = NVTEEpGroupConfig;
  std::vector<ConfigChange> changes;
  const auto add = [&](const char* names, int Config::*field, const std::vector<int>& values) {
    for (const int value : values) {
      changes.push_back(
          {names, std::string(names) + " = " + std::to_string(value), [=](Config& config) { config.*field = value; }});
    }
  };
  constexpr int kLeast = -2147483647 - 1;
  add("ep_size", &Config::ep_size, {0, -1, -2, kLeast});
  add("num_experts", &Config::num_experts, {0, -8, kLeast, 4 * Ranks() + 1});
  add("max_tokens_per_rank", &Config::max_tokens_per_rank, {0, -1, kLeast});
  add("max_recv_tokens_per_rank", &Config::max_recv_tokens_per_rank, {-5, kLeast, 1, 63});
  add("hidden_dim", &Config::hidden_dim, {0, -256, kLeast, 7, 1, 2147483647});
  for (const int limit : {-1, 100000, kLeast}) {
    changes.push_back({kSmLimit, std::string(kSmLimit) + " = " + std::to_string(limit),
                       [=](Config& config) { SetSmLimit(config, limit); }});
  }
  for (const int dtype : {-1, 11, 99, static_cast<int>(kNVTEInt16), static_cast<int>(kNVTEFloat4E2M1)}) {
    changes.push_back({"max_token_dtype", "max_token_dtype = " + std::to_string(dtype),
                       [=](Config& config) { config.max_token_dtype = static_cast<NVTEDType>(dtype); }});
  }
  for (const int size : {Ranks() * 2, Ranks() + 1}) {
    changes.push_back({"ep_size", "ep_size of another communicator", [=](Config& config) {
                         config.ep_size = size;
                         config.num_experts = 4 * size;
                         config.max_recv_tokens_per_rank = 1 << 14;
                       }});
  }
  for (const ConfigChange& change : AbiConfigChanges()) changes.push_back(change);
  return changes;
}

void RefuseGroups(Dice& dice) {
  static const std::vector<ConfigChange> changes = ConfigChanges();
  for (int count = dice.Between(2, 8); count > 0; --count) {
    NVTEEpGroupConfig config = GroupShape().Config();
    Refusal refusal{"nvte_ep_initialize", "", "", nullptr};
    for (int i = dice.Between(1, 2); i > 0; --i) {
      const ConfigChange& change = dice.OneOf(changes);
      change.change(config);
      refusal.names += (refusal.names.empty() ? "" : "|") + change.names;
      refusal.what += change.what + " ";
    }
    const bool no_comm = dice.Percent(15);
    if (no_comm) refusal.names += "|ep_comm";
    refusal.call = [&] { Initialize(no_comm ? nullptr : World::Get().comm(), config); };
    Refuse(refusal);
  }
  if (dice.Percent(50)) Refuse(DrawOptionsOfAGroup(dice));
  if (dice.Percent(40)) {
    // Ranks that differ; every one of them is told.
    NVTEEpGroupConfig config = GroupShape().Config();
    const int odd = dice.Between(0, Ranks() - 1), field = dice.Between(0, 2);
    if (World::Get().rank() == odd) {
      if (field == 0) config.hidden_dim *= 2;
      if (field == 1) config.num_experts *= 2;
      if (field == 2) config.max_tokens_per_rank -= 4;
    }
    const char* const names[] = {"hidden_dim", "num_experts", "max_tokens_per_rank"};
    Refuse({"nvte_ep_initialize", names[field], "ranks that differ", [&] { Initialize(World::Get().comm(), config); }});
  }
}

// Zero-copy groups say which window is missing.
void RefusePlainMemory(Dice& dice) {
  GroupShape shape;
  shape.zero_copy = true;
  Group group(shape);
  Layer layer(2, 1);
  Step<float> step(group, layer, RandomRouting(EvenRows(5), 2, Experts(group), dice.Number()), 7);
  step.Prepare();
  Refuse({"nvte_ep_dispatch", "recv_tokens_win.window", "plain memory", [&] { step.dispatch_args().Call(); }});
  Refuse({"nvte_ep_combine", "expert_out_win.window", "plain memory", [&] { step.combine_args().Call(); }});
  Refuse({"nvte_ep_dispatch_bwd", "grad_win.window", "plain memory", [&] { step.dispatch_bwd_args().Call(); }});
  Refuse(
      {"nvte_ep_combine_bwd", "grad_expert_out_win.window", "plain memory", [&] { step.combine_bwd_args().Call(); }});
  PlacedStep<float>(step, kExchanged, true, 16).ForwardAndBackward();
  ++TheFigures().steps;
}

// In eager mode nothing can be captured; steps that are not go on.
void RefuseEagerCapture(Dice& dice) {
  GroupShape shape;
  Group group(Eager(shape));
  Layer layer(2, 1);
  const Routing routing = RandomRouting(EvenRows(5), 2, Experts(group), dice.Number());
  const Reference reference(routing, Experts(group), layer.alignment());
  Step<T> step(group, layer, routing, 7, reference.Total(World::Get().rank()));
  step.ForwardAndBackward();
  const Graph empty([&] {
    for (int count = dice.Between(1, 12); count > 0; --count) {
      Victim victim(dice.Between(0, kLastFunction), step);
      victim.Changed("captures a graph, and in eager mode", "in a capture");
      Refuse(victim.refusal());
    }
  });
  empty.Launch();
  step.ForwardAndBackward();
  TheFigures().steps += 2;
}

void RunRound(Dice& dice) {
  {
    Rig rig(dice);
    for (int count = dice.Between(4, 12); count > 0; --count) {
      const std::size_t i = dice.Between(0, static_cast<int>(rig.steps.size()) - 1);
      if (rig.warm[i] && dice.Percent(30)) {
        CaptureWithRefusals(dice, rig, i);
      } else {
        StepWithRefusals(dice, rig, i);
      }
    }
    World::Get().Wait();
    rig.group.Shutdown();
    rig.room.Forget();
    // Without a group nothing works, and nothing crashes.
    for (int function = 0; function <= kLastFunction; ++function) {
      Victim victim(function, *rig.steps[0]);
      victim.Changed("nvte_ep_initialize", "was not called");
      Refuse(victim.refusal());
    }
    for (const Refusal& refusal : ExtRefusalsWithoutGroup(HandleMemory(rig.layers[0]->handle()))) Refuse(refusal);
  }
  RefuseGroups(dice);
  if (dice.Percent(20)) RefusePlainMemory(dice);
  if (dice.Percent(20)) RefuseEagerCapture(dice);
}

}  // namespace

void RunInvalid() { MakeRounds("invalid", 2, RunRound); }

}  // namespace test
