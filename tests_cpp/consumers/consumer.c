/* A C program: the headers are C, and the host runtime's headers need no CUDA. */
#include <cuda_runtime_api.h>
#include <nvte_ep_ext.h>
#include <stdio.h>
#include <transformer_engine/ep.h>

int main(void) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 1) return 1;
  NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  const int right = nvte_tensor_type(tensor) == kNVTEFloat32 && nvte_tensor_numel(tensor) == 0;
  nvte_destroy_tensor(tensor);
  nvte_ep_shutdown();
  puts(nvte_ep_ext_version());
  return right ? 0 : 1;
}
