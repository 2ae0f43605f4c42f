// Per-step calls with one wrong argument: each has to be refused before any rank communicates, by name and value, and
// the next valid step has to work. All ranks pass the same wrong argument.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "ep/rig.h"

namespace test {
namespace {

std::string Text(std::size_t value) { return std::to_string(value); }

// ---- the handle, alike in all five calls ----

class HandleErrors : public ErrorTest {
 protected:
  // The rig's layer with other memory.
  static void EveryCallRefusesMemory(const Tensor& mem, const std::vector<std::string>& parts) {
    EveryCallRefuses(rig().layer.HandleOver(mem), parts);
  }

  static std::size_t bytes() { return rig().layer.memory().size(); }
  static std::uint8_t* memory() { return rig().layer.memory().data(); }
};

TEST_F(HandleErrors, NullMemoryTensor) { EveryCallRefusesMemory(Tensor(), {kHandleMem, "null"}); }

TEST_F(HandleErrors, NullMemoryAddress) {
  EveryCallRefusesMemory(Tensor(nullptr, kNVTEByte, {bytes()}), {kHandleMem, "null"});
}

TEST_F(HandleErrors, EmptyMemory) { EveryCallRefusesMemory(Tensor(nullptr, kNVTEByte, {0}), {kHandleMem}); }

TEST_F(HandleErrors, ShortMemory) {
  EveryCallRefusesMemory(Tensor(memory(), kNVTEByte, {bytes() - 1}), {kHandleMem, Text(bytes()), Text(bytes() - 1)});
}

TEST_F(HandleErrors, MemoryOfFloats) {
  EveryCallRefusesMemory(Tensor(memory(), kNVTEFloat32, {bytes()}), {kHandleMem, "byte", "got float32"});
}

TEST_F(HandleErrors, MemoryOfTwoDimensions) {
  EveryCallRefusesMemory(Tensor(memory(), kNVTEByte, {1, bytes()}), {kHandleMem, "1D", "2D"});
}

TEST_F(HandleErrors, MisalignedMemory) { EveryCallRefusesMemory(Any(kNVTEByte, {bytes()}, 16), {kHandleMem, "256"}); }

TEST_F(HandleErrors, NothingPreparedYet) {
  const Layer fresh(kTopK, kAlignment);
  DispatchArgs dispatch = step().dispatch_args();
  dispatch.handle = fresh.handle();
  Refuses("nvte_ep_dispatch", {"nvte_ep_prepare"}, [&] { dispatch.Call(); });
  CombineArgs combine = step().combine_args();
  combine.handle = fresh.handle();
  Refuses("nvte_ep_combine", {"nvte_ep_prepare"}, [&] { combine.Call(); });
  CombineBwdArgs combine_bwd = step().combine_bwd_args();
  combine_bwd.handle = fresh.handle();
  Refuses("nvte_ep_combine_bwd", {"nvte_ep_prepare"}, [&] { combine_bwd.Call(); });
  DispatchBwdArgs dispatch_bwd = step().dispatch_bwd_args();
  dispatch_bwd.handle = fresh.handle();
  Refuses("nvte_ep_dispatch_bwd", {"nvte_ep_prepare"}, [&] { dispatch_bwd.Call(); });
}

// ---- prepare ----

class PrepareErrors : public ErrorTest {
 protected:
  static void TopkIdx(const Tensor& tensor, std::vector<std::string> parts) {
    PrepareArgs args = step().prepare_args();
    args.topk_idx = tensor.get();
    parts.push_back("topk_idx");
    Refuses("nvte_ep_prepare", parts, [&] { args.Call(); });
  }
  static void TokenCounts(const Tensor& tensor, std::vector<std::string> parts) {
    PrepareArgs args = step().prepare_args();
    args.token_counts = tensor.get();
    parts.push_back(kCounts);
    Refuses("nvte_ep_prepare", parts, [&] { args.Call(); });
  }
};

TEST_F(PrepareErrors, TopkIdx) {
  TopkIdx(Tensor(), {"null"});
  TopkIdx(Any(kNVTEInt64, {32}), {"2D", "1D [32]"});
  TopkIdx(Any(kNVTEInt64, {1, 16, 2}), {"2D", "3D [1, 16, 2]"});
  TopkIdx(Any(kNVTEFloat32, {16, 2}), {"int64", "got float32"});
  TopkIdx(Any(kNVTEInt16, {16, 2}), {"int64", "got int16"});
  TopkIdx(Any(kNVTEInt64, {16, 3}), {"top_k, 2", "[16, 3]"});
  TopkIdx(Any(kNVTEInt64, {16, 1}), {"top_k, 2", "[16, 1]"});
  TopkIdx(Any(kNVTEInt64, {65, 2}), {"max_tokens_per_rank", "64, got 65"});
  TopkIdx(Any(kNVTEInt64, {16, 2}, 4), {"multiple of 8"});
  TopkIdx(Tensor(nullptr, kNVTEInt64, {16, 2}), {"null"});
}

TEST_F(PrepareErrors, TokenCounts) {
  TokenCounts(Any(kNVTEInt32, {3}), {"4 local experts", "got 3"});
  TokenCounts(Any(kNVTEInt32, {1, 4}), {"1D", "2D [1, 4]"});
  TokenCounts(Any(kNVTEFloat32, {4}), {"int32", "got float32"});
  TokenCounts(Any(kNVTEByte, {16}), {"int32", "got byte"});
  TokenCounts(Tensor(nullptr, kNVTEInt32, {4}), {"null"});
}

// ---- dispatch ----

class DispatchErrors : public ErrorTest {
 protected:
  static void With(NVTETensor DispatchArgs::*argument, const Tensor& tensor, const std::vector<std::string>& parts) {
    DispatchArgs args = step().dispatch_args();
    args.*argument = tensor.get();
    Refuses("nvte_ep_dispatch", parts, [&] { args.Call(); });
  }
  static void WithBoth(const Tensor& tokens, const Tensor& recv_tokens, const std::vector<std::string>& parts) {
    DispatchArgs args = step().dispatch_args();
    args.tokens = tokens.get();
    args.recv_tokens = recv_tokens.get();
    Refuses("nvte_ep_dispatch", parts, [&] { args.Call(); });
  }
};

TEST_F(DispatchErrors, Dimensions) {
  With(&DispatchArgs::topk_idx, Any(kNVTEInt64, {32}), {"topk_idx", "2D", "1D [32]"});
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {4096}), {"tokens", "2D", "1D [4096]"});
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {1, 16, kHidden}), {"tokens", "2D", "3D [1, 16, 256]"});
  With(&DispatchArgs::topk_weights, Any(kNVTEFloat32, {32}), {"topk_weights", "2D", "1D [32]"});
  With(&DispatchArgs::recv_tokens, Any(kNVTEBFloat16, {4096}), {"recv_tokens", "2D", "1D [4096]"});
  With(&DispatchArgs::recv_topk_weights, Any(kNVTEFloat32, {capacity(), 1}),
       {"recv_topk_weights", "1D", "2D [" + Text(capacity()) + ", 1]"});
}

