/* TransformerEngine's C++ classes over the NVTETensor interface: the same names and members, so that programs compile with these
   headers as with TransformerEngine's. transformer_engine.h includes this file. SPDX-License-Identifier: Apache-2.0 */

#ifndef NVTE_EP_TRANSFORMER_ENGINE_WRAPPERS_H_
#define NVTE_EP_TRANSFORMER_ENGINE_WRAPPERS_H_

#include "transformer_engine.h"

#ifdef __cplusplus

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace transformer_engine {

/** NVTEDType. */
enum class DType {
  kByte = kNVTEByte,
  kInt16 = kNVTEInt16,
  kInt32 = kNVTEInt32,
  kInt64 = kNVTEInt64,
  kFloat32 = kNVTEFloat32,
  kFloat16 = kNVTEFloat16,
  kBFloat16 = kNVTEBFloat16,
  kFloat8E4M3 = kNVTEFloat8E4M3,
  kFloat8E5M2 = kNVTEFloat8E5M2,
  kFloat8E8M0 = kNVTEFloat8E8M0,
  kFloat4E2M1 = kNVTEFloat4E2M1,
  kNumTypes = kNVTENumTypes
};

inline bool is_fp8_dtype(const DType type) { return type == DType::kFloat8E4M3 || type == DType::kFloat8E5M2; }

inline bool is_fp4_dtype(const DType type) { return type == DType::kFloat4E2M1; }

inline bool is_high_precision_dtype(const DType type) {
  return type == DType::kFloat32 || type == DType::kFloat16 || type == DType::kBFloat16;
}

namespace detail {

inline NVTEShape shape_of(const NVTEShape &shape) { return shape; }

inline NVTEShape shape_of(const std::vector<size_t> &sizes) { return nvte_make_shape(sizes.data(), sizes.size()); }

template <typename ShapeType>
NVTEBasicTensor array_of(void *data, DType type, const ShapeType &shape) {
  return {data, static_cast<NVTEDType>(type), shape_of(shape)};
}

/* One value as a shape, and none. */
constexpr NVTEShape kOne = {{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 1};
constexpr NVTEShape kNone = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 1};

}  // namespace detail

/** Owner of an NVTETensor; the data stays the caller's. */
class TensorWrapper {
 public:
  static constexpr size_t defaultData = 1;
  static constexpr NVTEShape defaultShape = detail::kOne;
  static constexpr NVTEShape emptyShape = detail::kNone;

  /** A tensor with row-wise data. A shape of scale_inv without its address counts only where it is not {1}. */
  TensorWrapper(void *dptr, const NVTEShape &shape, const DType dtype, float *amax_dptr = nullptr,
                float *scale_dptr = nullptr, float *scale_inv_dptr = nullptr, NVTEShape scale_inv_shape = detail::kOne,
                const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : TensorWrapper(scaling_mode) {
    const bool no_scale_inv =
        scale_inv_dptr == nullptr && scale_inv_shape.ndim == 1 && scale_inv_shape.data[0] == defaultData;
    set(kNVTERowwiseData, {dptr, static_cast<NVTEDType>(dtype), shape});
    set(kNVTEAmax, {amax_dptr, kNVTEFloat32, amax_dptr != nullptr ? detail::kOne : detail::kNone});
    set(kNVTEScale, {scale_dptr, kNVTEFloat32, scale_dptr != nullptr ? detail::kOne : detail::kNone});
    set(kNVTERowwiseScaleInv, {scale_inv_dptr, kNVTEFloat32, no_scale_inv ? detail::kNone : scale_inv_shape});
  }

  TensorWrapper(void *dptr, const std::vector<size_t> &shape, const DType dtype, float *amax_dptr = nullptr,
                float *scale_dptr = nullptr, float *scale_inv_dptr = nullptr,
                const std::vector<size_t> &scale_inv_shape = {1},
                const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : TensorWrapper(dptr, detail::shape_of(shape), dtype, amax_dptr, scale_dptr, scale_inv_dptr,
                      detail::shape_of(scale_inv_shape), scaling_mode) {}

  /** A tensor without data. */
  explicit TensorWrapper(const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : tensor_(nvte_create_tensor(scaling_mode)) {}

  ~TensorWrapper() { nvte_destroy_tensor(tensor_); }

  TensorWrapper(const TensorWrapper &) = delete;
  TensorWrapper &operator=(const TensorWrapper &) = delete;
  TensorWrapper(TensorWrapper &&other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  TensorWrapper &operator=(TensorWrapper &&other) noexcept {
    if (this != &other) nvte_destroy_tensor(std::exchange(tensor_, std::exchange(other.tensor_, nullptr)));
    return *this;
  }

  template <typename ShapeType>
  TensorWrapper &set_parameter(const NVTETensorParam param, void *dptr, DType type, const ShapeType &shape) noexcept {
    return set(param, detail::array_of(dptr, type, shape));
  }
  template <typename ShapeType>
  TensorWrapper &set_rowwise_data(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTERowwiseData, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper &set_columnwise_data(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEColumnwiseData, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper &set_scale(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEScale, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper &set_amax(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEAmax, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper &set_rowwise_scale_inv(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTERowwiseScaleInv, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper &set_columnwise_scale_inv(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEColumnwiseScaleInv, dptr, type, shape);
  }
  template <typename ShapeType>
  TensorWrapper &set_columnwise_amax(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEColumnwiseAmax, dptr, type, shape);
  }
  void set_with_gemm_swizzled_scales(bool value) { set_number<uint8_t>(kNVTEWithGEMMSwizzledScales, value); }
  void set_row_scaled_nvfp4(bool value) { set_number<uint8_t>(kNVTERowScaledNVFP4, value); }
  void set_nvfp4_e4m3_max(int value) { set_number<int>(kNVTENVFP4E4M3Max, value); }

  NVTEBasicTensor get_parameter(const NVTETensorParam param) const noexcept { return get<NVTEBasicTensor>(param); }
  NVTEBasicTensor get_rowwise_data() const noexcept { return get_parameter(kNVTERowwiseData); }
  NVTEBasicTensor get_columnwise_data() const noexcept { return get_parameter(kNVTEColumnwiseData); }
  NVTEBasicTensor get_scale() const noexcept { return get_parameter(kNVTEScale); }
  NVTEBasicTensor get_amax() const noexcept { return get_parameter(kNVTEAmax); }
  NVTEBasicTensor get_rowwise_scale_inv() const noexcept { return get_parameter(kNVTERowwiseScaleInv); }
  NVTEBasicTensor get_columnwise_scale_inv() const noexcept { return get_parameter(kNVTEColumnwiseScaleInv); }
  NVTEBasicTensor get_columnwise_amax() const noexcept { return get_parameter(kNVTEColumnwiseAmax); }
  bool get_with_gemm_swizzled_scales() const { return get<uint8_t>(kNVTEWithGEMMSwizzledScales) != 0; }
  bool get_row_scaled_nvfp4() const { return get<uint8_t>(kNVTERowScaledNVFP4) != 0; }
  int get_nvfp4_e4m3_max() const { return get<int>(kNVTENVFP4E4M3Max); }

  /** The tensor; this stays its owner. */
  NVTETensor data() const noexcept { return tensor_; }

  const NVTEShape shape() const noexcept { return tensor_ == nullptr ? detail::kNone : nvte_tensor_shape(tensor_); }
  const NVTEShape columnwise_shape() const noexcept {
    return tensor_ == nullptr ? detail::kNone : nvte_tensor_columnwise_shape(tensor_);
  }
  size_t size(const size_t dim) const { return tensor_ == nullptr ? 0 : nvte_tensor_size(tensor_, dim); }
  size_t ndim() const noexcept { return nvte_tensor_ndims(tensor_); }
  size_t numel() const noexcept { return nvte_tensor_numel(tensor_); }
  size_t element_size() const noexcept { return tensor_ == nullptr ? 0 : nvte_tensor_element_size(tensor_); }
  size_t element_size_bits() const noexcept { return tensor_ == nullptr ? 0 : nvte_tensor_element_size_bits(tensor_); }
  /** 0 without row-wise data. */
  size_t bytes() const noexcept { return dptr() == nullptr ? 0 : nvte_tensor_size_bytes(tensor_); }
  DType dtype() const noexcept {
    return tensor_ == nullptr ? DType::kNumTypes : static_cast<DType>(nvte_tensor_type(tensor_));
  }
  void *dptr() const noexcept { return nvte_tensor_data(tensor_); }
  void *columnwise_dptr() const noexcept { return nvte_tensor_columnwise_data(tensor_); }
  float *amax() const noexcept { return nvte_tensor_amax(tensor_); }
  float *scale() const noexcept { return nvte_tensor_scale(tensor_); }
  float *scale_inv() const noexcept { return nvte_tensor_scale_inv(tensor_); }
  const NVTEShape scale_inv_shape() const noexcept {
    return tensor_ == nullptr ? detail::kNone : nvte_tensor_scale_inv_shape(tensor_);
  }
  NVTEScalingMode scaling_mode() const noexcept { return nvte_tensor_scaling_mode(tensor_); }

  void zero_(cudaStream_t stream) { nvte_zero_tensor(tensor_, stream); }

 private:
  TensorWrapper &set(NVTETensorParam param, const NVTEBasicTensor &array) {
    nvte_set_tensor_param_v2(tensor_, param, &array, sizeof array);
    return *this;
  }
  template <typename Number>
  void set_number(NVTETensorParam param, Number value) {
    nvte_set_tensor_param_v2(tensor_, param, &value, sizeof value);
  }
  template <typename Value>
  Value get(NVTETensorParam param) const {
    Value value{};
    nvte_get_tensor_param_v2(tensor_, param, &value, sizeof value, nullptr);
    return value;
  }

  NVTETensor tensor_ = nullptr;
};

/** Owner of several NVTETensors that were made together. */
class MultiTensorWrapper {
 public:
  MultiTensorWrapper() = default;
  explicit MultiTensorWrapper(size_t num_tensors, NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : tensors_(num_tensors) {
    nvte_create_tensors(scaling_mode, tensors_.data(), tensors_.size());
  }
  ~MultiTensorWrapper() { nvte_destroy_tensors(tensors_.data(), tensors_.size()); }

  MultiTensorWrapper(const MultiTensorWrapper &) = delete;
  MultiTensorWrapper &operator=(const MultiTensorWrapper &) = delete;
  MultiTensorWrapper(MultiTensorWrapper &&other) noexcept : tensors_(std::move(other.tensors_)) {
    other.tensors_.clear();
  }
  MultiTensorWrapper &operator=(MultiTensorWrapper &&other) noexcept {
    std::swap(tensors_, other.tensors_);
    return *this;
  }

  size_t size() const noexcept { return tensors_.size(); }
  bool empty() const noexcept { return tensors_.empty(); }
  NVTETensor operator[](size_t i) const noexcept { return tensors_[i]; }
  NVTETensor *data() noexcept { return tensors_.data(); }
  const NVTETensor *data() const noexcept { return tensors_.data(); }
  operator NVTETensor *() noexcept { return tensors_.data(); }
  auto begin() noexcept { return tensors_.begin(); }
  auto end() noexcept { return tensors_.end(); }
  auto begin() const noexcept { return tensors_.begin(); }
  auto end() const noexcept { return tensors_.end(); }

 private:
  std::vector<NVTETensor> tensors_;
};

/** Owner of an NVTEGroupedTensor; the data stays the caller's. */
class GroupedTensorWrapper {
 public:
  static constexpr size_t defaultData = 1;
  static constexpr NVTEShape defaultShape = detail::kOne;
  static constexpr NVTEShape emptyShape = detail::kNone;

  GroupedTensorWrapper(const size_t num_tensors, const NVTEShape &logical_shape,
                       const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : tensor_(nvte_create_grouped_tensor(scaling_mode, num_tensors, logical_shape)) {}
  GroupedTensorWrapper(const size_t num_tensors, const std::vector<size_t> &logical_shape,
                       const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : GroupedTensorWrapper(num_tensors, detail::shape_of(logical_shape), scaling_mode) {}
  ~GroupedTensorWrapper() { nvte_destroy_grouped_tensor(tensor_); }

  GroupedTensorWrapper(const GroupedTensorWrapper &) = delete;
  GroupedTensorWrapper &operator=(const GroupedTensorWrapper &) = delete;
  GroupedTensorWrapper(GroupedTensorWrapper &&other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  GroupedTensorWrapper &operator=(GroupedTensorWrapper &&other) noexcept {
    if (this != &other) nvte_destroy_grouped_tensor(std::exchange(tensor_, std::exchange(other.tensor_, nullptr)));
    return *this;
  }

  template <typename ShapeType>
  GroupedTensorWrapper &set_parameter(const NVTEGroupedTensorParam param, void *dptr, DType type,
                                      const ShapeType &shape) noexcept {
    const NVTEBasicTensor array = detail::array_of(dptr, type, shape);
    nvte_set_grouped_tensor_param(tensor_, param, &array, sizeof array);
    return *this;
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_rowwise_data(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedRowwiseData, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_columnwise_data(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedColumnwiseData, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_scale(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedScale, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_amax(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedAmax, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_rowwise_scale_inv(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedRowwiseScaleInv, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_columnwise_scale_inv(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedColumnwiseScaleInv, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_columnwise_amax(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedColumnwiseAmax, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_first_dims(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedFirstDims, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_last_dims(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedLastDims, dptr, type, shape);
  }
  template <typename ShapeType>
  GroupedTensorWrapper &set_tensor_offsets(void *dptr, DType type, const ShapeType &shape) noexcept {
    return set_parameter(kNVTEGroupedTensorOffsets, dptr, type, shape);
  }
  void set_with_gemm_swizzled_scales(bool with_swizzled_scales) {
    const uint8_t value = with_swizzled_scales;
    nvte_set_grouped_tensor_param(tensor_, kNVTEGroupedWithGEMMSwizzledScales, &value, sizeof value);
  }

  NVTEBasicTensor get_parameter(const NVTEGroupedTensorParam param) const noexcept {
    NVTEBasicTensor array{};
    nvte_get_grouped_tensor_param(tensor_, param, &array, sizeof array, nullptr);
    return array;
  }
  NVTEBasicTensor get_rowwise_data() const noexcept { return get_parameter(kNVTEGroupedRowwiseData); }
  NVTEBasicTensor get_columnwise_data() const noexcept { return get_parameter(kNVTEGroupedColumnwiseData); }
  NVTEBasicTensor get_scale() const noexcept { return get_parameter(kNVTEGroupedScale); }
  NVTEBasicTensor get_amax() const noexcept { return get_parameter(kNVTEGroupedAmax); }
  NVTEBasicTensor get_rowwise_scale_inv() const noexcept { return get_parameter(kNVTEGroupedRowwiseScaleInv); }
  NVTEBasicTensor get_columnwise_scale_inv() const noexcept { return get_parameter(kNVTEGroupedColumnwiseScaleInv); }
  NVTEBasicTensor get_columnwise_amax() const noexcept { return get_parameter(kNVTEGroupedColumnwiseAmax); }
  NVTEBasicTensor get_first_dims() const noexcept { return get_parameter(kNVTEGroupedFirstDims); }
  NVTEBasicTensor get_last_dims() const noexcept { return get_parameter(kNVTEGroupedLastDims); }
  NVTEBasicTensor get_tensor_offsets() const noexcept { return get_parameter(kNVTEGroupedTensorOffsets); }
  bool get_with_gemm_swizzled_scales() const {
    uint8_t value = 0;
    nvte_get_grouped_tensor_param(tensor_, kNVTEGroupedWithGEMMSwizzledScales, &value, sizeof value, nullptr);
    return value != 0;
  }

  /** The grouped tensor; this stays its owner. */
  NVTEGroupedTensor data() const noexcept { return tensor_; }

  size_t num_tensors() const noexcept { return nvte_grouped_tensor_num_tensors(tensor_); }
  DType dtype() const noexcept {
    return tensor_ == nullptr ? DType::kNumTypes : static_cast<DType>(nvte_grouped_tensor_type(tensor_));
  }
  NVTEScalingMode scaling_mode() const noexcept { return nvte_grouped_tensor_scaling_mode(tensor_); }
  const NVTEShape logical_shape() const noexcept {
    return tensor_ == nullptr ? detail::kNone : nvte_get_grouped_tensor_logical_shape(tensor_);
  }

 private:
  NVTEGroupedTensor tensor_ = nullptr;
};

/** Deprecated: nothing reads it. */
enum class Float8BlockScaleTensorFormat { GEMM_READY = 0, COMPACT = 1, INVALID };

/** Owner of an NVTEQuantizationConfig. */
class QuantizationConfigWrapper {
 public:
  QuantizationConfigWrapper() : config_(nvte_create_quantization_config()) {}
  ~QuantizationConfigWrapper() { nvte_destroy_quantization_config(config_); }

  QuantizationConfigWrapper(const QuantizationConfigWrapper &) = delete;
  QuantizationConfigWrapper &operator=(const QuantizationConfigWrapper &) = delete;
  QuantizationConfigWrapper(QuantizationConfigWrapper &&other) noexcept
      : config_(std::exchange(other.config_, nullptr)) {}
  QuantizationConfigWrapper &operator=(QuantizationConfigWrapper &&other) noexcept {
    if (this != &other) {
      nvte_destroy_quantization_config(std::exchange(config_, std::exchange(other.config_, nullptr)));
    }
    return *this;
  }

  operator NVTEQuantizationConfig() const noexcept { return config_; }

  void set_force_pow_2_scales(bool value) { set<uint8_t>(kNVTEQuantizationConfigForcePow2Scales, value); }
  void set_amax_epsilon(float value) { set(kNVTEQuantizationConfigAmaxEpsilon, value); }
  void set_noop_tensor(NVTETensor value) { set(kNVTEQuantizationConfigNoopTensor, value); }
  void set_float8_block_scale_tensor_format(Float8BlockScaleTensorFormat) {}
  void set_rng_state(NVTETensor value) { set(kNVTEQuantizationConfigRNGState, value); }
  void set_nvfp4_2d_quantization(bool value) { set<uint8_t>(kNVTEQuantizationConfigNVFP42DQuantization, value); }
  void set_mxfp8_2d_quantization(bool value) { set<uint8_t>(kNVTEQuantizationConfigMXFP82DQuantization, value); }
  void set_stochastic_rounding(bool value) { set<uint8_t>(kNVTEQuantizationConfigStochasticRounding, value); }
  void set_use_fast_math(bool value) { set<uint8_t>(kNVTEQuantizationConfigUseFastMath, value); }
  void set_nvfp4_4over6_mode(NVTENVFP44Over6Mode value) {
    set(kNVTEQuantizationConfigNVFP44Over6Mode, static_cast<uint8_t>(value));
  }
  void set_nvfp4_4over6_err_use_fast_math(bool value) {
    set<uint8_t>(kNVTEQuantizationConfigNVFP44Over6ErrUseFastMath, value);
  }

 private:
  template <typename Value>
  void set(NVTEQuantizationConfigAttribute attribute, Value value) {
    nvte_set_quantization_config_attribute(config_, attribute, &value, sizeof value);
  }

  NVTEQuantizationConfig config_ = nullptr;
};

}  // namespace transformer_engine

#endif  // __cplusplus

#endif  // NVTE_EP_TRANSFORMER_ENGINE_WRAPPERS_H_
