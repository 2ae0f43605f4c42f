// Compiles and links against an installed nvte_ep, of either ABI, and sees its exception. Says which library served it.
#include <transformer_engine/ep.h>

#include <cstdio>
#include <stdexcept>
#include <string>

extern "C" const char* nvte_ep_ext_version(void);

int main() {
  std::printf("%s\n", nvte_ep_ext_version());
  const std::size_t sizes[2] = {3, 5};
  NVTEBasicTensor basic = {nullptr, kNVTEBFloat16, nvte_make_shape(sizes, 2)};
  NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  nvte_set_tensor_param_v2(tensor, kNVTERowwiseData, &basic, sizeof basic);
  const bool right = nvte_tensor_size_bytes(tensor) == 30;
  nvte_destroy_tensor(tensor);
  try {
    nvte_ep_combine({}, nullptr, {}, nullptr, nullptr);
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return right && std::string(error.what()).rfind("nvte_ep_combine: ", 0) == 0 ? 0 : 1;
  }
  return 1;
}
