// One layer call: routing, then four stages cut into tasks for the threads. Knows no instruction set.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "moe.h"
#include "threads.h"

namespace int8moe {

namespace {

// Slots (tokens times topk) of one pass; more tokens go in several, so that the workspace stays bounded.
constexpr long kMaxSlots = 16384;
// Weight bytes below which waking a second thread costs more than it saves (about 20 us of reading).
constexpr long kAloneBytes = 200 * 1024;

// Memory of a call. Kept from call to call, so that the steady state allocates nothing.
struct Workspace {
  std::vector<int32_t> local, position, slot_of, row_of, expert_begin, active;
  std::vector<float> q_scale, h_scale, position_weight, slot_weight, h, y;
  std::vector<int8_t> q, hq;
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

template <class T>
T* grow(std::vector<T>& v, long n) {
  if ((long)v.size() < n) v.resize(n);
  return v.data();
}

long id_at(const LayerArgs& a, long slot) {
  return a.ids_are_int64 ? ((const int64_t*)a.topk_ids)[slot] : ((const int32_t*)a.topk_ids)[slot];
}

// A task: tiles of one expert. Counting them needs no list: task = expert index * groups + group.
struct Stage {
  long tiles, group, groups;
  Stage(long tiles_, long experts, int workers) : tiles(tiles_) {
    // Eight tasks a worker keep the ends together; eight tiles at most stay in L2 while many rows pass.
    group = std::clamp(tiles * experts / (8L * workers), 1L, 8L);
    groups = (tiles + group - 1) / group;
  }
};

struct Pass {
  const KernelFns& fns;
  const LayerArgs& a;
  long token_begin, tokens;
};

void run_pass(const Pass& pass, Workspace& w, int threads) {
  const LayerArgs& a = pass.a;
  const long slots = pass.tokens * a.topk, first_slot = pass.token_begin * a.topk;
  const long hidden = a.hidden, inter = a.intermediate;

  // Stable counting sort of the slots by local expert.
  int32_t* local = grow(w.local, slots);
  int32_t* begin = grow(w.expert_begin, a.local_experts + 1);
  std::fill(begin, begin + a.local_experts + 1, 0);
  for (long s = 0; s < slots; ++s) {
    const long id = id_at(a, first_slot + s);
    local[s] = a.expert_map ? a.expert_map[id] : (int32_t)id;
    if (local[s] >= 0) ++begin[local[s] + 1];
  }
  int32_t* active = grow(w.active, a.local_experts);
  long experts = 0;
  for (long e = 0; e < a.local_experts; ++e) {
    if (begin[e + 1]) active[experts++] = (int32_t)e;
    begin[e + 1] += begin[e];
  }
  const long positions = begin[a.local_experts];
  int32_t* position = grow(w.position, slots);
  int32_t* slot_of = grow(w.slot_of, positions);
  for (long s = 0; s < slots; ++s) {
    position[s] = local[s] < 0 ? -1 : begin[local[s]]++;
    if (position[s] >= 0) slot_of[position[s]] = (int32_t)s;
  }
  for (long e = a.local_experts; e > 0; --e) begin[e] = begin[e - 1];  // the sort moved each start to its end
  begin[0] = 0;

  const bool per_slot = a.weight_on_input;
  const long rows = per_slot ? positions : pass.tokens;
  const long kp1 = padded_columns(hidden), kp2 = padded_columns(inter);
  int32_t* row_of = grow(w.row_of, positions);
  float* weight = grow(w.position_weight, positions);
  for (long p = 0; p < positions; ++p) {
    row_of[p] = slot_of[p] / (int32_t)a.topk;
    weight[p] = a.topk_weights[first_slot + slot_of[p]];
  }
  const long element = a.dtype == kFloat32 ? 4 : 2;
  const char* x = (const char*)a.hidden_states + pass.token_begin * hidden * element;

  int8_t* q = grow(w.q, rows * kp1);
  float* q_scale = grow(w.q_scale, rows);
  float* h = grow(w.h, positions * inter);
  int8_t* hq = grow(w.hq, positions * kp2);
  float* h_scale = grow(w.h_scale, positions);
  float* y = grow(w.y, positions * hidden);

  const bool gated = a.activation.gated;
  const long tiles1 = gated ? (inter + 7) / 8 : (inter + kTileRows - 1) / kTileRows;
  const long tiles2 = (hidden + kTileRows - 1) / kTileRows;
  const long bytes1 = tiles1 * kTileRows * kp1, bytes2 = tiles2 * kTileRows * kp2;
  const long w13_rows = gated ? 2 * inter : inter;
  if (experts * (bytes1 + bytes2) * std::max(1L, positions / (4 * std::max(1L, experts))) < kAloneBytes) threads = 1;
  const Stage stage1(tiles1, experts, threads), stage2(tiles2, experts, threads);

  std::atomic<long> next[5] = {};
  run_region(threads, [&](Region& region, int) {
    const FloatMode exact;
    auto chunks = [&](int stage, long count, long chunk, auto&& body) {
      for (;;) {
        const long from = next[stage].fetch_add(chunk, std::memory_order_relaxed);
        if (from >= count) break;
        body(from, std::min(from + chunk, count));
      }
    };
    if (per_slot) {
      // One row a position: the token's row times its router weight.
      chunks(0, positions, 4, [&](long from, long to) {
        for (long p = from; p < to; ++p) {
          QuantizeArgs args{x + row_of[p] * hidden * element, a.dtype, hidden, 1, weight + p, q + p * kp1, q_scale + p};
          pass.fns.quantize_rows(args, 0, 1);
        }
      });
    } else {
      const QuantizeArgs args{x, a.dtype, hidden, 1, nullptr, q, q_scale};
      chunks(0, rows, 4, [&](long from, long to) { pass.fns.quantize_rows(args, from, to); });
    }
    region.barrier();
    auto gemm = [&](int stage, const Stage& cut, bool first) {
      chunks(stage, experts * cut.groups, 1, [&](long task, long) {
        const long e = active[task / cut.groups], group = task % cut.groups;
        GemmArgs g{};
        g.q = first ? q : hq;
        g.q_scale = first ? q_scale : h_scale;
        g.row_of = first && !per_slot ? row_of : nullptr;
        g.w = first ? a.w13 + e * bytes1 : a.w2 + e * bytes2;
        g.w_scale = first ? a.w13_scale + e * w13_rows : a.w2_scale + e * hidden;
        const float* bias = first ? a.w13_bias : a.w2_bias;
        g.bias = bias ? bias + e * (first ? w13_rows : hidden) : nullptr;
        g.k = first ? hidden : inter;
        g.n = first ? inter : hidden;
        g.tile_begin = group * cut.group;
        g.tile_end = std::min(g.tile_begin + cut.group, cut.tiles);
        g.pos_begin = begin[e];
        g.pos_end = begin[e + 1];
        g.out = first ? h : y;
        g.dtype = a.dtype;
        g.activation = a.activation;
        g.position_weight = per_slot ? nullptr : weight;
        (first ? pass.fns.gemm1 : pass.fns.gemm2)(g);
      });
      region.barrier();
    };
    gemm(1, stage1, true);
    const QuantizeArgs args{h, kFloat32, inter, 1, nullptr, hq, h_scale};
    chunks(2, positions, 4, [&](long from, long to) { pass.fns.quantize_rows(args, from, to); });
    region.barrier();
    gemm(3, stage2, false);
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
