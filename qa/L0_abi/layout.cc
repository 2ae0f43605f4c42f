// Prints the size, alignment and field offsets of every structure that crosses TransformerEngine's ABI, and the values
// of its constants. Compiled once against TransformerEngine's headers and once against ours; the outputs have to be
// equal.
#include <transformer_engine/comm_window.h>
#include <transformer_engine/ep.h>
#include <transformer_engine/transformer_engine.h>

#include <cstddef>
#include <cstdio>

#define TYPE(type) std::printf(#type " size %zu align %zu\n", sizeof(type), alignof(type))
#define FIELD(type, field) \
  std::printf(#type "." #field " at %zu size %zu\n", offsetof(type, field), sizeof(static_cast<type*>(nullptr)->field))
#define VALUE(name) std::printf(#name " %d\n", static_cast<int>(name))

int main() {
  TYPE(NVTEEpGroupConfig);
  FIELD(NVTEEpGroupConfig, struct_size);
  FIELD(NVTEEpGroupConfig, ep_size);
  FIELD(NVTEEpGroupConfig, num_experts);
  FIELD(NVTEEpGroupConfig, max_tokens_per_rank);
  FIELD(NVTEEpGroupConfig, max_recv_tokens_per_rank);
  FIELD(NVTEEpGroupConfig, hidden_dim);
  FIELD(NVTEEpGroupConfig, num_comm_sms);
  FIELD(NVTEEpGroupConfig, max_token_dtype);
  FIELD(NVTEEpGroupConfig, zero_copy);
  FIELD(NVTEEpGroupConfig, num_topk);
  FIELD(NVTEEpGroupConfig, drop_on_overflow);
  TYPE(NVTEEpLayerConfig);
  FIELD(NVTEEpLayerConfig, struct_size);
  FIELD(NVTEEpLayerConfig, top_k);
  FIELD(NVTEEpLayerConfig, dispatch_output_per_expert_alignment);
  TYPE(NVTECommWindow);
  FIELD(NVTECommWindow, window);
  FIELD(NVTECommWindow, offset);
  FIELD(NVTECommWindow, scale_window);
  FIELD(NVTECommWindow, scale_offset);
  TYPE(NVTEShape);
  FIELD(NVTEShape, data);
  FIELD(NVTEShape, ndim);
  TYPE(NVTEBasicTensor);
  FIELD(NVTEBasicTensor, data_ptr);
  FIELD(NVTEBasicTensor, dtype);
  FIELD(NVTEBasicTensor, shape);
  TYPE(NVTETensor);
  TYPE(NVTEDType);
  TYPE(NVTEScalingMode);
  TYPE(NVTETensorParam);
  TYPE(NVTEGroupedTensor);
  TYPE(NVTEGroupedTensorParam);
  TYPE(NVTEQuantizationConfig);
  TYPE(NVTEQuantizationConfigAttribute);
  TYPE(NVTENVFP44Over6Mode);
  VALUE(kNVTEByte);
  VALUE(kNVTEInt16);
  VALUE(kNVTEInt32);
  VALUE(kNVTEInt64);
  VALUE(kNVTEFloat32);
  VALUE(kNVTEFloat16);
  VALUE(kNVTEBFloat16);
  VALUE(kNVTEFloat8E4M3);
  VALUE(kNVTEFloat8E5M2);
  VALUE(kNVTEFloat8E8M0);
  VALUE(kNVTEFloat4E2M1);
  VALUE(kNVTENumTypes);
  VALUE(NVTE_DELAYED_TENSOR_SCALING);
  VALUE(NVTE_MXFP8_1D_SCALING);
  VALUE(NVTE_BLOCK_SCALING_1D);
  VALUE(NVTE_BLOCK_SCALING_2D);
  VALUE(NVTE_NVFP4_1D_SCALING);
  VALUE(NVTE_INVALID_SCALING);
  VALUE(kNVTERowwiseData);
  VALUE(kNVTEColumnwiseData);
  VALUE(kNVTEScale);
  VALUE(kNVTEAmax);
  VALUE(kNVTERowwiseScaleInv);
  VALUE(kNVTEColumnwiseScaleInv);
  VALUE(kNVTEColumnwiseAmax);
  VALUE(kNVTEWithGEMMSwizzledScales);
  VALUE(kNVTERowScaledNVFP4);
  VALUE(kNVTENVFP4E4M3Max);
  VALUE(kNVTENumTensorParams);
  VALUE(kNVTEGroupedRowwiseData);
  VALUE(kNVTEGroupedColumnwiseData);
  VALUE(kNVTEGroupedScale);
  VALUE(kNVTEGroupedAmax);
  VALUE(kNVTEGroupedRowwiseScaleInv);
  VALUE(kNVTEGroupedColumnwiseScaleInv);
  VALUE(kNVTEGroupedColumnwiseAmax);
  VALUE(kNVTEGroupedFirstDims);
  VALUE(kNVTEGroupedLastDims);
  VALUE(kNVTEGroupedTensorOffsets);
  VALUE(kNVTEGroupedWithGEMMSwizzledScales);
  VALUE(kNVTENumGroupedTensorParams);
  VALUE(kNVTEQuantizationConfigForcePow2Scales);
  VALUE(kNVTEQuantizationConfigAmaxEpsilon);
  VALUE(kNVTEQuantizationConfigNoopTensor);
  VALUE(kNVTEQuantizationConfigFloat8BlockScaleTensorFormat);
  VALUE(kNVTEQuantizationConfigRNGState);
  VALUE(kNVTEQuantizationConfigNVFP42DQuantization);
  VALUE(kNVTEQuantizationConfigStochasticRounding);
  VALUE(kNVTEQuantizationConfigUseFastMath);
  VALUE(kNVTEQuantizationConfigNVFP44Over6Mode);
  VALUE(kNVTEQuantizationConfigNVFP44Over6ErrUseFastMath);
  VALUE(kNVTEQuantizationConfigMXFP82DQuantization);
  VALUE(kNVTEQuantizationConfigNumAttributes);
  VALUE(kNVTENVFP44Over6Disabled);
  VALUE(kNVTENVFP44Over6MinMAE);
  VALUE(kNVTENVFP44Over6MinMSE);
  NVTEEpGroupConfig group = NVTE_EP_GROUP_CONFIG_INIT;
  NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
  std::printf("init %zu %zu\n", group.struct_size, layer.struct_size);
}
