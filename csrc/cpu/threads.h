// A persistent pool of worker threads. The only code that knows threads.
#pragma once

#include <atomic>
#include <functional>

namespace int8moe {

// One parallel region: every worker runs the body once and may meet the others at `barrier()`.
class Region {
 public:
  explicit Region(int workers) : workers_(workers) {}
  int workers() const { return workers_; }
  void barrier();

 private:
  const int workers_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

// Runs body(region, worker) on up to `threads` threads, the calling one included, and returns when all are done. When
// another thread is using the pool, the caller does all of it alone: right answers, no waiting.
void run_region(int threads, const std::function<void(Region&, int)>& body);

// body(i) for i in [0, count), in any order.
void parallel_for(int threads, long count, const std::function<void(long)>& body);

}  // namespace int8moe
