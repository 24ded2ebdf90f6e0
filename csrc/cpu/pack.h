// Packed weights: a permutation of canonical rows, zero-padded, and its exact inverse.
#pragma once

#include <cstdint>

#include "moe.h"

namespace int8moe {

// Asks Linux for 2 MB pages, so that a read of weights does not wait for the address of every 4 KB: when memory is
// touched first, or (`touched`) now, by moving it. A wish: where it is not granted, nothing changes.
void use_large_pages(void* memory, long bytes, bool touched, int threads);

// How output rows map to tile rows. Pairs: a tile holds 8 gate rows, then the 8 up rows that belong to them.
enum RowOrder : int { kPlain = 0, kPairsSplit = 1, kPairsInterleaved = 2 };

// Sizes of one packed expert of [n, k].
struct Packed {
  long tiles, bytes, hints;  // hints: 64-bit words
  Packed(long n, long k, bool pairs)
      : tiles(pairs ? (n / 2 + 7) / 8 : (n + kTileRows - 1) / kTileRows),
        bytes(tiles * kTileRows * padded_columns(k)),
        hints(tiles * hint_words(padded_columns(k) / kGroup)) {}
};

// `experts` experts of int8 [n, k] to tiles, or back, on at most `threads` threads. `to` may be `from` where an expert
// is as large packed as not: then one expert's memory is taken for a while. Returns false when there is none.
bool pack(const int8_t* from, int8_t* to, long experts, long n, long k, int order, int threads);
bool unpack(const int8_t* from, int8_t* to, long experts, long n, long k, int order, int threads);

// The hints of packed experts (KernelFns::hints).
void make_hints(const KernelFns& fns, const int8_t* packed, uint64_t* hints, long experts, long n, long k, int order,
                int threads);

}  // namespace int8moe
