/* A program in C links against the library and passes structures by value. */

#include <nvte_ep_ext.h>
#include <stdio.h>
#include <transformer_engine/ep.h>
#include <transformer_engine/transformer_engine.h>

int main(void) {
  const size_t sizes[2] = {3, 5};
  float values[15] = {0};
  const NVTETensor tensor = nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING);
  NVTEBasicTensor array;
  array.data_ptr = values;
  array.dtype = kNVTEFloat32;
  array.shape = nvte_make_shape(sizes, 2);
  nvte_set_tensor_param_v2(tensor, kNVTERowwiseData, &array, sizeof array);
  const NVTEShape shape = nvte_tensor_shape(tensor);
  const int right = shape.ndim == 2 && shape.data[0] == 3 && shape.data[1] == 5 && nvte_tensor_numel(tensor) == 15 &&
                    nvte_tensor_size_bytes(tensor) == sizeof values && nvte_tensor_data(tensor) == values;
  nvte_destroy_tensor(tensor);
  nvte_ep_shutdown();
  printf("%s: %s\n", nvte_ep_ext_version(), right ? "ok" : "wrong values");
  return right ? 0 : 1;
}
