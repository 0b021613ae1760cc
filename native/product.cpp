#include "product.hpp"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "formats.hpp"
#include "scratch.hpp"

namespace {

#if GLMFLASH_AVX512
constexpr int TILE = 12;    // rows of x whose sums stay in registers
constexpr int DIRECT = 8;   // up to this many rows, weights are decoded while they are multiplied
#else
constexpr int TILE = LANES == 8 ? 6 : 4;
constexpr int DIRECT = 4;
#endif

// ---- one block: acc = sum over k of w x ----
INLINE F multiply_add(F w, const float* x, F acc) { return fma(w, set1(*x), acc); }
#if GLMFLASH_AVX512
INLINE F multiply_add(F w, const bf16* x, F acc) {  // two k
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w,
                             (__m512bh)_mm512_set1_epi32(load_as<int>(x)));
}
#endif

// Cache lines of the weights that come next, fetched while the present ones are multiplied:
// 2^shift lines of each row, or, if packed, one long run.
struct Ahead {
  const char* base;
  std::int64_t stride;
  int shift;

  void fetch(int i) const {
    __builtin_prefetch(base + (i >> shift) * stride + (i & ((1 << shift) - 1)) * 64, 0, 2);
  }
};

// Rows [0, M) of U consecutive blocks of a panel, then their scales. xstep: from block to block.
template <class W, class X, int M, int U>
INLINE void blocks(const W* w, const X* x, std::int64_t xstep, int count, const float* scale,
                   float* c, std::int64_t ldc, const Ahead& ahead, int line) {
  typedef Format<W, X> Decoder;
  constexpr int PAIR = Decoder::PAIR, PARTS = Decoder::STEP / PAIR;
  constexpr int BYTES = PANEL * sizeof(W);  // of one k
  F acc[U][M][2] = {};
  for (int k = 0; k < count; k += Decoder::STEP)
    for (int u = 0; u < U; u++) {
      F part[PARTS][2];
      Decoder::decode(w + (u * BLOCK + k) * PANEL, part);
      for (int i = 0; i < Decoder::STEP * BYTES; i += 64)
        if (BYTES >= 64 || k * BYTES % 64 == 0) ahead.fetch(line++);
      for (int j = 0; j < PARTS; j++)
        for (int m = 0; m < M; m++)
          for (int g = 0; g < 2; g++) {
            const X* value = x + u * xstep + m * BLOCK + k + j * PAIR;
            acc[u][m][g] = multiply_add(part[j][g], value, acc[u][m][g]);
          }
    }
  for (int u = 0; u < U; u++) {
    const F s = set1(scale ? scale[u] : 1.f);
    for (int m = 0; m < M; m++)
      for (int g = 0; g < 2; g++) {
        float* p = c + m * ldc + g * LANES;
        store(p, fma(acc[u][m][g], s, load(p)));
      }
  }
}

// M rows times `count` k of one panel, added to c.
template <class W, class X, int M>
void tile(const void* w_, const void* x_, std::int64_t xstep, std::int64_t count,
          const float* scale, float* c, std::int64_t ldc, const Ahead& ahead) {
  constexpr int U = M <= 2 ? 2 : 1;  // blocks in flight: few rows alone do not hide the latency
  const W* w = static_cast<const W*>(w_);
  const X* x = static_cast<const X*>(x_);
  for (std::int64_t k = 0; k < count;) {
    const float* s = scale ? scale + k / BLOCK : nullptr;
    const X* xk = x + k / BLOCK * xstep;
    const int line = int(k * PANEL * sizeof(W) / 64);
    if (k + U * BLOCK <= count) {
      blocks<W, X, M, U>(w + k * PANEL, xk, xstep, BLOCK, s, c, ldc, ahead, line);
      k += U * BLOCK;
    } else {
      const int rest = int(std::min<std::int64_t>(BLOCK, count - k));
      blocks<W, X, M, 1>(w + k * PANEL, xk, xstep, rest, s, c, ldc, ahead, line);
      k += BLOCK;
    }
  }
}

typedef void (*Tile)(const void*, const void*, std::int64_t, std::int64_t, const float*, float*,
                     std::int64_t, const Ahead&);
