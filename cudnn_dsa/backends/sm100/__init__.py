"""The Blackwell backend: CuTe-DSL kernels for sm_100a and sm_103a (docs/sm100.md)."""
