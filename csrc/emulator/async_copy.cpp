// PTX ISA, Data Movement: cp.async (non-bulk), cp.async.bulk, cp.reduce.async.bulk and their completion mechanisms;
// clusterlaunchcontrol.
#include "async_copy.h"

#include "lanes.h"

namespace emu {

// Performs the operations whose group is below `up_to` and forgets them.
static void finish_groups(Warp& w, std::vector<std::shared_ptr<AsyncOp>>& operations, std::vector<uint32_t>& group, uint32_t up_to) {
    size_t kept = 0;
    for (size_t i = 0; i < operations.size(); i++) {
        if (group[i] < up_to) {
            run_async(*w.cta->cluster, operations[i]);
        } else {
            operations[kept] = operations[i];
            group[kept++] = group[i];
        }
    }
    operations.resize(kept);
    group.resize(kept);
}
void finish_copies(Warp& w, uint32_t up_to_group) { finish_groups(w, w.copies, w.copy_group, up_to_group); }

uint32_t add_store(Warp& w, std::shared_ptr<AsyncOp> op) {
    submit(w, op);
    w.stores.push_back(op);
    w.store_group.push_back(w.store_groups);
    return w.store_groups + 1;
}

void reduce_bytes(uint8_t* target, const uint8_t* source, uint32_t bytes, int64_t op, int64_t type) {
    auto apply = [&](auto zero, auto f) {
        using T = decltype(zero);
        for (uint32_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
            T a, b;
            memcpy(&a, target + i, sizeof a);
            memcpy(&b, source + i, sizeof b);
            a = f(a, b);
            memcpy(target + i, &a, sizeof a);
        }
    };
    auto half = [&](bool bf) {
        apply(uint16_t(0), [=](uint16_t a, uint16_t b) {
            float x = bf ? bf16_to_float(a) : half_to_float(a), y = bf ? bf16_to_float(b) : half_to_float(b);
            float v = op == R_ADD ? x + y : op == R_MIN ? std::fmin(x, y) : std::fmax(x, y);
            return uint16_t(bf ? float_to_bf16(v) : float_to_half(v));
        });
    };
    auto integer = [&](auto zero) {
        using T = decltype(zero);
        apply(zero, [=](T a, T b) -> T {
            switch (op) {
                case R_ADD: return T(a + b);
                case R_MIN: return a < b ? a : b;
                case R_MAX: return a > b ? a : b;
                case R_AND: return T(a & b);
                case R_OR: return T(a | b);
                case R_XOR: return T(a ^ b);
                case R_INC: return a >= b ? T(0) : T(a + 1);
                case R_DEC: return a == 0 || a > b ? b : T(a - 1);
            }
            fault("bulk reduction %ld is unknown", op);
        });
    };
    if (op > R_MAX && type >= T_F16) fault("a bulk reduction of floating-point values adds, or takes the minimum or maximum");
    switch (type) {
        case T_U8: return integer(uint8_t(0));
        case T_U16: return integer(uint16_t(0));
        case T_U32: return integer(uint32_t(0));
        case T_S32: return integer(int32_t(0));
        case T_U64: return integer(uint64_t(0));
        case T_S64: return integer(int64_t(0));
        case T_F16: return half(false);
        case T_BF16: return half(true);
        case T_F32: return apply(0.0f, [=](float a, float b) { return op == R_ADD ? a + b : op == R_MIN ? std::fmin(a, b) : std::fmax(a, b); });
        case T_F64: return apply(0.0, [=](double a, double b) { return op == R_ADD ? a + b : op == R_MIN ? std::fmin(a, b) : std::fmax(a, b); });
    }
    fault("no bulk reduction of type %ld", type);
}

// An access by an operation whose completion the phases of `b` announce.
Access tracked_access(AsyncOp& op, MBarrier& b, bool async_proxy) {
    Access a;
    if (!op.warp->launch->check) return a;
    a.cluster = op.warp->cta->cluster;
    a.warp = op.warp;
    a.clock = op.issued.get();
    a.agent = b.agent;
    a.at = uint32_t(b.phase + 1);
    a.pc = op.pc;
    a.async_proxy = async_proxy;
    a.in_order = false;
    return a;
}
Access stream_access(AsyncOp& op, uint32_t agent, uint32_t clock, bool async_proxy, bool in_order) {
    Access a;
    if (!op.warp->launch->check) return a;
    a.cluster = op.warp->cta->cluster;
    a.warp = op.warp;
    a.clock = op.issued.get();
    a.agent = agent;
    a.at = clock;
    a.pc = op.pc;
    a.async_proxy = async_proxy;
    a.in_order = in_order;
    return a;
}

namespace {

struct CopyAsync : AsyncOp {  // cp.async: up to 32 lanes of 4, 8 or 16 bytes, the rest of each zero-filled
    uint32_t mask, bytes, clock, to[32];
    const uint8_t* from[32];
    uint32_t take[32];
    void run() override {
        Cluster& c = *warp->cta->cluster;
        Access a = stream_access(*this, warp->cp_async.agent, clock, false, true);
        EACH_LANE(l, mask) {
            uint8_t* p = shared_pointer(c, to[l], bytes, bytes);
            c.cta_at(to[l])->shared_shadow.write_bytes(to[l] & SHARED_OFFSET_MASK, bytes, a);
            memcpy(p, from[l], take[l]);
            memset(p + take[l], 0, bytes - take[l]);
        }
    }
};

// to, from, bytes taken (may be absent), ignore-source predicate (may be absent); imm: bytes, offset of to, of from
Next cp_async(Warp& w, const Op& o, uint32_t m) {
    auto op = std::make_shared<CopyAsync>();
    op->mask = m;
    op->bytes = uint32_t(o.imm[0]);
    stream_agent(w, w.cp_async, "cp.async");
    if (w.launch->check) w.cta->cluster->agents.list[w.cp_async.agent].warp = true;  // it writes through the generic proxy
    op->clock = w.cp_async.clock;
    const uint32_t* to = w.src<uint32_t>(o.x[0]);
    const uint64_t* from = w.src<uint64_t>(o.x[1]);
    uint32_t ignored = o.x[3] == NONE ? 0 : w.pred(o.x[3]);
    EACH_LANE(l, m) {
        op->to[l] = to[l] + uint32_t(o.imm[1]);
        uint32_t take = o.x[2] == NONE ? op->bytes : w.src<uint32_t>(o.x[2])[l];
        if (ignored >> l & 1) take = 0;
        if (take > op->bytes) fault("cp.async takes %u of %u bytes", take, op->bytes);
        op->take[l] = take;
        shared_pointer(*w.cta->cluster, op->to[l], op->bytes, op->bytes);
        op->from[l] = take ? global_pointer(*w.launch, from[l] + uint64_t(o.imm[2]), take, op->bytes, false) : nullptr;
        w.launch->counters.copy_async += take;
    }
    op->issued = publish(w);
    op->pc = w.pc();
    op->warp = &w;
    w.copies.push_back(op);
    w.copy_group.push_back(uint32_t(w.copy_group_clock.size()));
    return Next::advance;
}
Next cp_commit(Warp& w, const Op&, uint32_t) {
    w.copy_group_clock.push_back(w.cp_async.clock++);
    return Next::advance;
}
Next cp_wait(Warp& w, const Op& o, uint32_t) {  // imm: groups that may stay pending
    size_t groups = w.copy_group_clock.size(), n = size_t(o.imm[0]);
    if (groups <= n) return Next::advance;
    finish_copies(w, uint32_t(groups - n));
    learn_epoch(w, w.cp_async.agent, w.copy_group_clock[groups - n - 1], false);
    return Next::advance;
}
Next cp_wait_all(Warp& w, const Op& o, uint32_t m) {
    cp_commit(w, o, m);
    finish_copies(w, uint32_t(w.copy_group_clock.size()));
    learn_epoch(w, w.cp_async.agent, w.copy_group_clock.back(), false);
    return Next::advance;
}

struct CopyArrive : AsyncOp {  // cp.async.mbarrier.arrive: once the lanes' earlier copies are done
    uint32_t mask, clock, address[32];
    std::vector<std::shared_ptr<AsyncOp>> before;
    void run() override {
        Cluster& c = *warp->cta->cluster;
        for (auto& b : before) run_async(c, b);
        Clock knowledge = *issued;
        if (warp->cp_async.agent) knowledge.set(warp->cp_async.agent, clock, false);
        EACH_LANE(l, mask) mbarrier_arrive(c, mbarrier_at(c, address[l], nullptr), 1, &knowledge);
    }
};
Next cp_arrive(Warp& w, const Op& o, uint32_t m) {  // address; imm: offset, noinc
    auto op = std::make_shared<CopyArrive>();
    op->mask = m;
    op->clock = w.cp_async.clock++;
    op->before = w.copies;
    for (auto& c : w.copies) c->tracked = true;
    EACH_LANE(l, m) {
        op->address[l] = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
        MBarrier& b = mbarrier_at(*w.cta->cluster, op->address[l], &w);
        if (!o.imm[1]) b.pending++;
    }
    submit(w, op);
    return Next::advance;
}

// ------------------------------------------------------------------------------------------------ bulk copies

enum Place : int64_t { P_GLOBAL, P_SHARED };

struct BulkCopy : AsyncOp {
    int64_t to_place, from_place, reduction = -1, type = 0;
    uint64_t to, from;
    uint32_t bytes, barrier = 0, group = 0, multicast = 0;
    bool tracked = false;
    void run() override {
        Cluster& c = *warp->cta->cluster;
        Launch& launch = *c.launch;
        const uint8_t* source = from_place == P_GLOBAL ? global_pointer(launch, from, bytes, 16, false) : shared_pointer(c, uint32_t(from), bytes, 16);
        uint32_t targets = multicast ? multicast : 1;
        for (uint32_t r = 0; r < 32; r++) {
            if (!(targets >> r & 1)) continue;
            uint64_t target = multicast ? (to & SHARED_OFFSET_MASK) | uint64_t(r) << 24 : to;
            MBarrier* b = tracked ? &mbarrier_at(c, multicast ? (barrier & SHARED_OFFSET_MASK) | r << 24 : barrier, nullptr) : nullptr;
            Access a = b ? tracked_access(*this, *b, true) : stream_access(*this, warp->bulk.agent, group, true, false);
            if (from_place == P_SHARED) c.cta_at(uint32_t(from))->shared_shadow.read_bytes(uint32_t(from) & SHARED_OFFSET_MASK, bytes, a);
            uint8_t* p = to_place == P_GLOBAL ? global_pointer(launch, target, bytes, 16, true) : shared_pointer(c, uint32_t(target), bytes, 16);
            if (to_place == P_SHARED) c.cta_at(uint32_t(target))->shared_shadow.write_bytes(uint32_t(target) & SHARED_OFFSET_MASK, bytes, a);
            if (reduction < 0) memmove(p, source, bytes);
            else reduce_bytes(p, source, bytes, reduction, type);
            if (b) mbarrier_complete_tx(c, *b, bytes, issued.get());
        }
        Counters& n = launch.counters;
        (reduction >= 0 ? n.tma_reduce : to_place == P_GLOBAL ? n.tma_store : from_place == P_GLOBAL ? n.tma_load : n.bulk_dsmem) += bytes;
    }
};

// to, from, bytes, mbarrier (may be absent), cta mask (may be absent);
// imm: place of to, of from, offsets of to, from and mbarrier, reduction (-1: copy), type
Next bulk_copy(Warp& w, const Op& o, uint32_t m) {
    EACH_LANE(l, m) {
        auto op = std::make_shared<BulkCopy>();
        op->to_place = o.imm[0], op->from_place = o.imm[1], op->reduction = o.imm[5], op->type = o.imm[6];
        auto address = [&](uint32_t x, int64_t place, int64_t offset) {
            return place == P_GLOBAL ? w.src<uint64_t>(x)[l] + uint64_t(offset) : uint64_t(w.src<uint32_t>(x)[l] + uint32_t(offset));
        };
        op->to = address(o.x[0], op->to_place, o.imm[2]);
        op->from = address(o.x[1], op->from_place, o.imm[3]);
        op->bytes = w.src<uint32_t>(o.x[2])[l];
        if (op->bytes % 16 || op->to % 16 || op->from % 16)
            fault("cp.async.bulk of %u bytes from 0x%lx to 0x%lx: sizes and addresses are multiples of 16", op->bytes, op->from, op->to);
        op->tracked = o.x[3] != NONE;
        if (op->tracked) op->barrier = uint32_t(address(o.x[3], P_SHARED, o.imm[4]));
        if (o.x[4] != NONE) op->multicast = w.src<uint32_t>(o.x[4])[l] & 0xffff;
        if (op->tracked) {
            submit(w, op);
        } else {
            stream_agent(w, w.bulk, "bulk copies");
            op->group = add_store(w, op);
        }
    }
    return Next::advance;
}
Next bulk_commit(Warp& w, const Op&, uint32_t) {
    w.store_groups++;
    return Next::advance;
}
Next bulk_wait(Warp& w, const Op& o, uint32_t) {  // imm: groups that may stay pending
    uint32_t n = uint32_t(o.imm[0]), up_to = w.store_groups > n ? w.store_groups - n : 0;
    finish_groups(w, w.stores, w.store_group, up_to);
    if (up_to) learn_epoch(w, w.bulk.agent, up_to, true);
    return Next::advance;
}

// clusterlaunchcontrol.try_cancel: takes a cluster that has not been launched, or is refused. The response is opaque to
// kernels; here: bit 0 of the first word whether one was taken, the second to fourth word its first CTA.
struct TryCancel : AsyncOp {
    uint32_t address, barrier;
    bool multicast;
    void run() override {
        Cluster& c = *warp->cta->cluster;
        Launch& l = *c.launch;
        uint32_t response[4] = {};
        bool refuse = l.schedule == Schedule::adversarial && l.random.below(3) == 0;
        if (l.next_cluster < l.total_clusters && !refuse) {
            response[0] = 1;
            l.first_cta(l.next_cluster++, response + 1);
        }
        for (auto& cta : c.ctas) {
            if (!multicast && cta.get() != warp->cta) continue;
            uint32_t to = cta->address(address & SHARED_OFFSET_MASK);
            MBarrier& b = mbarrier_at(c, cta->address(barrier & SHARED_OFFSET_MASK), nullptr);
            uint8_t* p = shared_pointer(c, to, 16, 16);
            cta->shared_shadow.write_bytes(to & SHARED_OFFSET_MASK, 16, tracked_access(*this, b, true));
            memcpy(p, response, 16);
            mbarrier_complete_tx(c, b, 16, issued.get());
        }
    }
};
Next try_cancel(Warp& w, const Op& o, uint32_t m) {  // address, mbarrier; imm: offsets, multicast
    EACH_LANE(l, m) {
        auto op = std::make_shared<TryCancel>();
        op->address = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
        op->barrier = w.src<uint32_t>(o.x[1])[l] + uint32_t(o.imm[1]);
        op->multicast = o.imm[2];
        mbarrier_at(*w.cta->cluster, op->barrier, &w);
        submit(w, op);
    }
    return Next::advance;
}

const HandlerName table[] = {
    {"clc.try_cancel", try_cancel},
    {"cp.async", cp_async}, {"cp.async.commit", cp_commit}, {"cp.async.wait", cp_wait}, {"cp.async.wait_all", cp_wait_all},
    {"cp.async.arrive", cp_arrive}, {"bulk.copy", bulk_copy}, {"bulk.commit", bulk_commit}, {"bulk.wait", bulk_wait},
};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
