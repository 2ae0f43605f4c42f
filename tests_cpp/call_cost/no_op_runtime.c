// CUDA, NCCL and NCCL EP for a group of one rank whose calls do nothing: what is left of a call's time is the library's own.
// Loaded in place of the host runtime (NVTE_EP_HOST_LIB). What has to answer answers; copies to and from "device" memory copy,
// since initialize exchanges its records through them.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static char object;

#define NO_OP(name, ...) \
  int name(__VA_ARGS__) { return 0; }

NO_OP(cuInit, unsigned flags)
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char** text) { return (void)code, *text = "an error", 0; }
int cuGetErrorString(int code, const char** text) { return (void)code, *text = "of nobody", 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGetName(char* name, int bytes, int device) {
  (void)device;
  strncpy(name, "no-op", (size_t)bytes);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;  // multiprocessors, compute capability
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return (void)device, *context = &object, 0; }
NO_OP(cuCtxSetCurrent, void* context)
int cuCtxGetCurrent(void** context) { return *context = &object, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
NO_OP(cuCtxSynchronize, void)
int cuStreamCreate(void** stream, unsigned flags) { return (void)flags, *stream = &object, 0; }
NO_OP(cuStreamDestroy_v2, void* stream)
NO_OP(cuStreamQuery, void* stream)
NO_OP(cuStreamSynchronize, void* stream)
int cuStreamGetCtx(void* stream, void** context) { return (void)stream, *context = &object, 0; }
int cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = 0, 0; }
NO_OP(cuThreadExchangeStreamCaptureMode, int* mode)
int cuEventCreate(void** event, unsigned flags) { return (void)flags, *event = &object, 0; }
NO_OP(cuEventDestroy_v2, void* event)
NO_OP(cuEventRecord, void* event, void* stream)
NO_OP(cuEventQuery, void* event)
NO_OP(cuEventSynchronize, void* event)
int cuEventElapsedTime_v2(float* ms, void* from, void* to) { return (void)from, (void)to, *ms = 0, 0; }
int cuMemAlloc_v2(uint64_t* address, size_t bytes) { return *address = (uint64_t)(uintptr_t)malloc(bytes), 0; }
int cuMemFree_v2(uint64_t address) { return free((void*)(uintptr_t)address), 0; }
int cuMemAllocHost_v2(void** address, size_t bytes) { return *address = malloc(bytes), 0; }
int cuMemFreeHost(void* address) { return free(address), 0; }
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { return *free_bytes = *total = (size_t)1 << 40, 0; }
NO_OP(cuFuncSetAttribute, void* function, int attribute, int value)
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)(uintptr_t)to, from, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  (void)stream;
  memcpy(to, (const void*)(uintptr_t)from, bytes);
  return 0;
}
NO_OP(cuMemcpyAsync, uint64_t to, uint64_t from, size_t bytes, void* stream)
NO_OP(cuMemsetD8Async, uint64_t to, unsigned char value, size_t count, void* stream)
// All of the address space is memory of device 0.
int cuPointerGetAttributes(unsigned count, const int* attributes, void** data, uint64_t pointer) {
  (void)pointer;
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case 2: *(unsigned*)data[i] = 2; break;                      // memory type: device
      case 7: *(uint64_t*)data[i] = 1; break;                      // allocation
      case 8: *(unsigned*)data[i] = 0; break;                      // managed
      case 9: *(int*)data[i] = 0; break;                           // device
      case 10: *(char*)data[i] = 0; break;                         // legacy IPC
      case 11: *(uint64_t*)data[i] = 0; break;                     // start
      case 12: *(size_t*)data[i] = (size_t)1 << 62; break;         // size
      default: return 1;
    }
  }
  return 0;
}
int cuModuleLoadData(void** module, const void* image) { return (void)image, *module = &object, 0; }
NO_OP(cuModuleUnload, void* module)
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return (void)module, (void)name, *function = &object, 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** arguments, void** extra) {
  (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)arguments;
  (void)extra;
  return 0;
}

int ncclGetVersion(int* version) { return *version = 23007, 0; }
typedef struct {
  char bytes[128];
} UniqueId;
NO_OP(ncclGetUniqueId, UniqueId* id)
int ncclCommInitRank(void** comm, int ranks, UniqueId id, int rank) {
  (void)ranks, (void)id, (void)rank;
  *comm = &object;
  return 0;
}
NO_OP(ncclCommDestroy, void* comm)
int ncclCommCount(void* comm, int* count) { return (void)comm, *count = 1, 0; }
int ncclCommUserRank(void* comm, int* rank) { return (void)comm, *rank = 0, 0; }
int ncclCommCuDevice(void* comm, int* device) { return (void)comm, *device = 0, 0; }
const char* ncclGetErrorString(int code) { return (void)code, "an error of nobody"; }
int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm, void* stream) {
  (void)type, (void)comm, (void)stream;  // bytes, of the one rank
  memcpy(receive, send, count);
  return 0;
}

int ncclEpGetVersion(int* version) { return *version = 200, 0; }
int ncclEpCreateGroup(void** group, void* comm, const void* config) { return (void)comm, (void)config, *group = &object, 0; }
NO_OP(ncclEpGroupDestroy, void* group)
int ncclEpHandleMemSize(void* group, int layout, const void* config, size_t* bytes, int top_k) {
  (void)group, (void)layout, (void)config, (void)top_k;
  *bytes = 4096;
  return 0;
}
int ncclEpInitHandle(void** handle, void* group, int layout, const void* config, int top_k, const void* memory) {
  (void)group, (void)layout, (void)config, (void)top_k, (void)memory;
  *handle = &object;
  return 0;
}
NO_OP(ncclEpUpdateHandle, void* handle, const void* topk_idx, const void* layout, void* stream)
NO_OP(ncclEpHandleDestroy, void* handle)
NO_OP(ncclEpDispatch, void* handle, const void* inputs, const void* outputs, const void* layout, const void* config, void* stream)
NO_OP(ncclEpCombine, void* handle, const void* inputs, const void* outputs, const void* config, void* stream)
NO_OP(ncclEpComplete, void* handle, const void* config, void* stream)
