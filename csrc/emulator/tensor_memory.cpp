// PTX ISA, TensorCore 5th Generation: tensor memory (addressing, allocation), tcgen05.alloc, dealloc, ld, st, wait.
//
// A load fills its registers at once; that none of them is used before tcgen05.wait::ld is checked statically (analysis.py),
// because compilers move register copies above the wait. The shadow of tensor memory has a cell for 16 lanes of one column, the finest that any access distinguishes.
#include "tensor_memory.h"

#include <algorithm>

#include "lanes.h"

namespace emu {

void Cta::enable_tmem() {
    if (tmem_ready) return;
    tmem_ready = true;
    tmem.assign(size_t(TMEM_LANES) * TMEM_COLUMNS, TMEM_POISON);
    if (cluster->launch->check) tmem_shadow.reset(8 * TMEM_COLUMNS, 1, "tensor memory");
}

void check_columns(Cta& cta, uint32_t column, uint32_t n) {
    if (column + n > TMEM_COLUMNS) fault("tensor memory columns %u to %u: there are 512", column, column + n - 1);
    for (uint32_t c = column / 32; c <= (column + n - 1) / 32; c++)
        if (!(cta.tmem_columns >> c & 1)) fault("tensor memory column %u of CTA %u is not allocated", std::max(column, c * 32), cta.rank);
}

void shadow_columns(Cta& cta, uint32_t first_block, uint32_t blocks, uint32_t column, uint32_t n, bool write, const Access& a) {
    if (!a.clock) return;
    for (uint32_t b = first_block; b < first_block + blocks; b++) {
        if (write) cta.tmem_shadow.write_cells(b * TMEM_COLUMNS + column, n, a);
        else cta.tmem_shadow.read_cells(b * TMEM_COLUMNS + column, n, a);
    }
}

namespace {

bool whole_warp(Warp& w) { return !(w.live & ~w.groups[w.current].mask); }

Next alloc(Warp& w, const Op& o, uint32_t m) {  // shared address, columns; imm: offset
    if (!whole_warp(w)) return Next::converge;
    Cta& cta = *w.cta;
    uint32_t n = w.src<uint32_t>(o.x[1])[lowest(m)];
    if (n < 32 || n > 512 || (n & (n - 1))) fault("tcgen05.alloc of %u columns: a power of two from 32 to 512", n);
    if (cta.permit_relinquished) fault("tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    cta.enable_tmem();
    uint32_t want = (1u << (n / 32)) - 1;
    for (uint32_t c = 0; c + n <= 512; c += n) {  // naturally aligned, the first that fits
        if (cta.tmem_columns & (want << (c / 32))) continue;
        cta.tmem_columns |= want << (c / 32);
        cta.tmem_allocations.push_back({c, n});
        uint32_t a = w.src<uint32_t>(o.x[0])[lowest(m)] + uint32_t(o.imm[0]);
        uint8_t* p = shared_pointer(*cta.cluster, a, 4, 4);
        cta.cluster->cta_at(a)->shared_shadow.write_bytes(a & SHARED_OFFSET_MASK, 4, warp_access(w));
        memcpy(p, &c, 4);
        return Next::advance;
    }
    w.groups[w.current].asleep = true;  // blocks until somebody frees columns
    w.seen_events = cta.cluster->events;
    return Next::blocked;
}
Next dealloc(Warp& w, const Op& o, uint32_t m) {  // tensor address, columns
    if (!whole_warp(w)) return Next::converge;
    Cta& cta = *w.cta;
    uint32_t a = w.src<uint32_t>(o.x[0])[lowest(m)], n = w.src<uint32_t>(o.x[1])[lowest(m)];
    for (size_t i = 0; i < cta.tmem_allocations.size(); i++) {
        if (cta.tmem_allocations[i].first != (a & 0xffff)) continue;
        if (cta.tmem_allocations[i].second != n) fault("tcgen05.dealloc of %u columns at 0x%x, where %u were allocated", n, a, cta.tmem_allocations[i].second);
        shadow_columns(cta, 0, 8, a & 0xffff, n, true, warp_access(w));
        for (uint32_t lane = 0; lane < TMEM_LANES; lane++)
            for (uint32_t c = 0; c < n; c++) cta.tmem[lane * TMEM_COLUMNS + (a & 0xffff) + c] = TMEM_POISON;
        cta.tmem_columns &= ~(((1u << (n / 32)) - 1) << ((a & 0xffff) / 32));
        cta.tmem_allocations.erase(cta.tmem_allocations.begin() + long(i));
        cta.cluster->events++;
        return Next::advance;
    }
    fault("tcgen05.dealloc at 0x%x: nothing is allocated there", a);
}
Next relinquish(Warp& w, const Op&, uint32_t) {
    if (!whole_warp(w)) return Next::converge;
    w.cta->permit_relinquished = true;
    return Next::advance;
}

enum Shape : int64_t { S32x32b, S16x64b, S16x128b, S16x256b, S16x32bx2 };

// Lane and column of element j of `lane`'s vector, relative to the address.
inline void place(int64_t shape, uint32_t lane, uint32_t j, uint32_t split, uint32_t& row, uint32_t& column) {
    switch (shape) {
        case S32x32b: row = lane, column = j; return;
        case S16x64b: row = lane / 4 + 8 * (lane % 2), column = 2 * j + lane / 2 % 2; return;
        case S16x128b: row = lane / 4 + 8 * (j % 2), column = 4 * (j / 2) + lane % 4; return;
        case S16x256b: row = lane / 4 + 8 * (j / 2 % 2), column = 8 * (j / 4) + 2 * (lane % 4) + j % 2; return;
        default: row = lane % 16, column = j + (lane >= 16 ? split : 0);
    }
}
inline uint32_t width(int64_t shape, uint32_t n) {  // columns that n elements a lane span
    switch (shape) {
        case S32x32b: return n;
        case S16x64b: return 2 * n;
        case S16x128b: return 2 * n;
        case S16x256b: return 2 * n;
        default: return n;
    }
}

struct Target {
    uint32_t lane, column, blocks, columns;
};
Access tmem_access(Warp& w, Warp::Stream& s, const char* what) {
    stream_agent(w, s, what);
    Access a = warp_access(w);
    if (a.clock) a.agent = s.agent, a.at = s.clock;
    return a;
}
// Where a tcgen05.ld or st goes, checked, and told to the shadow.
Target locate(Warp& w, const Op& o, uint32_t m, bool write) {
    int64_t shape = o.imm[0];
    uint32_t elements = uint32_t(o.imm[1]) * (o.imm[2] ? 2 : 1), split = uint32_t(o.imm[4]);
    if (!w.cta->tmem_ready) fault("tensor memory is used before tcgen05.alloc");
    uint32_t a = w.src<uint32_t>(o.x[0])[lowest(m)] + uint32_t(o.imm[3]);
    Target t = {a >> 16, a & 0xffff, shape == S32x32b ? 2u : 1u, width(shape, elements)};
    uint32_t quadrant = (w.id % 4) * 32;
    // The ISA wants the address of a lane that the warp may access. Kernels that run on B200s give every warp the address
    // of lane 0 all the same, and each gets its own lanes.
    if (quadrant && t.lane + 16 * t.blocks <= 32) {
        note(w, "tensor memory address without the warp's lane", "tensor memory");
        t.lane += quadrant;
    }
    if (t.lane < quadrant || t.lane + 16 * t.blocks > quadrant + 32 || t.lane % 16)
        fault("warp %u (rank %u of its warpgroup) accesses tensor memory lane %u; it may access lanes %u to %u", w.id, w.id % 4, t.lane, quadrant, quadrant + 31);
    check_columns(*w.cta, t.column, t.columns);
    Access access = write ? tmem_access(w, w.tmem_store, "tcgen05.st") : tmem_access(w, w.tmem_load, "tcgen05.ld");
    shadow_columns(*w.cta, t.lane / 16, t.blocks, t.column, t.columns, write, access);
    if (shape == S16x32bx2) {
        check_columns(*w.cta, t.column + split, t.columns);
        shadow_columns(*w.cta, t.lane / 16, 1, t.column + split, t.columns, write, access);
    }
    return t;
}

// address, registers; imm: shape, registers, packed 16-bit, offset, column split of 16x32bx2
Next load(Warp& w, const Op& o, uint32_t m) {
    if (!whole_warp(w)) return Next::converge;
    int64_t shape = o.imm[0];
    uint32_t n = uint32_t(o.imm[1]), packed = uint32_t(o.imm[2]);
    Target t = locate(w, o, m, false);
    Cta& cta = *w.cta;
    if (w.launch->check) {  // one clock a load, so that its use can be learned of alone
        auto& known = w.tmem_load_clock;
        uint32_t clock = w.tmem_load.clock++, pc = w.pc();
        auto i = std::find_if(known.begin(), known.end(), [pc](auto& p) { return p.first == pc; });
        if (i == known.end()) known.push_back({pc, clock});
        else i->second = clock;
    }
    const uint32_t* memory = cta.tmem.data();
    w.launch->counters.tmem_load += uint64_t(n) * 128;
    for (uint32_t j = 0; j < n; j++) {
        uint32_t* d = w.dst<uint32_t>(o.x[1 + j]);
        EACH_LANE(l, m) {
            uint32_t row, column, v = 0;
            for (uint32_t h = 0; h <= packed; h++) {
                place(shape, l, j, uint32_t(o.imm[4]), row, column);
                if (packed) column = 2 * column + h;  // two adjacent columns of 16 bits each
                uint32_t cell = memory[(t.lane + row) * TMEM_COLUMNS + t.column + column];
                v |= packed ? (cell & 0xffff) << (16 * h) : cell;
            }
            d[l] = v;
        }
    }
    return Next::advance;
}
Next store(Warp& w, const Op& o, uint32_t m) {
    if (!whole_warp(w)) return Next::converge;
    int64_t shape = o.imm[0];
    uint32_t n = uint32_t(o.imm[1]), packed = uint32_t(o.imm[2]), elements = packed ? 2 * n : n;
    Target t = locate(w, o, m, true);
    Cta& cta = *w.cta;
    uint32_t* memory = cta.tmem.data();
    w.launch->counters.tmem_store += uint64_t(n) * 128;
    for (uint32_t e = 0; e < elements; e++) {
        uint32_t j = packed ? e / 2 : e, h = e % 2;
        const uint32_t* s = w.src<uint32_t>(o.x[1 + j]);
        EACH_LANE(l, m) {
            uint32_t row, column;
            place(shape, l, j, uint32_t(o.imm[4]), row, column);
            if (packed) column = 2 * column + h;
            memory[(t.lane + row) * TMEM_COLUMNS + t.column + column] = packed ? s[l] >> (16 * h) & 0xffff : s[l];
        }
    }
    return Next::advance;
}
// Wraps an operation that uses a register of a tcgen05.ld before tcgen05.wait::ld (which the static check reports): the
// hardware's scoreboard makes it wait for that load. The last immediates: the load's pc, the wrapped handler.
Next consume(Warp& w, const Op& o, uint32_t m) {
    if (w.launch->check && w.tmem_load.agent)
        for (auto& p : w.tmem_load_clock)
            if (p.first == uint32_t(o.imm[o.immediates - 2])) learn_epoch(w, w.tmem_load.agent, p.second, true);
    return reinterpret_cast<Handler>(o.imm[o.immediates - 1])(w, o, m);
}
Next wait_load(Warp& w, const Op&, uint32_t) {
    if (!whole_warp(w)) return Next::converge;
    learn_epoch(w, w.tmem_load.agent, w.tmem_load.clock++, true);
    w.tmem_load_clock.clear();
    return Next::advance;
}
Next wait_store(Warp& w, const Op&, uint32_t) {
    if (!whole_warp(w)) return Next::converge;
    learn_epoch(w, w.tmem_store.agent, w.tmem_store.clock++, true);
    return Next::advance;
}

const HandlerName table[] = {
    {"tmem.alloc", alloc}, {"tmem.dealloc", dealloc}, {"tmem.relinquish", relinquish}, {"tmem.ld", load}, {"tmem.st", store},
    {"tmem.consume", consume}, {"tmem.wait_ld", wait_load}, {"tmem.wait_st", wait_store},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
