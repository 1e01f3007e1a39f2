// PTX ISA, Instruction Set: Floating-Point, Half-Precision and Mixed-Precision Arithmetic; approximations.
//
// Approximate functions (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh) return the correctly rounded value of the exact
// function up to the host's libm; PTX only bounds their error, so no bit pattern may be relied upon.
#include <cfenv>

#include "lanes.h"

namespace emu {
namespace {

inline float canonical(float f) { return f != f ? as_float(NAN32) : f; }
inline float saturate(float f) { return f != f ? 0.f : f < 0 ? 0.f : f > 1 ? 1.f : f == 0 ? 0.f : f; }

template <int FLAGS> inline float in(float f) { return FLAGS & 1 ? flush(f) : f; }
template <int FLAGS> inline float out(float f) {
    if (FLAGS & 1) f = flush(f);
    if (FLAGS & 2) f = saturate(f);
    return canonical(f);
}

// FLAGS: 1 flush subnormals to zero, 2 saturate
template <int FLAGS> Next add(Warp& w, const Op& o, u32 m) {
    return map2<float, float, float>(w, o, m, [](float a, float b) { return out<FLAGS>(in<FLAGS>(a) + in<FLAGS>(b)); });
}
template <int FLAGS> Next sub(Warp& w, const Op& o, u32 m) {
    return map2<float, float, float>(w, o, m, [](float a, float b) { return out<FLAGS>(in<FLAGS>(a) - in<FLAGS>(b)); });
}
template <int FLAGS> Next mul(Warp& w, const Op& o, u32 m) {
    return map2<float, float, float>(w, o, m, [](float a, float b) { return out<FLAGS>(in<FLAGS>(a) * in<FLAGS>(b)); });
}
template <int FLAGS> Next fma_(Warp& w, const Op& o, u32 m) {
    return map3<float, float, float, float>(w, o, m, [](float a, float b, float c) {
        return out<FLAGS>(__builtin_fmaf(in<FLAGS>(a), in<FLAGS>(b), in<FLAGS>(c)));
    });
}

// Directed rounding, one lane at a time under the host's rounding mode. imm: rounding (1 rz, 2 rm, 3 rp), flags.
int host_rounding(int64_t r) { return r == 1 ? FE_TOWARDZERO : r == 2 ? FE_DOWNWARD : FE_UPWARD; }
template <class T, int OP> Next directed(Warp& w, const Op& o, u32 m) {
    const Slot<T>*a = w.src<Slot<T>>(o.x[1]), *b = OP == 4 ? a : w.src<Slot<T>>(o.x[2]), *c = OP == 3 ? w.src<Slot<T>>(o.x[3]) : b;
    Slot<T>* d = w.dst<Slot<T>>(o.x[0]);
    int old = fegetround();
    EACH_LANE(l, m) {
        volatile T x = from_slot<T>(a[l]), y = from_slot<T>(b[l]), z = from_slot<T>(c[l]);
        if constexpr (sizeof(T) == 4)
            if (o.imm[1] & 1) x = flush(x), y = flush(y), z = flush(z);
        fesetround(host_rounding(o.imm[0]));
        volatile T r = OP == 0 ? T(x + y) : OP == 1 ? T(x - y) : OP == 2 ? T(x * y) : OP == 4 ? T(std::sqrt(T(x))) : OP == 5 ? T(x / y) : std::fma(T(x), T(y), T(z));
        fesetround(old);
        T result = r;
        if constexpr (sizeof(T) == 4) {
            if (o.imm[1] & 1) result = flush(result);
            if (o.imm[1] & 2) result = saturate(result);
            result = canonical(result);
        }
        d[l] = to_slot<T>(result);
    }
    return Next::advance;
}

template <int FLAGS> Next div_(Warp& w, const Op& o, u32 m) {
    return map2<float, float, float>(w, o, m, [](float a, float b) { return out<FLAGS>(in<FLAGS>(a) / in<FLAGS>(b)); });
}
template <int FLAGS> Next neg(Warp& w, const Op& o, u32 m) {
    return map1<float, float>(w, o, m, [](float a) { return as_float(bits(in<FLAGS>(a)) ^ 0x80000000u); });
}
template <int FLAGS> Next abs_(Warp& w, const Op& o, u32 m) {
    return map1<float, float>(w, o, m, [](float a) { return as_float(bits(in<FLAGS>(a)) & 0x7fffffffu); });
}
// FLAGS: 1 flush, 2 NaN-propagating, 4 xorsign.abs. -0 is smaller than +0.
template <bool MAX, int FLAGS> inline float extreme(float a, float b) {
    if (FLAGS & 1) a = flush(a), b = flush(b);
    if (a != a || b != b) {
        if ((FLAGS & 2) || (a != a && b != b)) return as_float(NAN32);
        return a != a ? b : a;
    }
    if (FLAGS & 4) {
        u32 sign = (bits(a) ^ bits(b)) & 0x80000000u;
        float x = std::fabs(a), y = std::fabs(b);
        return as_float((bits(MAX ? (x > y ? x : y) : (x < y ? x : y)) & 0x7fffffffu) | sign);
    }
    if (a == b) return MAX ? (std::signbit(a) ? b : a) : (std::signbit(a) ? a : b);
    return MAX ? (a > b ? a : b) : (a < b ? a : b);
}
template <bool MAX, int FLAGS> Next minmax(Warp& w, const Op& o, u32 m) {
    if (o.operands == 4)
        return map3<float, float, float, float>(w, o, m, [](float a, float b, float c) { return extreme<MAX, FLAGS>(extreme<MAX, FLAGS>(a, b), c); });
    return map2<float, float, float>(w, o, m, [](float a, float b) { return extreme<MAX, FLAGS>(a, b); });
}

#define APPROXIMATION(NAME, EXPR)                                                                  \
    template <int FLAGS> Next NAME(Warp& w, const Op& o, u32 m) {                                  \
        return map1<float, float>(w, o, m, [](float x) { float a = in<FLAGS>(x); return out<FLAGS>(EXPR); }); \
    }
APPROXIMATION(lg2, std::log2(a))
APPROXIMATION(rcp, 1.0f / a)
APPROXIMATION(rsqrt, float(1.0 / std::sqrt(double(a))))
APPROXIMATION(sqrt_, std::sqrt(a))
APPROXIMATION(sin_, std::sin(a))
APPROXIMATION(cos_, std::cos(a))
APPROXIMATION(tanh_, std::tanh(a))
template <int FLAGS> Next ex2(Warp& w, const Op& o, u32 m) {
    w.launch->counters.exp += uint64_t(__builtin_popcount(m));
    return map1<float, float>(w, o, m, [](float x) { return out<FLAGS>(std::exp2(in<FLAGS>(x))); });
}

// double precision
Next add64(Warp& w, const Op& o, u32 m) { return map2<double, double, double>(w, o, m, [](double a, double b) { return a + b; }); }
Next sub64(Warp& w, const Op& o, u32 m) { return map2<double, double, double>(w, o, m, [](double a, double b) { return a - b; }); }
Next mul64(Warp& w, const Op& o, u32 m) { return map2<double, double, double>(w, o, m, [](double a, double b) { return a * b; }); }
Next div64(Warp& w, const Op& o, u32 m) { return map2<double, double, double>(w, o, m, [](double a, double b) { return a / b; }); }
Next fma64(Warp& w, const Op& o, u32 m) { return map3<double, double, double, double>(w, o, m, [](double a, double b, double c) { return std::fma(a, b, c); }); }
Next neg64(Warp& w, const Op& o, u32 m) { return map1<double, double>(w, o, m, [](double a) { return -a; }); }
Next abs64(Warp& w, const Op& o, u32 m) { return map1<double, double>(w, o, m, [](double a) { return std::fabs(a); }); }
Next sqrt64(Warp& w, const Op& o, u32 m) { return map1<double, double>(w, o, m, [](double a) { return std::sqrt(a); }); }
Next rcp64(Warp& w, const Op& o, u32 m) { return map1<double, double>(w, o, m, [](double a) { return 1 / a; }); }
Next min64(Warp& w, const Op& o, u32 m) { return map2<double, double, double>(w, o, m, [](double a, double b) { return std::fmin(a, b); }); }
Next max64(Warp& w, const Op& o, u32 m) { return map2<double, double, double>(w, o, m, [](double a, double b) { return std::fmax(a, b); }); }

// f32x2: two floats in a 64-bit register, rounded to nearest
template <class F> Next pairs(Warp& w, const Op& o, u32 m, F f) {
    u64* d = w.dst<u64>(o.x[0]);
    const u64 *a = w.src<u64>(o.x[1]), *b = w.src<u64>(o.x[2]), *c = w.src<u64>(o.x[o.operands > 3 ? 3 : 2]);
    EACH_LANE(l, m) {
        float lo = f(as_float(u32(a[l])), as_float(u32(b[l])), as_float(u32(c[l])));
        float hi = f(as_float(u32(a[l] >> 32)), as_float(u32(b[l] >> 32)), as_float(u32(c[l] >> 32)));
        d[l] = u64(bits(lo)) | u64(bits(hi)) << 32;
    }
    return Next::advance;
}
template <int FLAGS> Next add_x2(Warp& w, const Op& o, u32 m) { return pairs(w, o, m, [](float a, float b, float) { return out<FLAGS>(in<FLAGS>(a) + in<FLAGS>(b)); }); }
template <int FLAGS> Next sub_x2(Warp& w, const Op& o, u32 m) { return pairs(w, o, m, [](float a, float b, float) { return out<FLAGS>(in<FLAGS>(a) - in<FLAGS>(b)); }); }
template <int FLAGS> Next mul_x2(Warp& w, const Op& o, u32 m) { return pairs(w, o, m, [](float a, float b, float) { return out<FLAGS>(in<FLAGS>(a) * in<FLAGS>(b)); }); }
template <int FLAGS> Next fma_x2(Warp& w, const Op& o, u32 m) { return pairs(w, o, m, [](float a, float b, float c) { return out<FLAGS>(__builtin_fmaf(in<FLAGS>(a), in<FLAGS>(b), in<FLAGS>(c))); }); }

// half precision. A product of two f16 or bf16 values is exact in double; a sum in double is rounded to odd first, so
// that the final rounding to 16 bits is the only one.
inline double add_to_odd(double a, double b) {
    double s = a + b;
    if (!std::isfinite(s)) return s;
    double t = s - a, e = (a - (s - t)) + (b - t);
    u64 u = bits64(s);
    if (e != 0 && !(u & 1)) {
        bool grow = (e > 0) == (s > 0);
        u = grow ? u + 1 : u - 1;
        s = as_double(u);
    }
    return s;
}
struct F16 {
    static double load(u32 h) { return double(half_to_float(h & 0xffff)); }
    static u32 store(double v) {
        if (v != v) return 0x7fff;
        _Float16 x = _Float16(v);
        uint16_t s;
        memcpy(&s, &x, 2);
        return s;
    }
};
struct BF16 {
    static double load(u32 h) { return double(bf16_to_float(h & 0xffff)); }
    static u32 store(double v) {
        if (v != v) return 0x7fff;
        u64 u = bits64(v);
        u32 sign = u32(u >> 48) & 0x8000;
        double a = std::fabs(v);
        if (a == 0) return sign;
        int e;
        std::frexp(a, &e);
        double quantum = std::ldexp(1.0, std::max(e - 8, -133));
        double r = std::nearbyint(a / quantum) * quantum;
        if (r > 3.3895313892515355e38) return sign | 0x7f80;
        return sign | (bits(float(r)) >> 16);
    }
};
enum HalfOp { H_ADD, H_SUB, H_MUL, H_FMA, H_NEG, H_ABS, H_MIN, H_MAX, H_EX2, H_TANH };
template <class H> u32 half_op(int op, u32 a, u32 b, u32 c, int64_t flags) {  // flags: 1 relu, 2 sat, 4 NaN
    double x = H::load(a), y = H::load(b), z = H::load(c), r = 0;
    switch (op) {
        case H_ADD: r = add_to_odd(x, y); break;
        case H_SUB: r = add_to_odd(x, -y); break;
        case H_MUL: r = x * y; break;
        case H_FMA: r = add_to_odd(x * y, z); break;
        case H_NEG: return a ^ 0x8000;
        case H_ABS: return a & 0x7fff;
        case H_MIN: r = double((flags & 4) ? extreme<false, 2>(float(x), float(y)) : extreme<false, 0>(float(x), float(y))); break;
        case H_MAX: r = double((flags & 4) ? extreme<true, 2>(float(x), float(y)) : extreme<true, 0>(float(x), float(y))); break;
        case H_EX2: r = std::exp2(x); break;
        case H_TANH: r = std::tanh(x); break;
    }
    if (flags & 1) r = r != r ? r : r < 0 ? 0.0 : r;
    if (flags & 2) r = r != r ? 0 : r < 0 ? 0 : r > 1 ? 1 : r;
    return H::store(r);
}
template <class H, bool PACKED> Next half(Warp& w, const Op& o, u32 m) {  // imm: operation, flags
    u32* d = w.dst<u32>(o.x[0]);
    const u32 *a = w.src<u32>(o.x[1]), *b = w.src<u32>(o.x[o.operands > 2 ? 2 : 1]), *c = w.src<u32>(o.x[o.operands > 3 ? 3 : 1]);
    int op = int(o.imm[0]);
    int64_t flags = o.imm[1];
    EACH_LANE(l, m) {
        u32 r = half_op<H>(op, a[l] & 0xffff, b[l] & 0xffff, c[l] & 0xffff, flags);
        if (PACKED) r |= half_op<H>(op, a[l] >> 16, b[l] >> 16, c[l] >> 16, flags) << 16;
        d[l] = r;
    }
    if (op == H_EX2) w.launch->counters.exp += uint64_t(__builtin_popcount(m)) * (PACKED ? 2 : 1);
    return Next::advance;
}
// mixed precision: fma.rn.f32.bf16 and friends, one rounding to f32. imm: 0 f16 / 1 bf16; operands may be absent (add)
Next fma_mixed(Warp& w, const Op& o, u32 m) {
    bool bf = o.imm[0];
    return map3<float, u32, u32, float>(w, o, m, [bf](u32 a, u32 b, float c) {
        float x = bf ? bf16_to_float(a & 0xffff) : half_to_float(a), y = bf ? bf16_to_float(b & 0xffff) : half_to_float(b);
        return canonical(__builtin_fmaf(x, y, c));
    });
}
Next add_mixed(Warp& w, const Op& o, u32 m) {
    bool bf = o.imm[0], minus = o.imm[1];
    return map2<float, u32, float>(w, o, m, [=](u32 a, float c) {
        float x = bf ? bf16_to_float(a & 0xffff) : half_to_float(a);
        return canonical(minus ? x - c : x + c);
    });
}
Next copysign_(Warp& w, const Op& o, u32 m) {  // copysign.f32 d, a, b: the sign of a, the magnitude of b
    return map2<u32, u32, u32>(w, o, m, [](u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); });
}
Next testp(Warp& w, const Op& o, u32 m) {  // imm: 0 finite, 1 infinite, 2 number, 3 notanumber, 4 normal, 5 subnormal
    const u32* a = w.src<u32>(o.x[1]);
    u32 r = 0;
    EACH_LANE(l, m) {
        u32 e = a[l] >> 23 & 255, f = a[l] & 0x7fffff;
        bool v = false;
        switch (o.imm[0]) {
            case 0: v = e != 255; break;
            case 1: v = e == 255 && !f; break;
            case 2: v = e != 255 || !f; break;
            case 3: v = e == 255 && f; break;
            case 4: v = e && e != 255; break;
            case 5: v = !e && f; break;
        }
        r |= u32(v) << l;
    }
    return w.set_pred(o.x[0], r, m), Next::advance;
}

const HandlerName table[] = {
#define FLAGGED(N, F) {N ".f32", F<0>}, {N ".ftz.f32", F<1>}, {N ".sat.f32", F<2>}, {N ".ftz.sat.f32", F<3>}
    FLAGGED("add", add), FLAGGED("sub", sub), FLAGGED("mul", mul), FLAGGED("fma", fma_), FLAGGED("div", div_),
#define FTZ(N, F) {N ".f32", F<0>}, {N ".ftz.f32", F<1>}
    FTZ("neg", neg), FTZ("abs", abs_), FTZ("ex2", ex2), FTZ("lg2", lg2), FTZ("rcp", rcp), FTZ("rsqrt", rsqrt),
    FTZ("sqrt", sqrt_), FTZ("sin", sin_), FTZ("cos", cos_), FTZ("tanh", tanh_),
    {"min.f32", minmax<false, 0>}, {"min.ftz.f32", minmax<false, 1>}, {"min.nan.f32", minmax<false, 2>},
    {"min.ftz.nan.f32", minmax<false, 3>}, {"max.f32", minmax<true, 0>}, {"max.ftz.f32", minmax<true, 1>},
    {"max.nan.f32", minmax<true, 2>}, {"max.ftz.nan.f32", minmax<true, 3>}, {"min.xorsign.f32", minmax<false, 4>},
    {"max.xorsign.f32", minmax<true, 4>}, {"min.nan.xorsign.f32", minmax<false, 6>}, {"max.nan.xorsign.f32", minmax<true, 6>},
    {"add.directed.f32", directed<float, 0>}, {"sub.directed.f32", directed<float, 1>}, {"mul.directed.f32", directed<float, 2>},
    {"fma.directed.f32", directed<float, 3>}, {"sqrt.directed.f32", directed<float, 4>}, {"div.directed.f32", directed<float, 5>},
    {"add.directed.f64", directed<double, 0>}, {"sub.directed.f64", directed<double, 1>}, {"mul.directed.f64", directed<double, 2>},
    {"fma.directed.f64", directed<double, 3>},
    {"add.f64", add64}, {"sub.f64", sub64}, {"mul.f64", mul64}, {"div.f64", div64}, {"fma.f64", fma64}, {"neg.f64", neg64},
    {"abs.f64", abs64}, {"sqrt.f64", sqrt64}, {"rcp.f64", rcp64}, {"min.f64", min64}, {"max.f64", max64},
#define PAIR(N, F) {N ".f32x2", F<0>}, {N ".ftz.f32x2", F<1>}
    PAIR("add", add_x2), PAIR("sub", sub_x2), PAIR("mul", mul_x2), PAIR("fma", fma_x2),
    {"half.f16", half<F16, false>}, {"half.bf16", half<BF16, false>}, {"half.f16x2", half<F16, true>}, {"half.bf16x2", half<BF16, true>},
    {"fma.mixed", fma_mixed}, {"add.mixed", add_mixed}, {"copysign.f32", copysign_}, {"testp.f32", testp},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
