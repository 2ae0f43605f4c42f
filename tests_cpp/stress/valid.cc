// Random valid calls: layers of every kind side by side, their calls interleaved, repeated, captured and replayed, on
// several streams and from several threads, with handle memory that moves and symmetric memory that comes and goes;
// every output against the reference.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ep/graph.h"
#include "ep/scaled_step.h"
#include "stress/batches.h"
#include "stress/layers.h"
#include "stress/stress.h"
#include "stress/symmetric.h"
#include "support/host_stats.h"
#include "support/lanes.h"

namespace test {
namespace {

GroupShape DrawShape(Dice& dice) {
  const bool cheap = EveryShapeIsCheap();
  GroupShape shape;
  shape.experts_per_rank = dice.OneOf<int>({4, 6, 8, 12, 16});
  shape.max_tokens = dice.OneOf<int>({1, 3, 8, dice.Between(1, 64), dice.Between(1, 64)});
  shape.hidden = cheap ? dice.OneOf<int>({64, 128, 128, 256, 320}) : 256;
  shape.top_k = cheap ? dice.OneOf<int>({1, 2, 2, 4, 8, dice.Between(1, 12)}) : 2;
  shape.top_k = std::min(shape.top_k, shape.experts_per_rank * World::Get().size());
  shape.alignment = dice.OneOf<int>({1, 8, 64});
  shape.dtype =
      cheap ? dice.OneOf<NVTEDType>({kNVTEFloat32, kNVTEBFloat16, kNVTEBFloat16, kNVTEFloat16}) : kNVTEBFloat16;
  shape.allow_handle_mem_reloc = dice.Between(0, 1);
  // A receive capacity of 4 rows is the least that a group has.
  if (shape.max_tokens == 1) shape.alignment = 8;
  const int form = dice.Between(0, 9);
  shape.eager = form <= 1;
  if (form == 2) shape.drop_capacity = (shape.max_tokens + 3) / 4 * 4 + dice.Between(0, shape.max_tokens);
  if (form == 3 || form == 4) {
    shape.zero_copy = true;
    shape.experts_per_rank = dice.OneOf<int>({4, 8});
    shape.top_k = std::min(shape.top_k, 8);
  }
  return shape;
}

// Options that leave a group what it is.
Options::Pairs DrawOptions(Dice& dice, const GroupShape& shape, std::string* top_k) {
  *top_k = std::to_string(shape.top_k);
  Options::Pairs all = {{"num_topk", top_k->c_str()},      {"deterministic", "on"},       {"backend", "nccl_ep"},
                        {"timeout_ms", "90000"},           {"shutdown_timeout_ms", "0"},  {"symm_segment_bytes", "1"},
                        {"symm_segment_bytes", "4194304"}, {"symm_segment_bytes", "5000"}};
  if (shape.drop_capacity == 0) all.push_back({"overflow", "trap"});
  // Ranks that share a GPU share its multiprocessors too.
  if (EveryShapeIsCheap()) all.push_back({"preprocess_sms", "3"});
  Options::Pairs drawn;
  if (!dice.Percent(40)) return drawn;
  for (int count = dice.Between(1, 4); count > 0; --count) drawn.push_back(dice.OneOf(all));
  return drawn;
}

void CheckUsage(const HandleBook& book) {
  const NVTEEpExtMemoryUsage usage = Usage();
  if (usage.handles != book.handles() || usage.handle_memory != book.bytes()) {
    Fail("nvte_ep_ext_memory_usage tells of " + std::to_string(usage.handles) + " handles of " +
         std::to_string(usage.handle_memory) + " bytes instead of " + std::to_string(book.handles()) + " of " +
         std::to_string(book.bytes()));
  }
  if (usage.total != usage.staging + usage.routing_map + usage.workspace + usage.library + usage.symm_reserved) {
    Fail("the total of nvte_ep_ext_memory_usage is not its sum");
  }
}

void RunRound(Dice& dice) {
  const GroupShape shape = DrawShape(dice);
  std::string top_k;
  const Group group(shape, DrawOptions(dice, shape, &top_k));
  // Moved memory is always followed in TransformerEngine's ABI, and where the group says so in the other.
  const bool may_move = kReportsTotal || shape.allow_handle_mem_reloc != 0;
  const bool sliced = dice.Percent(40) && TheSettings().slices;
  const bool with_symmetric = dice.Percent(40);
  Lanes lanes;
  SymmetricMemory symmetric;
  HandleBook book;
  std::unique_ptr<Slices> slices;
  if (sliced) slices = std::make_unique<Slices>(Register(shape.top_k, 1).bytes);
  const auto draw_layer = [&] {
    const int top_k = EveryShapeIsCheap() ? dice.Between(1, shape.top_k) : dice.OneOf<int>({1, shape.top_k});
    const std::vector<std::size_t> alignments = {0, 1, static_cast<std::size_t>(std::min(shape.alignment, 8)),
                                                 static_cast<std::size_t>(shape.alignment)};
    return std::make_unique<MovableLayer>(dice, top_k, dice.OneOf(alignments), slices.get(), &book);
  };
  std::vector<std::unique_ptr<MovableLayer>> layers;
  for (int i = dice.Between(1, 4); i > 0; --i) layers.push_back(draw_layer());
  std::vector<std::unique_ptr<Batch>> batches(layers.size());
  std::size_t alive = 0;
  for (int left = dice.Between(2, 8); left > 0 || alive > 0;) {
    const std::size_t i = dice.Between(0, static_cast<int>(layers.size()) - 1);
    if (!batches[i]) {
      if (left == 0) continue;
      --left;
      ++alive;
      batches[i] = DrawBatch(dice, shape, group, *layers[i]);
      batches[i]->acts = dice.Between(3, 14);
    }
    if (may_move && !batches[i]->HoldsMemory() && dice.Percent(sliced ? 25 : 10)) {
      layers[i]->Move(dice);
      batches[i]->UseHandle(layers[i]->handle());
    }
    if (with_symmetric && dice.Percent(25)) symmetric.Act(dice);
    batches[i]->Act(dice, lanes);
    if (dice.Percent(10)) CheckUsage(book);
    if (--batches[i]->acts > 0) continue;
    batches[i]->Finish();
    batches[i].reset();
    --alive;
    ++TheFigures().steps;
    if (dice.Percent(25)) {
      // Another layer, whose handle memory may come to lie where this one's is now.
      World::Get().Wait();
      layers[i]->Check();
      layers[i].reset();
      layers[i] = draw_layer();
    }
    FailIfWrong();
  }
  World::Get().Wait();
  for (const auto& layer : layers) layer->Check();
  symmetric.Clear();
  CheckUsage(book);
  const NVTEEpExtMemoryUsage usage = Usage();
  if (usage.symm_in_use != 0 || usage.symm_allocations != 0 || usage.registered != 0) {
    Fail("symmetric memory is in use that nobody has");
  }
}

// Prepare and dispatch of a step that was run before, as a graph.
void ReplayScaled(Dice& dice, const Group& group, ScaledStep& scaled) {
  Step<BFloat16>& step = scaled.step;
  const Routing before = step.reference().routing();
  const Graph graph([&] {
    step.Prepare();
    scaled.dispatch_args().Call();
  });
  for (int launches = dice.Between(1, 3); launches > 0; --launches) {
    // The seed of the rows in MXFP8.
    step.Renew(RandomRouting(before.rows, before.top_k, group.config().num_experts, dice.Number(), 10), scaled.seed());
    ClearOutputs(step);
    scaled.recv_tokens.Clear();
    scaled.recv_scales.Clear();
    graph.Launch();
    ++TheFigures().replays;
    step.CheckCounts();
    scaled.Check();
  }
}

// Rows in MXFP8, two layers side by side.
void RunScaledRound(Dice& dice) {
  GroupShape shape;
  shape.hidden = EveryShapeIsCheap() ? dice.OneOf<int>({512, 1024}) : 512;
  shape.alignment = 16;
  shape.dtype = kNVTEBFloat16;
  shape.max_tokens = dice.Between(1, 48);
  shape.eager = dice.Percent(25);
  const Group group(shape);
  const Layer layers[] = {Layer(2, 16), Layer(dice.Between(1, 2), dice.OneOf<std::size_t>({0, 8}))};
  for (int round = dice.Between(1, 2); round > 0; --round) {
    std::vector<std::unique_ptr<ScaledStep>> steps;
    for (const Layer& layer : layers) {
      const std::vector<int> rows = DrawRows(dice, 0, shape.max_tokens);
      const Routing routing = RandomRouting(rows, layer.top_k(), group.config().num_experts, dice.Number(), 10);
      const Reference reference(routing, group.config().num_experts, layer.alignment());
      const std::size_t recv_rows = shape.eager ? reference.Total(World::Get().rank()) : 0;
      const NVTEDType dtype = dice.OneOf<NVTEDType>({kNVTEFloat8E4M3, kNVTEFloat8E5M2});
      steps.push_back(
          std::make_unique<ScaledStep>(group, layer, routing, dice.Number() % 100000, shape.hidden, recv_rows, dtype));
    }
    for (auto& step : steps) step->step.Prepare();
    for (auto& step : steps) step->dispatch_args().Call();
    for (auto& step : steps) {
      step->step.CheckCounts();
      step->Check();
      step->step.Combine();
      step->step.CheckCombined();
      step->step.CombineBwd();
      step->step.CheckCombineBwd();
      ++TheFigures().steps;
      if (!shape.eager && dice.Percent(50)) ReplayScaled(dice, group, *step);
    }
    FailIfWrong();
  }
}

}  // namespace

void RunValid() {
  MakeRounds("valid", 1, [](Dice& dice) {
    if (dice.Percent(12)) {
      RunScaledRound(dice);
    } else {
      RunRound(dice);
    }
  });
}

}  // namespace test
