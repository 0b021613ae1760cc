// y = x W^T for one or several matrices that read the same x; their outputs lie side by side.
#include "ops.hpp"
#include "product.hpp"
#include "scratch.hpp"

#include <algorithm>

namespace {

struct Activations;  // names of scratch buffers
struct Sums;

// A run of panels of one matrix: what a thread takes at a time.
struct Part {
  const Matrix* matrix;
  std::int64_t panel, column;  // first panel, and its first column of y
  int group;
};

// Part `index` when every matrix is cut into parts of `group` panels; matrix is null past the end.
Part find_part(const Matrix* matrices, int matrix_count, int group, std::int64_t index) {
  std::int64_t column = 0;
  for (int i = 0; i < matrix_count; column += matrices[i++].n) {
    const std::int64_t panels = matrices[i].panels(), parts = (panels + group - 1) / group;
    if (index < parts)
      return {matrices + i, index * group, column + index * group * PANEL,
              int(std::min<std::int64_t>(group, panels - index * group))};
    index -= parts;
  }
  return {nullptr, 0, 0, 0};
}

void linear(Address table, int matrix_count, Address x, bool x_is_bf16, std::int64_t m, std::int64_t ldx,
            bool compute_bf16, Address y, bool y_is_bf16, std::int64_t ldy) {
  const Matrix* matrices = at<const Matrix>(table);
  const Compute compute = compute_bf16 ? Compute::bf16 : Compute::fp32;
  const std::int64_t k = matrices[0].k;
  std::int64_t panels = 0;
  for (int i = 0; i < matrix_count; i++) panels += matrices[i].panels();
  const int team = threads();
  const int group = many_rows(m) && panels >= 4 * team * GROUP ? GROUP : 1;
  std::int64_t parts = 0;
  for (int i = 0; i < matrix_count; i++) parts += (matrices[i].panels() + group - 1) / group;

  const std::int64_t chunks = (m + ROWS - 1) / ROWS;
  char* packed = scratch<Activations>(activation_size(m, k, compute));
  const std::int64_t row_size = activation_size(1, k, compute);
  const auto pack = [&](std::int64_t row) {
    const std::int64_t chunk = row / ROWS, first = chunk * ROWS;
    pack_activation(at<const char>(x) + row * ldx * (x_is_bf16 ? 2 : 4), x_is_bf16, k,
                    row - first, std::min<std::int64_t>(ROWS, m - first), compute,
                    packed + first * row_size);
  };
  const bool pack_alone = m <= 4;  // a barrier costs more than copying a few rows
  if (pack_alone)
    for (std::int64_t row = 0; row < m; row++) pack(row);
#pragma omp parallel num_threads(team)
  {
    if (!pack_alone) {
#pragma omp for schedule(static)
      for (std::int64_t row = 0; row < m; row++) pack(row);
    }
    float* c = scratch<Sums, float>(std::size_t(std::min<std::int64_t>(m, ROWS)) * group * PANEL);
#pragma omp for schedule(static)
    for (std::int64_t task = 0; task < parts * chunks; task++) {
      const Part part = find_part(matrices, matrix_count, group, task % parts);
      const std::int64_t first = task / parts * ROWS;
      const std::int64_t rows = std::min<std::int64_t>(ROWS, m - first);
      multiply(*part.matrix, part.panel, part.group, packed + first * row_size, rows, compute, c);
      const std::int64_t width = part.group * PANEL, place = first * ldy + part.column;
      const std::int64_t count = std::min(width, part.matrix->n - part.panel * PANEL);
      if (y_is_bf16) write_rows(c, width, rows, count, at<bf16>(y) + place, ldy);
      else write_rows(c, width, rows, count, at<float>(y) + place, ldy);
    }
  }
}

void pack(Address table, Address out) {
  const Matrix& a = *at<const Matrix>(table);
#pragma omp parallel for num_threads(threads()) schedule(static)
  for (std::int64_t panel = 0; panel < a.panels(); panel++) pack_matrix(a, panel, at<char>(out));
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.attr("panel") = PANEL;
  m.attr("k_align") = K_ALIGN;
  m.def("linear", &linear, Unlocked(), nb::arg("table"), nb::arg("count"), nb::arg("x"),
        nb::arg("x_is_bf16"), nb::arg("m"), nb::arg("ldx"), nb::arg("compute_bf16"), nb::arg("y"),
        nb::arg("y_is_bf16"), nb::arg("ldy"),
        "y [m, sum of n] = x [m, k] times each matrix of the table, transposed.");
  m.def("pack", &pack, Unlocked(), nb::arg("table"), nb::arg("out"),
        "Pack one row-major matrix: panels * PANEL * padded k elements.");
}
