// Kimi delta attention between its projections: short convolution, gates, delta rule, gated norm.
//
// One task is one head of one sequence. Its tokens pass in blocks: everything that does not need
// the state is prepared first, then the recurrence runs over column blocks of the state that stay
// in the L1 cache. A single token works on the state in place. Each state element and each sum
// has one order of operations, so any split of a sequence into calls gives the same bits.
#include <nanobind/stl/vector.h>

#include "ops.hpp"
#include "scratch.hpp"
#include "tile.hpp"

namespace {

constexpr Index BLOCK = 64;  // tokens prepared together
constexpr int MOST_TAPS = 4;
constexpr Index COLUMNS = 2 * LANES;

struct Sequence {
  Index first, count;  // rows of this call
  void* conv;          // [taps - 1, 3 * heads * dim], the projected rows before `first`
  float* state;        // [heads, dim (key), dim (value)]
};

struct Layer {
  Index heads, dim, taps;
  const float *conv_weight, *rate, *dt_bias, *norm;  // [taps, 3HD], [H], [H, D], [D]
  float bound, eps;
};

template <class E> struct Rows {  // a matrix with its row stride in elements
  E* data;
  Index stride;
  E* operator()(Index t) const { return data + t * stride; }
};

template <class E> struct Inputs {
  Rows<const E> qkv, decay, beta, gate;
  Rows<E> out;
};

// What the recurrence needs of a block of tokens of one head: [BLOCK][width] each.
struct Prepared {
  Index width;
  float *key, *decay, *key_decayed, *query_decayed, *value, *out;
  float *beta, *match;  // [BLOCK]; match = q . k

