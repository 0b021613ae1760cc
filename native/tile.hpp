// Small matrix products for operands that change with every call (attention, pool scores).
//
// Everything is made of 4-byte units along the summed axis: one fp32 value, or two neighbouring
// bf16 values where the processor multiplies pairs (PACK = 2), or four bytes (PACK = 4). One side broadcasts units, the
// other holds them as vectors [units][columns]. A result is one accumulator over ascending units
// whatever the number of rows, columns or pieces, so results do not depend on the blocking.
#pragma once
#include "vmath.hpp"

typedef float Unit __attribute__((may_alias, aligned(1)));

// Values in a unit when the elements are E and every summed length is even.
template <class E> constexpr int MOST = LANES == 16 && sizeof(E) == 2 ? 2 : 1;

// PACK = 4: four unsigned bytes of a times four signed ones of b, summed as 32-bit integers.
INLINE F multiply_add_bytes(F sum, F a, F b) {
#if GLMFLASH_AVX512
  return (F)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
  const Words u = bits(a);
  const Ints v = (Ints)b;
#if GLMFLASH_AVX2  // even and odd bytes as 16-bit values, multiplied in pairs
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)v, 8), 8);
  const __m256i odd = _mm256_srai_epi16((__m256i)v, 8);
  const Words low = u & 0x00ff00ffu, high = u >> 8 & 0x00ff00ffu;
  return (F)((Ints)sum + (Ints)_mm256_madd_epi16((__m256i)low, even) +
             (Ints)_mm256_madd_epi16((__m256i)high, odd));
#else
  Ints total = (Ints)sum;
  for (int byte = 0; byte < 4; byte++)
    total += (Ints)(u >> 8 * byte & 255u) * (v << (24 - 8 * byte) >> 24);
  return (F)total;
#endif
#endif
}
template <int PACK> INLINE F multiply_add(F sum, F a, F b) {
  if constexpr (PACK == 4) return multiply_add_bytes(sum, a, b);
#if GLMFLASH_AVX512
  if constexpr (PACK == 2) return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return fma(a, b, sum);
}

