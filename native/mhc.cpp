// One site of the manifold-constrained hyper-connections: the block before it is spread over the
// residual streams, then the streams are collapsed to the input of the block after it.
//
// Every token is a task of its own steps in a fixed order; a single token shares its steps out.
#include "dots.hpp"
#include "ops.hpp"
#include "scratch.hpp"

namespace {

constexpr Index MOST = 8;    // streams
constexpr Index BLOCK = 4;   // tokens that one pass over `fn` serves
constexpr Index ROWS = 4;    // rows of `fn` in one task when a token shares its steps out

template <class E, class W> struct Site {
  Index n, dim;                  // streams, width of each
  E* streams;                    // [T, n, dim]
  const E* y;                    // [T, dim], the output of the previous block; null: none
  float* routing;                // [T, n + n * n]: post and mix, of that block, then of the next
  const W* fn;                   // [n * (n + 2), n * dim]; null: the plain mean of the streams
  const float *base, *scale;     // [n * (n + 2)], [3]
  const E* weight;               // [dim], of the RMSNorm that follows; null: none
  E* x;                          // [T, dim], input of the next block; null: none
  Index iterations;
  float eps, norm_eps;

  Index width() const { return n * dim; }
  Index rows() const { return n * (n + 2); }
  float* routing_of(Index t) const { return routing + t * (n + n * n); }
};

// X_i <- post_i y + sum_k mix[k, i] X_k for columns [from, to) of token t. N: streams, 0 = any.
template <int N, class E, class W>
INLINE void spread_n(const Site<E, W>& s, Index t, Index from, Index to) {
  const Index n = N ? N : s.n;
  E* streams = s.streams + t * s.width();
  const float *post = s.routing_of(t), *mix = post + n;
  for (Index d = from; d < to; d += LANES) {
    F old[MOST];
    for (Index k = 0; k < n; k++) old[k] = load_row(streams + k * s.dim + d, to - d);
    const F y = load_row(s.y + t * s.dim + d, to - d);
    for (Index i = 0; i < n; i++) {
      F sum = set1(mix[i]) * old[0];
      for (Index k = 1; k < n; k++) sum = fma(set1(mix[k * n + i]), old[k], sum);
      store_row(streams + i * s.dim + d, fma(set1(post[i]), y, sum), to - d);
    }
  }
}
template <class E, class W>
INLINE void spread(const Site<E, W>& s, Index t, Index from, Index to) {
  s.n == 4 ? spread_n<4>(s, t, from, to) : spread_n<0>(s, t, from, to);
}

// Scale rows and columns of m [n, n] in turn until it is doubly stochastic; columns come first.
INLINE void sinkhorn(float* m, Index n, Index iterations, float eps) {
  const auto columns = [&] {
    for (Index i = 0; i < n; i++) {
      float total = 0;
      for (Index k = 0; k < n; k++) total += m[k * n + i];
      for (Index k = 0; k < n; k++) m[k * n + i] /= total + eps;
    }
  };
  columns();
  for (Index step = 1; step < iterations; step++) {
    for (Index k = 0; k < n; k++) {
      float total = 0;
      for (Index i = 0; i < n; i++) total += m[k * n + i];
      for (Index i = 0; i < n; i++) m[k * n + i] /= total + eps;
    }
    columns();
  }
}

// From the projection z (before the norm's factor) to the routing of token t and `pre` [n].
template <class E, class W>
void route(const Site<E, W>& s, Index t, const float* z, float squares, float* pre) {
  const Index n = s.n;
  const float factor = inverse_root(squares / float(s.width()) + s.norm_eps);
  float *post = s.routing_of(t), *mix = post + n;
  for (Index i = 0; i < n; i++) {
    pre[i] = quick_sigmoid(s.scale[0] * (z[i] * factor) + s.base[i]) + s.eps;
    post[i] = 2 * quick_sigmoid(s.scale[1] * (z[n + i] * factor) + s.base[n + i]);
  }
  float m[round_up(MOST * MOST, 16)] = {};
  for (Index k = 0; k < n; k++) {
    float most = -INFINITY;
    for (Index i = 0; i < n; i++) {
      const Index j = 2 * n + k * n + i;
      m[k * n + i] = s.scale[2] * (z[j] * factor) + s.base[j];
      most = m[k * n + i] > most ? m[k * n + i] : most;
    }
    for (Index i = 0; i < n; i++) m[k * n + i] -= most;
  }
  for (Index j = 0; j < n * n; j += LANES) store(m + j, quick_exp(load(m + j)));
  for (Index k = 0; k < n; k++) {
    float total = 0;
    for (Index i = 0; i < n; i++) total += m[k * n + i];
    for (Index i = 0; i < n; i++) m[k * n + i] = m[k * n + i] / total + s.eps;
  }
  if (n == 4) sinkhorn(m, 4, s.iterations, s.eps);
  else sinkhorn(m, n, s.iterations, s.eps);
  std::memcpy(mix, m, n * n * sizeof(float));
}

// x = norm(sum_i pre_i X_i) of token t.
template <int N, class E, class W>
INLINE void collapse(const Site<E, W>& s, Index t, const float* pre) {
  const Index n = N ? N : s.n;
  const E* streams = s.streams + t * s.width();
  E* x = s.x + t * s.dim;
  for (Index d = 0; d < s.dim; d += LANES) {
    F sum = set1(pre[0]) * load_row(streams + d, s.dim - d);
    for (Index i = 1; i < n; i++)
      sum = fma(set1(pre[i]), load_row(streams + i * s.dim + d, s.dim - d), sum);
    store_row(x + d, sum, s.dim - d);
  }
  if (s.weight) normalize(x, s.weight, s.dim, s.norm_eps, x);
}

template <class E, class W> INLINE void finish(const Site<E, W>& s, Index t, const float* z) {
  float pre[MOST];
  if (s.fn) route(s, t, z, z[s.rows()], pre);
  else for (Index i = 0; i < s.n; i++) pre[i] = 1.f / float(s.n);
  s.n == 4 ? collapse<4>(s, t, pre) : collapse<0>(s, t, pre);
}

// Projections and the sum of squares: z[t][0..rows] for `tokens` tokens from t on.
template <class E, class W>
INLINE void project(const Site<E, W>& s, Index t, Index tokens, Index row, Index rows, float* z) {
  const E* x = s.streams + t * s.width();
  const Index own = row + rows > s.rows() ? s.rows() - row : rows;
  dots(s.fn + row * s.width(), s.width(), own, x, s.width(), tokens, s.width(), z + row,
       s.rows() + 1);
  if (own < rows)  // the row after the last one is the token itself
    for (Index i = 0; i < tokens; i++) {
      const E* self = x + i * s.width();
      dots(self, s.width(), 1, self, s.width(), 1, s.width(), z + i * (s.rows() + 1) + s.rows(),
           s.rows() + 1);
    }
}

template <class E, class W> void run(const Site<E, W>& s, Index tokens) {
  struct Slot;
  if (tokens >= 2 * threads() || threads() == 1) {
#pragma omp parallel for schedule(static) num_threads(threads())
    for (Index block = 0; block < (tokens + BLOCK - 1) / BLOCK; block++) {
      float* z = scratch<Slot, float>(BLOCK * (s.rows() + 1));
      const Index first = block * BLOCK, count = tokens - first < BLOCK ? tokens - first : BLOCK;
      if (s.y) for (Index t = first; t < first + count; t++) spread(s, t, 0, s.dim);
      if (!s.x) continue;
      if (s.fn) project(s, first, count, 0, s.rows() + 1, z);
      for (Index i = 0; i < count; i++) finish(s, first + i, z + i * (s.rows() + 1));
    }
    return;
  }
  struct SharedSlot;
  float* z = scratch<SharedSlot, float>(tokens * (s.rows() + 1));
  constexpr Index CHUNK = 512;  // columns
  const Index chunks = (s.dim + CHUNK - 1) / CHUNK, parts = s.rows() / ROWS + 1;
#pragma omp parallel num_threads(threads())
  {
    if (s.y) {
#pragma omp for schedule(static)
      for (Index task = 0; task < tokens * chunks; task++) {
        const Index from = task % chunks * CHUNK;
        spread(s, task / chunks, from, from + CHUNK < s.dim ? from + CHUNK : s.dim);
      }
    }
    if (s.x && s.fn) {
#pragma omp for schedule(dynamic, 1)
      for (Index task = 0; task < tokens * parts; task++) {
        const Index t = task / parts, row = task % parts * ROWS;
        const Index rest = s.rows() + 1 - row;
        project(s, t, 1, row, rest < ROWS ? rest : ROWS, z + t * (s.rows() + 1));
      }
    }
    if (s.x) {
#pragma omp for schedule(static)
      for (Index t = 0; t < tokens; t++) finish(s, t, z + t * (s.rows() + 1));
    }
  }
}

void mhc(bool is_bf16, bool fn_bf16, Index tokens, Index n, Index dim, Address streams, Address y,
         Address routing, Address fn, Address base, Address scale, Address weight, Address x,
         Index iterations, float eps, float norm_eps) {
  const auto typed = [&](auto element, auto projection) {
    using E = decltype(element);
    using W = decltype(projection);
    run(Site<E, W>{n, dim, at<E>(streams), at<const E>(y), at<float>(routing), at<const W>(fn),
                   at<const float>(base), at<const float>(scale), at<const E>(weight), at<E>(x),
                   iterations, eps, norm_eps}, tokens);
  };
  if (is_bf16) fn_bf16 ? typed(bf16(), bf16()) : typed(bf16(), float());
  else fn_bf16 ? typed(float(), bf16()) : typed(float(), float());
}

}  // namespace

void bind_mhc(nb::module_& m) {
  m.def("mhc", &mhc, Unlocked(), "Spread one block's output, collapse to the next one's input.");
}
