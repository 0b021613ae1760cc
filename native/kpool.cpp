// The pooled lightning indexer: pools are finished as tokens arrive, queries score all pools that
// they see and keep the best.
//
// Order of preference: higher score, then lower pool id; so the kept set is defined for any tie.
#include <nanobind/stl/vector.h>

#include "ops.hpp"
#include "scratch.hpp"
#include "tile.hpp"

namespace {

constexpr Index MOST_MEMBERS = 64;  // of a pool
constexpr Index GROWTH = 1 << 14;   // scratch for pools grows in steps

// ---- finishing pools -------------------------------------------------------------------------

// Key LayerNorm of rows [T, dim] in fp32, one rounding.
template <class E>
INLINE void layer_norm(const E* x, const E* weight, const E* bias, Index n, float eps, E* out) {
  F total = zero();
  for (Index j = 0; j < n; j += LANES) total += load_row(x + j, n - j);
  const float mean = sum(total) / float(n);
  F squares = zero();
  for (Index j = 0; j < n; j += LANES) {
    F v = load_row(x + j, n - j) - mean;
    if (n - j < LANES)  // missing lanes are not elements
      for (Index i = n - j; i < LANES; i++) v[i] = 0;
    squares = fma(v, v, squares);
  }
  const F factor = set1(inverse_root(sum(squares) / float(n) + eps));
  for (Index j = 0; j < n; j += LANES) {
    const F v = (load_row(x + j, n - j) - mean) * factor;
    store_row(out + j, fma(v, load_row(weight + j, n - j), load_row(bias + j, n - j)), n - j);
  }
}

// One pool: softmax over the members, apart for every channel; rounded as the model does it.
template <class E>
INLINE void finish_pool(const E* const* keys, const E* const* gates, const E* ape, Index kpool,
                        Index n, E* out) {
  for (Index j = 0; j < n; j += LANES) {
    const Index left = n - j;
    const auto logit = [&](Index m) {
      return load_row(gates[m] + j, left) + load_row(ape + m * n + j, left);
    };
    F most = logit(0), total = zero(), pooled = zero();
    for (Index m = 1; m < kpool; m++) most = max(most, logit(m));
    for (Index m = 0; m < kpool; m++) total += quick_exp(logit(m) - most);
    for (Index m = 0; m < kpool; m++) {
      const F share = round_to<E>(quick_exp(logit(m) - most) / total);
      pooled += round_to<E>(share * load_row(keys[m] + j, left));
    }
    store_row(out + j, pooled, left);
  }
}

// Takes in `count` tokens: raw keys and gate scores, rows of stride ldk and ldg. open [kpool, 2, n]
// holds `waiting` members (key after the norm, gate) and is left with those of the unfinished
// pool; finished pools go to `pools`.
template <class E>
void append(Address keys, Index ldk, Address gates, Index ldg, Index count, Address weight,
            Address bias, float eps, Address ape, Index kpool, Index n, Address open, Index waiting,
            Address pools) {
  struct Slot;
  E* normed = scratch<Slot, E>(count * n);
  E* members = at<E>(open);
  const Index total = waiting + count, complete = total / kpool;
  const auto key = [&](Index m) {
    return m < waiting ? members + 2 * m * n : normed + (m - waiting) * n;
  };
  const auto gate = [&](Index m) {
    return m < waiting ? members + (2 * m + 1) * n : at<const E>(gates) + (m - waiting) * ldg;
  };
#pragma omp parallel num_threads(threads()) if (count > 16)
  {
#pragma omp for schedule(static)
    for (Index t = 0; t < count; t++)
      layer_norm(at<const E>(keys) + t * ldk, at<const E>(weight), at<const E>(bias), n, eps,
                 normed + t * n);
#pragma omp for schedule(static)
    for (Index p = 0; p < complete; p++) {
      const E *pool_keys[MOST_MEMBERS], *pool_gates[MOST_MEMBERS];
      for (Index m = 0; m < kpool; m++) {
        pool_keys[m] = key(p * kpool + m);
        pool_gates[m] = gate(p * kpool + m);
      }
      finish_pool(pool_keys, pool_gates, at<const E>(ape), kpool, n, at<E>(pools) + p * n);
    }
  }
  for (Index m = complete * kpool; m < total; m++) {
    if (m < waiting) continue;  // no pool was finished: it stays where it is
    E* slot = members + 2 * (m - complete * kpool) * n;
    std::memcpy(slot, key(m), n * sizeof(E));
    std::memcpy(slot + n, gate(m), n * sizeof(E));
  }
}

// ---- scores ----------------------------------------------------------------------------------

struct Query {          // one token
  const void* pools;    // [visible, dim] at least
  Index seen, visible;  // tokens up to its own, complete pools among them
};

template <class E> struct Scan {
  Index heads, dim;
  const E *queries, *weights;  // [T, heads * dim], [T, heads]
  Index ldq, ldw;
  float scale;                 // of a weighted score
};

constexpr Index POOLS = 16;  // scored together

// A query packed as vectors over heads, and its head weights.
template <int PACK> struct Packed {
  Index units, columns;
  Unit* query;     // [units][columns]
  float* weights;  // [columns]

  static Index size(Index heads, Index dim) {
    return (dim / PACK + 1) * round_up(heads, LANES);
  }
  template <class E> Packed(const Scan<E>& s, Index t, float* memory)
      : units(s.dim / PACK), columns(round_up(s.heads, LANES)), query(memory),
        weights(memory + units * columns) {
    pack_transposed<PACK>(s.queries + t * s.ldq, s.dim, s.heads, units, query, columns, columns);
    for (Index h = 0; h < columns; h += LANES)
      store(weights + h, load_row(s.weights + t * s.ldw + h, s.heads - h) * s.scale);
  }
};

// Scores of pools [from, to) with to - from <= POOLS: sum_h w_h relu(q_h . pool).
template <int PACK, class E>
INLINE void score(const Packed<PACK>& q, const E* pools, Index dim, Index from, Index to,
                  float* out) {
  struct Slot;
  float* dots = scratch<Slot, float>(POOLS * (q.columns + dim));
  const auto natural = [&](Index p) { return reinterpret_cast<const Unit*>(pools + p * dim); };
  if constexpr (sizeof(E) * PACK == 4) {
    multiply<PACK>([&](Index i) { return natural(from + i); }, to - from, 1, q.query, q.columns,
                   q.columns, q.units, dots, q.columns);
  } else {  // bf16 for fp32 units
    float* wide = dots + POOLS * q.columns;
    for (Index p = from; p < to; p++)
      for (Index j = 0; j < dim; j += LANES)
        store_row(wide + (p - from) * dim + j, load_row(pools + p * dim + j, dim - j), dim - j);
    multiply<PACK>([&](Index i) { return wide + i * dim; }, to - from, 1, q.query, q.columns,
                   q.columns, q.units, dots, q.columns);
  }
  for (Index p = from; p < to; p++) {
    F total = zero();
    for (Index h = 0; h < q.columns; h += LANES)
      total = fma(max(load(dots + (p - from) * q.columns + h), zero()), load(q.weights + h), total);
    out[p] = sum(total);
  }
}

// ---- choice ----------------------------------------------------------------------------------

// Unsigned keys in the order of the floats; -0 equals 0.
INLINE std::uint32_t sort_key(float x) {
  std::uint32_t u;
  x += 0.f;
  std::memcpy(&u, &x, 4);
  return u >> 31 ? ~u : u | 0x80000000u;
}

// Ascending ids of the k best of n scores (k < n): finds the k-th key digit by digit.
Index choose_best(const float* scores, Index n, Index k, std::int32_t* out) {
  struct Slot;
  constexpr int BITS = 11;
  std::uint32_t* keys = scratch<Slot, std::uint32_t>(2 * round_up(n, GROWTH) + (1 << BITS));
  std::uint32_t *rest = keys + n, *count = rest + n;
  for (Index i = 0; i < n; i++) keys[i] = sort_key(scores[i]);
  const std::uint32_t* from = keys;
  Index left = n, room = k;  // of the keys that share all digits so far, `room` are kept
  std::uint32_t limit = 0;
  for (int shift : {21, 10, 0}) {
    const std::uint32_t mask = shift ? (1u << BITS) - 1 : (1u << 10) - 1;
    std::memset(count, 0, sizeof(*count) << BITS);
    for (Index i = 0; i < left; i++) count[from[i] >> shift & mask]++;
    std::uint32_t digit = mask;
    while (Index(count[digit]) < room) room -= count[digit--];
    Index kept = 0;
    for (Index i = 0; i < left; i++) {  // reads stay ahead of writes
      rest[kept] = from[i];
      kept += (from[i] >> shift & mask) == digit;
    }
    limit |= digit << shift;
    from = rest;
    left = kept;
  }
  Index found = 0;
  for (Index i = 0; i < n; i++) {
    const bool tie = keys[i] == limit && room > 0;
    room -= tie;
    if (found < k) out[found] = std::int32_t(i);
    found += keys[i] > limit || tie;
  }
  return found;
}

struct Choice {
  Index kpool, most;  // tokens of a pool, pools that a query may keep
  bool tail;          // the tokens of the unfinished pool follow
  std::int32_t* out;  // [T, width] token ids, ascending, -1 at the end
  Index width;
};

void write_tokens(const Choice& c, Index t, const Query& q, const float* scores) {
  struct Slot;
  std::int32_t* pools = scratch<Slot, std::int32_t>(c.most + 1);
  Index kept = q.visible;
  if (q.visible > c.most) kept = choose_best(scores, q.visible, c.most, pools);
  else for (Index p = 0; p < kept; p++) pools[p] = std::int32_t(p);
  std::int32_t* out = c.out + t * c.width;
  Index n = 0;
  for (Index p = 0; p < kept; p++)
    for (Index m = 0; m < c.kpool; m++) out[n++] = std::int32_t(pools[p] * c.kpool + m);
  if (c.tail)
    for (Index m = q.visible * c.kpool; m < q.seen; m++) out[n++] = std::int32_t(m);
  while (n < c.width) out[n++] = -1;
}

// ---- scan and choice together ----------------------------------------------------------------

// done(t, scores) takes the scores of token t; they are gone afterwards.
template <int PACK, class E, class Done>
void scan(const Scan<E>& s, const std::vector<Query>& queries, Done done) {
  struct Slot;
  const Index rows = Index(queries.size()), packed = Packed<PACK>::size(s.heads, s.dim);
  const auto blocks = [&](Index t) { return (queries[t].visible + POOLS - 1) / POOLS; };
  const auto score_block = [&](const Packed<PACK>& q, Index t, Index block, float* scores) {
    const Index from = block * POOLS, end = from + POOLS, all = queries[t].visible;
    score<PACK>(q, static_cast<const E*>(queries[t].pools), s.dim, from, end < all ? end : all,
                scores);
  };
  if (rows >= 2 * threads() || threads() == 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads())
    for (Index t = 0; t < rows; t++) {
      float* memory = scratch<Slot, float>(packed + round_up(queries[t].visible, GROWTH));
      const Packed<PACK> q(s, t, memory);
      for (Index b = 0; b < blocks(t); b++) score_block(q, t, b, memory + packed);
      done(t, memory + packed);
    }
    return;
  }
  for (Index t = 0; t < rows; t++) {  // few tokens: the pools are shared out
    float* memory = scratch<Slot, float>(packed + round_up(queries[t].visible, GROWTH));
    const Packed<PACK> q(s, t, memory);
#pragma omp parallel for schedule(static) num_threads(threads()) if (queries[t].visible > 256)
    for (Index b = 0; b < blocks(t); b++) score_block(q, t, b, memory + packed);
    done(t, memory + packed);
  }
}

