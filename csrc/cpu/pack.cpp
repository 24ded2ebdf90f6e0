#include "pack.h"

#include <cstring>

#include "moe.h"
#include "threads.h"

namespace int8moe {

namespace {

long tiles_of(long n, int order) { return order == kPlain ? (n + kTileRows - 1) / kTileRows : (n / 2 + 7) / 8; }

// The canonical row of row `c` of `tile`, or -1 for padding.
long canonical_row(long tile, int c, long n, int order) {
  if (order == kPlain) {
    const long row = tile * kTileRows + c;
    return row < n ? row : -1;
  }
  const long half = n / 2, j = tile * 8 + (c & 7);
  const bool up = c >= 8;
  if (j >= half) return -1;
  return order == kPairsInterleaved ? 2 * j + up : j + (up ? half : 0);
}

struct Job {
  const int8_t* from;
  int8_t* to;
  long n, k, kp, tiles;
  int order;
};

void pack_tile(const Job& job, long index) {
  const long expert = index / job.tiles, tile = index % job.tiles;
  const int8_t* weights = job.from + expert * job.n * job.k;
  int8_t* out = job.to + index * kTileRows * job.kp;
  std::memset(out, 0, kTileRows * job.kp);
  for (int c = 0; c < kTileRows; ++c) {
    const long row = canonical_row(tile, c, job.n, job.order);
    if (row < 0) continue;
    const int8_t* in = weights + row * job.k;
    for (long k = 0; k < job.k; ++k) out[(k / kGroup) * kTileRows * kGroup + c * kGroup + k % kGroup] = in[k];
  }
}

void unpack_tile(const Job& job, long index) {
  const long expert = index / job.tiles, tile = index % job.tiles;
  const int8_t* in = job.from + index * kTileRows * job.kp;
  int8_t* weights = job.to + expert * job.n * job.k;
  for (int c = 0; c < kTileRows; ++c) {
    const long row = canonical_row(tile, c, job.n, job.order);
    if (row < 0) continue;
    int8_t* out = weights + row * job.k;
    for (long k = 0; k < job.k; ++k) out[k] = in[(k / kGroup) * kTileRows * kGroup + c * kGroup + k % kGroup];
  }
}

}  // namespace

long packed_bytes(long n, long k, int order) { return tiles_of(n, order) * kTileRows * padded_columns(k); }

void pack(const int8_t* canonical, int8_t* packed, long experts, long n, long k, int order, int threads) {
  const Job job{canonical, packed, n, k, padded_columns(k), tiles_of(n, order), order};
  parallel_for(threads, experts * job.tiles, [&](long i) { pack_tile(job, i); });
}

void unpack(const int8_t* packed, int8_t* canonical, long experts, long n, long k, int order, int threads) {
  const Job job{packed, canonical, n, k, padded_columns(k), tiles_of(n, order), order};
  parallel_for(threads, experts * job.tiles, [&](long i) { unpack_tile(job, i); });
}

}  // namespace int8moe
