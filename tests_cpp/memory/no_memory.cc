// The library when the C library has no memory left: at each place where it allocates, the allocation fails, or that
// one and all later ones do. No call may end the process or break a promise: it succeeds, or is refused in words; and
// once there is memory again, a step is right. One rank on the host runtime, whose own allocations are counted apart.
//
// Then the same for threads and for descriptors: without one, the call that needs it says so.
//
// usage: test_no_memory [--of library|host] [--places N] [--place P]     (N of all places, spread evenly; without it
// all) With --place P only that one, and what it writes to stderr.
//
// The program has malloc and its kin, so the libraries call these. Whose an allocation is, the stack tells: the first
// of its functions that is neither the program's nor a system library's.

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <link.h>
#include <nccl.h>
#include <nvte_ep_status.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <transformer_engine/ep.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace {

enum Owner { kNobody = -1, kLibrary, kHost, kProgram, kOwners };

struct Range {
  std::uintptr_t begin, end;
  Owner owner;
};

// What a child reports; in memory that it shares with its parent.
struct Report {
  std::atomic<long> allocations[kOwners];
  std::atomic<long> failed;
  std::atomic<int> refused, finished;
};

Report* report;
Range ranges[64];
std::atomic<int> range_count{0};
// The allocation of `fails_of` that fails, counted from 0, and whether all later ones do too.
std::atomic<bool> armed{false};
Owner fails_of = kLibrary;
long fails_at = -1;
bool fails_for_good = false;
// Whether the library's threads do not start.
std::atomic<bool> no_threads{false};
// The trace of the stack must not be looked at itself.
thread_local bool inside = false;

int AddRanges(dl_phdr_info* info, std::size_t, void*) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const std::string name = slash == nullptr ? info->dlpi_name : slash + 1;
  // The host runtime has many names, of CUDA's and NCCL's libraries.
  const bool is_host =
      name.rfind("libnvte_ep_host", 0) == 0 || name.rfind("libcu", 0) == 0 || name.rfind("libnccl", 0) == 0;
  const bool is_library = !is_host && name.rfind("libnvte_ep", 0) == 0;
  if (!is_host && !is_library && !name.empty()) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || range_count == 64) continue;
    const std::uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
    ranges[range_count++] = {begin, begin + segment.p_memsz, is_host ? kHost : is_library ? kLibrary : kProgram};
  }
  return 0;
}

struct Trace {
  Owner owner = kNobody;
  int skip = 4;  // The functions of this file that look.
};

_Unwind_Reason_Code Look(_Unwind_Context* context, void* data) {
  Trace& trace = *static_cast<Trace*>(data);
  const std::uintptr_t at = _Unwind_GetIP(context);
  for (int i = 0; i < range_count; ++i) {
    if (at < ranges[i].begin || at >= ranges[i].end) continue;
    if (ranges[i].owner == kProgram && trace.skip-- > 0) return _URC_NO_REASON;
    trace.owner = ranges[i].owner;
    return _URC_END_OF_STACK;
  }
  return _URC_NO_REASON;
}

// Who asks for what is asked for now.
Owner Asking() {
  inside = true;
  Trace trace;
  _Unwind_Backtrace(Look, &trace);
  inside = false;
  return trace.owner;
}

// Whether the allocation that is asked for now is to fail.
__attribute__((noinline)) bool Fails() {
  if (!armed.load(std::memory_order_relaxed) || inside) return false;
  const Owner owner = Asking();
  if (owner == kNobody || owner == kProgram) return false;
  const long number = report->allocations[owner]++;
  const bool fails =
      owner == fails_of && fails_at >= 0 && (number == fails_at || (fails_for_good && number > fails_at));
  if (fails) {
    ++report->failed;
    errno = ENOMEM;
  }
  return fails;
}

}  // namespace

