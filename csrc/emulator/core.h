// The machine: predecoded operations, warps of 32-lane registers, CTAs, clusters, one launch.
//
// A register of 32 bits or fewer is an array of 32 uint32_t (narrow values keep their upper bits zero), a 64-bit one an
// array of 32 uint64_t, a predicate one uint32_t with a bit a lane. An operand is an offset into the warp's register
// file or into the program's pool of constants; the lowest bit says which, so that a handler never branches on it.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "hazard.h"

namespace emu {

constexpr uint32_t FULL = 0xffffffffu;
constexpr uint32_t NO_GUARD = 0xffffffffu;

struct Warp;
struct Op;
struct Cta;
struct Cluster;
struct Launch;

// What the scheduler does after a handler: go on, jump (the handler set group.pc), retry the same operation when
// something has happened, go on but let others run first, or wait until every live lane of the warp is here.
enum class Next : int { advance = 0, jumped, blocked, yield, converge };

using Handler = Next (*)(Warp&, const Op&, uint32_t mask);

struct Op {
    Handler fn;
    const uint32_t* x;  // operands
    const int64_t* imm;  // immediate values of the handler
    uint32_t guard;  // offset of the guarding predicate, or NO_GUARD
    uint32_t guard_xor;  // FULL for @!p
    uint16_t operands, immediates;
    bool always;  // called even if no lane passes the guard (branches)
    uint8_t kind;  // what a warp's role is told by (WORK in core.py); 0: nothing of interest
};

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Random {  // splitmix64
    uint64_t state;
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    uint32_t below(uint32_t n) { return uint32_t((uint64_t(uint32_t(next())) * n) >> 32); }
    double unit() { return double(next() >> 11) * (1.0 / 9007199254740992.0); }
};

// Address windows. Shared addresses carry the CTA's rank in its cluster in bits 24 and up (the "peer bit" convention
// of the CUTLASS kernels); generic addresses of shared and local memory lie outside what a host pointer can be.
constexpr uint32_t SHARED_BASE = 1024;  // what the system reserves on sm_90 and later
constexpr uint32_t SHARED_OFFSET_MASK = 0xffffffu;
constexpr uint64_t GENERIC_SHARED = 0xfffe000000000000ull;
constexpr uint64_t GENERIC_LOCAL = 0xfffd000000000000ull;

struct Region {
    uint64_t base, size;
    std::string name;
};

struct Program {
    std::vector<Op> ops;
    std::vector<uint32_t> operands;
    std::vector<int64_t> immediates;
    std::vector<uint8_t> constants;
    std::vector<uint32_t> special;  // pairs: special register number, offset
    uint32_t register_bytes = 0, static_shared = 0, local_bytes = 0;
    std::vector<uint64_t> hits;  // executed warp instructions, an entry an operation
};

// An asynchronous operation that was issued and has not taken effect. `run` makes it take effect.
struct AsyncOp {
    Snapshot issued;  // what its issuer knew
    uint32_t pc = 0;
    Warp* warp = nullptr;
    bool done = false, tracked = false;  // tracked: an mbarrier will tell of its completion
    virtual void run() = 0;
    virtual ~AsyncOp() = default;
};

struct MBarrier {
    uint32_t address = 0, count = 0, pending = 0;
    int64_t tx = 0;
    uint64_t phase = 0;
    bool valid = false;
    uint32_t agent = 0;
    uint64_t init_epoch = 0;
    Clock arriving, released;
};

struct NamedBarrier {
    uint32_t arrived = 0, expected = 0;
    uint32_t votes = 0, voters = 0;  // barrier.red: threads whose predicate is true, threads that have one
    uint64_t generation = 0;
    Clock arriving;
};

struct Group {
    uint32_t pc, mask;
    bool asleep = false;  // failed a wait; see Warp::seen_events
    bool converging = false;  // stands before an operation that needs the whole warp
};

struct WgmmaPending;

struct Warp {
    uint8_t* base[2];  // register file, constants
    Cta* cta;
    Launch* launch;
    uint32_t id, global_id;  // in the CTA; in the cluster
    uint32_t live = FULL;  // lanes that have not exited
    std::vector<Group> groups;
    uint32_t current = 0;
    enum State : uint8_t { running, at_barrier, at_cluster_barrier, finished } state = running;
    uint32_t barrier_id = 0;
    uint32_t barrier_votes = 0, barrier_voters = 0;  // of the last barrier it waited at
    uint64_t barrier_generation = 0, seen_events = ~0ull;
    uint64_t executed = 0;
    uint64_t delay = 0;  // scheduling turns it sits out
    uint64_t since_failed_wait = 0;  // instructions since then, to tell polling from progress
    bool polling = false;
    std::vector<uint8_t> registers, local;
    // what this warp knows, and its asynchronous streams
    Clock clock;
    Snapshot snapshot;
    bool published = false;
    uint32_t agent = 0;
    struct Stream {
        uint32_t agent = 0, clock = 1;
    };
    Stream cp_async, bulk, tcgen05, tmem_load, tmem_store, wgmma;
    std::vector<std::pair<uint32_t, uint32_t>> tmem_load_clock;  // pc and clock of the loads not waited for
    Snapshot fenced;  // what a later relaxed arrival passes on
    std::vector<std::shared_ptr<AsyncOp>> copies;  // cp.async not yet performed
    std::vector<uint32_t> copy_group;  // the group of each
    std::vector<uint32_t> copy_group_clock;  // the stream's clock when a group was committed
    std::vector<std::shared_ptr<AsyncOp>> stores;  // bulk operations of bulk groups
    std::vector<uint32_t> store_group;
    uint32_t store_groups = 0;
    std::vector<std::shared_ptr<WgmmaPending>> wgmmas;
    uint32_t wgmma_groups = 0, wgmma_issued = 0, wgmma_retired = 0, wgmma_done_clock = 0;
    Snapshot wgmma_issued_clock;
    uint64_t cluster_phase = 0;

