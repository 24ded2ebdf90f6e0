// The algorithm of docs/numerics.md, once, over an ISA file's primitives. Included inside that file's own namespace.
//
// The includer defines, in an anonymous namespace:
//   kLanes                       float lanes of a vector; VF, VI, VH: vectors of that many float, int32 and uint16
//   kGroup, kTail, kBlock        columns a group holds, the panels' tail, most activation rows of one dot_panel
//   dot_panel<T>(panel, groups, x, prefetch, acc)   int32 sums of two vectors of weight rows with T rows of codes, exact
//   to_bf16, from_bf16, to_f16, from_f16            VF <-> VH, round to nearest even, NaN stays NaN
//   store_codes(p, v)            kLanes whole numbers of -127..127 as int8
//   max_lane(v)                  largest lane of a VI
// Float steps use GCC's vector types: add, subtract, multiply and divide mean the same bits under every ISA.

namespace {

namespace nm = ::int8moe::numerics;

template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
inline VF splat(float x) {
  VF v;
  for (int i = 0; i < kLanes; ++i) v[i] = x;
  return v;
}
inline VF to_float(VI v) { return __builtin_convertvector(v, VF); }
inline VI bits(VF v) { return (VI)v; }

// Elements of hidden_states, h, y and output.
template <DType D>
struct Io;
template <>
struct Io<DType::bfloat16> {
  using T = uint16_t;
  static VF get(const T* p) { return from_bf16(load<VH>(p)); }
  static void put(T* p, VF v) { store(p, to_bf16(v)); }
  static VF round(VF v) { return from_bf16(to_bf16(v)); }
};
template <>
struct Io<DType::float16> {
  using T = uint16_t;
  static VF get(const T* p) { return from_f16(load<VH>(p)); }
  static void put(T* p, VF v) { store(p, to_f16(v)); }
  static VF round(VF v) { return from_f16(to_f16(v)); }
};
template <>
struct Io<DType::float32> {
  using T = float;
  static VF get(const T* p) { return load<VF>(p); }
  static void put(T* p, VF v) { store(p, v); }
  static VF round(VF v) { return v; }
};

// ---- Step 4: the activation -------------------------------------------------------------------------------------------

inline VF rint(VF v) { return (v + nm::kRintMagic) - nm::kRintMagic; }

inline VF exp(VF x) {
  x = x < nm::kExpLow ? splat(nm::kExpLow) : x;
  x = x > nm::kExpHigh ? splat(nm::kExpHigh) : x;
  const VF n = rint(x * nm::kLog2e);
  const VF r = (x - n * nm::kLn2High) - n * nm::kLn2Low;
  VF p = splat(nm::kExpPolynomial[0]);
  for (int i = 1; i < 6; ++i) p = p * r + nm::kExpPolynomial[i];
  const VF y = (p * (r * r) + r) + 1.0f;
  return y * (VF)((__builtin_convertvector(n, VI) + 127) << 23);
}

inline VF tanh(VF z) { return 1.0f - 2.0f / (exp(z * 2.0f) + 1.0f); }

inline VF erf(VF x) {
  const VF a = (VF)(bits(x) & 0x7fffffff);
  const VF t = 1.0f / (a * nm::kErfP + 1.0f);
  VF p = splat(nm::kErfPolynomial[0]);
  for (int i = 1; i < 5; ++i) p = p * t + nm::kErfPolynomial[i];
  const VF y = 1.0f - (p * t) * exp(-(a * a));
  return x < 0.0f ? -y : y;
}

inline VF activate_gate(const Call& c, VF g) {
  switch (c.activation) {
    case Activation::silu:
      return g / (exp(-g) + 1.0f);
    case Activation::gelu:
      return (g * 0.5f) * (erf(g * nm::kSqrtHalf) + 1.0f);
    case Activation::gelu_tanh:
      return (g * 0.5f) * (tanh((g + ((g * g) * g) * nm::kGeluTanhCubic) * nm::kGeluTanhScale) + 1.0f);
    case Activation::relu2: {
      const VF p = g < 0.0f ? splat(0.0f) : g;
      return p * p;
    }
    case Activation::swigluoai:
      return g / (exp(-(g * c.alpha)) + 1.0f);
  }
  return g;
}

inline VF clamp_gate(const Call& c, VF g) { return g > c.limit ? splat(c.limit) : g; }
inline VF clamp_up(const Call& c, VF u) { return u > c.limit ? splat(c.limit) : (u < -c.limit ? splat(-c.limit) : u); }

// ---- Steps 2 and 5: one row to int8 codes ------------------------------------------------------------------------------

// `get(j)` is the vector of columns j .. j + kLanes - 1, zero beyond the row.
template <class Get>
inline void quantize_row(const Get& get, int64_t columns, int8_t* codes, int64_t stride, float* scale) {
  // As integers, |x| sorts like the numbers do, with infinity and then NaN above them all.
  VI most = {};
  for (int64_t j = 0; j < columns; j += kLanes) {
    const VI v = bits(get(j)) & 0x7fffffff;
    most = v > most ? v : most;
  }
  const int32_t amax_bits = max_lane(most);
  if (amax_bits >= 0x7f800000) {
    __builtin_memset(codes, 0, stride);
    *scale = __builtin_nanf("");
    return;
  }
  float a;
  __builtin_memcpy(&a, &amax_bits, sizeof a);
  if (a < nm::kAmaxFloor) a = nm::kAmaxFloor;
  *scale = a / nm::kInt8Max;
  const float inv = nm::kInt8Max / a;
  int64_t j = 0;
  for (; j < columns; j += kLanes) {
    VF q = rint(get(j) * inv);
    q = q > nm::kInt8Max ? splat(nm::kInt8Max) : q;
    q = q < -nm::kInt8Max ? splat(-nm::kInt8Max) : q;
    store_codes(codes + j, q);
  }
  if (j < stride) __builtin_memset(codes + j, 0, stride - j);
}

// The last columns of a row that does not fill its vector, in a zeroed copy.
template <DType D>
struct Row {
  using T = typename Io<D>::T;
  Row(const T* row, int64_t columns) : row(row), full(columns - columns % kLanes) {
    __builtin_memset(last, 0, sizeof last);
    __builtin_memcpy(last, row + full, (columns - full) * sizeof(T));
  }
  VF operator()(int64_t j) const { return Io<D>::get(j < full ? row + j : last); }
  const T* row;
  int64_t full;
  T last[kLanes];
};

template <DType D>
void quantize_input_rows(const Call& c, int64_t begin, int64_t end) {
  using T = typename Io<D>::T;
  const T* x = static_cast<const T*>(c.hidden_states);
  for (int64_t i = begin; i < end; ++i) {
    int8_t* codes = c.x_codes + i * c.x_stride;
    if (c.weight_on_input) {
      const int64_t slot = c.slots[i];
      const Row<D> row(x + slot / c.topk * c.hidden, c.hidden);
      const float weight = c.topk_weights[slot];
      // A padding column times an infinite weight would be NaN: rows that end inside a vector are masked again by Row.
      const int64_t columns = c.hidden;
      quantize_row(
          [&](int64_t j) {
            VF v = Io<D>::round(row(j) * weight);
            if (j + kLanes > columns)
              for (int l = 0; l < kLanes; ++l) v[l] = j + l < columns ? v[l] : 0.0f;
            return v;
          },
          c.hidden, codes, c.x_stride, c.x_scale + i);
      continue;
    }
    bool used = false;
    for (int64_t k = 0; k < c.topk; ++k) used |= c.local[i * c.topk + k] >= 0;
    if (used) quantize_row(Row<D>(x + i * c.hidden, c.hidden), c.hidden, codes, c.x_stride, c.x_scale + i);
  }
}

template <DType D>
void quantize_hidden_rows(const Call& c, int64_t begin, int64_t end) {
  using T = typename Io<D>::T;
  for (int64_t i = begin; i < end; ++i)
    quantize_row(Row<D>(static_cast<const T*>(c.h) + i * c.h_stride, c.intermediate), c.intermediate,
                 c.h_codes + i * c.h_codes_stride, c.h_codes_stride, c.h_scale + i);
}

// ---- Steps 3, 4 and 6: a panel times up to kBlock rows, with its epilogue ----------------------------------------------

// Rows of one tile: their codes, scales and, for GEMM 2, router weights and places in y.
struct Rows {
  const int8_t* codes[kTileRows];
  float scale[kTileRows];
  float weight[kTileRows];
  void* out[kTileRows];
};

inline VF scaled(VI acc, float x_scale, VF w_scale, const float* bias) {
  const VF y = (to_float(acc) * x_scale) * w_scale;
  return bias ? y + load<VF>(bias) : y;
}

template <DType D, bool kFirst>
struct Epilogue {
  using T = typename Io<D>::T;
  const Call& c;
  const Gemm& g;
  const Rows& rows;

