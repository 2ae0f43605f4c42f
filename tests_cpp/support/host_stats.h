// The host runtime's counters, where the program runs on it.

#ifndef NVTE_EP_TESTS_SUPPORT_HOST_STATS_H_
#define NVTE_EP_TESTS_SUPPORT_HOST_STATS_H_

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace test {

// The leading part of the structure that nvte_ep_host_stats fills, as far as struct_size goes.
struct HostStats {
  std::size_t struct_size = sizeof(HostStats);
  std::uint64_t groups_created = 0;
  std::uint64_t groups_destroyed = 0;
  std::uint64_t handles_created = 0;
  std::uint64_t handles_destroyed = 0;
  std::uint64_t updates = 0;
  std::uint64_t dispatches = 0;
  std::uint64_t combines = 0;
  std::uint64_t comms_created = 0;
  std::uint64_t comms_destroyed = 0;
  std::uint64_t device_bytes_live = 0;
  std::uint64_t device_allocations_live = 0;
  std::uint64_t windows_live = 0;
  std::uint64_t streams_live = 0;
  std::uint64_t collectives = 0;
};

// The counters of this process, or nothing on real hardware. Looked up by name: the host runtime is no library that the
// program needs.
inline std::optional<HostStats> ReadHostStats() {
  using Function = int (*)(HostStats*);
  const auto read = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "nvte_ep_host_stats"));
  HostStats stats;
  if (read == nullptr || read(&stats) != 0) return std::nullopt;
  return stats;
}

// Whether the program runs on the host runtime, where every shape is cheap. On a GPU every new combination of hidden
// size, token type and top-k has NCCL EP compile kernels for 10 to 20 seconds, so sweeps over these are shorter there.
inline bool EveryShapeIsCheap() { return ReadHostStats().has_value(); }

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_HOST_STATS_H_
