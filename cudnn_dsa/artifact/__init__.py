"""Compiled CuTe-DSL kernels as objects: compiled once, kept on disk, launched by the driver without the DSL.

A backend describes its kernels as :class:`Source` objects and calls :func:`load`; see docs/compiled-kernels.md.
"""

from cudnn_dsa.artifact.description import Artifact, Launch, Pointer, Scalar, Source, Struct, TensorMap
from cudnn_dsa.artifact.library import find, fingerprint, load, unavailable
from cudnn_dsa.artifact.resources import Resources, resources

__all__ = [
    "Artifact", "Launch", "Pointer", "Resources", "Scalar", "Source", "Struct", "TensorMap", "find",
    "fingerprint", "load", "resources", "unavailable",
]  # fmt: skip
