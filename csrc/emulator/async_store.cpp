// PTX ISA, Data Movement: st.async and red.async (to another CTA's shared memory, counted by an mbarrier there), st.bulk.
#include "async_copy.h"
#include "lanes.h"

namespace emu {
namespace {

struct AsyncStore : AsyncOp {
    uint32_t mask, bytes, to[32], barrier[32];
    int64_t reduction, type;
    uint8_t value[32][16];
    void run() override {
        Cluster& c = *warp->cta->cluster;
        EACH_LANE(l, mask) {
            MBarrier& b = mbarrier_at(c, barrier[l], nullptr);
            Access a = tracked_access(*this, b, true);
            a.atomic = reduction >= 0;
            uint8_t* p = shared_pointer(c, to[l], bytes, bytes);
            c.cta_at(to[l])->shared_shadow.write_bytes(to[l] & SHARED_OFFSET_MASK, bytes, a);
            if (reduction < 0) memcpy(p, value[l], bytes);
            else reduce_bytes(p, value[l], bytes, reduction, type);
            mbarrier_complete_tx(c, b, bytes, issued.get());
        }
        c.launch->counters.bulk_dsmem += uint64_t(__builtin_popcount(mask)) * bytes;
    }
};

// address, mbarrier, values; imm: offsets of address and mbarrier, values, 64-bit values, reduction (-1: store), type
Next async_store(Warp& w, const Op& o, uint32_t m) {
    auto op = std::make_shared<AsyncStore>();
    uint32_t n = uint32_t(o.imm[2]), size = o.imm[3] ? 8 : 4;
    op->mask = m;
    op->bytes = n * size;
    op->reduction = o.imm[4];
    op->type = o.imm[5];
    EACH_LANE(l, m) {
        op->to[l] = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
        op->barrier[l] = w.src<uint32_t>(o.x[1])[l] + uint32_t(o.imm[1]);
        shared_pointer(*w.cta->cluster, op->to[l], op->bytes, op->bytes);
        mbarrier_at(*w.cta->cluster, op->barrier[l], &w);
        if (op->to[l] >> 24 != op->barrier[l] >> 24) fault("st.async or red.async to CTA %u with an mbarrier of CTA %u", op->to[l] >> 24, op->barrier[l] >> 24);
        for (uint32_t k = 0; k < n; k++) {
            if (size == 8) memcpy(op->value[l] + 8 * k, &w.src<uint64_t>(o.x[2 + k])[l], 8);
            else memcpy(op->value[l] + 4 * k, &w.src<uint32_t>(o.x[2 + k])[l], 4);
        }
    }
    submit(w, op);
    return Next::advance;
}

Next bulk_zero(Warp& w, const Op& o, uint32_t m) {  // st.bulk: address, bytes; imm: offset
    EACH_LANE(l, m) {
        uint32_t a = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
        uint64_t n = w.src<uint64_t>(o.x[1])[l];
        if (n % 8 || n > w.cta->shared.size()) fault("st.bulk of %lu bytes", n);
        if (!n) continue;
        Cluster& c = *w.cta->cluster;
        memset(shared_pointer(c, a, uint32_t(n), 8), 0, n);
        c.cta_at(a)->shared_shadow.write_bytes(a & SHARED_OFFSET_MASK, uint32_t(n), warp_access(w));
        w.launch->counters.shared_store += n;
    }
    return Next::advance;
}

const HandlerName table[] = {{"st.async", async_store}, {"st.bulk", bulk_zero}};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