extern "C" {
void* malloc(std::size_t bytes) { return Fails() ? nullptr : __libc_malloc(bytes); }
void* calloc(std::size_t count, std::size_t bytes) { return Fails() ? nullptr : __libc_calloc(count, bytes); }
void* realloc(void* old, std::size_t bytes) { return bytes > 0 && Fails() ? nullptr : __libc_realloc(old, bytes); }
void* memalign(std::size_t unit, std::size_t bytes) { return Fails() ? nullptr : __libc_memalign(unit, bytes); }
void* aligned_alloc(std::size_t unit, std::size_t bytes) { return Fails() ? nullptr : __libc_memalign(unit, bytes); }
int posix_memalign(void** made, std::size_t unit, std::size_t bytes) {
  if (Fails()) return ENOMEM;
  *made = __libc_memalign(unit, bytes);
  return *made == nullptr ? ENOMEM : 0;
}
void free(void* data) { __libc_free(data); }
int pthread_create(pthread_t* made, const pthread_attr_t* attributes, void* (*run)(void*), void* data) {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (no_threads && Asking() == kLibrary) return EAGAIN;
  return create(made, attributes, run, data);
}
}

namespace {

constexpr int kTokens = 8, kExperts = 4, kTopK = 2, kHidden = 64, kRows = kTokens * kTopK;
constexpr std::size_t kTensors = 6;
enum { kMemory, kIdx, kIn, kCounts, kRecv, kOut };

void Must(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s (%s)\n", what, nvte_ep_last_error());
  _exit(1);
}

// A call under a lack of memory: it is done, or refused in words that are no defect's.
bool Done(NVTEEpStatus status) {
  if (status == NVTE_EP_SUCCESS) return true;
  const char* text = nvte_ep_last_error();
  Must(status != NVTE_EP_INTERNAL && std::strncmp(text, "nvte_", 5) == 0, "what a refused call says");
  ++report->refused;
  std::fprintf(stderr, "refused: %s\n", text);
  return false;
}

// The same of a function that throws. Its text is as long as there was memory for.
template <typename Call>
bool Thrown(Call call) {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    Must(std::strncmp(error.what(), "nvte_", 5) == 0 && std::strstr(error.what(), "internal error") == nullptr,
         error.what());
    ++report->refused;
    return false;
  }
}