  // Columns of h or y that start at packed row `at` of the expert; `row` is the place within the tile.
  inline void operator()(const VI (&acc)[2], int row, int64_t at, const float* scale, const float* bias) const {
    const float x_scale = rows.scale[row];
    const VF a = scaled(acc[0], x_scale, load<VF>(scale), bias);
    const VF b = scaled(acc[1], x_scale, load<VF>(scale + kLanes), bias ? bias + kLanes : nullptr);
    T* out = static_cast<T*>(rows.out[row]);
    if constexpr (kFirst) {
      if (c.gated) {
        const VF h = activate_gate(c, clamp_gate(c, a));
        const VF u = clamp_up(c, b);
        Io<D>::put(out + at / 2, c.activation == Activation::swigluoai ? h * (u + 1.0f) : h * u);
      } else {
        Io<D>::put(out + at, activate_gate(c, clamp_gate(c, a)));
        Io<D>::put(out + at + kLanes, activate_gate(c, clamp_gate(c, b)));
      }
    } else if (c.weight_on_input) {
      Io<D>::put(out + at, a);
      Io<D>::put(out + at + kLanes, b);
    } else {
      Io<D>::put(out + at, a * rows.weight[row]);
      Io<D>::put(out + at + kLanes, b * rows.weight[row]);
    }
  }
};

template <int T, class E>
inline void block(const E& epilogue, const int8_t* panel, const char* prefetch, int row, int64_t at, const float* scale,
                  const float* bias) {
  VI acc[T][2];
  dot_panel<T>(panel, epilogue.g.k_groups, epilogue.rows.codes + row, prefetch, acc);
  for (int t = 0; t < T; ++t) epilogue(acc[t], row + t, at, scale, bias);
}

template <class E>
void run_tile(const E& epilogue, const Tile& tile) {
  const Gemm& g = epilogue.g;
  const int64_t packed_rows = g.panels * 2 * kLanes;
  for (int64_t p = tile.panel; p < tile.panel + tile.panels; ++p) {
    const int8_t* panel = g.weight + (tile.expert * g.panels + p) * g.panel_bytes;
    const int64_t at = p * 2 * kLanes;
    const float* scale = g.scale + tile.expert * packed_rows + at;
    const float* bias = g.bias ? g.bias + tile.expert * packed_rows + at : nullptr;
    // While this panel meets its rows out of cache, each block of rows fetches its share of the next panel.
    const int blocks = (tile.rows + kBlock - 1) / kBlock;
    const int64_t share = g.panel_bytes / blocks;
    for (int b = 0, r = 0; b < blocks; ++b, r += kBlock) {
      const char* ahead = reinterpret_cast<const char*>(panel) + g.panel_bytes + b * share;
      switch (tile.rows - r) {
        case 1:
          block<1>(epilogue, panel, ahead, r, at, scale, bias);
          break;
        case 2:
          block<2>(epilogue, panel, ahead, r, at, scale, bias);
          break;
        case 3:
          block<3>(epilogue, panel, ahead, r, at, scale, bias);
          break;
        default:
          block<kBlock>(epilogue, panel, ahead, r, at, scale, bias);
      }
    }
  }
}

template <DType D>
void gemm1_tile(const Call& c, const Tile& tile) {
  using T = typename Io<D>::T;
  Rows rows;
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i, x = c.weight_on_input ? row : c.slots[row] / c.topk;
    rows.codes[i] = c.x_codes + x * c.x_stride;
    rows.scale[i] = c.x_scale[x];
    rows.out[i] = static_cast<T*>(c.h) + row * c.h_stride;
  }
  run_tile(Epilogue<D, true>{c, c.gemm1, rows}, tile);
}

