// The instruction set that the compiler targets by default: SSE2 on x86-64, NEON on AArch64, 16-byte vectors elsewhere.
#define DSA_ISA generic
#define DSA_VECTOR_BYTES 16
#if defined(__aarch64__)
#define DSA_TILE_VECTORS 4  // 32 registers
#else
#define DSA_TILE_VECTORS 2
#endif
#include "attention.h"

namespace cudnn_dsa {
const Kernels kernels_generic = {"generic", [] { return true; }, generic::forward, generic::backward};
}
