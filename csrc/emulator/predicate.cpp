// PTX ISA, Instruction Set: setp, predicate logic, votes, match, elect, shuffles, redux, activemask; control flow.
#include "lanes.h"

namespace emu {

Next barrier_arrive(Warp& w, uint32_t id, uint32_t threads, bool wait, const uint32_t* votes);
void exit_lanes(Warp&, uint32_t mask);

namespace {

template <class T, class F> inline uint32_t compare_lanes(const Slot<T>* a, const Slot<T>* b, F f) {
    alignas(64) uint8_t t[32];
#pragma GCC ivdep
    for (int l = 0; l < 32; l++) t[l] = f(from_slot<T>(a[l]), from_slot<T>(b[l])) ? 1 : 0;
    uint64_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t v;
        memcpy(&v, t + 8 * i, 8);
        r |= ((v * 0x0102040810204080ull) >> 56) << (8 * i);
    }
    return uint32_t(r);
}

// operands: p, q, a, b, c (q and c may be absent); immediates: boolean operation (0 none, 1 and, 2 or, 3 xor)
Next finish_setp(Warp& w, const Op& o, uint32_t m, uint32_t r) {
    uint32_t c = o.x[4] == NONE ? 0 : w.pred(o.x[4]), p = r, q = ~r;
    switch (o.imm[0]) {
        case 1: p = r & c, q = ~r & c; break;
        case 2: p = r | c, q = ~r | c; break;
        case 3: p = r ^ c, q = ~r ^ c; break;
    }
    if (o.x[0] != NONE) w.set_pred(o.x[0], p, m);
    if (o.x[1] != NONE) w.set_pred(o.x[1], q, m);
    return Next::advance;
}

#define SETP(NAME, EXPR)                                                                                     \
    template <class T> Next NAME(Warp& w, const Op& o, uint32_t m) {                                         \
        return finish_setp(w, o, m, compare_lanes<T>(w.src<Slot<T>>(o.x[2]), w.src<Slot<T>>(o.x[3]),         \
                                                     [](T a, T b) -> bool { return EXPR; }));                \
    }
SETP(eq, a == b)
SETP(ne, a != b)
SETP(lt, a < b)
SETP(le, a <= b)
SETP(gt, a > b)
SETP(ge, a >= b)
// floating point: ne is ordered (false on NaN), the u forms are true on NaN
SETP(fne, a < b || a > b)
SETP(equ, !(a < b || a > b))
SETP(neu, !(a == b))
SETP(ltu, !(a >= b))
SETP(leu, !(a > b))
SETP(gtu, !(a <= b))
SETP(geu, !(a < b))
SETP(num, a == a && b == b)
SETP(isnan_, !(a == a && b == b))

Next setp_half(Warp& w, const Op& o, uint32_t m) {  // imm: boolean op, comparison, 0 f16 / 1 bf16
    const uint32_t *a = w.src<uint32_t>(o.x[2]), *b = w.src<uint32_t>(o.x[3]);
    uint32_t r = 0;
    for (int l = 0; l < 32; l++) {
        float x = o.imm[2] ? bf16_to_float(a[l] & 0xffff) : half_to_float(a[l]);
        float y = o.imm[2] ? bf16_to_float(b[l] & 0xffff) : half_to_float(b[l]);
        bool v = false, nan = x != x || y != y;
        switch (o.imm[1]) {
            case 0: v = x == y; break;
            case 1: v = !nan && x != y; break;
            case 2: v = x < y; break;
            case 3: v = x <= y; break;
            case 4: v = x > y; break;
            case 5: v = x >= y; break;
            case 6: v = nan || x == y; break;
            case 7: v = x != y; break;
            case 8: v = nan || x < y; break;
            case 9: v = nan || x <= y; break;
            case 10: v = nan || x > y; break;
            case 11: v = nan || x >= y; break;
            case 12: v = !nan; break;
            case 13: v = nan; break;
        }
        r |= uint32_t(v) << l;
    }
    return finish_setp(w, o, m, r);
}

Next mov_pred(Warp& w, const Op& o, uint32_t m) { return w.set_pred(o.x[0], w.pred(o.x[1]), m), Next::advance; }
Next not_pred(Warp& w, const Op& o, uint32_t m) { return w.set_pred(o.x[0], ~w.pred(o.x[1]), m), Next::advance; }
Next and_pred(Warp& w, const Op& o, uint32_t m) { return w.set_pred(o.x[0], w.pred(o.x[1]) & w.pred(o.x[2]), m), Next::advance; }
Next or_pred(Warp& w, const Op& o, uint32_t m) { return w.set_pred(o.x[0], w.pred(o.x[1]) | w.pred(o.x[2]), m), Next::advance; }
Next xor_pred(Warp& w, const Op& o, uint32_t m) { return w.set_pred(o.x[0], w.pred(o.x[1]) ^ w.pred(o.x[2]), m), Next::advance; }

// The lanes that must stand here together before a .sync operation: its member mask, less those that have exited.
inline bool together(Warp& w, uint32_t members) {
    return !(members & w.live & ~w.groups[w.current].mask);
}

void fill(Warp& w, uint32_t x, uint32_t value, uint32_t m) {
    uint32_t* d = w.dst<uint32_t>(x);
    EACH_LANE(l, m) d[l] = value;
}

Next elect(Warp& w, const Op& o, uint32_t m) {  // d, p, membermask: the lowest member, always the same for one set
    uint32_t members = w.src<uint32_t>(o.x[2])[lowest(m)];
    if (!together(w, members)) return Next::converge;
    uint32_t set = members & m;
    if (!set) fault("elect.sync by lanes %08x with a member mask of %08x", m, members);
    uint32_t leader = uint32_t(lowest(set));
    if (o.x[0] != NONE) fill(w, o.x[0], leader, m);
    if (o.x[1] != NONE) w.set_pred(o.x[1], 1u << leader, m);
    return Next::advance;
}

Next vote(Warp& w, const Op& o, uint32_t m) {  // d, p, members; imm: 0 all, 1 any, 2 uni, 3 ballot; negate
    uint32_t members = w.src<uint32_t>(o.x[2])[lowest(m)];
    if (!together(w, members)) return Next::converge;
    uint32_t p = w.pred(o.x[1]);
    if (o.imm[1]) p = ~p;
    p &= members & m;
    uint32_t set = members & m;
    switch (o.imm[0]) {
        case 0: w.set_pred(o.x[0], p == set ? FULL : 0, m); break;
        case 1: w.set_pred(o.x[0], p ? FULL : 0, m); break;
        case 2: w.set_pred(o.x[0], p == 0 || p == set ? FULL : 0, m); break;
        default: fill(w, o.x[0], p, m);
    }
    return Next::advance;
}

Next activemask(Warp& w, const Op& o, uint32_t m) { return fill(w, o.x[0], w.groups[w.current].mask, m), Next::advance; }

Next shfl(Warp& w, const Op& o, uint32_t m) {  // d, p, a, b, c, members; imm: 0 up, 1 down, 2 bfly, 3 idx
    uint32_t members = w.src<uint32_t>(o.x[5])[lowest(m)];
    if (!together(w, members)) return Next::converge;
    const uint32_t *a = w.src<uint32_t>(o.x[2]), *b = w.src<uint32_t>(o.x[3]), *c = w.src<uint32_t>(o.x[4]);
    uint32_t value[32], ok = 0;
    for (int l = 0; l < 32; l++) {
        int bv = int(b[l] & 31), clamp = int(c[l] & 31), segment = int((c[l] >> 8) & 31);
        int max_lane = (l & segment) | (clamp & ~segment), min_lane = l & segment, j = l;
        bool p = true;
        switch (o.imm[0]) {
            case 0: j = l - bv, p = j >= max_lane; break;
            case 1: j = l + bv, p = j <= max_lane; break;
            case 2: j = l ^ bv, p = j <= max_lane; break;
            default: j = min_lane | (bv & ~segment), p = j <= max_lane;
        }
        if (!p) j = l;
        value[l] = a[j];
        ok |= uint32_t(p) << l;
    }
    if (o.x[0] != NONE) {
        uint32_t* d = w.dst<uint32_t>(o.x[0]);
        EACH_LANE(l, m) d[l] = value[l];
    }
    if (o.x[1] != NONE) w.set_pred(o.x[1], ok, m);
    return Next::advance;
}

Next redux(Warp& w, const Op& o, uint32_t m) {  // d, a, members; imm: operation
    uint32_t members = w.src<uint32_t>(o.x[2])[lowest(m)];
    if (!together(w, members)) return Next::converge;
    const uint32_t* a = w.src<uint32_t>(o.x[1]);
    uint32_t set = members & m, r = a[lowest(set)];
    set &= set - 1;
    bool abs_value = o.imm[1], keep_nan = o.imm[2];
    auto f = [&](uint32_t x) { return abs_value ? x & 0x7fffffffu : x; };
    if (o.imm[0] >= 8) r = f(r);
    EACH_LANE(l, set) {
        uint32_t v = a[l];
        switch (o.imm[0]) {
            case 0: r += v; break;
            case 1: r = std::min(r, v); break;
            case 2: r = std::max(r, v); break;
            case 3: r = uint32_t(std::min(int32_t(r), int32_t(v))); break;
            case 4: r = uint32_t(std::max(int32_t(r), int32_t(v))); break;
            case 5: r &= v; break;
            case 6: r |= v; break;
            case 7: r ^= v; break;
            default: {  // f32 min (8), max (9)
                float x = as_float(r), y = as_float(f(v));
                bool nan = x != x || y != y;
                if (nan) r = keep_nan || (x != x && y != y) ? NAN32 : bits(x != x ? y : x);
                else r = bits(o.imm[0] == 8 ? std::fmin(x, y) : std::fmax(x, y));
            }
        }
    }
    return fill(w, o.x[0], r, m), Next::advance;
}

template <class T> Next match(Warp& w, const Op& o, uint32_t m) {  // d, p, a, members; imm: all
    uint32_t members = w.src<uint32_t>(o.x[3])[lowest(m)];
    if (!together(w, members)) return Next::converge;
    const T* a = w.src<T>(o.x[2]);
    uint32_t set = members & m, result[32], same = 0;
    EACH_LANE(l, set) {
        uint32_t r = 0;
        EACH_LANE(k, set) r |= uint32_t(a[k] == a[l]) << k;
        result[l] = r;
        same |= uint32_t(r == set) << l;
    }
    uint32_t* d = w.dst<uint32_t>(o.x[0]);
    EACH_LANE(l, m) d[l] = o.imm[0] ? (same == set ? set : 0) : result[l];
    if (o.x[1] != NONE) w.set_pred(o.x[1], same == set ? FULL : 0, m);
    return Next::advance;
}

// ------------------------------------------------------------------------------------------------ control flow

Next bra(Warp& w, const Op& o, uint32_t taken) {  // imm: target; called even when no lane takes it
    Group& g = w.groups[w.current];
    if (!taken) return Next::advance;
    uint32_t target = uint32_t(o.imm[0]);
    if (taken == g.mask) {
        g.pc = target;
        return Next::jumped;
    }
    g.mask &= ~taken;
    g.pc++;
    w.groups.push_back({target, taken});
    return Next::jumped;
}
Next ret(Warp& w, const Op&, uint32_t m) { return exit_lanes(w, m), Next::jumped; }
Next trap(Warp&, const Op&, uint32_t m) { fault("trap executed by lanes %08x", m); }
Next nop(Warp&, const Op&, uint32_t) { return Next::advance; }
Next pause(Warp&, const Op&, uint32_t) { return Next::yield; }
Next converge(Warp& w, const Op& o, uint32_t m) {  // bar.warp.sync members
    uint32_t members = w.src<uint32_t>(o.x[0])[lowest(m)];
    return together(w, members) ? Next::advance : Next::converge;
}
Next all_lanes(Warp& w, const Op&, uint32_t) {  // .sync.aligned operations without other effect (setmaxnreg, ...)
    return together(w, FULL) ? Next::advance : Next::converge;
}
Next bar(Warp& w, const Op& o, uint32_t m) {  // id, threads (may be absent), predicate (may be absent); imm: wait
    if (!together(w, FULL)) return Next::converge;
    uint32_t votes = o.x[2] == NONE ? 0 : w.pred(o.x[2]);
    return barrier_arrive(w, w.src<uint32_t>(o.x[0])[lowest(m)], o.x[1] == NONE ? 0 : w.src<uint32_t>(o.x[1])[lowest(m)], o.imm[0],
                          o.x[2] == NONE ? nullptr : &votes);
}
Next bar_result(Warp& w, const Op& o, uint32_t m) {  // d; imm: 0 popc, 1 and, 2 or. What bar.red found, after it
    uint32_t n = w.barrier_votes;
    if (o.imm[0] == 0) return fill(w, o.x[0], n, m), Next::advance;
    return w.set_pred(o.x[0], (o.imm[0] == 1 ? n == w.barrier_voters : n > 0) ? FULL : 0, m), Next::advance;
}
Next clock64_(Warp& w, const Op& o, uint32_t m) {  // %clock64, %globaltimer: emulated instructions so far
    uint64_t* d = w.dst<uint64_t>(o.x[0]);
    EACH_LANE(l, m) d[l] = w.launch->counters.instructions + w.executed;
    return Next::advance;
}
Next clock32_(Warp& w, const Op& o, uint32_t m) {
    return fill(w, o.x[0], uint32_t(w.launch->counters.instructions + w.executed), m), Next::advance;
}

const HandlerName table[] = {
#define UNSIGNED(N, F) {"setp." N ".u16", F<u16>}, {"setp." N ".u32", F<u32>}, {"setp." N ".u64", F<u64>}
#define ORDERED(N, F) UNSIGNED(N, F), {"setp." N ".s16", F<s16>}, {"setp." N ".s32", F<s32>}, {"setp." N ".s64", F<s64>}
#define FLOATING(N, F) {"setp." N ".f32", F<float>}, {"setp." N ".f64", F<double>}
    UNSIGNED("eq", eq), UNSIGNED("ne", ne), ORDERED("lt", lt), ORDERED("le", le), ORDERED("gt", gt), ORDERED("ge", ge),
    FLOATING("eq", eq), FLOATING("ne", fne), FLOATING("lt", lt), FLOATING("le", le), FLOATING("gt", gt), FLOATING("ge", ge),
    FLOATING("equ", equ), FLOATING("neu", neu), FLOATING("ltu", ltu), FLOATING("leu", leu), FLOATING("gtu", gtu),
    FLOATING("geu", geu), FLOATING("num", num), FLOATING("nan", isnan_), {"setp.half", setp_half},
    {"mov.pred", mov_pred}, {"not.pred", not_pred}, {"and.pred", and_pred}, {"or.pred", or_pred}, {"xor.pred", xor_pred},
    {"elect", elect}, {"vote", vote}, {"activemask", activemask}, {"shfl", shfl}, {"redux", redux},
    {"match.b32", match<u32>}, {"match.b64", match<u64>}, {"bra", bra}, {"ret", ret}, {"trap", trap}, {"nop", nop},
    {"pause", pause}, {"converge", converge}, {"all_lanes", all_lanes}, {"bar", bar}, {"bar.result", bar_result}, {"clock64", clock64_}, {"clock32", clock32_},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
