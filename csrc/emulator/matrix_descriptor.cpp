#include "matrix_descriptor.h"

namespace emu {

MatrixDescriptor::MatrixDescriptor(uint64_t d, bool wgmma) {
    start = uint32_t(d & 0x3fff) << 4;
    leading = uint32_t(d >> 16 & 0x3fff) << 4;
    stride = uint32_t(d >> 32 & 0x3fff) << 4;
    uint32_t mode, base = uint32_t(d >> 49 & 7);
    if (wgmma) {
        mode = uint32_t(d >> 62 & 3);
        static const uint32_t spans[4] = {16, 128, 64, 32};
        span = spans[mode];
    } else {
        if ((d >> 46 & 3) != 1) fault("matrix descriptor 0x%016lx: its version field is not 1", d);
        if (d >> 52 & 1) fault("matrix descriptor 0x%016lx: the absolute leading-dimension mode is not modelled", d);
        mode = uint32_t(d >> 61 & 7);
        switch (mode) {
            case 0: span = 16; break;
            case 1: span = 128, atom32 = true; break;
            case 2: span = 128; break;
            case 4: span = 64; break;
            case 6: span = 32; break;
            default: fault("matrix descriptor 0x%016lx: layout %u is not modelled", d, mode);
        }
    }
    if (base) fault("matrix descriptor 0x%016lx: a base offset of %u is not modelled", d, base);
}

void load_operand(Cta& cta, const MatrixDescriptor& d, uint32_t row0, uint32_t rows, uint32_t ks, Element e, bool mn_major, MmaTile& t, bool into_b, uint32_t first, float sign, const Access& access) {
    uint32_t size = element_bytes(e), n = 16 / size;
    if (d.atom32 && (!mn_major || size != 4)) fault("a matrix descriptor with 32-byte atoms is for MN-major operands of 32 bits");
    const uint8_t* shared = cta.shared.data();
    size_t limit = cta.shared.size();
    uint32_t begin = 0, end = 0;  // adjacent chunks are reported to the shadow together
    float v[16];
    d.chunks(row0, rows, ks, size, mn_major, [&](uint32_t r, uint32_t k, uint32_t address) {
        r -= row0;
        if (address < SHARED_BASE || address + 16 > limit) fault("a matrix descriptor reaches shared address 0x%x, outside the CTA's %zu bytes", address, limit);
        if (access.clock) {
            if (address == end) end += 16;
            else if (address + 16 == begin) begin -= 16;
            else {
                if (end > begin) cta.shared_shadow.read_bytes(begin, end - begin, access);
                begin = address, end = address + 16;
            }
        }
        convert(shared + address, e, v);
        if (sign < 0)
            for (uint32_t i = 0; i < n; i++) v[i] = -v[i];
        if (mn_major) {
            if (into_b) memcpy(&t.b[k][first + r], v, n * sizeof(float));
            else
                for (uint32_t i = 0; i < n; i++) t.a[r + i][k] = v[i];
        } else {
            if (into_b)
                for (uint32_t i = 0; i < n; i++) t.b[k + i][first + r] = v[i];
            else memcpy(&t.a[r][k], v, n * sizeof(float));
        }
    });
    if (end > begin) cta.shared_shadow.read_bytes(begin, end - begin, access);
}

}  // namespace emu
