// The only C++ of the libraries: it throws for Rust, and it catches for Rust.
//
// Rust can neither throw std::runtime_error nor catch a foreign exception. An error's text is therefore copied into an
// exception object here while Rust still runs (error_new); Rust drops everything it owns and only then calls
// error_throw, so that no Rust destructor is live when the exception leaves. In the other direction, try_call runs a
// Rust trampoline, which calls a library that may throw, inside try/catch.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace {

char* copy_text(const char* text) noexcept {
  const std::size_t bytes = std::strlen(text) + 1;
  char* copy = static_cast<char*>(std::malloc(bytes));
  if (copy != nullptr) std::memcpy(copy, text, bytes);
  return copy;
}

// An error for when there is no memory for a text: it holds the text itself, as much as it has room for, and the
// exception object is then of the C++ runtime's own reserve. Its base is a copy that shares the text of one that was
// made before.
class ErrorWithoutMemory : public std::runtime_error {
 public:
  ErrorWithoutMemory(const char* text, std::size_t length) noexcept : std::runtime_error(base_) {
    length = std::min(length, sizeof text_ - 1);
    std::memcpy(text_, text, length);
    text_[length] = '\0';
  }
  const char* what() const noexcept override { return text_; }

 private:
  static const std::runtime_error base_;
  char text_[1024];
};

const std::runtime_error ErrorWithoutMemory::base_("nvte_ep: the process is out of memory");

}  // namespace

extern "C" {

// Returns an exception object that owns a copy of the text, or null if there is no memory for it.
void* nvte_ep_shim_error_new(const char* text, std::size_t length) noexcept {
  try {
    return new std::runtime_error(std::string(text, length));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Throws what error_new made and frees it.
[[noreturn]] void nvte_ep_shim_error_throw(void* error) {
  const std::unique_ptr<std::runtime_error> owned(static_cast<std::runtime_error*>(error));
  throw std::runtime_error(*owned);
}

// Throws the text, which is the caller's, where error_new had no memory.
[[noreturn]] void nvte_ep_shim_error_throw_text(const char* text, std::size_t length) {
  throw ErrorWithoutMemory(text, length);
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
