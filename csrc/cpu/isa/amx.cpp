// isa/amx.cpp: AMX int8. A tile register holds 16 rows of 64 codes, or 64 columns of a packed tile of weights as they
// lie in memory; tdpbssd multiplies signed by signed, exactly. Blocks of a few rows take the AVX-512 VNNI way.
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::amx {
namespace {

#include "vector_avx512.inl"

// A core's two threads share its L1 and its one multiplier, which takes a cycle a row of codes. Two tiles of weights
// meet a block of rows kSteps steps at a time: those weights (2 KB a step) and the block's sums (128 bytes a row) stay
// in half an L1, and only codes come from L2.
constexpr int kTiles = 2, kBlock = 64;
constexpr long kSteps = 8;             // of 64 columns
constexpr long kCodeBytes = 1L << 20;  // rows of codes that stay in L2, half of it for each thread's weights
constexpr long kLine = 64;             // bytes of weights that one fetch brings

namespace few {
constexpr int kBlock = 4;  // rows up to which vectors are as fast: memory is the limit, and tile registers idle
#include "dot_vnni512.inl"
#include "rows.inl"
}  // namespace few

// The compiler's tile intrinsics do not say that they read memory: what was just written must be there.
inline void written(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Rows of a tile of codes: a block's are dealt out evenly, since each costs a cycle.
inline int tiles_of(int rows) { return (rows + 15) / 16; }
inline int height(int rows) { return (rows + tiles_of(rows) - 1) / tiles_of(rows); }

// Sums in registers 0 to 3, codes in 4 and 5, weights in 6 and 7.
struct Session {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };
  const bool tiles;
  explicit Session(const Codes& c) : tiles(c.rows > few::kBlock) {
    if (!tiles) return;
    Config config;
    for (int i = 0; i < 8; ++i) config.rows[i] = (uint8_t)(i < 6 ? height(c.rows) : 16);
    written(&config);
    _tile_loadconfig(&config);
  }
  ~Session() {
    if (tiles) _tile_release();
  }
};

inline void fetch(const int8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// One or two tiles of weights and what all rows of a block share.
struct Panel {
  const int8_t *w, *rest;  // rest: the tiles' last columns with zeros behind them, where they are no whole step
  long tile_bytes, whole, stride, sum_bytes;
  int height;
  const int8_t* ahead;  // the next weights to fetch into L2, and how many of them at each half step
  int fetches;
};

// Steps [from, to) of B tiles of weights and A tiles of codes.
template <int A, int B>
inline void multiply(Panel& p, const int8_t* q, int32_t* sums, long from, long to) {
  int32_t* const below = sums + p.height * (p.sum_bytes / 4);
  if (from == 0) {
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, p.sum_bytes);
    if (B > 1) _tile_loadd(1, sums + kTileRows, p.sum_bytes);
    if (A > 1) _tile_loadd(2, below, p.sum_bytes);
    if (A > 1 && B > 1) _tile_loadd(3, below + kTileRows, p.sum_bytes);
  }
  const int8_t* ahead = p.ahead;
  const long stride = p.stride, tile_bytes = p.tile_bytes;
  const int fetches = p.fetches;
  auto fetch_next = [&] {
    for (int i = 0; i < fetches; ++i, ahead += kLine) fetch(ahead);
  };
  const int8_t *w = p.w + from * 1024, *q2 = q + p.height * stride + from * 64;
  q += from * 64;
  for (long k = from; k < to; ++k, w += 1024, q += 64, q2 += 64) {
    const int8_t *w0 = k < p.whole ? w : p.rest, *w1 = k < p.whole ? w + tile_bytes : p.rest + 1024;
    _tile_loadd(6, w0, 64);
    _tile_loadd(4, q, stride);
    _tile_dpbssd(0, 4, 6);
    fetch_next();
    if (B > 1) {
      _tile_loadd(7, w1, 64);
      _tile_dpbssd(1, 4, 7);
    }
    if (A > 1) {
      _tile_loadd(5, q2, stride);
      _tile_dpbssd(2, 5, 6);
      fetch_next();
      if (B > 1) _tile_dpbssd(3, 5, 7);
    }
  }
  p.ahead = ahead;
  _tile_stored(0, sums, p.sum_bytes);
  if (B > 1) _tile_stored(1, sums + kTileRows, p.sum_bytes);
  if (A > 1) _tile_stored(2, below, p.sum_bytes);
  if (A > 1 && B > 1) _tile_stored(3, below + kTileRows, p.sum_bytes);
}

template <int B>
inline void by_tiles(const Dot& d, const int8_t* rest) {
  const long steps = (d.groups + 15) / 16, chunks = (steps + kSteps - 1) / kSteps;
  const int high = height(d.most_rows), count = (d.rows + high - 1) / high;
  Panel p{d.w, rest, d.tile_bytes, d.groups / 16, d.stride, d.sum_stride * 4, high, d.ahead, 0};
  const long halves = steps * count;  // a step of two tiles of codes has two
  p.fetches = (int)((d.ahead_bytes / kLine + halves - 1) / halves);
  for (long c = 0; c < chunks; ++c) {
    const long from = steps * c / chunks, to = steps * (c + 1) / chunks;
    int i = 0;
    for (; i + 2 <= count; i += 2)
      multiply<2, B>(p, d.q + i * high * d.stride, d.sums + i * high * d.sum_stride, from, to);
    if (i < count) multiply<1, B>(p, d.q + i * high * d.stride, d.sums + i * high * d.sum_stride, from, to);
  }
}

void dot(const Dot& d) {
  if (d.most_rows <= few::kBlock) return few::by_rows(d);
  alignas(64) int8_t rest[2 * 1024];
  const long whole = d.groups / 16, left = d.groups % 16;
  if (left) {
    __builtin_memset(rest, 0, sizeof rest);
    for (int b = 0; b < d.tiles; ++b)
      __builtin_memcpy(rest + 1024 * b, d.w + b * d.tile_bytes + whole * 1024, left * kTileRows * kGroup);
    written(rest);
  }
  d.tiles == 2 ? by_tiles<2>(d, rest) : by_tiles<1>(d, rest);
}

// Two tiles of codes by two of weights, in registers; `kLoads`: each brought from L1 first, which a product of any
// larger matrices cannot do without. A core's two threads share what both take.
template <bool kLoads>
void chain(long steps) {
  const Session session(Codes{nullptr, 0, 0, 16, false, nullptr});
  alignas(64) int8_t some[4 * 1024];
  __builtin_memset(some, 1, sizeof some);
  written(some);
  auto load = [&] {
    _tile_loadd(4, some, 64);
    _tile_loadd(5, some + 1024, 64);
    _tile_loadd(6, some + 2048, 64);
    _tile_loadd(7, some + 3072, 64);
  };
  load();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long i = 0; i < steps; ++i) {
    if (kLoads) load();
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}
constexpr double kChainOps = 4 * 16 * 16 * 64 * 2.0;
const Peak peaks[] = {{"tdpbssd", kChainOps, chain<false>},
                      {"tdpbssd, a tileloadd each", kChainOps, chain<true>},
                      {"dpbusd, 512 bit", 12 * 64 * 2.0, few::chain512}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 3, kCodeBytes};
}  // namespace int8moe::amx
