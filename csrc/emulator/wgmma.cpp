// PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async, fence, commit_group, wait_group.
//
// Warp i of the warpgroup owns rows 16 i to 16 i + 15 of the 64. An operation belongs to the whole warpgroup: it is complete
// when all four parts are, so a warp that waits for it first waits until the other three have issued theirs. It takes
// effect at the first such wait; until then the accumulator registers keep their old values.
#include <algorithm>

#include "async_copy.h"
#include "lanes.h"
#include "matrix_descriptor.h"

namespace emu {

struct WgmmaPending : AsyncOp {
    const Op* op;
    uint32_t group, clock, mask, sequence;
    uint64_t a, b;
    bool accumulate;
    void run() override;
};

namespace {

// d registers, a registers (4) or descriptor, b descriptor, scale-d predicate;
// imm: n, element type (0 f16, 1 bf16, 2 tf32, 3 e4m3, 4 e5m2), A in registers, negate A, negate B, A MN-major, B MN-major, fp32 result
Element element_of(int64_t t) {
    static const Element table[] = {Element::f16, Element::bf16, Element::tf32, Element::e4m3, Element::e5m2};
    return table[t];
}

Next mma(Warp& w, const Op& o, uint32_t m) {
    if (w.live & ~w.groups[w.current].mask) return Next::converge;
    stream_agent(w, w.wgmma, "wgmma operations");
    auto p = std::make_shared<WgmmaPending>();
    uint32_t nd = uint32_t(o.imm[0]) / (o.imm[7] ? 2 : 4), na = o.imm[2] ? 4 : 1, l = uint32_t(lowest(m));
    p->op = &o;
    p->mask = m;
    p->group = w.wgmma_groups;
    p->sequence = w.wgmma_issued++;
    w.cta->cluster->events++;  // a peer may wait for this
    p->clock = w.wgmma.clock;
    if (!o.imm[2]) p->a = w.src<uint64_t>(o.x[nd])[l];
    p->b = w.src<uint64_t>(o.x[nd + na])[l];
    p->accumulate = w.pred(o.x[nd + na + 1]) >> l & 1;
    p->issued = publish(w);
    p->pc = w.pc();
    p->warp = &w;
    w.wgmmas.push_back(p);
    return Next::advance;
}
Next commit(Warp& w, const Op&, uint32_t) {
    w.wgmma_groups++;
    w.wgmma.clock++;
    return Next::advance;
}
// The four warps of w's warpgroup, or those that exist.
std::vector<Warp*> warpgroup(Warp& w) {
    std::vector<Warp*> out;
    for (uint32_t i = w.id / 4 * 4; i < w.id / 4 * 4 + 4 && i < w.cta->warps.size(); i++) out.push_back(w.cta->warps[i]);
    return out;
}
Next wait(Warp& w, const Op& o, uint32_t) {  // imm: groups that may stay pending
    uint32_t n = uint32_t(o.imm[0]), up_to = w.wgmma_groups > n ? w.wgmma_groups - n : 0, sequence = w.wgmma_retired;
    for (auto& p : w.wgmmas)
        if (p->group < up_to) sequence = std::max(sequence, p->sequence + 1);
    auto peers = warpgroup(w);
    for (Warp* peer : peers)
        if (peer->wgmma_issued < sequence) {
            w.groups[w.current].asleep = true;
            w.seen_events = w.cta->cluster->events;
            return Next::blocked;
        }
    for (Warp* peer : peers) {
        size_t i = 0;
        for (; i < peer->wgmmas.size() && peer->wgmmas[i]->sequence < sequence; i++) {
            std::shared_ptr<AsyncOp> op = peer->wgmmas[i];
            run_async(*w.cta->cluster, op);
            peer->wgmma_issued_clock = op->issued;
            peer->wgmma_done_clock = peer->wgmmas[i]->clock;
        }
        peer->wgmmas.erase(peer->wgmmas.begin(), peer->wgmmas.begin() + long(i));
        peer->wgmma_retired = std::max(peer->wgmma_retired, sequence);
    }
    w.launch->fault_warp = &w;
    if (up_to)
        for (Warp* peer : peers)
            if (peer->wgmma_done_clock) {
                learn(w, *peer->wgmma_issued_clock);
                learn_epoch(w, peer->wgmma.agent, peer->wgmma_done_clock, true);
            }
    return Next::advance;
}

const HandlerName table[] = {{"wgmma.mma", mma}, {"wgmma.commit", commit}, {"wgmma.wait", wait}};
const Registrar registrar(table);

}  // namespace

void WgmmaPending::run() {
    const Op& o = *op;
    Warp& w = *warp;
    uint32_t n = uint32_t(o.imm[0]), nd = n / (o.imm[7] ? 2 : 4);
    Element e = element_of(o.imm[1]);
    uint32_t k = 32 / element_bytes(e), first = (w.id % 4) * 16;
    static thread_local MmaTile tile;
    Access access = stream_access(*this, w.wgmma.agent, clock, true, true);
    load_operand(*w.cta, MatrixDescriptor(b, true), 0, n, k, e, o.imm[6], tile, true, 0, o.imm[4] ? -1.f : 1.f, access);
    if (o.imm[2]) {
        for (uint32_t r = 0; r < 4; r++) {
            const uint32_t* s = w.src<uint32_t>(o.x[nd + r]);
            for (uint32_t l = 0; l < 32; l++) {
                uint32_t row = l / 4 + 8 * (r % 2), per = 4 / element_bytes(e), column = per * (l % 4) + (k / 2) * (r / 2);
                for (uint32_t h = 0; h < per; h++) {
                    uint32_t v = s[l] >> (8 * element_bytes(e) * h);
                    float f = e == Element::bf16 ? bf16_to_float(v & 0xffff) : e == Element::f16 ? half_to_float(v & 0xffff) : as_float(v & ~0x1fffu);
                    if (per == 4) fault("wgmma with FP8 operands in registers is not modelled");
                    tile.a[row][column + h] = o.imm[3] ? -f : f;
                }
            }
        }
    } else {
        load_operand(*w.cta, MatrixDescriptor(a, true), first, 16, k, e, o.imm[5], tile, false, 0, o.imm[3] ? -1.f : 1.f, access);
    }
    alignas(64) static thread_local float d[16][MMA_MAX_N];
    float* rows[MMA_MAX_M];
    for (uint32_t r = 0; r < 16; r++) rows[r] = d[r];
    multiply(tile, 16, n, k, rows, false, 1.f, 0);
    for (uint32_t j = 0; j < n / 8; j++)
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t x = o.imm[7] ? o.x[4 * j + i] : o.x[2 * j + i / 2];
            uint32_t* s = w.dst<uint32_t>(x);
            EACH_LANE(l, mask) {
                float sum = d[l / 4 + 8 * (i / 2)][8 * j + 2 * (l % 4) + i % 2];
                if (o.imm[7]) s[l] = bits(accumulate ? as_float(s[l]) + sum : sum);
                else {
                    uint32_t shift = 16 * (i % 2);
                    float old = half_to_float(s[l] >> shift);
                    s[l] = (s[l] & ~(0xffffu << shift)) | float_to_half(accumulate ? old + sum : sum) << shift;
                }
            }
        }
    char key[64];
    static const char* const names[] = {"f16", "bf16", "tf32", "e4m3", "e5m2"};
    snprintf(key, sizeof key, "wgmma %s %s 64x%ux%u", names[o.imm[1]], o.imm[2] ? "RS" : "SS", n, k);
    MmaCount& count = w.launch->mma[key];
    count.count += w.id % 4 == 0;
    count.flops += 2ull * 16 * n * k;
    count.useful += useful_flops(tile, 16, n, k);
}

}  // namespace emu
