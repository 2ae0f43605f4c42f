// What the kernels need of the machine, twice: a GPU's, and a CPU's on which a block is a few threads, one for each
// role, and a warp is one lane. The protocol (routing.h, dispatch.h, combine.h) is written once over it, so that it
// runs where there is no GPU: under ThreadSanitizer, with delays at random, and as the host runtime's kernels.
#pragma once

#if defined(__CUDACC__)
#define EP_DEVICE __device__ __forceinline__
#define EP_BOTH __host__ __device__ __forceinline__
#define EP_GPU 1
#define EP_UNROLL _Pragma("unroll")
#else
#include <sched.h>
#include <time.h>

#include <cstring>
#define EP_DEVICE inline
#define EP_BOTH inline
#define EP_GPU 0
#define EP_UNROLL
#endif

namespace nvte_ep {

using u8 = unsigned char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

template <typename T>
EP_BOTH constexpr T least(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
EP_BOTH constexpr T most(T a, T b) {
  return a < b ? b : a;
}
template <typename T>
EP_BOTH constexpr T divide_up(T a, T b) {
  return (a + b - 1) / b;
}

#if EP_GPU

constexpr u32 kWarp = 32;

// ---- threads ----

/// Threads that work together: a block, or a part of it that has a barrier of its own.
struct Team {
  u32 thread, threads, barrier;
  EP_DEVICE void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
};

struct Warp {
  u32 lane;
  EP_DEVICE static Warp own() { return {threadIdx.x % kWarp}; }
  EP_DEVICE void sync() const { __syncwarp(); }
  EP_DEVICE u64 ballot(bool value) const { return __ballot_sync(0xffffffffu, value); }
  /// The sum over lanes up to this one, without this one's; and the sum over all.
  EP_DEVICE u32 sum_before(u32 value, u32* all) const {
    u32 sum = value;
    for (u32 step = 1; step < kWarp; step *= 2) {
      const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    *all = __shfl_sync(0xffffffffu, sum, kWarp - 1);
    return sum - value;
  }
};

EP_DEVICE void add_shared(u32* to, u32 value) { atomicAdd(to, value); }
EP_DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
EP_DEVICE void pause() {}
EP_DEVICE u32 bits_of(u64 bits) { return __popcll(bits); }
EP_DEVICE u32 first_bit(u64 bits) { return __ffsll(static_cast<long long>(bits)) - 1; }

// ---- memory that others see ----

EP_DEVICE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
EP_DEVICE u32 load_relaxed(const u32* from) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
/// All that this thread knows of comes before it, for every processor.
EP_DEVICE void store_release(u32* to, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
/// Orders what this thread knows of before the bulk copies that it starts next.
EP_DEVICE void fence_bulk_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
EP_DEVICE void fence_bulk() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// After loads that are complete, of what the reader may overwrite now: there is nothing to wait for.
EP_DEVICE void store_after_loads(u32* to, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
EP_DEVICE void add_release_device(u32* to, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
EP_DEVICE void add_system(u64* to, u64 value) { atomicAdd_system(to, value); }
EP_DEVICE bool claim(u32* word, u32 value) { return atomicCAS_system(word, 0, value) == 0; }

/// What other blocks or ranks wrote: not from a cache that is not kept coherent.
template <typename T>
EP_DEVICE T load_shared_by_all(const T* from) {
  return __ldcg(from);
}

// ---- bulk copies ----

using Barrier = u64;

EP_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
EP_DEVICE void barrier_init(Barrier* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
EP_DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
EP_DEVICE void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
EP_DEVICE void barrier_arrive_expect(Barrier* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
EP_DEVICE void barrier_wait(Barrier* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}
EP_DEVICE void bulk_load(void* to, const void* from, u32 bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/// The same for what is read once: it leaves the L2 cache first.
EP_DEVICE void bulk_load_once(void* to, const void* from, u32 bytes, Barrier* barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "policy;\n}" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
EP_DEVICE void bulk_store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
EP_DEVICE void bulk_store_once(void* to, const void* from, u32 bytes) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy;\n}" ::"l"(to),
      "r"(shared_address(from)), "r"(bytes)
      : "memory");
}
EP_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until all but the last `kept` groups of this thread's stores have read their source.
template <int kept>
EP_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kept) : "memory");
}
/// Until they are done.
template <int kept>
EP_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kept) : "memory");
}

struct alignas(16) Vec {
  u32 word[4];
};

/// 16 bytes of shared memory, or zeros. In one instruction: the compiler makes four of it, and waits for each, where it
/// cannot see that the address is of shared memory.
EP_DEVICE Vec load_vec(const Vec* from, bool there) {
  Vec vec{};
  asm volatile("{\n.reg .pred there;\nsetp.ne.u32 there, %5, 0;\n@there ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(vec.word[0]), "+r"(vec.word[1]), "+r"(vec.word[2]), "+r"(vec.word[3])
               : "r"(shared_address(from)), "r"(static_cast<u32>(there))
               : "memory");
  return vec;
}

/// Stores that stay in the L2 cache, since they are read soon and then overwritten; and that leave it first.
EP_DEVICE void store_kept(Vec* to, const Vec& vec) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, policy;\n}" ::"l"(to),
      "r"(vec.word[0]), "r"(vec.word[1]), "r"(vec.word[2]), "r"(vec.word[3])
      : "memory");
}
EP_DEVICE void store_once(Vec* to, const Vec& vec) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(vec.word[0]), "r"(vec.word[1]),
               "r"(vec.word[2]), "r"(vec.word[3])
               : "memory");
}

