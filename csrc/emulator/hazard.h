// The happens-before checker: vector clocks and shadow memory.
//
// Everything that accesses shared memory or TMEM is an agent with a clock: a warp, or an asynchronous stream whose
// completion one learns in steps (the phases of an mbarrier, the groups of cp.async and bulk copies, the commits of
// tcgen05 and wgmma, tcgen05.wait). An access is an epoch (agent, clock); it happens before another one if the other
// one's agent has learned of that clock, through a barrier, a wait or program order. Every clock has a second row,
// "visible to the async proxy", which only fence.proxy.async raises (PTX ISA, Memory Consistency Model, proxies).
//
// The shadow of a memory keeps, for each word (a split word: each byte), the epoch of the last write and of the reads
// since then that no later read covers, as in FastTrack (Flanagan and Freund, PLDI 2009).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emu {

// agent 12 bits | clock 32 bits | made by an atomic operation | pc 19 bits
constexpr uint64_t EPOCH_ATOMIC = 1u << 19;
inline uint64_t make_epoch(uint32_t agent, uint32_t clock, uint32_t pc, bool atomic = false) {
    return (uint64_t(agent) << 52) | (uint64_t(clock) << 20) | (atomic ? EPOCH_ATOMIC : 0) | (pc & (EPOCH_ATOMIC - 1));
}
inline uint32_t epoch_agent(uint64_t e) { return uint32_t(e >> 52); }
inline uint32_t epoch_clock(uint64_t e) { return uint32_t(e >> 20); }
inline uint32_t epoch_pc(uint64_t e) { return uint32_t(e & (EPOCH_ATOMIC - 1)); }

constexpr uint32_t MAX_AGENTS = 4096;

struct Agent {
    std::string name;
    bool warp;  // generic proxy
};

struct Agents {
    std::vector<Agent> list{{"nobody", false}};
    uint32_t add(std::string name, bool warp);
    uint32_t size() const { return uint32_t(list.size()); }
};

struct Clock {
    std::vector<uint32_t> order, proxy;
    void join(const Clock& other);
    void set(uint32_t agent, uint32_t clock, bool visible);
    uint32_t at(uint32_t agent) const { return agent < order.size() ? order[agent] : 0; }
    uint32_t visible(uint32_t agent) const { return agent < proxy.size() ? proxy[agent] : 0; }
    void clear() {
        order.clear();
        proxy.clear();
    }
    bool empty() const { return order.empty(); }
};

using Snapshot = std::shared_ptr<const Clock>;

struct Launch;
struct Warp;
struct Cluster;

struct Access {
    Cluster* cluster = nullptr;
    Warp* warp = nullptr;
    const Clock* clock = nullptr;
    uint32_t agent = 0, at = 0, pc = 0;
    bool async_proxy = false;  // reads shared memory through the async proxy
    bool in_order = true;  // accesses of this agent are ordered among themselves
    bool atomic = false;  // never conflicts with another atomic access
    uint64_t epoch() const { return make_epoch(agent, at, pc, atomic); }
    bool made(uint64_t e) const { return !((e ^ make_epoch(agent, at, 0)) >> 20); }
};

struct Hazard {
    std::string kind, what, earlier_agent, agent;
    uint32_t earlier_pc, pc, cta, address;
    uint64_t count;
    bool note = false;  // not promised by the PTX ISA, but what hardware does
};

class Shadow {
  public:
    void reset(uint32_t cells, uint32_t unit, const char* name);
    bool on() const { return !cells_.empty(); }
    // [first, first + n) in cells; for memories with bytes use the byte variants
    void read_cells(uint32_t first, uint32_t n, const Access& a) { cells<false>(first, n, a); }
    void write_cells(uint32_t first, uint32_t n, const Access& a) { cells<true>(first, n, a); }
    void read_bytes(uint32_t address, uint32_t n, const Access& a) { bytes<false>(address, n, a); }
    void write_bytes(uint32_t address, uint32_t n, const Access& a) { bytes<true>(address, n, a); }

  private:
    struct Cell {
        uint64_t write = 0, read0 = 0, read1 = 0;
        uint32_t more = 0;  // index + 1 into overflow_
        uint32_t split = 0;  // index + 1 into split_
    };
    struct Split {
        Cell byte[4];
    };
    template <bool WRITE> void cells(uint32_t first, uint32_t n, const Access& a);
    template <bool WRITE> void bytes(uint32_t address, uint32_t n, const Access& a);
    void read(Cell& c, const Access& a, uint32_t address);
    void write(Cell& c, const Access& a, uint32_t address);
    void keep(Cell& c, uint64_t epoch, const Access& a);
    template <class F> void each_reader(Cell& c, F f);
    bool before(uint64_t e, const Access& a) const;
    void report(const char* kind, uint64_t earlier, const Access& a, uint32_t address);
    Split& split(Cell& c);
    std::vector<Cell> cells_;
    std::vector<Split> split_;
    std::vector<std::vector<uint64_t>> overflow_;
    uint32_t unit_ = 4;
    const char* name_ = "";
};

}  // namespace emu
