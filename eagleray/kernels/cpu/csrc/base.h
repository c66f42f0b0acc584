// What all kernels share: number formats, vectors of 16 lanes, and the team of threads that computes one step.
//
// Vectors are GCC's, so that one source serves every processor: compiled for AVX-512 they are one register, for AVX2
// two, otherwise what there is. Only the product of bfloat16 pairs has an instruction of its own where the processor
// has one.
//
// Every number that belongs to one token is computed by the same operations in the same order, however many tokens
// are computed together and however many threads there are: so a request's result does not depend on its company.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <omp.h>
#include <sched.h>

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

// ---- vectors. Memory need not be aligned.

inline Floats splat(float x) { return x - Floats{}; }  // exact, also for -0, so that nothing is computed

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

// a where x < y, else b. GCC compares a vector that is longer than a register lane by lane, so it is cut up first.
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

// b if a is NaN; NaN if b is.
inline Floats max(Floats a, Floats b) { return select_below(b, a, a, b); }

// In a fixed order: lanes i and i + 8, then i + 4, i + 2, i + 1.
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

// 2^x, to about 1e-7 relative; 0 below -126, x at most 127.
inline Floats exp2(Floats x) {
  Floats lowest = splat(-126.0f);
  Floats clamped = select_below(x, lowest, lowest, x);
  Floats shifted = clamped + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
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
  return select_below(x, lowest, splat(0.0f), result + (x - x));  // NaN of NaN, whatever its bits
}
inline Floats exp(Floats x) { return exp2(x * 1.44269504088896341f); }
inline Floats silu(Floats x) { return x / (1.0f + exp(-max(x, splat(-87.0f)))); }

// ---- products of pairs: T pairs lie side by side, two bfloat16 in a word; a "pair" of float is one float.

template <class T>
constexpr int PAIR = sizeof(float) / sizeof(T);

template <class T>
struct Pairs;  // 16 lanes of a pair each
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

// total + a * b, summed over the pair.
inline Floats dot(Floats total, Pairs<float> a, Pairs<float> b) { return total + a.values * b.values; }
inline Floats dot(Floats total, Pairs<Bf16> a, Pairs<Bf16> b) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a.words, (__m512bh)b.words);
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
#endif
}

// One share of the work of a phase: number `rank` of `size`.
struct Team {
  int rank;
  int size;
};

// The threads of a crew run the same code and divide its phases between them. A thread takes a share when it comes for
// one: whoever comes late, because something else has its core, finds the work done by the others, and the phases that
// are over it passes by. A phase is over when all its shares are done; who waits for that looks, then yields its core.
class Crew {
 public:
  struct State {
    alignas(64) std::atomic<uint64_t> ticket{0};  // phase << 32 | the next share of it
    alignas(64) std::atomic<int> done{0};         // shares of the phase
  };

  Crew(State* state, int num_threads) : state_(state), shares_(num_threads == 1 ? 1 : SHARES * num_threads) {}

  // work(team) for every share of the phase. All threads call, in the same order.
  template <class Work>
  void each(Work&& work) {
    if (shares_ == 1) return work(Team{0, 1});
    uint64_t phase = phase_++;
    uint64_t ticket = state_->ticket.load(std::memory_order_acquire);
    while (ticket >> 32 == phase) {
      int share = int(ticket);
      if (share == shares_) break;
      if (!state_->ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      work(Team{share, shares_});
      if (state_->done.fetch_add(1, std::memory_order_acq_rel) == shares_ - 1) {
        state_->done.store(0, std::memory_order_relaxed);
        state_->ticket.store((phase + 1) << 32, std::memory_order_release);
        return;
      }
      ticket = state_->ticket.load(std::memory_order_acquire);
    }
    for (int look = 0; state_->ticket.load(std::memory_order_acquire) >> 32 == phase; look++) {
      if (look < LOOKS) relax();
      else sched_yield();
    }
  }

  // work() by one of the threads.
  template <class Work>
  void one(Work&& work) {
    each([&](Team team) {
      if (team.rank == 0) work();
    });
  }

 private:
  static constexpr int SHARES = 2;  // for each thread
  static constexpr int LOOKS = 2000;

  State* state_;
  int shares_;
  uint64_t phase_ = 0;
};

struct Span {
  int64_t begin, end;
};

// This share of `count` things, in multiples of `grain` (but for the last).
inline Span share(const Team& team, int64_t count, int64_t grain = 1) {
  int64_t grains = (count + grain - 1) / grain;
  int64_t begin = grains * team.rank / team.size * grain, end = grains * (team.rank + 1) / team.size * grain;
  return {begin < count ? begin : count, end < count ? end : count};
}

// Run `work(crew)` on this many threads, or as many as there are.
template <class Work>
void run_crew(int num_threads, Work&& work) {
  Crew::State state;
  omp_set_dynamic(0);  // as many as are asked for: what is kept between calls may depend on it
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Crew crew(&state, omp_get_num_threads());
    work(crew);
  }
}

// Run the one phase `work(team)` on this many threads, or as many as there are.
template <class Work>
void run_team(int num_threads, Work&& work) {
  run_crew(num_threads, [&](Crew& crew) { crew.each(work); });
}

constexpr int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Call `work` with a zero of the type that C's `dtype` names: 0 float32, 1 bfloat16.
template <class Work>
void with_type(int dtype, Work&& work) {
  if (dtype == 0) work(float{});
  else work(Bf16{});
}

}  // namespace eagleray
