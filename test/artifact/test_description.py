"""The launch description, against what the DSL's own host code passes to the driver."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
from artifact_capture import assert_same_launch, dsl_launch
from artifact_demo.backend import scale_rows

from cudnn_dsa.artifact import Launch, Source, Struct, TensorMap, tensor_map
from cudnn_dsa.artifact.description import parse_input

HIGH, LOW = 0x7F12_3456_7000, 0x1_0000


def values(rows: int, **others: object) -> dict[str, object]:
    return {
        "x": HIGH,
        "factor": LOW + 4,
        "out": HIGH + 2**33 + 64,
        "rows": rows,
        "offset": -(2**40),
        "scale": 0.3,
        **others,
    }


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_our_launch_is_the_dsls(arch: str, cluster: int) -> None:
    source = scale_rows(arch, "float16" if cluster == 2 else "bfloat16", cluster)
    for rows in (1, 32, 33, 1023, 1024, 70_000, 2**31 - 1):
        assert_same_launch(source, values(rows))


def test_a_wrong_description_is_told_apart() -> None:
    """The comparison can fail: each field of the description, changed, is seen."""
    from dataclasses import replace

    source = scale_rows("sm_90a")
    first, *others = source.launch.arguments
    changes = [
        replace(source.launch, grid=("ceil_div(rows, 64)", 1, 1)),
        replace(source.launch, shared=source.launch.shared + 16),
        replace(source.launch, cluster=(2, 1, 1)),
        replace(source.launch, block=(64, 1, 1)),
        *(
            replace(source.launch, arguments=(replace(first, **change), *others))
            for change in (
                {"dims": (64, "rows + 1")}, {"strides": (144,)}, {"box": (64, 16)}, {"box": (32, 32)},
                {"swizzle": 0, "box": (64, 32)}, {"dtype": "float16"}, {"name": "out"},
            )
        ),
        replace(source.launch, arguments=(first, Struct("int32", "rows - 1"), *others[1:])),
        replace(source.launch, arguments=(first, others[0], others[2], others[1], *others[3:])),
    ]  # fmt: skip
    for launch in changes:
        with pytest.raises(AssertionError):
            assert_same_launch(replace(source, launch=launch), values(77))


class Maps:
    """A kernel that takes one tensor map and nothing else."""

    def __init__(self, shape: tuple, strides: tuple, box: tuple, swizzle: int, dtype: type[cutlass.Numeric]) -> None:
        self.shape, self.strides, self.box, self.swizzle, self.dtype = shape, strides, box, swizzle, dtype

    @cute.jit
    def __call__(self, x: cute.Pointer):
        source = cute.make_tensor(x, cute.make_layout(self.shape, stride=self.strides))
        order = [1]
        for n in self.box[:-1]:
            order.append(order[-1] * n)
        tile = cute.make_layout(self.box, stride=tuple(order))
        bits = {0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle]
        load, _ = cute.nvgpu.cpasync.make_tiled_tma_atom(
            cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp(),
            source,
            cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, tile),
            self.box,
        )
        self.kernel(load).launch(grid=(1, 1, 1), block=(32, 1, 1), smem=0)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom):
        cute.nvgpu.cpasync.prefetch_descriptor(load)


DTYPES = {
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
    "int32": "Int32",
    "uint8": "Uint8",
    "int64": "Int64",
}
# (dtype, shape, strides in elements, box, swizzle): fastest dimension first. Strides leave gaps: the DSL would make one
# dimension of two that follow each other in memory, and puts dimensions whose box is 1 behind the others.
MAPS = [
    ("bfloat16", (64, 1023), (1, 64), (64, 8), 128),
    ("bfloat16", (64, 1024), (1, 64), (64, 8), 128),  # 128 KiB exactly
    ("bfloat16", (576, 128, 4096), (1, 576, 576 * 128), (64, 64, 1), 128),
    ("float16", (512, 100, 7), (1, 512, 51200), (32, 16, 2), 64),
    ("float16", (512, 100, 7), (1, 576, 57600), (16, 256, 1), 32),
    ("float32", (576, 8192), (1, 576), (32, 64), 128),
    ("float32", (576, 3, 5, 7, 9), (1, 576, 1736, 8684, 60792), (4, 3, 2, 1, 1), 0),
    ("int32", (2048, 33), (1, 2048), (128, 2), 0),
    ("uint8", (4096, 33), (1, 4096), (128, 4), 128),
    ("int64", (64, 300), (1, 64), (16, 4), 128),
    ("bfloat16", (2**31 - 1, 2), (1, 2**37), (64, 1), 128),  # a stride of more than 36 bits
    ("bfloat16", (8, 5461), (1, 24), (8, 8), 0),
    ("bfloat16", (8, 5462), (1, 24), (8, 8), 0),
    ("bfloat16", (1000,), (1,), (64,), 128),
]


@pytest.mark.parametrize("case", MAPS, ids=lambda case: "-".join(map(str, case)).replace(" ", ""))
def test_a_tensor_map_is_the_dsls(case: tuple) -> None:
    dtype, shape, strides, box, swizzle = case
    size = parse_input(dtype + "*").alignment
    launch = Launch(
        (TensorMap("x", dtype, shape, tuple(s * size for s in strides[1:]), box, swizzle),),
        grid=(1, 1, 1), block=(32, 1, 1), shared=0,
    )  # fmt: skip
    numeric = getattr(cutlass, DTYPES[dtype])
    host = lambda: Maps(shape, strides, box, swizzle, numeric)  # noqa: E731
    source = Source("maps", "sm_100a", (), host, {"x": dtype + "*16"}, launch)
    _, (theirs,) = dsl_launch(source, {"x": HIGH})
    ours = tensor_map.encode(dtype, shape, launch.arguments[0].strides, box, swizzle, HIGH)
    assert ours[: tensor_map.DEFINED] == theirs[: tensor_map.DEFINED], tensor_map.decode(theirs)
    said = tensor_map.decode(theirs)
    assert said == {
        "dtype": dtype, "dims": shape, "strides": launch.arguments[0].strides, "box": box, "swizzle": swizzle,
        "address": HIGH,
    }  # fmt: skip
