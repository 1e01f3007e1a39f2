// What the units of asynchronous data movement share.
#pragma once
#include "core.h"

namespace emu {

enum Reduction : int64_t { R_ADD, R_MIN, R_MAX, R_AND, R_OR, R_XOR, R_INC, R_DEC };
enum ReductionType : int64_t { T_U8, T_U16, T_U32, T_S32, T_U64, T_S64, T_F16, T_BF16, T_F32, T_F64 };

void reduce_bytes(uint8_t* target, const uint8_t* source, uint32_t bytes, int64_t op, int64_t type);
uint32_t add_store(Warp&, std::shared_ptr<AsyncOp>);  // into the open bulk group; returns the group's clock
Access tracked_access(AsyncOp&, MBarrier&, bool async_proxy);
Access stream_access(AsyncOp&, uint32_t agent, uint32_t clock, bool async_proxy, bool in_order);

}  // namespace emu
