#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "pack.h"
#include "threads.h"

namespace int8moe {

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

typedef uint64_t Two __attribute__((vector_size(16)));
struct alignas(64) Line {
  Two v[4];
};

// Sums a thread's part as straight lines side by side, each fetched `ahead` cache lines early: several lines keep more
// reads in flight than one.
template <int kStreams>
static uint64_t read_part(const Line* p, long lines, long ahead) {
  const long each = lines / kStreams;
  Two sum[kStreams][2] = {};
  for (long i = 0; i < each; ++i) {
    for (int s = 0; s < kStreams; ++s) {
      if (ahead) __builtin_prefetch(p + s * each + i + ahead);
      const Line& line = p[s * each + i];
      sum[s][0] += line.v[0] ^ line.v[1];
      sum[s][1] += line.v[2] ^ line.v[3];
    }
  }
  Two all = {};
  for (int s = 0; s < kStreams; ++s) all += sum[s][0] + sum[s][1];
  return all[0] + all[1];
}

double measure_read(int threads, long bytes, int repeats) {
  const long part = bytes / (long)sizeof(Line) / threads;
  Line* const buffer = static_cast<Line*>(std::aligned_alloc(sizeof(Line), part * threads * sizeof(Line)));
  if (!buffer) return 0;
  use_large_pages(buffer, part * threads * sizeof(Line), false, threads);
  double best = 0;
  auto round = [&](auto&& read) {
    double begin = 0, seconds = 0;
    run_region(threads, [&](Region& region, int worker) {
      region.barrier();
      if (worker == 0) begin = now();
      read(buffer + worker * part);
      region.barrier();
      if (worker == 0) seconds = now() - begin;
    });
    return part * threads * sizeof(Line) / seconds;
  };
  round([&](Line* p) { std::memset(static_cast<void*>(p), 1, part * sizeof(Line)); });  // each thread its own part
  auto with = [&](uint64_t (*read)(const Line*, long, long), long ahead) {
    best = std::max(best, round([&](Line* p) {
                      const uint64_t sum = read(p, part, ahead);
                      __asm__ volatile("" : : "r"(sum));
                    }));
  };
  for (int r = 0; r < repeats; ++r) {
    for (long ahead : {0L, 4L, 8L}) {
      with(read_part<1>, ahead);
      with(read_part<2>, ahead);
      with(read_part<4>, ahead);
    }
  }
  std::free(buffer);
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
