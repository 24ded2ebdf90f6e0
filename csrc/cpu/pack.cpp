#include "pack.h"

#include <cstring>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "threads.h"

namespace int8moe {

namespace {

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

constexpr long kGroupBytes = kTileRows * kGroup;

// One tile of the expert at `in`.
void pack_tile(const int8_t* in, int8_t* out, long tile, long n, long k, int order) {
  const long whole = k / kGroup, left = k % kGroup;
  for (int c = 0; c < kTileRows; ++c) {
    const long row = canonical_row(tile, c, n, order);
    int8_t* to = out + c * kGroup;
    if (row < 0) {
      for (long g = 0; g < whole + (left != 0); ++g) std::memset(to + g * kGroupBytes, 0, kGroup);
      continue;
    }
    const int8_t* from = in + row * k;
    for (long g = 0; g < whole; ++g) std::memcpy(to + g * kGroupBytes, from + g * kGroup, kGroup);
    if (left) {
      std::memset(to + whole * kGroupBytes, 0, kGroup);
      std::memcpy(to + whole * kGroupBytes, from + whole * kGroup, left);
    }
  }
}

void unpack_tile(const int8_t* in, int8_t* out, long tile, long n, long k, int order) {
  const long whole = k / kGroup, left = k % kGroup;
  for (int c = 0; c < kTileRows; ++c) {
    const long row = canonical_row(tile, c, n, order);
    if (row < 0) continue;
    const int8_t* from = in + c * kGroup;
    int8_t* to = out + row * k;
    for (long g = 0; g < whole; ++g) std::memcpy(to + g * kGroup, from + g * kGroupBytes, kGroup);
    if (left) std::memcpy(to + whole * kGroup, from + whole * kGroupBytes, left);
  }
}

// Both ways: `one(expert's source, expert's result, tile)` for every tile. In place, an expert goes through a copy.
template <class One>
bool each_tile(const int8_t* from, int8_t* to, long experts, long tiles, long from_bytes, long to_bytes, int threads,
               const One& one) {
  if (from != to) {
    parallel_for(threads, experts * tiles, [&](long i) {
      const long e = i / tiles;
      one(from + e * from_bytes, to + e * to_bytes, i % tiles);
    });
    return true;
  }
  const std::unique_ptr<int8_t[]> copy(new (std::nothrow) int8_t[from_bytes]);
  if (!copy) return false;
  constexpr long kPiece = 1 << 20;
  for (long e = 0; e < experts; ++e) {
    int8_t* at = to + e * to_bytes;
    parallel_for(threads, (from_bytes + kPiece - 1) / kPiece, [&](long i) {
      const long begin = i * kPiece, size = from_bytes - begin < kPiece ? from_bytes - begin : kPiece;
      std::memcpy(copy.get() + begin, at + begin, size);
    });
    parallel_for(threads, tiles, [&](long i) { one(copy.get(), at, i); });
  }
  return true;
}

}  // namespace

void use_large_pages(void* memory, long bytes, bool touched, int threads) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20, kPiece = 16 * kPage;
#ifdef MADV_COLLAPSE
  constexpr int kCollapse = MADV_COLLAPSE;
#else
  constexpr int kCollapse = 25;  // Linux 6.1
#endif
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (end <= begin || madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) || !touched) return;
  parallel_for(threads, (end - begin + kPiece - 1) / kPiece, [&](long i) {
    const uintptr_t at = begin + i * kPiece, size = end - at < kPiece ? end - at : kPiece;
    madvise(reinterpret_cast<void*>(at), size, kCollapse);
  });
#endif
}

bool pack(const int8_t* from, int8_t* to, long experts, long n, long k, int order, int threads) {
  const Packed packed(n, k, order != kPlain);
  const long tile_bytes = kTileRows * padded_columns(k);
  if (from != to) use_large_pages(to, experts * packed.bytes, false, threads);
  const bool done = each_tile(
      from, to, experts, packed.tiles, n * k, packed.bytes, threads,
      [&](const int8_t* in, int8_t* out, long tile) { pack_tile(in, out + tile * tile_bytes, tile, n, k, order); });
  if (from == to) use_large_pages(to, experts * packed.bytes, true, threads);
  return done;
}

bool unpack(const int8_t* from, int8_t* to, long experts, long n, long k, int order, int threads) {
  const Packed packed(n, k, order != kPlain);
  const long tile_bytes = kTileRows * padded_columns(k);
  return each_tile(
      from, to, experts, packed.tiles, packed.bytes, n * k, threads,
      [&](const int8_t* in, int8_t* out, long tile) { unpack_tile(in + tile * tile_bytes, out, tile, n, k, order); });
}

void make_hints(const KernelFns& fns, const int8_t* packed, uint64_t* hints, long experts, long n, long k, int order,
                int threads) {
  const Packed size(n, k, order != kPlain);
  const long groups = padded_columns(k) / kGroup, words = hint_words(groups);
  parallel_for(threads, experts * size.tiles,
               [&](long i) { fns.hints(packed + i * groups * kGroupBytes, groups, hints + i * words); });
}

}  // namespace int8moe
