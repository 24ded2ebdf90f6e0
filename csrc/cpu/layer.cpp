// One layer call: routing, then four stages cut into tasks for the threads. Knows no instruction set.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "moe.h"
#include "pack.h"
#include "threads.h"

namespace int8moe {

namespace {

// Slots (tokens times topk) of one pass; more tokens go in several, so that the workspace stays bounded.
constexpr long kMaxSlots = 16384;
// Weight bytes below which waking a second thread costs more than it saves (about 20 us of reading).
constexpr long kAloneBytes = 200 * 1024;
// Output of GEMM 2 above which it is written by non-temporal stores, which do not read what was there: with 1,024
// tokens under AMX 28 % of GEMM 2's time for OLMoE (32 MB), 17 % for Qwen3-30B-A3B, 7 % for half Mixtral; nothing at 2
// MB.
constexpr long kNonTemporalBytes = 4 << 20;

// Memory that grows and is not initialised. On cache lines: a tile register filled across them takes twice as long. In
// large pages: a block's rows lie in as many small ones, whose addresses the processor cannot all keep at hand.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  T* grow(long n) {
    if (n > size_) {
      std::free(data_);
      size_ = 0;
      const long line = 64, page = 2 << 20, bytes = n * sizeof(T), aligned = bytes < page ? line : page;
      data_ = static_cast<T*>(std::aligned_alloc(aligned, round_up(bytes, aligned)));
      if (!data_) throw std::bad_alloc();
      use_large_pages(data_, round_up(bytes, aligned), false, 1);
      size_ = n;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  long size_ = 0;
};

// Memory of a call. Kept from call to call, so that the steady state allocates nothing.
struct Workspace {
  Buffer<int32_t> local, position, slot_of, expert_begin, active, q_sum, h_sum;
  Buffer<float> q_scale, h_scale, position_weight;
  Buffer<int8_t> q, hq, scratch;
  Buffer<char> h, y;
};

// Workspaces that no call is using; a call takes one and gives it back.
std::mutex* free_mutex = new std::mutex;
std::vector<Workspace*>* free_workspaces = new std::vector<Workspace*>;

// A fork while another thread holds the lock would leave it locked in the child for ever.
void new_mutex_in_child() { free_mutex = new std::mutex; }
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, new_mutex_in_child);

// Round to nearest with denormals on, whatever the calling thread uses; put back at the end.
class FloatMode {
#if defined(__x86_64__)
 public:
  FloatMode() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1F80); }
  ~FloatMode() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
 public:
  FloatMode() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(0ul));
  }
  ~FloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  unsigned long saved_;
#else
 public:
  FloatMode() {}
#endif
};

