// Reads memory and nothing else: the yardstick that benchmarks put beside a kernel.
#include "ops.hpp"
#include "simd.hpp"

// Sum (mod 2^32) of the 32-bit words of `bytes` bytes, one stream per thread; each thread's share
// is cut to a multiple of 256 bytes.
static std::uint32_t read_probe(Address data, std::size_t bytes) {
  std::uint32_t total = 0;
#pragma omp parallel num_threads(threads()) reduction(+ : total)
  {
    const std::size_t share = bytes / team_size() / 256 * 256;
    const char* p = at<const char>(data) + share * thread_index();
    Words sum[4] = {};
    for (std::size_t i = 0; i < share; i += 4 * sizeof(Words))
      for (int j = 0; j < 4; j++) {
        __builtin_prefetch(p + i + 2048 + j * sizeof(Words), 0, 0);
        sum[j] += load_words(p + i + j * sizeof(Words));
      }
    sum[0] += sum[1] + sum[2] + sum[3];
    for (std::size_t i = 0; i < sizeof(Words) / 4; i++) total += sum[0][i];
  }
  return total;
}

// Multiply-adds from registers only, as many chains as hide the latency; bf16 pairs where the
// linear kernels use them. Returns the floating point operations done.
static double peak_probe(std::int64_t steps) {
  constexpr int CHAINS = 12;
  int team = 1;
#pragma omp parallel num_threads(threads())
  {
    if (thread_index() == 0) team = team_size();
    F acc[CHAINS] = {}, a = set1(1e-3f), b = set1(2e-3f);
    for (std::int64_t i = 0; i < steps; i++)
      for (int j = 0; j < CHAINS; j++) {
#if GLMFLASH_AVX512
        acc[j] = (F)_mm512_dpbf16_ps((__m512)acc[j], (__m512bh)a, (__m512bh)b);
#else
        acc[j] = fma(a, b, acc[j]);
#endif
        asm volatile("" : "+v"(acc[j]));  // keep every one
      }
  }
#if GLMFLASH_AVX512
  return 4. * LANES * CHAINS * double(steps) * team;
#else
  return 2. * LANES * CHAINS * double(steps) * team;
#endif
}

void bind_probe(nb::module_& m) {
  m.def("read_probe", &read_probe, Unlocked(), nb::arg("data"), nb::arg("bytes"),
        "Read `bytes` bytes with one stream per thread; returns a checksum.");
  m.def("peak_probe", &peak_probe, Unlocked(), nb::arg("steps"),
        "Multiply-adds in registers; returns the floating point operations done.");
}
