// Two libraries that define nvte_ep_* with different arguments, in one process: whichever the program is linked to
// refuses to work. Compiled once for each ABI.

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "abi.h"
#include "support/expect_error.h"

namespace test {
namespace {

#ifdef NVTE_EP_GROUP_CONFIG_INIT
constexpr char kOwnAbi[] = "TransformerEngine >= 2.19 ABI";
constexpr char kOtherAbi[] = "register_layer ABI";
constexpr char kOther[] = "libnvte_ep.so.1";
#else
constexpr char kOwnAbi[] = "register_layer ABI";
constexpr char kOtherAbi[] = "TransformerEngine >= 2.19 ABI";
constexpr char kOther[] = "libtransformer_engine.so";
#endif

void InitializeWithoutCommunicator() {
  NVTEEpGroupConfig config = {};
  config.ep_size = 1;
  config.num_experts = 4;
  config.max_tokens_per_rank = 4;
  config.max_recv_tokens_per_rank = 8;
  config.hidden_dim = 64;
  Complete(config, 0, 0, {});
  Initialize(nullptr, config);
}

TEST(Abis, TheOtherOneInTheGlobalScopeIsRefused) {
  // Alone, the missing communicator is what is wrong.
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"ep_comm"}, InitializeWithoutCommunicator));
  // A library that keeps its names to itself takes nobody's calls.
  ASSERT_NE(dlopen(kOther, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  EXPECT_TRUE(Throws("nvte_ep_initialize", {"ep_comm"}, InitializeWithoutCommunicator));
  ASSERT_NE(dlopen(kOther, RTLD_NOW | RTLD_GLOBAL), nullptr) << dlerror();
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_TRUE(Throws("nvte_ep_initialize",
                       {std::string("this library has the ") + kOwnAbi, kOther, std::string("with the ") + kOtherAbi},
                       InitializeWithoutCommunicator));
  }
  EXPECT_NO_THROW(nvte_ep_shutdown());
}

}  // namespace
}  // namespace test
