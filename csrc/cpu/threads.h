// Worker threads: those of the process's own OpenMP runtime where there is one, else a pool. The only code that knows
// threads.
#pragma once

#include <atomic>
#include <functional>

namespace int8moe {

// One parallel region: every worker runs the body once and may meet the others at `barrier()`.
class Region {
 public:
  explicit Region(int workers) : workers_(workers) {}
  int workers() const { return workers_.load(std::memory_order_relaxed); }
  void set_workers(int workers) { workers_.store(workers, std::memory_order_relaxed); }
  void barrier();

 private:
  std::atomic<int> workers_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

// Use an OpenMP runtime that is loaded already, by the addresses of GOMP_parallel, omp_get_thread_num and
// omp_get_num_threads. PyTorch keeps its OpenMP threads spinning between operations; a second pool beside them fights
// for the same cores (8 ms a call with 16 threads on a 16-core Xeon), and sharing them costs nothing.
void use_openmp(void* parallel, void* thread_num, void* num_threads);

// Runs body(region, worker) on up to `threads` threads, the calling one included, and returns when all are done. When
// another thread is using the pool, the caller does all of it alone: right answers, no waiting.
void run_region(int threads, const std::function<void(Region&, int)>& body);

// body(i) for i in [0, count), in any order.
void parallel_for(int threads, long count, const std::function<void(long)>& body);

}  // namespace int8moe
