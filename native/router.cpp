// Expert choice: fp32 logits, sigmoid, biased choice within the best groups, normalised weights.
//
// Equal scores go to the lower expert id; chosen experts are in descending order of biased score.
#include "dots.hpp"
#include "ops.hpp"
#include "scratch.hpp"

namespace {

struct Rule {
  const float* bias;
  Index experts, top_k, groups, kept_groups;
  bool normalize;
  float scale;
};

// Index of the largest of x[0..n) that is not taken, the first of equals; marks it taken.
INLINE Index take_best(const float* x, Index n, bool* taken) {
  Index best = -1;
  for (Index i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
  taken[best] = true;
  return best;
}

// Experts outside the groups with the best pair of biased scores are taken from the start.
void drop_groups(const Rule& rule, const float* biased, bool* taken, float* strength, bool* kept) {
  const Index size = rule.experts / rule.groups;
  for (Index g = 0; g < rule.groups; g++) {
    const float* x = biased + g * size;
    float first = -INFINITY, second = -INFINITY;
    for (Index i = 0; i < size; i++)
      if (x[i] > first) second = first, first = x[i];
      else if (x[i] > second) second = x[i];
    strength[g] = first + second;
    kept[g] = false;
  }
  for (Index i = 0; i < rule.kept_groups; i++) take_best(strength, rule.groups, kept);
  for (Index e = 0; e < rule.experts; e++) taken[e] = !kept[e / size];
}

// logits [experts] become scores; ids and weights [top_k].
void choose(const Rule& rule, float* scores, std::int64_t* ids, float* weights) {
  struct Slot;
  const Index n = round_up(rule.experts, LANES);
  float* biased = scratch<Slot, float>(2 * n + rule.groups + 2 * n);
  float* strength = biased + n;
  bool* taken = reinterpret_cast<bool*>(strength + rule.groups);
  bool* kept = taken + n;
  for (Index e = 0; e < rule.experts; e += LANES) {
    const F s = quick_sigmoid(load_row(scores + e, rule.experts - e));
    store_row(scores + e, s, rule.experts - e);
    store(biased + e, s + load_row(rule.bias + e, rule.experts - e));
  }
  for (Index e = 0; e < rule.experts; e++) taken[e] = false;
  if (rule.kept_groups < rule.groups) drop_groups(rule, biased, taken, strength, kept);
  float total = 0;
  for (Index i = 0; i < rule.top_k; i++) {
    ids[i] = take_best(biased, rule.experts, taken);
    total += weights[i] = scores[ids[i]];
  }
  for (Index i = 0; i < rule.top_k; i++) {
    if (rule.normalize) weights[i] /= total + 1e-20f;
    weights[i] *= rule.scale;
  }
}

template <class W, class X>
void run(const Rule& rule, const W* w, const X* x, Index ldx, Index rows, Index width,
         std::int64_t* ids, float* weights) {
  struct Slot;
  constexpr Index EXPERTS = 8, TOKENS = 16;  // of one task
  const Index chunk = rows < 512 ? rows : 512;
  float* logits = scratch<Slot, float>(chunk * rule.experts);
  const Index parts = (rule.experts + EXPERTS - 1) / EXPERTS;
  for (Index first = 0; first < rows; first += chunk) {
    const Index count = rows - first < chunk ? rows - first : chunk;
    const Index blocks = (count + TOKENS - 1) / TOKENS;
#pragma omp parallel num_threads(threads())
    {
#pragma omp for schedule(static)
      for (Index task = 0; task < blocks * parts; task++) {
        const Index t = task / parts * TOKENS, e = task % parts * EXPERTS;
        const Index tokens = count - t < TOKENS ? count - t : TOKENS;
        const Index experts = rule.experts - e < EXPERTS ? rule.experts - e : EXPERTS;
        dots(w + e * width, width, experts, x + (first + t) * ldx, ldx, tokens, width,
             logits + t * rule.experts + e, rule.experts);
      }
#pragma omp for schedule(static)
      for (Index t = 0; t < count; t++)
        choose(rule, logits + t * rule.experts, ids + (first + t) * rule.top_k,
               weights + (first + t) * rule.top_k);
    }
  }
}

void router(bool x_bf16, bool w_bf16, Address x, Index ldx, Index rows, Address w, Index width,
            Address bias, Index experts, Index top_k, Index groups, Index kept_groups,
            bool normalize, float scale, Address ids, Address weights) {
  const Rule rule{at<const float>(bias), experts, top_k, groups, kept_groups, normalize, scale};
  const auto typed = [&](auto weight, auto input) {
    run(rule, at<const decltype(weight)>(w), at<const decltype(input)>(x), ldx, rows, width,
        at<std::int64_t>(ids), at<float>(weights));
  };
  if (w_bf16) x_bf16 ? typed(bf16(), bf16()) : typed(bf16(), float());
  else x_bf16 ? typed(float(), bf16()) : typed(float(), float());
}

}  // namespace

void bind_router(nb::module_& m) {
  m.def("router", &router, Unlocked(), "Expert ids [T, k] and weights [T, k] of rows [T, D].");
}
