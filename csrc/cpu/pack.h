// Packed weights: a permutation of canonical rows, zero-padded, and its exact inverse.
#pragma once

#include <cstdint>

namespace int8moe {

// How output rows map to tile rows. Pairs: a tile holds 8 gate rows, then the 8 up rows that belong to them.
enum RowOrder : int { kPlain = 0, kPairsSplit = 1, kPairsInterleaved = 2 };

// Bytes of one packed expert of [n, k].
long packed_bytes(long n, long k, int order);

// `experts` experts of int8 [n, k] to tiles, or back, on at most `threads` threads.
void pack(const int8_t* canonical, int8_t* packed, long experts, long n, long k, int order, int threads);
void unpack(const int8_t* packed, int8_t* canonical, long experts, long n, long k, int order, int threads);

}  // namespace int8moe