template <class E, class Done>
void run(const Scan<E>& s, const std::vector<Query>& queries, Done done) {
  if (s.dim % MOST<E>) scan<1>(s, queries, done);
  else scan<MOST<E>>(s, queries, done);
}

// Sequence i: counts[i] rows from position starts[i] on, pools at pools[i].
template <class E>
void select(Address queries, Index ldq, Address weights, Index ldw, Index heads, Index dim,
            float scale, Index kpool, Index most, bool tail, const std::vector<Index>& counts,
            const std::vector<Address>& pools, const std::vector<Index>& starts, Address out,
            Index width) {
  static thread_local std::vector<Query> memory;
  std::vector<Query>& rows = memory;  // other threads have a `memory` of their own
  rows.clear();
  for (std::size_t i = 0; i < counts.size(); i++)
    for (Index t = 0; t < counts[i]; t++) {
      const Index seen = starts[i] + t + 1;
      rows.push_back({at<void>(pools[i]), seen, seen / kpool});
    }
  const Choice c{kpool, most, tail, at<std::int32_t>(out), width};
  run(Scan<E>{heads, dim, at<const E>(queries), at<const E>(weights), ldq, ldw, scale}, rows,
      [&](Index t, const float* scores) { write_tokens(c, t, rows[t], scores); });
}

