// The NVTETensor interface.

#include <gtest/gtest.h>
#include <transformer_engine/transformer_engine.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/expect_error.h"
#include "support/single.h"
#include "support/tensor.h"

namespace test {
namespace {

// Stand-ins for device addresses: the interface never reads what they point to.
alignas(256) unsigned char memory[4096];

std::vector<std::size_t> Sizes(const NVTEShape& shape) {
  return std::vector<std::size_t>(shape.data, shape.data + shape.ndim);
}

NVTETensor Value(std::uintptr_t value) { return reinterpret_cast<NVTETensor>(value); }

NVTEBasicTensor GetArray(NVTETensor tensor, NVTETensorParam param) {
  NVTEBasicTensor array;
  std::memset(&array, 0x5a, sizeof array);
  std::size_t written = 0;
  nvte_get_tensor_param_v2(tensor, param, &array, sizeof array, &written);
  EXPECT_EQ(written, sizeof array);
  return array;
}

void ExpectArray(const NVTEBasicTensor& array, void* data, NVTEDType dtype, const std::vector<std::size_t>& sizes) {
  EXPECT_EQ(array.data_ptr, data);
  EXPECT_EQ(array.dtype, dtype);
  EXPECT_EQ(Sizes(array.shape), sizes);
}

// Every function that reads a tensor, by name.
struct Reader {
  const char* name;
  void (*read)(NVTETensor);
};

const Reader kReaders[] = {
    {"nvte_tensor_shape", [](NVTETensor t) { nvte_tensor_shape(t); }},
    {"nvte_tensor_columnwise_shape", [](NVTETensor t) { nvte_tensor_columnwise_shape(t); }},
    {"nvte_tensor_ndims", [](NVTETensor t) { nvte_tensor_ndims(t); }},
    {"nvte_tensor_size", [](NVTETensor t) { nvte_tensor_size(t, 0); }},
    {"nvte_tensor_numel", [](NVTETensor t) { nvte_tensor_numel(t); }},
    {"nvte_tensor_size_bytes", [](NVTETensor t) { nvte_tensor_size_bytes(t); }},
    {"nvte_tensor_element_size", [](NVTETensor t) { nvte_tensor_element_size(t); }},
    {"nvte_tensor_element_size_bits", [](NVTETensor t) { nvte_tensor_element_size_bits(t); }},
    {"nvte_tensor_type", [](NVTETensor t) { nvte_tensor_type(t); }},
    {"nvte_tensor_data", [](NVTETensor t) { nvte_tensor_data(t); }},
    {"nvte_tensor_columnwise_data", [](NVTETensor t) { nvte_tensor_columnwise_data(t); }},
    {"nvte_tensor_amax", [](NVTETensor t) { nvte_tensor_amax(t); }},
    {"nvte_tensor_scale", [](NVTETensor t) { nvte_tensor_scale(t); }},
    {"nvte_tensor_scale_inv", [](NVTETensor t) { nvte_tensor_scale_inv(t); }},
    {"nvte_tensor_scale_inv_shape", [](NVTETensor t) { nvte_tensor_scale_inv_shape(t); }},
    {"nvte_tensor_scaling_mode", [](NVTETensor t) { nvte_tensor_scaling_mode(t); }},
    {"nvte_get_tensor_param", [](NVTETensor t) { nvte_get_tensor_param(t, kNVTERowwiseData); }},
    {"nvte_get_tensor_param_v2",
     [](NVTETensor t) { nvte_get_tensor_param_v2(t, kNVTERowwiseData, nullptr, 0, nullptr); }},
    {"nvte_zero_tensor", [](NVTETensor t) { nvte_zero_tensor(t, nullptr); }},
};

// Every function that changes or ends a tensor.
const Reader kWriters[] = {
    {"nvte_set_tensor_param_v2",
     [](NVTETensor t) {
       const NVTEBasicTensor array = MakeBasicTensor(memory, kNVTEByte, {1});
       nvte_set_tensor_param_v2(t, kNVTERowwiseData, &array, sizeof array);
     }},
    {"nvte_set_tensor_param",
     [](NVTETensor t) {
       const NVTEBasicTensor array = MakeBasicTensor(memory, kNVTEByte, {1});
       nvte_set_tensor_param(&t, kNVTERowwiseData, &array);
     }},
    {"nvte_destroy_tensor", [](NVTETensor t) { nvte_destroy_tensor(t); }},
    {"nvte_destroy_tensors", [](NVTETensor t) { nvte_destroy_tensors(&t, 1); }},
};

void ExpectDead(NVTETensor tensor) {
  for (const Reader& reader : kReaders) {
    EXPECT_TRUE(Throws(reader.name, {"tensor"}, [&] { reader.read(tensor); }));
  }
  for (const Reader& writer : kWriters) {
    EXPECT_TRUE(Throws(writer.name, {"tensor"}, [&] { writer.read(tensor); }));
  }
}

TEST(Tensors, FreshTensorIsEmpty) {
  for (const NVTEScalingMode mode : {NVTE_DELAYED_TENSOR_SCALING, NVTE_MXFP8_1D_SCALING, NVTE_BLOCK_SCALING_1D,
                                     NVTE_BLOCK_SCALING_2D, NVTE_NVFP4_1D_SCALING, NVTE_INVALID_SCALING}) {
    const NVTETensor tensor = nvte_create_tensor(mode);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(nvte_tensor_scaling_mode(tensor), mode);
    EXPECT_EQ(nvte_tensor_type(tensor), kNVTEFloat32);
    EXPECT_EQ(nvte_tensor_numel(tensor), 0u);
    EXPECT_EQ(nvte_tensor_size_bytes(tensor), 0u);
    EXPECT_EQ(nvte_tensor_ndims(tensor), 1u);
    EXPECT_EQ(Sizes(nvte_tensor_shape(tensor)), std::vector<std::size_t>{0});
    EXPECT_EQ(nvte_tensor_data(tensor), nullptr);
    EXPECT_EQ(nvte_tensor_columnwise_data(tensor), nullptr);
    EXPECT_EQ(nvte_tensor_amax(tensor), nullptr);
    EXPECT_EQ(nvte_tensor_scale(tensor), nullptr);
    EXPECT_EQ(nvte_tensor_scale_inv(tensor), nullptr);
    nvte_destroy_tensor(tensor);
  }
}

TEST(Tensors, UnknownScalingModeThrows) {
  for (const int mode : {-1, 5, 99, 101}) {
    NVTETensor tensors[2];
    EXPECT_TRUE(Throws("nvte_create_tensor", {"scaling_mode", std::to_string(mode)},
                       [&] { nvte_create_tensor(static_cast<NVTEScalingMode>(mode)); }));
    EXPECT_TRUE(Throws("nvte_create_tensors", {"scaling_mode", std::to_string(mode)},
                       [&] { nvte_create_tensors(static_cast<NVTEScalingMode>(mode), tensors, 2); }));
  }
}

TEST(Tensors, RowwiseDataIsReadBack) {
  const Tensor tensor(memory, kNVTEBFloat16, {3, 5, 7});
  EXPECT_EQ(nvte_tensor_data(tensor.get()), memory);
  EXPECT_EQ(nvte_tensor_type(tensor.get()), kNVTEBFloat16);
  EXPECT_EQ(nvte_tensor_ndims(tensor.get()), 3u);
  EXPECT_EQ(Sizes(nvte_tensor_shape(tensor.get())), (std::vector<std::size_t>{3, 5, 7}));
  EXPECT_EQ(nvte_tensor_size(tensor.get(), 0), 3u);
  EXPECT_EQ(nvte_tensor_size(tensor.get(), 2), 7u);
  EXPECT_EQ(nvte_tensor_numel(tensor.get()), 105u);
  EXPECT_EQ(nvte_tensor_size_bytes(tensor.get()), 210u);
  ExpectArray(GetArray(tensor.get(), kNVTERowwiseData), memory, kNVTEBFloat16, {3, 5, 7});
  ExpectArray(nvte_get_tensor_param(tensor.get(), kNVTERowwiseData), memory, kNVTEBFloat16, {3, 5, 7});
  EXPECT_TRUE(Throws("nvte_tensor_size", {"dim", "3"}, [&] { nvte_tensor_size(tensor.get(), 3); }));
}

TEST(Tensors, EveryArrayParameterHasItsOwnPlace) {
  const NVTETensor tensor = nvte_create_tensor(NVTE_MXFP8_1D_SCALING);
  const NVTETensorParam params[] = {
      kNVTERowwiseData,     kNVTEColumnwiseData,     kNVTEScale,          kNVTEAmax,
      kNVTERowwiseScaleInv, kNVTEColumnwiseScaleInv, kNVTEColumnwiseAmax,
  };
  for (std::size_t i = 0; i < 7; ++i) {
    const NVTEBasicTensor array = MakeBasicTensor(memory + 16 * i, static_cast<NVTEDType>(i), {i + 1, 2});
    nvte_set_tensor_param_v2(tensor, params[i], &array, sizeof array);
  }
  for (std::size_t i = 0; i < 7; ++i) {
    SCOPED_TRACE("parameter " + std::to_string(i));
    ExpectArray(GetArray(tensor, params[i]), memory + 16 * i, static_cast<NVTEDType>(i), {i + 1, 2});
    ExpectArray(nvte_get_tensor_param(tensor, params[i]), memory + 16 * i, static_cast<NVTEDType>(i), {i + 1, 2});
  }
  EXPECT_EQ(nvte_tensor_data(tensor), memory);
  EXPECT_EQ(nvte_tensor_columnwise_data(tensor), memory + 16);
  EXPECT_EQ(static_cast<void*>(nvte_tensor_scale(tensor)), memory + 32);
  EXPECT_EQ(static_cast<void*>(nvte_tensor_amax(tensor)), memory + 48);
  EXPECT_EQ(static_cast<void*>(nvte_tensor_scale_inv(tensor)), memory + 64);
  EXPECT_EQ(Sizes(nvte_tensor_shape(tensor)), (std::vector<std::size_t>{1, 2}));
  EXPECT_EQ(Sizes(nvte_tensor_columnwise_shape(tensor)), (std::vector<std::size_t>{2, 2}));
  EXPECT_EQ(Sizes(nvte_tensor_scale_inv_shape(tensor)), (std::vector<std::size_t>{5, 2}));
  nvte_destroy_tensor(tensor);
}

TEST(Tensors, DeprecatedSetterTakesAPointerToTheTensor) {
  NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  const NVTEBasicTensor array = MakeBasicTensor(memory, kNVTEInt32, {9});
  nvte_set_tensor_param(&tensor, kNVTERowwiseData, &array);
  ExpectArray(GetArray(tensor, kNVTERowwiseData), memory, kNVTEInt32, {9});
  EXPECT_TRUE(Throws("nvte_set_tensor_param", {"tensor", "null"},
                     [&] { nvte_set_tensor_param(nullptr, kNVTERowwiseData, &array); }));
  EXPECT_TRUE(Throws("nvte_set_tensor_param", {"param", "null"},
                     [&] { nvte_set_tensor_param(&tensor, kNVTERowwiseData, nullptr); }));
  EXPECT_TRUE(Throws("nvte_set_tensor_param", {"param", "7"},
                     [&] { nvte_set_tensor_param(&tensor, kNVTEWithGEMMSwizzledScales, &array); }));
  EXPECT_TRUE(
      Throws("nvte_get_tensor_param", {"param", "9"}, [&] { nvte_get_tensor_param(tensor, kNVTENVFP4E4M3Max); }));
  nvte_destroy_tensor(tensor);
}

TEST(Tensors, NumberParameters) {
  const NVTETensor tensor = nvte_create_tensor(NVTE_NVFP4_1D_SCALING);
  for (const NVTETensorParam param : {kNVTEWithGEMMSwizzledScales, kNVTERowScaledNVFP4}) {
    std::uint8_t flag = 77;
    std::size_t written = 0;
    nvte_get_tensor_param_v2(tensor, param, &flag, sizeof flag, &written);
    EXPECT_EQ(flag, 0);
    EXPECT_EQ(written, 1u);
    const std::uint8_t one = 1;
    nvte_set_tensor_param_v2(tensor, param, &one, sizeof one);
    nvte_get_tensor_param_v2(tensor, param, &flag, sizeof flag, nullptr);
    EXPECT_EQ(flag, 1);
    EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"size_in_bytes", "got 0"},
                       [&] { nvte_set_tensor_param_v2(tensor, param, &one, 0); }));
  }
  const int most = 256;
  nvte_set_tensor_param_v2(tensor, kNVTENVFP4E4M3Max, &most, sizeof most);
  int read = 0;
  std::size_t written = 0;
  nvte_get_tensor_param_v2(tensor, kNVTENVFP4E4M3Max, &read, sizeof read, &written);
  EXPECT_EQ(read, 256);
  EXPECT_EQ(written, sizeof(int));
  EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"size_in_bytes", "got 3"},
                     [&] { nvte_set_tensor_param_v2(tensor, kNVTENVFP4E4M3Max, &most, 3); }));
  nvte_destroy_tensor(tensor);
}

