// Small matrix products for operands that change with every call (attention, pool scores).
//
// Everything is made of 4-byte units along the summed axis: one fp32 value, or two neighbouring
// bf16 values where the processor multiplies pairs (PACK = 2). One side broadcasts units, the
// other holds them as vectors [units][columns]. A result is one accumulator over ascending units
// whatever the number of rows, columns or pieces, so results do not depend on the blocking.
#pragma once
#include "vmath.hpp"

typedef float Unit __attribute__((may_alias, aligned(1)));

// Values in a unit when the elements are E and every summed length is even.
template <class E> constexpr int MOST = LANES == 16 && sizeof(E) == 2 ? 2 : 1;

template <int PACK> INLINE F multiply_add(F sum, F a, F b) {
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
INLINE Index row_blocks(Row row, Index i, Index rows, Index step, const Unit* b, Index ldb,
                        Index columns, Index units, float* out, Index ldo, bool add) {
  for (; i + ROWS <= rows; i += ROWS) {
    const auto at_row = [&](int j) { return row(i + j); };
    Index n = 0;
    for (; n + VECTORS * LANES <= columns; n += VECTORS * LANES)
      tile<PACK, ROWS, VECTORS>(at_row, step, b + n, ldb, units, out + i * ldo + n, ldo, add);
    for (; n < columns; n += LANES)
      tile<PACK, ROWS, 1>(at_row, step, b + n, ldb, units, out + i * ldo + n, ldo, add);
  }
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
// zeros from `rows` on).
template <int PACK, class E>
INLINE void pack_transposed(const E* rows_at, Index stride, Index rows, Index units, Unit* out,
                            Index ldo, Index columns) {
  for (Index i = 0; i < columns; i += LANES)
    for (Index u = 0; u < units; u += LANES) {
      F v[LANES];
      for (int j = 0; j < LANES; j++)
        v[j] = i + j < rows
                   ? load_units<PACK>(rows_at + (i + j) * stride + u * PACK, units - u)
                   : zero();
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