  explicit Prepared(Index dim) : width(round_up(dim, COLUMNS)) {
    struct Slot;
    float* p = scratch<Slot, float>(BLOCK * (6 * width + 2));
    for (float** part : {&key, &decay, &key_decayed, &query_decayed, &value, &out}) {
      *part = p;
      p += BLOCK * width;
    }
    beta = p;
    match = p + BLOCK;
  }
};

// Convolution and SiLU of the head's channels of q, k or v for tokens begin.. of the sequence.
// Channels outside, tokens inside: the window stays in registers.
template <class E>
INLINE void convolve(const Layer& layer, const Inputs<E>& in, const Sequence& seq, Index begin,
                     Index count, Index c, float* out, Index width) {
  const Index channels = 3 * layer.heads * layer.dim, before = layer.taps - 1;
  const auto row = [&](Index t) {  // row t of the sequence, negative ones are the left context
    return t < 0 ? static_cast<const E*>(seq.conv) + (t + before) * channels : in.qkv(seq.first + t);
  };
  constexpr Index LINE = 64 / sizeof(E);
  for (Index j = 0; j < width; j += LANES) {
    const Index left = layer.dim - j;
    // rows are far apart, so no hardware prefetcher sees the next line, or the first of k and v
    const Index ahead = j + LINE < layer.dim ? c + j + LINE : c + layer.heads * layer.dim;
    F weight[MOST_TAPS] = {}, window[MOST_TAPS] = {};
    for (Index i = 0; i < layer.taps; i++) {
      const Index slot = MOST_TAPS - layer.taps + i;
      weight[slot] = load_row(layer.conv_weight + i * channels + c + j, left);
      if (i) window[slot] = load_row(row(begin + i - layer.taps) + c + j, left);
    }
    for (Index t = 0; t < count; t++) {
      for (int i = 1; i < MOST_TAPS; i++) window[i - 1] = window[i];
      __builtin_prefetch(row(begin + t) + ahead);
      window[MOST_TAPS - 1] = load_row(row(begin + t) + c + j, left);
      F sum = window[0] * weight[0];
      for (int i = 1; i < MOST_TAPS; i++) sum = fma(window[i], weight[i], sum);
      store(out + t * width + j, round_to<E>(sum * quick_sigmoid(sum)));
    }
  }
}

// One vector of channels makes its sum of squares; the factor that gives it unit length.
INLINE float unit_length(const float* x, Index width) {
  F squares = zero();
  for (Index j = 0; j < width; j += LANES) squares = fma(load(x + j), load(x + j), squares);
  return inverse_root(sum(squares) + 1e-6f);
}

template <class E>
void prepare(const Layer& layer, const Inputs<E>& in, const Sequence& seq, Index begin, Index count,
             Index head, const Prepared& p) {
  const Index dim = layer.dim, c = head * dim, all = layer.heads * dim;
  convolve(layer, in, seq, begin, count, c, p.query_decayed, p.width);
  convolve(layer, in, seq, begin, count, all + c, p.key, p.width);
  convolve(layer, in, seq, begin, count, 2 * all + c, p.value, p.width);
  const F rate = set1(layer.rate[head]);
  for (Index t = 0; t < count; t++) {
    const Index row = seq.first + begin + t, at = t * p.width;
    float *k = p.key + at, *q = p.query_decayed + at, *e = p.decay + at, *ke = p.key_decayed + at;
    const F q_factor = set1(unit_length(q, p.width) / std::sqrt(float(dim)));
    const F k_factor = set1(unit_length(k, p.width));
    F match = zero();
    for (Index j = 0; j < p.width; j += LANES) {
      const F key = load(k + j) * k_factor, query = load(q + j) * q_factor;
      match = fma(query, key, match);
      const F z = load_row(in.decay(row) + c + j, dim - j) +
                  load_row(layer.dt_bias + c + j, dim - j);
      const F decay = quick_exp(layer.bound * quick_sigmoid(rate * z));
      store(e + j, decay);
      store(k + j, key);
      store(ke + j, key * decay);
      store(q + j, query * decay);
    }
    p.match[t] = sum(match);
    p.beta[t] = round_to<E>(quick_sigmoid(to_float(in.beta(row)[head])));
  }
}

// One walk over a column block of the state (V vectors wide, rows `ld` apart): finishes token
// `now` by its decay and write, and collects S^T k and S^T q of token `next`, decay included.
// The sums run over the two halves of the key channels apart, then join.
template <int V, bool FINISH, bool COLLECT>
INLINE void walk(float* state, Index ld, Index dim, const Prepared& p, Index now, Index next,
                 const F* write, F* recalled, F* read) {
  const float *k = p.key + now * p.width, *e = p.decay + now * p.width;
  const float *ke = p.key_decayed + next * p.width, *qe = p.query_decayed + next * p.width;
  F part[2][2][V] = {};
  const auto row = [&](Index i, int half) {
    F key, fade, key_next, query_next;  // spread once for all columns
    if constexpr (FINISH) key = in_register(set1(k[i])), fade = in_register(set1(e[i]));
    if constexpr (COLLECT)
      key_next = in_register(set1(ke[i])), query_next = in_register(set1(qe[i]));
    for (int n = 0; n < V; n++) {
      float* at = state + i * ld + n * LANES;
      F s = load(at);
      if constexpr (FINISH) {
        s = fma(key, write[n], fade * s);
        store(at, s);
      }
      if constexpr (COLLECT) {
        part[half][0][n] = fma(key_next, s, part[half][0][n]);
        part[half][1][n] = fma(query_next, s, part[half][1][n]);
      }
    }
  };
  const Index half = dim / 2;
  if constexpr (V <= 2) {
    for (Index i = 0; i < half; i++) {
      row(i, 0);
      row(half + i, 1);
    }
    if (dim % 2) row(dim - 1, 1);
  } else {  // more columns than registers for both halves at once
    for (Index i = 0; i < half; i++) row(i, 0);
    for (Index i = half; i < dim; i++) row(i, 1);
  }
  if constexpr (COLLECT)
    for (int n = 0; n < V; n++) {
      recalled[n] = part[0][0][n] + part[1][0][n];
      read[n] = part[0][1][n] + part[1][1][n];
    }
}

// The recurrence of `count` prepared tokens over one column block that starts at column c.
template <int V>
INLINE void recur(float* state, Index ld, Index dim, const Prepared& p, Index count, Index c) {
  F recalled[V], read[V], write[V];
  walk<V, false, true>(state, ld, dim, p, 0, 0, write, recalled, read);
  for (Index t = 0; t < count; t++) {
    for (int n = 0; n < V; n++) {
      const Index at = t * p.width + c + n * LANES;
      write[n] = set1(p.beta[t]) * (load(p.value + at) - recalled[n]);
      store(p.out + at, fma(set1(p.match[t]), write[n], read[n]));
    }
    if (t + 1 < count)
      walk<V, true, true>(state, ld, dim, p, t, t + 1, write, recalled, read);
    else
      walk<V, true, false>(state, ld, dim, p, t, t, write, recalled, read);
  }
}

void advance(float* state, Index dim, const Prepared& p, Index count) {
  constexpr int WIDE = 4;
  if (count == 1 && dim % (WIDE * LANES) == 0) {  // in place: the state is read and written once
    for (Index c = 0; c < dim; c += WIDE * LANES)
      recur<WIDE>(state + c, dim, dim, p, count, c);
    return;
  }
  struct Slot;
  float* block = scratch<Slot, float>(dim * COLUMNS);
  for (Index c = 0; c < dim; c += COLUMNS) {
    const Index width = dim - c < COLUMNS ? dim - c : COLUMNS;
    for (Index i = 0; i < dim; i++) {
      for (Index j = width; j < COLUMNS; j++) block[i * COLUMNS + j] = 0;
      std::memcpy(block + i * COLUMNS, state + i * dim + c, width * sizeof(float));
    }
    recur<2>(block, COLUMNS, dim, p, count, c);
    for (Index i = 0; i < dim; i++)
      std::memcpy(state + i * dim + c, block + i * COLUMNS, width * sizeof(float));
  }
}

// RMSNorm over the head's value channels, weight and sigmoid gate in fp32, one rounding.
template <class E>
void finish(const Layer& layer, const Inputs<E>& in, Index row, Index head, float* o) {
  const Index dim = layer.dim, c = head * dim;
  F squares = zero();
  for (Index j = 0; j < dim; j += LANES) {
    const F v = round_to<E>(load_row(o + j, dim - j));
    store_row(o + j, v, dim - j);
    squares = fma(v, v, squares);
  }
  const F factor = set1(inverse_root(sum(squares) / float(dim) + layer.eps));
  for (Index j = 0; j < dim; j += LANES) {
    const F gate = quick_sigmoid(load_row(in.gate(row) + c + j, dim - j));
    const F y = load_row(o + j, dim - j) * factor * load_row(layer.norm + j, dim - j) * gate;
    store_row(in.out(row) + c + j, y, dim - j);
  }
}

// The last taps-1 projected rows become the next call's left context.
template <class E>
void keep_context(const Layer& layer, const Inputs<E>& in, const Sequence& seq, Index head) {
  const Index dim = layer.dim, channels = 3 * layer.heads * dim, before = layer.taps - 1;
  E* conv = static_cast<E*>(seq.conv);
  for (Index j = 0; j < before; j++) {
    const Index row = seq.count + j - before;
    const E* z = row < 0 ? conv + (row + before) * channels : in.qkv(seq.first + row);
    for (Index part = 0; part < 3; part++) {
      const Index c = (part * layer.heads + head) * dim;
      std::memmove(conv + j * channels + c, z + c, dim * sizeof(E));
    }
  }
}

template <class E>
void run(const Layer& layer, const Inputs<E>& in, const std::vector<Sequence>& sequences) {
  const Index tasks = Index(sequences.size()) * layer.heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads())
  for (Index task = 0; task < tasks; task++) {
    const Sequence& seq = sequences[task / layer.heads];
    const Index head = task % layer.heads;
    const Prepared p(layer.dim);
    for (Index begin = 0; begin < seq.count; begin += BLOCK) {
      const Index count = seq.count - begin < BLOCK ? seq.count - begin : BLOCK;
      prepare(layer, in, seq, begin, count, head, p);
      advance(seq.state + head * layer.dim * layer.dim, layer.dim, p, count);
      for (Index t = 0; t < count; t++)
        finish(layer, in, seq.first + begin + t, head, p.out + t * p.width);
    }
    keep_context(layer, in, seq, head);
  }
}