TEST(Tensors, BadParametersAndBuffersThrowAndChangeNothing) {
  const Tensor tensor(memory, kNVTEInt64, {4});
  const NVTEBasicTensor array = MakeBasicTensor(memory + 8, kNVTEByte, {1});
  NVTEBasicTensor out;
  for (const int param : {-1, 10, 1000}) {
    EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"param", std::to_string(param)}, [&] {
      nvte_set_tensor_param_v2(tensor.get(), static_cast<NVTETensorParam>(param), &array, sizeof array);
    }));
    EXPECT_TRUE(Throws("nvte_get_tensor_param_v2", {"param", std::to_string(param)}, [&] {
      nvte_get_tensor_param_v2(tensor.get(), static_cast<NVTETensorParam>(param), &out, sizeof out, nullptr);
    }));
  }
  EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"size_in_bytes", "144", "143"},
                     [&] { nvte_set_tensor_param_v2(tensor.get(), kNVTERowwiseData, &array, 143); }));
  EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"buf", "null"},
                     [&] { nvte_set_tensor_param_v2(tensor.get(), kNVTERowwiseData, nullptr, 144); }));
  EXPECT_TRUE(Throws("nvte_get_tensor_param_v2", {"size_in_bytes", "144", "143"},
                     [&] { nvte_get_tensor_param_v2(tensor.get(), kNVTERowwiseData, &out, 143, nullptr); }));
  NVTEBasicTensor bad = array;
  bad.shape.ndim = 16;
  EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"ndim", "15", "16"},
                     [&] { nvte_set_tensor_param_v2(tensor.get(), kNVTERowwiseData, &bad, sizeof bad); }));
  for (const int dtype : {-1, 11}) {
    bad = array;
    bad.dtype = static_cast<NVTEDType>(dtype);
    EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"dtype", std::to_string(dtype)},
                       [&] { nvte_set_tensor_param_v2(tensor.get(), kNVTERowwiseData, &bad, sizeof bad); }));
  }
  ExpectArray(GetArray(tensor.get(), kNVTERowwiseData), memory, kNVTEInt64, {4});
}

