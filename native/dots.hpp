// Dot products of rows: the small projections that the model wants in fp32 (router, mHC site).
//
// One accumulator of LANES partial sums per result, over ascending columns, whatever the blocking.
#pragma once
#include "vmath.hpp"

template <int ROWS, int TOKENS, class W, class X>
INLINE void dot_block(const W* w, Index ldw, const X* x, Index ldx, Index columns, float* out,
                      Index ldo) {
  F acc[ROWS][TOKENS] = {};
  const auto step = [&](Index k, Index left) {
    F xs[TOKENS];
    for (int t = 0; t < TOKENS; t++) xs[t] = load_row(x + t * ldx + k, left);
    for (int r = 0; r < ROWS; r++) {
      const F row = load_row(w + r * ldw + k, left);
      for (int t = 0; t < TOKENS; t++) acc[r][t] = fma(row, xs[t], acc[r][t]);
    }
  };
  Index k = 0;
  for (; k + LANES <= columns; k += LANES) step(k, LANES);
  if (k < columns) step(k, columns - k);
  for (int r = 0; r < ROWS; r++)
    for (int t = 0; t < TOKENS; t++) out[t * ldo + r] = sum(acc[r][t]);
}

// out[t * ldo + r] = w_r . x_t for `rows` rows and `tokens` tokens.
template <class W, class X>
INLINE void dots(const W* w, Index ldw, Index rows, const X* x, Index ldx, Index tokens,
                 Index columns, float* out, Index ldo) {
  constexpr int TOKENS = LANES == 16 ? 4 : 2;
  Index t = 0;
  for (; t + TOKENS <= tokens; t += TOKENS) {
    Index r = 0;
    for (; r + 4 <= rows; r += 4)
      dot_block<4, TOKENS>(w + r * ldw, ldw, x + t * ldx, ldx, columns, out + t * ldo + r, ldo);
    for (; r < rows; r++)
      dot_block<1, TOKENS>(w + r * ldw, ldw, x + t * ldx, ldx, columns, out + t * ldo + r, ldo);
  }
  for (; t < tokens; t++) {
    Index r = 0;
    for (; r + 8 <= rows; r += 8)
      dot_block<8, 1>(w + r * ldw, ldw, x + t * ldx, ldx, columns, out + t * ldo + r, ldo);
    for (; r + 4 <= rows; r += 4)
      dot_block<4, 1>(w + r * ldw, ldw, x + t * ldx, ldx, columns, out + t * ldo + r, ldo);
    for (; r < rows; r++)
      dot_block<1, 1>(w + r * ldw, ldw, x + t * ldx, ldx, columns, out + t * ldo + r, ldo);
  }
}

// weight * round(x / sqrt(mean x^2 + eps)), the model's RMSNorm; `out` may be `x`.
template <class E>
INLINE void normalize(const E* x, const E* weight, Index n, float eps, E* out) {
  F squares = zero();
  for (Index j = 0; j < n; j += LANES) {
    const F v = load_row(x + j, n - j);
    squares = fma(v, v, squares);
  }
  const F factor = set1(inverse_root(sum(squares) / float(n) + eps));
  for (Index j = 0; j < n; j += LANES) {
    const F v = load_row(x + j, n - j) * factor;
    F scaled = v;
    if constexpr (sizeof(E) == 2) scaled = round_to_bf16(v);
    store_row(out + j, scaled * load_row(weight + j, n - j), n - j);
  }
}
