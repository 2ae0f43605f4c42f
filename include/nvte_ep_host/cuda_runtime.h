/* The CUDA runtime interface as C++ programs include it, for machines without CUDA. SPDX-License-Identifier: Apache-2.0
 * Programs that include it compile with any C++ compiler; kernels (`__global__`, `<<<>>>`) need nvcc and its own headers. */

#ifndef NVTE_EP_HOST_CUDA_RUNTIME_H_
#define NVTE_EP_HOST_CUDA_RUNTIME_H_

#include <stddef.h>

#include "cuda_runtime_api.h"

#define __host__
#define __device__
#define __forceinline__ inline

#ifdef __cplusplus

/* Memory by a pointer of its type. */

template <class T>
inline cudaError_t cudaMalloc(T **memory, size_t bytes) {
  return ::cudaMalloc(reinterpret_cast<void **>(memory), bytes);
}

template <class T>
inline cudaError_t cudaMallocAsync(T **memory, size_t bytes, cudaStream_t stream) {
  return ::cudaMallocAsync(reinterpret_cast<void **>(memory), bytes, stream);
}

template <class T>
inline cudaError_t cudaMallocHost(T **memory, size_t bytes, unsigned int flags = 0) {
  return ::cudaHostAlloc(reinterpret_cast<void **>(memory), bytes, flags);
}

template <class T>
inline cudaError_t cudaHostAlloc(T **memory, size_t bytes, unsigned int flags) {
  return ::cudaHostAlloc(reinterpret_cast<void **>(memory), bytes, flags);
}

template <class T>
inline cudaError_t cudaHostGetDevicePointer(T **device, void *host, unsigned int flags) {
  return ::cudaHostGetDevicePointer(reinterpret_cast<void **>(device), host, flags);
}

/* Flags that the C interface names in another function. */

inline cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned int flags) {
  return ::cudaEventCreateWithFlags(event, flags);
}

#endif /* __cplusplus */

#endif /* NVTE_EP_HOST_CUDA_RUNTIME_H_ */
