// isa/avx2.cpp: AVX2. s8 x s8 -> s32, exact: with m all ones where w < 0, w * x = |w| * (x ^ m) + (w < 0 ? |w| : 0).
// |w| <= 128 is the unsigned operand of vpmaddubsw and x ^ m in -128..127 the signed one, so a pair of products lies in
// -32768..32512 and does not saturate. The second term is a row's own: sums start with it. An exclusive or runs on any
// of four units, vpsignb on two (Zen 3).
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::avx2 {
namespace {

#include "vector_avx2.inl"

constexpr int kBlock = kRowsAtOnce, kTiles = 1;
constexpr int kSub = 8;      // rows whose sums stay in registers
constexpr int kMany = 4;     // eights of rows from which it pays to take weights apart beforehand
constexpr long kChunk = 64;  // pairs of groups of columns that meet a block's rows at a time: a word of hints

inline __m256i load_codes(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i four_codes(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
inline __m256i get(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void put(int32_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

// Weights as |w| and the mask of those below zero.
struct Weights {
  __m256i size, below;
};
inline Weights weights(__m256i w) { return {_mm256_abs_epi8(w), _mm256_cmpgt_epi8(_mm256_setzero_si256(), w)}; }
inline __m256i products(const Weights& w, __m256i x) {
  return _mm256_maddubs_epi16(w.size, _mm256_xor_si256(x, w.below));
}

// A tile's hints: a bit for each pair of groups, for rows 0 to 7 and for rows 8 to 15, then what each row's sum starts
// with, as int32.
inline const int32_t* starts(const Dot& d) {
  return reinterpret_cast<const int32_t*>(d.hints + d.hint_words) - kTileRows;
}

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
    const Weights w0 = weights(load_codes(tile)), w1 = weights(load_codes(tile + 32));
    for (int t = 0; t < T; ++t) {
      const __m256i x = four_codes(q + t * d.stride);
      low[t] = _mm256_add_epi32(low[t], _mm256_madd_epi16(products(w0, x), ones));
      high[t] = _mm256_add_epi32(high[t], _mm256_madd_epi16(products(w1, x), ones));
    }
  };
  constexpr int kLines = T == 1 ? 4 : 2;
  constexpr long kBytes = kTileRows * kGroup;
  const long part = d.groups / kLines;
  // At the end of its line each looks ahead to its line of the next tile.
  const long early = part > kAheadBytes / kBytes ? part - kAheadBytes / kBytes : 0;
  const long turn = d.next ? d.tile_bytes - part * kBytes : 0;
  const int8_t *tile = d.w, *q = d.q;
  for (long g = 0; g < part; ++g, tile += kBytes, q += kGroup) {
    const int8_t* ahead = tile + kAheadBytes + (g < early ? 0 : turn);
    for (int l = 0; l < kLines; ++l) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + l * part * kBytes), _MM_HINT_T0);
      one_group(tile + l * part * kBytes, q + l * part * kGroup);
    }
  }
  for (long g = kLines * part; g < d.groups; ++g) one_group(d.w + g * kBytes, d.q + g * kGroup);
  // Last, since they come from memory as well.
  const __m256i low_start = get(starts(d)), high_start = get(starts(d) + 8);
  for (int t = 0; t < T; ++t) {
    put(d.sums + t * d.sum_stride, _mm256_add_epi32(low[t], low_start));
    put(d.sums + t * d.sum_stride + 8, _mm256_add_epi32(high[t], high_start));
  }
}

// Where the four weights that meet in an int16 lane sum to at most 256 in size, their products do to -32768 or 32512:
// one widening serves two groups of columns. A hint bit says so of a pair of groups (its eight rows, all lanes).
constexpr int kSafeSum = 256;

// Rows by eights (nearly: of equal size), which meet a tile side by side. Eight codes of each of eight rows are a
// cache line: rows that lie apart, read at the same place of their lines, hold each other up in L1 (1.35 cycles a
// product against 1.26, Zen 3).
inline int subs(int rows) { return (rows + kSub - 1) / kSub; }
inline long panel_bytes(long groups) { return round_up((groups + 1) / 2, 4) * 64; }
inline bool few(bool cold, int rows) { return rows == 1 || (cold && rows <= 4); }

// Four lines of eight rows `stride` apart.
inline void arrange_four(const int8_t* q, long stride, int8_t* out) {
  for (int half = 0; half < 2; ++half, q += 4 * stride, out += 32) {
    const __m256i r0 = load_codes(q), r1 = load_codes(q + stride), r2 = load_codes(q + 2 * stride);
    const __m256i r3 = load_codes(q + 3 * stride);
    const __m256i a = _mm256_unpacklo_epi64(r0, r1), b = _mm256_unpackhi_epi64(r0, r1);
    const __m256i c = _mm256_unpacklo_epi64(r2, r3), d = _mm256_unpackhi_epi64(r2, r3);
    put(reinterpret_cast<int32_t*>(out), _mm256_permute2x128_si256(a, c, 0x20));
    put(reinterpret_cast<int32_t*>(out + 64), _mm256_permute2x128_si256(b, d, 0x20));
    put(reinterpret_cast<int32_t*>(out + 128), _mm256_permute2x128_si256(a, c, 0x31));
    put(reinterpret_cast<int32_t*>(out + 192), _mm256_permute2x128_si256(b, d, 0x31));
  }
}

struct Session {
  explicit Session(const Codes& c) {
    static_assert(kBlock == kRowsAtOnce, "one block a session");
    if (few(c.cold, c.rows)) return;
    const int count = subs(c.rows);
    const long bytes = panel_bytes(c.groups);
    for (int s = 0; s < count; ++s) {
      const int8_t* q = c.q + c.rows * s / count * c.stride;
      int8_t* out = c.scratch + s * bytes;
      for (long at = 0; at < bytes; at += 256) arrange_four(q + at / 8, c.stride, out + at);
    }
  }
};

// Weights of half a chunk, taken apart once for many rows. A pair that is not safe leaves its second group to the end.
struct Apart {
  Weights pair[kChunk][2];
};

// A chunk of half a tile.
struct Chunk {
  const int8_t* w;
  long pairs;
  bool odd;  // a group follows the pairs
  uint64_t safe;
  const int8_t* ahead;  // weights to fetch meanwhile, `step` bytes a pair
  long step;
  uint64_t other() const { return pairs ? ~0ull >> (64 - pairs) & ~safe : 0; }
};

inline void take_apart(const Chunk& c, Apart& out) {
  for (long i = 0; i < c.pairs; ++i) {
    const __m256i keep = _mm256_set1_epi8((int8_t)-(int)(c.safe >> i & 1));
    out.pair[i][0] = weights(load_codes(c.w + 128 * i));
    out.pair[i][1] = weights(_mm256_and_si256(load_codes(c.w + 128 * i + 64), keep));
  }
}

template <int T, bool kApart>
inline void multiply(const Chunk& c, const Apart& apart, const int8_t* panel, int32_t* sums, long sum_stride) {
  __m256i acc[T];
  for (int t = 0; t < T; ++t) acc[t] = get(sums + t * sum_stride);
  const __m256i ones = _mm256_set1_epi16(1);
  auto add_pair = [&](long i, const Weights& a, const Weights& b) {
    _mm_prefetch(reinterpret_cast<const char*>(c.ahead + c.step * i), _MM_HINT_T1);
    const int8_t* x = panel + 64 * i;
    for (int t = 0; t < T; ++t) {
      const __m256i p = _mm256_add_epi16(products(a, four_codes(x + 8 * t)), products(b, four_codes(x + 8 * t + 4)));
      acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
    }
  };
  auto add_group = [&](long g) {
    const Weights w = weights(load_codes(c.w + 64 * g));
    const int8_t* x = panel + g / 2 * 64 + g % 2 * 4;
    for (int t = 0; t < T; ++t) {
      const __m256i p = products(w, four_codes(x + 8 * t));
      acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(p, ones));
    }
  };
  if (kApart) {
    for (long i = 0; i < c.pairs; ++i) add_pair(i, apart.pair[i][0], apart.pair[i][1]);
  } else {
    for (uint64_t safe = c.safe; safe; safe &= safe - 1) {
      const long i = __builtin_ctzll(safe);
      add_pair(i, weights(load_codes(c.w + 128 * i)), weights(load_codes(c.w + 128 * i + 64)));
    }
  }
  for (uint64_t other = c.other(); other; other &= other - 1) {
    const long i = __builtin_ctzll(other);
    if (!kApart) add_group(2 * i);
    add_group(2 * i + 1);
  }
  if (c.odd) add_group(2 * c.pairs);
  for (int t = 0; t < T; ++t) put(sums + t * sum_stride, acc[t]);
}