TEST(Tensors, LargerBuffersAreFineAndStayUntouchedBehindTheValue) {
  const NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  struct {
    NVTEBasicTensor array;
    unsigned char tail[64];
  } larger;
  std::memset(&larger, 0x33, sizeof larger);
  larger.array = MakeBasicTensor(memory, kNVTEFloat16, {2});
  nvte_set_tensor_param_v2(tensor, kNVTERowwiseData, &larger, sizeof larger);
  std::memset(&larger, 0x44, sizeof larger);
  std::size_t written = 0;
  nvte_get_tensor_param_v2(tensor, kNVTERowwiseData, &larger, sizeof larger, &written);
  EXPECT_EQ(written, sizeof(NVTEBasicTensor));
  ExpectArray(larger.array, memory, kNVTEFloat16, {2});
  for (const unsigned char byte : larger.tail) EXPECT_EQ(byte, 0x44);
  nvte_destroy_tensor(tensor);
}

TEST(Tensors, SizeOfAParameterWithoutReadingIt) {
  const Tensor tensor(memory, kNVTEInt64, {4});
  std::size_t written = 0;
  nvte_get_tensor_param_v2(tensor.get(), kNVTEAmax, nullptr, 0, &written);
  EXPECT_EQ(written, sizeof(NVTEBasicTensor));
  nvte_get_tensor_param_v2(tensor.get(), kNVTERowScaledNVFP4, nullptr, 0, &written);
  EXPECT_EQ(written, 1u);
}

