// Checks of the exceptions that the library throws.

#ifndef NVTE_EP_TESTS_SUPPORT_EXPECT_ERROR_H_
#define NVTE_EP_TESTS_SUPPORT_EXPECT_ERROR_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

namespace test {

inline std::string LowerCase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Success if `call` throws exactly std::runtime_error whose text starts with "<function>: " and holds every one of
// `parts`, in any case of letters. An alternative inside a part is written with '|'.
template <typename Call>
testing::AssertionResult Throws(const std::string& function, const std::vector<std::string>& parts, Call&& call) {
  std::string text;
  try {
    call();
    return testing::AssertionFailure() << function << " did not throw";
  } catch (const std::runtime_error& error) {
    if (typeid(error) != typeid(std::runtime_error)) {
      return testing::AssertionFailure() << function << " threw a " << typeid(error).name() << ": " << error.what();
    }
    text = error.what();
  } catch (const std::exception& error) {
    return testing::AssertionFailure() << function << " threw a " << typeid(error).name() << ": " << error.what();
  } catch (...) {
    return testing::AssertionFailure() << function << " threw something that is no std::exception";
  }
  if (text.rfind(function + ": ", 0) != 0) {
    return testing::AssertionFailure() << "the text does not start with \"" << function << ": \": " << text;
  }
  const std::string body = LowerCase(text.substr(function.size()));
  for (const std::string& part : parts) {
    bool found = false;
    for (std::size_t from = 0; from <= part.size();) {
      const std::size_t to = std::min(part.find('|', from), part.size());
      found = found || body.find(LowerCase(part.substr(from, to - from))) != std::string::npos;
      from = to + 1;
    }
    if (!found) return testing::AssertionFailure() << "the text does not mention \"" << part << "\": " << text;
  }
  return testing::AssertionSuccess() << text;
}

}  // namespace test

#endif  // NVTE_EP_TESTS_SUPPORT_EXPECT_ERROR_H_
