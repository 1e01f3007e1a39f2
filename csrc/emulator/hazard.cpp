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

void Shadow::read(Cell& c, const Access& a, uint32_t address) {
    if (!c.write) {
        uninitialised_reads++;
    } else if ((c.write ^ make_epoch(a.agent, a.at, 0)) >> 20) {
        if (!before(c.write, a)) {
            report("read after write without a wait", c.write, a, address);
        } else if (a.async_proxy && a.cluster->agents.list[epoch_agent(c.write)].warp &&
                   a.clock->visible(epoch_agent(c.write)) < epoch_clock(c.write)) {
            report("generic write read by the async proxy without fence.proxy.async", c.write, a, address);
        }
    }
    uint64_t mine = make_epoch(a.agent, a.at, a.pc);
    // A read that this one covers (of the same agent, or ordered before it) need not be kept: who is ordered after
    // this read is ordered after that one.
    auto covered = [&](uint64_t e) { return epoch_agent(e) == a.agent ? epoch_clock(e) <= a.at : before(e, a); };
    if (!c.read0 || covered(c.read0)) {
        c.read0 = mine;
        return;
    }
    if (!c.read1 || covered(c.read1)) {
        c.read1 = mine;
        return;
    }
    if (!c.more) {
        overflow_.emplace_back();
        c.more = uint32_t(overflow_.size());
    }
    auto& list = overflow_[c.more - 1];
    for (auto& e : list)
        if (covered(e)) {
            e = mine;
            return;
        }
    list.push_back(mine);
}

void Shadow::write(Cell& c, const Access& a, uint32_t address) {
    if (c.write && (c.write ^ make_epoch(a.agent, a.at, 0)) >> 20 && !before(c.write, a))
        report("write after write without a wait", c.write, a, address);
    const char* war = "write after read without a wait";
    if (c.read0 && !before(c.read0, a)) report(war, c.read0, a, address);
    if (c.read1 && !before(c.read1, a)) report(war, c.read1, a, address);
    if (c.more) {
        for (uint64_t e : overflow_[c.more - 1])
            if (!before(e, a)) report(war, e, a, address);
        overflow_[c.more - 1].clear();
    }
    c.read0 = c.read1 = 0;
    c.write = make_epoch(a.agent, a.at, a.pc);
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

void Shadow::read_cells(uint32_t first, uint32_t n, const Access& a) {
    if (!a.clock) return;
    for (uint32_t i = first; i < first + n; i++) {
        Cell& c = cells_[i];
        if (c.split) {
            for (int b = 0; b < 4; b++) read(split_[c.split - 1].byte[b], a, i);
        } else {
            read(c, a, i);
        }
    }
}

void Shadow::write_cells(uint32_t first, uint32_t n, const Access& a) {
    if (!a.clock) return;
    for (uint32_t i = first; i < first + n; i++) {
        Cell& c = cells_[i];
        if (c.split) {
            for (int b = 0; b < 4; b++) write(split_[c.split - 1].byte[b], a, i);
            c = split_[c.split - 1].byte[0];  // one epoch again (the Split entry is not reused)
            c.read0 = c.read1 = c.more = c.split = 0;
        } else {
            write(c, a, i);
        }
    }
}

void Shadow::read_bytes(uint32_t address, uint32_t n, const Access& a) {
    if (!a.clock) return;
    uint32_t end = address + n;
    while (address < end) {
        uint32_t cell = address >> 2;
        if ((address & 3) == 0 && end - address >= 4) {
            uint32_t whole = (end - address) >> 2;
            read_cells(cell, whole, a);
            address += whole * 4;
            continue;
        }
        Cell& c = cells_[cell];
        if (!c.split) {
            // An unsplit word has one writer epoch; keeping the read on the whole word would make a later write to the
            // other bytes look ordered after it, so split unless the reader wrote it.
            if (c.write && !c.read0 && epoch_agent(c.write) == a.agent) {
                read(c, a, cell);
                address = std::min(end, (cell + 1) << 2);
                continue;
            }
            split(c);
        }
        read(split_[cells_[cell].split - 1].byte[address & 3], a, cell);
        address++;
    }
}

void Shadow::write_bytes(uint32_t address, uint32_t n, const Access& a) {
    if (!a.clock) return;
    uint32_t end = address + n;
    while (address < end) {
        uint32_t cell = address >> 2;
        if ((address & 3) == 0 && end - address >= 4) {
            uint32_t whole = (end - address) >> 2;
            write_cells(cell, whole, a);
            address += whole * 4;
            continue;
        }
        Cell& c = cells_[cell];
        if (!c.split) {
            bool same = c.write && !((c.write ^ make_epoch(a.agent, a.at, 0)) >> 20) && !c.read0;
            if (same) {
                address = std::min(end, (cell + 1) << 2);
                continue;
            }
            split(c);
        }
        write(split_[cells_[cell].split - 1].byte[address & 3], a, cell);
        address++;
    }
}

}  // namespace emu
