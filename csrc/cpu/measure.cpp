#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>

#include "threads.h"

namespace int8moe {

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Sums a thread's part as `streams` straight lines side by side: more lines keep more reads in flight.
static uint64_t read_part(const uint64_t* p, long words, long streams) {
  const long line = words / streams / 8 * 8;
  uint64_t sum[8] = {};
  for (long i = 0; i < line; i += 8)
    for (long s = 0; s < streams; ++s)
      for (int j = 0; j < 8; ++j) sum[j] += p[s * line + i + j];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

double measure_read(int threads, long bytes, int repeats) {
  const long part = bytes / sizeof(uint64_t) / threads;
  const std::unique_ptr<uint64_t[]> buffer(new (std::nothrow) uint64_t[part * threads]);
  if (!buffer) return 0;
  double best = 0;
  auto round = [&](long streams) {  // 0 writes: each thread its own part
    double begin = 0;
    run_region(threads, [&](Region& region, int worker) {
      uint64_t* p = buffer.get() + worker * part;
      region.barrier();
      if (worker == 0) begin = now();
      if (!streams) {
        std::memset(p, 1, part * sizeof *p);
      } else {
        const uint64_t sum = read_part(p, part, streams);
        __asm__ volatile("" : : "r"(sum));
      }
      region.barrier();
      if (worker == 0 && streams) best = std::max(best, part * threads * sizeof(uint64_t) / (now() - begin));
    });
  };
  round(0);
  for (int r = 0; r < repeats; ++r)
    for (long streams : {1, 2, 4, 8}) round(streams);
  return best;
}

double measure_peak(const Peak& peak, int threads, int milliseconds) {
  auto run = [&](long steps) {
    double begin = 0, seconds = 0;
    run_region(threads, [&](Region& region, int worker) {
      region.barrier();
      if (worker == 0) begin = now();
      peak.run(steps);
      region.barrier();
      if (worker == 0) seconds = now() - begin;
    });
    return seconds;
  };
  long steps = 1000;
  double seconds = run(steps);
  while (seconds < 0.01 && steps < (1L << 40)) seconds = run(steps *= 4);
  steps = std::max(1000L, (long)(steps * milliseconds * 1e-3 / seconds));
  double best = 0;
  for (int r = 0; r < 5; ++r) best = std::max(best, peak.operations * steps * threads / run(steps));
  return best;
}

}  // namespace int8moe