TEST_F(DispatchErrors, DataTypes) {
  With(&DispatchArgs::tokens, Any(kNVTEFloat16, {16, kHidden}), {"recv_tokens", "float16, got bfloat16"});
  With(&DispatchArgs::recv_tokens, Any(kNVTEFloat16, {capacity(), kHidden}), {"recv_tokens", "bfloat16, got float16"});
  WithBoth(Any(kNVTEFloat8E4M3, {16, kHidden}), Any(kNVTEFloat8E4M3, {capacity(), kHidden}), {"tokens", "e4m3"});
  WithBoth(Any(kNVTEInt64, {16, kHidden}), Any(kNVTEInt64, {capacity(), kHidden}), {"tokens", "int64"});
  // Wider than the group's max_token_dtype, bf16.
  WithBoth(Any(kNVTEFloat32, {16, kHidden}), Any(kNVTEFloat32, {capacity(), kHidden}),
           {"tokens", "float32", "max_token_dtype"});
  With(&DispatchArgs::topk_weights, Any(kNVTEBFloat16, {16, kTopK}), {"topk_weights", "float32, got bfloat16"});
  With(&DispatchArgs::recv_topk_weights, Any(kNVTEBFloat16, {capacity()}),
       {"recv_topk_weights", "float32, got bfloat16"});
}

