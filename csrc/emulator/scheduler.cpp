// Warps, clusters and time: who runs next, when an asynchronous operation takes effect, what a deadlock looks like.
//
// A cluster runs to completion before the next one starts (the CUDA model promises no more). In a cluster warps run in a
// seeded random order, a random number of instructions at a time, some of them held back for a while; an asynchronous
// operation takes effect when somebody waits for its group, at a random moment, or, at the latest, when no warp can go
// on without it. Lanes of a warp diverge into groups; the group at the lowest pc runs first, so that groups meet again
// where the compiler laid out the join, and a group that fails a wait lets its siblings run.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>

#include "core.h"

namespace emu {

void fault(const char* format, ...) {
    char text[1024];
    va_list a;
    va_start(a, format);
    vsnprintf(text, sizeof text, format, a);
    va_end(a);
    throw Fault(text);
}

static std::unordered_map<std::string, Handler>& handlers() {
    static std::unordered_map<std::string, Handler> table;
    return table;
}
void register_handlers(const HandlerName* table, size_t n) {
    for (size_t i = 0; i < n; i++) handlers()[table[i].name] = table[i].fn;
}
Handler find_handler(const char* name) {
    auto i = handlers().find(name);
    return i == handlers().end() ? nullptr : i->second;
}

Cta* Cluster::cta_at(uint32_t a) {
    uint32_t rank = a >> 24;
    if (rank >= ctas.size()) fault("shared address 0x%x names CTA %u of a cluster of %zu", a, rank, ctas.size());
    return ctas[rank].get();
}

uint8_t* shared_pointer(Cluster& c, uint32_t a, uint32_t bytes, uint32_t alignment) {
    Cta* cta = c.cta_at(a);
    uint32_t offset = a & SHARED_OFFSET_MASK;
    if (offset & (alignment - 1)) fault("shared address 0x%x is not a multiple of %u", a, alignment);
    if (offset < SHARED_BASE || offset + bytes > cta->shared.size())
        fault("shared address 0x%x (+%u bytes) lies outside the CTA's %zu bytes of shared memory", a, bytes,
              cta->shared.size() - SHARED_BASE);
    return cta->shared.data() + offset;
}

uint8_t* global_pointer(Launch& l, uint64_t a, uint32_t bytes, uint32_t alignment, bool write) {
    if (a & (alignment - 1)) fault("global address 0x%lx is not a multiple of %u", a, alignment);
    if (l.regions.empty()) {
        if (a < 65536) fault("null global address 0x%lx", a);
        return reinterpret_cast<uint8_t*>(a);
    }
    const Region* r = &l.regions[l.last_region];
    if (a >= r->base && a + bytes <= r->base + r->size) return reinterpret_cast<uint8_t*>(a);
    for (size_t i = 0; i < l.regions.size(); i++) {
        r = &l.regions[i];
        if (a >= r->base && a + bytes <= r->base + r->size) {
            l.last_region = i;
            return reinterpret_cast<uint8_t*>(a);
        }
    }
    if (!l.strict_regions && a >= 65536 && a < (1ull << 47)) return reinterpret_cast<uint8_t*>(a);
    const Region* near = nullptr;  // the last one that begins at or before the address
    for (auto& x : l.regions)
        if (x.base <= a && (!near || x.base > near->base)) near = &x;
    if (near)
        fault("global %s of %u bytes at 0x%lx: %ld bytes past the start of %s, which has %lu bytes", write ? "store" : "load",
              bytes, a, long(a - near->base), near->name.c_str(), near->size);
    fault("global %s of %u bytes at 0x%lx, before every tensor", write ? "store" : "load", bytes, a);
}

// ------------------------------------------------------------------------------------------------ asynchronous operations

void run_async(Cluster& c, std::shared_ptr<AsyncOp>& op) {
    if (op->done) return;
    op->done = true;
    c.launch->counters.async_ops++;
    c.launch->current_pc = op->pc;
    c.launch->fault_warp = op->warp;
    op->run();
    c.events++;
}

void submit(Warp& w, std::shared_ptr<AsyncOp> op) {
    op->issued = publish(w);
    op->pc = w.pc();
    op->warp = &w;
    w.cta->cluster->pool.push_back(std::move(op));
}

void submit_tensor(Warp& w, std::shared_ptr<AsyncOp> op) {
    op->issued = publish(w);
    op->pc = w.pc();
    op->warp = &w;
    w.cta->tensor_queue.push_back(std::move(op));
}

static bool run_one_async(Cluster& c) {
    Random& r = c.launch->random;
    // candidates: every pooled operation, and the head of each CTA's tensor queue
    size_t n = c.pool.size(), queues = 0;
    for (auto& cta : c.ctas) queues += cta->tensor_head < cta->tensor_queue.size();
    if (n + queues == 0) return false;
    size_t k = r.below(uint32_t(n ? (queues ? 2 : 1) : 1));
    if (n && (k == 0)) {
        size_t i = r.below(uint32_t(n));
        auto op = std::move(c.pool[i]);
        c.pool[i] = std::move(c.pool.back());
        c.pool.pop_back();
        run_async(c, op);
        return true;
    }
    size_t q = r.below(uint32_t(queues));
    for (auto& cta : c.ctas) {
        if (cta->tensor_head >= cta->tensor_queue.size()) continue;
        if (q--) continue;
        auto op = std::move(cta->tensor_queue[cta->tensor_head++]);
        if (cta->tensor_head == cta->tensor_queue.size()) cta->tensor_queue.clear(), cta->tensor_head = 0;
        run_async(c, op);
        return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------ barriers

static void release_barrier(Cta& cta, uint32_t id) {
    NamedBarrier& b = cta.named[id];
    b.generation++;
    b.arrived = 0;
    b.expected = 0;
    for (Warp* w : cta.warps)
        if (w->state == Warp::at_barrier && w->barrier_id == id && w->barrier_generation < b.generation) {
            learn(*w, b.arriving);
            w->barrier_votes = b.votes;
            w->barrier_voters = b.voters;
            w->state = Warp::running;
        }
    b.votes = b.voters = 0;
    b.arriving.clear();
    cta.cluster->events++;
}

static uint32_t live_threads(Cta& cta) {
    uint32_t n = 0;
    for (Warp* w : cta.warps) n += w->state == Warp::finished ? 0 : 32;
    return n;
}

// bar.sync / bar.arrive / bar.red, barrier.* (PTX ISA, Parallel Synchronization: bar, barrier). `votes`: the lanes
// whose predicate is true, of bar.red.
Next barrier_arrive(Warp& w, uint32_t id, uint32_t threads, bool wait, const uint32_t* votes) {
    Cta& cta = *w.cta;
    if (id >= 16) fault("barrier %u: a CTA has 16 barriers", id);
    NamedBarrier& b = cta.named[id];
    if (threads % 32) fault("barrier %u: a thread count of %u is not a multiple of the warp size", id, threads);
    if (b.expected && threads && b.expected != threads)
        fault("barrier %u expects %u threads; this warp says %u", id, b.expected, threads);
    if (threads) b.expected = threads;
    warp_access(w);
    if (w.launch->check) {
        b.arriving.join(w.clock);
        publish(w);
    }
    b.arrived += 32;
    if (votes) b.votes += uint32_t(__builtin_popcount(*votes & w.live)), b.voters += uint32_t(__builtin_popcount(w.live));
    uint32_t all = b.expected ? b.expected : live_threads(cta);
    if (wait) {
        w.state = Warp::at_barrier;
        w.barrier_id = id;
        w.barrier_generation = b.generation;
    }
    if (b.arrived > all) fault("barrier %u: %u threads arrived, %u were expected", id, b.arrived, all);
    if (b.arrived == all) release_barrier(cta, id);
    w.groups[w.current].pc++;
    return w.state == Warp::running ? Next::jumped : Next::blocked;
}

static void release_cluster_barrier(Cluster& c) {
    c.barrier_phase++;
    c.barrier_arrived = 0;
    c.barrier_released = c.barrier_arriving;
    c.barrier_arriving.clear();
    for (auto& w : c.warps)
        if (w->state == Warp::at_cluster_barrier) {
            learn(*w, c.barrier_released);
            w->state = Warp::running;
        }
    c.events++;
}

void cluster_arrive(Warp& w, bool relaxed) {
    Cluster& c = *w.cta->cluster;
    w.cluster_phase = c.barrier_phase;
    if (w.launch->check && relaxed) {
        if (w.fenced) c.barrier_arriving.join(*w.fenced);  // a release pattern: fence, then a relaxed arrival
    } else if (w.launch->check) {
        warp_access(w);
        c.barrier_arriving.join(w.clock);
        publish(w);
    }
    c.barrier_arrived++;
    if (c.barrier_arrived == c.live) release_cluster_barrier(c);
}

Next cluster_wait(Warp& w) {
    Cluster& c = *w.cta->cluster;
    w.groups[w.current].pc++;
    if (c.barrier_phase > w.cluster_phase) {
        learn(w, c.barrier_released);
        return Next::jumped;
    }
    w.state = Warp::at_cluster_barrier;
    return Next::blocked;
}

// ------------------------------------------------------------------------------------------------ warps

static void add_hazard(Launch& l, const char* kind, std::string what, Warp& w, uint32_t pc) {
    l.hazards.push_back({kind, std::move(what), "", "warp " + std::to_string(w.id), pc, pc, w.cta->rank, 0, 1});
}

void note(Warp& w, const char* kind, const char* what) {
    Launch& l = *w.launch;
    auto [found, is_new] = l.hazard_index.try_emplace(w.pc() | 1ull << 63, l.hazards.size());
    if (is_new) l.hazards.push_back({kind, what, "", "warp " + std::to_string(w.id), w.pc(), w.pc(), w.cta->rank, 0, 0, true});
    l.hazards[found->second].count++;
}

static void finish_warp(Warp& w) {
    Cluster& c = *w.cta->cluster;
    w.state = Warp::finished;
    c.live--;
    w.cta->live_warps--;
    c.events++;
    if (w.launch->check) {
        for (auto& op : w.copies)
            if (!op->done && !op->tracked) {
                add_hazard(*w.launch, "exit with pending cp.async", "", w, op->pc);
                break;
            }
        if (!w.stores.empty()) add_hazard(*w.launch, "exit with pending bulk copies", "shared memory may be gone before it is read", w, w.stores[0]->pc);
    }
    w.copies.erase(std::remove_if(w.copies.begin(), w.copies.end(), [](auto& op) { return op->tracked; }), w.copies.end());
    w.copy_group.assign(w.copies.size(), 0);
    finish_copies(w, ~0u);
    for (auto& s : w.stores) run_async(c, s);
    w.stores.clear();
    w.store_group.clear();
    for (uint32_t id = 0; id < 16; id++) {
        NamedBarrier& b = w.cta->named[id];
        if (b.arrived && !b.expected && b.arrived == live_threads(*w.cta)) release_barrier(*w.cta, id);
    }
    if (c.barrier_arrived && c.barrier_arrived == c.live) release_cluster_barrier(c);
}

void exit_lanes(Warp& w, uint32_t mask) {
    Group& g = w.groups[w.current];
    g.mask &= ~mask;
    g.pc++;
    w.live &= ~mask;
    for (auto& other : w.groups) other.converging = false;  // whoever waits for these lanes has fewer to wait for
    if (!g.mask) w.groups.erase(w.groups.begin() + w.current);
    if (w.groups.empty()) finish_warp(w);
}

static void merge_groups(Warp& w) {
    auto& g = w.groups;
    std::sort(g.begin(), g.end(), [](const Group& a, const Group& b) { return a.pc < b.pc; });
    size_t n = 0;
    for (size_t i = 1; i < g.size(); i++) {
        if (g[i].pc == g[n].pc) {
            g[n].mask |= g[i].mask;
            g[n].asleep = g[n].asleep && g[i].asleep;
            g[n].converging = false;
        } else {
            g[++n] = g[i];
        }
    }
    g.resize(n + 1);
    w.current = 0;
}

// Picks the group to run; false if none can.
static bool choose_group(Warp& w) {
    if (w.groups.size() > 1) merge_groups(w);
    for (size_t i = 0; i < w.groups.size(); i++)
        if (!w.groups[i].asleep && !w.groups[i].converging) {
            w.current = uint32_t(i);
            return true;
        }
    return false;
}

// Runs up to `quantum` instructions; true if that was progress.
static bool run_warp(Warp& w, uint32_t quantum) {
    Launch& l = *w.launch;
    Cluster& c = *w.cta->cluster;
    Program& p = *l.program;
    const Op* ops = p.ops.data();
    uint64_t *hits = p.hits.data(), *work = l.warp_work.data() + w.id * WORK_KINDS;
    const uint64_t begin = w.executed;
    bool failed = false;
    if (w.seen_events != c.events)
        for (auto& g : w.groups) g.asleep = false;
    l.fault_warp = &w;
    while (w.state == Warp::running && quantum) {
        if (!choose_group(w)) break;
        bool single = w.groups.size() == 1;
        for (; quantum; --quantum) {
            Group& g = w.groups[w.current];
            const Op& op = ops[g.pc];
            uint32_t mask = g.mask;
            l.current_pc = g.pc;
            if (op.guard != NO_GUARD) {
                mask &= *reinterpret_cast<uint32_t*>(w.base[0] + op.guard) ^ op.guard_xor;
                if (!mask && !op.always) {
                    g.pc++;
                    w.executed++;
                    if (!single) break;
                    continue;
                }
            }
            hits[g.pc]++;
            if (op.kind) work[op.kind]++;
            w.executed++;
            Next n = op.fn(w, op, mask);
            if (__builtin_expect(n == Next::advance, 1)) {
                w.groups[w.current].pc++;
                if (!single) break;
                continue;
            }
            if (n == Next::jumped) break;
            if (n == Next::converge) {
                w.executed--;
                hits[w.groups[w.current].pc]--;
                work[op.kind] -= op.kind != 0;
                w.groups[w.current].converging = true;
                break;
            }
            if (n == Next::yield) {
                Group& h = w.groups[w.current];
                h.pc++;
                h.asleep = true;
                w.seen_events = c.events;
                w.polling = true;
                failed = true;
                break;
            }
            break;  // blocked
        }
        if (w.groups.empty()) break;
    }
    uint64_t n = w.executed - begin;
    if (l.profile && n && l.counters.clusters == 1 && l.timeline.size() < 1000000) {
        uint32_t why = w.state == Warp::finished ? 4 : w.state == Warp::at_cluster_barrier ? 3 : w.state == Warp::at_barrier ? 2 : failed;
        l.timeline.push_back({l.counters.instructions, l.counters.instructions + n, w.global_id, l.current_pc, why, 0});
    }
    l.counters.instructions += n;
    l.warp_instructions[w.id] += n;
    // A poll of a few dozen instructions that ends in another failed wait is no progress.
    w.since_failed_wait += n;
    bool poll = w.polling && w.since_failed_wait <= 48 && w.state == Warp::running;
    if (!poll && !failed) w.polling = false;
    if (failed) w.since_failed_wait = 0;
    return n > 0 && !poll;
}

static std::string deadlock_report(Cluster& c) {
    std::string s = "deadlock: no warp can go on\n";
    char line[512];
    for (auto& w : c.warps) {
        if (w->state == Warp::finished) continue;
        const char* what = w->state == Warp::at_barrier           ? "barrier"
                           : w->state == Warp::at_cluster_barrier ? "barrier.cluster"
                                                                  : "wait";
        for (auto& g : w->groups) {
            snprintf(line, sizeof line, "  CTA %u warp %u lanes %08x at @%u: %s", w->cta->rank, w->id, g.mask, g.pc,
                     g.converging ? "for the rest of its warp" : what);
            s += line;
            if (w->state == Warp::at_barrier) {
                auto& b = w->cta->named[w->barrier_id];
                snprintf(line, sizeof line, " %u (%u of %u threads arrived)", w->barrier_id, b.arrived,
                         b.expected ? b.expected : live_threads(*w->cta));
                s += line;
            }
            s += "\n";
        }
    }
    for (auto& cta : c.ctas)
        for (auto& b : cta->mbarriers)
            if (b->valid && (b->pending != b->count || b->tx)) {
                snprintf(line, sizeof line, "  CTA %u mbarrier 0x%x: phase %lu, %u of %u arrivals and %ld bytes pending\n",
                         cta->rank, b->address, b->phase, b->pending, b->count, b->tx);
                s += line;
            }
    return s;
}

static void run_cluster(Launch& l, Cluster& c) {
    std::vector<Warp*> order;
    for (auto& w : c.warps) order.push_back(w.get());
    bool adversarial = l.schedule == Schedule::adversarial;
    static const double eagerness[] = {0, 0, 0, 0.02, 0.1, 0.5};
    c.eagerness = adversarial ? eagerness[l.random.below(6)] : 1.0;
    uint32_t idle = 0;
    const uint32_t longest = adversarial ? 8u << l.random.below(8) : 4096;
    while (c.live) {
        bool progress = false, held_back = false;
        if (adversarial)
            for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[l.random.below(uint32_t(i))]);
        for (Warp* w : order) {
            if (w->state != Warp::running) continue;
            if (w->delay) {
                w->delay--;
                held_back = true;
                continue;
            }
            if (w->seen_events == c.events) {
                bool awake = false;
                for (auto& g : w->groups) awake |= !g.asleep && !g.converging;
                if (!awake) continue;
            }
            if (adversarial && !idle && l.random.below(64) == 0) w->delay = l.random.below(40);
            uint64_t events = c.events;
            progress |= run_warp(*w, adversarial ? 1 + l.random.below(longest) : longest) || events != c.events;
            if (c.eagerness > 0 && l.random.unit() < c.eagerness) progress |= run_one_async(c);
        }
        if (l.instruction_limit && l.counters.instructions > l.instruction_limit)
            fault("the launch has executed %lu warp instructions: a loop that never ends?\n%s", l.counters.instructions,
                  deadlock_report(c).c_str());
        order.erase(std::remove_if(order.begin(), order.end(), [](Warp* w) { return w->state == Warp::finished; }),
                    order.end());
        if (progress) {
            idle = 0;
            continue;
        }
        if (held_back) {
            for (Warp* w : order) w->delay = 0;
            continue;
        }
        if (run_one_async(c)) continue;
        if (++idle > 256) throw Fault(deadlock_report(c));
        for (Warp* w : order) w->seen_events = ~0ull;  // poll again: a failed try_wait may be a mere peek
    }
    while (run_one_async(c)) {
    }
}

static uint32_t special_value(Launch& l, Warp& w, uint32_t number, uint32_t lane) {
    const uint32_t* b = l.block;
    uint32_t t = w.id * 32 + lane;
    Cta& cta = *w.cta;
    const uint32_t *d = l.cluster_dim, *g = l.grid;
    uint32_t x = number % 4, in_cluster[3] = {cta.rank % d[0], cta.rank / d[0] % d[1], cta.rank / d[0] / d[1]};
    uint32_t tid[3] = {t % b[0], t / b[0] % b[1], t / b[0] / b[1]};
    switch (number / 4) {
        case 0: return tid[x];
        case 1: return b[x];
        case 2: return cta.id[x];
        case 3: return g[x];
        case 4: return in_cluster[x];
        case 5: return d[x];
        case 6: return cta.id[x] / d[x];
        case 7: return (g[x] + d[x] - 1) / d[x];
        case 8: return x == 0 ? lane : x == 1 ? w.id : x == 2 ? (b[0] * b[1] * b[2] + 31) / 32 : 0;
        case 9: return x == 0 ? cta.rank : x == 1 ? d[0] * d[1] * d[2] : x == 2 ? uint32_t(l.dynamic_shared) : uint32_t(l.dynamic_shared + l.program->static_shared);
        case 10: return x == 0 ? 1u << lane : x == 1 ? (2u << lane) - 1 : x == 2 ? (1u << lane) - 1 : ~((1u << lane) - 1);
        case 11: return x == 0 ? ~((2u << lane) - 1) : x == 1 ? 0 : x == 2 ? 148 : 0;  // lanemask_gt, smid, nsmid, gridid
        default: return 0;
    }
}

static thread_local sigjmp_buf* escape = nullptr;
static thread_local uint64_t bad_address;
static void on_segv(int sig, siginfo_t* info, void*) {
    if (escape) {
        bad_address = uint64_t(info->si_addr);
        siglongjmp(*escape, 1);
    }
    signal(sig, SIG_DFL);
    raise(sig);
}

static void run_all(Launch& l) {
    const uint32_t *g = l.grid, *d = l.cluster_dim, *b = l.block;
    for (int i = 0; i < 3; i++)
        if (!d[i] || g[i] % d[i]) fault("a grid of (%u, %u, %u) is no multiple of the cluster (%u, %u, %u)", g[0], g[1], g[2], d[0], d[1], d[2]);
    uint32_t nctas = d[0] * d[1] * d[2], threads = b[0] * b[1] * b[2], nwarps = (threads + 31) / 32;
    if (!threads || threads > 1024) fault("a CTA of %u threads", threads);
    l.warp_instructions.assign(nwarps, 0);
    l.warp_work.assign(nwarps * WORK_KINDS, 0);
    uint32_t shared_bytes = SHARED_BASE + l.program->static_shared + l.dynamic_shared;
    if (shared_bytes > 233472) fault("%u bytes of shared memory (with the 1024 reserved ones) exceed the 228 KiB of an SM", shared_bytes);
    std::vector<std::vector<uint8_t>> files(size_t(nctas) * nwarps);
    std::vector<std::unique_ptr<Cta>> spare;
    l.total_clusters = uint64_t(g[0] / d[0]) * (g[1] / d[1]) * (g[2] / d[2]);
    for (l.next_cluster = 0; l.next_cluster < l.total_clusters;) {
        uint32_t first[3];
        l.first_cta(l.next_cluster++, first);
        Cluster c;
        c.launch = &l;
        l.counters.clusters++;
        for (uint32_t r = 0; r < nctas; r++) {
            std::unique_ptr<Cta> cta = std::make_unique<Cta>();
            if (!spare.empty()) {  // keep its large arrays
                cta->shared.swap(spare.back()->shared);
                cta->tmem.swap(spare.back()->tmem);
                std::swap(cta->shared_shadow, spare.back()->shared_shadow);
                std::swap(cta->tmem_shadow, spare.back()->tmem_shadow);
                spare.pop_back();
            }
            cta->cluster = &c;
            cta->rank = r;
            cta->id[0] = first[0] + r % d[0];
            cta->id[1] = first[1] + r / d[0] % d[1];
            cta->id[2] = first[2] + r / d[0] / d[1];
            cta->shared.assign(shared_bytes, 0xCB);
            cta->mbarrier_at.assign(shared_bytes / 8 + 1, -1);
            if (l.check) cta->shared_shadow.reset((shared_bytes + 3) / 4, 4, "shared memory");
            cta->live_warps = nwarps;
            for (uint32_t i = 0; i < nwarps; i++) {
                auto w = std::make_unique<Warp>();
                w->cta = cta.get();
                w->launch = &l;
                w->id = i;
                w->global_id = r * nwarps + i;
                w->registers.swap(files[w->global_id]);
                w->registers.assign(l.program->register_bytes + 128, 0xCB);
                w->base[0] = reinterpret_cast<uint8_t*>((uintptr_t(w->registers.data()) + 63) & ~uintptr_t(63));
                w->base[1] = reinterpret_cast<uint8_t*>((uintptr_t(l.program->constants.data()) + 63) & ~uintptr_t(63));
                if (l.program->local_bytes) w->local.assign(size_t(32) * l.program->local_bytes, 0xCB);
                uint32_t rest = threads - i * 32;
                w->live = rest >= 32 ? FULL : (1u << rest) - 1;
                w->groups.push_back({0, w->live});
                for (size_t k = 0; k + 1 < l.program->special.size(); k += 2) {
                    uint32_t* v = reinterpret_cast<uint32_t*>(w->base[0] + l.program->special[k + 1]);
                    for (uint32_t lane = 0; lane < 32; lane++) v[lane] = special_value(l, *w, l.program->special[k], lane);
                }
                if (l.check) {
                    w->agent = c.agents.add("warp " + std::to_string(i) + " of CTA " + std::to_string(r), true);
                    w->clock.set(w->agent, 1, false);
                }
                cta->warps.push_back(w.get());
                c.warps.push_back(std::move(w));
            }
            c.ctas.push_back(std::move(cta));
        }
        c.live = nctas * nwarps;
        try {
            run_cluster(l, c);
        } catch (const Fault& e) {
            Warp* w = l.fault_warp;
            l.fault_pc = l.current_pc;
            char where[160] = "";
            if (w)
                snprintf(where, sizeof where, " [CTA (%u, %u, %u), warp %u]", w->cta->id[0], w->cta->id[1],
                         w->cta->id[2], w->id);
            throw Fault(e.what() + std::string(where));
        }
        for (auto& cta : c.ctas) {
            if (!cta->tmem_allocations.empty())
                l.hazards.push_back({"tensor memory leaked", std::to_string(cta->tmem_allocations.size()) + " allocations were not freed", "", "", 0, 0, cta->rank, 0, 1});
        }
        for (auto& w : c.warps) files[w->global_id].swap(w->registers);
        for (auto& cta : c.ctas) spare.push_back(std::move(cta));
    }
}

void Launch::first_cta(uint64_t cluster, uint32_t id[3]) const {
    for (int i = 0; i < 3; i++) {
        uint32_t n = grid[i] / cluster_dim[i];
        id[i] = uint32_t(cluster % n) * cluster_dim[i];
        cluster /= n;
    }
}

void Launch::run() {
    struct sigaction action = {}, old = {};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old);
    sigjmp_buf here;
    sigjmp_buf* outer = escape;
    if (sigsetjmp(here, 1) == 0) {
        escape = &here;
        try {
            run_all(*this);
        } catch (const std::exception& e) {
            error = e.what();
        }
    } else {
        error = "global address 0x" + [] {
            char s[32];
            snprintf(s, sizeof s, "%lx", bad_address);
            return std::string(s);
        }() + " is not mapped";
    }
    escape = outer;
    sigaction(SIGSEGV, &old, nullptr);
    if (!error.empty()) fault_pc = current_pc;
}

}  // namespace emu
