// What nvcc makes of a program with a kernel, written by hand, and what host code uses of CUDA's headers.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <stdio.h>
#include <string.h>

// Those of crt/host_runtime.h.
struct dim3 {
  unsigned int x, y, z;
};
extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaUnregisterFatBinary(void**);
char __cudaInitModule(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, dim3*, dim3*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*);
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*);
cudaError_t __cudaGetKernel(void**, const void*);
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t cudaFuncSetAttribute(const void*, int, int);
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int);
}

static int failed;
#define EXPECT(condition) \
  if (!(condition)) failed = 1, printf("failed: %s\n", #condition)

static long image[4];
static char constant[16];
static void scale(float*) {}

struct Registration {
  void** handle = __cudaRegisterFatBinary(image);
  Registration() {
    __cudaRegisterFunction(handle, (const char*)scale, (char*)"scale", "_Z5scalePf", -1, 0, 0, 0, 0, 0);
    __cudaRegisterVar(handle, constant, constant, "constant", 0, sizeof constant, 1, 0);
    __cudaRegisterFatBinaryEnd(handle);
  }
  ~Registration() { __cudaUnregisterFatBinary(handle); }
} registration;

int main(int, char** arguments) {
  EXPECT(__cudaInitModule(registration.handle));
  // kernel<<<2, 32, 64, stream>>>(values)
  cudaStream_t stream;
  EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
  EXPECT(__cudaPushCallConfiguration({2, 1, 1}, {32, 1, 1}, 64, stream) == 0);
  dim3 grid, block;
  size_t memory;
  cudaStream_t there;
  EXPECT(__cudaPopCallConfiguration(&grid, &block, &memory, &there) == cudaSuccess);
  EXPECT(grid.x == 2 && block.x == 32 && memory == 64 && there == stream);
  EXPECT(__cudaPopCallConfiguration(&grid, &block, &memory, &there) == cudaErrorMissingConfiguration);
  EXPECT(cudaLaunchKernel((const void*)scale, grid, block, nullptr, memory, stream) == cudaErrorNotSupported);
  void* kernel;
  EXPECT(__cudaGetKernel(&kernel, (const void*)scale) == cudaSuccess);
  EXPECT(__cudaLaunchKernel(kernel, grid, block, nullptr, memory, stream) == cudaErrorNotSupported);
  EXPECT(cudaGetLastError() == cudaErrorNotSupported);

  // What exists and is refused.
  EXPECT(cudaFuncSetAttribute((const void*)scale, 8, 1024) == cudaErrorNotSupported);
  EXPECT(cudaGetLastError() == cudaErrorNotSupported);
  EXPECT(ncclCommShrink(nullptr, nullptr, 0, nullptr, nullptr, 0) == ncclInvalidUsage);
  EXPECT(strcmp(ncclGetLastError(nullptr), "ncclCommShrink: not supported by the host runtime") == 0);

  cudaDeviceProp properties;
  EXPECT(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  EXPECT(strcmp(properties.name, "nvte-ep host device") == 0 && properties.major == 9 &&
         properties.multiProcessorCount == 132);
  EXPECT(properties.totalGlobalMem > 1 << 20 && properties.maxThreadsDim[2] == 64 && properties.warpSize == 32);
  EXPECT(cudaGetDeviceProperties(&properties, 7) == cudaErrorInvalidDevice);
  int reach;
  EXPECT(cudaDeviceCanAccessPeer(&reach, 0, 0) == cudaSuccess && reach == 0);
  EXPECT(cudaProfilerStart() == cudaSuccess && cudaProfilerStop() == cudaSuccess);

  // Rows of 8 bytes, 16 apart, into rows that follow each other.
  float *rows, *packed;
  EXPECT(cudaMalloc(&rows, 64) == cudaSuccess && cudaMalloc(&packed, 32) == cudaSuccess);
  float values[16], back[8];
  for (int i = 0; i < 16; i++) values[i] = float(i);
  EXPECT(cudaMemcpy(rows, values, 64, cudaMemcpyHostToDevice) == cudaSuccess);
  EXPECT(cudaMemcpy2D(packed, 8, rows, 16, 8, 4, cudaMemcpyDeviceToDevice) == cudaSuccess);
  EXPECT(cudaMemcpy(back, packed, 32, cudaMemcpyDeviceToHost) == cudaSuccess);
  for (int i = 0; i < 8; i++) EXPECT(back[i] == float(i / 2 * 4 + i % 2));
  CUdeviceptr address;
  EXPECT(cuMemAlloc(&address, 64) == CUDA_SUCCESS && cuMemFree(address) == CUDA_SUCCESS);

  EXPECT(cudaDeviceReset() == cudaSuccess);
  EXPECT(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  EXPECT(cudaFree(rows) == cudaErrorInvalidValue);
  EXPECT(cudaMalloc(&rows, 64) == cudaSuccess && cudaFree(rows) == cudaSuccess);

  // Every 16-bit value as float, and floats as 16 bits: what the caller compares.
  FILE *file = fopen(arguments[1], "rb"), *result = fopen(arguments[2], "wb");
  float value;
  for (unsigned bits = 0; bits < 65536; bits++) {
    const float wide[2] = {__bfloat162float(__ushort_as_bfloat16(bits)), __half2float(__ushort_as_half(bits))};
    fwrite(wide, sizeof wide, 1, result);
  }
  while (fread(&value, sizeof value, 1, file) == 1) {
    const unsigned short narrow[2] = {__bfloat16_as_ushort(nv_bfloat16(value)), __half_as_ushort(__float2half(value))};
    fwrite(narrow, sizeof narrow, 1, result);
  }
  fclose(file), fclose(result);
  return failed;
}
