// kernels/native/ for the host runtime (host/src/native.rs): what a launch takes, what memory it reads and writes, and
// its roles. Without exceptions and the C++ library.

#include "native/cpu.h"

using namespace nvte_ep;

namespace {

/// As kernels.rs numbers them.
enum Kernel : u32 { kPrepareKernel, kDispatchKernel, kCombineKernel };

/// Memory of the caller that a launch uses; `Span` in native.rs is the same.
struct Span {
  const void* address;
  u64 bytes;
  u64 row_bytes;     // of what the kernel reads wholly; 0: it is written, or read in parts
  const char* name;  // of the argument
};

template <typename Use>
auto with(u32 kernel, const void* arguments, Use use) {
  switch (kernel) {
    case kPrepareKernel:
      return use(*static_cast<const PrepareArguments*>(arguments));
    case kDispatchKernel:
      return use(*static_cast<const DispatchArguments*>(arguments));
    default:
      return use(*static_cast<const CombineArguments*>(arguments));
  }
}

/// Lists spans; what has no address or no bytes is left out.
struct Spans {
  Span* next;
  u32 count = 0;
  void add(const char* name, const void* address, u64 bytes, u64 row_bytes = 0) {
    if (address == nullptr || bytes == 0) return;
    next[count++] = {address, bytes, row_bytes, name};
  }
  void tables(const Group& g, const Handle& h) {
    add("the group's memory", g.own, 1);
    add("the group's memory", g.counters, 1);
    const u8* end = reinterpret_cast<const u8*>(h.alive + u64(g.blocks) * g.local_experts);
    add("handle.mem", h.meta, static_cast<u64>(end - reinterpret_cast<const u8*>(h.meta)));
  }
};

/// What of a row by row argument is known: all of it once the stream has come to the launch, and the handle holds a
/// routing; before that, that it begins there.
u64 rows_or_one(bool prepared, u64 rows, u64 row_bytes) { return prepared ? rows * row_bytes : row_bytes == 0 ? 0 : 1; }

void list(Spans& spans, const PrepareArguments& a, bool) {
  const u64 row = u64(a.handle.top_k) * (a.indices_are_64 ? 8 : 4);
  spans.add("topk_idx", a.topk_idx, a.tokens * row, row);
  spans.add("token_counts", a.token_counts, u64(a.group.local_experts) * (a.counts_are_64 ? 8 : 4));
  spans.add("total_recv_tokens", a.total, a.total_is_64 ? 8 : 4);
  spans.add("handle.mem", a.header, 20);
  spans.tables(a.group, a.handle);
}
void list(Spans& spans, const DispatchArguments& a, bool prepared) {
  const u64 tokens = prepared ? a.handle.meta->tokens : 0, weights = u64(a.handle.top_k) * 4;
  spans.tables(a.group, a.handle);
  spans.add("tokens", a.tokens, rows_or_one(prepared, tokens, a.row_bytes), prepared ? a.row_bytes : 0);
  spans.add("tokens", a.scales, rows_or_one(prepared, tokens, a.scale_bytes), prepared ? a.scale_bytes : 0);
  spans.add("topk_weights", a.weights, rows_or_one(prepared, tokens, weights), prepared ? weights : 0);
  spans.add("recv_tokens", a.recv_tokens, a.rows * a.row_bytes);
  spans.add("recv_tokens", a.recv_scales, a.rows * a.scale_bytes);
  spans.add("recv_topk_weights", a.recv_weights, a.rows * 4);
}
void list(Spans& spans, const CombineArguments& a, bool prepared) {
  const u64 tokens = prepared ? a.handle.meta->tokens : 0, weights = u64(a.handle.top_k) * 4;
  spans.tables(a.group, a.handle);
  spans.add("expert_out", a.rows, 1);
  spans.add("g_recv_topk_weights", a.row_weights, 1);
  spans.add("result", a.result, rows_or_one(prepared, tokens, a.row_bytes));
  spans.add("grad_topk_weights", a.weights, rows_or_one(prepared, tokens, weights));
}

}  // namespace

extern "C" {

/// Room that nvte_ep_native_spans needs.
extern const u32 nvte_ep_native_most_spans = 12;

/// What the roles call while they wait, and when they change what others see. Once, before all else.
void nvte_ep_native_hooks(void (*on_wait)(), void (*on_change)()) { yield = on_wait, disturb = on_change; }

u64 nvte_ep_native_argument_bytes(u32 kernel) {
  return kernel == kPrepareKernel    ? sizeof(PrepareArguments)
         : kernel == kDispatchKernel ? sizeof(DispatchArguments)
                                     : sizeof(CombineArguments);
}
u32 nvte_ep_native_blocks(u32 kernel, const void* arguments) {
  return with(kernel, arguments, [](const auto& a) { return a.group.blocks; });
}
const u8* nvte_ep_native_segment(u32 kernel, const void* arguments) {
  return with(kernel, arguments, [](const auto& a) -> const u8* { return a.group.own; });
}
u32 nvte_ep_native_roles(u32 kernel, const void* arguments) {
  return with(kernel, arguments, [](const auto& a) { return roles_of(a); });
}
u64 nvte_ep_native_shared_bytes(u32 kernel, const void* arguments) {
  return with(kernel, arguments, [](const auto& a) { return shared_bytes_of(a); });
}
u32 nvte_ep_native_spans(u32 kernel, const void* arguments, bool prepared, Span* out) {
  return with(kernel, arguments, [&](const auto& a) {
    Spans spans{out};
    list(spans, a, prepared);
    return spans.count;
  });
}
void nvte_ep_native_begin(u32 kernel, const void* arguments, u8* memory) {
  with(kernel, arguments, [&](const auto& a) { begin_block(a, memory); });
}
void nvte_ep_native_role(u32 kernel, const void* arguments, u32 block, u32 role, u8* memory) {
  with(kernel, arguments, [&](const auto& a) { run_role(a, block, role, memory); });
}
void nvte_ep_native_end(u32 kernel, const void* arguments, u32 block) {
  with(kernel, arguments, [&](const auto& a) { end_block(a, block); });
}
}