    template <class T> T* dst(uint32_t x) { return reinterpret_cast<T*>(base[0] + (x >> 1)); }
    template <class T> const T* src(uint32_t x) const { return reinterpret_cast<const T*>(base[x & 1] + (x >> 1)); }
    uint32_t pred(uint32_t x) const { return *src<uint32_t>(x); }
    void set_pred(uint32_t x, uint32_t value, uint32_t mask) {
        uint32_t* p = dst<uint32_t>(x);
        *p = (*p & ~mask) | (value & mask);
    }
    uint32_t pc() const { return groups[current].pc; }
};

struct Cta {
    Cluster* cluster;
    uint32_t rank, id[3];
    std::vector<uint8_t> shared;
    std::vector<uint32_t> tmem;  // 128 lanes x 512 columns
    Shadow shared_shadow, tmem_shadow;
    std::vector<int32_t> mbarrier_at;  // by address / 8: index into mbarriers, or -1
    std::vector<std::unique_ptr<MBarrier>> mbarriers;
    NamedBarrier named[16];
    std::vector<Warp*> warps;
    std::vector<std::shared_ptr<AsyncOp>> tensor_queue;  // tcgen05.mma/cp/commit, in order
    size_t tensor_head = 0;
    uint32_t tmem_columns = 0;  // allocated columns, a bit for 32 of them
    bool permit_relinquished = false;
    bool tmem_ready = false;
    std::vector<std::pair<uint32_t, uint32_t>> tmem_allocations;
    uint32_t live_warps = 0;

