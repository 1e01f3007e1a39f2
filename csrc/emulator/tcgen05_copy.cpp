// PTX ISA, TensorCore 5th Generation: tcgen05.cp, from shared memory to tensor memory.
//
// The source is a K-major matrix of 16- or 32-byte rows behind a matrix descriptor. It runs in the order of the tensor
// pipe, so a later tcgen05.mma of the same thread finds it done; everybody else waits for a commit.
#include "async_copy.h"
#include "lanes.h"
#include "matrix_descriptor.h"
#include "tensor_memory.h"

namespace emu {
namespace {

struct Shape {
    uint32_t rows, bytes;
    uint32_t copies, copy_step;  // each row goes to `copies` lanes, `copy_step` apart
    uint32_t group, group_step;  // row r begins at lane (r / group) * group_step + r % group
};
// 128x256b, 4x256b (one row to each quarter of the lanes), 128x128b, 64x128b warpx2::02_13 and ::01_23, 32x128b warpx4
const Shape shapes[] = {
    {128, 32, 1, 0, 128, 0}, {4, 32, 1, 0, 1, 32},    {128, 16, 1, 0, 128, 0},
    {64, 16, 2, 64, 64, 0},  {64, 16, 2, 32, 32, 64}, {32, 16, 4, 32, 32, 0},
};

struct Copy : AsyncOp {
    uint32_t to, clock;
    uint64_t from;
    const Shape* shape;
    bool pair;

    void run() override {
        Cta& own = *warp->cta;
        Cluster& c = *own.cluster;
        Access access = stream_access(*this, warp->tcgen05.agent, clock, true, true);
        MatrixDescriptor d(from, false);
        if (pair && c.ctas.size() < 2) fault("cta_group::2 outside a cluster of two");
        for (uint32_t p = 0; p < (pair ? 2u : 1u); p++) {
            Cta& cta = pair ? *c.ctas[(own.rank & ~1u) | p] : own;
            if (!cta.tmem_ready) fault("tcgen05.cp before tcgen05.alloc");
            uint32_t column = to & 0xffff, blocks = 0;
            check_columns(cta, column, shape->bytes / 4);
            auto each_lane = [&](uint32_t row, auto f) {
                for (uint32_t i = 0; i < shape->copies; i++) {
                    uint32_t lane = (to >> 16) + row / shape->group * shape->group_step + row % shape->group + i * shape->copy_step;
                    if (lane >= TMEM_LANES) fault("tcgen05.cp reaches tensor memory lane %u", lane);
                    f(lane);
                }
            };
            for (uint32_t r = 0; r < shape->rows; r++) each_lane(r, [&](uint32_t lane) { blocks |= 1u << (lane / 16); });
            EACH_LANE(block, blocks) shadow_columns(cta, block, 1, column, shape->bytes / 4, true, access);
            d.chunks(0, shape->rows, shape->bytes, 1, false, [&](uint32_t row, uint32_t k, uint32_t address) {
                if (address < SHARED_BASE || address + 16 > cta.shared.size()) fault("tcgen05.cp reads shared address 0x%x", address);
                cta.shared_shadow.read_bytes(address, 16, access);
                each_lane(row, [&](uint32_t lane) { memcpy(&cta.tmem[lane * TMEM_COLUMNS + column + k / 4], &cta.shared[address], 16); });
            });
        }
        c.launch->counters.tmem_store += uint64_t(shape->rows) * shape->bytes * shape->copies * (pair ? 2 : 1);
    }
};

Next copy(Warp& w, const Op& o, uint32_t m) {  // address, descriptor; imm: offset, shape, CTAs
    stream_agent(w, w.tcgen05, "tcgen05 operations");
    EACH_LANE(l, m) {
        auto op = std::make_shared<Copy>();
        op->to = w.src<uint32_t>(o.x[0])[l] + uint32_t(o.imm[0]);
        op->from = w.src<uint64_t>(o.x[1])[l];
        op->shape = &shapes[o.imm[1]];
        op->pair = o.imm[2] == 2;
        op->clock = w.tcgen05.clock;
        submit_tensor(w, op);
    }
    return Next::advance;
}

const HandlerName table[] = {{"tcgen05.cp", copy}};
const Registrar registrar(table);

}  // namespace
}  // namespace emu
