// Physical limits of an AVX2 machine, as a shared library driven from Python:
//   dram_read_gbs  : streaming read of a buffer far larger than L3
//   int8_peak_gops : register-resident signed int8 dot product the AVX2 way (sign trick +
//                    maddubs + madd + add), and variants that leave out the sign step
//   fma_peak_gflops: fp32 multiply-adds from registers
// build.sh builds it.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static volatile int64_t sink;

double dram_read_gbs(int64_t bytes, int threads, int reps) {
  char* p = aligned_alloc(4096, bytes);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < bytes; i += 4096) memset(p + i, (int)(i >> 12), 4096);
  double best = 0;
  for (int r = 0; r < reps; r++) {
    int64_t tot = 0;
    double t0 = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : tot)
    {
      int t = omp_get_thread_num();
      int64_t n = bytes / threads & ~(int64_t)511;
      const char* q = p + t * n;
      __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
      for (int64_t i = 0; i < n; i += 256) {
        a = _mm256_add_epi64(a, _mm256_load_si256((const __m256i*)(q + i)));
        b = _mm256_add_epi64(b, _mm256_load_si256((const __m256i*)(q + i + 32)));
        c = _mm256_add_epi64(c, _mm256_load_si256((const __m256i*)(q + i + 64)));
        d = _mm256_add_epi64(d, _mm256_load_si256((const __m256i*)(q + i + 96)));
        a = _mm256_add_epi64(a, _mm256_load_si256((const __m256i*)(q + i + 128)));
        b = _mm256_add_epi64(b, _mm256_load_si256((const __m256i*)(q + i + 160)));
        c = _mm256_add_epi64(c, _mm256_load_si256((const __m256i*)(q + i + 192)));
        d = _mm256_add_epi64(d, _mm256_load_si256((const __m256i*)(q + i + 224)));
      }
      a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
      tot += _mm256_extract_epi64(a, 0) + _mm256_extract_epi64(a, 3);
    }
    double dt = omp_get_wtime() - t0;
    sink += tot;
    double g = bytes / dt * 1e-9;
    if (g > best) best = g;
  }
  free(p);
  return best;
}

// kind 0: sign,sign,maddubs,madd,add    (signed x signed, the sign step on both operands per product)
// kind 1: sign,maddubs,madd,add         (|a| prepared once per row, only b's sign step left)
// kind 2: maddubs,madd,add              (operands biased to unsigned x signed beforehand, 7-bit safe)
// kind 3: madd16 only: int16 x int16 madd + add (weights widened to int16 beforehand)
// kind 4: maddubs,maddubs,add16,madd,add (two products summed in int16 before widening; 6-bit safe)
// The operands stay in registers; 12 accumulators hide the latency.
double int8_peak_gops(int kind, int threads, int64_t iters) {
  double t0 = 0, t1 = 0;
#pragma omp parallel num_threads(threads)
  {
    __m256i acc[12], one = _mm256_set1_epi16(1);
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2);
    for (int k = 0; k < 12; k++) acc[k] = _mm256_setzero_si256();
#pragma omp barrier
#pragma omp master
    t0 = omp_get_wtime();
#define LOOP(...)                                           \
  for (int64_t i = 0; i < iters; i++) {                     \
    _Pragma("GCC unroll 12") for (int k = 0; k < 12; k++) { \
      __asm__ volatile("" : "+x"(a), "+x"(b));              \
      __VA_ARGS__                                           \
    }                                                       \
  }
    if (kind == 0)
      LOOP(__m256i ua = _mm256_sign_epi8(a, a), sb = _mm256_sign_epi8(b, a);
           acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(_mm256_maddubs_epi16(ua, sb), one));)
    else if (kind == 1)
      LOOP(__m256i sb = _mm256_sign_epi8(b, a);
           acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(_mm256_maddubs_epi16(a, sb), one));)
    else if (kind == 2)
      LOOP(acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), one));)
    else if (kind == 3)
      LOOP(acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(a, b));)
    else
      LOOP(__m256i p = _mm256_maddubs_epi16(a, b); __asm__ volatile("" : "+x"(a), "+x"(b));
           __m256i q = _mm256_maddubs_epi16(a, b);
           acc[k] = _mm256_add_epi32(acc[k], _mm256_madd_epi16(_mm256_add_epi16(p, q), one));)
#pragma omp barrier
#pragma omp master
    t1 = omp_get_wtime();
    __m256i s = acc[0];
    for (int k = 1; k < 12; k++) s = _mm256_add_epi32(s, acc[k]);
#pragma omp atomic
    sink += _mm256_extract_epi32(s, 0);
  }
  double mac = kind == 3 ? 16 : kind == 4 ? 64 : 32;  // multiply-adds per step
  return 2.0 * mac * 12 * iters * threads / (t1 - t0) * 1e-9;
}

// fp32 FMA peak from registers, GFLOP/s
double fma_peak_gflops(int threads, int64_t iters) {
  double t0 = 0, t1 = 0;
#pragma omp parallel num_threads(threads)
  {
    __m256 acc[12], a = _mm256_set1_ps(1.0001f), b = _mm256_set1_ps(0.9999f);
    for (int k = 0; k < 12; k++) acc[k] = _mm256_setzero_ps();
#pragma omp barrier
#pragma omp master
    t0 = omp_get_wtime();
    for (int64_t i = 0; i < iters; i++) {
      _Pragma("GCC unroll 12") for (int k = 0; k < 12; k++) {
        __asm__ volatile("" : "+x"(a), "+x"(b));
        acc[k] = _mm256_fmadd_ps(a, b, acc[k]);
      }
    }
#pragma omp barrier
#pragma omp master
    t1 = omp_get_wtime();
    __m256 s = acc[0];
    for (int k = 1; k < 12; k++) s = _mm256_add_ps(s, acc[k]);
#pragma omp atomic
    sink += (int64_t)_mm256_cvtss_f32(s);
  }
  return 2.0 * 8 * 12 * iters * threads / (t1 - t0) * 1e-9;
}