TEST_F(DispatchErrors, Widths) {
  With(&DispatchArgs::topk_idx, Any(kNVTEInt64, {16, 3}), {"topk_idx", "top_k, 2", "[16, 3]"});
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {16, 128}), {"recv_tokens", "128", "256"});
  With(&DispatchArgs::recv_tokens, Any(kNVTEBFloat16, {capacity(), 264}), {"recv_tokens", "256", "264"});
  WithBoth(Any(kNVTEBFloat16, {16, 264}), Any(kNVTEBFloat16, {capacity(), 264}), {"tokens", "256", "264"});
  // 100 elements of 2 bytes are no multiple of 16 bytes.
  WithBoth(Any(kNVTEBFloat16, {16, 100}), Any(kNVTEBFloat16, {capacity(), 100}), {"tokens", "16", "100"});
  With(&DispatchArgs::topk_weights, Any(kNVTEFloat32, {16, 3}), {"topk_weights", "top_k, 2", "[16, 3]"});
}

// The routing was prepared with 64-bit indices.
TEST_F(DispatchErrors, IndexTypeOfPrepare) {
  With(&DispatchArgs::topk_idx, Any(kNVTEInt32, {16, kTopK}), {"topk_idx", "int64, got int32"});
}

TEST_F(DispatchErrors, Rows) {
  With(&DispatchArgs::topk_idx, Any(kNVTEInt64, {15, kTopK}), {"topk_idx", "16, got [15, "});
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {15, kHidden}), {"tokens", "16, got [15, "});
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {kMaxTokens + 1, kHidden}), {"tokens", "16, got [65, "});
  With(&DispatchArgs::topk_weights, Any(kNVTEFloat32, {17, kTopK}), {"topk_weights", "16, got [17, "});
  With(&DispatchArgs::recv_tokens, Any(kNVTEBFloat16, {capacity() - 1, kHidden}),
       {"recv_tokens", Text(capacity()), Text(capacity() - 1)});
  With(&DispatchArgs::recv_topk_weights, Any(kNVTEFloat32, {capacity() - 1}),
       {"recv_topk_weights", Text(capacity()), Text(capacity() - 1)});
}

TEST_F(DispatchErrors, WeightsOnOneSideOnly) {
  With(&DispatchArgs::recv_topk_weights, Tensor(), {"recv_topk_weights", "null"});
  With(&DispatchArgs::topk_weights, Tensor(), {"topk_weights", "null"});
}

TEST_F(DispatchErrors, MissingTensors) {
  With(&DispatchArgs::topk_idx, Tensor(), {"topk_idx", "null"});
  With(&DispatchArgs::tokens, Tensor(), {"tokens", "null"});
  With(&DispatchArgs::recv_tokens, Tensor(), {"recv_tokens", "null"});
}

TEST_F(DispatchErrors, Addresses) {
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {16, kHidden}, 2), {"tokens", "16"});
  With(&DispatchArgs::tokens, Any(kNVTEBFloat16, {16, kHidden}, 8), {"tokens", "16"});
  With(&DispatchArgs::recv_tokens, Any(kNVTEBFloat16, {capacity(), kHidden}, 8), {"recv_tokens", "16"});
  With(&DispatchArgs::tokens, Tensor(nullptr, kNVTEBFloat16, {16, kHidden}), {"tokens", "null"});
  With(&DispatchArgs::recv_tokens, Tensor(nullptr, kNVTEBFloat16, {capacity(), kHidden}), {"recv_tokens", "null"});
  With(&DispatchArgs::topk_weights, Tensor(nullptr, kNVTEFloat32, {16, kTopK}), {"topk_weights", "null"});
  With(&DispatchArgs::recv_topk_weights, Tensor(nullptr, kNVTEFloat32, {capacity()}), {"recv_topk_weights", "null"});
}

// ---- combine ----

class CombineErrors : public ErrorTest {
 protected:
  static void With(NVTETensor CombineArgs::*argument, const Tensor& tensor, const std::vector<std::string>& parts) {
    CombineArgs args = step().combine_args();
    args.*argument = tensor.get();
    Refuses("nvte_ep_combine", parts, [&] { args.Call(); });
  }
  static void WithBoth(const Tensor& expert_out, const Tensor& result, const std::vector<std::string>& parts) {
    CombineArgs args = step().combine_args();
    args.expert_out = expert_out.get();
    args.result = result.get();
    Refuses("nvte_ep_combine", parts, [&] { args.Call(); });
  }
};

TEST_F(CombineErrors, Dimensions) {
  With(&CombineArgs::expert_out, Any(kNVTEBFloat16, {4096}), {"expert_out", "2D", "1D [4096]"});
  With(&CombineArgs::result, Any(kNVTEBFloat16, {4096}), {"result", "2D", "1D [4096]"});
}

