"""cudnn_dsa_tpu: mask-free splash attention with its backward, and ring attention, for TPUs in JAX Pallas.

Importing this package imports jax and never torch. See docs/tpu.md for the user guide.
"""

from cudnn_dsa_tpu.attention import SegmentIds, splash_attention
from cudnn_dsa_tpu.block_sizes import BlockSizes
from cudnn_dsa_tpu.fixed_m import (
    FixedM,
    FixedMConstants,
    FixedMNorms,
    fixed_m_dtype_is_safe,
    fixed_m_k_mean,
    fixed_m_norms,
    get_fixed_m_constants,
)
from cudnn_dsa_tpu.fixed_m_attention import fixed_m_attention
from cudnn_dsa_tpu.ring import local_seq_len, ring_attention

__all__ = [
    "BlockSizes",
    "FixedM",
    "FixedMConstants",
    "FixedMNorms",
    "SegmentIds",
    "fixed_m_attention",
    "fixed_m_dtype_is_safe",
    "fixed_m_k_mean",
    "fixed_m_norms",
    "get_fixed_m_constants",
    "local_seq_len",
    "ring_attention",
    "splash_attention",
]
