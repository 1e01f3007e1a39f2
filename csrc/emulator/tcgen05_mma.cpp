// PTX ISA, TensorCore 5th Generation: tcgen05.mma, tcgen05.commit; instruction descriptor, matrix descriptors, data path
// layouts (cta_group::1 with M 64 and 128, cta_group::2 with M 128 and 256, .ws with M 32, 64 and 128).
#include "async_copy.h"
#include "lanes.h"
#include "matrix_descriptor.h"
#include "tensor_memory.h"

namespace emu {
namespace {

enum Kind : int64_t { K_F16, K_TF32, K_F8F6F4 };
const char* const kind_names[] = {"f16", "tf32", "f8f6f4"};

struct Mma : AsyncOp {
    uint32_t d, a_tmem, idesc, clock, disabled[8], disable_words;
    uint64_t a, b;
    bool accumulate, a_in_tmem, pair, stationary;
    int64_t kind;
    float scale;

    Element element(uint32_t format) const {
        if (kind == K_F16 && format <= 1) return format ? Element::bf16 : Element::f16;
        if (kind == K_TF32 && format == 2) return Element::tf32;
        if (kind == K_F8F6F4 && format <= 1) return format ? Element::e5m2 : Element::e4m3;
        fault("instruction descriptor 0x%08x: operand format %u of kind::%s is not modelled", idesc, format, kind_names[kind]);
    }
    void run() override {
        Cta& own = *warp->cta;
        Cluster& c = *own.cluster;
        uint32_t m = (idesc >> 24 & 31) << 4, n = (idesc >> 17 & 63) << 3, size = pair ? 2 : 1;
        if (idesc >> 2 & 1) fault("instruction descriptor 0x%08x: sparsity is not modelled", idesc);
        uint32_t result = idesc >> 4 & 3;
        if (result > 1 || (!result && kind == K_TF32)) fault("instruction descriptor 0x%08x: accumulators of format %u of kind::%s are not modelled", idesc, result, kind_names[kind]);
        Element ea = element(idesc >> 7 & 7), eb = element(idesc >> 10 & 7);
        bool valid = stationary ? (m == 32 || m == 64 || m == 128) && (n == 64 || n == 128 || n == 256)
                     : pair     ? (m == 128 || m == 256) && n % 16 == 0
                                : (m == 64 && n % 8 == 0) || (m == 128 && n % 16 == 0);
        if (!valid || n < 8 || n > 256) fault("instruction descriptor 0x%08x: a shape of %u x %u does not exist with cta_group::%u%s", idesc, m, n, size, stationary ? " and .ws" : "");
        if (stationary && a_in_tmem && m < 128) fault("tcgen05.mma.ws of %u rows with A in tensor memory is not modelled", m);
        if (pair && c.ctas.size() < 2) fault("cta_group::2 outside a cluster of two");
        uint32_t k = 32 / element_bytes(ea), rows = m / size, column = d & 0xffff, base_lane = d >> 16;
        // Fewer rows than lanes: each further fold of the lanes holds the next part of N, or (M 64) rows lie 16 a warp.
        uint32_t folds = stationary || pair ? 128 / rows : 1, columns = n / folds;
        Cta* peers[2] = {&own, &own};
        if (pair) peers[0] = c.ctas[own.rank & ~1u].get(), peers[1] = c.ctas[own.rank | 1].get();
        Access access = stream_access(*this, warp->tcgen05.agent, clock, true, true);
        static thread_local MmaTile tile;
        uint64_t useful = 0;
        bool negate = (idesc >> 13 & 1) != (idesc >> 14 & 1);
        MatrixDescriptor db(b, false);
        for (uint32_t p = 0; p < size; p++) load_operand(*peers[p], db, 0, n / size, k, eb, idesc >> 16 & 1, tile, true, p * (n / size), 1.f, access);
        for (uint32_t p = 0; p < size; p++) {
            Cta& cta = *peers[p];
            if (!cta.tmem_ready) fault("tcgen05.mma before tcgen05.alloc");
            check_columns(cta, column, columns);
            auto lane_of = [&](uint32_t r) { return rows == 64 && folds == 1 ? base_lane + (r / 16) * 32 + r % 16 : base_lane + r; };
            if (a_in_tmem) {
                uint32_t words = k * element_bytes(ea) / 4, ac = a_tmem & 0xffff;
                check_columns(cta, ac, words);
                for (uint32_t r = 0; r < rows; r++) {
                    const uint32_t* row = cta.tmem.data() + lane_of(r) * TMEM_COLUMNS + ac;
                    for (uint32_t i = 0; i < words; i += 4) convert(reinterpret_cast<const uint8_t*>(row + i), ea, &tile.a[r][i * 4 / element_bytes(ea)]);
                    if (negate)
                        for (uint32_t i = 0; i < k; i++) tile.a[r][i] = -tile.a[r][i];
                }
                for (uint32_t r = 0; r < rows; r += 16) shadow_columns(cta, lane_of(r) / 16, 1, ac, words, false, access);
            } else {
                load_operand(cta, MatrixDescriptor(a, false), 0, rows, k, ea, idesc >> 15 & 1, tile, false, 0, negate ? -1.f : 1.f, access);
            }
            useful += useful_flops(tile, rows, n, k);
            static thread_local float discard[TMEM_COLUMNS], half[MMA_MAX_M][MMA_MAX_N];
            uint32_t seen = 0;
            for (uint32_t fold = 0; fold < folds; fold++)
                for (uint32_t r = 0; r < rows; r += 16) seen |= 1u << ((lane_of(r) + rows * fold) / 16);
            EACH_LANE(block, seen) {
                if (accumulate) shadow_columns(cta, block, 1, column, columns, false, access);
                shadow_columns(cta, block, 1, column, columns, true, access);
            }
            for (uint32_t fold = 0; fold < folds; fold++) {
                float* target[MMA_MAX_M];
                uint32_t* cells[MMA_MAX_M];
                for (uint32_t r = 0; r < rows; r++) {
                    uint32_t lane = lane_of(r) + rows * fold;
                    if (lane >= TMEM_LANES) fault("tcgen05.mma reaches tensor memory lane %u", lane);
                    bool off = disable_words && (disabled[(pair && p ? 4 : 0) + lane / 32] >> (lane % 32) & 1);
                    cells[r] = off ? reinterpret_cast<uint32_t*>(discard) : cta.tmem.data() + lane * TMEM_COLUMNS + column;
                    target[r] = result ? reinterpret_cast<float*>(cells[r]) : half[r];
                    if (!result && accumulate)  // an f16 accumulator is the low half of its column
                        for (uint32_t j = 0; j < columns; j++) half[r][j] = half_to_float(cells[r][j] & 0xffff);
                }
                multiply(tile, rows, columns, k, target, accumulate, scale, fold * columns);
                if (!result)
                    for (uint32_t r = 0; r < rows; r++)
                        for (uint32_t j = 0; j < columns; j++) cells[r][j] = float_to_half(half[r][j]);
            }
        }
        char key[96];
        snprintf(key, sizeof key, "tcgen05 %s %s%s cta_group::%u %ux%ux%u", kind_names[kind], a_in_tmem ? "TS" : "SS", stationary ? " ws" : "", size, m, n, k);
        MmaCount& count = c.launch->mma[key];
        count.count++;
        count.flops += 2ull * m * n * k;
        count.useful += useful;
    }
};

// d, a, b, idesc, enable, disable-output-lane words;
// imm: kind, CTAs, A in tensor memory, offsets of d and a, disable words, log2 of the input scale, weight-stationary
Next mma(Warp& w, const Op& o, uint32_t m) {
    stream_agent(w, w.tcgen05, "tcgen05 operations");
    EACH_LANE(l, m) {
        auto op = std::make_shared<Mma>();
        op->kind = o.imm[0];
        op->pair = o.imm[1] == 2;
        op->a_in_tmem = o.imm[2];
        op->d = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[3]);
        if (op->a_in_tmem) op->a_tmem = w.src<uint32_t>(o.x[1])[l] + uint32_t(o.imm[4]);
        else op->a = w.src<uint64_t>(o.x[1])[l];
        op->b = w.src<uint64_t>(o.x[2])[l];
        op->idesc = w.src<uint32_t>(o.x[3])[l];
        op->accumulate = w.pred(o.x[4]) >> l & 1;
        op->disable_words = uint32_t(o.imm[5]);
        for (uint32_t i = 0; i < op->disable_words; i++) op->disabled[i] = w.src<uint32_t>(o.x[5 + i])[l];
        op->scale = float(std::ldexp(1.0, -int(o.imm[6])));
        op->stationary = o.imm[7];
        op->clock = w.tcgen05.clock;
        submit_tensor(w, op);
    }
    return Next::advance;
}

struct Commit : AsyncOp {
    uint32_t address, mask, clock;
    bool multicast;
    void run() override {
        Cluster& c = *warp->cta->cluster;
        Clock knowledge = *issued;
        if (warp->tcgen05.agent) knowledge.set(warp->tcgen05.agent, clock, true);
        if (!multicast) return mbarrier_arrive(c, mbarrier_at(c, address, nullptr), 1, &knowledge);
        for (uint32_t r = 0; r < 16; r++)
            if (mask >> r & 1) mbarrier_arrive(c, mbarrier_at(c, (address & SHARED_OFFSET_MASK) | r << 24, nullptr), 1, &knowledge);
    }
};
Next commit(Warp& w, const Op& o, uint32_t m) {  // mbarrier, cta mask (may be absent); imm: offset
    stream_agent(w, w.tcgen05, "tcgen05 operations");
    EACH_LANE(l, m) {
        auto op = std::make_shared<Commit>();
        op->address = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
        op->multicast = o.x[1] != NONE;
        if (op->multicast) op->mask = w.src<uint32_t>(o.x[1])[l] & 0xffff;
        else mbarrier_at(*w.cta->cluster, op->address, &w);
        op->clock = w.tcgen05.clock++;
        submit_tensor(w, op);
    }
    return Next::advance;
}

const HandlerName table[] = {{"tcgen05.mma", mma}, {"tcgen05.commit", commit}};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
