// Symmetric memory that comes and goes beside a group's steps, and what the library has to tell of it.

#ifndef NVTE_EP_TESTS_STRESS_SYMMETRIC_H_
#define NVTE_EP_TESTS_STRESS_SYMMETRIC_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "stress/stress.h"
#include "support/symm.h"

namespace test {

// Allocations of the pool and registered memory. Every rank does the same.
class SymmetricMemory {
 public:
  SymmetricMemory() = default;
  ~SymmetricMemory() {
    for (const Registered& memory : registered_) static_cast<void>(ncclMemFree(memory.data));
  }
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  // One call of the four that change something, and what it changes.
  void Act(Dice& dice) {
    switch (dice.Between(0, 5)) {
      case 0:
      case 1:
      case 2:
        return Allocate(dice.OneOf<int>({1, 255, 256, 257, 4096, 5 << 20, dice.Between(1, 1 << 20)}));
      case 3:
        if (!pieces_.empty()) return Free(dice.Between(0, static_cast<int>(pieces_.size()) - 1));
        return Register(std::size_t{2} << 20);
      case 4:
        return Register(dice.OneOf<std::size_t>({std::size_t{2} << 20, std::size_t{4} << 20}));
      default:
        if (!registered_.empty()) return Deregister(dice.Between(0, static_cast<int>(registered_.size()) - 1));
        return Allocate(4096);
    }
  }
  // Gives everything back.
  void Clear() {
    while (!pieces_.empty()) Free(0);
    while (!registered_.empty()) Deregister(0);
  }

 private:
  struct Piece {
    std::unique_ptr<SymmBuffer> memory;
    int value;
  };
  struct Registered {
    void* data;
    std::size_t bytes;
  };

  static std::uint64_t Rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
  static void Expect(bool holds, const char* what) {
    if (!holds) Fail(std::string("symmetric memory: ") + what);
  }

  static void ExpectPlace(void* data, std::size_t bytes, ncclWindow_t window, std::uint64_t offset) {
    for (const std::size_t further : {std::size_t{0}, bytes / 2, bytes - 1}) {
      ncclWindow_t found = nullptr;
      std::uint64_t at = 0;
      const auto* const address = static_cast<const std::uint8_t*>(data) + further;
      nvte_ep_ext_window_of(address, &found, &at);
      Expect(nvte_ep_ext_is_symmetric(address) == 1 && found == window && at == offset + further, "another place");
    }
    std::uint64_t ends[] = {offset, ~offset};
    MPI_Allreduce(MPI_IN_PLACE, ends, 2, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
    Expect(ends[0] == ~ends[1], "other offsets on other ranks");
  }

  void Allocate(std::size_t bytes) {
    const NVTEEpExtMemoryUsage before = Usage();
    auto memory = std::make_unique<SymmBuffer>(bytes);
    const NVTEEpExtMemoryUsage after = Usage();
    Expect(after.symm_in_use == before.symm_in_use + Rounded(bytes), "bytes in use after an allocation");
    Expect(after.symm_allocations == before.symm_allocations + 1, "live allocations after an allocation");
    Expect(after.symm_peak == std::max(before.symm_peak, after.symm_in_use), "most bytes in use");
    const bool grew = after.symm_segments == before.symm_segments + 1;
    Expect(grew || after.symm_segments == before.symm_segments, "segments after an allocation");
    Expect(grew == (after.symm_reserved > before.symm_reserved), "reserved bytes after an allocation");
    ExpectPlace(memory->data(), bytes, memory->window(), memory->offset());
    const int value = static_cast<int>(after.symm_peak / 256 + pieces_.size()) % 255;
    TEST_CUDA(cudaMemsetAsync(memory->data(), value, bytes, World::Get().stream()));
    pieces_.push_back({std::move(memory), value});
  }

  void Free(std::size_t index) {
    const Piece piece = std::move(pieces_[index]);
    pieces_.erase(pieces_.begin() + static_cast<std::ptrdiff_t>(index));
    std::vector<std::uint8_t> values(piece.memory->bytes());
    TEST_CUDA(cudaMemcpyAsync(values.data(), piece.memory->data(), values.size(), cudaMemcpyDeviceToHost,
                              World::Get().stream()));
    World::Get().Wait();
    const auto same = [&](std::uint8_t value) { return value == piece.value; };
    Expect(std::all_of(values.begin(), values.end(), same), "somebody else wrote into an allocation");
    const NVTEEpExtMemoryUsage before = Usage();
    nvte_ep_ext_symm_free(piece.memory->data());
    Expect(nvte_ep_ext_is_symmetric(piece.memory->data()) == 0, "an address that was freed");
    piece.memory->Forget();
    const NVTEEpExtMemoryUsage after = Usage();
    Expect(after.symm_in_use + Rounded(values.size()) == before.symm_in_use, "bytes in use after a free");
    Expect(after.symm_allocations + 1 == before.symm_allocations, "live allocations after a free");
    Expect(after.symm_reserved == before.symm_reserved && after.symm_peak == before.symm_peak, "a free gave back");
  }

  void Register(std::size_t bytes) {
    const NVTEEpExtMemoryUsage before = Usage();
    void* data = nullptr;
    TEST_NCCL(ncclMemAlloc(&data, bytes));
    registered_.push_back({data, bytes});
    ncclWindow_t window = nullptr;
    nvte_ep_ext_window_register(data, bytes, &window);
    Expect(window != nullptr && Usage().registered == before.registered + 1, "a registration");
    Expect(Usage().symm_in_use == before.symm_in_use, "a registration takes nothing of the pool");
    ExpectPlace(data, bytes, window, 0);
  }

  void Deregister(std::size_t index) {
    const Registered memory = registered_[index];
    const NVTEEpExtMemoryUsage before = Usage();
    nvte_ep_ext_window_deregister(memory.data);
    registered_.erase(registered_.begin() + static_cast<std::ptrdiff_t>(index));
    Expect(Usage().registered + 1 == before.registered, "a registration that ended");
    Expect(nvte_ep_ext_is_symmetric(memory.data) == 0, "an address that was deregistered");
    TEST_NCCL(ncclMemFree(memory.data));
  }

  std::vector<Piece> pieces_;
  std::vector<Registered> registered_;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_STRESS_SYMMETRIC_H_
