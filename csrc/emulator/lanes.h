// Elementwise handlers over 32 lanes: full warps in one vectorised loop, partial ones lane by lane.
#pragma once
#include <cmath>
#include <type_traits>

#include "core.h"

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

constexpr uint32_t NONE = 0xffffffffu;  // an operand that is absent

template <class T> using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T> inline T from_slot(Slot<T> s) {
    if constexpr (std::is_floating_point_v<T>) {
        T t;
        memcpy(&t, &s, sizeof t);
        return t;
    } else {
        return static_cast<T>(s);
    }
}
template <class T> inline Slot<T> to_slot(T t) {
    if constexpr (std::is_floating_point_v<T>) {
        Slot<T> s;
        memcpy(&s, &t, sizeof s);
        return s;
    } else {
        return static_cast<Slot<T>>(static_cast<std::make_unsigned_t<T>>(t));
    }
}

#define LANES_BODY(EXPR)                                        \
    if (m == FULL) {                                            \
        _Pragma("GCC ivdep") for (int l = 0; l < 32; l++) d[l] = to_slot<D>(EXPR); \
    } else {                                                    \
        for (uint32_t r = m; r; r &= r - 1) {                   \
            int l = __builtin_ctz(r);                           \
            d[l] = to_slot<D>(EXPR);                            \
        }                                                       \
    }                                                           \
    return Next::advance;

template <class D, class A, class F> inline Next map1(Warp& w, const Op& o, uint32_t m, F f) {
    Slot<D>* d = w.dst<Slot<D>>(o.x[0]);
    const Slot<A>* a = w.src<Slot<A>>(o.x[1]);
    LANES_BODY(D(f(from_slot<A>(a[l]))))
}
template <class D, class A, class B, class F> inline Next map2(Warp& w, const Op& o, uint32_t m, F f) {
    Slot<D>* d = w.dst<Slot<D>>(o.x[0]);
    const Slot<A>* a = w.src<Slot<A>>(o.x[1]);
    const Slot<B>* b = w.src<Slot<B>>(o.x[2]);
    LANES_BODY(D(f(from_slot<A>(a[l]), from_slot<B>(b[l]))))
}
template <class D, class A, class B, class C, class F> inline Next map3(Warp& w, const Op& o, uint32_t m, F f) {
    Slot<D>* d = w.dst<Slot<D>>(o.x[0]);
    const Slot<A>* a = w.src<Slot<A>>(o.x[1]);
    const Slot<B>* b = w.src<Slot<B>>(o.x[2]);
    const Slot<C>* c = w.src<Slot<C>>(o.x[3]);
    LANES_BODY(D(f(from_slot<A>(a[l]), from_slot<B>(b[l]), from_slot<C>(c[l]))))
}

inline uint32_t bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
inline float as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline uint64_t bits64(double f) {
    uint64_t u;
    memcpy(&u, &f, 8);
    return u;
}
inline double as_double(uint64_t u) {
    double f;
    memcpy(&f, &u, 8);
    return f;
}

constexpr uint32_t NAN32 = 0x7fffffffu;  // the canonical NaN of PTX

inline float bf16_to_float(uint32_t h) { return as_float(h << 16); }
inline uint32_t float_to_bf16(float f) {  // round to nearest even; NaN becomes 0x7fff
    uint32_t b = bits(f);
    uint32_t r = (b + 0x7fffu + ((b >> 16) & 1)) >> 16;
    return (b & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : r;
}
inline float half_to_float(uint32_t h) {
    _Float16 x;
    uint16_t s = uint16_t(h);
    memcpy(&x, &s, 2);
    return float(x);
}
inline uint32_t float_to_half(float f) {
    _Float16 x = _Float16(f);
    uint16_t s;
    memcpy(&s, &x, 2);
    return (bits(f) & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : s;
}
inline float flush(float f) { return (bits(f) & 0x7f800000u) ? f : as_float(bits(f) & 0x80000000u); }

}  // namespace emu
