// PTX ISA, Data Movement: cp.async.bulk.tensor, cp.reduce.async.bulk.tensor (tile and gather4/scatter4 modes), Tensors,
// Swizzling modes; the 128-byte tensor map in the hardware's own format.
//
// The map's fields were found by varying one thing at a time (docs/emulator.md); its upper 64 bytes hold nothing.
#include "async_copy.h"
#include "lanes.h"

namespace emu {
namespace {

struct TensorMap {
    uint64_t address, stride[5];
    uint32_t rank, type, swizzle, element, box[5];
    uint64_t size[5];
};

TensorMap decode(const uint8_t* p) {
    uint32_t w[16];
    memcpy(w, p, sizeof w);
    TensorMap t = {};
    t.address = w[0] | uint64_t(w[1]) << 32;
    t.rank = (w[2] >> 4 & 7) + 1;
    t.type = w[2] >> 7 & 15;
    t.swizzle = w[2] >> 13 & 3;
    uint32_t interleave = w[2] >> 11 & 3;
    static const uint8_t bytes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 0, 0, 0, 0, 0};
    t.element = bytes[t.type];
    if (t.rank > 5 || !t.element) fault("not a tensor map: rank %u, type %u", t.rank, t.type);
    if (interleave) fault("tensor map: interleaved layouts are not modelled");
    if (t.address % 16) fault("tensor map: the address 0x%lx is not a multiple of 16", t.address);
    for (uint32_t k = 0; k < 5; k++) {
        t.size[k] = uint64_t(w[8 + k]) + 1;
        t.box[k] = k == 0 ? (w[13] >> 24) + 1 : (w[14] >> (8 * (k - 1)) & 255) + 1;
        t.stride[k] = k == 0 ? t.element : (w[2 + k] | uint64_t(w[7] >> (4 * (k - 1)) & 15) << 32) << 4;
        if (k >= t.rank) t.size[k] = 1, t.box[k] = 1, t.stride[k] = 0;
    }
    uint32_t inner = t.box[0] * t.element;
    if (inner % 16) fault("tensor map: an inner box of %u bytes is not a multiple of 16", inner);
    if (t.swizzle && inner > 16u << t.swizzle) fault("tensor map: an inner box of %u bytes exceeds the swizzle span of %u", inner, 16u << t.swizzle);
    if (w[2] >> 19 & 1) {
        if (t.swizzle != 3) fault("tensor map: a 32-byte atom without the 128-byte swizzle");
        t.swizzle = 4;
    }
    return t;
}

inline uint32_t swizzled(uint32_t a, uint32_t mode) {
    switch (mode) {
        case 1: return a ^ (a >> 3 & 0x10);
        case 2: return a ^ (a >> 3 & 0x30);
        case 3: return a ^ (a >> 3 & 0x70);
        case 4: return a ^ (a >> 2 & 0x60);  // 128 bytes with an atom of 32
    }
    return a;
}

struct Tile : AsyncOp {
    TensorMap map;
    int64_t reduction = -1;
    bool load, gather;
    int32_t at[5];
    uint32_t shared, barrier = 0, group = 0, multicast = 0;
    bool pair = false;

