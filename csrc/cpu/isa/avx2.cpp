// isa/avx2.cpp: AVX2. s8 x s8 -> s32, exact: w * x = |w| * (x with w's sign). |w| <= 128 is the unsigned operand of
// vpmaddubsw and x in -127..127 the signed one, so a pair of products lies in -32512..32512 and does not saturate.
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::avx2 {
namespace {

#include "vector_avx2.inl"

constexpr int kBlock = 8, kTiles = 1;
struct Session {
  explicit Session(int) {}
};

inline __m256i load_codes(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i four_codes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
inline __m256i products(__m256i w_abs, __m256i w, __m256i x) {
  return _mm256_maddubs_epi16(w_abs, _mm256_sign_epi8(x, w));
}
inline void put(int32_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

// Few rows: memory is the limit. A tile is read once, as two or four straight lines side by side (parts of its
// columns), a little ahead by hand: that keeps more reads in flight than the processor's prefetchers do on one line.
// 2 threads of a 2-core Zen 3: 14 GB/s with one line, 19 with four; with three rows 11 and 15 (two lines).
constexpr long kAheadBytes = 256;

template <int T>
inline void dot_once(const Dot& d) {
  __m256i low[T], high[T];
  for (int t = 0; t < T; ++t) low[t] = high[t] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  auto one_group = [&](const int8_t* tile, const int8_t* q) {
    const __m256i w0 = load_codes(tile), w1 = load_codes(tile + 32);
    const __m256i u0 = _mm256_abs_epi8(w0), u1 = _mm256_abs_epi8(w1);
    for (int t = 0; t < T; ++t) {
      const __m256i x = four_codes(q + t * d.stride);
      low[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(products(u0, w0, x), ones));
      high[t] = _mm256_add_epi32(high[t], _mm256_madd_epi16(products(u1, w1, x), ones));
    }
  };
  constexpr int kLines = T == 1 ? 4 : 2;
  const long part = d.groups / kLines;
  const int8_t *tile = d.w, *q = d.q;
  for (long g = 0; g < part; ++g, tile += kTileRows * kGroup, q += kGroup) {
    for (int l = 0; l < kLines; ++l) {
      const int8_t* here = tile + l * part * (kTileRows * kGroup);
      _mm_prefetch(reinterpret_cast<const char*>(here + kAheadBytes), _MM_HINT_T0);
      one_group(here, q + l * part * kGroup);
    }
  }
  for (long g = kLines * part; g < d.groups; ++g) one_group(d.w + g * (kTileRows * kGroup), d.q + g * kGroup);
  for (int t = 0; t < T; ++t) put(d.sums + t * d.sum_stride, low[t]), put(d.sums + t * d.sum_stride + 8, high[t]);
}

// Where the four weights that meet in an int16 lane sum to at most 258 in size, their products do to 32766: one
// widening serves two groups of columns. A hint bit says so of a pair of groups (its eight rows, all lanes).
constexpr int kSafeSum = 258;

// Many rows: half a tile at a time, so that eight rows of sums stay in registers.
template <int T>
inline void dot_half(const Dot& d, int half) {
  __m256i acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  const long pairs = d.groups / 2, words = d.hint_words / 2;
  const int8_t *w = d.w + 32 * half, *q = d.q;
  // Each half fetches half of the next tile while it multiplies.
  const int8_t* next = d.w + (d.next ? d.tile_bytes + half * (pairs * 64) : 0);
  for (long word = 0; word < words; ++word, w += 64 * 128, q += 64 * 8, next += 64 * 64) {
    const long here = pairs - 64 * word < 64 ? pairs - 64 * word : 64;
    const uint64_t all = ~0ull >> (64 - here);
    uint64_t safe = d.hints[half * words + word];
    uint64_t other = all & ~safe;
    for (; safe; safe &= safe - 1) {
      const long i = __builtin_ctzll(safe);
      const __m256i wa = load_codes(w + 128 * i), wb = load_codes(w + 128 * i + 64);
      const __m256i ua = _mm256_abs_epi8(wa), ub = _mm256_abs_epi8(wb);
      _mm_prefetch(reinterpret_cast<const char*>(next + 64 * i), _MM_HINT_T1);
      for (int t = 0; t < T; ++t) {
        const int8_t* x = q + t * d.stride + 8 * i;
        const __m256i p = _mm256_add_epi16(products(ua, wa, four_codes(x)), products(ub, wb, four_codes(x + 4)));
        acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
      }
    }
    for (; other; other &= other - 1) {
      const long i = __builtin_ctzll(other);
      for (int ab = 0; ab < 2; ++ab) {
        const __m256i wv = load_codes(w + 128 * i + 64 * ab), u = _mm256_abs_epi8(wv);
        for (int t = 0; t < T; ++t) {
          const __m256i p = products(u, wv, four_codes(q + t * d.stride + 8 * i + 4 * ab));
          acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
        }
      }
    }
  }
  if (d.groups & 1) {
    const long g = d.groups - 1;
    const __m256i wv = load_codes(d.w + 32 * half + 64 * g), u = _mm256_abs_epi8(wv);
    for (int t = 0; t < T; ++t) {
      const __m256i p = products(u, wv, four_codes(d.q + t * d.stride + 4 * g));
      acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
    }
  }
  for (int t = 0; t < T; ++t) put(d.sums + t * d.sum_stride + 8 * half, acc[t]);
}

template <int T>
inline void dot_rows(const Dot& d) {
  if (T == 1 || (T <= 4 && d.cold)) return dot_once<T>(d);
  dot_half<T>(d, 0);
  dot_half<T>(d, 1);
}

#include "rows.inl"
void dot(const Dot& d) { by_rows(d); }

void hints(const int8_t* tile, long groups, uint64_t* out) {
  const long pairs = groups / 2, words = (pairs + 63) / 64;
  const __m256i ones = _mm256_set1_epi8(1), most = _mm256_set1_epi16(kSafeSum);
  for (int half = 0; half < 2; ++half) {
    for (long p = 0; p < 64 * words; ++p) {
      uint64_t& word = out[half * words + p / 64];
      if (p % 64 == 0) word = 0;
      if (p >= pairs) continue;
      const __m256i a = _mm256_abs_epi8(load_codes(tile + 128 * p + 32 * half));
      const __m256i b = _mm256_abs_epi8(load_codes(tile + 128 * p + 32 * half + 64));
      const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(a, ones), _mm256_maddubs_epi16(b, ones));
      const __m256i over = _mm256_cmpgt_epi16(sum, most);
      word |= (uint64_t)_mm256_testz_si256(over, over) << (p % 64);
    }
  }
}

#define CHAIN(name, body)                                                 \
  void name(long steps) {                                                 \
    const __m256i ones = _mm256_set1_epi16(1);                            \
    __m256i acc[12], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-2);   \
    for (int k = 0; k < 12; ++k) acc[k] = _mm256_setzero_si256();         \
    for (long i = 0; i < steps; ++i) {                                    \
      _Pragma("GCC unroll 12") for (int k = 0; k < 12; ++k) {             \
        __asm__ volatile("" : "+x"(w), "+x"(x));                          \
        acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(body, ones)); \
      }                                                                   \
    }                                                                     \
    for (int k = 0; k < 12; ++k) __asm__ volatile("" : : "x"(acc[k]));    \
  }
CHAIN(one_group, products(w, w, x))
CHAIN(two_groups, _mm256_add_epi16(products(w, w, x), products(x, x, w)))
#undef CHAIN
const Peak peaks[] = {{"sign, maddubs, madd, add", 12 * 32 * 2.0, one_group},
                      {"sign, maddubs (twice), add, madd, add", 12 * 64 * 2.0, two_groups}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, hints, peaks, 2};
}  // namespace int8moe::avx2
