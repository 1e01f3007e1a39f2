// Vectors of DSA_VECTOR_BYTES bytes: loads, conversions, exp, transposition. Included once by every instruction-set unit,
// in a namespace of its own. GCC's and Clang's vector extensions: arithmetic is written with operators and compiles to
// whatever the unit's target has (x86-64, AArch64, ...).
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <type_traits>
#include <utility>

#include "problem.h"

namespace cudnn_dsa {
namespace DSA_ISA {

template <class T, int kLanes>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr int kMantissa = 23, kBias = 127;
};
template <>
struct Bits<double> {
  using Int = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
};

template <class T>
constexpr int kLanes = DSA_VECTOR_BYTES / static_cast<int>(sizeof(T));
template <class T>
using Vec = typename VecOf<T, kLanes<T>>::type;
template <class T>
using IntVec = typename VecOf<typename Bits<T>::Int, kLanes<T>>::type;

template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class To, class From>
inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

// ---- element types in memory ----------------------------------------------------------------------------------------

constexpr int64_t element_size(DType dtype) {
  return dtype == DType::Float64 ? 8 : dtype == DType::Float32 ? 4 : 2;
}

using FloatVec = Vec<float>;
using FloatBits = IntVec<float>;
using HalfBits = typename VecOf<uint16_t, kLanes<float>>::type;

// Zero-extension. GCC takes __builtin_convertvector apart into halves here, which made loading a tile twice as slow.
inline FloatBits widen(HalfBits h) {
#if defined(__AVX512F__)
  return bit_cast<FloatBits>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(h)));
#elif defined(__AVX2__)
  return bit_cast<FloatBits>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(h)));
#else
  return __builtin_convertvector(h, FloatBits);
#endif
}

inline FloatVec from_bfloat16(HalfBits h) { return bit_cast<FloatVec>(widen(h) << 16); }

// Exact. Shifted into place a half has its exponent too small by 112; multiplying by 2**112 sets that right, for
// subnormals too. Infinity and NaN then still need the largest exponent.
inline FloatVec from_float16(HalfBits h) {
  const FloatBits w = widen(h);
  const FloatBits magnitude = (w & 0x7fff) << 13;
  FloatBits value = bit_cast<FloatBits>(bit_cast<FloatVec>(magnitude) * 0x1p112f);
  value = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : value;
  return bit_cast<FloatVec>(value | ((w & 0x8000) << 16));
}

// Round to nearest, ties to even; NaN stays NaN.
inline HalfBits to_bfloat16(FloatVec x) {
  const FloatBits w = bit_cast<FloatBits>(x);
  const FloatBits rounded = ((w + 0x7fff + ((w >> 16) & 1)) >> 16) & 0xffff;
  const FloatBits nan = ((w >> 16) & 0xffff) | 0x40;
  return __builtin_convertvector((w & 0x7fffffff) > 0x7f800000 ? nan : rounded, HalfBits);
}

// Round to nearest, ties to even. Below the smallest normal half, adding 0.5 lets the float adder round to multiples of
// 2**-24; above, the carry of an integer addition does.
inline HalfBits to_float16(FloatVec x) {
  const FloatBits w = bit_cast<FloatBits>(x);
  const FloatBits sign = (w >> 16) & 0x8000;
  const FloatBits magnitude = w & 0x7fffffff;
  const FloatBits normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const FloatBits small = bit_cast<FloatBits>(bit_cast<FloatVec>(magnitude) + 0.5f) - 0x3f000000;
  FloatBits half = magnitude < (113 << 23) ? small : normal;
  half = magnitude >= (143 << 23) ? (FloatBits{} + 0x7c00) : half;
  half = magnitude > 0x7f800000 ? (FloatBits{} + 0x7e00) : half;
  return __builtin_convertvector(half | sign, HalfBits);
}

// kLanes<T> elements of dtype from p, as T.
template <class T, DType dtype>
inline Vec<T> load_as(const char* p) {
  if constexpr (dtype == DType::BFloat16) {
    return from_bfloat16(load<HalfBits>(p));
  } else if constexpr (dtype == DType::Float16) {
    return from_float16(load<HalfBits>(p));
  } else {
    using Source = std::conditional_t<dtype == DType::Float64, double, float>;
    return __builtin_convertvector(load<typename VecOf<Source, kLanes<T>>::type>(p), Vec<T>);
  }
}

