// Owner of the options of a group.

#ifndef NVTE_EP_TESTS_SUPPORT_OPTIONS_H_
#define NVTE_EP_TESTS_SUPPORT_OPTIONS_H_

#include <nvte_ep_ext.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace test {

class Options {
 public:
  using Pair = std::pair<const char*, const char*>;
  using Pairs = std::vector<Pair>;

  Options() : raw_(nvte_ep_ext_options_create()) {}
  explicit Options(const Pairs& pairs) : Options() {
    for (const auto& [key, value] : pairs) Set(key, value);
  }
  // Options{{"overflow", "drop"}, {"num_topk", "2"}}
  Options(std::initializer_list<Pair> pairs) : Options(Pairs(pairs)) {}
  ~Options() { nvte_ep_ext_options_destroy(raw_); }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  void Set(const char* key, const char* value) { nvte_ep_ext_options_set(raw_, key, value); }
  std::string Get(const char* key) const {
    char value[32];
    nvte_ep_ext_options_get(raw_, key, value, sizeof value);
    return value;
  }
  const NVTEEpExtOptions* raw() const { return raw_; }

 private:
  NVTEEpExtOptions* raw_;
};

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_OPTIONS_H_
