// The native engine's kernels against a plain reference: every byte of counts, rows, weights, sums and gradients.
//   native_kernels [--steps N] [--seed S]   random shapes; on a CPU with threads that are delayed at random
//   native_kernels --delay US --sleep MS    on a GPU: ranks are late by up to US, and the last one by MS, in every call
//   native_kernels --bench ...              on a GPU: times of each call, ranks as streams (see bench.h)
#if defined(__CUDACC__)
#include "run_gpu.h"
#else
#include "run_cpu.h"
#endif
#include "reference.h"

#if defined(__CUDACC__)
#include "bench.h"
#endif

namespace {

using namespace world;

u64 compared = 0, different = 0;

template <typename T>
void expect(const std::vector<T>& found, const std::vector<T>& wanted, const char* what, u32 rank) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    ++compared;
    if (std::memcmp(&found[i], &wanted[i], sizeof(T)) == 0) continue;
    if (++different <= 20) {
      std::printf("rank %u: %s[%zu] is %g, not %g\n", rank, what, i, static_cast<double>(found[i]),
                  static_cast<double>(wanted[i]));
    }
  }
}

std::string text(const Shape& s) {
  char line[256];
  std::snprintf(line, sizeof line,
                "ranks %u blocks %u experts %u top_k %u max_tokens %u row %u scales %u type %d alignment %u capacity "
                "%lld drop %d "
                "staged %u x %u summed %u x %u piece %u stages %u %u %u",
                s.ranks, s.blocks, s.experts, s.top_k, s.max_tokens, s.row_bytes, s.scale_bytes, int(s.type),
                s.alignment, static_cast<long long>(s.capacity), int(s.drop), s.staged.groups, s.staged.group_tokens,
                s.summed.groups, s.summed.group_tokens, s.piece_bytes, s.stages, s.peer_stages, s.own_stages);
  return line;
}

