// Times of the kernels, ranks as streams of one GPU: --bench RANKS BLOCKS TOKENS [ROW_BYTES TOP_K EXPERTS], then
// settings to try as tokens and groups of the staged and the summed window, and pieces in shared memory: of dispatch,
// and of combine's two lines.
#pragma once

#include "reference.h"

namespace world {

inline int bench(int count, char** arguments) {
  auto number = [&](int i, u32 otherwise) { return i < count ? static_cast<u32>(std::atoi(arguments[i])) : otherwise; };
  Shape s;
  s.ranks = number(0, 4), s.blocks = number(1, 32), s.max_tokens = number(2, 4096);
  s.row_bytes = number(3, 14336), s.top_k = number(4, 8), s.experts = number(5, 64);
  for (int setting = 6; setting < count || setting == 6; ++setting) {
    u32 stages_d = 9;
    s.peer_stages = 8, s.own_stages = 6;
    if (setting < count) {
      std::sscanf(arguments[setting], "%u,%u,%u,%u,%u,%u,%u", &s.staged.group_tokens, &s.staged.groups,
                  &s.summed.group_tokens, &s.summed.groups, &stages_d, &s.peer_stages, &s.own_stages);
    }
    s.piece_bytes = std::min(s.row_bytes, 14336u);
    World world(s, 2'000'000'000);
    std::mt19937 random(1);
    std::vector<std::vector<i64>> indices(s.ranks);
    std::vector<u64> rows(s.ranks);
    for (auto& own : indices) {
      for (u32 t = 0; t < s.max_tokens; ++t) {
        std::vector<u32> pool(s.experts);
        for (u32 e = 0; e < s.experts; ++e) pool[e] = e;
        for (u32 k = 0; k < s.top_k; ++k) {
          std::swap(pool[k], pool[k + random() % (s.experts - k)]);
          own.push_back(pool[k]);
          ++rows[pool[k] / s.local()];
        }
      }
    }
    std::vector<PrepareArguments> prepare(s.ranks);
    std::vector<DispatchArguments> dispatch(s.ranks);
    std::vector<CombineArguments> combine(s.ranks);
    std::vector<u8*> taken;
    auto take = [&](u64 bytes) { return taken.emplace_back(allocate(bytes)); };
    for (u32 r = 0; r < s.ranks; ++r) {
      Rank& rank = world.ranks[r];
      PrepareArguments& p = prepare[r];
      p.group = rank.group, p.handle = rank.handle;
      p.topk_idx = upload(indices[r]), p.indices_are_64 = 1, p.tokens = s.max_tokens, p.alignment = 1;
      taken.push_back(static_cast<u8*>(const_cast<void*>(p.topk_idx)));
      p.token_counts = take(s.local() * 4), p.header = rank.header, p.capacity = ~0ull;
      DispatchArguments& d = dispatch[r];
      d.group = rank.group, d.handle = rank.handle, d.tokens = take(u64(s.max_tokens) * s.row_bytes);
      d.weights = reinterpret_cast<float*>(take(u64(s.max_tokens) * s.top_k * 4));
      d.recv_tokens = take(rows[r] * s.row_bytes), d.recv_weights = reinterpret_cast<float*>(take(rows[r] * 4));
      d.rows = rows[r], d.row_bytes = s.row_bytes, d.piece_bytes = s.piece_bytes, d.stages = stages_d;
      CombineArguments& c = combine[r];
      c.group = rank.group, c.handle = rank.handle, c.rows = d.recv_tokens,
      c.result = take(u64(s.max_tokens) * s.row_bytes);
      c.row_bytes = s.row_bytes, c.piece_bytes = d.piece_bytes, c.peer_stages = s.peer_stages,
      c.own_stages = s.own_stages, c.row_type = kBFloat16;
    }
    cudaEvent_t begin, end;
    std::vector<cudaEvent_t> ends(s.ranks);
    WORLD_CHECK(cudaEventCreate(&begin));
    WORLD_CHECK(cudaEventCreate(&end));
    for (auto& event : ends) WORLD_CHECK(cudaEventCreate(&event));
    // `run` queues on all ranks' streams; begin and end are on the first.
    const auto measure = [&](const char* what, const std::function<void()>& run) {
      std::vector<float> times;
      for (int i = 0; i < 15; ++i) {
        WORLD_CHECK(cudaDeviceSynchronize());
        WORLD_CHECK(cudaEventRecord(begin, world.ranks[0].stream));
        run();
        WORLD_CHECK(cudaEventRecord(end, world.ranks[0].stream));
        WORLD_CHECK(cudaDeviceSynchronize());
        float ms;
        WORLD_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) times.push_back(ms * 1000);
      }
      std::sort(times.begin(), times.end());
      std::printf(" %s %.1f", what, times[times.size() / 2]);
    };
    // A call of every rank on its own stream, from the first stream's begin on and before its end.
    const auto each = [&](const std::function<void(u32)>& queue) {
      for (u32 r = 1; r < s.ranks; ++r) WORLD_CHECK(cudaStreamWaitEvent(world.ranks[r].stream, begin));
      for (u32 r = 0; r < s.ranks; ++r) queue(r), world.ranks[r].queue[0](), world.ranks[r].queue.clear();
      for (u32 r = 1; r < s.ranks; ++r) {
        WORLD_CHECK(cudaEventRecord(ends[r], world.ranks[r].stream));
        WORLD_CHECK(cudaStreamWaitEvent(world.ranks[0].stream, ends[r]));
      }
    };
    std::printf("ranks %u blocks %u tokens %u row %u setting %s segment %.1f MB:", s.ranks, s.blocks, s.max_tokens,
                s.row_bytes, setting < count ? arguments[setting] : "", world.segment_bytes / 1e6);
    measure("nothing", [&] { each([&](u32 r) { world.ranks[r].queue.push_back([] {}); }); });
    measure("prepare", [&] { each([&](u32 r) { world.prepare(r, prepare[r]); }); });
    measure("dispatch", [&] { each([&](u32 r) { world.dispatch(r, dispatch[r]); }); });
    measure("combine", [&] { each([&](u32 r) { world.combine(r, combine[r]); }); });
    if (s.ranks <= 8) {
      std::printf(" | together:");
      const cudaStream_t stream = world.ranks[0].stream;
      measure("prepare", [&] {
        launch_together(prepare_together, prepare, s.blocks, kPrepareThreads, world.prepare_shared(), stream);
      });
      measure("dispatch", [&] {
        launch_together(dispatch_together, dispatch, s.blocks, kDispatchThreads, DispatchShared::size(dispatch[0]),
                        stream);
      });
      measure("combine", [&] {
        launch_together(combine_together, combine, s.blocks, kCombineThreads, CombineShared::size(combine[0]), stream);
      });
    }
    for (u32 r = 0; r < s.ranks; ++r) {
      if (world.ranks[r].group.status->failed != 0) std::printf(" FAILED(%u)", world.ranks[r].group.status->failed);
    }
    std::printf("\n");
    std::fflush(stdout);
    for (u8* memory : taken) release(memory);
  }
  return 0;
}

}  // namespace world
