// A block on a CPU: the roles that somebody has to run side by side, on threads or by turns on one. Each kernel has the
// same functions, by the type of its arguments: what it takes, its begin, its roles and its end.
#pragma once

#include "combine.h"
#include "dispatch.h"
#include "prepare.h"

namespace nvte_ep {

constexpr Team kAlone{0, 1, 0};
constexpr Warp kOneLane{0};

// ---- prepare ----

inline u32 roles_of(const PrepareArguments&) { return 1; }
inline u64 shared_bytes_of(const PrepareArguments& a) { return PrepareShared::size(a.group, 1); }
inline void begin_block(const PrepareArguments&, u8*) {}
inline void run_role(const PrepareArguments& a, u32 block, u32, u8* memory) {
  prepare_block(a, block, kAlone, kOneLane, 0, 1, memory);
}
inline void end_block(const PrepareArguments&, u32) {}

// ---- dispatch ----

inline u32 roles_of(const DispatchArguments&) { return 5; }
inline u64 shared_bytes_of(const DispatchArguments& a) { return DispatchShared::size(a); }
inline void begin_block(const DispatchArguments& a, u8* memory) { DispatchShared::at(memory, a).initialize(a, kAlone); }
inline void run_role(const DispatchArguments& a, u32 block, u32 role, u8* memory) {
  const DispatchShared s = DispatchShared::at(memory, a);
  switch (role) {
    case 0:
    case 1:
      return stage_rows(a, s, block, role, kOneLane);
    case 2:
      return load_staged(a, s, block, kOneLane);
    case 3:
      return store_slots(a, s, block, kOneLane);
    default:
      return clear_padding(a, s, block, kOneLane);
  }
}
inline void end_block(const DispatchArguments& a, u32 block) { finish_dispatch(a, block); }

// ---- combine ----

template <u32 kVectors, bool own>
void sum_rows_on_cpu(const CombineArguments& a, const Line& s) {
  switch (a.row_type) {
    case kBFloat16:
      return sum_rows<kBFloat16, kVectors, own>(a, s, kAlone, kOneLane);
    case kFloat16:
      return sum_rows<kFloat16, kVectors, own>(a, s, kAlone, kOneLane);
    default:
      return sum_rows<kFloat32, kVectors, own>(a, s, kAlone, kOneLane);
  }
}
template <bool own>
void run_line_role(const CombineArguments& a, const Line& s, u32 block, u32 role) {
  // One lane sums what a GPU's team does: all vectors of a piece.
  constexpr u32 kAll = kSummers * kGpuWarp * kVectors, kFew = 64;
  switch (role) {
    case 0:
      return load_rows<own>(a, s, block, kOneLane);
    case 1:
      return tell_peers<own>(a, s, block, kOneLane);
    default:
      return a.piece_bytes <= kFew * 16 ? sum_rows_on_cpu<kFew, own>(a, s) : sum_rows_on_cpu<kAll, own>(a, s);
  }
}
/// Three of its own line, and three of the line for the peers where there are any.
inline u32 roles_of(const CombineArguments& a) { return a.group.ranks > 1 ? 6 : 3; }
inline u64 shared_bytes_of(const CombineArguments& a) { return CombineShared::size(a); }
inline void begin_block(const CombineArguments& a, u8* memory) { CombineShared::at(memory, a).initialize(kAlone, 1); }
inline void run_role(const CombineArguments& a, u32 block, u32 role, u8* memory) {
  const CombineShared s = CombineShared::at(memory, a);
  return role < 3 ? run_line_role<true>(a, s.own, block, role) : run_line_role<false>(a, s.for_peers, block, role - 3);
}
inline void end_block(const CombineArguments& a, u32 block) { finish_combine(a, block); }

}  // namespace nvte_ep
