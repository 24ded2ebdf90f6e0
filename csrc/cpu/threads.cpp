#include "threads.h"

#include <pthread.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace int8moe {

namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Spinning this many rounds (some tens of microseconds) catches the next layer of a running model; after that a
// thread sleeps, so that an idle pool costs nothing and PyTorch's own threads find free cores.
constexpr int kSpins = 4000;

// Waits until `word` differs from `seen`.
void wait_change(const std::atomic<unsigned>& word, unsigned seen) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  while (word.load(std::memory_order_acquire) == seen) word.wait(seen, std::memory_order_acquire);
}

class Pool {
 public:
  // `threads` includes the caller.
  void run(int threads, const std::function<void(Region&, int)>& body) {
    while ((int)workers_.size() < threads - 1) {
      const int index = (int)workers_.size() + 1;
      const unsigned seen = ticket_.load();
      try {
        workers_.emplace_back([this, index, seen] { work(index, seen); });
      } catch (const std::system_error&) {  // no more threads to be had: go on with those there are
        threads = index;
      }
    }
    Region region(threads);
    region_ = &region;
    body_ = &body;
    active_ = threads;
    pending_.store((unsigned)workers_.size(), std::memory_order_relaxed);
    ticket_.fetch_add(1, std::memory_order_release);
    ticket_.notify_all();
    body(region, 0);
    for (;;) {
      const unsigned left = pending_.load(std::memory_order_acquire);
      if (left == 0) break;
      wait_change(pending_, left);
    }
  }

  // A pool is never destroyed while the process lives: its threads end with the process.
  std::vector<std::thread> workers_;

 private:
  void work(int index, unsigned seen) {
    for (;;) {
      wait_change(ticket_, seen);
      ++seen;
      if (index < active_) (*body_)(*region_, index);
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
    }
  }

  std::atomic<unsigned> ticket_{0}, pending_{0};
  Region* region_ = nullptr;
  const std::function<void(Region&, int)>* body_ = nullptr;
  int active_ = 0;
};

// Leaked on purpose: worker threads may still be waiting on it while static destructors run.
Pool* pool = nullptr;
std::mutex* pool_mutex = new std::mutex;

struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
} openmp;

// In a forked child the worker threads are gone, OpenMP's too: the old pool is left alone and a new one is made.
void after_fork_in_child() {
  openmp = OpenMp{};
  pool = nullptr;
  pool_mutex = new std::mutex;
}
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);

struct Shared {
  Region region{1};
  const std::function<void(Region&, int)>* body;
};

// One OpenMP thread. The runtime may give fewer than were asked for; each of them knows how many there are.
void openmp_worker(void* data) {
  Shared& shared = *static_cast<Shared*>(data);
  shared.region.set_workers(openmp.num_threads());
  (*shared.body)(shared.region, openmp.thread_num());
}

}  // namespace

void use_openmp(void* parallel, void* thread_num, void* num_threads) {
  openmp.parallel = reinterpret_cast<decltype(openmp.parallel)>(parallel);
  openmp.thread_num = reinterpret_cast<decltype(openmp.thread_num)>(thread_num);
  openmp.num_threads = reinterpret_cast<decltype(openmp.num_threads)>(num_threads);
}

void Region::barrier() {
  const int workers = workers_.load(std::memory_order_relaxed);
  if (workers == 1) return;
  const unsigned round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == workers) {
    arrived_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  } else {
    wait_change(round_, round);
  }
}

void run_region(int threads, const std::function<void(Region&, int)>& body) {
  if (threads > 1 && openmp.parallel) {
    Shared shared;
    shared.body = &body;
    openmp.parallel(openmp_worker, &shared, (unsigned)threads, 0);
    return;
  }
  if (threads > 1) {
    std::unique_lock<std::mutex> lock(*pool_mutex, std::try_to_lock);
    if (lock.owns_lock()) {
      if (!pool) pool = new Pool;
      pool->run(threads, body);
      return;
    }
  }
  Region alone(1);
  body(alone, 0);
}

void parallel_for(int threads, long count, const std::function<void(long)>& body) {
  std::atomic<long> next{0};
  run_region(threads, [&](Region&, int) {
    for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  });
}

}  // namespace int8moe
