// One block of the integer part of a GEMM. Included by ISA files, so no code lives here.
#pragma once

#include "moe.h"

namespace int8moe {

// The rows of codes of a block, which meet one tile after another.
struct Codes {
  const int8_t* q;  // as in Dot
  long stride, groups;
  int rows;
  bool cold;        // the first to meet the tiles
  int8_t* scratch;  // kRowsAtOnce rows, where the kernel asked for them (KernelFns::scratch)
};

struct Dot {
  const int8_t* w;  // the first tile; the others follow, tile_bytes apart
  long tile_bytes, groups;
  bool cold, next;      // the tiles come from memory; so will those that follow them: fetch them
  const int8_t* ahead;  // what follows the tiles in memory: this block's part of it to fetch, ahead_bytes
  long ahead_bytes;
  const uint64_t* hints;  // the first tile's words, or null; the others' follow, hint_words apart
  long hint_words;
  const int8_t* q;  // rows of codes, stride apart; zero beyond the columns
  long stride;
  const int32_t* q_sum;  // of each row
  int rows, tiles;       // at least one
  int most_rows;         // of the session's blocks
  int8_t* scratch;       // as the session left it
  int32_t* sums;         // [rows][tiles][kTileRows], rows sum_stride apart; 16 rows more may be written
  long sum_stride;
};

}  // namespace int8moe