TEST(Tensors, NullTensorReadsAsDefaults) {
  EXPECT_EQ(nvte_tensor_type(nullptr), kNVTEFloat32);
  EXPECT_EQ(nvte_tensor_scaling_mode(nullptr), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_EQ(nvte_tensor_ndims(nullptr), 0u);
  EXPECT_EQ(nvte_tensor_numel(nullptr), 0u);
  EXPECT_EQ(nvte_tensor_size_bytes(nullptr), 0u);
  EXPECT_EQ(nvte_tensor_data(nullptr), nullptr);
  EXPECT_EQ(nvte_tensor_columnwise_data(nullptr), nullptr);
  EXPECT_EQ(nvte_tensor_amax(nullptr), nullptr);
  EXPECT_EQ(nvte_tensor_scale(nullptr), nullptr);
  EXPECT_EQ(nvte_tensor_scale_inv(nullptr), nullptr);
  for (int param = kNVTERowwiseData; param <= kNVTEColumnwiseAmax; ++param) {
    ExpectArray(GetArray(nullptr, static_cast<NVTETensorParam>(param)), nullptr, kNVTEFloat32, {0});
  }
  std::uint8_t flag = 77;
  nvte_get_tensor_param_v2(nullptr, kNVTEWithGEMMSwizzledScales, &flag, sizeof flag, nullptr);
  EXPECT_EQ(flag, 0);
  EXPECT_NO_THROW(nvte_zero_tensor(nullptr, nullptr));
}

TEST(Tensors, NullTensorThrowsWhereThereIsNoDefault) {
  for (const Reader& reader : kReaders) {
    const std::string name = reader.name;
    if (name.find("shape") == std::string::npos && name != "nvte_tensor_size" &&
        name.find("element_size") == std::string::npos) {
      continue;
    }
    EXPECT_TRUE(Throws(name, {"tensor", "null"}, [&] { reader.read(nullptr); }));
  }
  const NVTEBasicTensor array = MakeBasicTensor(memory, kNVTEByte, {1});
  EXPECT_TRUE(Throws("nvte_set_tensor_param_v2", {"tensor", "null"},
                     [&] { nvte_set_tensor_param_v2(nullptr, kNVTERowwiseData, &array, sizeof array); }));
  NVTETensor null = nullptr;
  EXPECT_TRUE(Throws("nvte_set_tensor_param", {"tensor", "null"},
                     [&] { nvte_set_tensor_param(&null, kNVTERowwiseData, &array); }));
}

TEST(Tensors, DestroyOfNullIsNothing) {
  EXPECT_NO_THROW(nvte_destroy_tensor(nullptr));
  EXPECT_NO_THROW(nvte_destroy_tensors(nullptr, 0));
  NVTETensor nulls[2] = {nullptr, nullptr};
  EXPECT_NO_THROW(nvte_destroy_tensors(nulls, 2));
  EXPECT_TRUE(Throws("nvte_destroy_tensors", {"tensors", "null"}, [] { nvte_destroy_tensors(nullptr, 1); }));
}

TEST(Tensors, StaleValuesThrowEverywhere) {
  const NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  nvte_destroy_tensor(tensor);
  ExpectDead(tensor);
}

// A new tensor may take the place of a destroyed one, but the old value does not reach it.
TEST(Tensors, StaleValuesDoNotReachTheirSuccessors) {
  std::set<NVTETensor> seen;
  for (int i = 0; i < 1000; ++i) {
    const NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
    EXPECT_TRUE(seen.insert(tensor).second) << "a value was given out twice";
    nvte_destroy_tensor(tensor);
  }
  const Tensor live(memory, kNVTEInt32, {6});
  for (const NVTETensor stale : seen) {
    EXPECT_TRUE(Throws("nvte_destroy_tensor", {"tensor"}, [&] { nvte_destroy_tensor(stale); }));
  }
  ExpectArray(GetArray(live.get(), kNVTERowwiseData), memory, kNVTEInt32, {6});
}

TEST(Tensors, ForgedValuesThrowEverywhere) {
  const Tensor live(memory, kNVTEInt32, {6});
  const std::uintptr_t value = reinterpret_cast<std::uintptr_t>(live.get());
  const std::uintptr_t forged[] = {1,          2,
                                   12345,      reinterpret_cast<std::uintptr_t>(memory),
                                   value + 1,  value ^ (std::uintptr_t{1} << 40),
                                   value << 8, ~std::uintptr_t{0}};
  for (const std::uintptr_t bits : forged) ExpectDead(Value(bits));
  ExpectArray(GetArray(live.get(), kNVTERowwiseData), memory, kNVTEInt32, {6});
}

TEST(Tensors, Batch) {
  std::vector<NVTETensor> tensors(100);
  nvte_create_tensors(NVTE_MXFP8_1D_SCALING, tensors.data(), tensors.size());
  EXPECT_EQ(std::set<NVTETensor>(tensors.begin(), tensors.end()).size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(nvte_tensor_scaling_mode(tensors[i]), NVTE_MXFP8_1D_SCALING);
    const NVTEBasicTensor array = MakeBasicTensor(memory + i, kNVTEByte, {i});
    nvte_set_tensor_param_v2(tensors[i], kNVTERowwiseData, &array, sizeof array);
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(nvte_tensor_numel(tensors[i]), i);
  const NVTETensor last = tensors.back();
  nvte_destroy_tensors(tensors.data(), tensors.size());
  ExpectDead(last);
  EXPECT_NO_THROW(nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, nullptr, 0));
  EXPECT_TRUE(Throws("nvte_create_tensors", {"tensors", "null"},
                     [] { nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, nullptr, 3); }));
}

