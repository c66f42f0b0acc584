// The basis of all kernels: number formats, vectors of 16 lanes, and the team of threads that runs a program.
//
// Vectors are GCC's, so that one source serves every processor: a vector is one register with AVX-512, two with AVX2,
// and several otherwise. Only bfloat16 pairs are multiplied, and rounded to, by instructions of their own, on processors
// that have them.
//
// Batch invariance: every number that belongs to one token is computed by the same operations in the same order,
// however many tokens are computed together and however many threads there are. Therefore a request's result does not
// depend on the other requests of a step.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <sched.h>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_MATRICES  // instructions that multiply matrices, see matrix_tile.h
#endif
#ifdef __x86_64__
#define HAS_INTEGER_PRODUCTS  // weights of integers are multiplied as integers, see integer_tile.h
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define HAS_BYTE_PRODUCTS  // by instructions that multiply bytes; otherwise pairs of 16 bits, see integer_pairs.h
#endif

// Only the functions of the interface are visible in the library.
#pragma GCC visibility push(default)
extern "C" {
#include "abi.h"
}
#pragma GCC visibility pop

namespace eagleray {

constexpr int LANES = NUM_LANES;

typedef float Floats __attribute__((vector_size(64)));           // [16]
typedef int32_t Ints __attribute__((vector_size(64)));           // [16]
typedef uint32_t Words __attribute__((vector_size(64)));         // [16]
typedef uint16_t Halves __attribute__((vector_size(32)));        // [16] bit patterns of bfloat16
typedef int16_t Int16s __attribute__((vector_size(32)));         // [16]
typedef int8_t Int8s __attribute__((vector_size(16)));           // [16]

struct Bf16 {
  uint16_t bits;
};

// ---- numbers

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
  uint32_t word = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Round to nearest, ties to even. A NaN stays a NaN.
inline Bf16 to_bf16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if (x != x) return Bf16{uint16_t((word >> 16) | 0x40)};
  return Bf16{uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16)};
}

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline Bf16 from_float<Bf16>(float x) { return to_bf16(x); }

// ---- vectors. Loads and stores need no alignment.

inline Floats splat(float x) { return x - Floats{}; }  // exact, also for -0, so the compiler omits the subtraction

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const Bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  Words words = __builtin_convertvector(halves, Words) << 16;
  Floats x;
  std::memcpy(&x, &words, sizeof x);
  return x;
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(Bf16* to, Floats x) {
#ifdef __AVX512BF16__
  __m256bh halves = _mm512_cvtneps_pbh((__m512)x);  // rounds to nearest even; flushes denormal numbers
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  float32x4_t parts[4];
  std::memcpy(parts, &x, sizeof x);
  bfloat16x8_t halves[] = {vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(parts[0]), parts[1]),
                           vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(parts[2]), parts[3])};  // round to nearest even
  std::memcpy(to, halves, sizeof halves);
#else
  Words words;
  std::memcpy(&words, &x, sizeof words);
  Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
  Ints nan = ((Ints)(0x7f800000 - (words & 0x7fffffff))) >> 31;  // all ones, or 0
  rounded = (rounded & ~(Words)nan) | (((words >> 16) | 0x40) & (Words)nan);
  Halves halves = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

// a where x < y, else b. GCC compares a vector that is longer than a register lane by lane, so it is split first.
inline Floats select_below(Floats x, Floats y, Floats a, Floats b) {
#ifdef __AVX512F__
  return x < y ? a : b;
#else
#ifdef __AVX__
  constexpr int SIZE = 32;
#else
  constexpr int SIZE = 16;
#endif
  typedef float Part __attribute__((vector_size(SIZE)));
  typedef int32_t Mask __attribute__((vector_size(SIZE)));
  Ints below;
  for (size_t at = 0; at < sizeof below; at += SIZE) {
    Part left, right;
    std::memcpy(&left, reinterpret_cast<char*>(&x) + at, SIZE);
    std::memcpy(&right, reinterpret_cast<char*>(&y) + at, SIZE);
    Mask mask = left < right;
    std::memcpy(reinterpret_cast<char*>(&below) + at, &mask, SIZE);
  }
  return (Floats)(((Ints)a & below) | ((Ints)b & ~below));
#endif
}

// The larger one: b if a is NaN, NaN if b is NaN.
inline Floats max(Floats a, Floats b) { return select_below(b, a, a, b); }

// Round to whole numbers between -2^22 and 2^22, ties to even.
inline Ints round_to_ints(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &x, sizeof x);
  const __m256i rounded[] = {_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1])};
  Ints result;
  std::memcpy(&result, rounded, sizeof result);
  return result;
