// What is left behind: groups made and ended again and again, and steps whose handle memory is fresh each time. Memory
// of the process and of the device, file descriptors and threads have to be what they were after a warm-up.

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ep/routings.h"
#include "stress/stress.h"
#include "support/host_stats.h"

namespace test {
namespace {

long Entries(const char* folder) {
  long count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

// What the process has at the moment.
struct Resources {
  long rss_kib = 0;
  long descriptors = 0;
  long threads = 0;
  // Of the device: exact on the host runtime, of all processes on a GPU.
  long device_kib = 0;
  // Objects of the host runtime.
  long objects = 0;

  static Resources Now() {
    World::Get().Wait();
    // Memory that malloc keeps for later is no leak.
    malloc_trim(0);
    Resources now;
    long pages = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    now.rss_kib = resident * sysconf(_SC_PAGESIZE) / 1024;
    // Threads that have done their work may take a moment to be gone, so the least of a while counts.
    now.descriptors = Entries("/proc/self/fd");
    now.threads = Entries("/proc/self/task");
    for (int i = 0; i < 20; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      now.descriptors = std::min(now.descriptors, Entries("/proc/self/fd"));
      now.threads = std::min(now.threads, Entries("/proc/self/task"));
    }
    if (const std::optional<HostStats> stats = ReadHostStats()) {
      now.device_kib = static_cast<long>(stats->device_bytes_live / 1024);
      now.objects = static_cast<long>(stats->device_allocations_live + stats->windows_live + stats->streams_live +
                                      (stats->comms_created - stats->comms_destroyed) +
                                      (stats->groups_created - stats->groups_destroyed) +
                                      (stats->handles_created - stats->handles_destroyed));
    } else {
      std::size_t free_bytes = 0, all = 0;
      TEST_CUDA(cudaMemGetInfo(&free_bytes, &all));
      now.device_kib = static_cast<long>((all - free_bytes) / 1024);
    }
    return now;
  }
};

// Frees as much device memory as the host runtime holds back from reuse (32 MiB), in pieces as small as those of the
// steps, so that what is held back is no growth later.
void FillWhatIsHeldBack() {
  if (!ReadHostStats()) return;
  for (int i = 0; i < 4096; ++i) DeviceBuffer<std::uint8_t> piece(10000);
  World::Get().Wait();
}

// Growth of the process's memory that is none of ours to worry about: MPI's and malloc's pools, the kernel's per-thread
// pages. A leak of a few KiB a cycle or of a few hundred bytes a step exceeds it.
constexpr long kRssSlackKib = 2048;

void Compare(const std::string& what, const Resources& before, const Resources& after) {
  std::printf(
      "stress: rank %d, %s: RSS %ld -> %ld KiB, device %ld -> %ld KiB, descriptors %ld -> %ld, threads %ld -> "
      "%ld, objects %ld -> %ld\n",
      World::Get().rank(), what.c_str(), before.rss_kib, after.rss_kib, before.device_kib, after.device_kib,
      before.descriptors, after.descriptors, before.threads, after.threads, before.objects, after.objects);
  std::fflush(stdout);
  Figures& figures = TheFigures();
  const auto leak = [&](const char* of, long from, long to) {
    std::fprintf(stderr, "[rank %d] LEAK in %s: %s %ld -> %ld\n", World::Get().rank(), what.c_str(), of, from, to);
    ++figures.leaks;
  };
  if (!ReadHostStats()) {
    // NCCL EP of 0.1.0 itself leaves a device communicator behind for every group, with host and device memory, and
    // CUDA and NCCL start threads when they like. So these are only reported, and descriptors and threads bounded.
    if (after.descriptors > before.descriptors + 64) leak("descriptors", before.descriptors, after.descriptors);
    if (after.threads > before.threads + 16) leak("threads", before.threads, after.threads);
    return;
  }
  if (after.rss_kib > before.rss_kib + kRssSlackKib) leak("RSS in KiB", before.rss_kib, after.rss_kib);
  if (after.device_kib != before.device_kib) leak("device KiB", before.device_kib, after.device_kib);
  if (after.descriptors != before.descriptors) leak("descriptors", before.descriptors, after.descriptors);
  if (after.threads != before.threads) leak("threads", before.threads, after.threads);
  if (after.objects != before.objects) leak("objects of the host runtime", before.objects, after.objects);
}

void Cycle(Dice& dice) {
  GroupShape shape;
  shape.max_tokens = dice.Between(4, 16);
  shape.hidden = EveryShapeIsCheap() ? dice.OneOf<int>({64, 128}) : 256;
  shape.dtype = kNVTEBFloat16;
  shape.alignment = 8;
  const bool ends_by_itself = dice.Percent(50);
  Group group(shape);
  const Layer first(2, 1), second(2, 8);
  for (const Layer* layer : {&first, &second}) {
    const std::uint64_t seed = dice.Number() % 100000;
    Step<BFloat16>(group, *layer, RandomRouting(DrawRows(dice, 0, shape.max_tokens), 2, Experts(group), seed), seed)
        .ForwardAndBackward();
  }
  if (!ends_by_itself) group.Shutdown();
  FailIfWrong();
}

}  // namespace

void RunCycles() {
  const int cycles = TheSettings().cycles;
  const int warm_up = std::max(10, cycles / 5);
  Dice dice(Mix(TheSettings().seed, 3));
  FillWhatIsHeldBack();
  std::optional<Resources> before;
  double start = Now();
  for (int cycle = 0; cycle < warm_up + cycles; ++cycle) {
    Begin("cycles", cycle);
    if (cycle == warm_up) {
      before = Resources::Now();
      start = Now();
    }
    Cycle(dice);
    if (cycle >= warm_up) ++TheFigures().cycles;
  }
  const double each = (Now() - start) / std::max(cycles, 1);
  const Resources after = Resources::Now();
  if (before) {
    Compare(std::to_string(cycles) + " cycles of " + std::to_string(static_cast<int>(each * 1e6)) + " us", *before,
            after);
  }
}

void RunSteps() {
  const int steps = TheSettings().steps;
  const int warm_up = std::max(50, steps / 10);
  Dice dice(Mix(TheSettings().seed, 4));
  GroupShape shape;
  shape.max_tokens = 16;
  shape.hidden = EveryShapeIsCheap() ? 64 : 256;
  shape.top_k = EveryShapeIsCheap() ? 4 : 2;
  shape.alignment = 16;
  shape.dtype = kNVTEBFloat16;
  // Every step's memory is new to its layer.
  shape.allow_handle_mem_reloc = 1;
  // In TransformerEngine's ABI an address is a layer; few of them are kept, so that the warm-up sees the most there
  // are.
  setenv("NVTE_EP_HANDLE_CACHE_SIZE", "32", /*overwrite=*/0);
  Group group(shape);
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::unique_ptr<Step<BFloat16>>> work;
  for (int i = 0; i < 6; ++i) {
    const int top_k = EveryShapeIsCheap() ? 1 << i % 3 : 2;
    layers.push_back(std::make_unique<Layer>(top_k, std::size_t{1} << i % 5));
    const std::uint64_t seed = dice.Number() % 100000;
    work.push_back(std::make_unique<Step<BFloat16>>(
        group, *layers.back(), RandomRouting(DrawRows(dice, 0, 16), top_k, Experts(group), seed, 10), seed));
    work.back()->expert_out.Upload(work.back()->ExpertOutput());
  }
  FillWhatIsHeldBack();
  std::optional<Resources> before;
  double start = Now();
  for (int step = 0; step < warm_up + steps; ++step) {
    Begin("steps", step);
    if (step == warm_up) {
      before = Resources::Now();
      start = Now();
    }
    const std::size_t i = dice.Between(0, 5);
    Step<BFloat16>& one = *work[i];
    // Another size now and then, so that addresses come back with other sizes behind them.
    DeviceBuffer<std::uint8_t> memory(layers[i]->memory().size() + dice.OneOf<int>({0, 0, 256, 4096}));
    const Tensor mem = memory.View({memory.size()});
    one.UseHandle(layers[i]->HandleOver(mem));
    const bool check = step % 16 == 0;
    if (check) {
      one.recv_tokens.Clear();
      one.result.Clear();
    }
    one.Prepare();
    if (check) one.CheckCounts();
    one.Dispatch();
    one.combine_args().Call();
    if (check) {
      one.CheckReceived();
      one.CheckCombined();
      if (!memory.GuardIntact()) Fail("wrote behind handle memory");
      FailIfWrong();
    }
    // The memory may go only when the work is done.
    World::Get().Wait();
    if (step >= warm_up) ++TheFigures().light_steps;
  }
  const double each = (Now() - start) / std::max(steps, 1);
  const Resources after = Resources::Now();
  if (before) {
    Compare(std::to_string(steps) + " steps of " + std::to_string(static_cast<int>(each * 1e6)) + " us", *before,
            after);
  }
}

}  // namespace test