TEST(Tensors, BatchWithADeadTensorIsLeftAlone) {
  NVTETensor tensors[3];
  nvte_create_tensors(NVTE_DELAYED_TENSOR_SCALING, tensors, 3);
  nvte_destroy_tensor(tensors[1]);
  EXPECT_TRUE(Throws("nvte_destroy_tensors", {"tensor"}, [&] { nvte_destroy_tensors(tensors, 3); }));
  NVTETensor twice[2] = {tensors[0], tensors[0]};
  EXPECT_TRUE(Throws("nvte_destroy_tensors", {"tensor"}, [&] { nvte_destroy_tensors(twice, 2); }));
  EXPECT_NO_THROW(nvte_tensor_type(tensors[0]));
  tensors[1] = nullptr;
  EXPECT_NO_THROW(nvte_destroy_tensors(tensors, 3));
}

TEST(Tensors, ShapesOfUpTo15Dimensions) {
  std::vector<std::size_t> sizes;
  for (std::size_t ndim = 0; ndim <= 15; ++ndim) {
    const NVTEShape shape = nvte_make_shape(sizes.data(), sizes.size());
    EXPECT_EQ(shape.ndim, ndim);
    EXPECT_EQ(Sizes(shape), sizes);
    const Tensor tensor(memory, kNVTEByte, sizes);
    EXPECT_EQ(nvte_tensor_ndims(tensor.get()), ndim);
    EXPECT_EQ(Sizes(nvte_tensor_shape(tensor.get())), sizes);
    std::size_t elements = 1;
    for (const std::size_t size : sizes) elements *= size;
    EXPECT_EQ(nvte_tensor_numel(tensor.get()), elements);
    sizes.push_back(1 + ndim % 3);
  }
  ASSERT_EQ(sizes.size(), 16u);
  EXPECT_TRUE(Throws("nvte_make_shape", {"ndim", "15", "16"}, [&] { nvte_make_shape(sizes.data(), 16); }));
  EXPECT_EQ(Sizes(nvte_make_shape(nullptr, 2)), (std::vector<std::size_t>{0, 0}));
}

