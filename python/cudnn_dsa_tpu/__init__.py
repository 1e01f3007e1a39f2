"""cudnn_dsa_tpu: mask-free splash attention with its backward, and ring attention, for TPUs in JAX Pallas.

Importing this package imports jax and never torch. See docs/tpu.md for the user guide.
"""

from cudnn_dsa_tpu.attention import SegmentIds, splash_attention
from cudnn_dsa_tpu.block_sizes import BlockSizes
from cudnn_dsa_tpu.ring import local_seq_len, ring_attention

__all__ = ["BlockSizes", "SegmentIds", "local_seq_len", "ring_attention", "splash_attention"]
