// Weight formats: how packed weights become vectors, and how rows become packed weights.
#pragma once
#include "product.hpp"

// Both bf16 and fp16 hold every e4m3 value exactly (fp16 times a power of two). The code of NaN,
// which no weight has, reads as NaN or as 480.
INLINE float fp8_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7)
                              : std::ldexp(mantissa / 8.f, -6);
  return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}

// Packed offsets are counted in elements: k * PANEL, for every format.
// Format<W, X>: STEP values of k are decoded at once into `w[STEP / PAIR][2]`; PAIR is the number
// of k that one multiply-add consumes.
template <class W, class X> struct Format;

template <> struct Format<float, float> {
  static constexpr int STEP = 1, PAIR = 1;
  INLINE void decode(const float* p, F (&w)[1][2]) { w[0][0] = load(p), w[0][1] = load(p + LANES); }
};

INLINE F low_half(Words w) { return from_bits(w << 16); }
INLINE F high_half(Words w) { return from_bits(w & 0xffff0000); }

template <> struct Format<bf16, float> {
  static constexpr int STEP = 2, PAIR = 1;
  INLINE void decode(const bf16* p, F (&w)[2][2]) {
    for (int g = 0; g < 2; g++) {
      const Words pair = load_words(p + g * 2 * LANES);
      w[0][g] = low_half(pair), w[1][g] = high_half(pair);
    }
  }
};

#if GLMFLASH_AVX512
template <> struct Format<bf16, bf16> {
  static constexpr int STEP = 2, PAIR = 2;
  INLINE void decode(const bf16* p, F (&w)[1][2]) {
    for (int g = 0; g < 2; g++) w[0][g] = load_as<F>(p + g * 2 * LANES);
  }
};

// Both bytes of the bf16 value of each code without its sign: two table look-ups of 128 bytes.
struct Fp8Table {
  alignas(64) std::uint8_t high[128], low[128];
  Fp8Table() {
    for (int i = 0; i < 128; i++) {
      const bf16 value = to_bf16(fp8_value(i));
      high[i] = value >> 8, low[i] = value & 255;
    }
  }
};
static const Fp8Table fp8_table;

template <> struct Format<fp8, bf16> {
  static constexpr int STEP = 4, PAIR = 2;
  INLINE void decode(const fp8* p, F (&w)[2][2]) {
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    const __m512i h0 = _mm512_load_si512(fp8_table.high), h1 = _mm512_load_si512(fp8_table.high + 64);
    const __m512i l0 = _mm512_load_si512(fp8_table.low), l1 = _mm512_load_si512(fp8_table.low + 64);
    for (int g = 0; g < 2; g++) {
      const __m512i code = _mm512_loadu_si512(p + g * 64);
      const __m512i low = _mm512_permutex2var_epi8(l0, code, l1);
      __m512i high = _mm512_permutex2var_epi8(h0, code, h1);
      high = _mm512_ternarylogic_epi64(high, code, sign, 0xf8);  // high | (code & sign)
      w[0][g] = (F)_mm512_unpacklo_epi8(low, high);
      w[1][g] = (F)_mm512_unpackhi_epi8(low, high);
    }
  }
};

template <> struct Format<fp8, float> {
  static constexpr int STEP = 4, PAIR = 1;
  INLINE void decode(const fp8* p, F (&w)[4][2]) {
    F pairs[2][2];
    Format<fp8, bf16>::decode(p, pairs);
    for (int j = 0; j < 2; j++)
      for (int g = 0; g < 2; g++) {
        w[2 * j][g] = low_half(bits(pairs[j][g]));
        w[2 * j + 1][g] = high_half(bits(pairs[j][g]));
      }
  }
};
#elif GLMFLASH_AVX2
// The bits of e4m3 moved into fp16 are the value times 2^-8, subnormals included.
template <> struct Format<fp8, float> {
  static constexpr int STEP = 1, PAIR = 1;
  INLINE void decode(const fp8* p, F (&w)[1][2]) {
    __m256i half = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    half = _mm256_and_si256(_mm256_slli_epi16(half, 7), _mm256_set1_epi16(short(0xbf80)));
    w[0][0] = (F)_mm256_cvtph_ps(_mm256_castsi256_si128(half)) * 256.f;
    w[0][1] = (F)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * 256.f;
  }
};
#else
template <> struct Format<fp8, float> {
  static constexpr int STEP = 1, PAIR = 1;
  INLINE void decode(const fp8* p, F (&w)[1][2]) {
    typedef fp8 Codes __attribute__((vector_size(LANES)));
    for (int g = 0; g < 2; g++) {
      const Words code = __builtin_convertvector(load_as<Codes>(p + g * LANES), Words);
      const Words normal = ((code & 0x7f) << 20) + (120u << 23);
      const F subnormal = __builtin_convertvector((Ints)(code & 7), F) * 0x1p-9f;
      const Words size = (code & 0x78) == 0 ? bits(subnormal) : normal;
      w[0][g] = from_bits(size | (code & 0x80) << 24);
    }
  }
};
#endif

