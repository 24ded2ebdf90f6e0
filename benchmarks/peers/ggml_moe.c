// One MoE feed-forward layer on ggml's CPU backend, callable through ctypes.
// Written against ggml's public headers only; CMakeLists.txt beside this file builds it. IK_FORK is set for
// ik_llama.cpp's ggml, and IK_NO_FA where that is built without flash attention, which leaves two symbols undefined.
#include "ggml.h"
#ifndef IK_FORK
#include "ggml-cpu.h"
#endif
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int E, K, H, I, type, merged;
  struct ggml_context* ctx;
  struct ggml_tensor *gate, *up, *gate_up, *down;
} moe_t;

typedef struct {
  moe_t* m;
  int M;
  struct ggml_context* ctx;
  struct ggml_tensor *x, *ids, *w, *out;
  struct ggml_cgraph* g;
  struct ggml_cplan plan;
#ifndef IK_FORK
  struct ggml_threadpool* pool;
#endif
} plan_t;

// The number of a type by ggml's name for it ("q8_0"), or -1.
int moe_type(const char* name) {
  for (int t = 0; t < GGML_TYPE_COUNT; t++) {
    const char* n = ggml_type_name((enum ggml_type)t);
    if (n && strcmp(n, name) == 0) return t;
  }
  return -1;
}

// One layer's weights, not yet filled. merged: gate and up rows in one tensor.
void* moe_new(int type, int merged, int E, int K, int H, int I) {
  moe_t* m = calloc(1, sizeof *m);
  m->E = E;
  m->K = K;
  m->H = H;
  m->I = I;
  m->type = type;
  m->merged = merged;
  size_t bytes = (size_t)E * (2 * (size_t)I * ggml_row_size(type, H) + (size_t)H * ggml_row_size(type, I));
  struct ggml_init_params p = {bytes + (1 << 20), NULL, false};
  m->ctx = ggml_init(p);
  if (!m->ctx) return NULL;
  if (merged)
    m->gate_up = ggml_new_tensor_3d(m->ctx, type, H, 2 * I, E);
  else {
    m->gate = ggml_new_tensor_3d(m->ctx, type, H, I, E);
    m->up = ggml_new_tensor_3d(m->ctx, type, H, I, E);
  }
  m->down = ggml_new_tensor_3d(m->ctx, type, I, H, E);
  return m;
}

static void put(struct ggml_tensor* t, int e, int row, const float* src, int rows, int cols) {
  char* dst = (char*)t->data + e * t->nb[2] + row * ggml_row_size(t->type, cols);
  ggml_quantize_chunk(t->type, src, dst, 0, rows, cols, NULL);
}

// Quantise one expert: gate and up float [I, H], down float [H, I].
void moe_set_expert(void* h, int e, const float* gate, const float* up, const float* down) {
  moe_t* m = h;
  if (m->merged) {
    put(m->gate_up, e, 0, gate, m->I, m->H);
    put(m->gate_up, e, m->I, up, m->I, m->H);
  } else {
    put(m->gate, e, 0, gate, m->I, m->H);
    put(m->up, e, 0, up, m->I, m->H);
  }
  put(m->down, e, 0, down, m->H, m->I);
}

// The graph for M tokens.
void* moe_plan(void* h, int M, int threads) {
  moe_t* m = h;
  plan_t* p = calloc(1, sizeof *p);
  p->m = m;
  p->M = M;
  size_t bytes = 4ull * M * (2ull * m->H + (size_t)m->K * (5ull * m->I + (m->K + 3ull) * m->H)) + (64 << 20);
  struct ggml_init_params ip = {bytes, NULL, false};
  struct ggml_context* c = p->ctx = ggml_init(ip);
  p->x = ggml_new_tensor_3d(c, GGML_TYPE_F32, m->H, 1, M);
  p->ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, m->K, M);
  p->w = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, m->K, M);
  struct ggml_tensor* a;
#ifdef IK_FORK
  a = ggml_moe_up_gate(c, m->up, m->gate, p->x, p->ids, GGML_UNARY_OP_SILU);
  a = ggml_mul_mat_id(c, m->down, a, p->ids);
  p->out = ggml_mul_multi_add(c, a, p->w);
#else
  if (m->merged) {
    struct ggml_tensor* gu = ggml_mul_mat_id(c, m->gate_up, p->x, p->ids);
    struct ggml_tensor* g = ggml_view_3d(c, gu, m->I, m->K, M, gu->nb[1], gu->nb[2], 0);
    struct ggml_tensor* u = ggml_view_3d(c, gu, m->I, m->K, M, gu->nb[1], gu->nb[2], m->I * gu->nb[0]);
    a = ggml_swiglu_split(c, g, u);
  } else {
    struct ggml_tensor* u = ggml_mul_mat_id(c, m->up, p->x, p->ids);
    struct ggml_tensor* g = ggml_mul_mat_id(c, m->gate, p->x, p->ids);
    a = ggml_swiglu_split(c, g, u);
  }
  a = ggml_mul(c, ggml_mul_mat_id(c, m->down, a, p->ids), p->w);
  struct ggml_tensor* s = ggml_view_2d(c, a, m->H, M, a->nb[2], 0);
  for (int k = 1; k < m->K; k++) s = ggml_add(c, s, ggml_view_2d(c, a, m->H, M, a->nb[2], k * a->nb[1]));
  p->out = s;
#endif
  p->g = ggml_new_graph(c);
  ggml_build_forward_expand(p->g, p->out);
#ifdef IK_FORK
  p->plan = ggml_graph_plan(p->g, threads);
#else
  ggml_cpu_init();
  struct ggml_threadpool_params tp = ggml_threadpool_params_default(threads);
  p->pool = ggml_threadpool_new(&tp);
  p->plan = ggml_graph_plan(p->g, threads, p->pool);
#endif
  if (p->plan.work_size) p->plan.work_data = aligned_alloc(64, (p->plan.work_size + 4095) & ~4095ull);
  return p;
}

// The same plan may be pointed at another layer's weights of the same shape.
int moe_run(void* h, void* layer, const float* x, const int32_t* ids, const float* w, float* out) {
  plan_t* p = h;
  moe_t *m = p->m, *l = layer;
  void* save[4] = {0};
  struct ggml_tensor* a[4] = {m->gate, m->up, m->gate_up, m->down};
  struct ggml_tensor* b[4] = {l->gate, l->up, l->gate_up, l->down};
  for (int i = 0; i < 4; i++)
    if (a[i]) {
      save[i] = a[i]->data;
      a[i]->data = b[i]->data;
    }
  memcpy(p->x->data, x, 4ull * m->H * p->M);
  memcpy(p->ids->data, ids, 4ull * m->K * p->M);
  memcpy(p->w->data, w, 4ull * m->K * p->M);
  int rc = ggml_graph_compute(p->g, &p->plan);
  memcpy(out, p->out->data, 4ull * m->H * p->M);
  for (int i = 0; i < 4; i++)
    if (a[i]) a[i]->data = save[i];
  return rc;
}

#ifdef IK_NO_FA
size_t iqk_fa_work_buffer_size(const struct ggml_tensor* t, int n) {
  (void)t;
  (void)n;
  return 0;
}
bool iqk_flash_attn_noalibi(void) { abort(); }
#endif

void moe_plan_free(void* h) {
  plan_t* p = h;
#ifndef IK_FORK
  ggml_threadpool_free(p->pool);
#endif
  ggml_free(p->ctx);
  free(p->plan.work_data);
  free(p);
}

void moe_free(void* h) {
  moe_t* m = h;
  ggml_free(m->ctx);
  free(m);
}
