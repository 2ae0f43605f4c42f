// What can be wrong with the calls of nvte_ep_ext.h.

#include <nvte_ep_ext.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "stress/stress.h"
#include "support/host_stats.h"
#include "support/options.h"
#include "support/symm.h"

namespace test {
namespace {

alignas(4096) std::uint8_t pageable[8192];

std::string Hex(const void* pointer) { return std::to_string(reinterpret_cast<std::uintptr_t>(pointer)); }

void* Somewhere(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

NVTEEpExtOptions* DrawNoOptions(Dice& dice) {
  const int form = dice.Between(0, 3);
  if (form == 0) return reinterpret_cast<NVTEEpExtOptions*>(pageable);
  if (form == 1) return static_cast<NVTEEpExtOptions*>(Somewhere(~std::uintptr_t{0}));
  NVTEEpExtOptions* const dead = nvte_ep_ext_options_create();
  nvte_ep_ext_options_destroy(dead);
  return dead;
}

Refusal DrawOptionsRefusal(Dice& dice) {
  const char* const keys[] = {"overflow",          "eager",   "num_topk",      "dispatch_sms",   "combine_sms",
                              "timeout_ms",        "backend", "deterministic", "preprocess_sms", "shutdown_timeout_ms",
                              "symm_segment_bytes"};
  const char* const key = keys[dice.Between(0, 10)];
  const char* const no_key =
      dice.OneOf<const char*>({"", "Overflow", "eager ", "num_topk\n", "handle", nullptr, "\xff"});
  const char* const no_value = dice.OneOf<const char*>(
      {"", "yes", "-1", "1.5", "0x10", "99999999999999999999999", "on\r\n\033[1m", nullptr, "\xc3\x28"});
  NVTEEpExtOptions* const dead = DrawNoOptions(dice);
  const std::string named = key == nullptr ? "NULL" : key;
  switch (dice.Between(0, 7)) {
    case 0:
      return {"nvte_ep_ext_options_set", "key", "an unknown key", [=] { Options().Set(no_key, "1"); }};
    case 1:
    case 2:
      return {"nvte_ep_ext_options_set", "value", "a wrong value of " + named, [=] { Options().Set(key, no_value); }};
    case 3:
      return {"nvte_ep_ext_options_set", "options", "dead options",
              [=] { nvte_ep_ext_options_set(dead, "eager", "on"); }};
    case 4:
      return {"nvte_ep_ext_options_get", "key", "an unknown key", [=] { Options().Get(no_key); }};
    case 5: {
      const std::size_t bytes = dice.Between(0, 7);
      const bool null = dice.Percent(30);
      return {"nvte_ep_ext_options_get", "value", "an array of " + std::to_string(bytes), [=] {
                char value[8];
                nvte_ep_ext_options_get(Options().raw(), "overflow", null ? nullptr : value, bytes);
              }};
    }
    case 6:
      return {"nvte_ep_ext_options_get", "options", "dead options", [=] {
                char value[32];
                nvte_ep_ext_options_get(dead, "overflow", value, sizeof value);
              }};
    default:
      return {"nvte_ep_ext_options_destroy", "options", "dead options", [=] { nvte_ep_ext_options_destroy(dead); }};
  }
}

}  // namespace

Refusal TotalsRefusal(const std::string& names, const std::string& what, NVTETensor mem, std::size_t struct_size) {
  return {"nvte_ep_ext_recv_totals", names, what, [=] {
            NVTEEpExtRecvTotals totals = {};
            totals.struct_size = struct_size;
            nvte_ep_ext_recv_totals(mem, &totals, World::Get().stream());
          }};
}

Refusal DrawExtRefusal(Dice& dice, const SymmBuffer& room, const DeviceBuffer<std::uint8_t>& plain, bool capturing) {
  switch (dice.Between(0, 6)) {
    case 0: {
      const std::size_t size = dice.OneOf<std::size_t>({0, 1, 8, 40, 111});
      if (dice.Percent(30)) {
        return {"nvte_ep_ext_memory_usage", "usage", "no structure", [] { nvte_ep_ext_memory_usage(nullptr); }};
      }
      return {"nvte_ep_ext_memory_usage", "usage->struct_size", "struct_size " + std::to_string(size), [=] {
                NVTEEpExtMemoryUsage usage = {};
                usage.struct_size = size;
                nvte_ep_ext_memory_usage(&usage);
              }};
    }
    case 1: {
      void* const pointer =
          dice.OneOf<void*>({pageable, plain.data(), room.data() + 1, room.data() + 256, room.data() + room.bytes(),
                             Somewhere(1), Somewhere(~std::uintptr_t{0})});
      return {"nvte_ep_ext_symm_free", "ptr", "frees " + Hex(pointer), [=] { nvte_ep_ext_symm_free(pointer); }};
    }
    case 2: {
      void* const pointer = dice.OneOf<void*>(
          {pageable, plain.data(), nullptr, room.data() + room.bytes(), Somewhere(1), Somewhere(~std::uintptr_t{0})});
      return {"nvte_ep_ext_window_of", "ptr", "asks about " + Hex(pointer), [=] {
                if (nvte_ep_ext_is_symmetric(pointer) != 0) Fail("an address that is not symmetric is called so");
                nvte_ep_ext_window_of(pointer, nullptr, nullptr);
              }};
    }
    case 3:
      return {"nvte_ep_ext_symm_alloc", "ptr", "no place for the address", [&room] {
                ncclWindow_t window = nullptr;
                nvte_ep_ext_symm_alloc(room.bytes(), nullptr, &window, nullptr);
              }};
    case 4: {
      NVTEEpExtOptions* const dead = DrawNoOptions(dice);
      const int form = dice.Between(0, 2);
      const char* const names[] = {"options", "group_config", "ep_comm"};
      return {"nvte_ep_ext_initialize", names[form], "initializes with options", [=] {
                const NVTEEpGroupConfig config = GroupShape().Config();
                nvte_ep_ext_initialize(form == 2 ? nullptr : World::Get().comm(), form == 1 ? nullptr : &config,
                                       form == 0 ? dead : nullptr);
              }};
    }
    case 5: {
      if (capturing) return DrawOptionsRefusal(dice);
      // A capture is refused before anything else is looked at.
      return {"nvte_ep_ext_recv_totals", "handle_mem", "memory that was not prepared", [&plain] {
                NVTEEpExtRecvTotals totals = {};
                totals.struct_size = sizeof totals;
                nvte_ep_ext_recv_totals(plain.View({plain.size()}).get(), &totals, World::Get().stream());
              }};
    }
    default:
      return DrawOptionsRefusal(dice);
  }
}

Refusal DrawCollectiveRefusal(Dice& dice, const SymmBuffer& room, void* registered,
                              const DeviceBuffer<std::uint8_t>& plain) {
  const int odd = dice.Between(0, World::Get().size() - 1);
  const bool mine = odd == World::Get().rank();
  const auto allocates = [](std::size_t bytes) {
    void* data = nullptr;
    nvte_ep_ext_symm_alloc(bytes, &data, nullptr, nullptr);
  };
  const auto registers = [](void* data, std::size_t bytes) { nvte_ep_ext_window_register(data, bytes, nullptr); };
  switch (dice.Between(0, 5)) {
    case 0: {
      const std::size_t bytes =
          dice.OneOf<std::size_t>({0, ~std::size_t{0}, (std::size_t{1} << 50) + 1, std::size_t{1} << 63});
      return {"nvte_ep_ext_symm_alloc", "bytes", std::to_string(bytes) + " bytes", [=] { allocates(bytes); }};
    }
    case 1: {
      // One rank alone is wrong, or only differs; all are told.
      const std::size_t bytes = dice.OneOf<std::size_t>({0, 8192});
      return {"nvte_ep_ext_symm_alloc", "bytes", "ranks that differ", [=] { allocates(mine ? bytes : 4096); }};
    }
    case 2: {
      auto* const bytes = static_cast<std::uint8_t*>(registered);
      void* const pointer =
          dice.OneOf<void*>({nullptr, bytes, bytes + 4096, bytes + 256, pageable, pageable + 8, plain.data(),
                             room.data(), Somewhere(4096), Somewhere(~std::uintptr_t{4095})});
      return {"nvte_ep_ext_window_register", "ptr", "registers " + Hex(pointer), [=] { registers(pointer, 4096); }};
    }
    case 3: {
      void* const pointer = dice.OneOf<void*>({registered, static_cast<void*>(pageable)});
      return {"nvte_ep_ext_window_register", "bytes", "registers nothing", [=] { registers(pointer, 0); }};
    }
    case 4: {
      const std::size_t bytes = dice.OneOf<std::size_t>({~std::size_t{0}, std::size_t{1} << 63, std::size_t{1} << 47});
      return {"nvte_ep_ext_window_register", "ptr|bytes", "registers too much",
              [=] { registers(mine ? registered : pageable, bytes); }};
    }
    default: {
      auto* const bytes = static_cast<std::uint8_t*>(registered);
      void* const pointer =
          dice.OneOf<void*>({nullptr, bytes + 4096, bytes + 1, pageable, plain.data(), room.data(), Somewhere(1)});
      return {"nvte_ep_ext_window_deregister", "ptr", "deregisters " + Hex(pointer),
              [=] { nvte_ep_ext_window_deregister(pointer); }};
    }
  }
}

std::vector<Refusal> ExtRefusalsWithoutGroup(NVTETensor mem) {
  const std::string names = "nvte_ep_initialize", what = "no group";
  return {TotalsRefusal(names, what, mem, sizeof(NVTEEpExtRecvTotals)),
          {"nvte_ep_ext_memory_usage", names, what, [] { Usage(); }},
          {"nvte_ep_ext_symm_alloc", names, what, [] { const SymmBuffer none(4096); }},
          {"nvte_ep_ext_symm_free", names, what, [] { nvte_ep_ext_symm_free(pageable); }},
          {"nvte_ep_ext_window_of", names, what, [] { nvte_ep_ext_window_of(pageable, nullptr, nullptr); }},
          {"nvte_ep_ext_is_symmetric", names, what, [] { nvte_ep_ext_is_symmetric(pageable); }},
          {"nvte_ep_ext_window_register", names, what, [] { nvte_ep_ext_window_register(pageable, 4096, nullptr); }},
          {"nvte_ep_ext_window_deregister", names, what, [] { nvte_ep_ext_window_deregister(pageable); }}};
}

Refusal DrawOptionsOfAGroup(Dice& dice) {
  const int odd = dice.Between(0, World::Get().size() - 1);
  const bool mine = odd == World::Get().rank();
  std::vector<std::pair<const char*, Options::Pairs>> forms = {
      {"max_recv_tokens_per_rank", {{"eager", "on"}, {"num_topk", "2"}}},
      {"num_topk", {{"num_topk", "33"}}},
      {"preprocess_sms", {{"preprocess_sms", "100000"}}},
      {"dispatch_sms|combine_sms", {{"dispatch_sms", "100000"}, {"combine_sms", "100000"}}},
      {"deterministic", {{"deterministic", mine ? "off" : "on"}}},
      {"symm_segment_bytes", {{"symm_segment_bytes", mine ? "4096" : "8192"}}},
      {"num_topk", {{"num_topk", mine ? "3" : "2"}}}};
  // Builds of API 3 may have two numbers.
  if (EveryShapeIsCheap()) forms.push_back({"dispatch_sms", {{"dispatch_sms", "8"}, {"combine_sms", "4"}}});
  const auto [names, pairs] = dice.OneOf(forms);
  return {"nvte_ep_ext_initialize", names, std::string("options that say ") + pairs[0].first, [pairs = pairs] {
            const NVTEEpGroupConfig config = GroupShape().Config();
            nvte_ep_ext_initialize(World::Get().comm(), &config, Options(pairs).raw());
          }};
}

}  // namespace test
