// What a kernel is given and what it offers: plain pointers and sizes. Included by ISA files, so no code lives here.
#pragma once

#include <cstdint>

namespace int8moe {

enum DType : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };
enum ActivationKind : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kSwigluOai = 4 };
enum Status : int { kOk = 0, kBadExpertId = 1, kBadMapEntry = 2, kOutOfMemory = 3 };
enum MapKind : int { kMapExp = 0, kMapErf = 1, kMapTanh = 2, kMapBFloat16 = 3, kMapFloat16 = 4 };

constexpr long kTileRows = 16;  // output rows of a packed tile: two vectors of eight
constexpr long kGroup = 4;      // columns of a row that stay together in a tile

// Columns of a packed row and of a row of codes.
static inline long padded_columns(long k) {
  return (k + kGroup - 1) / kGroup * kGroup;
}  // static: shared by no two files

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
  const float *w13_scale, *w2_scale, *w13_bias, *w2_bias;  // canonical order; biases may be null
  int dtype;
  Activation activation;
  bool weight_on_input;
  void* out;  // [tokens, hidden] in dtype
};

// Steps 2 and 5. Row r reads row r / slots_per_row of x, times weight[r] (rounded to dtype) where there are weights.
struct QuantizeArgs {
  const void* x;  // [.., columns] in dtype
  int dtype;
  long columns, slots_per_row;
  const float* weight;  // or null
  int8_t* q;            // [rows, padded_columns(columns)]
  float* scale;         // [rows]
};

// Steps 3, 4 and 6: tiles [tile_begin, tile_end) of one expert times positions [pos_begin, pos_end).
struct GemmArgs {
  const int8_t* q;  // codes, rows of padded_columns(k)
  const float* q_scale;
  const int32_t* row_of;  // row of q at each position; null: the position itself
  const int8_t* w;        // this expert's tiles
  const float* w_scale;   // this expert's, canonical order
  const float* bias;      // likewise, or null
  long k, n;              // n: columns of out
  long tile_begin, tile_end, pos_begin, pos_end;
  float* out;  // [positions, n], rounded to dtype
  int dtype;
  Activation activation;         // gemm1
  const float* position_weight;  // gemm2: router weight of each position, or null
};

// Step 7.
struct CombineArgs {
  const float* y;           // [positions, hidden]
  const int32_t* position;  // [tokens, topk], -1 for a slot that runs elsewhere
  long topk, hidden;
  void* out;  // [tokens, hidden] in dtype
  int dtype;
};

struct KernelFns {
  void (*quantize_rows)(const QuantizeArgs&, long from, long to);
  void (*gemm1)(const GemmArgs&);
  void (*gemm2)(const GemmArgs&);
  void (*combine)(const CombineArgs&, long from, long to);  // tokens
  void (*map)(int kind, const float* in, float* out, long n);
};

// The whole layer. Returns a Status; `bad` is the value that was refused.
int run_layer(const KernelFns& fns, const LayerArgs& args, int threads, long* bad);

}  // namespace int8moe
