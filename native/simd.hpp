// The small vector layer: the same names for every instruction set.
//
// F is the widest fp32 vector (16, 8 or 4 lanes). GCC and clang vector types give + - * and
// indexing everywhere; what they lack is here. On a plain compiler (or NEON) F has 4 lanes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define GLMFLASH_AVX512 1
constexpr int LANES = 16;
#elif defined(__AVX2__)
#define GLMFLASH_AVX2 1
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef std::uint16_t bf16;
typedef std::uint8_t fp8;  // e4m3: 4 exponent bits (bias 7), 3 mantissa bits, no infinity

template <class V> INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
INLINE F load(const float* p) { return load_as<F>(p); }
INLINE Words load_words(const void* p) { return load_as<Words>(p); }
INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
INLINE F zero() { return F{}; }
INLINE F set1(float x) {  // bit for bit, so that it also spreads a pair of bf16
#if GLMFLASH_AVX512
  return (F)_mm512_set1_ps(x);
#elif GLMFLASH_AVX2
  return (F)_mm256_set1_ps(x);
#else
  return F{x, x, x, x};
#endif
}
INLINE Words bits(F v) { return (Words)v; }
INLINE F from_bits(Words v) { return (F)v; }

// a * b + c with one rounding. The portable set rounds twice where the processor has no FMA.
INLINE F fma(F a, F b, F c) {
#if GLMFLASH_AVX512
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif GLMFLASH_AVX2
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  F r;
  for (int i = 0; i < LANES; i++) r[i] = std::fma(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;  // a library call per lane would be far slower
#endif
#endif
}
// Where one is NaN the result is b.
INLINE F min(F a, F b) {
#if GLMFLASH_AVX512  // one instruction even where b is a constant
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}
INLINE F max(F a, F b) {
#if GLMFLASH_AVX512
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

INLINE F select(Ints condition, F yes, F no) { return condition ? yes : no; }

// bf16 in memory: exact when read, rounded to nearest even when written (NaN stays NaN).
// (Compilers split the 512-bit conversions in two: hence the intrinsics.)
INLINE F load(const bf16* p) {
#if GLMFLASH_AVX512
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
  return from_bits(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
#endif
}
INLINE Words round_bits(F v) {  // fp32 bits of v rounded to bf16
  const Words u = bits(v);
  return ((u & 0x7fffffff) > 0x7f800000 ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) & 0xffff0000;
}
INLINE void store(bf16* p, F v) {
#if GLMFLASH_AVX512
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)(round_bits(v) >> 16)));
#else
  const Halves h = __builtin_convertvector(round_bits(v) >> 16, Halves);
  std::memcpy(p, &h, sizeof h);
#endif
}
INLINE F round_to_bf16(F v) { return from_bits(round_bits(v)); }

// Sum of the lanes, by halves: one fixed tree.
INLINE float sum(F v) {
  float lane[LANES];
  store(lane, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

// e^x within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays NaN.
INLINE F exp(F x) {
  const F y = x < -87.33654f ? zero() - 87.33654f : x > 88.72283f ? zero() + 88.72283f : x;
  const F magic = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const F n = fma(y, set1(1.44269504f), magic) - magic;
  const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), y));  // y - n ln 2
  F p = set1(1.9875691500e-4f);  // e^r = 1 + r + r^2 p(r)
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, .5f})
    p = fma(p, r, set1(c));
  p = fma(p, r * r, r) + 1.f;
  const Ints half = __builtin_convertvector(n, Ints) >> 1;  // 2^n in two steps: n may be 128
  const Ints rest = __builtin_convertvector(n, Ints) - half;
  const F scaled = p * (F)((half + 127) << 23) * (F)((rest + 127) << 23);
  return x < -87.33654f ? zero() : x > 88.72283f ? zero() + INFINITY : scaled;
}
INLINE F sigmoid(F x) { return 1.f / (1.f + exp(zero() - x)); }
INLINE F silu(F x) { return x * sigmoid(x); }

// Scalars.
INLINE float to_float(bf16 x) {
  const std::uint32_t u = std::uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
INLINE float to_float(float x) { return x; }
// Round to nearest even; NaN stays NaN.
INLINE bf16 to_bf16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return bf16(u >> 16 | 0x40);
  return bf16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
