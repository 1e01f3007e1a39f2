// x86-64 with AVX-512 (x86-64-v4). The BF16 extension is left aside: vdpbf16ps, measured on Sapphire Rapids, does half
// the multiply-adds of vfmadd231ps in a second, and rounds P and dS to bfloat16.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512")
#endif
#define DSA_ISA avx512
#define DSA_VECTOR_BYTES 64
#define DSA_TILE_VECTORS 4
#include "attention.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace cudnn_dsa {
static bool available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const Kernels kernels_avx512 = {"avx512", available, avx512::forward, avx512::backward};
}
#endif