// One block of results in registers. row(i) is where the broadcast units of row i begin.
template <int PACK, int ROWS, int VECTORS, class Row>
INLINE void tile(Row row, Index step, const Unit* b, Index ldb, Index units, float* out, Index ldo,
                 bool add) {
  const Unit* a[ROWS];
  F acc[ROWS][VECTORS];
  for (int i = 0; i < ROWS; i++) {
    a[i] = row(i);
    for (int n = 0; n < VECTORS; n++)
      acc[i][n] = add ? load(out + i * ldo + n * LANES) : zero();
  }
  for (Index u = 0; u < units; u++) {
    F vectors[VECTORS];
    for (int n = 0; n < VECTORS; n++) vectors[n] = load_as<F>(b + u * ldb + n * LANES);
    for (int i = 0; i < ROWS; i++) {
      const F x = set1(a[i][u * step]);
      for (int n = 0; n < VECTORS; n++) acc[i][n] = multiply_add<PACK>(acc[i][n], x, vectors[n]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int n = 0; n < VECTORS; n++) store(out + i * ldo + n * LANES, acc[i][n]);
}

// out[i][n] (+)= sum over u of row(i)[u * step] . b[u][n] for `rows` rows and `columns` columns
// (a multiple of LANES). Few rows take wide blocks, so that there are always enough chains.
template <int PACK, int ROWS, int VECTORS, class Row>
INLINE void column_blocks(Row row, Index step, const Unit* b, Index ldb, Index columns, Index units,
                          float* out, Index ldo, bool add) {
  Index n = 0;
  for (; n + VECTORS * LANES <= columns; n += VECTORS * LANES)
    tile<PACK, ROWS, VECTORS>(row, step, b + n, ldb, units, out + n, ldo, add);
  if constexpr (VECTORS > 1)
    if (n < columns)
      column_blocks<PACK, ROWS, VECTORS / 2>(row, step, b + n, ldb, columns - n, units, out + n,
                                             ldo, add);
}
template <int PACK, int ROWS, int VECTORS, class Row>
INLINE Index row_blocks(Row row, Index i, Index rows, Index step, const Unit* b, Index ldb,
                        Index columns, Index units, float* out, Index ldo, bool add) {
  for (; i + ROWS <= rows; i += ROWS)
    column_blocks<PACK, ROWS, VECTORS>([&](int j) { return row(i + j); }, step, b, ldb, columns,
                                       units, out + i * ldo, ldo, add);
  return i;
}
template <int PACK, class Row>
INLINE void multiply(Row row, Index rows, Index step, const Unit* b, Index ldb, Index columns,
                     Index units, float* out, Index ldo, bool add = false) {
  constexpr int MANY = LANES == 16 ? 8 : 4;
  constexpr Index PANEL = 2 * LANES;  // columns whose vectors stay near while all rows pass
  Index done = 0;
  if (rows >= MANY)
    for (Index n = 0; n < columns; n += PANEL)
      done = row_blocks<PACK, MANY, 2>(row, 0, rows, step, b + n, ldb,
                                       columns - n < PANEL ? columns - n : PANEL, units, out + n,
                                       ldo, add);
  if constexpr (MANY == 8)
    done = row_blocks<PACK, 4, 4>(row, done, rows, step, b, ldb, columns, units, out, ldo, add);
  done = row_blocks<PACK, 2, 4>(row, done, rows, step, b, ldb, columns, units, out, ldo, add);
  row_blocks<PACK, 1, 8>(row, done, rows, step, b, ldb, columns, units, out, ldo, add);
}

// LANES x LANES words: v[i][j] becomes v[j][i].
INLINE void transpose(F* v) {
#if GLMFLASH_AVX512
  __m512 t[16], s[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
  }
  const auto pd = [](__m512 x) { return _mm512_castps_pd(x); };
  const auto ps = [](__m512d x) { return _mm512_castpd_ps(x); };
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {  // s[i + k]: column k of rows i..i+3, per 128-bit lane
      s[i + 2 * j] = ps(_mm512_unpacklo_pd(pd(t[i + j]), pd(t[i + 2 + j])));
      s[i + 2 * j + 1] = ps(_mm512_unpackhi_pd(pd(t[i + j]), pd(t[i + 2 + j])));
    }
  for (int k = 0; k < 4; k++) {
    const __m512 a = _mm512_shuffle_f32x4(s[k], s[4 + k], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(s[k], s[4 + k], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(s[8 + k], s[12 + k], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(s[8 + k], s[12 + k], 0xdd);
    v[k] = (F)_mm512_shuffle_f32x4(a, c, 0x88);
    v[8 + k] = (F)_mm512_shuffle_f32x4(a, c, 0xdd);
    v[4 + k] = (F)_mm512_shuffle_f32x4(b, d, 0x88);
    v[12 + k] = (F)_mm512_shuffle_f32x4(b, d, 0xdd);
  }
#else
  float m[LANES][LANES];
  std::memcpy(m, v, sizeof m);
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) v[i][j] = m[j][i];
#endif
}

// LANES units of a row that still has `units` of them; what is missing is 0.
template <int PACK, class E> INLINE F load_units(const E* p, Index units) {
  if constexpr (PACK == 1) return load_row(p, units);
  if (units >= LANES) return load_as<F>(p);
  float part[LANES] = {};
  std::memcpy(part, p, units * 4);
  return load(part);
}
// Rows of units to vectors: out[u * ldo + i] = unit u of row i, i < columns (a multiple of LANES,
// zeros from `rows` on). ahead: elements to fetch before they are needed, 0 = none.
template <int PACK, class E>
INLINE void pack_transposed(const E* rows_at, Index stride, Index rows, Index units, Unit* out,
                            Index ldo, Index columns, Index ahead = 0) {
  for (Index i = 0; i < columns; i += LANES)
    for (Index u = 0; u < units; u += LANES) {
      F v[LANES];
      for (int j = 0; j < LANES; j++) {
        const E* at = rows_at + (i + j) * stride + u * PACK;
        if (ahead) __builtin_prefetch(at + ahead);
        v[j] = i + j < rows ? load_units<PACK>(at, units - u) : zero();
      }
      transpose(v);
      for (Index j = 0; j < LANES && u + j < units; j++)
        std::memcpy(out + (u + j) * ldo + i, &v[j], sizeof(F));
    }
}
// Pairs of rows to vectors: out[n] = the unit that column n of `first` and `second` (null: zeros)
// make. With PACK = 1 `first` alone.
template <int PACK, class E>
INLINE void pack_interleaved(const E* first, const E* second, Index columns, Unit* out) {
  for (Index n = 0; n < columns; n += LANES) {
    const Index left = columns - n;
    F v = load_row(first + n, left);
    if constexpr (PACK == 2) {
      const F w = second ? load_row(second + n, left) : zero();
      v = from_bits(bits(v) >> 16 | bits(w));
    }
    std::memcpy(out + n, &v, sizeof v);  // `out` has room for whole vectors
  }
}
