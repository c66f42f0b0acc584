// The library of `memory_share.py`.
#include "read_memory.h"

extern "C" __attribute__((visibility("default"))) uint64_t bench_read_memory(const char* from, int64_t size) {
  return read_memory(from, from + size);
}
