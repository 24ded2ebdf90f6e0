// The algorithm of docs/numerics.md, once, over an ISA file's primitives. Included inside that file's own namespace.
//
// The includer defines, in an anonymous namespace:
//   VF, VI, VH            vectors of eight or sixteen float, int32 and uint16 (GCC vector types)
//   to_bf16, from_bf16    VF <-> VH, round to nearest even, NaN stays NaN
//   load_half, store_half a vector of float16 at an address, the same
//   at_least, at_most     v < low ? low : v and v > high ? high : v, of vectors: NaN stays NaN
//   in_order(v)           v, computed before what follows, where rows are worked on in step
//   store_codes(p, v)     whole numbers of -127..127 as int8
//   max_lane, sum_lanes   of a VI
//   join(a, b)            a VI of two halves, where lanes are sixteen
//   store_non_temporal(p, a, b)   two VH, a cache line, likewise
//   kBlock, kTiles        most rows of codes and most tiles of one dot
//   dot(Dot)              exact int32 sums of a block (struct Dot, dot.h)
//   Session(Codes)        what the thread must set up around the dots of a block of rows, or of blocks of at most so
//   many
// Float steps use the compiler's vector types: add, subtract, multiply and divide mean the same bits under every ISA.

namespace {

constexpr int kLanes = sizeof(VF) / sizeof(float);
constexpr int kUnit = kLanes / 8;              // tiles whose gates fill a vector
constexpr int kInStep = kLanes == 16 ? 4 : 1;  // rows whose values are finished in step, as the registers allow

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
inline VF splat(float x) { return x - VF{}; }

// Elements in the dtype of hidden_states.
template <int D>
struct Io {
  using T = uint16_t;
  static VF get(const T* p) {
    if constexpr (D == kBFloat16) return from_bf16(load<VH>(p));
    return (VF)load_half(p);
  }
  static void put(T* p, VF v) {
    if constexpr (D == kBFloat16) {
      store(p, to_bf16(v));
    } else {
      store_half(p, v);
    }
  }
  static VF round(VF v) {
    T rounded[kLanes];
    put(rounded, v);
    return get(rounded);
  }
};
template <>
struct Io<kFloat32> {
  using T = float;
  static VF get(const T* p) { return load<VF>(p); }
  static void put(T* p, VF v) { store(p, v); }
  static VF round(VF v) { return v; }
};

// Up to a vector of elements; lanes beyond `n` are zero, or not written.
template <int D>
inline VF get_some(const typename Io<D>::T* p, long n) {
  if (n >= kLanes) return Io<D>::get(p);
  typename Io<D>::T some[kLanes] = {};
  __builtin_memcpy(some, p, n * sizeof(*p));
  return Io<D>::get(some);
}
template <int D>
inline void put_some(typename Io<D>::T* p, long n, VF v) {
  if (n >= kLanes) return Io<D>::put(p, v);
  if (n <= 0) return;
  typename Io<D>::T some[kLanes];
  Io<D>::put(some, v);
  __builtin_memcpy(p, some, n * sizeof(*p));
}

// ---- Step 4: the activation

// A vector of each of R rows, worked on in step: one row's chain of additions and multiplications waits four cycles at
// each link, and a processor's scheduler is too small to find the next row behind it.
template <int R>
struct Rows {
  VF v[R];
  template <class F>
  static Rows each(const F& f) {
    Rows out;
    for (int r = 0; r < R; ++r) out.v[r] = f(r);
    return out;
  }
  Rows operator-() const {
    return each([&](int r) { return -v[r]; });
  }
  friend Rows operator+(const Rows& a, const Rows& b) {
    return each([&](int r) { return a.v[r] + b.v[r]; });
  }
  friend Rows operator-(const Rows& a, const Rows& b) {
    return each([&](int r) { return a.v[r] - b.v[r]; });
  }
  friend Rows operator*(const Rows& a, const Rows& b) {
    return each([&](int r) { return a.v[r] * b.v[r]; });
  }
  friend Rows operator/(const Rows& a, const Rows& b) {
    return each([&](int r) { return a.v[r] / b.v[r]; });
  }
  friend Rows operator+(const Rows& a, float b) {
    return each([&](int r) { return a.v[r] + b; });
  }
  friend Rows operator-(const Rows& a, float b) {
    return each([&](int r) { return a.v[r] - b; });
  }
  friend Rows operator*(const Rows& a, float b) {
    return each([&](int r) { return a.v[r] * b; });
  }
  friend Rows operator-(float a, const Rows& b) {
    return each([&](int r) { return a - b.v[r]; });
  }
  friend Rows operator/(float a, const Rows& b) {
    return each([&](int r) { return a / b.v[r]; });
  }
};

inline VF rint(VF v) { return (v + kRintMagic) - kRintMagic; }
template <int R>
inline Rows<R> rint(const Rows<R>& x) {
  return (x + kRintMagic) - kRintMagic;
}

// NaN stays NaN in both.
template <int R>
inline Rows<R> at_least(const Rows<R>& x, float low) {
  return Rows<R>::each([&](int r) { return at_least(x.v[r], splat(low)); });
}
template <int R>
inline Rows<R> at_most(const Rows<R>& x, float high) {
  return Rows<R>::each([&](int r) { return at_most(x.v[r], splat(high)); });
}

// In line, as what calls it: out of line, the values of four rows go through memory at each call.
template <int R>
__attribute__((always_inline)) inline Rows<R> exp(const Rows<R>& any) {
  const Rows<R> x = at_most(at_least(any, kExpLow), kExpHigh);
  const Rows<R> n = Rows<R>::each([&](int i) { return in_order(rint(x.v[i] * kLog2e)); });
  const Rows<R> r = Rows<R>::each([&](int i) { return in_order((x.v[i] - n.v[i] * kLn2High) - n.v[i] * kLn2Low); });
  Rows<R> p = r * kExpPolynomial[0] + kExpPolynomial[1];
  for (int i = 2; i < 6; ++i) p = Rows<R>::each([&](int j) { return in_order(p.v[j] * r.v[j] + kExpPolynomial[i]); });
  const Rows<R> y = Rows<R>::each([&](int i) { return in_order((p.v[i] * (r.v[i] * r.v[i]) + r.v[i]) + 1.0f); });
  return y * Rows<R>::each([&](int i) { return (VF)((__builtin_convertvector(n.v[i], VI) + 127) << 23); });
}

template <int R>
inline Rows<R> tanh(const Rows<R>& z) {
  return 1.0f - 2.0f / (exp(z * 2.0f) + 1.0f);
}

template <int R>
inline Rows<R> erf(const Rows<R>& x) {
  const Rows<R> a = Rows<R>::each([&](int r) { return (VF)((VI)x.v[r] & 0x7fffffff); });
  const Rows<R> t = 1.0f / (a * kErfP + 1.0f);
  Rows<R> p = t * kErfPolynomial[0] + kErfPolynomial[1];
  for (int i = 2; i < 5; ++i) p = p * t + kErfPolynomial[i];
  const Rows<R> y = 1.0f - (p * t) * exp(-(a * a));
  return Rows<R>::each([&](int r) { return x.v[r] < 0.0f ? -y.v[r] : y.v[r]; });
}

template <int R>
__attribute__((always_inline)) inline Rows<R> activate_gate(const Activation& a, const Rows<R>& g) {
  switch (a.kind) {
    case kSilu:
      return g / (exp(-g) + 1.0f);
    case kGelu:
      return (g * 0.5f) * (erf(g * kSqrtHalf) + 1.0f);
    case kGeluTanh:
      return (g * 0.5f) * (tanh((g + ((g * g) * g) * kGeluTanhCubic) * kGeluTanhScale) + 1.0f);
    case kRelu2: {
      const Rows<R> p = at_least(g, 0.0f);
      return p * p;
    }
    default:  // kSwigluOai
      return g / (exp(-(g * a.alpha)) + 1.0f);
  }
}

template <int R>
inline Rows<R> clamp_gate(const Activation& a, const Rows<R>& g) {
  return a.has_limit ? at_most(g, a.limit) : g;
}
// The upper limit first, as written down: it decides where a limit is negative.
template <int R>
inline Rows<R> clamp_up(const Activation& a, const Rows<R>& u) {
  if (!a.has_limit) return u;
  return Rows<R>::each([&](int r) {
    const VF v = u.v[r];
    return v > a.limit ? splat(a.limit) : (v < -a.limit ? splat(-a.limit) : v);
  });
}

// ---- Steps 2 and 5: rows to int8 codes

// `get(j)` is the vector of columns j .. j + 7, zero beyond the row.
template <class Get>
inline void quantize_with(const Get& get, const QuantizeArgs& a) {
  // As integers, |x| sorts like the numbers do, with infinity and then NaN above them all.
  VI most = {};
  for (long j = 0; j < a.columns; j += kLanes) {
    const VI v = (VI)get(j) & 0x7fffffff;
    most = v > most ? v : most;
  }
  const int32_t amax_bits = max_lane(most);
  const long padded = code_stride(a.columns);
  if (amax_bits >= 0x7f800000) {
    __builtin_memset(a.q, 0, padded);
    *a.scale = __builtin_nanf("");
    *a.sum = 0;
    return;
  }
  float amax;
  __builtin_memcpy(&amax, &amax_bits, sizeof amax);
  if (amax < kAmaxFloor) amax = kAmaxFloor;
  *a.scale = amax / kInt8Max;
  const float inv = kInt8Max / amax;
  VI sum = {};
  long j = 0;
  for (; j < a.columns; j += kLanes) {  // the stride is a multiple of 64: the last vector stays inside
    const VF v = at_least(at_most(rint(get(j) * inv), splat(kInt8Max)), splat(-kInt8Max));
    store_codes(a.q + j, v);
    sum = sum + __builtin_convertvector(v, VI);
  }
  __builtin_memset(a.q + j, 0, padded - j);
  *a.sum = sum_lanes(sum);
}

template <int D>
void quantize_typed(const QuantizeArgs& a) {
  const auto* x = static_cast<const typename Io<D>::T*>(a.x);
  const long n = a.columns;
  if (!a.weight) return quantize_with([&](long j) { return get_some<D>(x + j, n - j); }, a);
  const float weight = *a.weight;
  auto weighted = [&](long j) {
    VF v = Io<D>::round(get_some<D>(x + j, n - j) * weight);
    // Beyond the row, zero times an infinite weight would be NaN.
    for (int l = 0; l < kLanes && j + kLanes > n; ++l) v[l] = j + l < n ? v[l] : 0.0f;
    return v;
  };
  quantize_with(weighted, a);
}

void quantize_row(const QuantizeArgs& a) {
  if (a.dtype == kBFloat16) return quantize_typed<kBFloat16>(a);
  if (a.dtype == kFloat16) return quantize_typed<kFloat16>(a);
  quantize_typed<kFloat32>(a);
}

// ---- Steps 3, 4 and 6

// A vector of values of a canonical array of `n`, from `at` on, `step` apart; zero beyond it.
inline VF pick(const float* v, long at, long step, long n) {
  if (step == 1) return get_some<kFloat32>(v + at, n - at > 0 ? n - at : 0);
  VF out = {};
  for (int l = 0; l < kLanes; ++l)
    if (at + step * l < n) out[l] = v[at + step * l];
  return out;
}

// Scales and biases of a unit of tiles: of gates and ups, or of the first and second half of its rows.
struct UnitRows {
  VF scale[2], bias[2];
  bool has_bias;
};

template <bool kFirst>
inline UnitRows unit_rows(const GemmArgs& g, long tile) {
  const bool pairs = kFirst && g.activation.gated;
  UnitRows u;
  u.has_bias = g.bias != nullptr;
  for (int v = 0; v < 2; ++v) {
    long at, step = 1, n = g.n;
    if (!pairs) {
      at = kTileRows * tile + kLanes * v;
    } else if (g.activation.interleaved) {
      at = kTileRows * tile + v, step = 2, n = 2 * g.n;
    } else {
      at = kTileRows / 2 * tile + g.n * v, n = g.n * (1 + v);
    }
    u.scale[v] = pick(g.w_scale, at, step, n);
    u.bias[v] = g.bias ? pick(g.bias, at, step, n) : splat(0.0f);
  }
  return u;
}

// The sums of gates (v = 0) or ups (v = 1) of a unit.
template <class Eight = int32_t __attribute__((vector_size(32)))>
inline VI pair_sums(const int32_t* sums, int v) {
  if constexpr (kUnit == 1) {
    return load<VI>(sums + kLanes * v);
  } else {
    return join(load<Eight>(sums + 8 * v), load<Eight>(sums + kTileRows + 8 * v));
  }
}

// The sums of a unit of tiles in R rows, `sum_stride` apart, to values of `out`, up to column `end`: the last unit may
// not be whole.
template <int D, bool kFirst, int R>
inline void finish(const GemmArgs& g, const UnitRows& u, long tile, long end, long position, const int32_t* sums,
                   long sum_stride) {
  using T = typename Io<D>::T;
  const bool pairs = kFirst && g.activation.gated;
  Rows<R> y[2];
  for (int v = 0; v < 2; ++v) {
    y[v] = Rows<R>::each([&](int r) {
      const int32_t* row = sums + r * sum_stride;
      const VI sum = pairs ? pair_sums(row, v) : load<VI>(row + kLanes * v);
      return (__builtin_convertvector(sum, VF) * g.q_scale[position + r]) * u.scale[v];
    });
    if (u.has_bias) y[v] = Rows<R>::each([&](int r) { return y[v].v[r] + u.bias[v]; });
  }
  T* const out = static_cast<T*>(g.out) + position * g.n;
  auto put = [&](long at, const Rows<R>& values) {
    for (int r = 0; r < R; ++r) put_some<D>(out + r * g.n + at, end - at, values.v[r]);
  };
  if (pairs) {
    const Rows<R> h = activate_gate(g.activation, clamp_gate(g.activation, y[0])), up = clamp_up(g.activation, y[1]);
    put(kTileRows / 2 * tile, g.activation.kind == kSwigluOai ? h * (up + 1.0f) : h * up);
    return;
  }
  for (int v = 0; v < 2; ++v) {
    if (kFirst) {
      y[v] = activate_gate(g.activation, clamp_gate(g.activation, y[v]));
    } else if (g.position_weight) {
      y[v] = Rows<R>::each([&](int r) { return y[v].v[r] * g.position_weight[position + r]; });
    }
  }
  if constexpr (kLanes == 16 && !kFirst && D == kBFloat16) {
    if (g.non_temporal && end - kTileRows * tile >= 2 * kLanes) {
      for (int r = 0; r < R; ++r)
        store_non_temporal(out + r * g.n + kTileRows * tile, to_bf16(y[0].v[r]), to_bf16(y[1].v[r]));
      return;
    }
  }
  for (int v = 0; v < 2; ++v) put(kTileRows * tile + kLanes * v, y[v]);
}

template <int D, bool kFirst>
void gemm_typed(const GemmArgs& g) {
  static_assert(kTiles % kUnit == 0, "a dot covers whole units");
  const long groups = padded_columns(g.k) / kGroup, tile_bytes = groups * kTileRows * kGroup;
  const long stride = code_stride(g.k), words = hint_words(groups);
  const long columns = g.tile_end * (kFirst && g.activation.gated ? kTileRows / 2 : kTileRows);
  const long last = columns < g.n ? columns : g.n;
  alignas(64) int32_t sums[(kBlock + kTileRows) * kTiles * kTileRows] = {};
  for (long begin = g.pos_begin; begin < g.pos_end; begin += g.rows_at_once) {
    const long end = begin + g.rows_at_once < g.pos_end ? begin + g.rows_at_once : g.pos_end;
    const long blocks = (end - begin + kBlock - 1) / kBlock;
    const int most_rows = (int)((end - begin + blocks - 1) / blocks);
    const bool cold = begin == g.pos_begin;
    const Session session(Codes{g.q + begin * stride, stride, groups, most_rows, cold, g.scratch});
    for (long tile = g.tile_begin; tile < g.tile_end; tile += kTiles) {
      const int tiles = g.tile_end - tile < kTiles ? (int)(g.tile_end - tile) : kTiles;
      const long follow = (g.tile_end - tile - tiles < kTiles ? g.tile_end - tile - tiles : kTiles) * tile_bytes;
      UnitRows u[kTiles / kUnit];
      for (int i = 0; i < tiles; i += kUnit) u[i / kUnit] = unit_rows<kFirst>(g, tile + i);
      for (long b = 0; b < blocks; ++b) {  // of nearly equal size
        const long from = begin + (end - begin) * b / blocks, to = begin + (end - begin) * (b + 1) / blocks;
        Dot d;
        d.w = g.w + tile * tile_bytes, d.tile_bytes = tile_bytes, d.groups = groups;
        d.cold = cold && b == 0;
        d.next = d.cold && follow;
        d.ahead = d.w + tiles * tile_bytes + follow * b / blocks;
        d.ahead_bytes = cold ? follow / blocks : 0;
        d.hints = g.hints ? g.hints + tile * words : nullptr, d.hint_words = words;
        d.q = g.q + from * stride, d.stride = stride, d.q_sum = g.q_sum + from;
        d.rows = (int)(to - from), d.most_rows = most_rows, d.tiles = tiles;
        d.scratch = g.scratch, d.sums = sums, d.sum_stride = kTiles * kTileRows;
        dot(d);
        for (int i = 0; i < tiles; i += kUnit) {
          auto rows = [&]<int R>(long& p) {
            for (; p + R <= to; p += R)
              finish<D, kFirst, R>(g, u[i / kUnit], tile + i, last, p, sums + (p - from) * d.sum_stride + i * kTileRows,
                                   d.sum_stride);
          };
          long p = from;
          if (kInStep > 1) rows.template operator()<kInStep>(p);
          rows.template operator()<1>(p);
        }
      }
    }
  }
}

template <bool kFirst>
void gemm(const GemmArgs& g) {
  if (g.dtype == kBFloat16) return gemm_typed<kBFloat16, kFirst>(g);
  if (g.dtype == kFloat16) return gemm_typed<kFloat16, kFirst>(g);
  gemm_typed<kFloat32, kFirst>(g);
}

// ---- Step 7

template <int D>
void combine_typed(const CombineArgs& a, long from, long to) {
  auto* out = static_cast<typename Io<D>::T*>(a.out);
  const auto* y = static_cast<const typename Io<D>::T*>(a.y);
  for (long token = from; token < to; ++token) {
    const int32_t* position = a.position + token * a.topk;
    for (long j = 0; j < a.hidden; j += kLanes) {
      const long n = a.hidden - j;
      VF sum = {};
      for (long k = 0; k < a.topk; ++k)
        if (position[k] >= 0) sum = sum + get_some<D>(y + position[k] * a.hidden + j, n);
      put_some<D>(out + token * a.hidden + j, n, sum);
    }
  }
}

void combine(const CombineArgs& a, long from, long to) {
  if (a.dtype == kBFloat16) return combine_typed<kBFloat16>(a, from, to);
  if (a.dtype == kFloat16) return combine_typed<kFloat16>(a, from, to);
  combine_typed<kFloat32>(a, from, to);
}

// For tests: one function over n floats.
void map(int kind, const float* in, float* out, long n) {
  for (long i = 0; i < n; i += kLanes) {
    VF v = get_some<kFloat32>(in + i, n - i);
    if (kind == kMapExp) v = exp(Rows<1>{{v}}).v[0];
    if (kind == kMapErf) v = erf(Rows<1>{{v}}).v[0];
    if (kind == kMapTanh) v = tanh(Rows<1>{{v}}).v[0];
    if (kind == kMapBFloat16) v = Io<kBFloat16>::round(v);
    if (kind == kMapFloat16) v = Io<kFloat16>::round(v);
    put_some<kFloat32>(out + i, n - i, v);
  }
}

}  // namespace
