// RMSNorm of rows, and the clamped SwiGLU between two projections.
#include "dots.hpp"
#include "ops.hpp"

namespace {

constexpr Index SMALL = 1 << 14;  // elements that one thread finishes before another wakes up

template <class E>
void rms_norm(Address x, Index ldx, Address weight, Address out, Index ldo, Index rows, Index n,
              float eps) {
#pragma omp parallel for num_threads(threads()) if (rows > 1 && rows * n > SMALL)
  for (Index t = 0; t < rows; t++)
    normalize(at<const E>(x) + t * ldx, at<const E>(weight), n, eps, at<E>(out) + t * ldo);
}

template <class E>
void swiglu(Address gate, Index ldg, Address up, Index ldu, Address out, Index ldo, Index rows,
            Index n, float limit) {
#pragma omp parallel for num_threads(threads()) if (rows > 1 && rows * n > SMALL)
  for (Index t = 0; t < rows; t++)
    for (Index j = 0; j < n; j += LANES) {
      const F g = min(set1(limit), load_row(at<const E>(gate) + t * ldg + j, n - j));
      const F u = load_row(at<const E>(up) + t * ldu + j, n - j);
      const F y = g * quick_sigmoid(g) * min(set1(limit), max(set1(-limit), u));
      store_row(at<E>(out) + t * ldo + j, y, n - j);
    }
}

}  // namespace

void bind_norm(nb::module_& m) {
  m.def("rms_norm_bf16", &rms_norm<bf16>, Unlocked(), "Rows [T, n] scaled to unit mean square.");
  m.def("rms_norm_fp32", &rms_norm<float>, Unlocked(), "Rows [T, n] scaled to unit mean square.");
  m.def("swiglu_bf16", &swiglu<bf16>, Unlocked(), "SiLU(min(gate, l)) * clamp(up, -l, l).");
  m.def("swiglu_fp32", &swiglu<float>, Unlocked(), "SiLU(min(gate, l)) * clamp(up, -l, l).");
}
