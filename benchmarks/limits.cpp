// Measures how fast all cores together read memory and multiply pairs of bfloat16.
//
// usage: limits MEGABYTES THREADS -> one line: bytes/s read, floating-point operations/s
//
// Vectors stay in registers. Matrices are loaded from the first-level cache, since their eight registers allow no more
// than four products for four loads. Both figures are medians of runs in turn, because the
// speed of a virtual machine, that of its matrix instructions above all, changes several times in a second.
#include <omp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "read_memory.h"

typedef float Floats __attribute__((vector_size(64)));

namespace {

constexpr int REPEAT = 9, SUMS = 16;
constexpr int64_t ROUNDS = 1 << 22;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double read_all(const char* memory, int64_t size, int threads) {
  uint64_t sink = 0;
  double began = now();
#pragma omp parallel num_threads(threads) reduction(+ : sink)
  {
    int64_t part = size / threads / 256 * 256;
    const char* at = memory + part * omp_get_thread_num();
    sink += read_memory(at, at + part);
  }
  double seconds = now() - began;
  asm volatile("" ::"r"(sink));
  return double(size) / seconds;
}

// Lanes x pairs x (multiply, add) of an instruction; without one for bfloat16, of a multiplication of floats.
#ifdef __AVX512BF16__
constexpr double OPERATIONS = 16 * 2 * 2;
Floats step(Floats total, Floats a, Floats b) {
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}
#else
constexpr double OPERATIONS = 16 * 2;
Floats step(Floats total, Floats a, Floats b) { return total + a * b; }
#endif

double multiply(int threads) {
  double began = now();
#pragma omp parallel num_threads(threads)
  {
    Floats total[SUMS], a = {}, b = {};
    asm volatile("" : "+x"(a), "+x"(b));
    for (int i = 0; i < SUMS; i++) total[i] = Floats{} + float(i);  // equal sums would be computed once for all
    for (int64_t round = 0; round < ROUNDS; round++)
#pragma GCC unroll 16
      for (int i = 0; i < SUMS; i++) total[i] = step(total[i], a, b);
    for (auto& sums : total) asm volatile("" ::"x"(sums));
  }
  return OPERATIONS * SUMS * double(ROUNDS) * threads / (now() - began);
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

// The same with matrix instructions: four products of 16 x 32 with 32 x 16 numbers in a round. The numbers are random,
// because a processor multiplies zeros with less power, and so faster.
double multiply_matrices(int threads) {
  constexpr int64_t MATRIX_BYTES = 1024, STEPS = 4;
  alignas(64) static uint16_t numbers[STEPS * 4 * MATRIX_BYTES / 2];
  std::mt19937 random(0);
  for (auto& number : numbers) number = uint16_t(0x3f00 | (random() & 0x80ff));  // of both signs, between 0.5 and 2

  struct {
    uint8_t palette = 1, reserved[15] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } sizes;
  double began = now();
#pragma omp parallel num_threads(threads)
  {
    _tile_loadconfig(&sizes);
    for (int64_t round = 0; round < ROUNDS / 4; round++) {
      const char* at = reinterpret_cast<const char*>(numbers) + round % STEPS * 4 * MATRIX_BYTES;
      _tile_loadd(4, at, 64);
      _tile_loadd(6, at + MATRIX_BYTES, 64);
      _tile_loadd(7, at + 2 * MATRIX_BYTES, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, at + 3 * MATRIX_BYTES, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  }
  return 4 * 16.0 * 16 * 32 * 2 * double(ROUNDS / 4) * threads / (now() - began);
}

bool may_use_matrices() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tiles */) == 0; }

#else

double multiply_matrices(int) { return 0; }
bool may_use_matrices() { return false; }

#endif

double median(std::vector<double> found) {
  std::sort(found.begin(), found.end());
  return found[found.size() / 2];
}

}  // namespace

int main(int, char** arguments) {
  const int64_t size = std::atoll(arguments[1]) << 20, huge = 2 << 20;
  const int threads = std::atoi(arguments[2]);
  void* mapped = mmap(nullptr, size_t(size + 2 * huge), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 1;
  char* memory = reinterpret_cast<char*>((uintptr_t(mapped) + huge - 1) / huge * huge);
#ifdef MADV_HUGEPAGE
  madvise(memory, size_t(size), MADV_HUGEPAGE);
#endif
  std::memset(memory, 1, size_t(size));
  const bool by_matrices = may_use_matrices();
  std::vector<double> bytes, operations;
  for (int i = 0; i < REPEAT; i++) {
    bytes.push_back(read_all(memory, size, threads));
    operations.push_back(by_matrices ? multiply_matrices(threads) : multiply(threads));
  }
  std::printf("%.6e %.6e\n", median(bytes), median(operations));
}
