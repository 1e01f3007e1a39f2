// The one matrix product of these kernels, C (+)= A B: A's elements are broadcast, B's are loaded as vectors, a tile of C
// stays in registers. Every element of C is one chain of multiply-adds in the order of k, from zero,
// whatever tile it falls in; splitting k into calls that add therefore rounds less.
#pragma once

#include "vector.h"

namespace cudnn_dsa {
namespace DSA_ISA {

// The register tile: kTileRows x kTileVectors vectors of C, one row of B, one element of A.
constexpr int kTileRows = 6;
constexpr int kTileVectors = DSA_TILE_VECTORS;
// Columns of a full register tile.
template <class T>
constexpr int64_t kPanel = kTileVectors * kLanes<T>;

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// A(m, k) = data[m * row + k * step].
template <class T>
struct Left {
  const T* data;
  int64_t row, step;
};

// acc[m][n] += sum over k of A(m, k) * B(k, n), B(k, n) = b[k * b_step + n].
template <class T, int kRows, int kVectors>
inline __attribute__((always_inline)) void multiply(Vec<T> (&acc)[kRows][kVectors], int64_t k, Left<T> a, const T* b,
                                                    int64_t b_step) {
  for (int64_t i = 0; i < k; ++i) {
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) right[n] = load<Vec<T>>(b + n * kLanes<T>);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const T left = a.data[m * a.row];
#pragma GCC unroll 4
      for (int n = 0; n < kVectors; ++n) acc[m][n] += left * right[n];
    }
    a.data += a.step;
    b += b_step;
  }
}

// acc += the tile of C at c.
template <class T, int kRows, int kVectors>
inline __attribute__((always_inline)) void add_tile(Vec<T> (&acc)[kRows][kVectors], const T* c, int64_t c_row) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) acc[m][n] += load<Vec<T>>(c + m * c_row + n * kLanes<T>);
  }
}

// Call tile(std::integral_constant<int, rows>, std::integral_constant<int, vectors>) with the given sizes as constants.
template <int kRows = kTileRows, int kVectors = kTileVectors, class F>
inline void with_tile(int64_t rows, int64_t vectors, F tile) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_tile<kRows - 1, kVectors>(rows, vectors, tile);
  }
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return with_tile<kRows, kVectors - 1>(rows, vectors, tile);
  }
  tile(std::integral_constant<int, kRows>{}, std::integral_constant<int, kVectors>{});
}

// C (+)= A B for dense C (rows, columns). columns is a whole number of vectors.
template <class T>
void gemm(int64_t rows, int64_t columns, int64_t k, Left<T> a, const T* b, int64_t b_step, T* c, int64_t c_row,
          bool add) {
  for (int64_t n0 = 0; n0 < columns; n0 += kPanel<T>) {
    const int64_t vectors = smaller(columns - n0, kPanel<T>) / kLanes<T>;
    for (int64_t m0 = 0; m0 < rows; m0 += kTileRows) {
      with_tile(smaller(rows - m0, kTileRows), vectors, [&](auto row_count, auto vector_count) {
        constexpr int kRows = decltype(row_count)::value, kVectors = decltype(vector_count)::value;
        T* const tile = c + m0 * c_row + n0;
        Vec<T> acc[kRows][kVectors] = {};
        multiply<T, kRows, kVectors>(acc, k, {a.data + m0 * a.row, a.row, a.step}, b + n0, b_step);
        if (add) add_tile<T, kRows, kVectors>(acc, tile, c_row);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
          for (int n = 0; n < kVectors; ++n) store(tile + m * c_row + n * kLanes<T>, acc[m][n]);
        }
      });
    }
  }
}

}  // namespace DSA_ISA
}  // namespace cudnn_dsa
