// Shared-memory matrix descriptors of wgmma and tcgen05.mma (PTX ISA, Matrix Descriptor, Canonical Layouts).
#pragma once
#include "core.h"
#include "mma_kernel.h"

namespace emu {

struct MatrixDescriptor {
    uint32_t start, leading, stride, span;  // bytes; span 16 means no swizzle
    bool atom32 = false;  // the 128-byte swizzle in atoms of 32 bytes: MN-major, of four rows of K each
    // `wgmma`: the descriptor of sm_90, which has no version field and numbers the swizzles 1 (128B), 2 (64B), 3 (32B)
    MatrixDescriptor(uint64_t bits, bool wgmma);

    uint32_t swizzled(uint32_t a) const {
        if (atom32) return a ^ (a >> 2 & 0x60);
        switch (span) {
            case 128: return a ^ (a >> 3 & 0x70);
            case 64: return a ^ (a >> 3 & 0x30);
            case 32: return a ^ (a >> 3 & 0x10);
        }
        return a;
    }
    // Calls f(row, k, address) for every 16-byte chunk of rows [row0, row0 + rows) of an operand of `size`-byte elements; it
    // runs along k if the operand is K-major, along the rows if it is MN-major.
    template <class F> void chunks(uint32_t row0, uint32_t rows, uint32_t ks, uint32_t size, bool mn_major, F f) const {
        uint32_t n = 16 / size;
        if (!mn_major) {
            for (uint32_t r = row0; r < row0 + rows; r++)
                for (uint32_t k = 0; k < ks; k += n) {
                    uint32_t off = span == 16 ? (r % 8) * 16 + (r / 8) * stride + (k / n) * leading : (r % 8) * span + (r / 8) * stride + k * size;
                    f(r, k, swizzled(start + off));
                }
        } else {
            uint32_t across = span / size, deep = atom32 ? 4 : 8;
            for (uint32_t k = 0; k < ks; k++)
                for (uint32_t r = row0; r < row0 + rows; r += n) {
                    uint32_t off = span == 16 ? (r / n) * stride + (k % 8) * 16 + (k / 8) * leading
                                              : (r % across) * size + (r / across) * leading + (k % deep) * span + (k / deep) * stride;
                    f(r, k, swizzled(start + off));
                }
        }
    }
};

// Reads rows [row0, row0 + rows) of an operand into tile.a from row 0, or into tile.b from column `first`, and tells the
// shadow.
void load_operand(Cta&, const MatrixDescriptor&, uint32_t row0, uint32_t rows, uint32_t ks, Element, bool mn_major, MmaTile&, bool into_b, uint32_t first, float sign, const Access&);

}  // namespace emu
