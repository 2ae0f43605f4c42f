// Random use and misuse of the library, for as long as one likes: test_stress [--kinds KIND,...] [--seconds N]
// [--seed S] [--round N] [--cycles N] [--steps N] [--slices 0], under mpirun with any number of ranks, on the host
// runtime and on GPUs. The last line that rank 0 prints holds the figures; a run that fails says the seed, kind and
// round on every rank that saw it.

#include <gtest/gtest.h>

#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

#include "stress/stress.h"
#include "support/expect_error.h"
#include "support/host_stats.h"

namespace test {

namespace {

std::string kind_now = "start";
std::uint64_t round_now = 0;

void PrintFigures() {
  const Figures& figures = TheFigures();
  std::printf("stress: ranks %d, steps %" PRIu64 " checked, invalid calls %" PRIu64 " tried, %" PRIu64
              " raised, %" PRIu64 " accepted, cycles %" PRIu64 ", light steps %" PRIu64 ", leaks %" PRIu64
              ", replays %" PRIu64 "\n",
              World::Get().size(), figures.steps, figures.tried, figures.raised, figures.accepted, figures.cycles,
              figures.light_steps, figures.leaks, figures.replays);
  std::fflush(stdout);
}

}  // namespace

Settings& TheSettings() {
  static Settings settings;
  return settings;
}

Figures& TheFigures() {
  static Figures figures;
  return figures;
}

void Begin(const std::string& kind, std::uint64_t round) {
  kind_now = kind;
  round_now = round;
}

void Fail(const std::string& why) {
  const Settings& settings = TheSettings();
  std::fprintf(stderr,
               "[rank %d of %d] FAILED in kind %s, round %" PRIu64 ", seed %" PRIu64
               ": %s\n[rank %d] again: --kinds %s --seed %" PRIu64 " with %d ranks, until round %" PRIu64 "\n",
               World::Get().rank(), World::Get().size(), kind_now.c_str(), round_now, settings.seed, why.c_str(),
               World::Get().rank(), kind_now.c_str(), settings.seed, World::Get().size(), round_now);
  std::fflush(stderr);
  PrintFigures();
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

void FailIfWrong() {
  if (testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed()) Fail("a value differs");
}

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

namespace {

// Whether the clock of rank 0 is before `until`. Collective.
bool TimeIsLeft(double until) {
  int left = Now() < until ? 1 : 0;
  MPI_Bcast(&left, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return left != 0;
}

}  // namespace

void MakeRounds(const std::string& kind, std::uint64_t number, const std::function<void(Dice&)>& make) {
  const Settings& settings = TheSettings();
  const double until = Now() + settings.seconds;
  for (std::uint64_t made = 0; TimeIsLeft(until); ++made) {
    const std::uint64_t round = settings.round.value_or(made);
    Begin(kind, round);
    Dice dice(Mix(settings.seed, number, round));
    make(dice);
    FailIfWrong();
  }
}

std::vector<int> DrawRows(Dice& dice, int least, int most) {
  const int form = dice.Between(0, 7);
  std::vector<int> rows;
  for (int rank = 0; rank < World::Get().size(); ++rank) {
    int count = dice.Between(least, most);
    if (form == 0) count = least;
    if (form == 1) count = most;
    if (form >= 5 && dice.Percent(30)) count = least;
    rows.push_back(count);
  }
  return rows;
}

Given DrawRouting(Dice& dice, const std::vector<int>& rows, int top_k, int experts, int local_experts) {
  const int form = dice.Between(0, 8);
  const int masked = dice.OneOf<int>({0, 0, 10, 50, 95});
  const int target = dice.Between(0, experts / local_experts - 1);
  const int one = dice.Between(0, experts - 1);
  const std::vector<std::int64_t> nobody = {experts, experts + 1, 2147483647, -2, -2147483647};
  const std::uint64_t seed = dice.Number();
  Given given;
  given.routing = RandomRouting(rows, top_k, experts, seed, masked);
  given.named = given.routing.expert;
  if (form <= 2) return given;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    for (int row = 0; row < rows[rank]; ++row) {
      for (int k = 0; k < top_k; ++k) {
        std::int64_t& named = given.named[rank][static_cast<std::size_t>(row) * top_k + k];
        const std::uint64_t chance = Mix(seed, rank, row, k);
        switch (form) {
          case 3:  // everything to one rank
            named = static_cast<std::int64_t>(target) * local_experts + (row + k) % local_experts;
            break;
          case 4:  // everything to one expert
            named = one;
            break;
          case 5:  // few experts, named again and again
            named = static_cast<std::int64_t>(chance % 3);
            break;
          case 6:  // here and there no expert
            if (chance % 4 == 0) named = nobody[chance / 4 % nobody.size()];
            break;
          case 7:
            named = -1;
            break;
          default:
            named = static_cast<std::int64_t>((row + rank + k) % experts);
            break;
        }
        std::int64_t& meant = given.routing.expert[rank][static_cast<std::size_t>(row) * top_k + k];
        meant = named < 0 || named >= experts ? -1 : named;
        for (int earlier = 0; earlier < k; ++earlier) {
          if (given.named[rank][static_cast<std::size_t>(row) * top_k + earlier] == named) meant = -1;
        }
      }
    }
  }
  return given;
}

void Refuse(const Refusal& refusal) {
  Figures& figures = TheFigures();
  ++figures.tried;
  bool threw = false;
  const testing::AssertionResult result = Throws(refusal.function, {refusal.names}, [&] {
    try {
      refusal.call();
    } catch (...) {
      threw = true;
      throw;
    }
  });
  if (threw) {
    ++figures.raised;
  } else {
    ++figures.accepted;
  }
  if (!result) Fail(refusal.what + ": " + result.message());
  const std::string text = result.message();
  for (const unsigned char c : text) {
    if (c < 0x20 || c > 0x7e) Fail(refusal.what + ": a text with byte " + std::to_string(c) + ": " + text);
  }
}

namespace {

bool Listed(const std::string& kinds, const std::string& kind) {
  return ("," + kinds + ",").find("," + kind + ",") != std::string::npos;
}

int Run(int argc, char** argv) {
  World::Start(&argc, &argv);
  Settings& settings = TheSettings();
  std::string kinds = "valid,invalid,cycles,steps";
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* const value = i + 1 < argc ? argv[++i] : nullptr;
    if (value != nullptr && name == "--kinds") {
      kinds = value;
    } else if (value != nullptr && name == "--seconds") {
      settings.seconds = std::atof(value);
    } else if (value != nullptr && name == "--seed") {
      settings.seed = std::strtoull(value, nullptr, 10);
    } else if (value != nullptr && name == "--round") {
      settings.round = std::strtoull(value, nullptr, 10);
    } else if (value != nullptr && name == "--cycles") {
      settings.cycles = std::atoi(value);
    } else if (value != nullptr && name == "--steps") {
      settings.steps = std::atoi(value);
    } else if (value != nullptr && name == "--slices") {
      settings.slices = std::atoi(value) != 0;
    } else {
      Fail(
          "usage: test_stress [--kinds valid,invalid,cycles,steps | --kinds faults] [--seconds N] [--seed S] "
          "[--round N] [--cycles N] [--steps N] [--slices 0]");
    }
  }
  std::stringstream list(kinds);
  for (std::string kind; std::getline(list, kind, ',');) {
    if (!Listed("valid,invalid,cycles,steps,faults", kind)) Fail("no kind " + kind);
  }
  if (kinds == "faults") return RunFaults();
  try {
    if (Listed(kinds, "valid")) RunValid();
    if (Listed(kinds, "invalid")) RunInvalid();
    if (Listed(kinds, "cycles")) RunCycles();
    if (Listed(kinds, "steps")) RunSteps();
  } catch (const std::exception& error) {
    Fail(error.what());
  }
  FailIfWrong();
  Figures& mine = TheFigures();
  // Calls and leaks are counted on every rank, all else is common to them.
  std::uint64_t counts[] = {mine.tried, mine.raised, mine.accepted, mine.leaks};
  MPI_Allreduce(MPI_IN_PLACE, counts, 4, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
  mine.tried = counts[0];
  mine.raised = counts[1];
  mine.accepted = counts[2];
  mine.leaks = counts[3];
  if (World::Get().rank() == 0) PrintFigures();
  const bool leaks = mine.leaks != 0;
  return World::Stop() && !leaks ? 0 : 1;
}

}  // namespace
}  // namespace test

int main(int argc, char** argv) { return test::Run(argc, argv); }
