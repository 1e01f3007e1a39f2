// PTX ISA, Instruction Set: Integer Arithmetic, Logic and Shift, Comparison and Selection (integer types), mov, prmt.
#include "lanes.h"

namespace emu {
namespace {

#define BINARY(NAME, EXPR)                                                  \
    template <class T> Next NAME(Warp& w, const Op& o, uint32_t m) {        \
        return map2<T, T, T>(w, o, m, [](T a, T b) -> T { return EXPR; });  \
    }
#define UNARY(NAME, EXPR)                                              \
    template <class T> Next NAME(Warp& w, const Op& o, uint32_t m) {   \
        return map1<T, T>(w, o, m, [](T a) -> T { return EXPR; });     \
    }

BINARY(add, T(a + b))
BINARY(sub, T(a - b))
BINARY(mul_lo, T(a * b))
BINARY(and_, T(a & b))
BINARY(or_, T(a | b))
BINARY(xor_, T(a ^ b))
BINARY(min_, a < b ? a : b)
BINARY(max_, a > b ? a : b)
// division by zero is unspecified in PTX; the emulator returns all ones (what the hardware's expansion gives)
BINARY(div_, b == 0 ? T(-1) : (std::is_signed_v<T> && b == T(-1)) ? T(0 - a) : T(a / (b == 0 ? T(1) : b)))
BINARY(rem_, b == 0 ? a : (std::is_signed_v<T> && b == T(-1)) ? T(0) : T(a % (b == 0 ? T(1) : b)))
UNARY(neg, T(0 - a))
UNARY(not_, T(~a))
UNARY(abs_, a < 0 ? T(0 - a) : a)
UNARY(mov, a)

template <class T> Next mul_wide(Warp& w, const Op& o, uint32_t m) {
    using D = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
                                 std::conditional_t<std::is_signed_v<T>, s64, u64>>;
    return map2<D, T, T>(w, o, m, [](T a, T b) -> D { return D(a) * D(b); });
}
template <class T> Next mad_wide(Warp& w, const Op& o, uint32_t m) {
    using D = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
                                 std::conditional_t<std::is_signed_v<T>, s64, u64>>;
    return map3<D, T, T, D>(w, o, m, [](T a, T b, D c) -> D { return D(a) * D(b) + c; });
}
template <class T> T high(T a, T b) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return T((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
}
BINARY(mul_hi, high<T>(a, b))
template <class T> Next mad_lo(Warp& w, const Op& o, uint32_t m) {
    return map3<T, T, T, T>(w, o, m, [](T a, T b, T c) -> T { return T(a * b + c); });
}
template <class T> Next mad_hi(Warp& w, const Op& o, uint32_t m) {
    return map3<T, T, T, T>(w, o, m, [](T a, T b, T c) -> T { return T(high<T>(a, b) + c); });
}
template <class T> Next shl(Warp& w, const Op& o, uint32_t m) {
    constexpr u32 n = 8 * sizeof(T);
    return map2<T, T, u32>(w, o, m, [](T a, u32 b) -> T { return b >= n ? T(0) : T(a << (b & (n - 1))); });
}
template <class T> Next shr(Warp& w, const Op& o, uint32_t m) {  // arithmetic for signed types; amounts clamp
    constexpr u32 n = 8 * sizeof(T);
    return map2<T, T, u32>(w, o, m, [](T a, u32 b) -> T {
        if constexpr (std::is_signed_v<T>) return T(a >> (b >= n ? n - 1 : b));
        return b >= n ? T(0) : T(a >> (b & (n - 1)));
    });
}
Next mul24_lo(Warp& w, const Op& o, uint32_t m) {
    return map2<u32, u32, u32>(w, o, m, [](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); });
}
Next popc32(Warp& w, const Op& o, uint32_t m) {
    return map1<u32, u32>(w, o, m, [](u32 a) { return u32(__builtin_popcount(a)); });
}
Next popc64(Warp& w, const Op& o, uint32_t m) {
    return map1<u32, u64>(w, o, m, [](u64 a) { return u32(__builtin_popcountll(a)); });
}
Next clz32(Warp& w, const Op& o, uint32_t m) {
    return map1<u32, u32>(w, o, m, [](u32 a) { return a ? u32(__builtin_clz(a)) : 32u; });
}
Next clz64(Warp& w, const Op& o, uint32_t m) {
    return map1<u32, u64>(w, o, m, [](u64 a) { return a ? u32(__builtin_clzll(a)) : 64u; });
}
Next brev32(Warp& w, const Op& o, uint32_t m) {
    return map1<u32, u32>(w, o, m, [](u32 a) {
        u32 r = 0;
        for (int i = 0; i < 32; i++) r |= ((a >> i) & 1) << (31 - i);
        return r;
    });
}
template <class T> Next bfind(Warp& w, const Op& o, uint32_t m) {
    bool shift = o.imm[0];
    return map1<u32, T>(w, o, m, [shift](T a) {
        using U = std::make_unsigned_t<T>;
        U x = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
        if (!x) return 0xffffffffu;
        u32 msb = 63u - u32(__builtin_clzll(u64(x)));
        return shift ? u32(8 * sizeof(T) - 1) - msb : msb;
    });
}
template <class T> Next bfe(Warp& w, const Op& o, uint32_t m) {
    return map3<T, T, u32, u32>(w, o, m, [](T a, u32 pos, u32 len) -> T {
        constexpr u32 msb = 8 * sizeof(T) - 1;
        pos &= 0xff, len &= 0xff;
        using U = std::make_unsigned_t<T>;
        bool sign = false;
        if (std::is_signed_v<T> && len) sign = (u64(a) >> std::min(pos + len - 1, msb)) & 1;
        U d = 0;
        for (u32 i = 0; i <= msb; i++) {
            u32 bit = i < len && pos + i <= msb ? u32((u64(a) >> (pos + i)) & 1) : u32(sign);
            d |= U(U(bit) << i);
        }
        return T(d);
    });
}
template <class T> Next bfi(Warp& w, const Op& o, uint32_t m) {
    // d = b with bits [c, c + e) replaced by the low bits of a; e is a fifth operand
    T *d = w.dst<T>(o.x[0]);
    const T *a = w.src<T>(o.x[1]), *b = w.src<T>(o.x[2]);
    const u32 *pos = w.src<u32>(o.x[3]), *len = w.src<u32>(o.x[4]);
    EACH_LANE(l, m) {
        T f = b[l];
        u32 p = pos[l] & 0xff, n = len[l] & 0xff;
        for (u32 i = 0; i < n && p + i < 8 * sizeof(T); i++) {
            T bit = T((a[l] >> i) & 1);
            f = T((f & ~(T(1) << (p + i))) | (bit << (p + i)));
        }
        d[l] = f;
    }
    return Next::advance;
}
Next lop3(Warp& w, const Op& o, uint32_t m) {
    u32 t = u32(o.imm[0]);
    return map3<u32, u32, u32, u32>(w, o, m, [t](u32 a, u32 b, u32 c) {
        u32 r = 0;
        for (int i = 0; i < 8; i++)
            if (t >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        return r;
    });
}
Next shf(Warp& w, const Op& o, uint32_t m) {  // imm: right, clamp
    bool right = o.imm[0], clamp = o.imm[1];
    return map3<u32, u32, u32, u32>(w, o, m, [=](u32 a, u32 b, u32 c) {
        u32 n = clamp ? std::min(c, 32u) : c & 31;
        u64 v = (u64(b) << 32) | a;
        return right ? u32(n == 32 ? b : v >> n) : u32(n == 32 ? a : (v << n) >> 32);
    });
}
Next prmt(Warp& w, const Op& o, uint32_t m) {
    u32 mode = u32(o.imm[0]);  // 0 default, 1 f4e, 2 b4e, 3 rc8, 4 ecl, 5 ecr, 6 rc16
    return map3<u32, u32, u32, u32>(w, o, m, [mode](u32 a, u32 b, u32 c) {
        u64 v = (u64(b) << 32) | a;
        u32 r = 0, k = c & 3;
        for (u32 i = 0; i < 4; i++) {
            u32 s;
            switch (mode) {
                case 1: s = (k + i) & 7; break;
                case 2: s = (k - i) & 7; break;
                case 3: s = k; break;
                case 4: s = std::max(i, k); break;
                case 5: s = std::min(i, k); break;
                case 6: s = ((k & 1) << 1) | (i & 1); break;
                default: s = (c >> (4 * i)) & 15;
            }
            u32 byte = u32(v >> (8 * (s & 7))) & 0xff;
            if (mode == 0 && s & 8) byte = byte & 0x80 ? 0xff : 0;
            r |= byte << (8 * i);
        }
        return r;
    });
}
// mov between a vector of parts and a wider register
Next pack2x16(Warp& w, const Op& o, uint32_t m) {
    return map2<u32, u32, u32>(w, o, m, [](u32 a, u32 b) { return (a & 0xffff) | (b << 16); });
}
Next pack2x32(Warp& w, const Op& o, uint32_t m) {
    return map2<u64, u32, u32>(w, o, m, [](u32 a, u32 b) { return u64(a) | (u64(b) << 32); });
}
Next pack4x8(Warp& w, const Op& o, uint32_t m) {
    u32* d = w.dst<u32>(o.x[0]);
    const u32 *a = w.src<u32>(o.x[1]), *b = w.src<u32>(o.x[2]), *c = w.src<u32>(o.x[3]), *e = w.src<u32>(o.x[4]);
    EACH_LANE(l, m) d[l] = (a[l] & 0xff) | (b[l] & 0xff) << 8 | (c[l] & 0xff) << 16 | e[l] << 24;
    return Next::advance;
}
Next pack4x16(Warp& w, const Op& o, uint32_t m) {
    u64* d = w.dst<u64>(o.x[0]);
    const u32 *a = w.src<u32>(o.x[1]), *b = w.src<u32>(o.x[2]), *c = w.src<u32>(o.x[3]), *e = w.src<u32>(o.x[4]);
    EACH_LANE(l, m)
        d[l] = u64(a[l] & 0xffff) | u64(b[l] & 0xffff) << 16 | u64(c[l] & 0xffff) << 32 | u64(e[l] & 0xffff) << 48;
    return Next::advance;
}
// imm: right shift, mask of the part
Next part32(Warp& w, const Op& o, uint32_t m) {
    u32 shift = u32(o.imm[0]), mask = u32(o.imm[1]);
    return map1<u32, u32>(w, o, m, [=](u32 a) { return (a >> shift) & mask; });
}
Next part64(Warp& w, const Op& o, uint32_t m) {
    u32 shift = u32(o.imm[0]), mask = u32(o.imm[1]);
    return map1<u32, u64>(w, o, m, [=](u64 a) { return u32(a >> shift) & mask; });
}
Next widen(Warp& w, const Op& o, uint32_t m) {  // 32-bit storage to 64-bit storage
    return map1<u64, u32>(w, o, m, [](u32 a) { return u64(a); });
}
Next sad(Warp& w, const Op& o, uint32_t m) {
    return map3<u32, u32, u32, u32>(w, o, m, [](u32 a, u32 b, u32 c) { return c + (a < b ? b - a : a - b); });
}
// d = a + b + carry, or a - b - borrow. d, a, b, carry in and carry out (predicates, each may be absent); imm: subtract
template <class T> Next add_carry(Warp& w, const Op& o, uint32_t m) {
    Slot<T>* d = w.dst<Slot<T>>(o.x[0]);
    const Slot<T>*a = w.src<Slot<T>>(o.x[1]), *b = w.src<Slot<T>>(o.x[2]);
    u32 in = o.x[3] == NONE ? 0 : w.pred(o.x[3]), out = 0;
    EACH_LANE(l, m) {
        T x = T(a[l]), y = T(b[l]), c = T(in >> l & 1), r = o.imm[0] ? T(x - y - c) : T(x + y + c);
        bool carry = o.imm[0] ? x < y || (x == y && c) : r < x || (r == x && c);
        out |= u32(carry) << l;
        d[l] = r;
    }
    if (o.x[4] != NONE) w.set_pred(o.x[4], out, m);
    return Next::advance;
}
// imm: a signed, b signed, bytes of a (4: four products with bytes of b; 2: two halves), first byte of b
Next dot(Warp& w, const Op& o, uint32_t m) {
    bool sa = o.imm[0], sb = o.imm[1];
    u32 n = u32(o.imm[2]), first = u32(o.imm[3]);
    return map3<u32, u32, u32, u32>(w, o, m, [=](u32 a, u32 b, u32 c) {
        for (u32 i = 0; i < n; i++) {
            u32 bits = 32 / n, x = a >> (bits * i) & (0xffffffffu >> (32 - bits)), y = b >> (8 * (first + i)) & 0xff;
            int64_t xs = sa ? int64_t(int32_t(x << (32 - bits)) >> (32 - bits)) : int64_t(x), ys = sb ? int64_t(int8_t(y)) : int64_t(y);
            c += u32(xs * ys);
        }
        return c;
    });
}
// cvt.pack.sat: signed 32-bit a and b to `bits` bits each, below the low bits of c. imm: bits, signed
Next pack_saturated(Warp& w, const Op& o, uint32_t m) {
    u32 bits = u32(o.imm[0]);
    int64_t lo = o.imm[1] ? -(int64_t(1) << (bits - 1)) : 0, hi = o.imm[1] ? (int64_t(1) << (bits - 1)) - 1 : (int64_t(1) << bits) - 1;
    return map3<u32, int32_t, int32_t, u32>(w, o, m, [=](int32_t a, int32_t b, u32 c) {
        u32 mask = (1u << bits) - 1, x = u32(std::min(std::max(int64_t(a), lo), hi)) & mask, y = u32(std::min(std::max(int64_t(b), lo), hi)) & mask;
        return u32(u64(c) << (2 * bits)) | x << bits | y;
    });
}
template <class T> Next selp(Warp& w, const Op& o, uint32_t m) {
    Slot<T>* d = w.dst<Slot<T>>(o.x[0]);
    const Slot<T>*a = w.src<Slot<T>>(o.x[1]), *b = w.src<Slot<T>>(o.x[2]);
    u32 p = w.pred(o.x[3]);
    if (m == FULL) {
#pragma GCC ivdep
        for (int l = 0; l < 32; l++) d[l] = (p >> l) & 1 ? a[l] : b[l];
    } else {
        EACH_LANE(l, m) d[l] = (p >> l) & 1 ? a[l] : b[l];
    }
    return Next::advance;
}

const HandlerName table[] = {
#define ALL(N, F) {N ".u16", F<u16>}, {N ".u32", F<u32>}, {N ".u64", F<u64>}
#define SIGNED(N, F) {N ".s16", F<s16>}, {N ".s32", F<s32>}, {N ".s64", F<s64>}
    ALL("add", add), ALL("sub", sub), ALL("mul.lo", mul_lo), ALL("and", and_), ALL("or", or_), ALL("xor", xor_),
    ALL("min", min_), SIGNED("min", min_), ALL("max", max_), SIGNED("max", max_), ALL("div", div_), SIGNED("div", div_),
    ALL("rem", rem_), SIGNED("rem", rem_), ALL("neg", neg), ALL("not", not_), SIGNED("abs", abs_), ALL("mov", mov),
    ALL("mad.lo", mad_lo), ALL("shl", shl), ALL("shr", shr), SIGNED("shr", shr), ALL("mul.hi", mul_hi),
    SIGNED("mul.hi", mul_hi), ALL("mad.hi", mad_hi), SIGNED("mad.hi", mad_hi), ALL("selp", selp),
    {"mul.wide.u16", mul_wide<u16>}, {"mul.wide.u32", mul_wide<u32>}, {"mul.wide.s16", mul_wide<s16>},
    {"mul.wide.s32", mul_wide<s32>}, {"mad.wide.u16", mad_wide<u16>}, {"mad.wide.u32", mad_wide<u32>},
    {"mad.wide.s16", mad_wide<s16>}, {"mad.wide.s32", mad_wide<s32>}, {"mul24.lo.u32", mul24_lo},
    {"popc.b32", popc32}, {"popc.b64", popc64}, {"clz.b32", clz32}, {"clz.b64", clz64}, {"brev.b32", brev32},
    {"bfind.u32", bfind<u32>}, {"bfind.s32", bfind<s32>}, {"bfind.u64", bfind<u64>}, {"bfind.s64", bfind<s64>},
    {"bfe.u32", bfe<u32>}, {"bfe.s32", bfe<s32>}, {"bfe.u64", bfe<u64>}, {"bfe.s64", bfe<s64>},
    {"bfi.b32", bfi<u32>}, {"bfi.b64", bfi<u64>}, {"lop3.b32", lop3}, {"shf.b32", shf}, {"prmt.b32", prmt},
    {"pack2x16", pack2x16}, {"pack2x32", pack2x32}, {"pack4x8", pack4x8}, {"pack4x16", pack4x16}, {"part32", part32},
    {"part64", part64}, {"widen", widen}, {"sad.u32", sad},
    {"add_carry.u32", add_carry<u32>}, {"add_carry.u64", add_carry<u64>}, {"dot", dot}, {"pack_saturated", pack_saturated},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
