// PTX ISA, Parallel Synchronization and Communication: mbarrier; barrier.cluster; fence.proxy.
//
// A phase completes when its pending arrivals and its pending transaction bytes are both zero. What the arriving agents
// know becomes known to whoever sees the phase completed.
#include "lanes.h"

namespace emu {

void cluster_arrive(Warp& w, bool relaxed);
Next cluster_wait(Warp& w);

MBarrier& mbarrier_at(Cluster& c, uint32_t a, Warp* user) {
    Cta* cta = c.cta_at(a);
    uint32_t offset = a & SHARED_OFFSET_MASK;
    if (offset % 8 || offset / 8 >= cta->mbarrier_at.size()) fault("0x%x is no address of an mbarrier", a);
    int32_t i = cta->mbarrier_at[offset / 8];
    if (i < 0 || !cta->mbarriers[size_t(i)]->valid) fault("the mbarrier at 0x%x is not initialised", a);
    MBarrier& b = *cta->mbarriers[size_t(i)];
    if (user && c.launch->check && epoch_agent(b.init_epoch) != user->agent && user->clock.at(epoch_agent(b.init_epoch)) < epoch_clock(b.init_epoch))
        c.launch->hazard("mbarrier used before its initialisation is ordered", "mbarrier", b.init_epoch, user->pc(), user, a);
    return b;
}

static void complete_phase(Cluster& c, MBarrier& b) {
    if (b.pending || b.tx) return;
    b.phase++;
    b.pending = b.count;
    if (c.launch->check) {
        b.released = std::move(b.arriving);
        b.arriving = Clock();
        b.released.set(b.agent, uint32_t(b.phase), true);
    }
    c.events++;
}

void mbarrier_arrive(Cluster& c, MBarrier& b, uint32_t count, const Clock* knowledge) {
    if (count > b.pending)
        fault("%u arrivals on the mbarrier at 0x%x, which expects %u more (of %u) in phase %lu", count, b.address, b.pending, b.count, b.phase);
    if (knowledge && c.launch->check) b.arriving.join(*knowledge);
    b.pending -= count;
    complete_phase(c, b);
}

void mbarrier_complete_tx(Cluster& c, MBarrier& b, int64_t bytes, const Clock* knowledge) {
    if (knowledge && c.launch->check) b.arriving.join(*knowledge);
    b.tx -= bytes;
    if (b.tx < -(1 << 20) || b.tx > (1 << 20)) fault("the transaction count of the mbarrier at 0x%x leaves its range: %ld", b.address, b.tx);
    complete_phase(c, b);
}

void Launch::hazard(const char* kind, const std::string& what, uint64_t earlier, uint32_t pc, Warp* w, uint32_t address) {
    uint64_t key = (uint64_t(epoch_pc(earlier)) << 40) ^ (uint64_t(pc) << 16) ^ uint64_t(kind[0] * 31 + kind[4]);
    auto found = hazard_index.find(key);
    if (found != hazard_index.end()) {
        hazards[found->second].count++;
        return;
    }
    hazard_index[key] = hazards.size();
    Cluster& c = *w->cta->cluster;
    hazards.push_back({kind, what, c.agents.list[epoch_agent(earlier)].name, c.agents.list[w->agent].name, epoch_pc(earlier), pc, w->cta->rank, address, 1});
}

namespace {

inline uint32_t address(Warp& w, uint32_t x, int64_t offset, uint32_t lane) { return w.src<uint32_t>(x)[lane] + uint32_t(offset); }

Next init(Warp& w, const Op& o, uint32_t m) {  // address, count; imm: offset
    EACH_LANE(l, m) {
        uint32_t a = address(w, o.x[0], o.imm[0], l), count = w.src<uint32_t>(o.x[1])[l];
        Cluster& c = *w.cta->cluster;
        shared_pointer(c, a, 8, 8);
        if (count < 1 || count >= 1u << 20) fault("mbarrier.init with a count of %u", count);
        Cta* cta = c.cta_at(a);
        int32_t& i = cta->mbarrier_at[(a & SHARED_OFFSET_MASK) / 8];
        if (i < 0) {
            i = int32_t(cta->mbarriers.size());
            cta->mbarriers.push_back(std::make_unique<MBarrier>());
            if (w.launch->check) {
                char name[64];
                snprintf(name, sizeof name, "operations tracked by mbarrier 0x%x", a);
                cta->mbarriers.back()->agent = c.agents.add(name, false);
            }
        }
        MBarrier& b = *cta->mbarriers[size_t(i)];
        if (b.valid && (b.pending != b.count || b.tx)) fault("mbarrier.init of the live mbarrier at 0x%x", a);
        b.address = a;
        b.count = b.pending = count;
        b.tx = 0;
        // a fresh object starts at an even phase; the clock of its agent goes on
        b.phase = (b.phase + 1) & ~uint64_t(1);
        b.valid = true;
        if (w.launch->check) {
            Access access = warp_access(w);
            cta->shared_shadow.write_bytes(a & SHARED_OFFSET_MASK, 8, access);
            b.init_epoch = make_epoch(access.agent, access.at, access.pc);
        }
    }
    return Next::advance;
}
Next inval(Warp& w, const Op& o, uint32_t m) {
    EACH_LANE(l, m) mbarrier_at(*w.cta->cluster, address(w, o.x[0], o.imm[0], l), &w).valid = false;
    return Next::advance;
}

// state (may be absent), address, count (may be absent), bytes (may be absent); imm: offset, drop, no arrival
Next arrive(Warp& w, const Op& o, uint32_t m) {
    Cluster& c = *w.cta->cluster;
    warp_access(w);
    EACH_LANE(l, m) {
        MBarrier& b = mbarrier_at(c, address(w, o.x[1], o.imm[0], l), &w);
        if (o.x[0] != NONE) w.dst<uint64_t>(o.x[0])[l] = b.phase;
        if (o.x[3] != NONE) b.tx += w.src<uint32_t>(o.x[3])[l];
        if (o.imm[2]) continue;
        uint32_t count = o.x[2] == NONE ? 1 : w.src<uint32_t>(o.x[2])[l];
        if (o.imm[1]) b.count -= count;
        mbarrier_arrive(c, b, count, &w.clock);
    }
    publish(w);
    return Next::advance;
}
Next complete_tx(Warp& w, const Op& o, uint32_t m) {  // address, bytes; imm: offset
    EACH_LANE(l, m) mbarrier_complete_tx(*w.cta->cluster, mbarrier_at(*w.cta->cluster, address(w, o.x[0], o.imm[0], l), &w), w.src<uint32_t>(o.x[1])[l], &w.clock);
    publish(w);
    return Next::advance;
}
// p, address, parity or state; imm: offset, parity form, try (sleeps)
Next wait(Warp& w, const Op& o, uint32_t m) {
    Cluster& c = *w.cta->cluster;
    uint32_t ok = 0;
    EACH_LANE(l, m) {
        MBarrier& b = mbarrier_at(c, address(w, o.x[1], o.imm[0], l), &w);
        bool done = o.imm[1] ? ((b.phase & 1) != (w.src<uint32_t>(o.x[2])[l] & 1)) : b.phase > w.src<uint64_t>(o.x[2])[l];
        if (!done) continue;
        ok |= 1u << l;
        learn(w, b.released);
        if (l_m == (l_m & -l_m)) break;
        uint32_t first = w.src<uint32_t>(o.x[1])[l];  // the usual case: all lanes wait for one barrier
        bool same = true;
        EACH_LANE(k, l_m) same &= w.src<uint32_t>(o.x[1])[k] == first && w.src<uint32_t>(o.x[2])[k] == w.src<uint32_t>(o.x[2])[l];
        if (same) {
            ok |= l_m;
            break;
        }
    }
    w.set_pred(o.x[0], ok, m);
    return ok == m || !o.imm[2] ? Next::advance : Next::yield;
}

Next fence_async(Warp& w, const Op&, uint32_t) {  // fence.proxy.async: what the warp knows becomes visible to the async proxy
    if (w.launch->check) {
        for (size_t i = 0; i < w.clock.order.size(); i++) w.clock.proxy[i] = std::max(w.clock.proxy[i], w.clock.order[i]);
        w.snapshot.reset();
        w.published = true;
    }
    return Next::advance;
}
Next fence_release(Warp& w, const Op&, uint32_t) {
    w.fenced = publish(w);
    return Next::advance;
}
Next cluster_arrive_(Warp& w, const Op& o, uint32_t m) {
    if (w.live & ~w.groups[w.current].mask & FULL) return Next::converge;
    (void)m;
    cluster_arrive(w, o.imm[0]);
    return Next::advance;
}
Next cluster_wait_(Warp& w, const Op&, uint32_t) {
    if (w.live & ~w.groups[w.current].mask) return Next::converge;
    return cluster_wait(w);
}

const HandlerName table[] = {
    {"mbarrier.init", init}, {"mbarrier.inval", inval}, {"mbarrier.arrive", arrive}, {"mbarrier.complete_tx", complete_tx},
    {"mbarrier.wait", wait}, {"fence.async", fence_async}, {"fence.release", fence_release},
    {"cluster.arrive", cluster_arrive_}, {"cluster.wait", cluster_wait_},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
