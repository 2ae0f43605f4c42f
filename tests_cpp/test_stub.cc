// The stub library, which is installed in the real one's place where NCCL EP is off.

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>

#include <set>
#include <string>
#include <vector>

#include "support/ep_calls.h"
#include "support/expect_error.h"
#include "support/tensor.h"

namespace test {
namespace {

// What the text has to say about getting a build that works.
const std::vector<std::string> kRemedy = {"stub", "libnvte_ep.so.1", "cargo build --release"};

TEST(Stub, EveryCallButShutdownNamesTheRemedy) {
  EpCalls calls;
  for (const EpCalls::Call& call : calls.NeedingGroup()) EXPECT_TRUE(Throws(call.name, kRemedy, call.run));
  for (const EpCalls::Call& call : calls.NeedingGroupWithNulls()) EXPECT_TRUE(Throws(call.name, kRemedy, call.run));
  char not_a_communicator[64] = {};
  EXPECT_TRUE(Throws("nvte_ep_initialize", kRemedy, [&] { nvte_ep_initialize(not_a_communicator, calls.config()); }));
  EXPECT_TRUE(Throws("nvte_ep_initialize", kRemedy, [] { nvte_ep_initialize(nullptr, {}); }));
}

TEST(Stub, ShutdownIsNothing) {
  EXPECT_NO_THROW(nvte_ep_shutdown());
  EXPECT_NO_THROW(nvte_ep_shutdown());
}

TEST(Stub, VersionSaysStub) {
  const std::string version = nvte_ep_ext_version();
  EXPECT_NE(version.find("stub"), std::string::npos) << version;
}

TEST(Stub, TensorsWork) {
  float values[12] = {};
  const Tensor tensor(values, kNVTEFloat32, {3, 4});
  EXPECT_EQ(nvte_tensor_data(tensor.get()), values);
  EXPECT_EQ(nvte_tensor_type(tensor.get()), kNVTEFloat32);
  EXPECT_EQ(nvte_tensor_ndims(tensor.get()), 2u);
  EXPECT_EQ(nvte_tensor_numel(tensor.get()), 12u);
  EXPECT_EQ(nvte_tensor_size_bytes(tensor.get()), sizeof values);
  std::vector<NVTETensor> batch(5);
  nvte_create_tensors(NVTE_MXFP8_1D_SCALING, batch.data(), batch.size());
  EXPECT_EQ(std::set<NVTETensor>(batch.begin(), batch.end()).size(), batch.size());
  nvte_destroy_tensors(batch.data(), batch.size());
  EXPECT_TRUE(Throws("nvte_tensor_type", {"tensor"}, [&] { nvte_tensor_type(batch[0]); }));
}

}  // namespace
}  // namespace test
