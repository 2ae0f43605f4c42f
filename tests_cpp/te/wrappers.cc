// Every member of the C++ classes over NVTETensor, as programs of TransformerEngine use them. Compiled against its
// headers and against ours, with every inline function of them kept and all symbols bound at start.

#include <gtest/gtest.h>
#include <transformer_engine/ep.h>
#include <transformer_engine/transformer_engine.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

using transformer_engine::DType;
using transformer_engine::GroupedTensorWrapper;
using transformer_engine::MultiTensorWrapper;
using transformer_engine::QuantizationConfigWrapper;
using transformer_engine::TensorWrapper;
using Sizes = std::vector<size_t>;

Sizes Of(const NVTEShape& shape) { return Sizes(shape.data, shape.data + shape.ndim); }

void ExpectArray(const NVTEBasicTensor& array, const void* data, DType dtype, const Sizes& sizes) {
  EXPECT_EQ(array.data_ptr, data);
  EXPECT_EQ(static_cast<DType>(array.dtype), dtype);
  EXPECT_EQ(Of(array.shape), sizes);
}

TEST(Wrappers, DataTypes) {
  EXPECT_TRUE(transformer_engine::is_fp8_dtype(DType::kFloat8E5M2));
  EXPECT_FALSE(transformer_engine::is_fp8_dtype(DType::kFloat8E8M0));
  EXPECT_TRUE(transformer_engine::is_fp4_dtype(DType::kFloat4E2M1));
  EXPECT_FALSE(transformer_engine::is_fp4_dtype(DType::kByte));
  EXPECT_TRUE(transformer_engine::is_high_precision_dtype(DType::kFloat16));
  EXPECT_FALSE(transformer_engine::is_high_precision_dtype(DType::kInt32));
  EXPECT_EQ(static_cast<int>(DType::kNumTypes), static_cast<int>(kNVTENumTypes));
}

