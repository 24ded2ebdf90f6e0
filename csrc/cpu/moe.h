// What a kernel is given and what it offers: plain pointers and sizes. Included by ISA files, so no code lives here.
#pragma once

#include <cstdint>

namespace int8moe {

enum DType : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };
enum ActivationKind : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kSwigluOai = 4 };
enum Status : int { kOk = 0, kBadExpertId = 1, kBadMapEntry = 2, kOutOfMemory = 3 };
enum MapKind : int { kMapExp = 0, kMapErf = 1, kMapTanh = 2, kMapBFloat16 = 3, kMapFloat16 = 4 };

constexpr long kTileRows = 16;  // output rows of a packed tile
constexpr long kGroup = 4;      // columns of a row that stay together in a tile

// Rows of codes that meet a task's tiles before the next rows do: they stay in L2.
constexpr long kRowsAtOnce = 64;

// Static: no two files share these.
static inline long round_up(long n, long to) { return (n + to - 1) / to * to; }
// Columns of a packed row of weights.
static inline long padded_columns(long k) { return round_up(k, kGroup); }
// Bytes from one row of codes to the next: zero-padded to whole cache lines, and an odd number of them, so that the
// rows of a block do not fall into the same few sets of a cache.
static inline long code_stride(long k) { return round_up(k, 64) | 64; }
// As many rows as `bytes` hold, where a kernel says more than kRowsAtOnce.
static inline long rows_at_once(long bytes, long k) {
  const long rows = bytes / code_stride(k) / kRowsAtOnce * kRowsAtOnce;
  return rows > kRowsAtOnce ? rows : kRowsAtOnce;
}
// Codes that a kernel may read, and not use, beyond the last row.
constexpr long kSpareRows = 32;

struct Activation {
  int kind;
  bool gated, interleaved, has_limit;
  float alpha, limit;
};

// One layer call (bind.cpp fills it; Python has checked shapes and dtypes).
struct LayerArgs {
  const void* hidden_states;  // [tokens, hidden] in dtype
  const float* topk_weights;  // [tokens, topk]
  const void* topk_ids;       // [tokens, topk]
  bool ids_are_int64;
  const int32_t* expert_map;  // [num_experts], or null
  long tokens, topk, num_experts, local_experts, hidden, intermediate;
  const int8_t *w13, *w2;                                  // packed
  const uint64_t *w13_hints, *w2_hints;                    // of each tile, or null
  const float *w13_scale, *w2_scale, *w13_bias, *w2_bias;  // canonical order; biases may be null
  int dtype;
  Activation activation;
  bool weight_on_input;
  void* out;  // [tokens, hidden] in dtype
};

// Steps 2 and 5, one row, times `weight` (rounded to dtype) where there is one.
struct QuantizeArgs {
  const void* x;  // [columns] in dtype
  int dtype;
  long columns;
  const float* weight;  // or null
  int8_t* q;            // [code_stride(columns)]
  float* scale;
  int32_t* sum;  // of the codes
};

// Steps 3, 4 and 6: tiles [tile_begin, tile_end) of one expert times positions [pos_begin, pos_end).
struct GemmArgs {
  const int8_t* q;  // codes of each position, code_stride(k) apart
  const float* q_scale;
  const int32_t* q_sum;
  const int8_t* w;        // this expert's tiles
  const uint64_t* hints;  // this expert's, from KernelFns::hints; or null
  const float* w_scale;   // this expert's, canonical order
  const float* bias;      // likewise, or null
  long k, n;              // n: columns of out
  long tile_begin, tile_end, pos_begin, pos_end, rows_at_once;
  int8_t* scratch;  // this worker's, or null
  void* out;        // [positions, n] in dtype
  int dtype;
  Activation activation;         // gemm1
  const float* position_weight;  // gemm2: router weight of each position, or null
  bool non_temporal;             // gemm2: out is bfloat16, more than caches keep, and its rows are whole cache lines
};

// Step 7.
struct CombineArgs {
  const void* y;            // [positions, hidden] in dtype
  const int32_t* position;  // [tokens, topk], -1 for a slot that runs elsewhere
  long topk, hidden;
  void* out;  // [tokens, hidden] in dtype
  int dtype;
};

// A chain of instructions that multiplies int8 codes in registers, for the speed that no kernel can pass.
struct Peak {
  const char* name;
  double operations;  // of one step; a multiply-add is two
  void (*run)(long steps);
};

struct KernelFns {
  void (*quantize_row)(const QuantizeArgs&);
  void (*gemm1)(const GemmArgs&);
  void (*gemm2)(const GemmArgs&);
  void (*combine)(const CombineArgs&, long from, long to);  // tokens
  void (*map)(int kind, const float* in, float* out, long n);
  // Bits about a packed tile that save work when it meets rows: hint_words(groups) words. Null where none are used.
  void (*hints)(const int8_t* tile, long groups, uint64_t* out);
  const Peak* peaks;
  int peak_count;
  // Codes of rows that meet a task's tiles before the next rows do, so that weights are read once; 0: kRowsAtOnce rows.
  long code_bytes = 0;
  // Wants memory for kRowsAtOnce rows of codes a worker.
  bool scratch = false;
};

// 64-bit words of hints of a tile: bits of pairs of groups for each half of its rows, and an int32 a row.
static inline long hint_words(long groups) { return 2 * ((groups / 2 + 63) / 64) + kTileRows / 2; }

// The whole layer. Returns a Status; `bad` is the value that was refused.
int run_layer(const KernelFns& fns, const LayerArgs& args, int threads, long* bad);

}  // namespace int8moe