    uint32_t bytes() const {
        uint32_t n = map.element * (gather ? 4 : 1);
        for (uint32_t k = 0; k < map.rank; k++) n *= gather && k == 1 ? 1 : map.box[k];
        return n;
    }
    // One row of the box: `row` bytes of shared memory at linear offset `offset`, elements x... along dimension 0.
    void row(uint8_t* base, uint32_t first, uint32_t offset, bool inside, uint64_t address) {
        uint32_t n = map.box[0] * map.element;
        Launch& l = *warp->launch;
        int64_t x0 = at[0];
        int64_t lo = std::max<int64_t>(0, -x0), hi = std::min<int64_t>(map.box[0], int64_t(map.size[0]) - x0);
        if (!inside || hi <= lo) lo = hi = 0;
        uint32_t lo_byte = uint32_t(lo) * map.element, hi_byte = uint32_t(hi) * map.element;
        uint8_t* g = nullptr;
        if (hi_byte > lo_byte) g = global_pointer(l, address + uint64_t(x0 * int64_t(map.element)) + lo_byte, hi_byte - lo_byte, 1, !load);
        for (uint32_t b = 0; b < n; b += 16) {
            uint8_t* s = base + (swizzled(first + offset + b, map.swizzle) - first);
            uint32_t from = std::max(b, lo_byte), to = std::min(b + 16, hi_byte);
            if (load && (from > b || to < b + 16)) memset(s, 0, 16);
            if (from >= to) continue;
            uint8_t *sp = s + (from - b), *gp = g + (from - lo_byte);
            if (load) memcpy(sp, gp, to - from);
            else if (reduction < 0) memcpy(gp, sp, to - from);
            else {
                static const int64_t type[16] = {T_U8, T_U16, T_U32, T_S32, T_U64, T_S64, T_F16, T_F32, T_F32, T_F64, T_BF16};
                reduce_bytes(gp, sp, to - from, reduction, type[map.type]);
            }
        }
    }
    void transfer(uint8_t* base, uint32_t first) {
        uint32_t offset = 0, inner = map.box[0] * map.element;
        if (gather) {  // a column and four rows
            for (int i = 0; i < 4; i++, offset += inner) {
                int64_t y = at[1 + i];
                bool inside = y >= 0 && uint64_t(y) < map.size[1];
                row(base, first, offset, inside, map.address + uint64_t(y * int64_t(map.stride[1])));
            }
            return;
        }
        for (uint32_t e = 0; e < map.box[4]; e++)
            for (uint32_t d = 0; d < map.box[3]; d++)
                for (uint32_t c = 0; c < map.box[2]; c++)
                    for (uint32_t b = 0; b < map.box[1]; b++, offset += inner) {
                        uint32_t i[5] = {0, b, c, d, e};
                        bool inside = true;
                        uint64_t a = map.address;
                        for (uint32_t k = 1; k < map.rank; k++) {
                            int64_t x = int64_t(at[k]) + i[k];
                            inside &= x >= 0 && uint64_t(x) < map.size[k];
                            a += uint64_t(x * int64_t(map.stride[k]));
                        }
                        row(base, first, offset, inside, a);
                    }
    }
    void run() override {
        Cluster& c = *warp->cta->cluster;
        uint32_t n = bytes();
        Counters& counters = c.launch->counters;
        (reduction >= 0 ? counters.tma_reduce : load ? counters.tma_load : counters.tma_store) += n;
        if (!load) {
            Access a = stream_access(*this, warp->bulk.agent, group, true, false);
            uint8_t* p = shared_pointer(c, shared, n, 16);
            c.cta_at(shared)->shared_shadow.read_bytes(shared & SHARED_OFFSET_MASK, n, a);
            transfer(p, shared);
            return;
        }
        uint32_t targets = multicast ? multicast : 1u << (shared >> 24);
        for (uint32_t r = 0; r < 16; r++) {
            if (!(targets >> r & 1)) continue;
            uint32_t to = (shared & SHARED_OFFSET_MASK) | r << 24;
            uint32_t home = !multicast ? barrier >> 24 : pair ? (r & ~1u) | (barrier >> 24 & 1) : r;
            MBarrier& b = mbarrier_at(c, (barrier & SHARED_OFFSET_MASK) | home << 24, nullptr);
            uint8_t* p = shared_pointer(c, to, n, 128);
            c.cta_at(to)->shared_shadow.write_bytes(to & SHARED_OFFSET_MASK, n, tracked_access(*this, b, true));
            transfer(p, to);
            mbarrier_complete_tx(c, b, n, issued.get());
        }
    }
};

// shared address, map, mbarrier (loads), cta mask (may be absent), coordinates;
// imm: dimensions, load, offset of shared, of mbarrier, reduction (-1: none), gather4/scatter4, cta_group::2
Next tensor_copy(Warp& w, const Op& o, uint32_t m) {
    EACH_LANE(l, m) {
        auto op = std::make_shared<Tile>();
        uint64_t map = w.src<uint64_t>(o.x[1])[l];
        if (map % 64) fault("the tensor map at 0x%lx is not aligned to 64 bytes", map);
        op->map = decode(reinterpret_cast<const uint8_t*>(map));
        op->load = o.imm[1];
        op->gather = o.imm[5];
        uint32_t dims = uint32_t(o.imm[0]), coordinates = op->gather ? 5 : dims;
        if (op->map.rank != dims) fault("a %uD copy through a tensor map of rank %u", dims, op->map.rank);
        for (uint32_t k = 0; k < coordinates; k++) op->at[k] = int32_t(w.src<uint32_t>(o.x[4 + k])[l]);
        op->shared = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[2]);
        op->reduction = o.imm[4];
        op->pair = o.imm[6];
        uint32_t alignment = op->load || op->map.swizzle ? 128 : 16;
        if (op->shared % alignment) fault("shared address 0x%x of a tensor copy is not a multiple of %u", op->shared, alignment);
        shared_pointer(*w.cta->cluster, op->shared, op->bytes(), 16);
        if (op->load) {
            op->barrier = w.src<uint32_t>(o.x[2])[l] + uint32_t(o.imm[3]);
            if (o.x[3] != NONE) op->multicast = w.src<uint32_t>(o.x[3])[l] & 0xffff;
            mbarrier_at(*w.cta->cluster, op->barrier, &w);
            submit(w, op);
        } else {
            stream_agent(w, w.bulk, "bulk copies");
            op->group = add_store(w, op);
        }
    }
    return Next::advance;
}