// The scores of `count` queries alone, [count, visible]: for tests and measurements.
template <class E>
void scores(Address queries, Index ldq, Address weights, Index ldw, Index heads, Index dim,
            float scale, Index count, Address pools, Index visible, Address out) {
  const std::vector<Query> rows(count, Query{at<void>(pools), visible, visible});
  run(Scan<E>{heads, dim, at<const E>(queries), at<const E>(weights), ldq, ldw, scale}, rows,
      [&](Index t, const float* s) {
        std::memcpy(at<float>(out) + t * visible, s, visible * sizeof(float));
      });
}

}  // namespace

void bind_kpool(nb::module_& m) {
  m.def("pool_append_bf16", &append<bf16>, Unlocked(), "Take tokens in, finish their pools.");
  m.def("pool_append_fp32", &append<float>, Unlocked(), "Take tokens in, finish their pools.");
  m.def("pool_select_bf16", &select<bf16>, Unlocked(), "Tokens that queries attend to.");
  m.def("pool_select_fp32", &select<float>, Unlocked(), "Tokens that queries attend to.");
  m.def("pool_scores_bf16", &scores<bf16>, Unlocked(), "Scores of every pool.");
  m.def("pool_scores_fp32", &scores<float>, Unlocked(), "Scores of every pool.");
}