template <DType D>
void gemm2_tile(const Call& c, const Tile& tile) {
  using T = typename Io<D>::T;
  Rows rows;
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row + i, slot = c.slots[row];
    rows.codes[i] = c.h_codes + row * c.h_codes_stride;
    rows.scale[i] = c.h_scale[row];
    rows.weight[i] = c.topk_weights[slot];
    rows.out[i] = static_cast<T*>(c.y) + slot * c.y_stride;
  }
  run_tile(Epilogue<D, false>{c, c.gemm2, rows}, tile);
}

// ---- Step 7 ------------------------------------------------------------------------------------------------------------

template <DType D>
void combine_tokens(const Call& c, int64_t begin, int64_t end) {
  using T = typename Io<D>::T;
  constexpr int kUnroll = 4;
  for (int64_t token = begin; token < end; ++token) {
    const T* y = static_cast<const T*>(c.y) + token * c.topk * c.y_stride;
    const int32_t* local = c.local + token * c.topk;
    T* out = static_cast<T*>(c.output) + token * c.hidden;
    for (int64_t j = 0; j < c.hidden; j += kUnroll * kLanes) {  // y_stride is a multiple of this
      VF sum[kUnroll] = {};
      for (int64_t k = 0; k < c.topk; ++k)
        if (local[k] >= 0)
          for (int u = 0; u < kUnroll; ++u) sum[u] += Io<D>::get(y + k * c.y_stride + j + u * kLanes);
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = j + u * kLanes, left = c.hidden - at;
        if (left >= kLanes) {
          Io<D>::put(out + at, sum[u]);
        } else if (left > 0) {
          T last[kLanes];
          Io<D>::put(last, sum[u]);
          __builtin_memcpy(out + at, last, left * sizeof(T));
        }
      }
    }
  }
}

