// The stub library, which is installed in the real one's place where NCCL EP is off.

#include <gtest/gtest.h>
#include <nvte_ep_ext.h>
#include <nvte_ep_status.h>

#include <set>
#include <string>
#include <vector>

#include "support/ep_calls.h"
#include "support/expect_error.h"
#include "support/tensor.h"

namespace test {
namespace {

// What the text has to say about getting a build that works.
const std::vector<std::string> kRemedy = {"stub", "full libnvte_ep.so.1", "LD_LIBRARY_PATH"};

TEST(Stub, EveryCallButShutdownNamesTheRemedy) {
  EpCalls calls;
  for (const EpCalls::Call& call : calls.NeedingGroup()) EXPECT_TRUE(Throws(call.name, kRemedy, call.run));
  for (const EpCalls::Call& call : calls.NeedingGroupWithNulls()) EXPECT_TRUE(Throws(call.name, kRemedy, call.run));
  char not_a_communicator[64] = {};
  EXPECT_TRUE(Throws("nvte_ep_initialize", kRemedy, [&] { nvte_ep_initialize(not_a_communicator, calls.config()); }));
  EXPECT_TRUE(Throws("nvte_ep_initialize", kRemedy, [] { nvte_ep_initialize(nullptr, {}); }));
}

TEST(Stub, AdditionsNameTheRemedyToo) {
  void* const memory = nullptr;
  EXPECT_TRUE(Throws("nvte_ep_ext_options_create", kRemedy, [] { nvte_ep_ext_options_create(); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_options_set", kRemedy, [] { nvte_ep_ext_options_set(nullptr, "eager", "on"); }));
  EXPECT_TRUE(
      Throws("nvte_ep_ext_options_get", kRemedy, [] { nvte_ep_ext_options_get(nullptr, "eager", nullptr, 0); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_initialize", kRemedy, [] { nvte_ep_ext_initialize(nullptr, nullptr, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_recv_totals", kRemedy, [] { nvte_ep_ext_recv_totals(nullptr, nullptr, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_memory_usage", kRemedy, [] { nvte_ep_ext_memory_usage(nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_stats", kRemedy, [] { nvte_ep_ext_stats(nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_alloc", kRemedy, [] { nvte_ep_ext_symm_alloc(1, nullptr, nullptr, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_symm_free", kRemedy, [&] { nvte_ep_ext_symm_free(memory); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_of", kRemedy, [&] { nvte_ep_ext_window_of(memory, nullptr, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_is_symmetric", kRemedy, [&] { nvte_ep_ext_is_symmetric(memory); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_register", kRemedy, [&] { nvte_ep_ext_window_register(memory, 1, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_window_deregister", kRemedy, [&] { nvte_ep_ext_window_deregister(memory); }));
  NVTETensor const none = nullptr;
  EXPECT_TRUE(
      Throws("nvte_ep_ext_ll_initialize", kRemedy, [] { nvte_ep_ext_ll_initialize(nullptr, nullptr, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_handle_mem_size", kRemedy, [] { nvte_ep_ext_ll_handle_mem_size(); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_dispatch", kRemedy,
                     [&] { nvte_ep_ext_ll_dispatch(none, none, none, none, none, 0, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_combine", kRemedy,
                     [&] { nvte_ep_ext_ll_combine(none, none, none, none, none, 0, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_complete", kRemedy, [&] { nvte_ep_ext_ll_complete(none, nullptr); }));
  EXPECT_TRUE(Throws("nvte_ep_ext_ll_memory_usage", kRemedy, [] { nvte_ep_ext_ll_memory_usage(nullptr); }));
  EXPECT_NO_THROW(nvte_ep_ext_ll_shutdown());
  EXPECT_NO_THROW(nvte_ep_ext_options_destroy(nullptr));
}

TEST(Stub, StatusesNameTheRemedyToo) {
  EpCalls calls;
  std::size_t bytes = 0;
  std::uint64_t id = 0;
  EXPECT_EQ(nvte_ep_try_initialize(nullptr, calls.config()), NVTE_EP_NOT_SUPPORTED);
  EXPECT_EQ(nvte_ep_try_register_layer({0, 2, 0}, &bytes, &id), NVTE_EP_NOT_SUPPORTED);
  EXPECT_EQ(nvte_ep_try_prepare({1, nullptr}, nullptr, nullptr, 0, nullptr), NVTE_EP_NOT_SUPPORTED);
  const std::string text = nvte_ep_last_error();
  for (const std::string& part : kRemedy) EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(nvte_ep_try_shutdown(), NVTE_EP_SUCCESS);
  NVTETensor tensor = nullptr;
  EXPECT_EQ(nvte_ep_try_create_tensor(NVTE_DELAYED_TENSOR_SCALING, &tensor), NVTE_EP_SUCCESS);
  EXPECT_EQ(nvte_ep_try_destroy_tensor(tensor), NVTE_EP_SUCCESS);
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
