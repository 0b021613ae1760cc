// Matrix products y = x W^T of every weight format: the part that `linear` and `moe` share.
//
// A weight matrix [n, k] is either row-major (any alignment: a mapped file) or packed. Packed, it
// is cut into panels of PANEL rows; a panel holds, for ascending k, the weights of its rows side
// by side, so that a vector lane is an output row:
//   fp32  [k][PANEL]          bf16  [k / 2][PANEL][2]
//   fp8   AVX-512: [k / 4][PANEL / 16][64 bytes], bytes in the order that unpacking wants;
//         else: [k][PANEL]
// k is padded to K_ALIGN and n to PANEL with zeros. Row-major weights are packed on the fly, a few
// blocks at a time, into the first-level cache; from there on there is one code path.
//
// One accumulation order, whatever the layout, the number of rows of x, and the thread count: each
// output sums blocks of 128 k in one fp32 chain, k ascending (bf16 instructions take two k a
// step); total = fma(block, scale, total), blocks ascending.
#pragma once
#include <cstddef>
#include <cstdint>

#include "simd.hpp"

constexpr int BLOCK = 128;        // k of one FP8 scale, and of one accumulator chain
constexpr int PANEL = 2 * LANES;  // rows of a panel; divides BLOCK
constexpr int K_ALIGN = 16;

enum class Kind : std::int64_t { fp8, bf16, fp32 };
constexpr int size_of(Kind kind) { return kind == Kind::fp8 ? 1 : kind == Kind::bf16 ? 2 : 4; }

// A row of the table that Python prepares; every field is an int64.
struct Matrix {
  const char* data;
  const float* scale;  // [ceil(n / 128), ceil(k / 128)], or null: 1
  std::int64_t n, k;
  std::int64_t stride;  // elements between rows; 0: packed
  Kind kind;

  std::int64_t padded_k() const { return (k + K_ALIGN - 1) / K_ALIGN * K_ALIGN; }
  std::int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};
static_assert(sizeof(Matrix) == 6 * 8, "the Python table has six int64 per matrix");

// Activations: `bf16` multiplies bf16 x bf16 exactly and adds in fp32; `fp32` takes fp32 values.
// AVX-512 holds bf16 activations as bf16, the others as fp32 (same values).
enum class Compute { bf16, fp32 };
#if GLMFLASH_AVX512
typedef bf16 Bf16Activation;
#else
typedef float Bf16Activation;
#endif
constexpr int activation_bytes(Compute compute) {
  return compute == Compute::bf16 ? sizeof(Bf16Activation) : 4;
}
// Bytes of m packed activation rows of k values: [ceil(k / 128)][m][128], zero padded.
inline std::size_t activation_size(std::int64_t m, std::int64_t k, Compute compute) {
  return std::size_t((k + BLOCK - 1) / BLOCK * BLOCK) * m * activation_bytes(compute);
}
// Copy one row (bf16 or fp32 in memory) of k values to row `row` of m packed rows.
void pack_activation(const void* x, bool x_is_bf16, std::int64_t k, std::int64_t row,
                     std::int64_t m, Compute compute, void* packed);
// The same for PANEL fp32 results that are columns [column, column + PANEL) of the row.
void pack_result(const float* x, std::int64_t column, std::int64_t row, std::int64_t m,
                 Compute compute, void* packed);

// Panels [first, first + group) times m packed rows: c [m][group * PANEL], fp32, row-major.
void multiply(const Matrix& a, std::int64_t first, int group, const void* x, std::int64_t m,
              Compute compute, float* c);
constexpr int GROUP = 2;   // panels that share one pass over many rows, at most
constexpr int ROWS = 512;  // rows of one multiply that keep c in the second-level cache
bool many_rows(std::int64_t m);  // whether groups pay

// Round rows of `count` sums to y, which is bf16 or fp32.
template <class Y>
void write_rows(const float* c, std::int64_t ldc, std::int64_t rows, std::int64_t count, Y* y,
                std::int64_t ldy) {
  for (; rows > 0; rows--, c += ldc, y += ldy) {
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(y + i, load(c + i));
    for (; i < count; i++)
      if constexpr (sizeof(Y) == 2) y[i] = to_bf16(c[i]);
      else y[i] = c[i];
  }
}

// One panel, row-major to packed. `out` holds panels() * padded_k() * PANEL elements.
void pack_matrix(const Matrix& a, std::int64_t panel, char* out);