// qkv [T, 3HD], decay and gate [T, HD], beta [T, H], out [T, HD], each with its row stride.
void kda(bool is_bf16, Address qkv, Index ld_qkv, Address decay, Index ld_decay, Address beta,
         Index ld_beta, Address gate, Index ld_gate, Address out, Index ld_out, Address conv_weight,
         Address rate, Address dt_bias, Address norm, Index heads, Index dim, Index taps,
         float bound, float eps, const std::vector<Index>& counts,
         const std::vector<Address>& convs, const std::vector<Address>& states) {
  const Layer layer{heads, dim, taps, at<const float>(conv_weight), at<const float>(rate),
                    at<const float>(dt_bias), at<const float>(norm), bound, eps};
  static thread_local std::vector<Sequence> sequences;
  sequences.clear();
  Index first = 0;
  for (std::size_t i = 0; i < counts.size(); first += counts[i++])
    if (counts[i]) sequences.push_back({first, counts[i], at<void>(convs[i]), at<float>(states[i])});
  const auto typed = [&](auto zero) {
    using E = decltype(zero);
    run<E>(layer, {{at<const E>(qkv), ld_qkv}, {at<const E>(decay), ld_decay},
                   {at<const E>(beta), ld_beta}, {at<const E>(gate), ld_gate},
                   {at<E>(out), ld_out}}, sequences);
  };
  is_bf16 ? typed(bf16()) : typed(float());
}

}  // namespace

void bind_kda(nb::module_& m) {
  m.def("kda", &kda, Unlocked(),
        "One KDA layer from its projections to the input of its output projection.");
}
