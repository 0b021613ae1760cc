// y[t] = sum over the experts e of token t of weight * W_down (SiLU(gate) * up), tokens grouped by
// expert; with no routed experts, a dense MLP.
//
// Order of the sum: the shared expert first, then experts by ascending id, in fp32, rounded once.
// The hidden values are rounded to bf16 in bf16 compute, as they feed a bf16 product.
#include "ops.hpp"
#include "product.hpp"
#include "scratch.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace {

struct Expert {  // three rows of the table that Python prepares
  Matrix gate, up, down;
};

// Rows of one expert that are computed together; [first, first + rows) of the entries.
struct Batch {
  const Expert* expert;
  std::int64_t first, rows;
  std::int64_t task;    // number of its first gate/up task
  std::size_t x, h;     // where its packed rows begin, bytes
  int group;            // panels of a gate/up task
};
struct Entry {
  std::int64_t token;
  float weight;
};

// Who computes what: every pair (token, expert), sorted by expert; shared ones come first.
struct Plan {
  Entry* entries;
  Batch* batches;
  std::int64_t count = 0, tasks = 0;  // batches; gate/up tasks
  std::size_t x_size = 0, h_size = 0;
};

struct Call {
  const Expert* experts;
  std::int64_t expert_count;
  bool shared;  // experts[expert_count] sees every token, with weight 1
  const char* x;
  bool x_is_bf16;
  std::int64_t tokens, width, ldx, top_k;  // width: of x and of y
  const std::int64_t* ids;  // [tokens, top_k]
  const float* weights;     // [tokens, top_k]
  float limit;
  Compute compute;
};

// Names of scratch buffers.
struct Entries;
struct Batches;
struct Counts;
struct Inputs;
struct Hidden;
struct Sums;
struct MoreSums;

void add_batches(const Call& call, Plan& plan, const Expert& expert, std::int64_t first,
                 std::int64_t rows, int team) {
  if (!expert.gate.data)
    throw std::runtime_error("expert " + std::to_string(&expert - call.experts) + " has no weights");
  for (std::int64_t done = 0; done < rows; done += ROWS) {
    Batch& b = plan.batches[plan.count++];
    b = {&expert, first + done, std::min<std::int64_t>(ROWS, rows - done), plan.tasks,
         call.tokens > 1 ? plan.x_size : 0, plan.h_size, 1};  // one token is packed once for all
    const std::int64_t panels = expert.gate.panels();
    if (many_rows(b.rows) && panels >= 4 * team) b.group = GROUP;
    plan.tasks += (panels + b.group - 1) / b.group;
    plan.h_size += activation_size(b.rows, expert.down.k, call.compute);
    plan.x_size += activation_size(b.rows, call.width, call.compute);
  }
}

Plan make_plan(const Call& call, int team) {
  const std::int64_t chosen = call.tokens * call.top_k;
  const std::int64_t all = chosen + (call.shared ? call.tokens : 0);
  const std::int64_t active = std::min(chosen, call.expert_count) + 1;
  Plan plan;
  plan.entries = scratch<Entries, Entry>(all);
  plan.batches = scratch<Batches, Batch>(active + all / ROWS + 1);
  std::int64_t* next = scratch<Counts, std::int64_t>(call.expert_count + 1);
  std::fill(next, next + call.expert_count + 1, 0);
  std::int64_t place = 0;
  if (call.shared) {
    for (; place < call.tokens; place++) plan.entries[place] = {place, 1.f};
    add_batches(call, plan, call.experts[call.expert_count], 0, call.tokens, team);
  }
  for (std::int64_t i = 0; i < chosen; i++) {
    if (call.ids[i] < 0 || call.ids[i] >= call.expert_count)
      throw std::out_of_range("expert id " + std::to_string(call.ids[i]) + " of " +
                              std::to_string(call.expert_count));
    next[call.ids[i]]++;
  }
  for (std::int64_t e = 0; e < call.expert_count; e++) {
    const std::int64_t rows = next[e];
    next[e] = place;
    if (rows) add_batches(call, plan, call.experts[e], place, rows, team);
    place += rows;
  }
  for (std::int64_t i = 0; i < chosen; i++)
    plan.entries[next[call.ids[i]]++] = {i / call.top_k, call.weights[i]};
  return plan;
}

