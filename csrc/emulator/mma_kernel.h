// The inner product of the tensor-core units: d[m][n] (+)= sum_k a[m][k] * b[k][n] in fp32.
#pragma once
#include <cstdint>

namespace emu {

constexpr uint32_t MMA_MAX_M = 128, MMA_MAX_N = 256, MMA_MAX_K = 32;

struct MmaTile {  // operands converted to fp32
    alignas(64) float a[MMA_MAX_M][MMA_MAX_K];
    alignas(64) float b[MMA_MAX_K][MMA_MAX_N];
};

// rows: where row m of the result begins; n is a multiple of 8
void multiply(const MmaTile& t, uint32_t m, uint32_t n, uint32_t k, float* const* rows, bool accumulate, float scale, uint32_t b_first);

// FLOPs of the product that have no factor in a row of A or a column of B that is zero throughout: padding is not useful
uint64_t useful_flops(const MmaTile& t, uint32_t m, uint32_t n, uint32_t k);

// 8 or 4 elements of 16 bytes of shared memory to fp32
enum class Element { f16, bf16, tf32, e4m3, e5m2, s8, u8 };
void convert(const uint8_t* from, Element e, float* to);
inline uint32_t element_bytes(Element e) { return e == Element::tf32 ? 4 : e == Element::f16 || e == Element::bf16 ? 2 : 1; }

}  // namespace emu