/// Some steps in one world, each with a routing of its own.
void check_steps(const Shape& s, int steps, std::mt19937_64& random) {
  World world(s);
  const u64 before = different;
  auto below = [&](u64 bound) { return static_cast<u32>(random() % bound); };
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<i64>> indices(s.ranks);
    const u32 habit = below(4);
    for (auto& own : indices) {
      const u32 tokens = below(5) == 0 ? 0 : below(5) == 0 ? s.max_tokens : below(s.max_tokens + 1);
      for (u64 i = 0; i < u64(tokens) * s.top_k; ++i) {
        i64 index = habit == 0 ? below(std::max(1u, s.experts / 4)) : below(s.experts);
        if (below(16) == 0) index = -1 - i64(below(3));
        if (habit == 1 && below(8) == 0) index = s.experts + i64(below(3)) * 0x100000000ll;
        own.push_back(index);
      }
    }
    const Reference want(s, indices);
    const u32 elements = s.row_bytes / element_bytes(s.type);
    const bool is_64 = below(2), counts_64 = below(2), weighted = below(4) != 0;
    u64 rows_of_rank = s.capacity;
    if (s.capacity == ~0ull) rows_of_rank = *std::max_element(want.totals.begin(), want.totals.end());

    struct Buffers {
      std::vector<u8> tokens, scales, expert_out;
      std::vector<float> weights, row_weights;
      u8 *d_tokens, *d_scales, *d_recv, *d_recv_scales, *d_expert_out, *d_result, *d_grad_recv;
      float *d_weights, *d_recv_weights, *d_row_weights, *d_grad_weights;
      void *d_index, *d_counts, *d_total;
      std::vector<void*> all() const {
        return {d_tokens,  d_scales,       d_recv,        d_recv_scales,  d_expert_out, d_result, d_grad_recv,
                d_weights, d_recv_weights, d_row_weights, d_grad_weights, d_index,      d_counts, d_total};
      }
    };
    std::vector<Buffers> buffers(s.ranks);
    for (u32 r = 0; r < s.ranks; ++r) {
      Buffers& b = buffers[r];
      const u64 tokens = indices[r].size() / s.top_k;
      b.tokens.resize(tokens * s.row_bytes), b.scales.resize(tokens * s.scale_bytes);
      for (u8& byte : b.tokens) byte = static_cast<u8>(random());
      for (u8& byte : b.scales) byte = static_cast<u8>(random());
      b.expert_out.resize(rows_of_rank * s.row_bytes);
      for (u64 i = 0; i < rows_of_rank * elements; ++i) {
        const float value = rounded(s.type, (static_cast<float>(below(4096)) - 2048) / 77.0f);
        encode(s.type, value, &b.expert_out[i * element_bytes(s.type)]);
      }
      for (u64 i = 0; i < tokens * s.top_k; ++i) b.weights.push_back(static_cast<float>(below(1000)) / 7);
      for (u64 i = 0; i < rows_of_rank; ++i) b.row_weights.push_back(static_cast<float>(below(1000)) / 3);
      b.d_tokens = upload(b.tokens), b.d_scales = upload(b.scales), b.d_expert_out = upload(b.expert_out);
      b.d_weights = upload(b.weights), b.d_row_weights = upload(b.row_weights);
      b.d_recv = allocate(rows_of_rank * s.row_bytes), b.d_recv_scales = allocate(rows_of_rank * s.scale_bytes);
      b.d_grad_recv = allocate(rows_of_rank * s.row_bytes);
      b.d_recv_weights = reinterpret_cast<float*>(allocate(rows_of_rank * 4));
      b.d_result = allocate(tokens * s.row_bytes);
      b.d_grad_weights = reinterpret_cast<float*>(allocate(tokens * s.top_k * 4));
      if (is_64) {
        b.d_index = upload(indices[r]);
      } else {
        std::vector<int> narrow;
        for (i64 index : indices[r]) narrow.push_back(static_cast<int>(std::min<i64>(index, 0x7fffffff)));
        b.d_index = upload(narrow);
      }
      b.d_counts = allocate(s.local() * 8), b.d_total = allocate(8);

      Rank& rank = world.ranks[r];
      PrepareArguments p{};
      p.group = rank.group, p.handle = rank.handle;
      p.topk_idx = b.d_index, p.indices_are_64 = is_64, p.tokens = static_cast<u32>(tokens), p.alignment = s.alignment;
      p.token_counts = b.d_counts, p.total = b.d_total, p.counts_are_64 = p.total_is_64 = counts_64;
      p.header = rank.header, p.header_words[0] = 77, p.header_words[1] = 78;
      p.capacity = s.capacity, p.drop = s.drop, p.by_place = s.by_place;
      world.prepare(r, p);
      DispatchArguments d{};
      d.group = rank.group, d.handle = rank.handle;
      d.tokens = b.d_tokens, d.scales = s.scale_bytes != 0 ? b.d_scales : nullptr;
      d.weights = weighted ? b.d_weights : nullptr, d.recv_weights = weighted ? b.d_recv_weights : nullptr;
      d.recv_tokens = b.d_recv, d.recv_scales = b.d_recv_scales;
      d.rows = rows_of_rank, d.drop = s.drop, d.row_bytes = s.row_bytes, d.scale_bytes = s.scale_bytes;
      d.piece_bytes = s.piece_bytes, d.stages = s.stages;
      if (tokens == 0) d.tokens = nullptr, d.scales = nullptr, d.weights = nullptr;
      world.dispatch(r, d);
      CombineArguments c{};
      c.group = rank.group, c.handle = rank.handle;
      c.rows = b.d_expert_out, c.result = b.d_result, c.row_bytes = s.row_bytes;
      c.row_weights = weighted ? b.d_row_weights : nullptr, c.weights = weighted ? b.d_grad_weights : nullptr;
      c.with_weights = weighted;
      // A rank without tokens may have no addresses for what is theirs.
      if (tokens == 0) c.weights = nullptr, c.result = nullptr;
      c.piece_bytes = s.piece_bytes, c.peer_stages = s.peer_stages, c.own_stages = s.own_stages, c.row_type = s.type;
      world.combine(r, c);
      d.weights = nullptr, d.recv_weights = nullptr, d.recv_tokens = b.d_grad_recv;
      world.dispatch(r, d);
    }
    world.run();

    for (u32 r = 0; r < s.ranks; ++r) {
      const Buffers& b = buffers[r];
      const u64 tokens = indices[r].size() / s.top_k;
      std::vector<i64> counts, total;
      if (counts_64) {
        counts = download<i64>(b.d_counts, s.local()), total = download<i64>(b.d_total, 1);
      } else {
        for (int c : download<int>(b.d_counts, s.local())) counts.push_back(c);
        total.push_back(download<int>(b.d_total, 1)[0]);
      }
      expect(counts, want.counts[r], "counts", r);
      expect(total, {static_cast<i64>(want.totals[r])}, "total", r);
      expect(download<u32>(world.ranks[r].header, 5),
             {77, 78, static_cast<u32>(want.totals[r]), static_cast<u32>(want.totals[r] >> 32),
              static_cast<u32>(want.invalid[r])},
             "header", r);
      if (world.ranks[r].group.status->failed != 0) {
        std::printf("rank %u: wait %u for rank %u ended\n", r, world.ranks[r].group.status->failed,
                    world.ranks[r].group.status->peer);
        ++different;
      }
      // Rows: those of tokens, zeros in the padding, and what was there before behind it.
      std::vector<u8> rows(rows_of_rank * s.row_bytes, 0xcb), scales(rows_of_rank * s.scale_bytes, 0xcb);
      std::vector<float> weights(rows_of_rank);
      std::memset(weights.data(), 0xcb, weights.size() * 4);
      const u64 clear_to = s.drop ? rows_of_rank : std::min(rows_of_rank, want.totals[r]);
      std::fill_n(rows.begin(), clear_to * s.row_bytes, 0), std::fill_n(scales.begin(), clear_to * s.scale_bytes, 0);
      std::fill_n(weights.begin(), clear_to, 0.0f);
      for (const auto& [row, slot] : want.rows[r]) {
        if (!slot.alive) continue;
        const Buffers& from = buffers[slot.source];
        std::copy_n(&from.tokens[u64(slot.token) * s.row_bytes], s.row_bytes, &rows[row * s.row_bytes]);
        if (s.scale_bytes != 0)
          std::copy_n(&from.scales[u64(slot.token) * s.scale_bytes], s.scale_bytes, &scales[row * s.scale_bytes]);
        weights[row] = from.weights[u64(slot.token) * s.top_k + slot.position];
      }
      expect(download<u8>(b.d_recv, rows.size()), rows, "recv_tokens", r);
      expect(download<u8>(b.d_grad_recv, rows.size()), rows, "grad_expert_out", r);
      expect(download<u8>(b.d_recv_scales, scales.size()), scales, "recv_scales", r);
      if (weighted) expect(download<float>(b.d_recv_weights, weights.size()), weights, "recv_topk_weights", r);
      // Sums: per rank in the order of its experts, rounded; then over the ranks, rounded.
      std::vector<u8> result(tokens * s.row_bytes);
      std::vector<float> grad_weights(tokens * s.top_k);
      for (u64 token = 0; token < tokens; ++token) {
        std::vector<float> sum(elements);
        for (u32 from = 0; from < s.ranks; ++from) {
          const auto slots = want.slots[from].find({r, static_cast<u32>(token)});
          if (slots == want.slots[from].end()) continue;
          std::vector<float> part(elements);
          for (u64 row : slots->second) {
            const Reference::Slot& slot = want.rows[from].at(row);
            if (!slot.alive) continue;
            for (u32 i = 0; i < elements; ++i) {
              part[i] += decode(s.type, &buffers[from].expert_out[row * s.row_bytes + i * element_bytes(s.type)]);
            }
            grad_weights[token * s.top_k + slot.position] = buffers[from].row_weights[row];
          }
          for (u32 i = 0; i < elements; ++i) sum[i] += rounded(s.type, part[i]);
        }
        for (u32 i = 0; i < elements; ++i) {
          encode(s.type, rounded(s.type, sum[i]), &result[token * s.row_bytes + i * element_bytes(s.type)]);
        }
      }
      expect(download<u8>(b.d_result, result.size()), result, "result", r);
      if (weighted)
        expect(download<float>(b.d_grad_weights, grad_weights.size()), grad_weights, "grad_topk_weights", r);
    }
    for (Buffers& b : buffers) {
      for (void* memory : b.all()) release(memory);
    }
    if (different != before) {
      std::printf("in step %d of: %s\n", step, text(s).c_str());
      return;
    }
  }
}