TEST_F(CombineErrors, DataTypes) {
  With(&CombineArgs::result, Any(kNVTEFloat16, {16, kHidden}), {"result", "bfloat16, got float16"});
  With(&CombineArgs::expert_out, Any(kNVTEFloat8E4M3, {capacity(), kHidden}), {"expert_out", "e4m3"});
  WithBoth(Any(kNVTEInt32, {capacity(), kHidden}), Any(kNVTEInt32, {16, kHidden}), {"expert_out|result", "got int32"});
  WithBoth(Any(kNVTEFloat32, {capacity(), kHidden}), Any(kNVTEFloat32, {16, kHidden}),
           {"expert_out|result", "float32", "max_token_dtype"});
}

TEST_F(CombineErrors, Shapes) {
  With(&CombineArgs::result, Any(kNVTEBFloat16, {15, kHidden}), {"result", "16, got [15, "});
  // The default of a wrapper that allocates max_tokens_per_rank rows.
  With(&CombineArgs::result, Any(kNVTEBFloat16, {kMaxTokens, kHidden}), {"result", "16, got [64, "});
  // Of two tensors of different width, the receive-side one is named.
  With(&CombineArgs::result, Any(kNVTEBFloat16, {16, 128}), {"expert_out", "128", "256"});
  With(&CombineArgs::expert_out, Any(kNVTEBFloat16, {capacity() - 1, kHidden}),
       {"expert_out", Text(capacity()), Text(capacity() - 1)});
  WithBoth(Any(kNVTEBFloat16, {capacity(), 264}), Any(kNVTEBFloat16, {16, 264}), {"expert_out|result", "256", "264"});
}

TEST_F(CombineErrors, Addresses) {
  With(&CombineArgs::expert_out, Tensor(), {"expert_out", "null"});
  With(&CombineArgs::result, Tensor(), {"result", "null"});
  With(&CombineArgs::expert_out, Any(kNVTEBFloat16, {capacity(), kHidden}, 8), {"expert_out", "16"});
  With(&CombineArgs::result, Any(kNVTEBFloat16, {16, kHidden}, 2), {"result", "16"});
  With(&CombineArgs::expert_out, Tensor(nullptr, kNVTEBFloat16, {capacity(), kHidden}), {"expert_out", "null"});
  With(&CombineArgs::result, Tensor(nullptr, kNVTEBFloat16, {16, kHidden}), {"result", "null"});
}

// ---- dispatch_bwd ----

class DispatchBwdErrors : public ErrorTest {
 protected:
  static void With(NVTETensor DispatchBwdArgs::*argument, const Tensor& tensor, const std::vector<std::string>& parts) {
    DispatchBwdArgs args = step().dispatch_bwd_args();
    args.*argument = tensor.get();
    Refuses("nvte_ep_dispatch_bwd", parts, [&] { args.Call(); });
  }
};

TEST_F(DispatchBwdErrors, Dimensions) {
  With(&DispatchBwdArgs::grad, Any(kNVTEBFloat16, {4096}), {"grad", "2D", "1D [4096]"});
  With(&DispatchBwdArgs::g_recv_topk_weights, Any(kNVTEFloat32, {capacity(), 1}),
       {"g_recv_topk_weights", "1D", "2D [" + Text(capacity()) + ", 1]"});
  With(&DispatchBwdArgs::grad_tokens, Any(kNVTEBFloat16, {4096}), {"grad_tokens", "2D", "1D [4096]"});
  With(&DispatchBwdArgs::grad_topk_weights, Any(kNVTEFloat32, {32}), {"grad_topk_weights", "2D", "1D [32]"});
}

TEST_F(DispatchBwdErrors, DataTypes) {
  With(&DispatchBwdArgs::grad, Any(kNVTEFloat8E5M2, {capacity(), kHidden}), {"grad", "e5m2"});
  With(&DispatchBwdArgs::grad_tokens, Any(kNVTEFloat16, {16, kHidden}), {"grad_tokens", "bfloat16, got float16"});
  With(&DispatchBwdArgs::g_recv_topk_weights, Any(kNVTEBFloat16, {capacity()}),
       {"g_recv_topk_weights", "float32, got bfloat16"});
  With(&DispatchBwdArgs::grad_topk_weights, Any(kNVTEBFloat16, {16, kTopK}),
       {"grad_topk_weights", "float32, got bfloat16"});
}

