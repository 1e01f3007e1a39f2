#include "mma_kernel.h"

#include <cmath>
#include <cstring>

namespace emu {

typedef float v8 __attribute__((vector_size(32), aligned(4)));

static inline v8 load8(const float* p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

// 4 rows x 24 or 8 columns at a time in registers.
template <int R, int C> static inline void block(const MmaTile& t, uint32_t m, uint32_t n, uint32_t k, float* const* rows, bool accumulate, float scale, uint32_t b_first) {
    v8 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = accumulate ? load8(rows[m + r] + n + 8 * c) * scale : v8{};
    for (uint32_t i = 0; i < k; i++) {
        v8 b[C];
        for (int c = 0; c < C; c++) b[c] = load8(t.b[i] + b_first + n + 8 * c);
        for (int r = 0; r < R; r++) {
            float a = t.a[m + r][i];
            for (int c = 0; c < C; c++) acc[r][c] += a * b[c];
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) memcpy(rows[m + r] + n + 8 * c, &acc[r][c], sizeof(v8));
}

void multiply(const MmaTile& t, uint32_t m, uint32_t n, uint32_t k, float* const* rows, bool accumulate, float scale, uint32_t b_first) {
    for (uint32_t i = 0; i < m; i += 4) {
        uint32_t j = 0;
        for (; j + 24 <= n; j += 24) block<4, 3>(t, i, j, k, rows, accumulate, scale, b_first);
        for (; j + 8 <= n; j += 8) block<4, 1>(t, i, j, k, rows, accumulate, scale, b_first);
    }
}

uint64_t useful_flops(const MmaTile& t, uint32_t m, uint32_t n, uint32_t k) {
    uint64_t rows = 0, columns = 0;
    for (uint32_t r = 0; r < m; r++) {
        bool any = false;
        for (uint32_t i = 0; i < k; i++) any |= t.a[r][i] != 0;
        rows += any;
    }
    bool any[MMA_MAX_N] = {};
    for (uint32_t i = 0; i < k; i++)
        for (uint32_t c = 0; c < n; c++) any[c] |= t.b[i][c] != 0;
    for (uint32_t c = 0; c < n; c++) columns += any[c];
    return 2 * rows * columns * k;
}

static float fp8(uint32_t v, bool e5m2) {
    int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    uint32_t e = (v & 0x7f) >> mantissa, f = v & ((1u << mantissa) - 1);
    float s = v & 0x80 ? -1.f : 1.f;
    if (e5m2 && e == 31) return f ? NAN : s * INFINITY;
    if (!e5m2 && (v & 0x7f) == 0x7f) return NAN;
    return s * float(e ? std::ldexp(1.0 + double(f) / (1 << mantissa), int(e) - bias) : std::ldexp(double(f), 1 - bias - mantissa));
}

void convert(const uint8_t* from, Element e, float* to) {
    switch (e) {
        case Element::bf16: {
            uint16_t h[8];
            memcpy(h, from, 16);
            uint32_t u[8];
            for (int i = 0; i < 8; i++) u[i] = uint32_t(h[i]) << 16;
            memcpy(to, u, 32);
            return;
        }
        case Element::f16: {
            _Float16 h[8];
            memcpy(h, from, 16);
            for (int i = 0; i < 8; i++) to[i] = float(h[i]);
            return;
        }
        case Element::tf32: {
            uint32_t u[4];
            memcpy(u, from, 16);
            for (int i = 0; i < 4; i++) u[i] &= ~0x1fffu;
            memcpy(to, u, 16);
            return;
        }
        case Element::e4m3:
        case Element::e5m2:
            for (int i = 0; i < 16; i++) to[i] = fp8(from[i], e == Element::e5m2);
            return;
        case Element::s8:
            for (int i = 0; i < 16; i++) to[i] = float(int8_t(from[i]));
            return;
        case Element::u8:
            for (int i = 0; i < 16; i++) to[i] = float(from[i]);
    }
}

}  // namespace emu
