// Sparse latent attention in absorbed form: keys and values are never written out.
//
// q^T U_K c = (U_K^T q)^T c, so queries are first multiplied by the key half of kv_b, attend to
// the latents themselves, and the attended latents by the value half. Tokens are taken in the
// order of their list; every sum has one order, so a token's result depends on its list alone.
#include <nanobind/stl/vector.h>

#include "ops.hpp"
#include "scratch.hpp"
#include "tile.hpp"

namespace {

constexpr Index KEYS = 64;          // latents scored together, and weighted together
constexpr Index PIECE = 16;         // units of the key half packed at a time
constexpr Index RANKS = 2 * LANES;  // latent columns of one weighted sum

struct Row {                // one token
  const void* latents;      // [n, rank] at least
  const std::int32_t* ids;  // its tokens; null: 0..n-1
  Index n;
  Index id(Index j) const { return ids ? ids[j] : j; }
};

template <class E, class W> struct Layer {
  Index heads, key_dim, value_dim, rank;
  const W* kv_b;  // [heads, key_dim + value_dim, rank]
  float scale;
  const E* q;     // [T, heads * key_dim]
  Index ldq;
  E* out;         // [T, heads * value_dim]
  Index ldo;

  Index padded_heads() const { return round_up(heads, LANES); }
  Index padded_rank() const { return round_up(rank, RANKS); }
  const W* keys(Index h) const { return kv_b + h * (key_dim + value_dim) * rank; }
  const W* values(Index h) const { return keys(h) + key_dim * rank; }
};

// Rows of E as units: the rows themselves where they are units already, else copies in fp32.
template <int PACK, class E> struct Operand {
  static constexpr bool DIRECT = sizeof(E) * PACK == 4;
  Index stride;
  const Unit* first;
  template <class At>
  Operand(At row, Index rows, Index n, Index direct_stride, float* memory)
      : stride(direct_stride), first(nullptr) {
    if constexpr (DIRECT) {
      first = reinterpret_cast<const Unit*>(row(0));
    } else {
      stride = n;
      first = memory;
      for (Index i = 0; i < rows; i++)
        for (Index j = 0; j < n; j += LANES)
          store_row(memory + i * n + j, load_row(row(i) + j, n - j), n - j);
    }
  }
  const Unit* operator()(Index i) const { return first + i * stride; }
};

// absorbed[t][h] = scale * U_K^T q for tokens first.. and one head.
template <int PACK, class E, class W>
void absorb(const Layer<E, W>& l, Index first, Index tokens, Index h, E* absorbed) {
  struct Slot;
  const Index columns = l.padded_rank(), units = l.key_dim / PACK;
  Unit* packed = scratch<Slot, float>(PIECE * columns + tokens * (columns + l.key_dim));
  float *sums = packed + PIECE * columns, *wide = sums + tokens * columns;
  const auto query = [&](Index t) { return l.q + (first + t) * l.ldq + h * l.key_dim; };
  const Operand<PACK, E> q(query, tokens, l.key_dim, l.ldq / PACK, wide);
  for (Index u = 0; u < units; u += PIECE) {
    const Index count = units - u < PIECE ? units - u : PIECE;
    for (Index i = 0; i < count; i++) {
      const W* row = l.keys(h) + (u + i) * PACK * l.rank;
      pack_interleaved<PACK>(row, row + (PACK - 1) * l.rank, l.rank, packed + i * columns);
    }
    multiply<PACK>([&](Index t) { return q(t) + u; }, tokens, 1, packed, columns,
                   round_up(l.rank, LANES), count, sums, columns, u > 0);
  }
  for (Index t = 0; t < tokens; t++)
    for (Index j = 0; j < l.rank; j += LANES)
      store_row(absorbed + (t * l.heads + h) * l.rank + j, load(sums + t * columns + j) * l.scale,
                l.rank - j);
}

// out[t][h] = U_V attended[t][h] for value columns [from, to) of one head.
template <int PACK, class E, class W>
void project(const Layer<E, W>& l, Index first, Index tokens, Index h, Index from, Index to,
             const E* attended) {
  struct Slot;
  const Index columns = round_up(to - from, LANES), units = l.rank / PACK;
  Unit* packed = scratch<Slot, float>(units * columns + tokens * (columns + l.rank));
  float *sums = packed + units * columns, *wide = sums + tokens * columns;
  pack_transposed<PACK>(l.values(h) + from * l.rank, l.rank, to - from, units, packed, columns,
                        columns);
  const auto row = [&](Index t) { return attended + (t * l.heads + h) * l.rank; };
  const Operand<PACK, E> a(row, tokens, l.rank, l.heads * l.rank / PACK, wide);
  multiply<PACK>(a, tokens, 1, packed, columns, columns, units, sums, columns);
  for (Index t = 0; t < tokens; t++) {
    E* out = l.out + (first + t) * l.ldo + h * l.value_dim;
    for (Index j = from; j < to; j += LANES)
      store_row(out + j, load(sums + t * columns + j - from), to - j);
  }
}

// Attention of one token, in steps that threads may share.
template <int PACK, class E, class W> struct Attention {
  const Layer<E, W>& l;
  const Row& row;
  const E* absorbed;      // [heads, rank]
  E* attended;            // [heads, rank]
  Index columns, groups;  // padded heads; units of tokens
  Unit *query, *shares;   // [rank / PACK][columns], [groups][columns]
  float *scores, *total;  // [n][columns], [columns]

  static Index size(const Layer<E, W>& l, Index n) {
    return l.padded_heads() * (l.rank + 1 + 2 * (n + 1));
  }
  Attention(const Layer<E, W>& layer, const Row& r, const E* absorbed_at, E* attended_at,
            float* memory)
      : l(layer), row(r), absorbed(absorbed_at), attended(attended_at), columns(l.padded_heads()),
        groups((row.n + PACK - 1) / PACK), query(memory), shares(query + l.rank * columns),
        scores(shares + (row.n + 1) * columns), total(scores + (row.n + 1) * columns) {}

  const E* latent(Index j) const { return static_cast<const E*>(row.latents) + row.id(j) * l.rank; }

  void pack_query() {
    pack_transposed<PACK>(absorbed, l.rank, l.heads, l.rank / PACK, query, columns, columns);
  }

  Index key_blocks() const { return (row.n + KEYS - 1) / KEYS; }
  void score(Index block) {
    const Index from = block * KEYS, rows = row.n - from < KEYS ? row.n - from : KEYS;
    float* to = scores + from * columns;
    if constexpr (Operand<PACK, E>::DIRECT) {
      multiply<PACK>([&](Index i) { return reinterpret_cast<const Unit*>(latent(from + i)); }, rows,
                     1, query, columns, columns, l.rank / PACK, to, columns);
    } else {
      struct Slot;
      const Operand<PACK, E> a([&](Index i) { return latent(from + i); }, rows, l.rank, 0,
                               scratch<Slot, float>(KEYS * l.rank));
      multiply<PACK>(a, rows, 1, query, columns, columns, l.rank, to, columns);
    }
  }

  // Softmax of LANES heads from h on: unnormalised shares in E, and their totals.
  void share(Index h) {
    F most = load(scores + h), sum = zero();
    for (Index j = 1; j < row.n; j++) most = max(most, load(scores + j * columns + h));
    for (Index g = 0; g < groups; g++) {
      Words unit = {};
      for (Index j = g * PACK; j < (g + 1) * PACK && j < row.n; j++) {
        const F p = round_to<E>(quick_exp(load(scores + j * columns + h) - most));
        sum += p;
        unit |= j % PACK ? bits(p) : PACK == 2 ? bits(p) >> 16 : bits(p);
      }
      std::memcpy(shares + g * columns + h, &unit, sizeof unit);
    }
    store(total + h, sum);
  }

  // attended columns [r, r + RANKS) of all heads: the latents weighted by their shares.
  void weigh(Index r) {
    struct Slot;
    constexpr Index GROUPS = KEYS / PACK;
    Unit* packed = scratch<Slot, float>(GROUPS * RANKS + l.heads * RANKS);
    float* sums = packed + GROUPS * RANKS;
    const Index width = l.rank - r < RANKS ? l.rank - r : RANKS;
    for (Index g = 0; g < groups; g += GROUPS) {
      const Index count = groups - g < GROUPS ? groups - g : GROUPS;
      for (Index i = 0; i < count; i++) {
        const Index j = (g + i) * PACK;
        if (j + KEYS < row.n) __builtin_prefetch(latent(j + KEYS) + r);
        if (j + KEYS + 1 < row.n) __builtin_prefetch(latent(j + KEYS + 1) + r);
        const E* second = PACK == 2 && j + 1 < row.n ? latent(j + 1) + r : nullptr;
        pack_interleaved<PACK>(latent(j) + r, second, width, packed + i * RANKS);
      }
      multiply<PACK>([&](Index h) { return shares + g * columns + h; }, l.heads, columns, packed,
                     RANKS, round_up(width, LANES), count, sums, RANKS, g > 0);
    }
    for (Index h = 0; h < l.heads; h++)
      for (Index j = 0; j < width; j += LANES) {
        const F x = row.n ? load(sums + h * RANKS + j) * (1.f / total[h]) : zero();
        store_row(attended + h * l.rank + r + j, x, width - j);
      }
  }
};

template <int PACK, class E, class W>
void attend(const Layer<E, W>& l, const Row* rows, Index tokens, const E* absorbed, E* attended) {
  struct Slot;
  using One = Attention<PACK, E, W>;
  const Index width = l.heads * l.rank;
  const auto memory = [&](Index t) {  // in steps: a decoded sequence grows with every call
    return scratch<Slot, float>(One::size(l, round_up(rows[t].n, 1024)));
  };
  if (tokens >= threads()) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads())
    for (Index t = 0; t < tokens; t++) {
      One a(l, rows[t], absorbed + t * width, attended + t * width, memory(t));
      a.pack_query();
      for (Index b = 0; b < a.key_blocks(); b++) a.score(b);
      if (a.row.n)
        for (Index h = 0; h < a.columns; h += LANES) a.share(h);
      for (Index r = 0; r < l.rank; r += RANKS) a.weigh(r);
    }
    return;
  }
  for (Index t = 0; t < tokens; t++) {
    One a(l, rows[t], absorbed + t * width, attended + t * width, memory(t));
    a.pack_query();
#pragma omp parallel num_threads(threads())
    {
#pragma omp for schedule(static)
      for (Index b = 0; b < a.key_blocks(); b++) a.score(b);
      if (a.row.n) {
#pragma omp for schedule(static)
        for (Index h = 0; h < a.columns; h += LANES) a.share(h);
      }
#pragma omp for schedule(static)
      for (Index r = 0; r < l.rank; r += RANKS) a.weigh(r);
    }
  }
}