template <bool kApart, int T = kSub>
inline void multiply_rows(int rows, const Chunk& c, const Apart& apart, const int8_t* panel, int32_t* sums,
                          long sum_stride) {
  if (rows == T) return multiply<T, kApart>(c, apart, panel, sums, sum_stride);
  if constexpr (T > 1) multiply_rows<kApart, T - 1>(rows, c, apart, panel, sums, sum_stride);
}

// A chunk of the tile's weights (8 KB) stays in L1 while all rows pass; sums are kept between chunks. The first rows
// fetch the next tile.
inline void dot_chunks(const Dot& d) {
  const long pairs = d.groups / 2, words = (pairs + kChunk - 1) / kChunk;
  const int count = subs(d.rows);
  for (int r = 0; r < d.rows; ++r) {
    put(d.sums + r * d.sum_stride, get(starts(d)));
    put(d.sums + r * d.sum_stride + 8, get(starts(d) + 8));
  }
  long word = 0;
  do {
    const int8_t* w = d.w + word * kChunk * 128;
    Chunk c;
    c.pairs = pairs - kChunk * word < kChunk ? pairs - kChunk * word : kChunk;
    c.odd = (d.groups & 1) && word + 1 >= words;
    Apart apart;
    for (int half = 0; half < 2; ++half) {
      c.w = w + 32 * half;
      c.safe = words ? d.hints[half * words + word] : 0;
      const bool many = count >= kMany;
      if (many) take_apart(c, apart);
      for (int s = 0; s < count; ++s) {
        const int from = d.rows * s / count, rows = d.rows * (s + 1) / count - from;
        const int8_t* panel = d.scratch + s * panel_bytes(d.groups) + word * kChunk * 64;
        int32_t* sums = d.sums + from * d.sum_stride + 8 * half;
        // The first rows of each half fetch half of the next tile's chunk.
        const bool fetch = d.next && s == 0;
        c.ahead = fetch ? w + d.tile_bytes + half * c.pairs * 64 : w;
        c.step = fetch ? 64 : 0;
        many ? multiply_rows<true>(rows, c, apart, panel, sums, d.sum_stride)
             : multiply_rows<false>(rows, c, apart, panel, sums, d.sum_stride);
      }
    }
  } while (++word < words);
}

