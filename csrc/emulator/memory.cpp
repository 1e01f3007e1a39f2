// PTX ISA, Instruction Set: ld, st, atom, red, cvta, isspacep, mapa, getctarank; State Spaces.
#include <limits>

#include "lanes.h"

namespace emu {
namespace {

enum Space : int64_t { GLOBAL = 0, SHARED = 1, LOCAL = 2, GENERIC = 3 };

uint8_t* local_pointer(Warp& w, uint32_t lane, uint64_t a, uint32_t bytes, uint32_t alignment) {
    uint32_t size = w.launch->program->local_bytes;
    if (a % alignment || a + bytes > size) fault("local address 0x%lx (+%u bytes) of lane %u: %u bytes of local memory", a, bytes, lane, size);
    return w.local.data() + size_t(lane) * size + a;
}

// Runs f for each lane; an error says which lane it was.
template <class F> void each_lane(uint32_t m, F f) {
    uint32_t lane = 0;
    try {
        EACH_LANE(l, m) f(lane = l);
    } catch (const Fault& e) {
        throw Fault(e.what() + (", lane " + std::to_string(lane)));
    }
}

// Resolves the lanes' addresses and tells the shadow of shared memory, run by run of adjacent bytes.
template <bool WRITE> void resolve(Warp& w, const Op& o, uint32_t m, int64_t space, int64_t offset, uint32_t bytes, uint8_t** out, bool atomic = false) {
    Cluster& c = *w.cta->cluster;
    Counters& n = w.launch->counters;
    uint32_t shared[32], shared_mask = 0;
    if (space == SHARED) {
        const uint32_t* a = w.src<uint32_t>(o.x[0]);
        Cta& own = *w.cta;
        each_lane(m, [&](uint32_t l) {
            uint32_t at = a[l] + uint32_t(offset), local = at & SHARED_OFFSET_MASK;
            shared[l] = at;
            if ((at >> 24) == own.rank && !(local & (bytes - 1)) && local >= SHARED_BASE && local + bytes <= own.shared.size())
                out[l] = own.shared.data() + local;
            else
                out[l] = shared_pointer(c, at, bytes, bytes);
        });
        shared_mask = m;
    } else {
        const uint64_t* a = w.src<uint64_t>(o.x[0]);
        Launch& launch = *w.launch;
        each_lane(m, [&](uint32_t l) {
            uint64_t at = a[l] + uint64_t(offset);
            uint64_t top = at & 0xffff000000000000ull;
            if (space == LOCAL || (space == GENERIC && top == GENERIC_LOCAL)) {
                out[l] = local_pointer(w, l, at & 0xffffffffu, bytes, bytes);
            } else if (space == GENERIC && top == GENERIC_SHARED) {
                shared[l] = uint32_t(at);
                out[l] = shared_pointer(c, shared[l], bytes, bytes);
                shared_mask |= 1u << l;
            } else {
                out[l] = global_pointer(launch, at, bytes, bytes, WRITE);
            }
        });
        uint64_t moved = uint64_t(__builtin_popcount(m & ~shared_mask)) * bytes;
        (WRITE ? n.global_store : n.global_load) += moved;
    }
    if (!shared_mask) return;
    (WRITE ? n.shared_store : n.shared_load) += uint64_t(__builtin_popcount(shared_mask)) * bytes;
    if (w.launch->profile) {  // bank conflicts: passes of 32 banks of 4 bytes, wide accesses in parts of 128 bytes
        uint32_t lanes_a_pass = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
        for (uint32_t first = 0; first < 32; first += lanes_a_pass) {
            uint32_t words[32][4], count[32] = {}, worst = 0;
            for (uint32_t l = first; l < first + lanes_a_pass; l++) {
                if (!(shared_mask >> l & 1)) continue;
                for (uint32_t b = 0; b < (bytes + 3) / 4; b++) {
                    uint32_t word = (shared[l] >> 2) + b, bank = word & 31;
                    bool seen = false;
                    for (uint32_t i = 0; i < std::min(count[bank], 4u); i++) seen |= words[bank][i] == word;
                    if (seen) continue;
                    if (count[bank] < 4) words[bank][count[bank]] = word;
                    worst = std::max(worst, ++count[bank]);
                }
            }
            n.shared_passes += worst;
            n.shared_accesses += worst != 0;
        }
    }
    if (!w.launch->check) return;
    Access access = warp_access(w);
    access.atomic = atomic;
    uint32_t begin = 0, end = 0;
    auto flush_run = [&] {
        if (begin == end) return;
        Shadow& s = c.cta_at(begin)->shared_shadow;
        if (WRITE) s.write_bytes(begin & SHARED_OFFSET_MASK, end - begin, access);
        else s.read_bytes(begin & SHARED_OFFSET_MASK, end - begin, access);
    };
    EACH_LANE(l, shared_mask) {
        if (shared[l] == end && end != begin) end += bytes;
        else if (end != begin && shared[l] >= begin && shared[l] + bytes <= end) continue;
        else flush_run(), begin = shared[l], end = begin + bytes;
    }
    flush_run();
}

template <class T> inline T read_as(const uint8_t* p) {
    T t;
    memcpy(&t, p, sizeof t);
    return t;
}

// operands: address, destinations; immediates: offset, elements, 64-bit destinations, space
template <class T> Next load(Warp& w, const Op& o, uint32_t m) {
    uint8_t* p[32];
    uint32_t n = uint32_t(o.imm[1]);
    resolve<false>(w, o, m, o.imm[3], o.imm[0], n * sizeof(T), p);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t x = o.x[1 + k];
        if (x == NONE) continue;
        if (o.imm[2]) {
            uint64_t* d = w.dst<uint64_t>(x);
            EACH_LANE(l, m) d[l] = uint64_t(int64_t(read_as<T>(p[l] + k * sizeof(T))));
        } else {
            uint32_t* d = w.dst<uint32_t>(x);
            EACH_LANE(l, m) d[l] = uint32_t(read_as<T>(p[l] + k * sizeof(T)));
        }
    }
    return Next::advance;
}

// operands: address, sources; immediates: offset, elements, 64-bit sources, space
template <class T> Next store(Warp& w, const Op& o, uint32_t m) {
    uint8_t* p[32];
    uint32_t n = uint32_t(o.imm[1]);
    resolve<true>(w, o, m, o.imm[3], o.imm[0], n * sizeof(T), p);
    for (uint32_t k = 0; k < n; k++) {
        if (o.imm[2]) {
            const uint64_t* s = w.src<uint64_t>(o.x[1 + k]);
            EACH_LANE(l, m) {
                T t = T(s[l]);
                memcpy(p[l] + k * sizeof(T), &t, sizeof t);
            }
        } else {
            const uint32_t* s = w.src<uint32_t>(o.x[1 + k]);
            EACH_LANE(l, m) {
                T t = T(s[l]);
                memcpy(p[l] + k * sizeof(T), &t, sizeof t);
            }
        }
    }
    return Next::advance;
}

// operands: destinations; immediates: offset in the parameter block, elements, 64-bit destinations
template <class T> Next load_param(Warp& w, const Op& o, uint32_t m) {
    for (uint32_t k = 0; k < uint32_t(o.imm[1]); k++) {
        if (o.x[k] == NONE) continue;
        T t = read_as<T>(w.launch->params + o.imm[0] + k * sizeof(T));
        if (o.imm[2]) {
            uint64_t* d = w.dst<uint64_t>(o.x[k]);
            EACH_LANE(l, m) d[l] = uint64_t(int64_t(t));
        } else {
            uint32_t* d = w.dst<uint32_t>(o.x[k]);
            EACH_LANE(l, m) d[l] = uint32_t(t);
        }
    }
    return Next::advance;
}
Next param_address(Warp& w, const Op& o, uint32_t m) {  // imm: offset
    uint64_t* d = w.dst<uint64_t>(o.x[0]);
    EACH_LANE(l, m) d[l] = reinterpret_cast<uint64_t>(w.launch->params + o.imm[0]);
    return Next::advance;
}
Next shared_address32(Warp& w, const Op& o, uint32_t m) {  // imm: offset from the CTA's first shared byte
    uint32_t* d = w.dst<uint32_t>(o.x[0]);
    EACH_LANE(l, m) d[l] = w.cta->address(SHARED_BASE + uint32_t(o.imm[0]));
    return Next::advance;
}
Next shared_address64(Warp& w, const Op& o, uint32_t m) {
    uint64_t* d = w.dst<uint64_t>(o.x[0]);
    EACH_LANE(l, m) d[l] = w.cta->address(SHARED_BASE + uint32_t(o.imm[0]));
    return Next::advance;
}
Next to_window(Warp& w, const Op& o, uint32_t m) {  // cvta: imm: the window's high bits
    uint64_t high = uint64_t(o.imm[0]);
    return map1<uint64_t, uint64_t>(w, o, m, [=](uint64_t a) { return (a & 0xffffffffu) | high; });
}
Next from_window(Warp& w, const Op& o, uint32_t m) {  // cvta.to.shared / local
    return map1<uint64_t, uint64_t>(w, o, m, [](uint64_t a) { return a & 0xffffffffu; });
}
Next isspacep(Warp& w, const Op& o, uint32_t m) {  // imm: space
    const uint64_t* a = w.src<uint64_t>(o.x[1]);
    uint32_t r = 0;
    EACH_LANE(l, m) {
        uint64_t top = a[l] & 0xffff000000000000ull;
        int64_t space = top == GENERIC_SHARED ? SHARED : top == GENERIC_LOCAL ? LOCAL : GLOBAL;
        r |= uint32_t(space == o.imm[0]) << l;
    }
    return w.set_pred(o.x[0], r, m), Next::advance;
}
Next mapa32(Warp& w, const Op& o, uint32_t m) {
    return map2<uint32_t, uint32_t, uint32_t>(w, o, m, [](uint32_t a, uint32_t r) { return (a & SHARED_OFFSET_MASK) | r << 24; });
}
Next mapa64(Warp& w, const Op& o, uint32_t m) {
    return map2<uint64_t, uint64_t, uint32_t>(w, o, m, [](uint64_t a, uint32_t r) { return (a & ~uint64_t(0xff000000u)) | uint64_t(r) << 24; });
}
Next getctarank(Warp& w, const Op& o, uint32_t m) {
    return map1<uint32_t, uint32_t>(w, o, m, [](uint32_t a) { return a >> 24; });
}

// ------------------------------------------------------------------------------------------------ atom, red

enum Atomic : int64_t { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };

template <class T> T combine(int64_t op, T old, T b, T c) {
    switch (op) {
        case A_ADD: return T(old + b);
        case A_MIN: return old < b ? old : b;
        case A_MAX: return old > b ? old : b;
        case A_EXCH: return b;
        case A_CAS: return old == b ? c : old;
        default: break;
    }
    if constexpr (std::is_integral_v<T>) {
        switch (op) {
            case A_AND: return T(old & b);
            case A_OR: return T(old | b);
            case A_XOR: return T(old ^ b);
            case A_INC: return old >= b ? T(0) : T(old + 1);
            case A_DEC: return old == 0 || old > b ? b : T(old - 1);
            default: break;
        }
    }
    fault("atomic operation %ld does not exist for this type", op);
}
// N values of f16 or bf16 in a word
template <bool BF, int N> struct Halves {
    using V = std::conditional_t<N == 2, uint32_t, uint16_t>;
    static V combine(int64_t op, uint32_t old, uint32_t b) {
        uint32_t r = 0;
        for (int h = 0; h < N; h++) {
            uint32_t x = old >> (16 * h) & 0xffff, y = b >> (16 * h) & 0xffff;
            float f = BF ? bf16_to_float(x) : half_to_float(x), g = BF ? bf16_to_float(y) : half_to_float(y);
            if (op > A_MAX) fault("atomic operation %ld does not exist for this type", op);
            float v = op == A_ADD ? f + g : op == A_MIN ? std::fmin(f, g) : std::fmax(f, g);
            r |= (BF ? float_to_bf16(v) : float_to_half(v)) << (16 * h);
        }
        return V(r);
    }
};
template <class T> struct Plain {
    using V = T;
};

// operands: address, n destinations (may be absent), n sources, for cas n more; immediates: offset, n, operation, space
template <class T> Next atomic(Warp& w, const Op& o, uint32_t m) {
    using V = typename T::V;
    uint8_t* p[32];
    uint32_t n = uint32_t(o.imm[1]);
    int64_t op = o.imm[2];
    resolve<true>(w, o, m, o.imm[3], o.imm[0], n * sizeof(V), p, true);
    w.launch->counters.atomics += uint64_t(__builtin_popcount(m)) * n;
    w.launch->counters.atomic_bytes += uint64_t(__builtin_popcount(m)) * n * sizeof(V);
    Slot<V> old_value[32];
    for (uint32_t k = 0; k < n; k++) {
        const Slot<V>* b = w.src<Slot<V>>(o.x[1 + n + k]);
        const Slot<V>* c = op == A_CAS ? w.src<Slot<V>>(o.x[1 + 2 * n + k]) : b;
        EACH_LANE(l, m) {
            V old = read_as<V>(p[l] + k * sizeof(V)), r;
            if constexpr (std::is_same_v<T, Plain<V>>) r = combine<V>(op, old, from_slot<V>(b[l]), from_slot<V>(c[l]));
            else r = T::combine(op, old, b[l]);
            memcpy(p[l] + k * sizeof(V), &r, sizeof r);
            old_value[l] = to_slot<V>(old);
        }
        if (o.x[1 + k] != NONE) {
            Slot<V>* d = w.dst<Slot<V>>(o.x[1 + k]);
            EACH_LANE(l, m) d[l] = old_value[l];
        }
    }
    w.cta->cluster->events++;
    return Next::advance;
}

const HandlerName table[] = {
    {"ld.u8", load<uint8_t>}, {"ld.s8", load<int8_t>}, {"ld.u16", load<uint16_t>}, {"ld.s16", load<int16_t>}, {"ld.u32", load<uint32_t>},
    {"ld.s32", load<int32_t>}, {"ld.u64", load<uint64_t>}, {"st.u8", store<uint8_t>}, {"st.u16", store<uint16_t>},
    {"st.u32", store<uint32_t>}, {"st.u64", store<uint64_t>}, {"ldparam.u8", load_param<uint8_t>}, {"ldparam.s8", load_param<int8_t>},
    {"ldparam.u16", load_param<uint16_t>}, {"ldparam.s16", load_param<int16_t>}, {"ldparam.u32", load_param<uint32_t>},
    {"ldparam.s32", load_param<int32_t>}, {"ldparam.u64", load_param<uint64_t>}, {"param_address", param_address},
    {"shared_address.u32", shared_address32}, {"shared_address.u64", shared_address64}, {"to_window", to_window},
    {"from_window", from_window}, {"isspacep", isspacep}, {"mapa.u32", mapa32}, {"mapa.u64", mapa64}, {"getctarank", getctarank},
    {"atom.u32", atomic<Plain<uint32_t>>}, {"atom.s32", atomic<Plain<int32_t>>}, {"atom.u64", atomic<Plain<uint64_t>>},
    {"atom.s64", atomic<Plain<int64_t>>}, {"atom.u16", atomic<Plain<uint16_t>>}, {"atom.f32", atomic<Plain<float>>},
    {"atom.f64", atomic<Plain<double>>}, {"atom.f16x2", atomic<Halves<false, 2>>}, {"atom.bf16x2", atomic<Halves<true, 2>>},
    {"atom.f16", atomic<Halves<false, 1>>}, {"atom.bf16", atomic<Halves<true, 1>>},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