template <class W, class X, int... M>
Tile choose(int rows, std::integer_sequence<int, M...>) {
  static constexpr Tile tiles[] = {tile<W, X, M + 1>...};
  return tiles[rows - 1];
}
template <class W, class X> Tile choose(int rows) {
  constexpr int most = std::is_same<W, X>::value ? TILE : DIRECT;
  return choose<W, X>(rows, std::make_integer_sequence<int, most>());
}

// ---- weights on their way to the kernel ----
// `count` k (a multiple of K_ALIGN) from k0 of one row-major panel; zeros beyond the matrix.
template <class W>
void pack_panel(const Matrix& a, std::int64_t panel, std::int64_t k0, int count, char* out) {
  const std::int64_t row = panel * PANEL, bytes = count * sizeof(W), stride = a.stride * sizeof(W);
  const char* rows = a.data + row * stride + k0 * sizeof(W);
  const std::int64_t rows_left = std::min<std::int64_t>(PANEL, a.n - row);
  const std::int64_t bytes_left = std::min<std::int64_t>(bytes, (a.k - k0) * sizeof(W));
  if (rows_left == PANEL && bytes_left == bytes) {
    for (std::int64_t i = 0; i < bytes; i += 16) pack16<W>(rows + i, stride, out + i * PANEL);
    return;
  }
  for (std::int64_t i = 0; i < bytes; i += 16) {
    char edge[PANEL][16] = {};
    const std::int64_t size = std::min<std::int64_t>(16, bytes_left - i);
    for (int r = 0; size > 0 && r < rows_left; r++) std::memcpy(edge[r], rows + r * stride + i, size);
    pack16<W>(edge[0], 16, out + i * PANEL);
  }
}

// What follows the `count` k from k0 of a panel, or at its end the first k of the next panel.
template <class W> Ahead next_chunk(const Matrix& a, std::int64_t panel, std::int64_t k0, int count) {
  k0 += count;
  if (!a.stride) return {a.data + (panel * a.padded_k() + k0) * PANEL * sizeof(W), 64, 0};
  if (k0 >= a.k) panel++, k0 = 0;
  const std::int64_t stride = a.stride * sizeof(W);
  return {a.data + panel * PANEL * stride + k0 * sizeof(W), stride,
          __builtin_ctz(count * sizeof(W) / 64)};
}

// Decode `count` k of a packed panel to the form that needs no decoding.
template <class W, class X> void expand(const W* w, int count, X* out) {
  typedef Format<W, X> Decoder;
  constexpr int PARTS = Decoder::STEP / Decoder::PAIR;
  for (int k = 0; k < count; k += Decoder::STEP) {
    F part[PARTS][2];
    Decoder::decode(w + k * PANEL, part);
    for (int j = 0; j < PARTS; j++)
      for (int g = 0; g < 2; g++)
        std::memcpy((char*)(out + k * PANEL) + (j * 2 + g) * sizeof(F), &part[j][g], sizeof(F));
  }
}

struct Staged;  // names of scratch buffers
struct Widened;

template <class W, class X>
void multiply_as(const Matrix& a, std::int64_t first, int group, const X* x, std::int64_t m,
                 float* c) {
  const bool many = m > TILE, widen = !std::is_same<W, X>::value && m > DIRECT;
  const int step = many ? BLOCK : 512 / int(sizeof(W));  // k at a time: they fit into the L1 cache
  const std::int64_t padded = a.padded_k(), ldc = group * PANEL, tiles = (m + TILE - 1) / TILE;
  const std::int64_t chunk = step * PANEL, scales = (a.k + BLOCK - 1) / BLOCK;
  W* staged = scratch<Staged, W>(a.stride ? group * chunk : 0);
  X* wide = scratch<Widened, X>(widen ? group * chunk : 0);
  std::fill(c, c + m * ldc, 0.f);
  for (std::int64_t k = 0; k < padded; k += step) {
    const int count = int(std::min<std::int64_t>(step, padded - k));
    const void* w[GROUP];
    const float* scale[GROUP];
    Ahead ahead[GROUP];
    for (int g = 0; g < group; g++) {
      const std::int64_t panel = first + g;
      const W* packed = (const W*)a.data + (panel * padded + k) * PANEL;
      ahead[g] = next_chunk<W>(a, panel, k, step);
      if (a.stride) {
        pack_panel<W>(a, panel, k, count, (char*)(staged + g * chunk));
        packed = staged + g * chunk;
      }
      w[g] = packed;
      if (widen) {
        for (int line = 0; line < chunk * int(sizeof(W)) / 64; line++) ahead[g].fetch(line);
        expand(packed, count, wide + g * chunk);
        w[g] = wide + g * chunk;
      }
      scale[g] = a.scale ? a.scale + panel * PANEL / BLOCK * scales + k / BLOCK : nullptr;
    }
    for (std::int64_t t = 0; t < tiles; t++) {
      const std::int64_t row = m * t / tiles;
      const int rows = int(m * (t + 1) / tiles - row);
      const Tile run = widen ? choose<X, X>(rows) : choose<W, X>(rows);
      for (int g = 0; g < group; g++) {
        if (widen || t) ahead[g] = {(const char*)w[g], 0, 0};  // nothing more to fetch
        run(w[g], x + (k / BLOCK * m + row) * BLOCK, m * BLOCK, count, scale[g],
            c + row * ldc + g * PANEL, ldc, ahead[g]);
      }
    }
  }
}