    uint32_t address(uint32_t offset) const { return (rank << 24) | offset; }
    void enable_tmem();
};

struct Cluster {
    Launch* launch;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::shared_ptr<AsyncOp>> pool;  // independent asynchronous operations: any order
    uint64_t events = 0;  // barrier phases, completions, exits: whatever may end somebody's wait
    uint32_t barrier_arrived = 0;
    uint64_t barrier_phase = 0;
    Clock barrier_arriving, barrier_released;
    Agents agents;
    double eagerness = 0;
    uint32_t live = 0;
    Cta* cta_at(uint32_t shared_address);
};

struct Counters {
    uint64_t global_load = 0, global_store = 0, shared_load = 0, shared_store = 0, atomic_bytes = 0, atomics = 0;
    uint64_t copy_async = 0, tma_load = 0, tma_store = 0, tma_reduce = 0, bulk_dsmem = 0;
    uint64_t tmem_load = 0, tmem_store = 0, exp = 0, shared_passes = 0, shared_accesses = 0;
    uint64_t async_ops = 0, clusters = 0, instructions = 0;
};

struct MmaCount {
    uint64_t count, flops, useful;  // useful: of rows of A and columns of B that are not zero throughout
};
constexpr uint32_t WORK_KINDS = 16;

enum class Schedule : int { adversarial = 0, eager = 1 };

struct Launch {
    Program* program = nullptr;
    uint32_t grid[3], block[3], cluster_dim[3];
    uint32_t dynamic_shared = 0;
    const uint8_t* params = nullptr;
    std::vector<Region> regions;
    bool strict_regions = false;
    bool check = true, profile = false;
    Schedule schedule = Schedule::adversarial;
    Random random{0};
    uint64_t instruction_limit = 0;
    Counters counters;
    std::vector<uint64_t> warp_instructions, warp_work;  // by warp of the CTA; by warp and kind
    std::unordered_map<std::string, MmaCount> mma;
    std::vector<Hazard> hazards;
    std::unordered_map<uint64_t, size_t> hazard_index;
    std::string error, printed;
    // where a fault happened
    Warp* fault_warp = nullptr;
    uint32_t fault_pc = 0;
    size_t last_region = 0;
    // One uninterrupted run of a warp of the first cluster, in warp instructions executed so far (only with `profile`).
    struct Segment {
        uint64_t begin, end;
        uint32_t warp, pc;
        uint32_t why;  // it stopped: 0 preempted, 1 failed wait, 2 barrier, 3 cluster barrier, 4 finished
        uint32_t unused;
    };
    std::vector<Segment> timeline;
    uint32_t current_pc = 0;
    uint64_t next_cluster = 0, total_clusters = 0;  // in the order of x, y, z; clusterlaunchcontrol takes from here too

    void run();
    void first_cta(uint64_t cluster, uint32_t id[3]) const;
    void hazard(const char* kind, const std::string& what, uint64_t earlier, uint32_t pc, Warp* warp, uint32_t address);
};

void note(Warp&, const char* kind, const char* what);  // once for each place

// hazard-checking front doors (they do nothing when the checker is off)
Access warp_access(Warp&);
Snapshot publish(Warp&);  // what the warp knows now; later accesses get a new clock
void learn(Warp&, const Clock&);
uint32_t stream_agent(Warp&, Warp::Stream&, const char* what);
void learn_epoch(Warp&, uint32_t agent, uint32_t clock, bool visible);

// shared memory: bounds- and alignment-checked host pointer
uint8_t* shared_pointer(Cluster&, uint32_t address, uint32_t bytes, uint32_t alignment);
uint8_t* global_pointer(Launch&, uint64_t address, uint32_t bytes, uint32_t alignment, bool write);

// mbarrier
MBarrier& mbarrier_at(Cluster&, uint32_t address, Warp* user);
void mbarrier_arrive(Cluster&, MBarrier&, uint32_t count, const Clock* knowledge);
void mbarrier_complete_tx(Cluster&, MBarrier&, int64_t bytes, const Clock* knowledge);

// scheduler services
void run_async(Cluster&, std::shared_ptr<AsyncOp>&);
void finish_copies(Warp&, uint32_t up_to_group);  // cp.async of groups below it
void submit(Warp&, std::shared_ptr<AsyncOp>);  // an independent asynchronous operation
void submit_tensor(Warp&, std::shared_ptr<AsyncOp>);

struct HandlerName {
    const char* name;
    Handler fn;
};
void register_handlers(const HandlerName* table, size_t n);
struct Registrar {
    template <size_t N> explicit Registrar(const HandlerName (&table)[N]) { register_handlers(table, N); }
};

inline int lowest(uint32_t m) { return __builtin_ctz(m); }

#define EACH_LANE(l, m) for (uint32_t l##_m = (m), l; l##_m && ((l = uint32_t(__builtin_ctz(l##_m))), true); l##_m &= l##_m - 1)

}  // namespace emu