class Borrowed {
 public:
  Borrowed() {
    std::lock_guard<std::mutex> lock(*free_mutex);
    if (free_workspaces->empty()) {
      space_ = new Workspace;
    } else {
      space_ = free_workspaces->back();
      free_workspaces->pop_back();
    }
  }
  ~Borrowed() {
    std::lock_guard<std::mutex> lock(*free_mutex);
    free_workspaces->push_back(space_);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Workspace& operator*() { return *space_; }

 private:
  Workspace* space_;
};

long id_at(const LayerArgs& a, long slot) {
  return a.ids_are_int64 ? ((const int64_t*)a.topk_ids)[slot] : ((const int32_t*)a.topk_ids)[slot];
}

// A GEMM's tasks: some tiles of one expert, with all or some of its rows. Counting them needs no list.
struct Stage {
  long tiles, group, groups, parts;
  long at_once;  // rows
  Stage(long tiles_, long experts, long rows, int workers, long at_once_) : tiles(tiles_), at_once(at_once_) {
    // Eight tasks a worker keep the ends together. Eight tiles at most stay in L2 while many rows pass; with few rows a
    // tile is met once, and a longer run of them is one straight line in memory. Even: a kernel may take two at once.
    const long most = rows > at_once * experts ? 8 : 32;
    group = std::clamp(tiles * experts / (8L * workers) / 2 * 2, 2L, most);
    groups = (tiles + group - 1) / group;
    // Narrow layers with many rows: each expert's rows are cut too.
    parts = std::clamp(4L * workers / (experts * groups), 1L, std::max(1L, rows / (kRowsAtOnce * experts)));
  }
};

struct Pass {
  const KernelFns& fns;
  const LayerArgs& a;
  long token_begin, tokens;
  long element() const { return a.dtype == kFloat32 ? 4 : 2; }
};

void run_pass(const Pass& pass, Workspace& w, int threads) {
  const LayerArgs& a = pass.a;
  const long slots = pass.tokens * a.topk, first_slot = pass.token_begin * a.topk;
  const long hidden = a.hidden, inter = a.intermediate;

  // Stable counting sort of the slots by local expert.
  int32_t* local = w.local.grow(slots);
  int32_t* begin = w.expert_begin.grow(a.local_experts + 1);
  std::fill(begin, begin + a.local_experts + 1, 0);
  for (long s = 0; s < slots; ++s) {
    const long id = id_at(a, first_slot + s);
    local[s] = a.expert_map ? a.expert_map[id] : (int32_t)id;
    if (local[s] >= 0) ++begin[local[s] + 1];
  }
  int32_t* active = w.active.grow(a.local_experts);
  long experts = 0;
  for (long e = 0; e < a.local_experts; ++e) {
    if (begin[e + 1]) active[experts++] = (int32_t)e;
    begin[e + 1] += begin[e];
  }
  const long positions = begin[a.local_experts];
  int32_t* position = w.position.grow(slots);
  int32_t* slot_of = w.slot_of.grow(positions);
  for (long s = 0; s < slots; ++s) {
    position[s] = local[s] < 0 ? -1 : begin[local[s]]++;
    if (position[s] >= 0) slot_of[position[s]] = (int32_t)s;
  }
  for (long e = a.local_experts; e > 0; --e) begin[e] = begin[e - 1];  // the sort moved each start to its end
  begin[0] = 0;

  if (!positions) {
    std::memset((char*)a.out + pass.token_begin * hidden * pass.element(), 0, pass.tokens * hidden * pass.element());
    return;
  }

  const bool per_slot = a.weight_on_input;
  const long stride1 = code_stride(hidden), stride2 = code_stride(inter), element = pass.element();
  float* weight = w.position_weight.grow(positions);
  for (long p = 0; p < positions; ++p) weight[p] = a.topk_weights[first_slot + slot_of[p]];
  const char* x = (const char*)a.hidden_states + pass.token_begin * hidden * element;

  int8_t* q = w.q.grow((positions + kSpareRows) * stride1);
  float* q_scale = w.q_scale.grow(positions);
  int32_t* q_sum = w.q_sum.grow(positions);
  char* h = w.h.grow(positions * inter * element);
  int8_t* hq = w.hq.grow((positions + kSpareRows) * stride2);
  float* h_scale = w.h_scale.grow(positions);
  int32_t* h_sum = w.h_sum.grow(positions);
  char* y = w.y.grow(positions * hidden * element);

  const long scratch_bytes = pass.fns.scratch ? kRowsAtOnce * std::max(stride1, stride2) : 0;
  int8_t* scratch = w.scratch.grow(threads * scratch_bytes);

  const bool gated = a.activation.gated;
  const long w13_rows = gated ? 2 * inter : inter;
  const Packed packed1(w13_rows, hidden, gated), packed2(hidden, inter, false);
  const long read = experts * (packed1.bytes + packed2.bytes);
  if (read * std::max(1L, positions / (4 * experts)) < kAloneBytes) threads = 1;
  const long bytes = pass.fns.code_bytes;
  const Stage stage1(packed1.tiles, experts, positions, threads, rows_at_once(bytes, hidden));
  const Stage stage2(packed2.tiles, experts, positions, threads, rows_at_once(bytes, inter));

  std::atomic<long> next[5] = {};
  run_region(threads, [&](Region& region, int worker) {
    const FloatMode exact;
    auto chunks = [&](int stage, long count, long chunk, auto&& body) {
      for (;;) {
        const long from = next[stage].fetch_add(chunk, std::memory_order_relaxed);
        if (from >= count) break;
        body(from, std::min(from + chunk, count));
      }
    };
    auto quantize = [&](long token, long p) {
      pass.fns.quantize_row({x + token * hidden * element, a.dtype, hidden, per_slot ? weight + p : nullptr,
                             q + p * stride1, q_scale + p, q_sum + p});
    };
    // A token's codes lie at each of its positions, so that an expert's rows follow one another.
    chunks(0, pass.tokens, 4, [&](long from, long to) {
      for (long token = from; token < to; ++token) {
        long first = -1;
        for (long s = token * a.topk; s < (token + 1) * a.topk; ++s) {
          const long p = position[s];
          if (p < 0) continue;
          if (first < 0 || per_slot) {
            quantize(token, p);
            first = p;
          } else {
            std::memcpy(q + p * stride1, q + first * stride1, stride1);
            q_scale[p] = q_scale[first], q_sum[p] = q_sum[first];
          }
        }
      }
    });
    region.barrier();
    auto gemm = [&](int stage, const Stage& cut, const Packed& packed, bool first) {
      const long per_expert = cut.groups * cut.parts;
      chunks(stage, experts * per_expert, 1, [&](long task, long) {
        const long e = active[task / per_expert], part = task % cut.parts, group = task % per_expert / cut.parts;
        const long rows = begin[e + 1] - begin[e];
        const uint64_t* hints = first ? a.w13_hints : a.w2_hints;
        const float* bias = first ? a.w13_bias : a.w2_bias;
        GemmArgs g{};
        g.q = first ? q : hq;
        g.q_scale = first ? q_scale : h_scale;
        g.q_sum = first ? q_sum : h_sum;
        g.w = (first ? a.w13 : a.w2) + e * packed.bytes;
        g.hints = hints ? hints + e * packed.hints : nullptr;
        g.w_scale = first ? a.w13_scale + e * w13_rows : a.w2_scale + e * hidden;
        g.bias = bias ? bias + e * (first ? w13_rows : hidden) : nullptr;
        g.k = first ? hidden : inter;
        g.n = first ? inter : hidden;
        g.tile_begin = group * cut.group;
        g.tile_end = std::min(g.tile_begin + cut.group, cut.tiles);
        g.pos_begin = begin[e] + rows * part / cut.parts;
        g.pos_end = begin[e] + rows * (part + 1) / cut.parts;
        g.rows_at_once = cut.at_once;
        g.scratch = scratch + worker * scratch_bytes;
        g.out = first ? h : y;
        g.dtype = a.dtype;
        g.activation = a.activation;
        g.position_weight = per_slot ? nullptr : weight;
        g.non_temporal =
            !first && a.dtype == kBFloat16 && hidden % 32 == 0 && positions * hidden * element > kNonTemporalBytes;
        (first ? pass.fns.gemm1 : pass.fns.gemm2)(g);
      });
#if defined(__x86_64__)
      __builtin_ia32_sfence();  // non-temporal stores come before the barrier
#endif
      region.barrier();
    };
    gemm(1, stage1, packed1, true);
    chunks(2, positions, 4, [&](long from, long to) {
      for (long p = from; p < to; ++p) {
        pass.fns.quantize_row(
            {h + p * inter * element, a.dtype, inter, nullptr, hq + p * stride2, h_scale + p, h_sum + p});
      }
    });
    region.barrier();
    gemm(3, stage2, packed2, false);
    const CombineArgs combine{y, position, a.topk, hidden, (char*)a.out + pass.token_begin * hidden * element, a.dtype};
    chunks(4, pass.tokens, 4, [&](long from, long to) { pass.fns.combine(combine, from, to); });
  });
}

}  // namespace

int run_layer(const KernelFns& fns, const LayerArgs& a, int threads, long* bad) {
  for (long e = 0; a.expert_map && e < a.num_experts; ++e) {
    if (a.expert_map[e] < -1 || a.expert_map[e] >= a.local_experts) return *bad = a.expert_map[e], kBadMapEntry;
  }
  for (long s = 0; s < a.tokens * a.topk; ++s) {
    const long id = id_at(a, s);
    if (id < 0 || id >= a.num_experts) return *bad = id, kBadExpertId;
  }
  const long step = std::max(1L, kMaxSlots / std::max(1L, a.topk));
  try {
    Borrowed space;
    for (long token = 0; token < a.tokens; token += step) {
      run_pass(Pass{fns, a, token, std::min(step, a.tokens - token)}, *space, std::max(1, threads));
    }
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  return kOk;
}

}  // namespace int8moe