// ---- rows to packed ----
// pack16: 16 bytes of each of PANEL rows, `stride` bytes apart, to their packed place.
#if GLMFLASH_AVX512 || GLMFLASH_AVX2
#if GLMFLASH_AVX512
typedef __m512i Rows;
#define OP(name) _mm512_##name
INLINE Rows gather(const char* p, std::int64_t s) {  // rows 0, 4, 8, 12
  Rows v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const __m128i*)(p + 4 * s)));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const __m128i*)(p + 8 * s)));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const __m128i*)(p + 12 * s)));
}
#else
typedef __m256i Rows;
#define OP(name) _mm256_##name
INLINE Rows gather(const char* p, std::int64_t s) {  // rows 0, 4
  const Rows v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return _mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i*)(p + 4 * s)), 1);
}

// 16 x 16 bytes transposed: four rounds of interleaving rows i and i + 8.
INLINE void transpose_bytes(const char* rows, std::int64_t stride, char* out) {
  __m128i v[16], t[16];
  for (int r = 0; r < 16; r++) v[r] = _mm_loadu_si128((const __m128i*)(rows + r * stride));
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < 8; i++) {
      t[2 * i] = _mm_unpacklo_epi8(v[i], v[i + 8]);
      t[2 * i + 1] = _mm_unpackhi_epi8(v[i], v[i + 8]);
    }
    for (int i = 0; i < 16; i++) v[i] = t[i];
  }
  for (int k = 0; k < 16; k++) _mm_storeu_si128((__m128i*)(out + k * 16), v[k]);
}
#endif

// 4 x 4 words transposed in every 128-bit lane. An fp8 word is four k of one row: interleaving 16
// and then 32 bits puts the first two k of four rows before the last two.
template <class W> INLINE void pack16(const char* rows, std::int64_t stride, char* out) {
  constexpr bool is_fp8 = sizeof(W) == 1;
#if GLMFLASH_AVX2
  if (is_fp8) return transpose_bytes(rows, stride, out);
#endif
  for (int g = 0; g < 2; g++) {
    const char* p = rows + g * LANES * stride;
    const Rows a = gather(p, stride), b = gather(p + stride, stride);
    const Rows c = gather(p + 2 * stride, stride), d = gather(p + 3 * stride, stride);
    const Rows t[4] = {
        is_fp8 ? OP(unpacklo_epi16)(a, b) : OP(unpacklo_epi32)(a, b),
        is_fp8 ? OP(unpackhi_epi16)(a, b) : OP(unpackhi_epi32)(a, b),
        is_fp8 ? OP(unpacklo_epi16)(c, d) : OP(unpacklo_epi32)(c, d),
        is_fp8 ? OP(unpackhi_epi16)(c, d) : OP(unpackhi_epi32)(c, d),
    };
    for (int i = 0; i < 2; i++) {
      const Rows low = is_fp8 ? OP(unpacklo_epi32)(t[i], t[2 + i]) : OP(unpacklo_epi64)(t[i], t[2 + i]);
      const Rows high = is_fp8 ? OP(unpackhi_epi32)(t[i], t[2 + i]) : OP(unpackhi_epi64)(t[i], t[2 + i]);
      std::memcpy(out + (4 * i + g) * sizeof(Rows), &low, sizeof low);
      std::memcpy(out + (4 * i + 2 + g) * sizeof(Rows), &high, sizeof high);
    }
  }
}
#undef OP
#else
template <class W> INLINE void pack16(const char* rows, std::int64_t stride, char* out) {
  constexpr int TOGETHER = sizeof(W) == 2 ? 2 : 1;  // k side by side
  for (int r = 0; r < PANEL; r++)
    for (int k = 0; k < int(16 / sizeof(W)); k++)
      std::memcpy(out + ((k / TOGETHER * PANEL + r) * TOGETHER + k % TOGETHER) * sizeof(W),
                  rows + r * stride + k * sizeof(W), sizeof(W));
}
#endif