void dot(const Dot& d) {
  // The hints of the next tile; asking for what is not there does no harm.
  for (long at = 0; at < d.hint_words; at += 8)
    _mm_prefetch(reinterpret_cast<const char*>(d.hints + d.hint_words + at), _MM_HINT_T0);
  if (!few(d.cold, d.rows)) return dot_chunks(d);
  if (d.rows == 1) return dot_once<1>(d);
  if (d.rows == 2) return dot_once<2>(d);
  if (d.rows == 3) return dot_once<3>(d);
  dot_once<4>(d);
}

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
    // Sizes below zero, summed by row.
    __m256i start = _mm256_setzero_si256();
    for (long g = 0; g < groups; ++g) {
      const Weights w = weights(load_codes(tile + 64 * g + 32 * half));
      const __m256i pair = _mm256_maddubs_epi16(_mm256_and_si256(w.size, w.below), ones);
      start = _mm256_add_epi32(start, _mm256_madd_epi16(pair, _mm256_set1_epi16(1)));
    }
    put(reinterpret_cast<int32_t*>(out + 2 * words) + 8 * half, start);
  }
}

#define CHAIN(name, body)                                                                       \
  void name(long steps) {                                                                       \
    const __m256i ones = _mm256_set1_epi16(1);                                                  \
    __m256i acc[10], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-2);                         \
    _Pragma("GCC unroll 10") for (int k = 0; k < 10; ++k) acc[k] = _mm256_setzero_si256();      \
    for (long i = 0; i < steps; ++i) {                                                          \
      _Pragma("GCC unroll 10") for (int k = 0; k < 10; ++k) {                                   \
        __asm__ volatile("" : "+x"(w), "+x"(x));                                                \
        acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(body, ones));                       \
      }                                                                                         \
    }                                                                                           \
    _Pragma("GCC unroll 10") for (int k = 0; k < 10; ++k) __asm__ volatile("" : : "x"(acc[k])); \
  }
CHAIN(by_sign, _mm256_maddubs_epi16(w, _mm256_sign_epi8(x, w)))
CHAIN(one_group, products(Weights{w, w}, x))
CHAIN(two_groups, _mm256_add_epi16(products(Weights{w, w}, x), products(Weights{w, x}, acc[(k + 5) % 10])))
#undef CHAIN
// by_sign is not the form of `products` any more: kept, since records give rates beside it.
const Peak peaks[] = {{"sign, maddubs, madd, add", 10 * 32 * 2.0, by_sign},
                      {"xor, maddubs, madd, add", 10 * 32 * 2.0, one_group},
                      {"xor, maddubs (twice), add, madd, add", 10 * 64 * 2.0, two_groups}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, hints, peaks, 3, 0, true};
}  // namespace int8moe::avx2
