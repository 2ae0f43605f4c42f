// Loads the library that it is given by dlopen and sees its exception. usage: loader PATH
// Nothing of ours is linked; the header gives the types.
#include <dlfcn.h>
#include <nvte_ep_ext.h>
#include <transformer_engine/ep.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace {

void* library = nullptr;

template <typename Function>
Function* find(const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(dlerror());
  return reinterpret_cast<Function*>(symbol);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  std::printf("%s\n", find<decltype(nvte_ep_ext_version)>("nvte_ep_ext_version")());
  find<decltype(nvte_ep_shutdown)>("nvte_ep_shutdown")();
  const auto combine = find<decltype(nvte_ep_combine)>("nvte_ep_combine");
  try {
    combine({}, nullptr, {}, nullptr, nullptr);
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
    return std::string(error.what()).rfind("nvte_ep_combine: ", 0) == 0 && dlclose(library) == 0 ? 0 : 1;
  }
  return 1;
}