/// A rank that is alone in prepare gives up and says for whom it waited, or ends at once where the host says so; its
/// handle memory holds no routing then. It has one block: one that gave up does not wait for the others either, and
/// reads what they write.
void check_lost_peer() {
  for (const bool aborted : {false, true}) {
    Shape s;
    s.blocks = 1;
    World world(s, aborted ? 60'000'000'000 : 100'000'000);
    Rank& rank = world.ranks[0];
    rank.group.status->abort = aborted;
    const std::vector<u32> old = {77, 78, 0, 0, 0};
    copy(rank.header, old.data(), old.size() * sizeof(u32));
    PrepareArguments p{};
    p.group = rank.group, p.handle = rank.handle, p.alignment = 1, p.header = rank.header, p.capacity = ~0ull;
    p.header_words[0] = 77, p.header_words[1] = 78;
    const std::vector<i64> indices(s.top_k);
    i64* d_indices = upload(indices);
    p.topk_idx = d_indices, p.indices_are_64 = 1, p.tokens = 1;
    world.prepare(0, p);
    world.ranks[0].queue[0]();
#if EP_GPU
    WORLD_CHECK(cudaStreamSynchronize(rank.stream));
#endif
    release(d_indices);
    expect(download<u32>(rank.header, 2), {0, 0}, "header without a routing", 0);
    const Status& status = *rank.group.status;
    expect<u32>({status.failed, status.peer}, {aborted ? kWaitNone : kWaitPrepare, aborted ? 0u : 1u}, "status", 0);
  }
}

#if !EP_GPU
thread_local std::minstd_rand delays{std::random_device{}()};

void delay() {
  const auto chance = delays() % 64;
  if (chance == 0) std::this_thread::sleep_for(std::chrono::microseconds(delays() % 200));
  if (chance < 8) std::this_thread::yield();
}
#endif

}  // namespace

