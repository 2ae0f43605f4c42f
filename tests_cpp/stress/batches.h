// Microbatches: each is prepared, and then dispatched, combined and differentiated in any order and number, by calls
// and by graphs.

#ifndef NVTE_EP_TESTS_STRESS_BATCHES_H_
#define NVTE_EP_TESTS_STRESS_BATCHES_H_

#include <memory>
#include <type_traits>
#include <vector>

#include "stress/layers.h"
#include "stress/stress.h"
#include "support/ep.h"
#include "support/lanes.h"

namespace test {

class Batch {
 public:
  virtual ~Batch() = default;
  // Makes a call, or a few, or launches a graph.
  virtual void Act(Dice& dice, Lanes& lanes) = 0;
  virtual void Finish() = 0;
  virtual void UseHandle(const Handle& handle) = 0;
  // Whether a graph goes by the address of the handle memory.
  virtual bool HoldsMemory() const = 0;

  int acts = 0;
};

// One that fits group and layer.
std::unique_ptr<Batch> DrawBatch(Dice& dice, const GroupShape& shape, const Group& group, MovableLayer& layer);

// Has topk_idx say what is named.
template <typename Step>
void Name(Step& step, const Given& given) {
  const std::vector<std::int64_t>& named = given.named[World::Get().rank()];
  const std::int64_t experts = step.reference().local_experts() * World::Get().size();
  step.not_experts = 0;
  for (const std::int64_t index : named) step.not_experts += index >= experts ? 1 : 0;
  using Index = std::remove_pointer_t<decltype(step.topk_idx.data())>;
  step.topk_idx.Upload(std::vector<Index>(named.begin(), named.end()));
}

}  // namespace test

#endif  // NVTE_EP_TESTS_STRESS_BATCHES_H_
