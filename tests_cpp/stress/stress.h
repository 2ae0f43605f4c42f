// What the parts of test_stress share: settings, figures, one source of chance, and the end of a run that failed.

#ifndef NVTE_EP_TESTS_STRESS_STRESS_H_
#define NVTE_EP_TESTS_STRESS_STRESS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/dice.h"
#include "support/ep.h"
#include "support/reference.h"
#include "support/symm.h"

namespace test {

struct Settings {
  std::uint64_t seed = 1;
  // Of each of the kinds that go on for a time.
  double seconds = 10;
  int cycles = 200;
  int steps = 20000;
  // The one round that is made, again and again, if not all are made one after the other.
  std::optional<std::uint64_t> round;
  // Whether the handle memory of some groups' layers lies in one allocation.
  bool slices = true;
};

struct Figures {
  std::uint64_t steps = 0;
  std::uint64_t tried = 0;
  std::uint64_t raised = 0;
  std::uint64_t accepted = 0;
  std::uint64_t cycles = 0;
  std::uint64_t light_steps = 0;
  std::uint64_t leaks = 0;
  std::uint64_t replays = 0;
};

Settings& TheSettings();
Figures& TheFigures();

// Where the run is, for the message of a failure.
void Begin(const std::string& kind, std::uint64_t round);
// Says where it is, how to come there again, and why it ends; then ends the program on all ranks.
[[noreturn]] void Fail(const std::string& why);
// Fails if any EXPECT_ did since the start.
void FailIfWrong();
// Makes rounds of a kind for its time, each with the chance that the seed, the kind's `number` and the round give.
// Collective.
void MakeRounds(const std::string& kind, std::uint64_t number, const std::function<void(Dice&)>& make);
// Seconds of a clock that does not jump.
double Now();

// A routing, and what the callers write into topk_idx for it: the same where nothing is masked, named again or no
// expert.
struct Given {
  Routing routing;
  // As Routing::expert.
  std::vector<std::vector<std::int64_t>> named;
};
Given DrawRouting(Dice& dice, const std::vector<int>& rows, int top_k, int experts, int local_experts);
// Tokens of each rank: none anywhere, some, or all that a group takes.
std::vector<int> DrawRows(Dice& dice, int least, int most);

// A call that has to throw, and what its text may name.
struct Refusal {
  std::string function;
  // Alternatives, with '|' between them.
  std::string names;
  std::string what;
  std::function<void()> call;
};
// Makes the call and counts it; fails if it does not throw as Throws says.
void Refuse(const Refusal& refusal);

// nvte_ep_prepare_and_dispatch where the ABI has it, else the two calls.
void CallPrepareAndDispatch(const PrepareArgs& prepare, const DispatchArgs& dispatch, cudaStream_t stream);

// What only one ABI can get wrong.
Refusal DrawAbiRefusal(Dice& dice, const PrepareArgs& prepare, const DispatchArgs& dispatch, int experts);
// What can be wrong with nvte_ep_ext_*, of a rank whose peers go on: `room` is all that is handed out, `plain` was
// never prepared.
Refusal DrawExtRefusal(Dice& dice, const SymmBuffer& room, const DeviceBuffer<std::uint8_t>& plain, bool capturing);
// nvte_ep_ext_recv_totals about `mem`.
Refusal TotalsRefusal(const std::string& names, const std::string& what, NVTETensor mem, std::size_t struct_size);
// Of all ranks together; `registered` is a window.
Refusal DrawCollectiveRefusal(Dice& dice, const SymmBuffer& room, void* registered,
                              const DeviceBuffer<std::uint8_t>& plain);
// Of all ranks: a group that its options forbid.
Refusal DrawOptionsOfAGroup(Dice& dice);
// All of them that need a group.
std::vector<Refusal> ExtRefusalsWithoutGroup(NVTETensor mem);

// The same for a group's configuration; every one is refused by itself.
struct ConfigChange {
  std::string names;
  std::string what;
  std::function<void(NVTEEpGroupConfig&)> change;
};
std::vector<ConfigChange> AbiConfigChanges();

// The kinds.
void RunValid();
void RunInvalid();
void RunCycles();
void RunSteps();
// Runs steps until a call raises, which NVTE_EP_HOST_FAULT sees to, and tells. Returns the exit status.
int RunFaults();

}  // namespace test

#endif  // NVTE_EP_TESTS_STRESS_STRESS_H_