struct Step {
  std::int64_t experts[kRows];
  float rows[kTokens * kHidden], got[kTokens * kHidden];
  std::size_t extents[kTensors] = {
      0, sizeof experts, sizeof rows, kExperts * sizeof(std::int32_t), kRows* kHidden * sizeof(float), sizeof got};
  void* data[kTensors] = {};
  NVTETensor tensors[kTensors] = {};
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  Step() {
    for (int i = 0; i < kRows; ++i) experts[i] = (i / kTopK + 2 * (i % kTopK)) % kExperts;
    for (int i = 0; i < kTokens * kHidden; ++i) rows[i] = static_cast<float>(i);
    ncclUniqueId id;
    Must(cudaStreamCreate(&stream) == cudaSuccess && ncclGetUniqueId(&id) == ncclSuccess, "stream and id");
    Must(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess, "communicator");
    // Handle memory of any size is enough for as few tokens.
    extents[kMemory] = 1 << 16;
    for (std::size_t i = 0; i < kTensors; ++i) Must(cudaMalloc(&data[i], extents[i]) == cudaSuccess, "device memory");
    Must(cudaMemcpy(data[kIdx], experts, sizeof experts, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    Must(cudaMemcpy(data[kIn], rows, sizeof rows, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
  }

  bool View(int which, NVTEDType dtype, std::size_t rows_of, std::size_t columns) {
    const std::size_t sizes[2] = {rows_of, columns};
    NVTEBasicTensor basic = {data[which], dtype, {}};
    return Done(nvte_ep_try_make_shape(sizes, columns == 0 ? 1 : 2, &basic.shape)) &&
           Done(nvte_ep_try_create_tensor(NVTE_DELAYED_TENSOR_SCALING, &tensors[which])) &&
           Done(nvte_ep_try_set_tensor_param_v2(tensors[which], kNVTERowwiseData, &basic, sizeof basic));
  }

  static NVTEEpGroupConfig Config() {
    NVTEEpGroupConfig config = {};
    config.ep_size = 1;
    config.num_experts = kExperts;
    config.max_tokens_per_rank = kTokens;
    config.max_recv_tokens_per_rank = kRows;
    config.hidden_dim = kHidden;
    config.max_token_dtype = kNVTEFloat32;
    return config;
  }

  void Check() {
    Must(cudaMemcpy(got, data[kOut], sizeof got, cudaMemcpyDeviceToHost) == cudaSuccess, "copy");
    for (int i = 0; i < kTokens * kHidden; ++i) Must(got[i] == kTopK * rows[i], "an element of the result");
  }

  // A whole life of a group; true if every call was done. Two steps.
  bool Run() {
    bool done = Done(nvte_ep_try_initialize(comm, Config()));
    done = Calls() && done;
    done = Done(nvte_ep_try_shutdown()) && done;
    for (NVTETensor& tensor : tensors) {
      if (tensor != nullptr) done = Done(nvte_ep_try_destroy_tensor(tensor)) && done;
      tensor = nullptr;
    }
    return done;
  }

  bool Calls() {
    const NVTECommWindow none = {};
    NVTEEpLayerConfig layer = {};
    layer.top_k = kTopK;
    NVTEEpHandle handle = {};
    std::size_t bytes = 0;
    bool done = Done(nvte_ep_try_register_layer(layer, &bytes, &handle.id));
    Must(bytes <= extents[kMemory], "handle memory is large enough");
    done = View(kMemory, kNVTEByte, extents[kMemory], 0) && done;
    done = View(kIdx, kNVTEInt64, kTokens, kTopK) && done;
    done = View(kIn, kNVTEFloat32, kTokens, kHidden) && done;
    done = View(kCounts, kNVTEInt32, kExperts, 0) && done;
    done = View(kRecv, kNVTEFloat32, kRows, kHidden) && done;
    done = View(kOut, kNVTEFloat32, kTokens, kHidden) && done;
    handle.mem = tensors[kMemory];
    for (int again = 0; again < 2; ++again) {
      done = Done(nvte_ep_try_prepare(handle, tensors[kIdx], tensors[kCounts], 0, stream)) && done;
      done = Thrown([&] {
               nvte_ep_dispatch(handle, tensors[kIdx], tensors[kIn], none, nullptr, none, tensors[kRecv], none, nullptr,
                                none, stream);
             }) &&
             done;
      done = Done(nvte_ep_try_combine(handle, tensors[kRecv], none, tensors[kOut], stream)) && done;
    }
    // What is wrong is refused, whatever memory there is.
    Must(!Thrown([&] { nvte_ep_combine(handle, tensors[kRecv], none, tensors[kRecv], stream); }),
         "a wrong call is refused");
    Must(!Done(nvte_ep_try_prepare(handle, nullptr, tensors[kCounts], 0, stream)), "a wrong call is refused");
    Must(cudaStreamSynchronize(stream) == cudaSuccess || fails_of == kHost, "what was queued ends");
    return done;
  }
};

// What a child does: a life under a lack of memory, and one that has to be right.
int Child(Owner owner, long place, bool for_good) {
  // Loads the host runtime, and lets it start what it needs.
  static Step step;
  fails_of = owner;
  fails_at = place;
  fails_for_good = for_good;
  dl_iterate_phdr(AddRanges, nullptr);
  Trace first;
  _Unwind_Backtrace(Look, &first);
  armed = true;
  step.Run();
  armed = false;
  report->finished = 1;
  const int refused = report->refused;
  step.Run();
  Must(report->refused == refused + 2, "with memory again all calls but the two wrong ones are done");
  step.Check();
  return 0;
}

// The text of the thread's last error has all the parts.
void Says(std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    if (std::strstr(nvte_ep_last_error(), part) != nullptr) continue;
    std::fprintf(stderr, "wrong: \"%s\" lacks \"%s\"\n", nvte_ep_last_error(), part);
    _exit(1);
  }
}

// Without threads and without descriptors, calls name them; with them, a step is right.
int WithoutThreadsAndFiles() {
  static Step step;
  dl_iterate_phdr(AddRanges, nullptr);
  no_threads = true;
  Must(nvte_ep_try_initialize(step.comm, Step::Config()) == NVTE_EP_PEER, "no thread that watches");
  Says({"nvte_ep_initialize: ",
        "the thread that watches the group's calls could not be started (Resource temporarily unavailable",
        "ulimit -u"});
  no_threads = false;
  Must(nvte_ep_try_initialize(step.comm, Step::Config()) == NVTE_EP_SUCCESS, "initialize");
  no_threads = true;
  Must(nvte_ep_try_shutdown() == NVTE_EP_LIBRARY, "no thread that waits");
  Says({"nvte_ep_shutdown: ", "the thread that waits for the work queued on the device could not be started",
        "Resource temporarily unavailable", "raise the limit of threads or of memory"});
  no_threads = false;
  rlimit files;
  Must(getrlimit(RLIMIT_NOFILE, &files) == 0, "limit of descriptors");
  const rlimit none = {3, files.rlim_max};
  Must(setrlimit(RLIMIT_NOFILE, &none) == 0, "no descriptors");
  const bool done = Done(nvte_ep_try_initialize(step.comm, Step::Config()));
  Must(setrlimit(RLIMIT_NOFILE, &files) == 0, "descriptors");
  Must(!done, "the host runtime needs descriptors");
  Says({"nvte_ep_initialize: ", "Too many open files"});
  Must(nvte_ep_try_shutdown() == NVTE_EP_SUCCESS, "shutdown");
  step.Run();
  step.Check();
  return 0;
}

// Runs a child in a process of its own; how that ended: 0, an exit code, or 1000 and the signal.
template <typename Body>
int Try(bool quiet, Body body) {
  std::memset(static_cast<void*>(report), 0, sizeof *report);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    if (quiet && std::freopen("/dev/null", "w", stderr) == nullptr) _exit(1);
    _exit(body());
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 999;
  return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

int main(int argc, char** argv) {
  Owner owner = kLibrary;
  long wanted = 0, only = -1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--of") == 0) owner = std::strcmp(argv[i + 1], "host") == 0 ? kHost : kLibrary;
    if (std::strcmp(argv[i], "--places") == 0) wanted = std::atol(argv[i + 1]);
    if (std::strcmp(argv[i], "--place") == 0) only = std::atol(argv[i + 1]);
  }
  void* shared = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 1;
  report = new (shared) Report();
  // One whole life counts the places.
  if (const int code = Try(true, [&] { return Child(owner, -1, false); }); code != 0) {
    std::fprintf(stderr, "without a lack of memory: %d\n", code);
    return 1;
  }
  const long places = report->allocations[owner];
  std::printf("allocations: library %ld, host runtime %ld\n", report->allocations[kLibrary].load(),
              report->allocations[kHost].load());
  if (report->allocations[kLibrary] < 50 || report->allocations[kHost] < 50) {
    std::fprintf(stderr, "so few are not counted rightly\n");
    return 1;
  }
  long tried = 0, refused = 0, ended = 0, wrong = 0;
  const long step = wanted > 0 && places > wanted ? places / wanted : 1;
  for (long place = 0; place < places; place += step) {
    if (only >= 0 && place != only) continue;
    for (const bool for_good : {false, true}) {
      const int code = Try(only < 0, [&] { return Child(owner, place, for_good); });
      if (report->failed == 0) continue;  // Threads take turns, so the last places may not be reached.
      ++tried;
      refused += report->refused > 4;
      if (code == 0) continue;
      ++(code >= 999 ? ended : wrong);
      std::printf("%s %ld fails: %s %d\n", for_good ? "from allocation" : "allocation", place,
                  code >= 1000 ? "signal" : "exit", code % 1000);
    }
  }
  std::printf("of the %s: tried %ld, with a refusal %ld, aborts %ld, wrong %ld\n",
              owner == kHost ? "host runtime" : "library", tried, refused, ended, wrong);
  const int without = Try(false, WithoutThreadsAndFiles);
  std::printf("without threads and descriptors: %d\n", without);
  return ended + wrong == 0 && tried > 0 && without == 0 ? 0 : 1;
}
