// What a kernel is given and what it offers: plain pointers and sizes. Included by ISA files, so nothing inline lives here.
#pragma once

#include <cstdint>

namespace int8moe {

enum class DType : int32_t { bfloat16, float16, float32 };
enum class Activation : int32_t { silu, gelu, gelu_tanh, relu2, swigluoai };
enum class Function : int32_t { exp, erf, tanh, round_bfloat16, round_float16 };

// int32 values that stand behind each panel, one per packed row, and start its sums.
enum class Tail : int32_t {
  none,          // no tail
  negative_sum,  // sum of |w| over the row's negative weights
};

// How an ISA wants weights packed: panels of two vectors of `lanes` rows; `k_group` consecutive columns of a row stay together.
struct Geometry {
  int32_t lanes;
  int32_t k_group;
  Tail tail;
};

constexpr int64_t kCodesAlign = 64;  // activation code rows are zero-padded to this many bytes
constexpr int32_t kTileRows = 64;    // most activation rows in one tile

// One packed weight tensor [experts][panels][panel_bytes] with its scales and biases in packed row order.
struct Gemm {
  const int8_t* weight;
  const float* scale;  // [experts][panels * 2 * lanes]
  const float* bias;   // the same, or null
  int64_t panels;
  int64_t panel_bytes;
  int64_t k_groups;
};

// A share of one GEMM: some panels of one expert times some of its rows.
struct Tile {
  int32_t expert;
  int32_t panel, panels;
  int32_t row, rows;  // positions in `slots`
};

// One layer call. A slot is (token, k): token * topk + k. Rows are the slots that run here, sorted by expert.
struct Call {
  Gemm gemm1, gemm2;
  DType dtype;
  Activation activation;
  bool gated;
  bool weight_on_input;
  float alpha, limit;  // limit is infinity when there is none
  int64_t topk, hidden, intermediate;
  const void* hidden_states;  // [tokens, hidden]
  const float* topk_weights;  // [tokens, topk]
  void* output;               // [tokens, hidden]
  const int32_t* local;       // [tokens * topk] local expert, or -1
  const int32_t* slots;       // [rows]

  int8_t* x_codes;  // [tokens, x_stride], or [rows, x_stride] with weight_on_input
  float* x_scale;
  int64_t x_stride;
  void* h;  // [rows, h_stride] in dtype
  int64_t h_stride;
  int8_t* h_codes;  // [rows, h_codes_stride]
  float* h_scale;
  int64_t h_codes_stride;
  void* y;  // [tokens * topk, y_stride] in dtype
  int64_t y_stride;
};

struct KernelFns {
  Geometry geometry;
  void (*quantize_input)(const Call&, int64_t begin, int64_t end);   // tokens, or rows with weight_on_input
  void (*gemm1)(const Call&, const Tile&);                           // x_codes to h
  void (*quantize_hidden)(const Call&, int64_t begin, int64_t end);  // rows of h
  void (*gemm2)(const Call&, const Tile&);                           // h_codes to y
  void (*combine)(const Call&, int64_t begin, int64_t end);          // tokens
  void (*apply)(Function, const float* in, float* out, int64_t n);   // for tests
};

}  // namespace int8moe
