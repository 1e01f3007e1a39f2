// PTX ISA, Instruction Set: cvt, cvt.pack.
#include "lanes.h"

namespace emu {
namespace {

// Integer to integer: chop or extend; with saturation, clamp to the range of the destination.
template <class D, class S> Next integer(Warp& w, const Op& o, u32 m) {
    bool sat = o.imm[0];
    if (!sat) return map1<D, S>(w, o, m, [](S a) { return D(a); });
    return map1<D, S>(w, o, m, [](S a) {
        __int128 v = a, lo = std::is_signed_v<D> ? -(__int128(1) << (8 * sizeof(D) - 1)) : 0;
        __int128 hi = std::is_signed_v<D> ? (__int128(1) << (8 * sizeof(D) - 1)) - 1 : (__int128(1) << (8 * sizeof(D))) - 1;
        return D(v < lo ? lo : v > hi ? hi : v);
    });
}
// A signed narrow result in a wider register is sign-extended to it: imm[1] says the width of the register.
template <class S> Next extend_register(Warp& w, const Op& o, u32 m) { return map1<s32, S>(w, o, m, [](S a) { return s32(a); }); }

inline double round_integral(double v, int64_t mode) {  // 0 rni, 1 rzi, 2 rmi, 3 rpi
    return mode == 0 ? std::nearbyint(v) : mode == 1 ? std::trunc(v) : mode == 2 ? std::floor(v) : std::ceil(v);
}
// Floating point to integer: NaN becomes 0 (32-bit and narrower), the rest saturates.
template <class D> D to_integer(double v, int64_t mode) {
    if (v != v) return sizeof(D) == 8 ? D(u64(1) << 63) : D(0);
    v = round_integral(v, mode);
    constexpr double lo = std::is_signed_v<D> ? -double(u64(1) << (8 * sizeof(D) - 1)) : 0;
    const double hi = std::is_signed_v<D> ? double(u64(1) << (8 * sizeof(D) - 1)) : 2 * double(u64(1) << (8 * sizeof(D) - 1));
    if (v <= lo) return D(std::is_signed_v<D> ? D(u64(1) << (8 * sizeof(D) - 1)) : D(0));
    if (v >= hi) return std::is_signed_v<D> ? D((u64(1) << (8 * sizeof(D) - 1)) - 1) : D(-1);
    return D(v);
}
template <class D> Next from_f32(Warp& w, const Op& o, u32 m) {
    int64_t mode = o.imm[0], ftz = o.imm[1];
    return map1<D, float>(w, o, m, [=](float a) { return to_integer<D>(ftz ? flush(a) : a, mode); });
}
template <class D> Next from_f64(Warp& w, const Op& o, u32 m) {
    int64_t mode = o.imm[0];
    return map1<D, double>(w, o, m, [=](double a) { return to_integer<D>(a, mode); });
}
template <class D> Next from_f16(Warp& w, const Op& o, u32 m) {  // imm: mode, bf16
    int64_t mode = o.imm[0], bf = o.imm[1];
    return map1<D, u32>(w, o, m, [=](u32 a) { return to_integer<D>(bf ? bf16_to_float(a & 0xffff) : half_to_float(a), mode); });
}

// Rounds an exact value given as double plus a flag-free 128-bit integer when needed. mode: 0 rn, 1 rz, 2 rm, 3 rp.
float round_to_float(double v, int64_t mode) {
    float f = float(v);  // to nearest
    if (mode == 0 || double(f) == v || v != v) return f;
    bool up = mode == 3 || (mode == 1 && v < 0);
    bool too_low = double(f) < v;
    if (up && too_low) return std::nextafterf(f, INFINITY);
    if (!up && !too_low) return std::nextafterf(f, -INFINITY);
    return f;
}
template <class S> Next to_f32(Warp& w, const Op& o, u32 m) {
    int64_t mode = o.imm[0];
    if (mode == 0) return map1<float, S>(w, o, m, [](S a) { return float(a); });
    return map1<float, S>(w, o, m, [=](S a) {
        if constexpr (sizeof(S) == 8) {  // through long double, which holds 64 bits exactly
            long double v = a;
            float f = float(v);
            if ((long double)f == v) return f;
            bool up = mode == 3 || (mode == 1 && v < 0), low = (long double)f < v;
            return up && low ? std::nextafterf(f, INFINITY) : !up && !low ? std::nextafterf(f, -INFINITY) : f;
        } else {
            return round_to_float(double(a), mode);
        }
    });
}
template <class S> Next to_f64(Warp& w, const Op& o, u32 m) { return map1<double, S>(w, o, m, [](S a) { return double(a); }); }
template <class S> Next to_f16(Warp& w, const Op& o, u32 m) {  // imm: mode (to nearest only), bf16
    int64_t bf = o.imm[1];
    return map1<u32, S>(w, o, m, [=](S a) { return bf ? float_to_bf16(float(a)) : float_to_half(float(a)); });
}

u32 to_bf16(float f, int64_t mode) {
    if (mode == 0) return float_to_bf16(f);
    u32 b = bits(f);
    if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    if (mode == 4) return (b + 0x8000u) >> 16;  // rna
    u32 t = b >> 16;
    bool exact = !(b & 0xffff), negative = b >> 31;
    if (!exact && ((mode == 2 && negative) || (mode == 3 && !negative))) t++;
    return t;
}
u32 to_half(float f, int64_t mode) {
    if (mode == 0) return float_to_half(f);
    if (f != f) return 0x7fff;
    u32 h = float_to_half(f);
    float g = half_to_float(h);
    if (g == f) return h;
    bool up = mode == 3 || (mode == 1 && f < 0), low = g < f;
    if (up == low) {  // one step towards the wanted side
        if (low) h = (h & 0x8000) ? h - 1 : h + 1;
    } else if (!low) {
        h = (h & 0x8000) ? h + 1 : (h == 0 ? 0x8001 : h - 1);
    }
    return h;
}
// flags: 1 relu, 2 satfinite, 4 ftz
template <bool BF> u32 narrow(float f, int64_t mode, int64_t flags) {
    if (flags & 4) f = flush(f);
    if ((flags & 1) && !(f > 0)) f = f != f ? f : 0.f;
    u32 r = BF ? to_bf16(f, mode) : to_half(f, mode);
    if (flags & 2 && f == f) {
        u32 inf = BF ? 0x7f80 : 0x7c00;
        if ((r & 0x7fff) == inf) r -= 1;
    }
    return r;
}
template <bool BF> Next half_from_f32(Warp& w, const Op& o, u32 m) {  // imm: mode, flags
    int64_t mode = o.imm[0], flags = o.imm[1];
    if (mode == 0 && flags == 0) return map1<u32, float>(w, o, m, [](float a) { return BF ? float_to_bf16(a) : float_to_half(a); });
    return map1<u32, float>(w, o, m, [=](float a) { return narrow<BF>(a, mode, flags); });
}
template <bool BF> Next pair_from_f32(Warp& w, const Op& o, u32 m) {  // d = {a high, b low}
    int64_t mode = o.imm[0], flags = o.imm[1];
    if (mode == 0 && flags == 0)
        return map2<u32, float, float>(w, o, m, [](float a, float b) {
            return BF ? float_to_bf16(b) | float_to_bf16(a) << 16 : float_to_half(b) | float_to_half(a) << 16;
        });
    return map2<u32, float, float>(w, o, m, [=](float a, float b) { return narrow<BF>(b, mode, flags) | narrow<BF>(a, mode, flags) << 16; });
}
Next f32_from_f16(Warp& w, const Op& o, u32 m) { return map1<float, u32>(w, o, m, [](u32 a) { return half_to_float(a); }); }
Next f32_from_bf16(Warp& w, const Op& o, u32 m) { return map1<float, u32>(w, o, m, [](u32 a) { return bf16_to_float(a & 0xffff); }); }
Next f16_from_bf16(Warp& w, const Op& o, u32 m) { return map1<u32, u32>(w, o, m, [](u32 a) { return float_to_half(bf16_to_float(a & 0xffff)); }); }
Next bf16_from_f16(Warp& w, const Op& o, u32 m) { return map1<u32, u32>(w, o, m, [](u32 a) { return float_to_bf16(half_to_float(a)); }); }
Next f32_from_f32(Warp& w, const Op& o, u32 m) {  // imm: integral rounding or -1, flags (1 ftz, 2 sat)
    int64_t mode = o.imm[0], flags = o.imm[1];
    return map1<float, float>(w, o, m, [=](float a) {
        if (flags & 1) a = flush(a);
        if (mode >= 0) a = float(round_integral(a, mode));
        if (flags & 2) a = a != a ? 0.f : a < 0 ? 0.f : a > 1 ? 1.f : a;
        return a;
    });
}
Next f64_from_f32(Warp& w, const Op& o, u32 m) { return map1<double, float>(w, o, m, [](float a) { return double(a); }); }
Next f32_from_f64(Warp& w, const Op& o, u32 m) {
    int64_t mode = o.imm[0];
    return map1<float, double>(w, o, m, [=](double a) { return round_to_float(a, mode); });
}
Next tf32(Warp& w, const Op& o, u32 m) {  // imm: mode (0 rn, 1 rz, 4 rna), flags
    int64_t mode = o.imm[0], flags = o.imm[1];
    return map1<u32, float>(w, o, m, [=](float a) {
        u32 b = bits(a);
        if ((b & 0x7fffffffu) > 0x7f800000u) return NAN32;
        if ((b & 0x7fffffffu) < 0x7f800000u) {
            if (mode == 4) b += 0x1000;
            else if (mode == 0) b += 0xfff + ((b >> 13) & 1);
        }
        b &= ~0x1fffu;
        if (flags & 1 && b >> 31) b = 0;
        return b;
    });
}

// FP8: e4m3 (no infinity, 0x7f is NaN) and e5m2, always saturating to finite, to nearest even.
u32 to_fp8(float f, bool e5m2) {
    u32 sign = bits(f) >> 24 & 0x80;
    if (f != f) return e5m2 ? sign | 0x7f : 0x7f | sign;
    double a = std::fabs(double(f)), top = e5m2 ? 57344.0 : 448.0;
    int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    if (a == 0) return sign;
    int e;
    std::frexp(a, &e);
    double quantum = std::ldexp(1.0, std::max(e - 1, 1 - bias) - mantissa);
    double r = std::nearbyint(a / quantum) * quantum;
    if (r > top) r = top;
    if (r == 0) return sign;
    std::frexp(r, &e);
    int ee = e - 1;
    if (ee < 1 - bias) return sign | u32(std::ldexp(r, bias - 1 + mantissa));
    return sign | u32(ee + bias) << mantissa | (u32(std::ldexp(r, mantissa - ee)) & ((1u << mantissa) - 1));
}
float from_fp8(u32 v, bool e5m2) {
    int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    u32 e = (v & 0x7f) >> mantissa, f = v & ((1u << mantissa) - 1);
    float s = v & 0x80 ? -1.f : 1.f;
    if (e5m2 && e == 31) return f ? as_float(NAN32) : s * INFINITY;
    if (!e5m2 && (v & 0x7f) == 0x7f) return as_float(NAN32);
    return s * float(e ? std::ldexp(1.0 + double(f) / (1 << mantissa), int(e) - bias) : std::ldexp(double(f), 1 - bias - mantissa));
}
Next fp8x2_from_f32(Warp& w, const Op& o, u32 m) {  // imm: e5m2, relu
    bool e5m2 = o.imm[0], relu = o.imm[1];
    return map2<u32, float, float>(w, o, m, [=](float a, float b) {
        if (relu) a = a > 0 || a != a ? a : 0, b = b > 0 || b != b ? b : 0;
        return to_fp8(b, e5m2) | to_fp8(a, e5m2) << 8;
    });
}
Next fp8x2_from_half2(Warp& w, const Op& o, u32 m) {  // imm: e5m2, relu, from bf16
    bool e5m2 = o.imm[0], relu = o.imm[1], bf = o.imm[2];
    return map1<u32, u32>(w, o, m, [=](u32 a) {
        u32 r = 0;
        for (u32 h = 0; h < 2; h++) {
            u32 v = a >> (16 * h) & 0xffff;
            float f = bf ? bf16_to_float(v) : half_to_float(v);
            r |= to_fp8(relu && f <= 0 ? 0.f : f, e5m2) << (8 * h);
        }
        return r;
    });
}
Next f16x2_from_fp8x2(Warp& w, const Op& o, u32 m) {
    bool e5m2 = o.imm[0];
    return map1<u32, u32>(w, o, m, [=](u32 a) {
        return float_to_half(from_fp8(a & 0xff, e5m2)) | float_to_half(from_fp8(a >> 8 & 0xff, e5m2)) << 16;
    });
}

const HandlerName table[] = {
#define ROW(N, S) {"cvt.u8." N, integer<u8, S>}, {"cvt.s8." N, integer<s8, S>}, {"cvt.u16." N, integer<u16, S>}, {"cvt.s16." N, integer<s16, S>}, \
    {"cvt.u32." N, integer<u32, S>}, {"cvt.s32." N, integer<s32, S>}, {"cvt.u64." N, integer<u64, S>}, {"cvt.s64." N, integer<s64, S>}, \
    {"cvt.f32." N, to_f32<S>}, {"cvt.f64." N, to_f64<S>}, {"cvt.f16." N, to_f16<S>}
    ROW("u8", u8), ROW("s8", s8), ROW("u16", u16), ROW("s16", s16), ROW("u32", u32), ROW("s32", s32), ROW("u64", u64), ROW("s64", s64),
#define COLUMN(N, D) {"cvt." N ".f32", from_f32<D>}, {"cvt." N ".f64", from_f64<D>}, {"cvt." N ".f16", from_f16<D>}
    COLUMN("u8", u8), COLUMN("s8", s8), COLUMN("u16", u16), COLUMN("s16", s16), COLUMN("u32", u32), COLUMN("s32", s32), COLUMN("u64", u64), COLUMN("s64", s64),
    {"extend.s8", extend_register<s8>}, {"extend.s16", extend_register<s16>},
    {"cvt.bf16.f32", half_from_f32<true>}, {"cvt.f16.f32", half_from_f32<false>}, {"cvt.bf16x2.f32", pair_from_f32<true>},
    {"cvt.f16x2.f32", pair_from_f32<false>}, {"cvt.f32.f16", f32_from_f16}, {"cvt.f32.bf16", f32_from_bf16},
    {"cvt.f16.bf16", f16_from_bf16}, {"cvt.bf16.f16", bf16_from_f16}, {"cvt.f32.f32", f32_from_f32}, {"cvt.f64.f32", f64_from_f32},
    {"cvt.f32.f64", f32_from_f64}, {"cvt.tf32.f32", tf32}, {"cvt.fp8x2.f32", fp8x2_from_f32}, {"cvt.f16x2.fp8x2", f16x2_from_fp8x2},
    {"cvt.fp8x2.half2", fp8x2_from_half2},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