TEST_F(DispatchBwdErrors, Shapes) {
  With(&DispatchBwdArgs::grad, Any(kNVTEBFloat16, {capacity() - 1, kHidden}),
       {"grad", Text(capacity()), Text(capacity() - 1)});
  With(&DispatchBwdArgs::grad, Any(kNVTEBFloat16, {capacity(), 264}), {"grad", "256", "264"});
  With(&DispatchBwdArgs::g_recv_topk_weights, Any(kNVTEFloat32, {capacity() - 1}),
       {"g_recv_topk_weights", Text(capacity()), Text(capacity() - 1)});
  With(&DispatchBwdArgs::grad_tokens, Any(kNVTEBFloat16, {15, kHidden}), {"grad_tokens", "16, got [15, "});
  With(&DispatchBwdArgs::grad_tokens, Any(kNVTEBFloat16, {16, 128}), {"grad", "128", "256"});
  With(&DispatchBwdArgs::grad_topk_weights, Any(kNVTEFloat32, {16, 3}), {"grad_topk_weights", "top_k, 2", "[16, 3]"});
  With(&DispatchBwdArgs::grad_topk_weights, Any(kNVTEFloat32, {17, kTopK}), {"grad_topk_weights", "16, got [17, "});
}

TEST_F(DispatchBwdErrors, Addresses) {
  With(&DispatchBwdArgs::grad, Tensor(), {"grad", "null"});
  With(&DispatchBwdArgs::g_recv_topk_weights, Tensor(), {"g_recv_topk_weights", "null"});
  With(&DispatchBwdArgs::grad_tokens, Tensor(), {"grad_tokens", "null"});
  With(&DispatchBwdArgs::grad_topk_weights, Tensor(), {"grad_topk_weights", "null"});
  With(&DispatchBwdArgs::grad, Any(kNVTEBFloat16, {capacity(), kHidden}, 8), {"grad", "16"});
  With(&DispatchBwdArgs::grad_tokens, Any(kNVTEBFloat16, {16, kHidden}, 2), {"grad_tokens", "16"});
  With(&DispatchBwdArgs::grad, Tensor(nullptr, kNVTEBFloat16, {capacity(), kHidden}), {"grad", "null"});
  With(&DispatchBwdArgs::grad_tokens, Tensor(nullptr, kNVTEBFloat16, {16, kHidden}), {"grad_tokens", "null"});
}

// ---- combine_bwd ----

class CombineBwdErrors : public ErrorTest {
 protected:
  static void With(NVTETensor CombineBwdArgs::*argument, const Tensor& tensor, const std::vector<std::string>& parts) {
    CombineBwdArgs args = step().combine_bwd_args();
    args.*argument = tensor.get();
    Refuses("nvte_ep_combine_bwd", parts, [&] { args.Call(); });
  }
};

TEST_F(CombineBwdErrors, Dimensions) {
  With(&CombineBwdArgs::grad, Any(kNVTEBFloat16, {4096}), {"grad", "2D", "1D [4096]"});
  With(&CombineBwdArgs::grad_expert_out, Any(kNVTEBFloat16, {4096}), {"grad_expert_out", "2D", "1D [4096]"});
}

TEST_F(CombineBwdErrors, DataTypes) {
  With(&CombineBwdArgs::grad, Any(kNVTEFloat8E5M2, {16, kHidden}), {"grad", "e5m2"});
  With(&CombineBwdArgs::grad_expert_out, Any(kNVTEFloat16, {capacity(), kHidden}),
       {"grad_expert_out", "bfloat16, got float16"});
}

TEST_F(CombineBwdErrors, Shapes) {
  With(&CombineBwdArgs::grad, Any(kNVTEBFloat16, {15, kHidden}), {"grad", "16, got [15, "});
  With(&CombineBwdArgs::grad, Any(kNVTEBFloat16, {16, 128}), {"grad_expert_out", "128", "256"});
  With(&CombineBwdArgs::grad_expert_out, Any(kNVTEBFloat16, {capacity() - 1, kHidden}),
       {"grad_expert_out", Text(capacity()), Text(capacity() - 1)});
  With(&CombineBwdArgs::grad_expert_out, Any(kNVTEBFloat16, {capacity(), 128}), {"grad_expert_out", "256", "128"});
}

