// PTX ISA, Warp Level Matrix Instructions: ldmatrix, stmatrix, mma.sync.
#include <algorithm>

#include "lanes.h"

namespace emu {
namespace {

bool whole_warp(Warp& w) { return !(w.live & ~w.groups[w.current].mask); }

// address, registers; imm: offset, matrices, transposed. Lane 8 k + i holds the address of row i of matrix k.
template <bool STORE> Next matrices(Warp& w, const Op& o, uint32_t m) {
    if (!whole_warp(w)) return Next::converge;
    if (m != FULL) fault("ldmatrix or stmatrix by lanes %08x only", m);
    Cluster& c = *w.cta->cluster;
    uint32_t n = uint32_t(o.imm[1]);
    bool transposed = o.imm[2];
    const uint32_t* a = w.src<uint32_t>(o.x[0]);
    uint8_t* rows[32];
    uint32_t addresses[32];
    Access access = warp_access(w);
    for (uint32_t l = 0; l < 8 * n; l++) {
        addresses[l] = a[l] + uint32_t(o.imm[0]);
        rows[l] = shared_pointer(c, addresses[l], 16, 16);
        Shadow& s = c.cta_at(addresses[l])->shared_shadow;
        if (STORE) s.write_bytes(addresses[l] & SHARED_OFFSET_MASK, 16, access);
        else s.read_bytes(addresses[l] & SHARED_OFFSET_MASK, 16, access);
    }
    (STORE ? w.launch->counters.shared_store : w.launch->counters.shared_load) += 128 * n;
    for (uint32_t k = 0; k < n; k++) {
        if (o.x[1 + k] == NONE) continue;
        uint16_t v[8][8];
        if (STORE) {
            const uint32_t* s = w.src<uint32_t>(o.x[1 + k]);
            for (uint32_t l = 0; l < 32; l++)
                for (uint32_t h = 0; h < 2; h++) {
                    uint32_t i = l / 4, j = 2 * (l % 4) + h;
                    v[transposed ? j : i][transposed ? i : j] = uint16_t(s[l] >> (16 * h));
                }
            for (uint32_t i = 0; i < 8; i++) memcpy(rows[8 * k + i], v[i], 16);
        } else {
            for (uint32_t i = 0; i < 8; i++) memcpy(v[i], rows[8 * k + i], 16);
            uint32_t value[32];
            for (uint32_t l = 0; l < 32; l++) {
                uint32_t i = l / 4, j = 2 * (l % 4);
                value[l] = transposed ? uint32_t(v[j][i]) | uint32_t(v[j + 1][i]) << 16 : uint32_t(v[i][j]) | uint32_t(v[i][j + 1]) << 16;
            }
            memcpy(w.dst<uint32_t>(o.x[1 + k]), value, sizeof value);
        }
    }
    return Next::advance;
}

Next transpose(Warp& w, const Op& o, uint32_t) {  // movmatrix: d, a. Lane l holds row l / 4, columns 2 (l % 4) and + 1
    if (!whole_warp(w)) return Next::converge;
    uint32_t a[32], *d = w.dst<uint32_t>(o.x[0]);
    memcpy(a, w.src<uint32_t>(o.x[1]), sizeof a);
    auto element = [&](uint32_t i, uint32_t j) { return a[4 * i + j / 2] >> (16 * (j % 2)) & 0xffff; };
    for (uint32_t l = 0; l < 32; l++) d[l] = element(2 * (l % 4), l / 4) | element(2 * (l % 4) + 1, l / 4) << 16;
    return Next::advance;
}

// mma.sync.aligned.m16n8k{8,16}.row.col, f16 or bf16 operands, fp32 or f16 accumulators.
// d..., a..., b..., c...; imm: k, bf16, fp32 accumulators
Next mma(Warp& w, const Op& o, uint32_t m) {
    if (!whole_warp(w)) return Next::converge;
    uint32_t k = uint32_t(o.imm[0]), na = k / 4, nb = k / 8, nd = o.imm[2] ? 4 : 2;
    bool bf = o.imm[1];
    float a[16][16], b[16][8];
    auto value = [&](uint32_t x, uint32_t lane, uint32_t h) {
        uint32_t v = w.src<uint32_t>(x)[lane] >> (16 * h) & 0xffff;
        return bf ? bf16_to_float(v) : half_to_float(v);
    };
    for (uint32_t l = 0; l < 32; l++) {
        uint32_t g = l / 4, t = l % 4;
        for (uint32_t h = 0; h < 2; h++) {
            for (uint32_t r = 0; r < na; r++) a[g + 8 * (r % 2)][2 * t + h + 8 * (r / 2)] = value(o.x[nd + r], l, h);
            for (uint32_t r = 0; r < nb; r++) b[2 * t + h + 8 * r][g] = value(o.x[nd + na + r], l, h);
        }
    }
    float result[32][4];
    for (uint32_t l = 0; l < 32; l++)
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2, x = o.x[nd + na + nb + (o.imm[2] ? i : i / 2)];
            float acc = o.imm[2] ? as_float(w.src<uint32_t>(x)[l]) : half_to_float(w.src<uint32_t>(x)[l] >> (16 * (i % 2)));
            float sum = 0;
            for (uint32_t j = 0; j < k; j++) sum += a[row][j] * b[j][column];
            result[l][i] = acc + sum;
        }
    EACH_LANE(l, m) {
        if (o.imm[2])
            for (uint32_t i = 0; i < 4; i++) w.dst<uint32_t>(o.x[i])[l] = bits(result[l][i]);
        else
            for (uint32_t i = 0; i < 2; i++) w.dst<uint32_t>(o.x[i])[l] = float_to_half(result[l][2 * i]) | float_to_half(result[l][2 * i + 1]) << 16;
    }
    char key[64];
    snprintf(key, sizeof key, "mma.sync %s 16x8x%u", bf ? "bf16" : "f16", k);
    MmaCount& count = w.launch->mma[key];
    count.count++;
    count.flops += 2ull * 16 * 8 * k;
    uint64_t rows = 0, columns = 0;
    for (auto& row : a) rows += std::any_of(row, row + k, [](float v) { return v != 0; });
    for (uint32_t c = 0; c < 8; c++) {
        bool any = false;
        for (uint32_t j = 0; j < k; j++) any |= b[j][c] != 0;
        columns += any;
    }
    count.useful += 2 * rows * columns * k;
    return Next::advance;
}

const HandlerName table[] = {{"ldmatrix", matrices<false>}, {"stmatrix", matrices<true>}, {"movmatrix", transpose}, {"mma.sync", mma}};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
