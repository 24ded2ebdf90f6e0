// The Python module int8moe._cpu: numbers and addresses in, numbers out. Python has checked shapes and dtypes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "features.h"
#include "measure.h"
#include "moe.h"
#include "numerics.h"
#include "pack.h"
#include "threads.h"

namespace nb = nanobind;
using namespace int8moe;

template <class T>
static T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

static const KernelFns& fns_of(int isa) {
  int count;
  const Kernel* all = kernels(&count);
  if (isa < 0 || isa >= count || !runnable(all[isa], cpu_features()))
    throw nb::value_error("this kernel cannot run here");
  return *all[isa].fns;
}

// (name, runnable, missing features) of each compiled kernel, best first.
static std::vector<std::tuple<std::string, bool, std::string>> list_kernels() {
  std::vector<std::tuple<std::string, bool, std::string>> out;
  int count;
  const Kernel* all = kernels(&count);
  for (int i = 0; i < count; ++i) {
    std::string missing;
    for (uint32_t bit = 1; bit; bit <<= 1) {
      if (all[i].needs & ~cpu_features() & bit)
        missing += (missing.empty() ? "" : ", ") + std::string(feature_name(bit));
    }
    out.emplace_back(all[i].name, missing.empty(), missing);
  }
  return out;
}

static std::vector<std::string> list_features() {
  std::vector<std::string> out;
  for (uint32_t bit = 1; bit; bit <<= 1) {
    if (cpu_features() & bit) out.emplace_back(feature_name(bit));
  }
  return out;
}

static std::tuple<int, long> layer(int isa, int threads, uintptr_t hidden_states, uintptr_t topk_weights,
                                   uintptr_t topk_ids, bool ids_are_int64, uintptr_t expert_map, long tokens, long topk,
                                   long num_experts, long local_experts, long hidden, long intermediate, uintptr_t w13,
                                   uintptr_t w2, uintptr_t w13_hints, uintptr_t w2_hints, uintptr_t w13_scale,
                                   uintptr_t w2_scale, uintptr_t w13_bias, uintptr_t w2_bias, int dtype, int activation,
                                   bool gated, bool interleaved, bool has_limit, float alpha, float limit,
                                   bool weight_on_input, uintptr_t out) {
  const KernelFns& fns = fns_of(isa);
  const LayerArgs args{at<const void>(hidden_states),
                       at<const float>(topk_weights),
                       at<const void>(topk_ids),
                       ids_are_int64,
                       at<const int32_t>(expert_map),
                       tokens,
                       topk,
                       num_experts,
                       local_experts,
                       hidden,
                       intermediate,
                       at<const int8_t>(w13),
                       at<const int8_t>(w2),
                       at<const uint64_t>(w13_hints),
                       at<const uint64_t>(w2_hints),
                       at<const float>(w13_scale),
                       at<const float>(w2_scale),
                       at<const float>(w13_bias),
                       at<const float>(w2_bias),
                       dtype,
                       {activation, gated, interleaved, has_limit, alpha, limit},
                       weight_on_input,
                       at<void>(out)};
  long bad = 0;
  nb::gil_scoped_release release;
  const int status = run_layer(fns, args, threads, &bad);
  return {status, bad};
}

NB_MODULE(_cpu, m) {
  m.def("kernels", list_kernels);
  m.def("features", list_features);
  m.def("layer", layer);
  m.def("use_openmp", [](uintptr_t parallel, uintptr_t thread_num, uintptr_t num_threads) {
    use_openmp(at<void>(parallel), at<void>(thread_num), at<void>(num_threads));
  });
  m.def("packed_bytes", [](long n, long k, int order) { return Packed(n, k, order != kPlain).bytes; });
  // 64-bit words of hints of one expert; 0 for an instruction set that uses none.
  m.def("hint_words",
        [](int isa, long n, long k, int order) { return fns_of(isa).hints ? Packed(n, k, order != kPlain).hints : 0; });
  m.def("pack", [](uintptr_t from, uintptr_t to, long experts, long n, long k, int order, int threads) {
    nb::gil_scoped_release release;
    return pack(at<const int8_t>(from), at<int8_t>(to), experts, n, k, order, threads);
  });
  m.def("unpack", [](uintptr_t from, uintptr_t to, long experts, long n, long k, int order, int threads) {
    nb::gil_scoped_release release;
    return unpack(at<const int8_t>(from), at<int8_t>(to), experts, n, k, order, threads);
  });
  m.def("make_hints",
        [](int isa, uintptr_t packed, uintptr_t hints, long experts, long n, long k, int order, int threads) {
          const KernelFns& fns = fns_of(isa);
          nb::gil_scoped_release release;
          make_hints(fns, at<const int8_t>(packed), at<uint64_t>(hints), experts, n, k, order, threads);
        });
  m.def("measure_read", [](int threads, long megabytes, int repeats) {
    nb::gil_scoped_release release;
    return measure_read(threads, megabytes << 20, repeats);
  });
  m.def("measure_peak", [](int isa, int threads, int milliseconds) {
    const KernelFns& fns = fns_of(isa);
    std::vector<std::tuple<std::string, double>> out;
    nb::gil_scoped_release release;
    for (int i = 0; i < fns.peak_count; ++i)
      out.emplace_back(fns.peaks[i].name, measure_peak(fns.peaks[i], threads, milliseconds));
    return out;
  });
  m.def("map", [](int isa, int kind, uintptr_t in, uintptr_t out, long n) {
    fns_of(isa).map(kind, at<const float>(in), at<float>(out), n);
  });
  m.def("constants", [] {
    nb::dict d;
    d["RINT_MAGIC"] = kRintMagic;
    d["INT8_MAX"] = kInt8Max;
    d["AMAX_FLOOR"] = kAmaxFloor;
    d["EXP_LOW"] = kExpLow;
    d["EXP_HIGH"] = kExpHigh;
    d["LOG2E"] = kLog2e;
    d["LN2_HIGH"] = kLn2High;
    d["LN2_LOW"] = kLn2Low;
    d["GELU_TANH_SCALE"] = kGeluTanhScale;
    d["GELU_TANH_CUBIC"] = kGeluTanhCubic;
    d["SQRT_HALF"] = kSqrtHalf;
    d["ERF_P"] = kErfP;
    d["EXP_POLYNOMIAL"] = std::vector<float>(kExpPolynomial, kExpPolynomial + 6);
    d["ERF_POLYNOMIAL"] = std::vector<float>(kErfPolynomial, kErfPolynomial + 5);
    return d;
  });
}