// ---- Entries: the dtype is chosen once per call of an entry --------------------------------------------------------------

#define INT8MOE_BY_DTYPE(function, ...)            \
  switch (c.dtype) {                               \
    case DType::bfloat16:                          \
      return function<DType::bfloat16>(__VA_ARGS__); \
    case DType::float16:                           \
      return function<DType::float16>(__VA_ARGS__);  \
    case DType::float32:                           \
      return function<DType::float32>(__VA_ARGS__);  \
  }

void quantize_input(const Call& c, int64_t begin, int64_t end) { INT8MOE_BY_DTYPE(quantize_input_rows, c, begin, end) }
void gemm1(const Call& c, const Tile& tile) { INT8MOE_BY_DTYPE(gemm1_tile, c, tile) }
void quantize_hidden(const Call& c, int64_t begin, int64_t end) { INT8MOE_BY_DTYPE(quantize_hidden_rows, c, begin, end) }
void gemm2(const Call& c, const Tile& tile) { INT8MOE_BY_DTYPE(gemm2_tile, c, tile) }
void combine(const Call& c, int64_t begin, int64_t end) { INT8MOE_BY_DTYPE(combine_tokens, c, begin, end) }

#undef INT8MOE_BY_DTYPE

void apply_function(Function f, const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t size = (n - i < kLanes ? n - i : kLanes) * sizeof(float);
    VF v = {};
    __builtin_memcpy(&v, in + i, size);
    switch (f) {
      case Function::exp:
        v = exp(v);
        break;
      case Function::erf:
        v = erf(v);
        break;
      case Function::tanh:
        v = tanh(v);
        break;
      case Function::round_bfloat16:
        v = Io<DType::bfloat16>::round(v);
        break;
      case Function::round_float16:
        v = Io<DType::float16>::round(v);
        break;
    }
    __builtin_memcpy(out + i, &v, size);
  }
}

constexpr KernelFns kFns = {
    {kLanes, kGroup, kTail}, quantize_input, gemm1, quantize_hidden, gemm2, combine, apply_function,
};

}  // namespace