TEST(Tensors, ElementSizes) {
  const std::size_t bits[] = {8, 16, 32, 64, 32, 16, 16, 8, 8, 8, 4};
  for (int dtype = 0; dtype < kNVTENumTypes; ++dtype) {
    SCOPED_TRACE("dtype " + std::to_string(dtype));
    const Tensor tensor(memory, static_cast<NVTEDType>(dtype), {6, 10});
    EXPECT_EQ(nvte_tensor_type(tensor.get()), dtype);
    EXPECT_EQ(nvte_tensor_element_size_bits(tensor.get()), bits[dtype]);
    EXPECT_EQ(nvte_tensor_size_bytes(tensor.get()), 60 * bits[dtype] / 8);
    if (bits[dtype] < 8) {
      EXPECT_TRUE(Throws("nvte_tensor_element_size", {"nvte_tensor_element_size_bits"},
                         [&] { nvte_tensor_element_size(tensor.get()); }));
    } else {
      EXPECT_EQ(nvte_tensor_element_size(tensor.get()), bits[dtype] / 8);
    }
  }
}

TEST(Tensors, SizesBeyondMemoryThrow) {
  const std::size_t huge = std::size_t{1} << 62;
  const Tensor elements(memory, kNVTEByte, {huge, 8});
  EXPECT_TRUE(Throws("nvte_tensor_numel", {"tensor"}, [&] { nvte_tensor_numel(elements.get()); }));
  const Tensor bytes(memory, kNVTEInt64, {huge});
  EXPECT_EQ(nvte_tensor_numel(bytes.get()), huge);
  EXPECT_TRUE(Throws("nvte_tensor_size_bytes", {"tensor"}, [&] { nvte_tensor_size_bytes(bytes.get()); }));
}

// Shape and type are those of the data that is there.
TEST(Tensors, ColumnwiseDataAlone) {
  const NVTETensor tensor = nvte_create_tensor(NVTE_MXFP8_1D_SCALING);
  const NVTEBasicTensor array = MakeBasicTensor(memory, kNVTEFloat8E4M3, {32, 64});
  nvte_set_tensor_param_v2(tensor, kNVTEColumnwiseData, &array, sizeof array);
  EXPECT_EQ(nvte_tensor_data(tensor), nullptr);
  EXPECT_EQ(nvte_tensor_columnwise_data(tensor), memory);
  EXPECT_EQ(Sizes(nvte_tensor_columnwise_shape(tensor)), (std::vector<std::size_t>{32, 64}));
  EXPECT_EQ(nvte_tensor_type(tensor), kNVTEFloat8E4M3);
  EXPECT_EQ(nvte_tensor_numel(tensor), 2048u);
  nvte_destroy_tensor(tensor);
}

