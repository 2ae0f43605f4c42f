// Device memory with guard bytes, and copies ordered on the world's stream.

#ifndef NVTE_EP_TESTS_SUPPORT_DEVICE_H_
#define NVTE_EP_TESTS_SUPPORT_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/number.h"
#include "support/tensor.h"
#include "support/world.h"

namespace test {

template <typename T>
NVTEDType DTypeOf();

template <>
inline NVTEDType DTypeOf<float>() {
  return kNVTEFloat32;
}
template <>
inline NVTEDType DTypeOf<BFloat16>() {
  return kNVTEBFloat16;
}
template <>
inline NVTEDType DTypeOf<Float16>() {
  return kNVTEFloat16;
}
template <>
inline NVTEDType DTypeOf<std::int32_t>() {
  return kNVTEInt32;
}
template <>
inline NVTEDType DTypeOf<std::int64_t>() {
  return kNVTEInt64;
}
template <>
inline NVTEDType DTypeOf<std::uint8_t>() {
  return kNVTEByte;
}

// Every byte of a fresh buffer. As a float of any width it is a NaN, so a value that was never written shows.
constexpr unsigned char kUnwritten = 0xff;

// `count` elements of device memory, with a guard of kGuardBytes behind them. Everything starts as kUnwritten.
template <typename T>
class DeviceBuffer {
 public:
  static constexpr std::size_t kGuardBytes = 512;

  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t count) : count_(count) {
    void* data = nullptr;
    TEST_CUDA(cudaMalloc(&data, bytes() + kGuardBytes));
    data_ = static_cast<T*>(data);
    Clear();
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) { Upload(values); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (data_ != nullptr) static_cast<void>(cudaFree(data_));
  }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

  // Marks everything, the guard too, as not written.
  void Clear() { TEST_CUDA(cudaMemsetAsync(data_, kUnwritten, bytes() + kGuardBytes, World::Get().stream())); }

  // Copies from the host; the values are in place when it returns, and all that was queued before is done. The same
  // without values: whether a test waits may not depend on how many rows its rank has.
  void Upload(const std::vector<T>& values) {
    cudaStream_t stream = World::Get().stream();
    if (!values.empty()) {
      TEST_CUDA(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
    }
    World::Get().Wait();
  }

  // Copies to the host, behind all work enqueued so far.
  std::vector<T> Download() const {
    std::vector<T> values(count_);
    if (!values.empty()) CopyOut(values.data(), data_, bytes());
    World::Get().Wait();
    return values;
  }

  bool GuardIntact() const {
    std::vector<unsigned char> guard(kGuardBytes);
    CopyOut(guard.data(), reinterpret_cast<const unsigned char*>(data_) + bytes(), guard.size());
    World::Get().Wait();
    for (const unsigned char byte : guard) {
      if (byte != kUnwritten) return false;
    }
    return true;
  }

  // A tensor over this memory. Without elements it has no address, as frameworks pass empty tensors.
  Tensor View(const std::vector<std::size_t>& shape) const { return ViewAs(DTypeOf<T>(), shape); }
  Tensor ViewAs(NVTEDType dtype, const std::vector<std::size_t>& shape) const {
    std::size_t elements = 1;
    for (const std::size_t extent : shape) elements *= extent;
    return Tensor(elements == 0 ? nullptr : data_, dtype, shape);
  }

 private:
  static void CopyOut(void* to, const void* from, std::size_t bytes) {
    TEST_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, World::Get().stream()));
  }

  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_DEVICE_H_
