// Every part of nvte_ep.hpp, compiled in each dialect and for each ABI.
#include <nvte_ep.hpp>
// Twice: the formatter would take the second away.
// clang-format off
#include <nvte_ep.hpp>
// clang-format on

int Use(void* comm, float* floats, std::int64_t* indices, const std::uint8_t* bytes, cudaStream_t stream);
int Use(void* comm, float* floats, std::int64_t* indices, const std::uint8_t* bytes, cudaStream_t stream) {
  nvte_ep::Options options;
  options.drop_on_overflow().deterministic().eager(2).num_topk(2).dispatch_sms(1).combine_sms(1).preprocess_sms(1);
  options.timeout(std::chrono::seconds(3)).shutdown_timeout(std::chrono::minutes(1)).symm_segment_bytes(1 << 20);
  options.undocumented_scale();
  options.set("overflow", options.get("overflow").c_str());
  nvte_ep::GroupConfig config;
  config.ep_size = 2;
  nvte_ep::Group made(comm, config, options);
  nvte_ep::Group group(std::move(made));
  const nvte_ep::Layer layer(group, {2, 16});
  const nvte_ep::Handle handle(layer, floats);
  const nvte_ep::SymmetricMemory memory(group, group.memory_usage().total);
  nvte_ep::Tensor idx(indices, {4, 2}), rows(floats, {4, 8}), null;
  null = nvte_ep::Tensor::mxfp8(bytes, bytes, 1, 512);
  handle.prepare({idx, null}, stream);
#if __cplusplus >= 202002L
  handle.dispatch({.topk_idx = idx, .tokens = rows, .recv_tokens = {rows, memory.window(64)}}, stream);
  const nvte_ep::Tensor part(std::span<float>(floats, 8), {2, 4}), all(std::span<const std::uint8_t>(bytes, 8));
#else
  nvte_ep::Dispatch dispatch;
  dispatch.tokens = rows;
  dispatch.recv_tokens = {rows, memory.window(64)};
  handle.dispatch(dispatch, stream);
#endif
  handle.combine({rows, idx}, stream);
  handle.combine_bwd({rows, rows}, stream);
  handle.dispatch_bwd({rows, rows, rows, rows}, stream);
  nvte_ep::LowLatencyConfig few;
  few.num_topk = 2;
  nvte_ep::LowLatencyGroup moved(comm, few, options), low_latency(std::move(moved));
  const nvte_ep::LowLatencyHandle decode(low_latency, floats);
  decode.dispatch({idx, rows, nvte_ep::Tensor::quantized(bytes, floats, 2, 8, 512), idx}, stream);
  decode.send_dispatch({idx, rows, rows, idx}, stream);
  decode.complete(stream);
  decode.combine({idx, rows, rows, rows}, stream);
  decode.send_combine({idx, rows, rows, rows}, stream);
  low_latency.shutdown();
  group.shutdown();
  return static_cast<int>(handle.recv_totals(stream).needed) + static_cast<int>(rows.bytes()) +
         static_cast<int>(low_latency.memory_usage().total);
}