// One run of panels of gate and up, for all rows of a batch, to packed hidden values.
void hidden(const Call& call, const Batch& b, std::int64_t panel, const char* x, char* h) {
  const Matrix &gate = b.expert->gate, &up = b.expert->up;
  const int group = int(std::min<std::int64_t>(b.group, gate.panels() - panel));
  const std::int64_t width = group * PANEL;
  float* g = scratch<Sums, float>(b.rows * width);
  float* u = scratch<MoreSums, float>(b.rows * width);
  multiply(gate, panel, group, x + b.x, b.rows, call.compute, g);
  multiply(up, panel, group, x + b.x, b.rows, call.compute, u);
  const F limit = set1(call.limit);
  for (std::int64_t i = 0; i < b.rows * width; i += LANES)
    store(g + i, silu(min(load(g + i), limit)) * max(min(load(u + i), limit), zero() - limit));
  for (std::int64_t row = 0; row < b.rows; row++)
    for (int i = 0; i < group; i++)
      pack_result(g + row * width + i * PANEL, (panel + i) * PANEL, row, b.rows, call.compute,
                  h + b.h);
  if (panel + group < gate.panels()) return;
  const float zeros[PANEL] = {};  // small panels may end before the padded k of down
  for (std::int64_t i = gate.panels(); i * PANEL < b.expert->down.padded_k(); i++)
    for (std::int64_t row = 0; row < b.rows; row++)
      pack_result(zeros, i * PANEL, row, b.rows, call.compute, h + b.h);
}

// One run of panels of y: every expert's down projection, added up token by token.
template <class Y>
void collect(const Call& call, const Plan& plan, std::int64_t panel, int group, const char* h,
             Y* y, std::int64_t ldy) {
  const std::int64_t width = group * PANEL;
  float* total = scratch<MoreSums, float>(call.tokens * width);
  std::fill(total, total + call.tokens * width, 0.f);
  for (const Batch* b = plan.batches; b != plan.batches + plan.count; b++) {
    float* c = scratch<Sums, float>(b->rows * width);
    multiply(b->expert->down, panel, group, h + b->h, b->rows, call.compute, c);
    for (std::int64_t row = 0; row < b->rows; row++) {
      const Entry entry = plan.entries[b->first + row];
      float* to = total + entry.token * width;
      for (std::int64_t i = 0; i < width; i += LANES)
        store(to + i, fma(load(c + row * width + i), set1(entry.weight), load(to + i)));
    }
  }
  write_rows(total, width, call.tokens, std::min(width, call.width - panel * PANEL),
             y + panel * PANEL, ldy);
}

void moe(Address experts, std::int64_t expert_count, bool shared, Address x, bool x_is_bf16,
         std::int64_t tokens, std::int64_t width, std::int64_t ldx, std::int64_t top_k, Address ids,
         Address weights, float limit, bool compute_bf16, Address y, bool y_is_bf16,
         std::int64_t ldy) {
  const Call call{at<const Expert>(experts), expert_count, shared, at<const char>(x), x_is_bf16,
                  tokens, width, ldx, top_k, at<const std::int64_t>(ids),
                  at<const float>(weights), limit, compute_bf16 ? Compute::bf16 : Compute::fp32};
  const int team = threads();
  const Plan plan = make_plan(call, team);
  char* packed = scratch<Inputs>(plan.x_size);
  char* h = scratch<Hidden>(plan.h_size);
  const auto pack = [&](const Batch& b) {
    for (std::int64_t row = 0; row < b.rows; row++)
      pack_activation(call.x + plan.entries[b.first + row].token * ldx * (x_is_bf16 ? 2 : 4),
                      x_is_bf16, width, row, b.rows, call.compute, packed + b.x);
  };
  if (tokens == 1 && plan.count) pack(plan.batches[0]);
  const Batch *begin = plan.batches, *end = begin + plan.count;
  const std::int64_t panels = (width + PANEL - 1) / PANEL;
  const bool many = std::any_of(begin, end, [](const Batch& b) { return many_rows(b.rows); });
  const int group = many && panels >= 4 * team ? GROUP : 1;
#pragma omp parallel num_threads(team)
  {
    if (tokens > 1) {
#pragma omp for schedule(dynamic)
      for (std::int64_t i = 0; i < plan.count; i++) pack(plan.batches[i]);
    }
#pragma omp for schedule(dynamic)
    for (std::int64_t task = 0; task < plan.tasks; task++) {
      const Batch& b = *(std::upper_bound(begin, end, task, [](std::int64_t t, const Batch& other) {
                           return t < other.task;
                         }) - 1);
      hidden(call, b, (task - b.task) * b.group, packed, h);
    }
#pragma omp for schedule(dynamic)
    for (std::int64_t panel = 0; panel < panels; panel += group) {
      const int run = int(std::min<std::int64_t>(group, panels - panel));
      if (y_is_bf16) collect(call, plan, panel, run, h, at<bf16>(y), ldy);
      else collect(call, plan, panel, run, h, at<float>(y), ldy);
    }
  }
}

}  // namespace

void bind_moe(nb::module_& m) {
  m.def("moe", &moe, Unlocked(), nb::arg("experts"), nb::arg("expert_count"), nb::arg("shared"),
        nb::arg("x"), nb::arg("x_is_bf16"), nb::arg("tokens"), nb::arg("width"), nb::arg("ldx"),
        nb::arg("top_k"), nb::arg("ids"), nb::arg("weights"), nb::arg("limit"),
        nb::arg("compute_bf16"), nb::arg("y"), nb::arg("y_is_bf16"), nb::arg("ldy"),
        "Weighted sum of clamped SwiGLU experts, y [tokens, width].");
}
