// The only C++ of the libraries: it throws for Rust, and it catches for Rust.
//
// Rust can neither throw std::runtime_error nor catch a foreign exception. An error's text is therefore copied into an
// exception object here while Rust still runs (error_new); Rust drops everything it owns and only then calls
// error_throw, so that no Rust destructor is live when the exception leaves. In the other direction, try_call runs a
// Rust trampoline, which calls a library that may throw, inside try/catch.

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

char* copy_text(const char* text) noexcept {
  const std::size_t bytes = std::strlen(text) + 1;
  char* copy = static_cast<char*>(std::malloc(bytes));
  if (copy != nullptr) std::memcpy(copy, text, bytes);
  return copy;
}

}  // namespace

extern "C" {

// Returns an exception object that owns a copy of the text; never null (out of memory ends in std::terminate, as a
// throw without memory does).
void* nvte_ep_shim_error_new(const char* text, std::size_t length) noexcept {
  return new std::runtime_error(std::string(text, length));
}

// Throws what error_new made and frees it.
[[noreturn]] void nvte_ep_shim_error_throw(void* error) {
  const std::unique_ptr<std::runtime_error> owned(static_cast<std::runtime_error*>(error));
  throw std::runtime_error(*owned);
}

// Runs call(data). Returns 0, or 1 when a C++ exception left it; *text is then its what(), to be released with free().
int nvte_ep_shim_try_call(void (*call)(void*), void* data, char** text) noexcept {
  try {
    call(data);
    return 0;
  } catch (const std::exception& exception) {
    *text = copy_text(exception.what());
  } catch (...) {
    *text = copy_text("an exception that is not a std::exception");
  }
  return 1;
}

}  // extern "C"
