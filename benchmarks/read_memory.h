// Plain reading of memory, with which the kernels' reading is compared.
#pragma once

#include <cstdint>
#include <cstring>

// Return the exclusive or of the words from `at` to `end`, a multiple of 256 bytes later.
inline uint64_t read_memory(const char* at, const char* end) {
  typedef uint64_t Words __attribute__((vector_size(64)));
  constexpr int AHEAD = 12288;
  Words sums[4] = {};
  for (; at < end; at += 256)
    for (int i = 0; i < 4; i++) {
      Words words;
      __builtin_prefetch(at + AHEAD + 64 * i);
      std::memcpy(&words, at + 64 * i, sizeof words);
      sums[i] ^= words;
    }
  uint64_t result = 0;
  for (auto& words : sums)
    for (int i = 0; i < 8; i++) result ^= words[i];
  return result;
}