TEST(Tensors, ThreadsCreateAndDestroy) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 5000;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread, &wrong] {
      std::vector<NVTETensor> live(8);
      for (int round = 0; round < kRounds; ++round) {
        const std::size_t slot = round % live.size();
        if (live[slot] != nullptr) {
          // Nobody else has touched what this thread made.
          const std::size_t made_in = round - live.size();
          if (nvte_tensor_numel(live[slot]) != made_in + 1 || nvte_tensor_data(live[slot]) != memory + thread) ++wrong;
          nvte_destroy_tensor(live[slot]);
          try {
            nvte_destroy_tensor(live[slot]);
            ++wrong;
          } catch (const std::runtime_error&) {
          }
        }
        live[slot] = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
        const NVTEBasicTensor array =
            MakeBasicTensor(memory + thread, kNVTEByte, {static_cast<std::size_t>(round) + 1});
        nvte_set_tensor_param_v2(live[slot], kNVTERowwiseData, &array, sizeof array);
      }
      nvte_destroy_tensors(live.data(), live.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// One tensor is read by threads while others come and go.
TEST(Tensors, ThreadsReadOneTensor) {
  const Tensor shared(memory, kNVTEFloat16, {11, 13});
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      while (!stop) {
        const NVTEShape shape = nvte_tensor_shape(shared.get());
        if (shape.ndim != 2 || shape.data[0] != 11 || shape.data[1] != 13) ++wrong;
        if (nvte_tensor_data(shared.get()) != memory) ++wrong;
      }
    });
  }
  for (int i = 0; i < 20000; ++i) nvte_destroy_tensor(nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Tensors, ZeroTensor) {
  if (!OnHostRuntime()) GTEST_SKIP() << "needs NVTE_EP_RUNTIME=host";
  Device device;
  constexpr std::size_t kBytes = 1000;
  auto* data = static_cast<unsigned char*>(device.Allocate(kBytes));
  device.Fill(data, 0xab, kBytes);
  // The middle of the memory: 300 elements of 2 bytes, and an absolute maximum of 4 bytes further on.
  const Tensor tensor(data + 100, kNVTEBFloat16, {30, 10});
  const NVTEBasicTensor amax = MakeBasicTensor(data + 800, kNVTEFloat32, {1});
  nvte_set_tensor_param_v2(tensor.get(), kNVTEAmax, &amax, sizeof amax);
  nvte_zero_tensor(tensor.get(), nullptr);
  const std::vector<unsigned char> bytes = device.Read(data, kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) {
    const bool zeroed = (i >= 100 && i < 700) || (i >= 800 && i < 804);
    ASSERT_EQ(bytes[i], zeroed ? 0 : 0xab) << "byte " << i;
  }
  EXPECT_NO_THROW(nvte_zero_tensor(Tensor(nullptr, kNVTEBFloat16, {0, 8}).get(), nullptr));
  device.Free(data);
}

NVTEShape Shape(const std::vector<std::size_t>& sizes) { return nvte_make_shape(sizes.data(), sizes.size()); }

TEST(GroupedTensors, WhatTheyAreMadeOfIsChecked) {
  const char* create = "nvte_create_grouped_tensor";
  const auto made_of = [](int mode, std::size_t count, const NVTEShape& shape) {
    return [=] { nvte_create_grouped_tensor(static_cast<NVTEScalingMode>(mode), count, shape); };
  };
  EXPECT_TRUE(Throws(create, {"scaling_mode", "got 7"}, made_of(7, 1, Shape({2, 2}))));
  EXPECT_TRUE(Throws(create, {"num_tensors", "at least 1", "got 0"}, made_of(0, 0, Shape({2, 2}))));
  EXPECT_TRUE(Throws(create, {"logical_shape.ndim", "must be 2", "got 3"}, made_of(0, 1, Shape({2, 2, 2}))));
}

TEST(GroupedTensors, ParametersAreChecked) {
  const NVTEGroupedTensor grouped = nvte_create_grouped_tensor(NVTE_DELAYED_TENSOR_SCALING, 3, Shape({6, 4}));
  const char *set = "nvte_set_grouped_tensor_param", *get = "nvte_get_grouped_tensor_param";
  NVTEBasicTensor array = MakeBasicTensor(memory, kNVTEFloat16, {24});
  for (const int param : {-1, 11}) {
    EXPECT_TRUE(Throws(set, {"param", "0 to 10"}, [&] {
      nvte_set_grouped_tensor_param(grouped, static_cast<NVTEGroupedTensorParam>(param), &array, sizeof array);
    }));
    EXPECT_TRUE(Throws(get, {"param", "0 to 10"}, [&] {
      nvte_get_grouped_tensor_param(grouped, static_cast<NVTEGroupedTensorParam>(param), &array, sizeof array, nullptr);
    }));
  }
  EXPECT_TRUE(Throws(set, {"buf", "NULL"},
                     [&] { nvte_set_grouped_tensor_param(grouped, kNVTEGroupedScale, nullptr, sizeof array); }));
  EXPECT_TRUE(Throws(set, {"size_in_bytes", "144", "got 143"},
                     [&] { nvte_set_grouped_tensor_param(grouped, kNVTEGroupedScale, &array, 143); }));
  EXPECT_TRUE(Throws(get, {"size_in_bytes", "144", "got 8"},
                     [&] { nvte_get_grouped_tensor_param(grouped, kNVTEGroupedScale, &array, 8, nullptr); }));
  array.dtype = static_cast<NVTEDType>(11);
  EXPECT_TRUE(Throws(set, {"dtype", "NVTEDType"},
                     [&] { nvte_set_grouped_tensor_param(grouped, kNVTEGroupedScale, &array, sizeof array); }));
  std::size_t written = 0;
  nvte_get_grouped_tensor_param(grouped, kNVTEGroupedLastDims, nullptr, 0, &written);
  EXPECT_EQ(written, sizeof array);
  nvte_get_grouped_tensor_param(grouped, kNVTEGroupedWithGEMMSwizzledScales, nullptr, 0, &written);
  EXPECT_EQ(written, 1u);
  nvte_get_grouped_tensor_param(nullptr, kNVTEGroupedLastDims, &array, sizeof array, nullptr);
  EXPECT_EQ(array.data_ptr, nullptr) << "NULL has the values of a new one";
  EXPECT_EQ(array.dtype, kNVTEInt64);
  EXPECT_EQ(nvte_grouped_tensor_num_tensors(nullptr), 0u);
  EXPECT_EQ(nvte_grouped_tensor_type(nullptr), kNVTEFloat32);
  EXPECT_EQ(nvte_grouped_tensor_scaling_mode(nullptr), NVTE_DELAYED_TENSOR_SCALING);
  EXPECT_TRUE(Throws("nvte_get_grouped_tensor_logical_shape", {"null grouped tensor"},
                     [] { nvte_get_grouped_tensor_logical_shape(nullptr); }));
  EXPECT_TRUE(Throws(set, {"null grouped tensor"}, [&] {
    const std::uint8_t flag = 1;
    nvte_set_grouped_tensor_param(nullptr, kNVTEGroupedWithGEMMSwizzledScales, &flag, sizeof flag);
  }));
  nvte_destroy_grouped_tensor(grouped);
  EXPECT_TRUE(
      Throws("nvte_destroy_grouped_tensor", {"live grouped tensor"}, [&] { nvte_destroy_grouped_tensor(grouped); }));
  EXPECT_TRUE(Throws("nvte_grouped_tensor_type", {"live grouped tensor"}, [&] { nvte_grouped_tensor_type(grouped); }));
  EXPECT_NO_THROW(nvte_destroy_grouped_tensor(nullptr));
}

