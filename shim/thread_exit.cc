// What a thread of the library's, or one that called it, has to destroy when it ends. Rust's standard library asks the
// C library to keep that, by this name, and the C library ends the process if it has no memory for it. Within the
// library, whose symbols are its own, this takes its place. It has room for all that the library has of such values,
// about ten a thread.
//
// It is in a file of its own so that only who refers to nvte_ep_shim_keeps_thread_exits gets it: the C libraries.

#include <pthread.h>

namespace {

struct Value {
  void (*destroy)(void*);
  void* value;
};

struct Thread {
  unsigned count;
  Value values[32];
};

thread_local Thread thread;

// From the last to the first; one that is destroyed may bring others.
void at_end(void* data) {
  Thread& ending = *static_cast<Thread*>(data);
  while (ending.count > 0) {
    const Value last = ending.values[--ending.count];
    last.destroy(last.value);
  }
}

struct Key {
  pthread_key_t key;
  bool is_there;
  Key() : key(0), is_there(pthread_key_create(&key, at_end) == 0) {}
};

// One of the first keys of a process needs no memory. For a later one the C library may refuse it: then the thread
// leaves its values behind.
const Key key;

}  // namespace

extern "C" {

__attribute__((visibility("hidden"))) int __cxa_thread_atexit_impl(void (*destroy)(void*), void* value, void*) {
  if (thread.count == 0 && (!key.is_there || pthread_setspecific(key.key, &thread) != 0)) return 1;
  if (thread.count == sizeof thread.values / sizeof *thread.values) return 1;
  thread.values[thread.count++] = {destroy, value};
  return 0;
}

extern __attribute__((visibility("hidden"))) const char nvte_ep_shim_keeps_thread_exits;
const char nvte_ep_shim_keeps_thread_exits = 1;

}  // extern "C"
