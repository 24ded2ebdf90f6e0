// isa/amx.cpp: AMX int8. A tile register holds 16 rows of 64 codes, or 64 columns of a packed tile of weights as they
// lie in memory; tdpbssd multiplies signed by signed, exactly. Blocks of a few rows take the AVX-512 VNNI way.
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::amx {
namespace {

#include "vector_avx512.inl"

constexpr int kTiles = 8;
namespace few {
constexpr int kBlock = 4;  // rows up to which vectors are as fast: memory is the limit, and tile registers idle
#include "dot_vnni512.inl"
#include "rows.inl"
}  // namespace few
constexpr int kBlock = 32;

// The compiler's tile intrinsics do not say that they read memory: what was just written must be there.
inline void written(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

struct Session {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  Session() {
    const Config config;
    written(&config);
    _tile_loadconfig(&config);
  }
  ~Session() { _tile_release(); }
};

constexpr long kSteps = 16;  // of 64 columns, for all pairs of tiles in turn

// Steps [from, to) of one pair of tiles (B = 2, or a single one) and one or two blocks of 16 rows (A). Sums in
// registers 0 to 3, rows in 4 and 5, weights in 6 and 7.
template <int A, int B>
inline void multiply(const Dot& d, long from, long to) {
  const long step = d.sum_stride * 4;
  int32_t* const below = d.sums + 16 * d.sum_stride;
  if (from == 0) {
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
  } else {
    _tile_loadd(0, d.sums, step);
    if (B > 1) _tile_loadd(1, d.sums + kTileRows, step);
    if (A > 1) _tile_loadd(2, below, step);
    if (A > 1 && B > 1) _tile_loadd(3, below + kTileRows, step);
  }
  alignas(64) int8_t rest[2][1024];
  const long whole = d.groups / 16, left = d.groups % 16;
  if (to > whole) {  // the columns beyond: zero, as the rows of codes are
    for (int b = 0; b < B; ++b) {
      __builtin_memset(rest[b], 0, sizeof rest[b]);
      __builtin_memcpy(rest[b], d.w + b * d.tile_bytes + whole * 1024, left * kTileRows * kGroup);
    }
    written(rest);
  }
  const int8_t *w = d.w + from * 1024, *q = d.q + from * 64, *q2 = q + 16 * d.stride;
  for (long k = from; k < to; ++k, w += 1024, q += 64, q2 += 64) {
    const int8_t *w0 = k < whole ? w : rest[0], *w1 = k < whole ? w + d.tile_bytes : rest[1];
    if (d.next) {
      for (int b = 0; b < B; ++b)
        for (int i = 0; i < 16; ++i)
          _mm_prefetch(reinterpret_cast<const char*>(w + (B + b) * d.tile_bytes + 64 * i), _MM_HINT_T1);
    }
    _tile_loadd(6, w0, 64);
    _tile_loadd(4, q, d.stride);
    _tile_dpbssd(0, 4, 6);
    if (B > 1) {
      _tile_loadd(7, w1, 64);
      _tile_dpbssd(1, 4, 7);
    }
    if (A > 1) {
      _tile_loadd(5, q2, d.stride);
      _tile_dpbssd(2, 5, 6);
      if (B > 1) _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, d.sums, step);
  if (B > 1) _tile_stored(1, d.sums + kTileRows, step);
  if (A > 1) _tile_stored(2, below, step);
  if (A > 1 && B > 1) _tile_stored(3, below + kTileRows, step);
}

void dot(const Dot& d) {
  const long steps = (d.groups + 15) / 16;
  const bool vectors = d.rows <= few::kBlock;
  for (long from = 0; from < (vectors ? 1 : steps); from += kSteps) {
    const long to = from + kSteps < steps ? from + kSteps : steps;
    for (int tile = 0; tile < d.tiles; tile += 2) {
      Dot two = d;
      two.w += tile * d.tile_bytes;
      two.sums += tile * kTileRows;
      two.tiles = d.tiles - tile < 2 ? 1 : 2;
      if (vectors) {
        few::by_rows(two);
      } else if (d.rows <= 16) {
        two.tiles == 2 ? multiply<1, 2>(two, from, to) : multiply<1, 1>(two, from, to);
      } else {
        two.tiles == 2 ? multiply<2, 2>(two, from, to) : multiply<2, 1>(two, from, to);
      }
    }
  }
}

void chain(long steps) {
  const Session session;
  alignas(64) int8_t some[1024];
  __builtin_memset(some, 1, sizeof some);
  written(some);
  _tile_loadd(4, some, 64);
  _tile_loadd(5, some, 64);
  _tile_loadd(6, some, 64);
  _tile_loadd(7, some, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long i = 0; i < steps; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}
const Peak peaks[] = {{"tdpbssd", 4 * 16 * 16 * 64 * 2.0, chain}, {"dpbusd, 512 bit", 12 * 64 * 2.0, few::chain512}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 2};
}  // namespace int8moe::amx
