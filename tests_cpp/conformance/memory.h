// Memory of the conformance program, and NCCL EP's descriptors of it.

#ifndef NVTE_EP_TESTS_CONFORMANCE_MEMORY_H_
#define NVTE_EP_TESTS_CONFORMANCE_MEMORY_H_

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_ep.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "support/world.h"

namespace conformance {

using Bytes = std::vector<std::uint8_t>;

// What memory holds that nobody has written: as a float of any width a NaN.
constexpr std::uint8_t kUnwritten = 0xff;

enum class Place { kDevice, kPinned, kWindow };

// Bytes that a GPU can write, with room behind them that has to stay as it was. A window is registered with the
// communicator, which all ranks do together, with the same extent.
class Block {
 public:
  static constexpr std::size_t kRoom = 512;

  // For a window, `offset` is where the bytes begin in it, and `room` what lies behind them.
  Block(Place place, std::size_t bytes, std::size_t offset = 0, std::size_t room = kRoom)
      : place_(place), bytes_(bytes), offset_(offset), extent_(offset + bytes + room) {
    if (place == Place::kDevice) {
      TEST_CUDA(cudaMalloc(&base_, extent_));
    } else if (place == Place::kPinned) {
      TEST_CUDA(cudaHostAlloc(&base_, extent_, cudaHostAllocDefault));
    } else {
      extent_ = (extent_ + 4095) / 4096 * 4096;
      TEST_NCCL(ncclMemAlloc(&base_, extent_));
      TEST_NCCL(ncclCommWindowRegister(Comm(), base_, extent_, &window_, NCCL_WIN_COLL_SYMMETRIC));
    }
    Clear();
  }
  ~Block() {
    if (place_ == Place::kDevice) {
      static_cast<void>(cudaFree(base_));
    } else if (place_ == Place::kPinned) {
      static_cast<void>(cudaFreeHost(base_));
    } else {
      static_cast<void>(ncclCommWindowDeregister(Comm(), window_));
      static_cast<void>(ncclMemFree(base_));
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data() const { return static_cast<std::uint8_t*>(base_) + offset_; }
  ncclWindow_t window() const { return window_; }
  std::size_t offset() const { return offset_; }

  // Pinned memory: nothing that is queued uses it any more.
  void Clear() {
    if (place_ == Place::kPinned) {
      std::memset(base_, kUnwritten, extent_);
    } else {
      TEST_CUDA(cudaMemsetAsync(base_, kUnwritten, extent_, Stream()));
    }
  }
  // Everything unwritten but for the first bytes; not for pinned memory.
  void Set(const Bytes& bytes) {
    Clear();
    if (!bytes.empty())
      TEST_CUDA(cudaMemcpyAsync(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice, Stream()));
    test::World::Get().Wait();
  }
  // The first bytes, once all queued work is done.
  Bytes Get(std::size_t count) const {
    Bytes bytes(count);
    if (place_ != Place::kPinned && count > 0) {
      TEST_CUDA(cudaMemcpyAsync(bytes.data(), data(), count, cudaMemcpyDeviceToHost, Stream()));
    }
    test::World::Get().Wait();
    if (place_ == Place::kPinned && count > 0) std::memcpy(bytes.data(), data(), count);
    return bytes;
  }
  // Whether nothing behind the first bytes was written, up to the end of the room.
  bool UntouchedBehind(std::size_t count) const {
    const Bytes bytes = Get(bytes_ + kRoom);
    return std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(count), bytes.end(),
                       [](std::uint8_t byte) { return byte == kUnwritten; });
  }

 private:
  static ncclComm_t Comm() { return test::World::Get().comm(); }
  static cudaStream_t Stream() { return test::World::Get().stream(); }

  Place place_;
  std::size_t bytes_, offset_, extent_;
  void* base_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

// A descriptor of the first rows of a block, or of nothing at all.
class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(const Block& block, ncclDataType_t type, const std::vector<std::size_t>& sizes, bool window_only = false)
      : given_(true), sizes_(sizes), raw_(NCCL_EP_TENSOR_INIT) {
    raw_.ndim = static_cast<unsigned>(sizes.size());
    raw_.datatype = type;
    raw_.win_hdl = block.window();
    raw_.win_offset = block.window() == nullptr ? 0 : block.offset();
    // Without elements it has no address, as frameworks pass empty tensors.
    if (std::find(sizes.begin(), sizes.end(), 0u) != sizes.end()) return;
    raw_.data = window_only ? nullptr : block.data();
  }

  ncclEpTensor_t* get() {
    raw_.sizes = sizes_.data();
    return given_ ? &raw_ : nullptr;
  }

 private:
  bool given_ = false;
  std::vector<std::size_t> sizes_;
  ncclEpTensor_t raw_ = {};
};

}  // namespace conformance

#endif  // NVTE_EP_TESTS_CONFORMANCE_MEMORY_H_