template <int PACK, class E, class W> void run(const Layer<E, W>& l, const std::vector<Row>& rows) {
  struct Slot;
  const Index all = Index(rows.size()), width = l.heads * l.rank;
  const Index block = 2 * threads() > 32 ? 2 * threads() : 32;  // tokens that share packed weights
  E* absorbed = scratch<Slot, E>(2 * (all < block ? all : block) * width);
  constexpr Index VALUES = 4 * LANES;
  const Index parts = (l.value_dim + VALUES - 1) / VALUES;
  for (Index first = 0; first < all; first += block) {
    const Index tokens = all - first < block ? all - first : block;
    E* attended = absorbed + tokens * width;
#pragma omp parallel for schedule(static) num_threads(threads())
    for (Index h = 0; h < l.heads; h++) absorb<PACK>(l, first, tokens, h, absorbed);
    attend<PACK>(l, rows.data() + first, tokens, absorbed, attended);
#pragma omp parallel for schedule(static) num_threads(threads())
    for (Index task = 0; task < l.heads * parts; task++) {
      const Index from = task % parts * VALUES, end = from + VALUES;
      project<PACK>(l, first, tokens, task / parts, from, end < l.value_dim ? end : l.value_dim,
                    attended);
    }
  }
}

// Sequence i: counts[i] rows, the first at position starts[i], latents at latents[i]. ids
// [T, width] int32, -1 from the end of a list on; null: every token up to the row's own.
template <class E, class W>
void mla(Address q, Index ldq, Address kv_b, Index heads, Index key_dim, Index value_dim,
         Index rank, float scale, const std::vector<Index>& counts,
         const std::vector<Address>& latents, const std::vector<Index>& starts, Address ids,
         Index width, Address out, Index ldo) {
  static thread_local std::vector<Row> memory;
  std::vector<Row>& rows = memory;  // other threads have a `memory` of their own
  rows.clear();
  for (std::size_t i = 0; i < counts.size(); i++)
    for (Index t = 0; t < counts[i]; t++) {
      Row row{at<void>(latents[i]), nullptr, starts[i] + t + 1};
      if (ids) {
        row.ids = at<const std::int32_t>(ids) + Index(rows.size()) * width;
        row.n = 0;
        while (row.n < width && row.ids[row.n] >= 0) row.n++;
      }
      rows.push_back(row);
    }
  const Layer<E, W> l{heads, key_dim, value_dim, rank, at<const W>(kv_b), scale, at<const E>(q),
                      ldq, at<E>(out), ldo};
  if (rank % MOST<E> || key_dim % MOST<E> || ldq % MOST<E>) run<1>(l, rows);
  else run<MOST<E>>(l, rows);
}

}  // namespace

void bind_mla(nb::module_& m) {
  m.def("mla_bf16", &mla<bf16, bf16>, Unlocked(), "Absorbed latent attention, weights bf16.");
  m.def("mla_fp32", &mla<float, float>, Unlocked(), "Absorbed latent attention in fp32.");
  m.def("mla_fp32_bf16", &mla<float, bf16>, Unlocked(), "In fp32, weights bf16.");
}