template <class T, DType dtype>
inline void store_as(char* p, Vec<T> v) {
  if constexpr (dtype == DType::BFloat16) {
    store(p, to_bfloat16(v));
  } else if constexpr (dtype == DType::Float16) {
    store(p, to_float16(v));
  } else {
    using Target = std::conditional_t<dtype == DType::Float64, double, float>;
    store(p, __builtin_convertvector(v, typename VecOf<Target, kLanes<T>>::type));
  }
}

// Call f with the dtype as a constant. A float kernel meets no float64 tensors, a double kernel no 16-bit ones.
template <class T, class F>
inline void with_dtype(DType dtype, F f) {
  if constexpr (sizeof(T) == 8) {
    if (dtype == DType::Float64) return f(std::integral_constant<DType, DType::Float64>{});
  } else {
    if (dtype == DType::BFloat16) return f(std::integral_constant<DType, DType::BFloat16>{});
    if (dtype == DType::Float16) return f(std::integral_constant<DType, DType::Float16>{});
  }
  f(std::integral_constant<DType, DType::Float32>{});
}

// Address of element `offset`.
inline char* at(const Array& a, int64_t offset) { return static_cast<char*>(a.data) + offset * element_size(a.dtype); }

// dst[i * dst_ld + 0:n] = src[i * src_ld + 0:n] as T for every i in [0, rows); dst is zero-filled up to a whole number
// of vectors.
template <class T>
void load_rows(T* dst, int64_t dst_ld, const char* src, DType dtype, int64_t src_ld, int64_t rows, int64_t n) {
  with_dtype<T>(dtype, [&](auto tag) {
    constexpr DType kType = decltype(tag)::value;
    constexpr int64_t kSize = element_size(kType);
    for (int64_t r = 0; r < rows; ++r, dst += dst_ld, src += src_ld * kSize) {
      int64_t i = 0;
      for (; i + kLanes<T> <= n; i += kLanes<T>) store(dst + i, load_as<T, kType>(src + i * kSize));
      if (i < n) {
        char tail[kLanes<T> * kSize] = {};
        __builtin_memcpy(tail, src + i * kSize, (n - i) * kSize);
        store(dst + i, load_as<T, kType>(tail));
      }
    }
  });
}

template <class T>
void load_row(T* dst, const char* src, DType dtype, int64_t n) {
  load_rows(dst, 0, src, dtype, 0, 1, n);
}

// dst[0:n] = factor * src[0:n], rounded once; src is readable up to a whole number of vectors.
template <class T>
void store_row(char* dst, DType dtype, const T* src, int64_t n, T factor = T(1)) {
  with_dtype<T>(dtype, [&](auto tag) {
    constexpr DType kType = decltype(tag)::value;
    constexpr int64_t kSize = element_size(kType);
    int64_t i = 0;
    for (; i + kLanes<T> <= n; i += kLanes<T>) store_as<T, kType>(dst + i * kSize, load<Vec<T>>(src + i) * factor);
    if (i < n) {
      char tail[kLanes<T> * kSize];
      store_as<T, kType>(tail, load<Vec<T>>(src + i) * factor);
      __builtin_memcpy(dst + i * kSize, tail, (n - i) * kSize);
    }
  });
}

// A statistic (lse, sink, delta): float32 or float64.
inline double load_statistic(const Array& a, int64_t i) {
  return a.dtype == DType::Float64 ? static_cast<const double*>(a.data)[i] : static_cast<const float*>(a.data)[i];
}

inline void store_statistic(const Array& a, int64_t i, double x) {
  if (a.dtype == DType::Float64) {
    static_cast<double*>(a.data)[i] = x;
  } else {
    static_cast<float*>(a.data)[i] = static_cast<float>(x);
  }
}

// ---- functions ------------------------------------------------------------------------------------------------------

template <class V>
inline V maximum(V a, V b) {
  return a > b ? a : b;
}

