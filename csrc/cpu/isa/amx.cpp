// isa/amx.cpp: AMX int8. A tile register holds 16 rows of 64 codes, or 64 columns of a packed tile of weights as they
// lie in memory; tdpbssd multiplies signed by signed, exactly. Blocks of a few rows take the AVX-512 VNNI way.
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::amx {
namespace {

#include "vector_avx2.inl"

constexpr int kTiles = 2;
namespace few {
constexpr int kBlock = 4;  // rows up to which vectors are as fast: memory is the limit, and tile registers idle
#include "dot_vnni512.inl"
#include "rows.inl"
}  // namespace few
constexpr int kBlock = 32;

struct Session {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  Session() {
    const Config config;
    _tile_loadconfig(&config);
  }
  ~Session() { _tile_release(); }
};

// A: blocks of 16 rows (1 or 2), B: tiles of weights. Sums in registers 0 to 3, rows in 4 and 5, weights in 6 and 7.
template <int A, int B>
inline void tiles(const Dot& d) {
  _tile_zero(0);
  if (B > 1) _tile_zero(1);
  if (A > 1) _tile_zero(2);
  if (A > 1 && B > 1) _tile_zero(3);
  const int8_t *w = d.w, *q = d.q, *w2 = d.w + d.tile_bytes, *q2 = d.q + 16 * d.stride;
  alignas(64) int8_t rest[2][1024];
  const long whole = d.groups / 16, left = d.groups % 16;
  if (left) {  // the columns beyond: zero, as the rows of codes are
    for (int b = 0; b < B; ++b) {
      __builtin_memset(rest[b], 0, sizeof rest[b]);
      __builtin_memcpy(rest[b], d.w + b * d.tile_bytes + whole * 1024, left * kTileRows * kGroup);
    }
  }
  for (long k = 0; k < whole + (left != 0); ++k, w += 1024, w2 += 1024, q += 64, q2 += 64) {
    if (k == whole) w = rest[0], w2 = rest[1];
    _tile_loadd(6, w, 64);
    _tile_loadd(4, q, d.stride);
    _tile_dpbssd(0, 4, 6);
    if (B > 1) {
      _tile_loadd(7, w2, 64);
      _tile_dpbssd(1, 4, 7);
    }
    if (A > 1) {
      _tile_loadd(5, q2, d.stride);
      _tile_dpbssd(2, 5, 6);
      if (B > 1) _tile_dpbssd(3, 5, 7);
    }
  }
  const long step = B * kTileRows * 4;
  _tile_stored(0, d.sums, step);
  if (B > 1) _tile_stored(1, d.sums + kTileRows, step);
  if (A > 1) _tile_stored(2, d.sums + 16 * B * kTileRows, step);
  if (A > 1 && B > 1) _tile_stored(3, d.sums + 16 * B * kTileRows + kTileRows, step);
}

void dot(const Dot& d) {
  if (d.rows <= few::kBlock) return few::by_rows(d);
  if (d.rows <= 16) return d.tiles == 2 ? tiles<1, 2>(d) : tiles<1, 1>(d);
  d.tiles == 2 ? tiles<2, 2>(d) : tiles<2, 1>(d);
}

void chain(long steps) {
  const Session session;
  alignas(64) int8_t some[1024];
  __builtin_memset(some, 1, sizeof some);
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
