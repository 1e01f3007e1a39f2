// Tensor memory: 128 lanes x 512 columns of 32 bits in each CTA.
#pragma once
#include "core.h"

namespace emu {

constexpr uint32_t TMEM_LANES = 128, TMEM_COLUMNS = 512;
constexpr uint32_t TMEM_POISON = 0x7fedbeefu;  // a NaN

void check_columns(Cta&, uint32_t column, uint32_t n);
// 16-lane blocks [first_block, first_block + blocks), columns [column, column + n)
void shadow_columns(Cta&, uint32_t first_block, uint32_t blocks, uint32_t column, uint32_t n, bool write, const Access&);

}  // namespace emu
