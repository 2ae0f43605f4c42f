// The CUDA runtime and NCCL for the programs of one process, looked up at run time so that these programs also start on
// a machine that has neither.

#ifndef NVTE_EP_TESTS_SUPPORT_SINGLE_H_
#define NVTE_EP_TESTS_SUPPORT_SINGLE_H_

#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace test {

// True if the environment asks for the host runtime; a test that needs a runtime skips itself otherwise.
inline bool OnHostRuntime() {
  const char* runtime = std::getenv("NVTE_EP_RUNTIME");
  return runtime != nullptr && std::strcmp(runtime, "host") == 0;
}

class SharedLibrary {
 public:
  explicit SharedLibrary(const char* name) : library_(dlopen(name, RTLD_NOW | RTLD_GLOBAL)) {
    if (library_ == nullptr) throw std::runtime_error(dlerror());
  }

  template <typename Function>
  Function* Get(const char* name) const {
    void* address = dlsym(library_, name);
    if (address == nullptr) throw std::runtime_error(std::string("no ") + name);
    return reinterpret_cast<Function*>(address);
  }

 private:
  void* library_;
};

// Device memory of one process.
class Device {
 public:
  void* Allocate(std::size_t bytes) {
    void* data = nullptr;
    Check(malloc_(&data, bytes), "cudaMalloc");
    return data;
  }
  void Free(void* data) { Check(free_(data), "cudaFree"); }
  void Fill(void* data, int value, std::size_t bytes) { Check(memset_(data, value, bytes), "cudaMemset"); }
  void Write(void* data, const void* source, std::size_t bytes) {
    Check(memcpy_(data, source, bytes, kHostToDevice), "cudaMemcpy");
  }
  std::vector<unsigned char> Read(const void* data, std::size_t bytes) {
    std::vector<unsigned char> copy(bytes);
    Check(synchronize_(), "cudaDeviceSynchronize");
    Check(memcpy_(copy.data(), data, bytes, kDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  static constexpr int kHostToDevice = 1, kDeviceToHost = 2;

  static void Check(int status, const char* call) {
    if (status != 0) throw std::runtime_error(std::string(call) + " returned " + std::to_string(status));
  }

  SharedLibrary library_{"libcudart.so.13"};
  int (*malloc_)(void**, std::size_t) = library_.Get<int(void**, std::size_t)>("cudaMalloc");
  int (*free_)(void*) = library_.Get<int(void*)>("cudaFree");
  int (*memset_)(void*, int, std::size_t) = library_.Get<int(void*, int, std::size_t)>("cudaMemset");
  int (*memcpy_)(void*, const void*, std::size_t,
                 int) = library_.Get<int(void*, const void*, std::size_t, int)>("cudaMemcpy");
  int (*synchronize_)() = library_.Get<int()>("cudaDeviceSynchronize");
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_SINGLE_H_
