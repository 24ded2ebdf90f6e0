// Runs the cases of write_cases.py with every kernel that this machine can run (or those named), packing included, and
// compares bits with the reference's. Needs no Python: for sanitizers, and for other processors under emulation.
//   run_cases FILE [KERNEL ...]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "../../csrc/cpu/dispatch.h"
#include "../../csrc/cpu/features.h"
#include "../../csrc/cpu/moe.h"
#include "../../csrc/cpu/pack.h"

using namespace int8moe;

template <class T>
static std::vector<T> read(std::ifstream& in, long count) {
  std::vector<T> v(count);
  in.read(reinterpret_cast<char*>(v.data()), count * sizeof(T));
  if (!in) std::fprintf(stderr, "the file of cases ends too early\n"), std::exit(2);
  return v;
}

static bool is_nan(const std::vector<char>& v, long i, int dtype) {
  if (dtype == kFloat32) {
    float f;
    std::memcpy(&f, v.data() + 4 * i, 4);
    return std::isnan(f);
  }
  uint16_t h;
  std::memcpy(&h, v.data() + 2 * i, 2);
  return dtype == kBFloat16 ? (h & 0x7fff) > 0x7f80 : (h & 0x7fff) > 0x7c00;
}

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: run_cases FILE [KERNEL ...]\n"), 2;
  std::ifstream in(argv[1], std::ios::binary);
  if (!in) return std::fprintf(stderr, "%s cannot be read\n", argv[1]), 2;
  int count;
  const Kernel* all = kernels(&count);
  std::vector<const Kernel*> chosen;
  for (int i = 0; i < count; ++i) {
    bool named = argc == 2 && runnable(all[i], cpu_features());
    for (int a = 2; a < argc; ++a) named |= all[i].name == std::string(argv[a]);
    if (named) chosen.push_back(all + i);
  }
  if (chosen.empty() || (argc > 2 && (int)chosen.size() != argc - 2))
    return std::fprintf(stderr, "not every kernel named is compiled in\n"), 2;
  for (const Kernel* kernel : chosen)
    for (int i = 0; i < kernel->fns->peak_count; ++i) kernel->fns->peaks[i].run(10);
  long cases = 0, failed = 0;
  while (in.peek() != EOF) {
    const auto line = read<int64_t>(in, 20);
    const auto real = read<float>(in, 2);
    const int dtype = (int)line[0], order = (int)line[15];
    const bool gated = line[2], map = line[13], bias = line[14];
    const long tokens = line[6], topk = line[7], experts = line[8], local = line[9], hidden = line[10], inter = line[11];
    const auto letters = read<char>(in, line[16]);
    const std::string name(letters.begin(), letters.end());
    const long element = dtype == kFloat32 ? 4 : 2, n13 = gated ? 2 * inter : inter;
    const auto x = read<char>(in, tokens * hidden * element);
    const auto weights = read<float>(in, tokens * topk);
    const auto ids = read<char>(in, tokens * topk * (line[12] ? 8 : 4));
    const auto expert_map = read<int32_t>(in, map ? experts : 0);
    const auto w13 = read<int8_t>(in, local * n13 * hidden), w2 = read<int8_t>(in, local * hidden * inter);
    const auto s13 = read<float>(in, local * n13), s2 = read<float>(in, local * hidden);
    const auto b13 = read<float>(in, bias ? local * n13 : 0), b2 = read<float>(in, bias ? local * hidden : 0);
    const auto want = read<char>(in, tokens * hidden * element);
    ++cases;
    const Packed size13(n13, hidden, gated), size2(hidden, inter, false);
    std::vector<int8_t> p13(local * size13.bytes), p2(local * size2.bytes), back(w13.size());
    pack(w13.data(), p13.data(), local, n13, hidden, order, 2);
    pack(w2.data(), p2.data(), local, hidden, inter, kPlain, 2);
    unpack(p13.data(), back.data(), local, n13, hidden, order, 2);
    if (back != w13) ++failed, std::printf("%s: unpack(pack(w)) is not w\n", name.c_str());
    if (p13.size() == w13.size()) {  // in place, and back
      back = w13;
      pack(back.data(), back.data(), local, n13, hidden, order, 2);
      const bool same = back == p13;
      unpack(back.data(), back.data(), local, n13, hidden, order, 2);
      if (!same || back != w13) ++failed, std::printf("%s: packing in place differs\n", name.c_str());
    }
    for (const Kernel* kernel : chosen) {
      std::vector<uint64_t> h13, h2;
      if (kernel->fns->hints) {
        h13.resize(local * size13.hints), h2.resize(local * size2.hints);
        make_hints(*kernel->fns, p13.data(), h13.data(), local, n13, hidden, order, 2);
        make_hints(*kernel->fns, p2.data(), h2.data(), local, hidden, inter, kPlain, 2);
      }
      for (int threads : {1, 3}) {
        std::vector<char> out(want.size());
        const LayerArgs args{
            x.data(), weights.data(), ids.data(), line[12] != 0, map ? expert_map.data() : nullptr, tokens, topk, experts,
            local, hidden, inter, p13.data(), p2.data(), h13.empty() ? nullptr : h13.data(),
            h2.empty() ? nullptr : h2.data(), s13.data(), s2.data(), bias ? b13.data() : nullptr,
            bias ? b2.data() : nullptr, dtype,
            {(int)line[1], gated, line[3] != 0, line[4] != 0, real[0], real[1]}, line[5] != 0, out.data()};
        long bad = 0;
        const int status = run_layer(*kernel->fns, args, threads, &bad);
        long wrong = 0;
        for (long i = 0; i < tokens * hidden; ++i) {
          const bool same = std::memcmp(out.data() + i * element, want.data() + i * element, element) == 0;
          wrong += !same && !(is_nan(out, i, dtype) && is_nan(want, i, dtype));
        }
        if (status != kOk || wrong) {
          ++failed;
          std::printf("%s, %s, %d threads: status %d, %ld of %ld values differ\n", name.c_str(), kernel->name, threads,
                      status, wrong, tokens * hidden);
        }
      }
    }
  }
  std::printf("kernels:");
  for (const Kernel* kernel : chosen) std::printf(" %s", kernel->name);
  std::printf("; %ld cases, %ld failed\n", cases, failed);
  return failed != 0 || cases == 0;
}
