"""``TensorSpec``: what a rule may know of an array, and ``describe``, which makes one without reading data."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

# A size is an int, or a framework's symbolic integer (torch.SymInt under torch.compile, a jax.export dimension).
Size = Any

_ITEMSIZE = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "int16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


class TensorSpec(NamedTuple):
    """Shape, dtype, strides, device and place in memory of an array; never its values.

    Attributes:
        shape: sizes, outermost first; a size may be symbolic.
        dtype: the framework-neutral name, e.g. ``"bfloat16"``.
        strides: in elements, one per dimension; None where the framework has no strides (JAX).
        device: ``"cpu"``, ``"cuda:0"``, ``"meta"``, ...; empty where it is not known yet (a JAX tracer).
        address: byte address of the first element; None for arrays without memory (meta, fake, traced).
    """

    shape: tuple[Size, ...]
    dtype: str
    strides: tuple[Size, ...] | None = None
    device: str = ""
    address: int | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self.dtype]

    @property
    def numel(self) -> Size:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Row-major and dense. Sizes of 1 do not constrain their stride; an empty array is contiguous."""
        if self.strides is None:
            return True
        run: Size = 1
        dense = True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 0:
                return True
            if size != 1:
                dense = dense and stride == run
                run = run * size
        return bool(dense)

    def __str__(self) -> str:
        return f"{self.dtype} {format_shape(self.shape)}" + (f" on {self.device}" if self.device else "")


def format_shape(shape: tuple[Size, ...]) -> str:
    """``(4, 2, 512)``; one dimension as ``(4,)``."""
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


# Both caches hold one entry for every dtype and device object of the process: a handful.
_torch_dtype_names: dict[Any, str] = {}
_torch_device_names: dict[Any, str] = {}


def describe(x: Any) -> TensorSpec:
    """The :class:`TensorSpec` of a torch tensor, a JAX array or tracer, a NumPy array, or what has shape and dtype.

    No data is read and no framework is imported. Raises ``TypeError`` for anything else.
    """
    if hasattr(x, "untyped_storage"):
        return _describe_torch(x)
    if isinstance(x, TensorSpec):
        return x
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        dtype = getattr(x.dtype, "name", None) or str(x.dtype)
        if hasattr(x, "__array_interface__") and hasattr(x, "strides") and type(x).__module__ == "numpy":
            strides = tuple(s // x.itemsize for s in x.strides)
            return TensorSpec(tuple(x.shape), dtype, strides, "cpu", x.__array_interface__["data"][0])
        return TensorSpec(tuple(x.shape), dtype, None, _jax_device(x))
    raise TypeError(f"expected a tensor or array, got {type(x).__name__}")


def _describe_torch(x: Any) -> TensorSpec:
    dtype = x.dtype
    name = _torch_dtype_names.get(dtype)
    if name is None:
        name = _torch_dtype_names[dtype] = str(dtype).removeprefix("torch.")
    device = x.device
    place = _torch_device_names.get(device)
    if place is None:
        place = _torch_device_names[device] = str(device)
    layout = x.layout
    if layout is not sys.modules["torch"].strided:
        raise TypeError(f"expected a strided tensor, got layout {layout}")
    return TensorSpec(tuple(x.shape), name, tuple(x.stride()), place, _torch_address(x, place))


def _torch_address(x: Any, place: str) -> int | None:
    # Fake and functional tensors have a real device but no memory; asking them for an address raises.
    if place == "meta" or type(x).__name__ in ("FakeTensor", "FunctionalTensor"):
        return None
    try:
        return x.data_ptr() or None
    except RuntimeError:
        return None


def _jax_device(x: Any) -> str:
    try:
        devices = x.devices()
    except Exception:  # tracers and shape structs have no devices; which exception says so differs by version
        return ""
    names = sorted(f"{d.platform}:{d.id}" for d in devices)
    return names[0] if len(names) == 1 else "+".join(names)