EP_DEVICE float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
EP_DEVICE float from_f16(u32 bits) {
  float value;
  asm("{\n.reg .b16 half;\nmov.b16 half, %1;\ncvt.f32.f16 %0, half;\n}" : "=f"(value) : "h"(static_cast<u16>(bits)));
  return value;
}
EP_DEVICE u32 to_bf16x2(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
EP_DEVICE u32 to_f16x2(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
EP_DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
EP_DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }

#else

constexpr u32 kWarp = 1;

/// Called before this thread changes what others see: tests put delays here, and the host runtime notes that a role
/// came further.
inline void (*disturb)() = nullptr;
inline void maybe_disturb() {
  if (disturb != nullptr) disturb();
}

struct Team {
  u32 thread, threads, barrier;
  void sync() const {}
};

struct Warp {
  u32 lane;
  void sync() const {}
  u64 ballot(bool value) const { return value ? 1 : 0; }
  u32 sum_before(u32 value, u32* all) const {
    *all = value;
    return 0;
  }
};

inline void add_shared(u32* to, u32 value) { *to += value; }
inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1'000'000'000 + static_cast<u64>(now.tv_nsec);
}
/// Called while a wait goes on. Who runs several roles on one thread lets the others run in it.
inline void (*yield)() = [] { sched_yield(); };
inline void pause() { yield(); }
inline u32 bits_of(u64 bits) { return static_cast<u32>(__builtin_popcountll(bits)); }
inline u32 first_bit(u64 bits) { return static_cast<u32>(__builtin_ctzll(bits)); }

inline u32 load_acquire(const u32* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline u32 load_relaxed(const u32* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
inline void store_release(u32* to, u32 value) {
  maybe_disturb();
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
inline void store_after_loads(u32* to, u32 value) { store_release(to, value); }
inline void fence_bulk_global() {}
inline void fence_bulk() {}
inline void add_release_device(u32* to, u32 value) { __atomic_fetch_add(to, value, __ATOMIC_RELEASE); }
inline void add_system(u64* to, u64 value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline bool claim(u32* word, u32 value) {
  u32 none = 0;
  return __atomic_compare_exchange_n(word, &none, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
template <typename T>
inline T load_shared_by_all(const T* from) {
  return *from;
}

/// As the GPU's: a phase ends when as many arrivals as it was made for have come, and all bytes that were expected.
struct Barrier {
  u64 state;  // phase << 48 | bytes to come << 16 | arrivals to come
  u64 arrivals;
};
inline void barrier_init(Barrier* barrier, u32 arrivals) {
  barrier->arrivals = arrivals;
  __atomic_store_n(&barrier->state, arrivals, __ATOMIC_RELEASE);
}
inline void barriers_ready() {}
inline void barrier_change(Barrier* barrier, u64 arrived, i64 expected) {
  u64 old = __atomic_load_n(&barrier->state, __ATOMIC_RELAXED), changed;
  do {
    changed = old - arrived + (static_cast<u64>(expected) << 16);
    if ((changed & 0xffffffffffffu) == 0) changed += (u64(1) << 48) + barrier->arrivals;
  } while (!__atomic_compare_exchange_n(&barrier->state, &old, changed, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
}
inline void barrier_arrive(Barrier* barrier) { barrier_change(barrier, 1, 0); }
inline void barrier_arrive_expect(Barrier* barrier, u32 bytes) { barrier_change(barrier, 1, bytes); }
inline void barrier_wait(Barrier* barrier, u32 parity) {
  while ((__atomic_load_n(&barrier->state, __ATOMIC_ACQUIRE) >> 48 & 1) == parity) pause();
}
inline void bulk_load(void* to, const void* from, u32 bytes, Barrier* barrier) {
  maybe_disturb();
  std::memcpy(to, from, bytes);
  barrier_change(barrier, 0, -static_cast<i64>(bytes));
}
inline void bulk_load_once(void* to, const void* from, u32 bytes, Barrier* barrier) {
  bulk_load(to, from, bytes, barrier);
}
inline void bulk_store(void* to, const void* from, u32 bytes) {
  maybe_disturb();
  std::memcpy(to, from, bytes);
}
inline void bulk_store_once(void* to, const void* from, u32 bytes) { bulk_store(to, from, bytes); }
inline void bulk_commit() {}
template <int kept>
inline void bulk_wait_read() {}
template <int kept>
inline void bulk_wait() {}

struct alignas(16) Vec {
  u32 word[4];
};

inline Vec load_vec(const Vec* from, bool there) { return there ? *from : Vec{}; }
inline void store_kept(Vec* to, const Vec& vec) { *to = vec; }
inline void store_once(Vec* to, const Vec& vec) { *to = vec; }

inline float float_of_bits(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline u32 bits_of_float(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float from_bf16(u32 bits) { return float_of_bits(bits << 16); }
#ifdef __aarch64__
using Half = __fp16;  // g++ has _Float16 here from 13 on
#else
using Half = _Float16;
#endif
inline float from_f16(u32 bits) {
  const u16 half = static_cast<u16>(bits);
  Half value;
  std::memcpy(&value, &half, 2);
  return static_cast<float>(value);
}
inline u32 to_bf16(float value) {
  const u32 bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // as the GPU: one NaN
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline u32 to_f16(float value) {
  const Half half = static_cast<Half>(value);
  u16 bits;
  std::memcpy(&bits, &half, 2);
  return (bits & 0x7fff) > 0x7c00 ? 0x7fff : bits;
}
inline u32 to_f16x2(float low, float high) { return to_f16(low) | to_f16(high) << 16; }

#endif

}  // namespace nvte_ep
