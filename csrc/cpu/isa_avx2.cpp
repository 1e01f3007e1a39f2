// x86-64 with AVX2 and FMA (x86-64-v3).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#define DSA_ISA avx2
#define DSA_VECTOR_BYTES 32
#define DSA_TILE_VECTORS 2
#include "attention.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace cudnn_dsa {
static bool available() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
const Kernels kernels_avx2 = {"avx2", available, avx2::forward, avx2::backward};
}
#endif
