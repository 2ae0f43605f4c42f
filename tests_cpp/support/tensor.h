// Owner of one NVTETensor.

#ifndef NVTE_EP_TESTS_SUPPORT_TENSOR_H_
#define NVTE_EP_TESTS_SUPPORT_TENSOR_H_

#include <transformer_engine/transformer_engine.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace test {

inline NVTEBasicTensor MakeBasicTensor(void* data, NVTEDType dtype, const std::vector<std::size_t>& shape) {
  NVTEBasicTensor basic;
  basic.data_ptr = data;
  basic.dtype = dtype;
  basic.shape = nvte_make_shape(shape.data(), shape.size());
  return basic;
}

class Tensor {
 public:
  // The null tensor.
  Tensor() = default;

  // A tensor with row-wise data.
  Tensor(void* data, NVTEDType dtype, const std::vector<std::size_t>& shape)
      : tensor_(nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING)) {
    const NVTEBasicTensor basic = MakeBasicTensor(data, dtype, shape);
    nvte_set_tensor_param_v2(tensor_, kNVTERowwiseData, &basic, sizeof basic);
  }

  // A tensor with row-wise data and their MXFP8 inverse scales.
  static Tensor Scaled(const NVTEBasicTensor& data, const NVTEBasicTensor& scale_inv) {
    Tensor tensor;
    tensor.tensor_ = nvte_create_tensor(NVTE_MXFP8_1D_SCALING);
    nvte_set_tensor_param_v2(tensor.tensor_, kNVTERowwiseData, &data, sizeof data);
    nvte_set_tensor_param_v2(tensor.tensor_, kNVTERowwiseScaleInv, &scale_inv, sizeof scale_inv);
    return tensor;
  }

  // Takes over a tensor that the caller has made.
  static Tensor Adopt(NVTETensor raw) {
    Tensor tensor;
    tensor.tensor_ = raw;
    return tensor;
  }

  Tensor(Tensor&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() { nvte_destroy_tensor(tensor_); }

  NVTETensor get() const { return tensor_; }

 private:
  NVTETensor tensor_ = nullptr;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_TENSOR_H_
