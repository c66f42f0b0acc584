// Runs calls of the kernels' library for another process, whose memory it reads and writes as if it were its own.
//
// run_calls LIBRARY: first writes the library's fingerprint. A call (`Call`) comes on standard input. A page that the
// call touches is requested on standard output ('p', address), and is mapped at the same address as in the other
// process. When the call has returned, every changed piece of these pages is written ('w', address, size, bytes), and
// then the result ('r', result). The pages are forgotten, because the other process may change them before its next call.
#include <dlfcn.h>
#include <omp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);

namespace {

constexpr int64_t PAGE = 4096;

struct Call {
  char name[64];
  int64_t integers[16];  // and addresses
  float floats[4];
};

std::map<char*, std::vector<char>> pages;  // as they were received
std::atomic_flag is_fetching = ATOMIC_FLAG_INIT;

[[noreturn]] void fail(const char* reason) {
  std::perror(reason);
  _exit(1);
}

void receive(void* to, int64_t size) {
  for (int64_t done = 0; done < size;) {
    int64_t count = read(0, static_cast<char*>(to) + done, size_t(size - done));
    if (count == 0) _exit(0);
    if (count < 0) fail("read");
    done += count;
  }
}

void send(const void* from, int64_t size) {
  for (int64_t done = 0; done < size;) {
    int64_t count = write(1, static_cast<const char*>(from) + done, size_t(size - done));
    if (count < 0) fail("write");
    done += count;
  }
}

template <class... Values>
void send_message(char kind, Values... values) {
  send(&kind, 1);
  (send(&values, sizeof values), ...);
}

// Map the page of the other process that a thread touches. The threads' faults are handled one after the other.
void fetch(int, siginfo_t* info, void*) {
  while (is_fetching.test_and_set(std::memory_order_acquire)) continue;
  auto address = reinterpret_cast<intptr_t>(info->si_addr) / PAGE * PAGE;
  char* page = reinterpret_cast<char*>(address);
  if (!pages.count(page)) {
    // Filled elsewhere and then moved, because another thread may touch the page meanwhile.
    auto memory = static_cast<char*>(mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    send_message('p', address);
    receive(memory, PAGE);
    pages[page].assign(memory, memory + PAGE);
    if (mremap(memory, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page) fail("mremap");
  }
  is_fetching.clear(std::memory_order_release);
}

void return_pages() {
  for (auto& [page, before] : pages) {
    for (int64_t at = 0; at < PAGE; at++) {
      int64_t begin = at;
      while (at < PAGE && page[at] != before[size_t(at)]) at++;
      if (at == begin) continue;
      send_message('w', page + begin, at - begin);
      send(page + begin, at - begin);
    }
    munmap(page, PAGE);
  }
  pages.clear();
}

// Arguments beyond those of the function do not matter: they are in registers and places that it does not read.
int64_t run(void* function, const int64_t (&i)[16], const float (&f)[4]) {
  using I = int64_t;
  using Function = I (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, float, float, float, float);
  return reinterpret_cast<Function>(function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11],
                                              i[12], i[13], i[14], i[15], f[0], f[1], f[2], f[3]);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) std::fprintf(stderr, "%s\n", dlerror()), _exit(1);
  auto use_openmp = reinterpret_cast<void (*)(void*, void*, void*)>(dlsym(library, "er_use_openmp"));
  auto to_address = [](auto function) { return reinterpret_cast<void*>(function); };
  use_openmp(to_address(GOMP_parallel), to_address(omp_set_dynamic), to_address(omp_get_num_threads));

  struct sigaction action = {};
  action.sa_sigaction = fetch;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);

  const char* fingerprint = reinterpret_cast<const char* (*)()>(dlsym(library, "er_abi_fingerprint"))();
  send(fingerprint, int64_t(std::strlen(fingerprint)));
  for (Call call;;) {
    receive(&call, sizeof call);
    void* function = dlsym(library, call.name);
    if (!function) std::fprintf(stderr, "%s\n", dlerror()), _exit(1);
    int64_t result = run(function, call.integers, call.floats);
    return_pages();
    send_message('r', result);
  }
}