TEST(QuantizationConfigs, AttributesAreChecked) {
  const NVTEQuantizationConfig config = nvte_create_quantization_config();
  const char *set = "nvte_set_quantization_config_attribute", *get = "nvte_get_quantization_config_attribute";
  float epsilon = 0;
  std::uint8_t mode = 3;
  EXPECT_TRUE(Throws(set, {"attr", "0 to 10", "got 11"}, [&] {
    nvte_set_quantization_config_attribute(config, static_cast<NVTEQuantizationConfigAttribute>(11), &mode, 1);
  }));
  EXPECT_TRUE(Throws(set, {"buf", "NVTENVFP44Over6Mode", "got 3"}, [&] {
    nvte_set_quantization_config_attribute(config, kNVTEQuantizationConfigNVFP44Over6Mode, &mode, sizeof mode);
  }));
  EXPECT_TRUE(Throws(set, {"size_in_bytes", "4", "got 1"}, [&] {
    nvte_set_quantization_config_attribute(config, kNVTEQuantizationConfigAmaxEpsilon, &epsilon, 1);
  }));
  EXPECT_TRUE(Throws(get, {"size_in_bytes", "4", "got 3"}, [&] {
    nvte_get_quantization_config_attribute(config, kNVTEQuantizationConfigAmaxEpsilon, &epsilon, 3, nullptr);
  }));
  EXPECT_TRUE(Throws(get, {"config", "NULL"}, [&] {
    nvte_get_quantization_config_attribute(nullptr, kNVTEQuantizationConfigAmaxEpsilon, &epsilon, 4, nullptr);
  }));
  nvte_destroy_quantization_config(config);
  EXPECT_TRUE(Throws("nvte_destroy_quantization_config", {"config", "live quantization configuration"},
                     [&] { nvte_destroy_quantization_config(config); }));
  EXPECT_NO_THROW(nvte_destroy_quantization_config(nullptr));
}

// All are values of one list, so one kind must not pass for another.
TEST(Tensors, OtherKindsAreNoTensors) {
  const NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  const NVTEGroupedTensor grouped = nvte_create_grouped_tensor(NVTE_DELAYED_TENSOR_SCALING, 1, Shape({1, 1}));
  const NVTEQuantizationConfig config = nvte_create_quantization_config();
  ExpectDead(grouped);
  ExpectDead(config);
  for (void* const other : {static_cast<void*>(tensor), static_cast<void*>(config)}) {
    EXPECT_TRUE(Throws("nvte_grouped_tensor_type", {"live grouped tensor"}, [&] { nvte_grouped_tensor_type(other); }));
    EXPECT_TRUE(Throws("nvte_destroy_grouped_tensor", {"live"}, [&] { nvte_destroy_grouped_tensor(other); }));
  }
  EXPECT_TRUE(Throws("nvte_destroy_quantization_config", {"live"}, [&] { nvte_destroy_quantization_config(tensor); }));
  nvte_destroy_tensor(tensor);
  nvte_destroy_grouped_tensor(grouped);
  nvte_destroy_quantization_config(config);
}

}  // namespace
}  // namespace test
