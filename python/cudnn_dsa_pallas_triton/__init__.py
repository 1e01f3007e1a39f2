"""Flash attention for JAX on the Triton backend of Pallas, whose VJP supports everything that its forward does."""

from cudnn_dsa_pallas_triton.api import attention, autotune
from cudnn_dsa_pallas_triton.config import Config, KernelConfig, default_config

__all__ = ["Config", "KernelConfig", "attention", "autotune", "default_config"]
