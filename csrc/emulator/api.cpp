// The C interface that cute_emulator's Python side calls through ctypes.
#include <cstdio>

#include "core.h"

namespace emu {
Handler find_handler(const char* name);
}
using namespace emu;

struct RawOp {
    uint64_t handler;
    uint32_t first_operand, first_immediate;
    uint32_t guard, guard_xor;
    uint16_t operands, immediates;
    uint8_t always, kind, unused[2];
};

struct RawLaunch {
    uint32_t grid[3], block[3], cluster[3], dynamic_shared;
    const uint8_t* params;
    const uint64_t* regions;  // base, size pairs
    const char* const* region_names;
    uint32_t region_count, strict_regions;
    uint32_t check, profile, schedule, unused;
    uint64_t seed, instruction_limit;
};

extern "C" {

uint64_t emu_handler(const char* name) { return reinterpret_cast<uint64_t>(find_handler(name)); }

void* emu_program(const RawOp* ops, uint64_t n, const uint32_t* operands, uint64_t n_operands, const int64_t* immediates,
                  uint64_t n_immediates, const uint8_t* constants, uint64_t n_constants, const uint32_t* special,
                  uint64_t n_special, uint32_t register_bytes, uint32_t static_shared, uint32_t local_bytes) {
    auto* p = new Program;
    p->operands.assign(operands, operands + n_operands);
    p->immediates.assign(immediates, immediates + n_immediates);
    p->constants.resize(n_constants + 64);
    memcpy(reinterpret_cast<void*>((uintptr_t(p->constants.data()) + 63) & ~uintptr_t(63)), constants, n_constants);
    p->special.assign(special, special + n_special);
    p->register_bytes = register_bytes;
    p->static_shared = static_shared;
    p->local_bytes = local_bytes;
    p->hits.assign(n, 0);
    for (uint64_t i = 0; i < n; i++) {
        Op o;
        o.fn = reinterpret_cast<Handler>(ops[i].handler);
        o.x = p->operands.data() + ops[i].first_operand;
        o.imm = p->immediates.data() + ops[i].first_immediate;
        o.guard = ops[i].guard;
        o.guard_xor = ops[i].guard_xor;
        o.operands = ops[i].operands;
        o.immediates = ops[i].immediates;
        o.always = ops[i].always;
        o.kind = ops[i].kind;
        p->ops.push_back(o);
    }
    return p;
}

void emu_program_free(void* p) { delete static_cast<Program*>(p); }
const uint64_t* emu_program_hits(void* p) { return static_cast<Program*>(p)->hits.data(); }

void* emu_launch(void* program, const RawLaunch* r) {
    auto* l = new Launch;
    l->program = static_cast<Program*>(program);
    for (int i = 0; i < 3; i++) l->grid[i] = r->grid[i], l->block[i] = r->block[i], l->cluster_dim[i] = r->cluster[i];
    l->dynamic_shared = r->dynamic_shared;
    l->params = r->params;
    for (uint32_t i = 0; i < r->region_count; i++)
        l->regions.push_back({r->regions[2 * i], r->regions[2 * i + 1], r->region_names[i]});
    l->strict_regions = r->strict_regions;
    l->check = r->check;
    l->profile = r->profile;
    l->schedule = Schedule(r->schedule);
    l->random.state = r->seed * 0x9e3779b97f4a7c15ull + 0x1234567;
    l->instruction_limit = r->instruction_limit;
    l->run();
    return l;
}

void emu_launch_free(void* l) { delete static_cast<Launch*>(l); }
const char* emu_launch_error(void* p) { return static_cast<Launch*>(p)->error.c_str(); }
uint32_t emu_launch_fault(void* p, uint32_t* out) {  // pc, CTA id (3), rank, warp
    auto* l = static_cast<Launch*>(p);
    out[0] = l->fault_pc;
    return 0;
}
const uint64_t* emu_launch_counters(void* p) { return reinterpret_cast<uint64_t*>(&static_cast<Launch*>(p)->counters); }
uint64_t emu_launch_hazards(void* p) { return static_cast<Launch*>(p)->hazards.size(); }
const char* emu_launch_hazard(void* p, uint64_t i) {
    static thread_local std::string text;
    Hazard& h = static_cast<Launch*>(p)->hazards[i];
    text = h.kind + "\x1f" + h.what + "\x1f" + h.earlier_agent + "\x1f" + h.agent + "\x1f" + std::to_string(h.earlier_pc) +
           "\x1f" + std::to_string(h.pc) + "\x1f" + std::to_string(h.cta) + "\x1f" + std::to_string(h.address) + "\x1f" +
           std::to_string(h.count) + "\x1f" + (h.note ? "1" : "0");
    return text.c_str();
}
const char* emu_launch_mma(void* p) {
    static thread_local std::string text;
    text.clear();
    for (auto& e : static_cast<Launch*>(p)->mma)
        text += e.first + "\x1f" + std::to_string(e.second.count) + "\x1f" + std::to_string(e.second.flops) + "\x1f" + std::to_string(e.second.useful) + "\n";
    return text.c_str();
}
const char* emu_launch_printed(void* p) { return static_cast<Launch*>(p)->printed.c_str(); }
const uint64_t* emu_launch_warps(void* p, uint64_t* n) {
    auto& w = static_cast<Launch*>(p)->warp_instructions;
    *n = w.size();
    return w.data();
}
const uint64_t* emu_launch_work(void* p) { return static_cast<Launch*>(p)->warp_work.data(); }
const void* emu_launch_timeline(void* p, uint64_t* n) {
    auto& t = static_cast<Launch*>(p)->timeline;
    *n = t.size();
    return t.data();
}
}