int main(int count, char** arguments) {
  int steps = 200;
  u64 seed = 1;
  for (int i = 1; i < count; ++i) {
    const std::string option = arguments[i];
#if EP_GPU
    if (option == "--bench") return world::bench(count - i - 1, arguments + i + 1);
    if (option == "--delay" && i + 1 < count) world::delays.microseconds = std::atoi(arguments[++i]);
    if (option == "--sleep" && i + 1 < count) world::delays.milliseconds = std::atoi(arguments[++i]);
#endif
    if (option == "--steps" && i + 1 < count) steps = std::atoi(arguments[++i]);
    if (option == "--seed" && i + 1 < count) seed = std::strtoull(arguments[++i], nullptr, 10);
  }
#if !EP_GPU
  nvte_ep::disturb = delay;
#endif
  check_lost_peer();
  std::mt19937_64 random(seed);
  auto one_of = [&](std::initializer_list<u32> values) { return values.begin()[random() % values.size()]; };
  for (int done = 0; done < steps && different == 0;) {
    Shape s;
    s.ranks = one_of({1, 2, 3, 4, 8});
    s.blocks = EP_GPU ? one_of({1, 4, 8, 16}) : one_of({1, 2, 3});
    s.experts = s.ranks * one_of({1, 2, 3, 8, 17, 17, 72});
    s.top_k = std::min(s.experts, one_of({1, 2, 3, 8, 40, 64}));
    s.max_tokens = one_of({1, 5, 16, 70});
    s.type = static_cast<RowType>(random() % 3);
    s.row_bytes = one_of({16, 48, 256, 1040, 4096});
    s.piece_bytes = one_of({16, 64, 1024});
    if (s.row_bytes / s.piece_bytes > 16) s.piece_bytes = 1024;
    s.scale_bytes = one_of({0, 0, 16, 48});
    s.alignment = one_of({1, 1, 4, 16});
    const u64 balanced = u64(s.max_tokens) * s.top_k;
    s.capacity = one_of({0, 1}) ? ~0ull : balanced + s.max_tokens;
    s.drop = s.capacity != ~0ull && one_of({0, 1});
    if (s.drop) s.capacity = std::max(balanced / 3, u64(1));
    s.by_place = s.drop && one_of({0, 1});
    s.staged = {one_of({1, 2, 4, 8}), one_of({2, 3, 5})};
    s.summed = {one_of({1, 2, 4, 8}), one_of({2, 3, 6})};
    s.stages = one_of({4, 5, 9}), s.peer_stages = one_of({1, 2, 5}), s.own_stages = one_of({1, 3, 7});
    check_steps(s, 4, random);
    done += 4;
  }
  std::printf("%d steps, %llu values compared, %llu differ\n", steps, compared, different);
  return different != 0 || compared == 0;
}
