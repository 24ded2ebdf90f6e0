// isa/avx512vnni.cpp: AVX-512 with VNNI.
#include <immintrin.h>

#include "../dot.h"
#include "../numerics.h"

namespace int8moe::avx512vnni {
namespace {

#include "vector_avx512.inl"

constexpr int kBlock = 12, kTiles = 2;  // 24 sums, 2 vectors of weights, 1 of codes, the offset: 28 of 32 registers
struct Session {
  explicit Session(const Codes&) {}
};

#include "dot_vnni512.inl"
#include "rows.inl"
void dot(const Dot& d) { by_rows(d); }

const Peak peaks[] = {{"dpbusd, 512 bit", 12 * 64 * 2.0, chain512}};

}  // namespace
#include "../moe.inl"
extern const KernelFns kernel;
const KernelFns kernel = {quantize_row, gemm<true>, gemm<false>, combine, map, nullptr, peaks, 1};
}  // namespace int8moe::avx512vnni