// exp(x) to about 1 ulp; 0 for -inf, inf where it overflows, NaN for NaN.
// x = n ln2 + r with |r| <= ln2 / 2, the Taylor polynomial in r (its remainder is below half an ulp of T), times 2**n in
// two steps, since 2**n alone may not be a normal number.
template <class T>
inline Vec<T> exp(Vec<T> x) {
  using I = typename Bits<T>::Int;
  constexpr bool kDouble = sizeof(T) == 8;
  constexpr int kDegree = kDouble ? 13 : 7;
  constexpr T kLow = kDouble ? T(-760) : T(-110), kHigh = kDouble ? T(720) : T(100);
  constexpr T kRound = kDouble ? T(0x1.8p52) : T(0x1.8p23);  // adding it leaves the nearest integer in the low bits
  // ln2 in two parts; the first has so few bits that n times it is exact.
  constexpr T kLn2High = kDouble ? T(0x1.62e42p-1) : T(0x1.63p-1);
  constexpr T kLn2Low = T(0.693147180559945309417232121458176568L - static_cast<long double>(kLn2High));
  x = x < kLow ? (Vec<T>{} + kLow) : x;
  x = x > kHigh ? (Vec<T>{} + kHigh) : x;
  const Vec<T> shifted = x * T(1.44269504088896340735992468100189214L) + kRound;
  const Vec<T> n = shifted - kRound;
  const Vec<T> r = (x - n * kLn2High) - n * kLn2Low;
  T coefficient[kDegree + 1] = {1};
  for (int k = 1; k <= kDegree; ++k) coefficient[k] = coefficient[k - 1] / k;
  Vec<T> y = Vec<T>{} + coefficient[kDegree];
#pragma GCC unroll 16
  for (int k = kDegree - 1; k >= 0; --k) y = y * r + coefficient[k];
  const IntVec<T> power = bit_cast<IntVec<T>>(shifted) - bit_cast<I>(kRound);
  const IntVec<T> half = power >> 1;
  const auto scale = [](IntVec<T> e) { return bit_cast<Vec<T>>((e + Bits<T>::kBias) << Bits<T>::kMantissa); };
  return y * scale(half) * scale(power - half);
}

// log(exp(a) + exp(b)); -inf for two -inf.
inline double logaddexp(double a, double b) {
  const double high = a > b ? a : b, low = a > b ? b : a;
  if (low == -__builtin_inf() || high == __builtin_inf()) return high != high || low != low ? a + b : high;
  return high + __builtin_log1p(__builtin_exp(low - high));
}

template <int kStep, class V, size_t... J>
inline void exchange(V& a, V& b, std::index_sequence<J...>) {
  constexpr int n = sizeof...(J);
  const V low = __builtin_shufflevector(a, b, (J & kStep ? n + static_cast<int>(J) - kStep : static_cast<int>(J))...);
  b = __builtin_shufflevector(a, b, (J & kStep ? n + static_cast<int>(J) : static_cast<int>(J) + kStep)...);
  a = low;
}

template <int kStep, class V, int n>
inline void transpose_steps(V (&v)[n]) {
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    if (!(i & kStep)) exchange<kStep>(v[i], v[i + kStep], std::make_index_sequence<n>{});
  }
  if constexpr (kStep > 1) transpose_steps<kStep / 2>(v);
}

// dst[j * dst_ld + i] = src[i * src_ld + j] for a square of one vector's lanes; only j < columns is written.
template <class T>
inline void transpose_square(T* dst, int64_t dst_ld, const T* src, int64_t src_ld, int64_t columns) {
  constexpr int n = kLanes<T>;
  using V = Vec<T>;
  V v[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) v[i] = load<V>(src + i * src_ld);
  transpose_steps<n / 2>(v);
  if (columns >= n) {
#pragma GCC unroll 16
    for (int j = 0; j < n; ++j) store(dst + j * dst_ld, v[j]);
  } else {
    for (int64_t j = 0; j < columns; ++j) store(dst + j * dst_ld, v[j]);
  }
}

}  // namespace DSA_ISA
}  // namespace cudnn_dsa