// tensormap.replace: address, value; imm: offset, shared, first word, shift, bits, second word (its low bits, or -1), add
Next replace(Warp& w, const Op& o, uint32_t m) {
    Cluster& c = *w.cta->cluster;
    EACH_LANE(l, m) {
        uint64_t value = w.src<uint64_t>(o.x[1])[l] + uint64_t(o.imm[6]);
        uint8_t* p;
        if (o.imm[1]) {
            uint32_t a = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
            p = shared_pointer(c, a, 128, 128);
            c.cta_at(a)->shared_shadow.write_bytes((a & SHARED_OFFSET_MASK) + 4 * uint32_t(o.imm[2]), 4, warp_access(w));
        } else {
            p = global_pointer(*w.launch, w.src<uint64_t>(o.x[0])[l] + uint64_t(o.imm[0]), 128, 128, true);
        }
        auto set = [&](int64_t word, uint32_t shift, uint32_t bits, uint32_t v) {
            uint32_t mask = (bits == 32 ? FULL : (1u << bits) - 1) << shift, x;
            memcpy(&x, p + 4 * word, 4);
            x = (x & ~mask) | (v << shift & mask);
            memcpy(p + 4 * word, &x, 4);
        };
        uint32_t bits = uint32_t(o.imm[4]);
        if (o.imm[5] < 0) {
            set(o.imm[2], uint32_t(o.imm[3]), bits, uint32_t(value));
        } else if (bits == 64) {  // the address
            set(o.imm[2], 0, 32, uint32_t(value));
            set(o.imm[5], 0, 32, uint32_t(value >> 32));
        } else {  // a stride: 32 bits of it, above them 4 in word 7
            value >>= 4;
            set(o.imm[2], 0, 32, uint32_t(value));
            set(7, uint32_t(o.imm[5]), 4, uint32_t(value >> 32));
        }
    }
    return Next::advance;
}

// tensormap.cp_fenceproxy: 128 bytes of shared memory to global memory; to, from; imm: offsets
Next publish_map(Warp& w, const Op& o, uint32_t m) {
    if (w.live & ~w.groups[w.current].mask) return Next::converge;
    uint32_t l = uint32_t(lowest(m)), from = w.src<uint32_t>(o.x[1])[l] + uint32_t(o.imm[1]);
    Cluster& c = *w.cta->cluster;
    const uint8_t* p = shared_pointer(c, from, 128, 128);
    c.cta_at(from)->shared_shadow.read_bytes(from & SHARED_OFFSET_MASK, 128, warp_access(w));
    memcpy(global_pointer(*w.launch, w.src<uint64_t>(o.x[0])[l] + uint64_t(o.imm[0]), 128, 128, true), p, 128);
    return Next::advance;
}

const HandlerName table[] = {{"tensor.copy", tensor_copy}, {"tensormap.replace", replace}, {"tensormap.publish", publish_map}};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