template <class X>
void multiply_any(const Matrix& a, std::int64_t first, int group, const void* x_, std::int64_t m,
                  float* c) {
  const X* x = static_cast<const X*>(x_);
  if (a.kind == Kind::fp8) return multiply_as<fp8>(a, first, group, x, m, c);
  if (a.kind == Kind::bf16) return multiply_as<bf16>(a, first, group, x, m, c);
  if constexpr (std::is_same<X, float>::value) multiply_as<float>(a, first, group, x, m, c);
}

template <class T, class X>
void copy_row(const T* x, std::int64_t k, std::int64_t row, std::int64_t m, X* packed) {
  for (std::int64_t begin = 0; begin < k; begin += BLOCK) {
    X* out = packed + (begin / BLOCK * m + row) * BLOCK;
    const int count = int(std::min<std::int64_t>(BLOCK, k - begin));
    if constexpr (std::is_same<T, X>::value) std::memcpy(out, x + begin, count * sizeof(X));
    else for (int i = 0; i < count; i++) out[i] = to_float(x[begin + i]);
    std::fill(out + count, out + BLOCK, X(0));
  }
}

template <class W> void pack_as(const Matrix& a, std::int64_t panel, char* out) {
  const std::int64_t padded = a.padded_k();
  for (std::int64_t k = 0; k < padded; k += BLOCK)
    pack_panel<W>(a, panel, k, int(std::min<std::int64_t>(BLOCK, padded - k)),
                  out + (panel * padded + k) * PANEL * sizeof(W));
}

}  // namespace

bool many_rows(std::int64_t m) { return m > TILE; }

void multiply(const Matrix& a, std::int64_t first, int group, const void* x, std::int64_t m,
              Compute compute, float* c) {
  if (compute == Compute::bf16) multiply_any<Bf16Activation>(a, first, group, x, m, c);
  else multiply_any<float>(a, first, group, x, m, c);
}

void pack_activation(const void* x, bool x_is_bf16, std::int64_t k, std::int64_t row,
                     std::int64_t m, Compute compute, void* packed) {
  if (!x_is_bf16) copy_row((const float*)x, k, row, m, (float*)packed);
  else if (compute == Compute::bf16) copy_row((const bf16*)x, k, row, m, (Bf16Activation*)packed);
  else copy_row((const bf16*)x, k, row, m, (float*)packed);
}

void pack_result(const float* x, std::int64_t column, std::int64_t row, std::int64_t m,
                 Compute compute, void* packed) {
  const std::int64_t place = (column / BLOCK * m + row) * BLOCK + column % BLOCK;
  for (int g = 0; g < 2; g++) {
    const F v = load(x + g * LANES);
    if (compute == Compute::fp32) store((float*)packed + place + g * LANES, v);
#if GLMFLASH_AVX512
    else store((bf16*)packed + place + g * LANES, v);
#else
    else store((float*)packed + place + g * LANES, round_to_bf16(v));
#endif
  }
}

void pack_matrix(const Matrix& a, std::int64_t panel, char* out) {
  if (a.kind == Kind::fp8) pack_as<fp8>(a, panel, out);
  else if (a.kind == Kind::bf16) pack_as<bf16>(a, panel, out);
  else pack_as<float>(a, panel, out);
}
