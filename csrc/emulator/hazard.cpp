#include "hazard.h"

#include <algorithm>

#include "core.h"

namespace emu {

uint32_t Agents::add(std::string name, bool warp) {
    if (list.size() >= MAX_AGENTS) fault("more than %u warps, barriers and asynchronous streams in one cluster", MAX_AGENTS);
    list.push_back({std::move(name), warp});
    return uint32_t(list.size() - 1);
}

void Clock::join(const Clock& other) {
    size_t n = other.order.size();
    if (order.size() < n) order.resize(n), proxy.resize(n);
    uint32_t *o = order.data(), *p = proxy.data();
    const uint32_t *a = other.order.data(), *b = other.proxy.data();
    for (size_t i = 0; i < n; i++) o[i] = std::max(o[i], a[i]);
    for (size_t i = 0; i < n; i++) p[i] = std::max(p[i], b[i]);
}

void Clock::set(uint32_t agent, uint32_t clock, bool visible) {
    if (order.size() <= agent) order.resize(agent + 1), proxy.resize(agent + 1);
    order[agent] = std::max(order[agent], clock);
    if (visible) proxy[agent] = std::max(proxy[agent], clock);
}

Access warp_access(Warp& w) {
    Access a;
    if (!w.launch->check) return a;
    if (w.published) {
        w.published = false;
        w.snapshot.reset();
        w.clock.order[w.agent]++;
    }
    a.cluster = w.cta->cluster;
    a.warp = &w;
    a.clock = &w.clock;
    a.agent = w.agent;
    a.at = w.clock.order[w.agent];
    a.pc = w.pc();
    return a;
}

Snapshot publish(Warp& w) {
    static const Snapshot nothing = std::make_shared<Clock>();
    if (!w.launch->check) return nothing;
    w.published = true;
    if (!w.snapshot) w.snapshot = std::make_shared<Clock>(w.clock);
    return w.snapshot;
}

void learn(Warp& w, const Clock& c) {
    if (!w.launch->check || c.empty()) return;
    w.clock.join(c);
    w.snapshot.reset();
}

void learn_epoch(Warp& w, uint32_t agent, uint32_t clock, bool visible) {
    if (!w.launch->check || !agent) return;
    w.clock.set(agent, clock, visible);
    w.snapshot.reset();
}

uint32_t stream_agent(Warp& w, Warp::Stream& s, const char* what) {
    if (!s.agent && w.launch->check)
        s.agent = w.cta->cluster->agents.add(std::string(what) + " of warp " + std::to_string(w.id) + " of CTA " +
                                                 std::to_string(w.cta->rank),
                                             false);
    return s.agent;
}

void Shadow::reset(uint32_t cells, uint32_t unit, const char* name) {
    cells_.assign(cells, Cell());
    split_.clear();
    overflow_.clear();
    unit_ = unit;
    name_ = name;
}

inline bool Shadow::before(uint64_t e, const Access& a) const {
    uint32_t agent = epoch_agent(e);
    return (agent == a.agent && a.in_order) || a.clock->at(agent) >= epoch_clock(e);
}

void Shadow::report(const char* kind, uint64_t earlier, const Access& a, uint32_t address) {
    Launch& l = *a.cluster->launch;
    auto& list = a.cluster->agents.list;
    uint64_t key = (uint64_t(epoch_pc(earlier)) << 40) ^ (uint64_t(a.pc) << 16) ^ uint64_t(kind[0] * 31 + kind[1]) ^
                   (uint64_t(kind[2]) << 8);
    auto found = l.hazard_index.find(key);
    if (found != l.hazard_index.end()) {
        l.hazards[found->second].count++;
        return;
    }
    l.hazard_index[key] = l.hazards.size();
    l.hazards.push_back({kind, name_, list[epoch_agent(earlier)].name, list[a.agent].name, epoch_pc(earlier), a.pc,
                         a.warp ? a.warp->cta->rank : 0, address * unit_, 1});
}

template <class F> void Shadow::each_reader(Cell& c, F f) {
    if (c.read0) f(c.read0);
    if (c.read1) f(c.read1);
    if (c.more)
        for (uint64_t e : overflow_[c.more - 1]) f(e);
}

// Adds an epoch to those that a later write must come after. One that the access `a` covers (of the same agent, or
// ordered before it) need not be kept: who is ordered after `a` is ordered after that one.
void Shadow::keep(Cell& c, uint64_t epoch, const Access& a) {
    auto covered = [&](uint64_t e) { return epoch_agent(e) == a.agent ? epoch_clock(e) <= a.at : before(e, a); };
    if (!c.read0 || covered(c.read0)) {
        c.read0 = epoch;
        return;
    }
    if (!c.read1 || covered(c.read1)) {
        c.read1 = epoch;
        return;
    }
    if (!c.more) {
        overflow_.emplace_back();
        c.more = uint32_t(overflow_.size());
    }
    auto& list = overflow_[c.more - 1];
    for (auto& e : list)
        if (covered(e)) {
            e = epoch;
            return;
        }
    list.push_back(epoch);
}

void Shadow::read(Cell& c, const Access& a, uint32_t address) {
    const char* raw = "read after write without a wait";
    if (c.write && !a.made(c.write)) {
        if (!before(c.write, a)) {
            report(raw, c.write, a, address);
        } else if (a.async_proxy && a.cluster->agents.list[epoch_agent(c.write)].warp &&
                   a.clock->visible(epoch_agent(c.write)) < epoch_clock(c.write)) {
            report("generic write read by the async proxy without fence.proxy.async", c.write, a, address);
        }
    }
    if (c.write & EPOCH_ATOMIC)  // earlier atomic operations that the last one was not ordered after
        each_reader(c, [&](uint64_t e) {
            if (e & EPOCH_ATOMIC && !before(e, a)) report(raw, e, a, address);
        });
    if (!c.read0 || (epoch_agent(c.read0) == a.agent && epoch_clock(c.read0) <= a.at)) c.read0 = a.epoch();  // as keep()
    else keep(c, a.epoch(), a);
}

void Shadow::write(Cell& c, const Access& a, uint32_t address) {
    bool concurrent = c.write && !a.made(c.write) && !before(c.write, a), both_atomic = a.atomic && c.write & EPOCH_ATOMIC;
    if (concurrent && !both_atomic) report("write after write without a wait", c.write, a, address);
    each_reader(c, [&](uint64_t e) {
        if (!(a.atomic && e & EPOCH_ATOMIC) && !before(e, a)) report("write after read without a wait", e, a, address);
    });
    if (both_atomic && concurrent) {
        keep(c, c.write, a);
    } else if (!both_atomic) {
        if (c.more) overflow_[c.more - 1].clear();
        c.read0 = c.read1 = 0;
    }
    c.write = a.epoch();
}

Shadow::Split& Shadow::split(Cell& c) {
    if (!c.split) {
        Split s;
        for (int i = 0; i < 4; i++) {
            s.byte[i] = c;
            s.byte[i].split = 0;
            if (c.more && i) {
                overflow_.push_back(overflow_[c.more - 1]);
                s.byte[i].more = uint32_t(overflow_.size());
            }
        }
        split_.push_back(s);
        c.split = uint32_t(split_.size());
    }
    return split_[c.split - 1];
}

template <bool WRITE> void Shadow::cells(uint32_t first, uint32_t n, const Access& a) {
    if (!a.clock) return;
    for (uint32_t i = first; i < first + n; i++) {
        Cell& c = cells_[i];
        if (!c.split) {
            if constexpr (WRITE) write(c, a, i);
            else read(c, a, i);
            continue;
        }
        Cell* parts = split_[c.split - 1].byte;
        for (int b = 0; b < 4; b++) {
            if constexpr (WRITE) write(parts[b], a, i);
            else read(parts[b], a, i);
        }
        if (WRITE && !a.atomic) {  // one epoch again (the Split entry is not reused)
            c = parts[0];
            c.read0 = c.read1 = c.more = c.split = 0;
        }
    }
}

template <bool WRITE> void Shadow::bytes(uint32_t address, uint32_t n, const Access& a) {
    if (!a.clock) return;
    uint32_t end = address + n;
    while (address < end) {
        uint32_t cell = address >> 2;
        if ((address & 3) == 0 && end - address >= 4) {
            uint32_t whole = (end - address) >> 2;
            cells<WRITE>(cell, whole, a);
            address += whole * 4;
            continue;
        }
        Cell& c = cells_[cell];
        if (!c.split) {
            // A word with one epoch may keep it if this access changes nothing that another byte's later access needs:
            // its own writer reads it, or writes it again at the same clock. Everything else tells the bytes apart.
            bool whole = c.write && !c.read0 && (WRITE ? a.made(c.write) : epoch_agent(c.write) == a.agent);
            if (whole) {
                if constexpr (!WRITE) read(c, a, cell);
                address = std::min(end, (cell + 1) << 2);
                continue;
            }
            split(c);
        }
        Cell& byte = split_[cells_[cell].split - 1].byte[address & 3];
        if constexpr (WRITE) write(byte, a, cell);
        else read(byte, a, cell);
        address++;
    }
}

template void Shadow::cells<false>(uint32_t, uint32_t, const Access&);
template void Shadow::cells<true>(uint32_t, uint32_t, const Access&);
template void Shadow::bytes<false>(uint32_t, uint32_t, const Access&);
template void Shadow::bytes<true>(uint32_t, uint32_t, const Access&);

}  // namespace emu