TEST_F(CombineBwdErrors, Addresses) {
  With(&CombineBwdArgs::grad, Tensor(), {"grad", "null"});
  With(&CombineBwdArgs::grad_expert_out, Tensor(), {"grad_expert_out", "null"});
  With(&CombineBwdArgs::grad, Any(kNVTEBFloat16, {16, kHidden}, 8), {"grad", "16"});
  With(&CombineBwdArgs::grad_expert_out, Any(kNVTEBFloat16, {capacity(), kHidden}, 2), {"grad_expert_out", "16"});
  With(&CombineBwdArgs::grad, Tensor(nullptr, kNVTEBFloat16, {16, kHidden}), {"grad", "null"});
  With(&CombineBwdArgs::grad_expert_out, Tensor(nullptr, kNVTEBFloat16, {capacity(), kHidden}),
       {"grad_expert_out", "null"});
}

// ---- memory that two arguments share ----

class OverlapErrors : public ErrorTest {
 protected:
  static std::uint8_t* DataOf(NVTETensor tensor) { return static_cast<std::uint8_t*>(nvte_tensor_data(tensor)); }
  static std::size_t BytesOf(NVTETensor tensor) { return nvte_tensor_size_bytes(tensor); }
  // A tensor like `like` at another address.
  static Tensor Moved(NVTETensor like, std::uint8_t* data) {
    const NVTEShape shape = nvte_tensor_shape(like);
    return Tensor(data, nvte_tensor_type(like), std::vector<std::size_t>(shape.data, shape.data + shape.ndim));
  }
};

TEST_F(OverlapErrors, Prepare) {
  PrepareArgs args = step().prepare_args();
  const Tensor counts = Moved(args.token_counts, DataOf(args.topk_idx) + 16);
  args.token_counts = counts.get();
  Refuses("nvte_ep_prepare", {kCounts, "must not share memory with topk_idx"}, [&] { args.Call(); });
}

TEST_F(OverlapErrors, Dispatch) {
  DispatchArgs args = step().dispatch_args();
  const Tensor weights = Moved(args.recv_topk_weights, DataOf(args.recv_tokens) + 4096);
  args.recv_topk_weights = weights.get();
  Refuses("nvte_ep_dispatch", {"recv_topk_weights must not share memory with recv_tokens"}, [&] { args.Call(); });
  args = step().dispatch_args();
  const Tensor in_place = Moved(args.tokens, DataOf(args.recv_tokens));
  args.tokens = in_place.get();
  Refuses("nvte_ep_dispatch", {"recv_tokens must not share memory with tokens"}, [&] { args.Call(); });
}

TEST_F(OverlapErrors, Combine) {
  CombineArgs args = step().combine_args();
  const Tensor over_memory = Moved(args.result, rig().layer.memory().data());
  // The native engine's is smaller, and a tensor that leaves its allocation is refused for that.
  if (rig().layer.memory().size() >= BytesOf(args.result)) {
    args.result = over_memory.get();
    Refuses("nvte_ep_combine", {"result must not share memory with", kHandleMem}, [&] { args.Call(); });
  } else {
    EXPECT_TRUE(OnNativeEngine());
  }
  args = step().combine_args();
  const Tensor last_rows =
      Moved(args.result, DataOf(args.expert_out) + BytesOf(args.expert_out) - BytesOf(args.result));
  args.result = last_rows.get();
  Refuses("nvte_ep_combine", {"result must not share memory with expert_out"}, [&] { args.Call(); });
}

TEST_F(OverlapErrors, Gradients) {
  CombineBwdArgs combine = step().combine_bwd_args();
  const Tensor rows = Moved(combine.grad, DataOf(combine.grad_expert_out) + 64);
  combine.grad = rows.get();
  Refuses("nvte_ep_combine_bwd", {"grad_expert_out must not share memory with grad"}, [&] { combine.Call(); });
  DispatchBwdArgs dispatch = step().dispatch_bwd_args();
  const Tensor weights = Moved(dispatch.grad_topk_weights, DataOf(dispatch.g_recv_topk_weights));
  dispatch.grad_topk_weights = weights.get();
  Refuses("nvte_ep_dispatch_bwd", {"grad_topk_weights must not share memory with g_recv_topk_weights"},
          [&] { dispatch.Call(); });
}

// What is only read may be shared: the weights lie in the tokens' memory.
TEST_F(OverlapErrors, ReadersMayShare) {
  DispatchArgs args = step().dispatch_args();
  const Tensor weights = Moved(args.topk_weights, DataOf(args.tokens));
  args.topk_weights = weights.get();
  EXPECT_NO_THROW(args.Call());
  World::Get().Wait();
}

}  // namespace
}  // namespace test