TEST(Wrappers, TensorOfAllItsParts) {
  float data[6], amax, scale, inverse[3];
  const TensorWrapper tensor(data, Sizes{2, 3}, DType::kFloat32, &amax, &scale, inverse, Sizes{3});
  EXPECT_EQ(Of(tensor.shape()), (Sizes{2, 3}));
  EXPECT_EQ(tensor.size(1), 3u);
  EXPECT_EQ(tensor.ndim(), 2u);
  EXPECT_EQ(tensor.numel(), 6u);
  EXPECT_EQ(tensor.bytes(), sizeof data);
  EXPECT_EQ(tensor.element_size(), 4u);
  EXPECT_EQ(tensor.element_size_bits(), 32u);
  EXPECT_EQ(tensor.dtype(), DType::kFloat32);
  EXPECT_EQ(tensor.dptr(), data);
  EXPECT_EQ(tensor.columnwise_dptr(), nullptr);
  EXPECT_EQ(tensor.amax(), &amax);
  EXPECT_EQ(tensor.scale(), &scale);
  EXPECT_EQ(tensor.scale_inv(), inverse);
  EXPECT_EQ(Of(tensor.scale_inv_shape()), Sizes{3});
  EXPECT_EQ(tensor.scaling_mode(), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_NE(tensor.data(), nullptr);
  ExpectArray(tensor.get_rowwise_data(), data, DType::kFloat32, {2, 3});
  ExpectArray(tensor.get_amax(), &amax, DType::kFloat32, {1});
  ExpectArray(tensor.get_scale(), &scale, DType::kFloat32, {1});
  ExpectArray(tensor.get_rowwise_scale_inv(), inverse, DType::kFloat32, {3});
}

TEST(Wrappers, TensorWithoutScales) {
  std::uint8_t data[4];
  const TensorWrapper tensor(data, Sizes{4}, DType::kByte);
  EXPECT_EQ(tensor.amax(), nullptr);
  ExpectArray(tensor.get_amax(), nullptr, DType::kFloat32, {0});
  ExpectArray(tensor.get_scale(), nullptr, DType::kFloat32, {0});
  ExpectArray(tensor.get_rowwise_scale_inv(), nullptr, DType::kFloat32, {0});
}

TEST(Wrappers, TensorIsFilledStepByStep) {
  std::uint8_t rows[64], columns[64], row_scales[2], column_scales[2];
  float one[3];
  TensorWrapper tensor(NVTE_MXFP8_1D_SCALING);
  EXPECT_EQ(tensor.scaling_mode(), NVTE_MXFP8_1D_SCALING);
  tensor.set_rowwise_data(rows, DType::kFloat8E4M3, Sizes{2, 32})
      .set_columnwise_data(columns, DType::kFloat8E4M3, Sizes{32, 2})
      .set_rowwise_scale_inv(row_scales, DType::kFloat8E8M0, Sizes{2, 1})
      .set_columnwise_scale_inv(column_scales, DType::kFloat8E8M0, Sizes{1, 2})
      .set_scale(one, DType::kFloat32, TensorWrapper::defaultShape)
      .set_amax(one + 1, DType::kFloat32, TensorWrapper::defaultShape)
      .set_columnwise_amax(one + 2, DType::kFloat32, TensorWrapper::defaultShape);
  ExpectArray(tensor.get_rowwise_data(), rows, DType::kFloat8E4M3, {2, 32});
  ExpectArray(tensor.get_columnwise_data(), columns, DType::kFloat8E4M3, {32, 2});
  ExpectArray(tensor.get_rowwise_scale_inv(), row_scales, DType::kFloat8E8M0, {2, 1});
  ExpectArray(tensor.get_columnwise_scale_inv(), column_scales, DType::kFloat8E8M0, {1, 2});
  ExpectArray(tensor.get_scale(), one, DType::kFloat32, {1});
  ExpectArray(tensor.get_amax(), one + 1, DType::kFloat32, {1});
  ExpectArray(tensor.get_columnwise_amax(), one + 2, DType::kFloat32, {1});
  EXPECT_EQ(Of(tensor.columnwise_shape()), (Sizes{32, 2}));
  EXPECT_EQ(tensor.columnwise_dptr(), columns);

  EXPECT_FALSE(tensor.get_with_gemm_swizzled_scales());
  EXPECT_FALSE(tensor.get_row_scaled_nvfp4());
  EXPECT_EQ(tensor.get_nvfp4_e4m3_max(), 448);
  tensor.set_with_gemm_swizzled_scales(true);
  tensor.set_row_scaled_nvfp4(true);
  tensor.set_nvfp4_e4m3_max(256);
  EXPECT_TRUE(tensor.get_with_gemm_swizzled_scales());
  EXPECT_TRUE(tensor.get_row_scaled_nvfp4());
  EXPECT_EQ(tensor.get_nvfp4_e4m3_max(), 256);
}

TEST(Wrappers, MovedTensorsAreEmpty) {
  float a[2], b[3];
  TensorWrapper first(a, Sizes{2}, DType::kFloat32), second(b, Sizes{3}, DType::kFloat32);
  const NVTETensor kept = second.data();
  first = std::move(second);
  EXPECT_EQ(first.data(), kept);
  EXPECT_EQ(first.dptr(), b);
  const TensorWrapper third(std::move(first));
  EXPECT_EQ(third.data(), kept);
  for (const TensorWrapper* moved : {&first, &second}) {
    EXPECT_EQ(moved->data(), nullptr);
    EXPECT_EQ(moved->dptr(), nullptr);
    EXPECT_EQ(Of(moved->shape()), Sizes{0});
    EXPECT_EQ(moved->numel() + moved->bytes() + moved->ndim() + moved->size(0) + moved->element_size(), 0u);
    EXPECT_EQ(moved->dtype(), DType::kNumTypes);
  }
}

TEST(Wrappers, SeveralTensors) {
  EXPECT_TRUE(MultiTensorWrapper().empty());
  MultiTensorWrapper tensors(3, NVTE_MXFP8_1D_SCALING);
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_NE(tensors[0], tensors[1]);
  EXPECT_EQ(tensors.data()[2], tensors[2]);
  NVTETensor* const raw = tensors;
  EXPECT_EQ(raw[1], tensors[1]);
  for (const NVTETensor tensor : tensors) EXPECT_EQ(nvte_tensor_scaling_mode(tensor), NVTE_MXFP8_1D_SCALING);
  const NVTETensor first = tensors[0];
  MultiTensorWrapper moved(std::move(tensors));
  EXPECT_EQ(moved[0], first);
  moved = MultiTensorWrapper(1);
  EXPECT_EQ(moved.size(), 1u);
  EXPECT_THROW(nvte_tensor_type(first), std::runtime_error) << "it was destroyed";
}

TEST(Wrappers, GroupedTensors) {
  std::uint8_t rows[64], columns[64], scales[4];
  float one[3];
  std::int64_t first[2], last[2], offsets[3];
  GroupedTensorWrapper grouped(2, Sizes{8, 32}, NVTE_MXFP8_1D_SCALING);
  EXPECT_EQ(grouped.num_tensors(), 2u);
  EXPECT_EQ(Of(grouped.logical_shape()), (Sizes{8, 32}));
  EXPECT_EQ(grouped.scaling_mode(), NVTE_MXFP8_1D_SCALING);
  EXPECT_FALSE(grouped.get_with_gemm_swizzled_scales());
  EXPECT_EQ(grouped.get_rowwise_data().data_ptr, nullptr);
  EXPECT_EQ(grouped.get_first_dims().data_ptr, nullptr);
  grouped.set_columnwise_data(columns, DType::kFloat8E5M2, Sizes{64});
  EXPECT_EQ(grouped.dtype(), DType::kFloat8E5M2);
  grouped.set_rowwise_data(rows, DType::kFloat8E4M3, Sizes{64})
      .set_rowwise_scale_inv(scales, DType::kFloat8E8M0, Sizes{2})
      .set_columnwise_scale_inv(scales + 2, DType::kFloat8E8M0, Sizes{2})
      .set_scale(one, DType::kFloat32, Sizes{1})
      .set_amax(one + 1, DType::kFloat32, Sizes{1})
      .set_columnwise_amax(one + 2, DType::kFloat32, Sizes{1})
      .set_first_dims(first, DType::kInt64, Sizes{2})
      .set_last_dims(last, DType::kInt64, Sizes{2})
      .set_tensor_offsets(offsets, DType::kInt64, Sizes{3});
  grouped.set_with_gemm_swizzled_scales(true);
  EXPECT_EQ(grouped.dtype(), DType::kFloat8E4M3);
  ExpectArray(grouped.get_rowwise_data(), rows, DType::kFloat8E4M3, {64});
  ExpectArray(grouped.get_columnwise_data(), columns, DType::kFloat8E5M2, {64});
  ExpectArray(grouped.get_rowwise_scale_inv(), scales, DType::kFloat8E8M0, {2});
  ExpectArray(grouped.get_columnwise_scale_inv(), scales + 2, DType::kFloat8E8M0, {2});
  ExpectArray(grouped.get_scale(), one, DType::kFloat32, {1});
  ExpectArray(grouped.get_amax(), one + 1, DType::kFloat32, {1});
  ExpectArray(grouped.get_columnwise_amax(), one + 2, DType::kFloat32, {1});
  ExpectArray(grouped.get_first_dims(), first, DType::kInt64, {2});
  ExpectArray(grouped.get_last_dims(), last, DType::kInt64, {2});
  ExpectArray(grouped.get_tensor_offsets(), offsets, DType::kInt64, {3});
  EXPECT_TRUE(grouped.get_with_gemm_swizzled_scales());

  GroupedTensorWrapper other(1, Sizes{1, 1});
  const NVTEGroupedTensor kept = grouped.data();
  other = std::move(grouped);
  EXPECT_EQ(other.data(), kept);
  const GroupedTensorWrapper third(std::move(other));
  EXPECT_EQ(third.num_tensors(), 2u);
  EXPECT_EQ(other.num_tensors(), 0u);
  EXPECT_EQ(other.dtype(), DType::kNumTypes);
  EXPECT_EQ(Of(other.logical_shape()), Sizes{0});
}

template <typename T>
T Attribute(NVTEQuantizationConfig config, NVTEQuantizationConfigAttribute attribute) {
  T value{};
  size_t written = 0;
  nvte_get_quantization_config_attribute(config, attribute, &value, sizeof value, &written);
  EXPECT_EQ(written, sizeof value);
  return value;
}

TEST(Wrappers, QuantizationConfigurations) {
  QuantizationConfigWrapper config;
  const MultiTensorWrapper tensors(2);
  EXPECT_EQ(Attribute<std::uint8_t>(config, kNVTEQuantizationConfigForcePow2Scales), 0);
  config.set_force_pow_2_scales(true);
  config.set_amax_epsilon(0.25f);
  config.set_noop_tensor(tensors[0]);
  config.set_float8_block_scale_tensor_format(transformer_engine::Float8BlockScaleTensorFormat::COMPACT);
  config.set_rng_state(tensors[1]);
  config.set_nvfp4_2d_quantization(true);
  config.set_mxfp8_2d_quantization(true);
  config.set_stochastic_rounding(true);
  config.set_use_fast_math(true);
  config.set_nvfp4_4over6_mode(kNVTENVFP44Over6MinMSE);
  config.set_nvfp4_4over6_err_use_fast_math(true);
  QuantizationConfigWrapper moved(std::move(config));
  QuantizationConfigWrapper kept;
  kept = std::move(moved);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigForcePow2Scales), 1);
  EXPECT_EQ(Attribute<float>(kept, kNVTEQuantizationConfigAmaxEpsilon), 0.25f);
  EXPECT_EQ(Attribute<NVTETensor>(kept, kNVTEQuantizationConfigNoopTensor), tensors[0]);
  EXPECT_EQ(Attribute<NVTETensor>(kept, kNVTEQuantizationConfigRNGState), tensors[1]);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigNVFP42DQuantization), 1);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigMXFP82DQuantization), 1);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigStochasticRounding), 1);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigUseFastMath), 1);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigNVFP44Over6Mode), 2);
  EXPECT_EQ(Attribute<std::uint8_t>(kept, kNVTEQuantizationConfigNVFP44Over6ErrUseFastMath), 1);
}

TEST(Wrappers, ZeroOfAnEmptyTensor) {
  TensorWrapper tensor;
  const TensorWrapper taken(std::move(tensor));
  EXPECT_NO_THROW(tensor.zero_(nullptr)) << "test_tensor has the values of others";
}

}  // namespace