#else
  return (Ints)(x + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23
#endif
}

// The larger numbers of both. They differ by less than 2^31.
inline Ints max(Ints a, Ints b) {
#ifdef __AVX512F__
  return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  const Ints above = b - a;
  return a + (above & ~(above >> 31));
#endif
}
inline Ints magnitude(Ints x) { return max(x, -x); }

// The sum of all lanes, and the highest one.
inline int32_t sum(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t total = 0;
  for (int lane = 0; lane < LANES; lane++) total += x[lane];
  return total;
#endif
}
inline int32_t highest(Ints x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t found = x[0];
  for (int lane = 1; lane < LANES; lane++) found = x[lane] > found ? x[lane] : found;
  return found;
#endif
}

// The sum of all lanes, in a fixed order: lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float sum(Floats x) {
  float lanes[LANES];
  std::memcpy(lanes, &x, sizeof x);
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  return lanes[0];
}
inline float highest(Floats x) {
  float lanes[LANES];
  std::memcpy(lanes, &x, sizeof x);
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++)
      lanes[lane] = lanes[lane] > lanes[lane + width] ? lanes[lane] : lanes[lane + width];
  return lanes[0];
}

// The highest lane by the processor's own instruction. If a lane is NaN, the result is any lane or NaN.
inline float max_lane(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  return highest(x);
#endif
}

// 2^x with a relative error of about 1e-7; 0 for x below -126. x is at most 127.
inline Floats exp2(Floats x) {
  Floats lowest = splat(-126.0f);
  Floats clamped = select_below(x, lowest, lowest, x);
  Floats shifted = clamped + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  Floats rest = clamped - (shifted - 12582912.0f);  // [-0.5, 0.5]
  Ints exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent <<= 23;
  Floats p = splat(1.535336188319500e-4f);
  p = p * rest + 1.339887440266574e-3f;
  p = p * rest + 9.618437357674640e-3f;
  p = p * rest + 5.550332471162809e-2f;
  p = p * rest + 2.402264791363012e-1f;
  p = p * rest + 6.931472028550421e-1f;
  p = p * rest + 1.0f;
  Ints word;
  std::memcpy(&word, &p, sizeof word);
  word += exponent;
  Floats result;
  std::memcpy(&result, &word, sizeof result);
  return select_below(x, lowest, splat(0.0f), result + (x - x));  // NaN for every NaN, whatever its bits
}
inline Floats exp(Floats x) { return exp2(x * 1.44269504088896341f); }
inline Floats silu(Floats x) { return x / (1.0f + exp(-max(x, splat(-87.0f)))); }

// ---- products of pairs: two bfloat16 lie side by side in a word; a "pair" of float is a single float.

template <class T>
constexpr int PAIR = sizeof(float) / sizeof(T);

template <class T>
struct Pairs;  // 16 lanes, each with one pair
template <>
struct Pairs<float> {
  Floats values;
};
template <>
struct Pairs<Bf16> {
  Words words;
};

template <class T>
inline Pairs<T> load_pairs(const T* from) {  // [16 * PAIR]
  Pairs<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Pairs<float> splat_pair(const float* from) { return {splat(*from)}; }
inline Pairs<Bf16> splat_pair(const Bf16* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return {Words{} + word};
}

// total + a * b, where the two products of a pair are added up.
inline Floats dot(Floats total, Pairs<float> a, Pairs<float> b) { return total + a.values * b.values; }
inline Floats dot(Floats total, Pairs<Bf16> a, Pairs<Bf16> b) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a.words, (__m512bh)b.words);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  float32x4_t totals[4];
  bfloat16x8_t as[4], bs[4];
  std::memcpy(totals, &total, 64), std::memcpy(as, &a.words, 64), std::memcpy(bs, &b.words, 64);
  for (int part = 0; part < 4; part++) totals[part] = vbfdotq_f32(totals[part], as[part], bs[part]);
  std::memcpy(&total, totals, 64);
  return total;
#else
  Words a_low = a.words << 16, a_high = a.words & 0xffff0000u, b_low = b.words << 16, b_high = b.words & 0xffff0000u;
  Floats al, ah, bl, bh;
  std::memcpy(&al, &a_low, 64), std::memcpy(&ah, &a_high, 64);
  std::memcpy(&bl, &b_low, 64), std::memcpy(&bh, &b_high, 64);
  return total + ah * bh + al * bl;
