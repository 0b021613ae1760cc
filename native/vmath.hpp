// Rows of fp32 or bf16 with exact tails, and the cheap exp and sigmoid of gates.
#pragma once
#include "simd.hpp"

typedef std::int64_t Index;

INLINE Index round_up(Index n, Index step) { return (n + step - 1) / step * step; }

// Keeps a spread value in a register: compilers read it from memory at every use instead.
INLINE F in_register(F v) {
#if GLMFLASH_AVX512
  asm("" : "+v"(v));
#elif GLMFLASH_AVX2
  asm("" : "+x"(v));
#endif
  return v;
}

// For values between two steps of a kernel: with AVX-512 subnormal results become 0.
template <class E> INLINE F round_to(F v) {
  if constexpr (sizeof(E) == 4) return v;
#if GLMFLASH_AVX512
  const __m256i h = (__m256i)_mm512_cvtneps_pbh((__m512)v);
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
  return round_to_bf16(v);
#endif
}
template <class E> INLINE float round_to(float x) {
  if constexpr (sizeof(E) == 2) return to_float(to_bf16(x));
  else return x;
}

// Of the n elements that a row still has, at most LANES: missing lanes are 0 and never stored.
template <class E> INLINE F load_row(const E* p, Index n) {
  if (n >= LANES) return load(p);
  E part[LANES] = {};
  if (n > 0) std::memcpy(part, p, n * sizeof(E));
  return load(part);
}
template <class E> INLINE void store_row(E* p, F v, Index n) {
  if (n >= LANES) return store(p, v);
  E part[LANES];
  store(part, v);
  std::memcpy(p, part, n * sizeof(E));
}

// e^x within 2e-7 relative for x in [-87.3, 88.3]; outside, the value at the end. NaN stays NaN.
// Half the operations of exp(), for the gates: hundreds of them per head and token.
INLINE F quick_exp(F x) {
  x = min(set1(88.3f), max(set1(-87.3f), x));
  const F shifted = fma(x, set1(1.44269504f), set1(12582912.f));  // + 1.5 * 2^23: to an integer
  const F n = shifted - 12582912.f;
  const F r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));  // x - n ln 2
  F p = set1(1.3814540e-3f);  // minimax for |r| <= ln 2 / 2
  for (float c : {8.3687452e-3f, 4.1668391e-2f, 1.6666520e-1f, 4.9999993e-1f})
    p = fma(p, r, set1(c));
  p = fma(p, r * r, r) + 1.f;
  return p * from_bits((bits(shifted) << 23) + 0x3f800000u);
}
// 1 / x within 2 units in the last place, for x in [1, 2^126].
INLINE F reciprocal(F x) {
#if GLMFLASH_AVX512
  const F r = (F)_mm512_maskz_rcp14_ps(-1, (__m512)x);
  return fma(r, fma(zero() - x, r, set1(1.f)), r);
#else
  return 1.f / x;
#endif
}
INLINE F quick_sigmoid(F x) { return reciprocal(quick_exp(zero() - x) + 1.f); }
INLINE float quick_sigmoid(float x) { return quick_sigmoid(set1(x))[0]; }
INLINE float inverse_root(float x) { return 1.f / std::sqrt(x); }