#endif
}

// ---- threads

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// Give back the matrix registers of this thread, if it uses them (see matrix_tile.h): while it does, the system saves and
// loads up to 8 KB of them whenever it changes threads. So no thread keeps them that sleeps, yields, or runs other code.
void release_matrices();

// One of `count` parts of the work of a phase.
struct Shard {
  int index;
  int count;
};

// The threads of a team run the same code and divide its phases among them.
//
// A thread takes shards of a phase until none is left, so the other threads do the work of a thread whose core another
// process uses; that thread skips the phases that have finished. A phase is finished when all its shards are done.
// Threads that wait for this spin, then yield their core.
class Team {
 public:
  struct State {
    alignas(64) std::atomic<uint64_t> ticket{0};  // phase << 32 | its next shard
    alignas(64) std::atomic<int> done{0};         // finished shards of the phase
  };

  Team(State* state, int num_threads)
      : state_(state), num_shards_(num_threads == 1 ? 1 : SHARDS_PER_THREAD * num_threads) {}

  // Run a phase: work(shard) for every shard. All threads call it, with the same phases in the same order.
  template <class Work>
  void for_each_shard(Work&& work) {
    if (num_shards_ == 1) return work(Shard{0, 1});
    uint64_t phase = phase_++;
    uint64_t ticket = state_->ticket.load(std::memory_order_acquire);
    while (ticket >> 32 == phase) {
      int index = int(ticket);
      if (index == num_shards_) break;
      if (!state_->ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      work(Shard{index, num_shards_});
      if (state_->done.fetch_add(1, std::memory_order_acq_rel) == num_shards_ - 1) {
        state_->done.store(0, std::memory_order_relaxed);
        state_->ticket.store((phase + 1) << 32, std::memory_order_release);
        return;
      }
      ticket = state_->ticket.load(std::memory_order_acquire);
    }
    for (int spin = 0; state_->ticket.load(std::memory_order_acquire) >> 32 == phase; spin++) {
      if (spin < SPINS) {
        relax();
        continue;
      }
      release_matrices();
      sched_yield();
    }
  }

  // Run a phase in which one of the threads calls work(). All threads call it.
  template <class Work>
  void run_once(Work&& work) {
    for_each_shard([&](Shard shard) {
      if (shard.index == 0) work();
    });
  }

 private:
  static constexpr int SHARDS_PER_THREAD = 2;
  static constexpr int SPINS = 2000;

  State* state_;
  int num_shards_;
  uint64_t phase_ = 0;
};

struct Span {
  int64_t begin, end;
};

// The shard's range of `count` items, whose bounds are multiples of `grain` (except the end of the last range).
inline Span range_of(const Shard& shard, int64_t count, int64_t grain = 1) {
  int64_t grains = (count + grain - 1) / grain;
  int64_t begin = grains * shard.index / shard.count * grain, end = grains * (shard.index + 1) / shard.count * grain;
  return {begin < count ? begin : count, end < count ? end : count};
}

// The functions of an OpenMP runtime, under GNU's names, which other runtimes have as well.
struct OpenMp {
  void (*parallel)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);  // GOMP_parallel
  void (*set_dynamic)(int);                                                                 // omp_set_dynamic
  int (*num_threads)();                                                                     // omp_get_num_threads
};

extern OpenMp openmp;  // of `er_use_openmp`

// Run work(team) on `num_threads` threads, or on fewer if OpenMP provides fewer.
template <class Work>
void run_team(int num_threads, Work&& work) {
  Team::State state;
  auto run = [&](int team_size) {
    Team team(&state, team_size);
    work(team);
    release_matrices();
  };
  if (num_threads <= 1) return run(1);
  openmp.set_dynamic(0);  // no fewer threads than requested: the layout of scratch may depend on their number
  auto run_thread = [](void* data) { (*static_cast<decltype(run)*>(data))(openmp.num_threads()); };
  openmp.parallel(run_thread, &run, unsigned(num_threads), 0);
}

// Run the single phase work(shard) on `num_threads` threads, or on fewer if OpenMP provides fewer.
template <class Work>
void run_phase(int num_threads, Work&& work) {
  run_team(num_threads, [&](Team& team) { team.for_each_shard(work); });
}

constexpr int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }
constexpr int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Call `work` with a zero of the type that a DTYPE_* constant names.
template <class Work>
void with_type(int dtype, Work&& work) {
  if (dtype == DTYPE_FLOAT32) work(float{});
  else work(Bf16{});
}

}  // namespace eagleray
