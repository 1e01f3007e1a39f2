"""Kernels from a source to a launch: compiled, kept, built ahead of time, loaded without the DSL, launched."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from artifact_demo import backend  # noqa: E402

import cute_emulator  # noqa: E402
from cudnn_dsa import artifact, backends  # noqa: E402
from cudnn_dsa.__main__ import main  # noqa: E402
from cudnn_dsa.artifact import Artifact, aot, build, key, library  # noqa: E402
from cudnn_dsa.artifact.driver import Memory, architectures  # noqa: E402
from cudnn_dsa.artifact.kernel import Kernel  # noqa: E402
from cudnn_dsa.cli import aot as cli_aot  # noqa: E402
from cudnn_dsa.cli.aot import problems  # noqa: E402
from cudnn_dsa.cli.shapes import MODEL_SHAPES  # noqa: E402
from cudnn_dsa.contracts import ContractError  # noqa: E402
from cudnn_dsa.contracts.sparse_attention import Problem  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that remembers nothing."""
    monkeypatch.setenv("CUDNN_DSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDNN_DSA_KERNELS", raising=False)
    monkeypatch.setattr(library, "_artifacts", {})
    library._records.cache_clear()
    yield tmp_path / "cache"
    library._records.cache_clear()


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compile_source", lambda source: pytest.fail(f"{source.name} was compiled"))


def run(kernel: Kernel, rows: int, offset: int, scale: float) -> None:
    """Launch on random rows; compare with float64."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator).to(getattr(torch, kernel.artifact.launch.arguments[0].dtype))
    factor, out = torch.randn(rows, generator=generator), torch.full((rows, 64), math.nan)
    values = {"x": x, "factor": factor, "out": out, "rows": rows, "offset": offset, "scale": scale}
    kernel.launch(None, values)
    exact = x.double() * factor.double()[:, None] * scale + offset
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("dtype", "cluster"), [("bfloat16", 1), ("float16", 2)])
def test_a_kernel_runs_from_its_description(arch: str, dtype: str, cluster: int) -> None:
    found = artifact.find(backend.scale_rows(arch, dtype, cluster))
    with cute_emulator.device(arch) as device:
        kernel = Kernel(found, device)
        for rows, offset, scale in ((1, 0, 1.0), (77, -3, 0.125), (77, 2**33, -2.0), (64, 5, 3.5)):
            run(kernel, rows, offset, scale)
    assert [launch.grid[0] for launch in device.report.launches] == [
        cluster * -(-r // (32 * cluster)) for r in (1, 77, 77, 64)
    ]


def test_every_target_compiles_and_says_what_it_takes() -> None:
    for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_100f"):
        found = artifact.find(backend.scale_rows(arch))
        taken = artifact.resources(found)
        assert f".target {arch}" in found.ptx
        assert 8 <= taken.registers <= 64
        assert taken.stack == 0
        assert taken.dynamic_shared == backend.SHARED


def test_resources_are_those_that_nvidias_tool_prints() -> None:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found = artifact.find(backend.scale_rows("sm_90a"))
    assert _resources_by(tool, found) == list(artifact.resources(found)[:3])


def test_a_kernel_that_spills_is_told_apart(tmp_path: Path) -> None:
    """The same PTX, assembled with too few registers."""
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    body = "".join(f"ld.global.f32 %f{i}, [%rd1+{4 * i}];\n" for i in range(200))
    body += "bar.sync 0;\n" + "".join(f"st.global.f32 [%rd1+{4 * (199 - i)}], %f{i};\n" for i in range(200))
    ptx = f""".version 8.0
    .target sm_90a
    .address_size 64
    .visible .entry many(.param .u64 p) {{ .reg .f32 %f<200>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; {body} ret; }}
    """
    (tmp_path / "many.ptx").write_text(ptx)
    found = artifact.find(backend.scale_rows("sm_90a"))
    stacks = []
    for registers in (255, 32):
        command = [tools / "ptxas", "-arch=sm_90a", f"-maxrregcount={registers}", "many.ptx", "-o", "many.cubin"]
        subprocess.run(command, cwd=tmp_path, check=True)
        many = replace(found, entry="many", ptx=ptx, cubin=(tmp_path / "many.cubin").read_bytes())
        assert _resources_by(tools / "cuobjdump", many) == list(artifact.resources(many)[:3])
        stacks.append(artifact.resources(many).stack)
    assert stacks[0] == 0
    assert stacks[1] > 400, "168 of 200 values have no register"


def _resources_by(tool: Path, found: Artifact) -> list[int]:
    if not tool.exists():
        pytest.skip("Triton's tools are not here")
    cubin = Path(os.environ["CUDNN_DSA_CACHE_DIR"]).parent / "kernel.cubin"
    cubin.write_bytes(found.cubin)
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    words = dict(
        word.split(":") for word in text.split() if word.count(":") == 1 and word[0] in "RS" and word[-1] != ":"
    )
    return [int(words["REG"]), int(words["STACK"]), int(words["SHARED"])]


def test_a_description_that_is_not_the_kernels_is_refused_when_it_is_compiled() -> None:
    source = backend.scale_rows("sm_90a")
    first, *others = source.launch.arguments
    for arguments in (others, [first, *others[:-1]], [first, artifact.Struct("int64", "rows"), *others[1:]]):
        wrong = replace(source, launch=replace(source.launch, arguments=tuple(arguments)))
        with pytest.raises(ValueError, match="the kernel's parameters have"):
            artifact.find(wrong)
    with pytest.raises(ValueError, match="not a pointer among the inputs"):
        replace(source, launch=replace(source.launch, arguments=(artifact.Pointer("rows"),)))
    with pytest.raises(ValueError, match="not an integer among the inputs"):
        replace(source, launch=replace(source.launch, grid=("scale", 1, 1)))
    with pytest.raises(ValueError, match="not a float32 among the inputs"):
        replace(source, launch=replace(source.launch, arguments=(artifact.Scalar("float32", "rows"),)))


def test_the_next_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = backend.scale_rows("sm_90a")
    first = artifact.find(source)
    no_compiler(monkeypatch)
    assert artifact.find(source) is first
    monkeypatch.setattr(library, "_artifacts", {})
    assert artifact.find(source) == first


def test_each_part_of_a_kernels_identity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = backend.scale_rows("sm_90a", key=(1, "x", None, (2.0, True)))
    others = [
        replace(source, name="other"), replace(source, arch="sm_100a"), replace(source, key=(*source.key, 0)),
        replace(source, launch=replace(source.launch, shared=source.launch.shared + 16)),
        backend.scale_rows("sm_90a", key=(1, "x", None, (2, True))),
        backend.scale_rows("sm_90a", key=(1, "x", None, (2.0, 1))),
        backend.scale_rows("sm_90a", key=(1, "x", None, 2.0, True)),
        backend.scale_rows("sm_90a", key=(1, "x", "None", (2.0, True))),
    ]  # fmt: skip
    identities = [key.identity(s) for s in (source, *others)]
    assert len(set(identities)) == len(identities)
    assert key.identity(backend.scale_rows("sm_90a", key=(1, "x", None, (2.0, True)))) == identities[0]

    before = key.cache_key(source)
    monkeypatch.setattr(key, "toolchain", lambda: {"nvidia-cutlass-dsl": "9.9"})
    assert key.identity(source) == identities[0]
    assert key.cache_key(source) != before
    with pytest.raises(TypeError, match="not <object"):
        key.identity(replace(source, key=(object(),)))


@pytest.mark.parametrize(
    ("installed", "driver_takes", "assembler"),
    [
        ((12, 13), None, 13), ((12, 13), 13, 13), ((12, 13), 14, 13), ((12, 13), 12, 12), ((12,), 13, 12),
        ((13,), 13, 13), ((), 13, None),
    ],
)  # fmt: skip
def test_the_assembler_that_the_dsl_loads_counts(
    installed: tuple, driver_takes: int | None, assembler: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them may stand side by side; which one compiles depends on the driver, and machines share a cache."""
    names = [f"nvidia-cutlass-dsl-libs-cu{major}" for major in installed] + list(key.TOOLCHAIN)

    def version(name: str) -> str:
        if name not in names:
            raise metadata.PackageNotFoundError(name)
        return "4.8.1"

    monkeypatch.setattr(key.metadata, "version", version)
    monkeypatch.setattr(key, "cuda_version", lambda: driver_takes)
    expected = set(key.TOOLCHAIN) | ({f"nvidia-cutlass-dsl-libs-cu{assembler}"} if assembler else set())
    assert set(key.toolchain.__wrapped__()) == expected


def test_the_assembler_in_the_key_is_the_one_loaded() -> None:
    """Against the DSL itself, in this process."""
    import cutlass  # noqa: F401

    loaded = Path(sys.modules["cutlass._mlir._mlir_libs._cutlass_ir"].__file__ or "").name
    assert f"nvidia-cutlass-dsl-libs-{loaded.split('.')[1]}" in key.toolchain.__wrapped__()


def test_an_entry_of_another_description_is_made_again(caplog) -> None:
    """It verifies, but a version that described kernels otherwise wrote it."""
    source = backend.scale_rows("sm_90a")
    whole = library.compiled(source).to_files()
    description = json.loads(whole["launch.json"])
    for change in ({"launch": {"arguments": []}}, {"surplus": 1}, {"inputs": {"x": "int99"}}):
        files = {**whole, "launch.json": json.dumps({**description, **change}).encode()}
        library.CACHE.put(key.cache_key(source), files)
        library._artifacts.clear()
        with caplog.at_level(logging.WARNING):
            assert library.compiled(source).launch == source.launch
        assert "is not understood" in caplog.text
        caplog.clear()
        library._artifacts.clear()
        assert library.compiled(source).launch == source.launch
        assert caplog.text == ""


def test_the_program_text_of_the_whole_package_counts(tmp_path: Path) -> None:
    """A kernel file that the description never names, a file of the shared parts, and nothing else."""
    shutil.copytree(ROOT / "cudnn_dsa", tmp_path / "cudnn_dsa", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(HERE / "artifact_demo", tmp_path / "artifact_demo")
    code = "from cudnn_dsa.artifact import key; print(key.program_text('artifact_demo.backend'))"

    def text() -> str:
        command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout

    def change(file: str) -> None:
        with (tmp_path / file).open("a") as opened:
            opened.write("# changed")

    found = [text()]
    for file in ("artifact_demo/kernel.py", "cudnn_dsa/cute/new_part.py", "cudnn_dsa/api.py"):
        change(file)
        found.append(text())
    assert len(set(found[:3])) == 3
    assert found[3] == found[2]


def test_sizes_seen_before_give_the_same_bytes_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn_dsa.artifact import kernel as kernel_module

    monkeypatch.setattr(kernel_module, "MAX_SIZES", 4)
    with cute_emulator.device("sm_90a") as device:
        kernel = Kernel(artifact.find(backend.scale_rows("sm_90a")), device)
        values = {"x": 4096, "factor": 8, "out": 12, "rows": 5, "offset": 1, "scale": 1.0}
        packed = [kernel.pack({**values, "rows": rows}) for rows in (*range(1, 9), *range(1, 9))]
        assert packed[:8] == packed[8:]
        assert len({bytes(block) for _, block in packed}) == 8
        assert len(kernel._packed) <= 4
        _, other = kernel.pack({**values, "x": 1 << 40})
        assert {i // 8 for i in range(len(other)) if other[i] != packed[4][1][i]} == {0}, (
            "an address changes its own bytes"
        )


def test_addresses_that_are_not_aligned_are_refused() -> None:
    with cute_emulator.device("sm_90a") as device:
        kernel = Kernel(artifact.find(backend.scale_rows("sm_90a")), device)
        good = {
            "x": torch.zeros(3, 64).bfloat16(),
            "factor": torch.ones(4)[1:],
            "out": None,
            "rows": 3,
            "offset": 0,
            "scale": 1.0,
        }
        kernel.pack(good)
        with pytest.raises(ContractError, match="x: expected 16-byte alignment"):
            kernel.pack({**good, "x": torch.zeros(256).bfloat16()[4:]})
        with pytest.raises(ContractError, match="factor: expected 4-byte alignment"):
            kernel.pack({**good, "factor": 4097})


def small(direction: str = "backward", dtype: str = "bfloat16"):
    """A problem of the demonstration backend."""
    return next(replace(p, s_q=2, s_kv=9, topk=5, device="cpu", backend="reference", heads=3)
                for p in problems(MODEL_SHAPES["v4-flash"], [dtype], False) if p.direction == direction)  # fmt: skip


def test_a_problems_kernels_are_found_once_and_dropped_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn_dsa.artifact import driver

    with cute_emulator.device("sm_90a") as device:
        kernels = artifact.load(backend.sources, small())
        assert artifact.load(backend.sources, replace(small(), s_q=7, s_kv=1, topk=99)) is kernels
        assert artifact.load(backend.sources, replace(small(), heads=4)) is not kernels
        assert artifact.load(lambda problem, arch: [], small()) == {}, "another function of the same module"
        monkeypatch.setattr(driver, "MAX_KERNELS", 2)
        for heads in range(5, 9):
            artifact.load(backend.sources, replace(small(), heads=heads))
        assert len(device.memory.kernels) == 2

        calls = []
        monkeypatch.setattr(library, "artifacts_of", lambda *args: calls.append(1) or [])
        problem = replace(small(), heads=77)
        threads = [threading.Thread(target=artifact.load, args=(backend.sources, problem)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls == [1]


def some_problems() -> list[Problem]:
    """One of each direction, of the 16 for a model: each is a compilation."""
    return list(problems(MODEL_SHAPES["v4-flash"], ["bfloat16"], False))[:2]


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``aot`` for one model, by the demonstration backend."""
    folder = tmp_path_factory.mktemp("aot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDNN_DSA_CACHE_DIR", str(folder / "cache"))
        for name in ("sm90", "sm100"):
            patch.setitem(backends.MODULES, name, "artifact_demo.backend")
        patch.setattr(cli_aot, "problems", lambda *args: some_problems())
        command = ["aot", "--arch", "sm_90a", "sm_100f", "--out", str(folder / "kernels"), "--shapes", "v4-flash"]
        assert main(command) == 0
    return folder / "kernels"


@pytest.fixture
def built(built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the backend in its place."""
    for name in ("sm90", "sm100"):
        monkeypatch.setitem(backends.MODULES, name, "artifact_demo.backend")
    return Path(shutil.copytree(built_once, tmp_path / "kernels"))


def test_the_kernels_of_a_model() -> None:
    """With and without sink, lengths, an fp32 out; two directions; the deterministic backward on top where asked."""
    shape = MODEL_SHAPES["v3.2"]
    for deterministic, number in ((False, 16), (True, 24)):
        wanted = list(problems(shape, ["bfloat16", "float16"], deterministic))
        assert len({p.kernel_key("") for p in wanted}) == len(wanted) == 2 * number
        assert {(p.heads, p.head_dim, p.topk) for p in wanted} == {(shape.heads, shape.head_dim, shape.topk)}


def test_a_directory_built_ahead_is_whole_and_used_first(built: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    records = aot.manifest(built)
    assert len(records) == 2 * len(some_problems())
    assert {record["arch"] for record in records} == {"sm_90a", "sm_100f"}
    assert {path.name for path in built.iterdir()} == {"manifest.json"} | {
        n for r in records for n, _ in r["files"].values()
    }

    monkeypatch.setenv("CUDNN_DSA_KERNELS", f"/nowhere:{built}")
    library._records.cache_clear()
    monkeypatch.setattr(library, "_artifacts", {})
    no_compiler(monkeypatch)
    monkeypatch.setattr(library, "compiled", lambda source: pytest.fail("not found"))
    problem = replace(some_problems()[0], s_q=9, s_kv=3, device="cpu")
    for arch, target in (("sm_90a", "sm_90a"), ("sm_103a", "sm_100f"), ("sm_100a", "sm_100f")):
        with cute_emulator.device(arch) as device:
            device.architectures = architectures(int(arch[3:-2]), int(arch[-2]))
            kernels = artifact.load(backend.sources, problem)
            assert kernels["scale_rows"].artifact.arch == target
            run(kernels["scale_rows"], 40, 2, 0.5)


def test_a_directory_built_ahead_needs_no_dsl(built: Path) -> None:
    code = """
import sys
for name in ("cutlass", "nvidia_cutlass_dsl"):
    sys.modules[name] = None
import torch, cute_emulator
from artifact_demo import backend
from cudnn_dsa import artifact
from cudnn_dsa.artifact import build, key
key.toolchain = lambda: {}
assert build.unavailable()
from cudnn_dsa.cli.aot import problems
from cudnn_dsa.cli.shapes import MODEL_SHAPES
problem = next(problems(MODEL_SHAPES["v4-flash"], ["bfloat16"], False))
with cute_emulator.device("sm_90a") as device:
    assert backend.unavailable("cpu") is None
    values = {"x": torch.ones(3, 64).bfloat16(), "factor": torch.ones(3), "out": torch.zeros(3, 64), "rows": 3,
              "offset": 1, "scale": 2.0}
    artifact.load(backend.sources, problem)["scale_rows"].launch(None, values)
    assert torch.equal(values["out"], torch.full((3, 64), 3.0))
    try:
        artifact.find(backend.scale_rows("sm_90a", "float16"))
    except RuntimeError as error:
        assert "pip install 'cudnn-dsa[cuda]'" in str(error), error
    else:
        raise AssertionError
"""
    path = f"{ROOT}:{ROOT}/python:{HERE}"
    environment = os.environ | {"PYTHONPATH": path, "CUDNN_DSA_KERNELS": str(built)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_wheel_carries_them(built: Path, tmp_path: Path) -> None:
    """Of a copy of the tree with the directory in its place; the demonstration backend finds its kernels in it."""
    tree = tmp_path / "tree"
    for name in ("cudnn_dsa", "python", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(built, tree / "cudnn_dsa" / "kernels")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=tree, check=True, env=os.environ | {"SKIP_EXTENSION": "1"})
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
from artifact_demo import backend
from cudnn_dsa.artifact import library
from cudnn_dsa.cli.aot import problems
from cudnn_dsa.cli.shapes import MODEL_SHAPES
problem = next(problems(MODEL_SHAPES["v4-flash"], ["bfloat16"], False))
library.compiled = None
(found,) = library.artifacts_of(backend.sources, problem, ("sm_90a",))
print(found.arch, library.PACKAGED)
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{HERE}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sm_90a", str(tmp_path / "site" / "cudnn_dsa" / "kernels")]


def test_a_file_that_was_changed_after_the_build_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_DSA_KERNELS", str(built))
    library._records.cache_clear()
    for record in aot.manifest(built):
        for name, _ in record["files"].values():
            path = built / name
            data = path.read_bytes()
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
            with pytest.raises(RuntimeError, match=f"{name} is not the file that was built"):
                aot.read(built, record)
            path.write_bytes(data)
        aot.read(built, record)
    monkeypatch.setattr(cli_aot, "problems", lambda *args: some_problems())
    assert main(["aot", "--arch", "sm_90a", "--out", str(built), "--shapes", "v4-flash"]) == 0
    assert {path.name.partition("-")[0] for path in built.iterdir()} == {"manifest.json", "sm_90a"}, (
        "stale files are left"
    )


def test_a_manifest_of_another_format_is_none(tmp_path: Path, caplog) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99, "kernels": [1]}))
    with caplog.at_level(logging.WARNING):
        assert aot.manifest(tmp_path) == []
    assert "another version" in caplog.text
    assert aot.manifest(tmp_path / "nowhere") == []


def test_a_damaged_manifest_is_named_and_built_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a build that was interrupted leaves: the choice of a backend goes on to the next one."""
    monkeypatch.setenv("CUDNN_DSA_KERNELS", str(built))
    (artifact_of_it,) = [aot.read(built, record) for record in aot.manifest(built)][:1]
    whole = (built / "manifest.json").read_bytes()
    for left in (b"", whole[: len(whole) // 2]):
        (built / "manifest.json").write_bytes(left)
        library._records.cache_clear()
        with cute_emulator.device("sm_90a"), pytest.raises(RuntimeError, match=r"manifest\.json is damaged"):
            artifact.unavailable("cpu", 9)
        aot.write(built, [artifact_of_it])
        assert [record["name"] for record in aot.manifest(built)] == [artifact_of_it.name]


def test_kernels_of_another_architecture_make_nothing_available(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_DSA_KERNELS", str(built))
    monkeypatch.setattr(key, "toolchain", dict)
    manifest = json.loads((built / "manifest.json").read_bytes())
    for kept, available in (("sm_90a", (True, False)), ("sm_100f", (False, True))):
        kernels = [record for record in manifest["kernels"] if record["arch"] == kept]
        (built / "manifest.json").write_text(json.dumps({**manifest, "kernels": kernels}))
        library._records.cache_clear()
        for arch, major, expected in (("sm_90a", 9, available[0]), ("sm_103a", 10, available[1])):
            with cute_emulator.device(arch) as device:
                device.architectures = architectures(int(arch[3:-2]), int(arch[-2]))
                reason = artifact.unavailable("cpu", major)
                assert reason is None if expected else "not installed" in str(reason)


def test_aot_says_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delitem(backends.MODULES, "sm90", raising=False)
    assert main(["aot", "--arch", "sm_90a", "--out", str(tmp_path)]) == 2
    assert "sm_90a: backend 'sm90' is not in this version" in capsys.readouterr().err
    monkeypatch.setitem(backends.MODULES, "sm90", "artifact_demo.backend")
    monkeypatch.setattr(key, "toolchain", dict)
    assert main(["aot", "--arch", "sm_90a", "--out", str(tmp_path)]) == 2
    assert "pip install 'cudnn-dsa[cuda]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["aot", "--arch", "sm_90a", "--out", str(tmp_path), "--shapes", "v9"])
    assert "no shape v9" in capsys.readouterr().err


def test_a_device_says_what_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not on cpu" in artifact.unavailable("cpu", 9)
    with cute_emulator.device("sm_90a"):
        assert artifact.unavailable("cpu", 9) is None
        assert "sm_90, the kernels are for sm_10x" in artifact.unavailable("cuda:0", 10)
        monkeypatch.setattr(key, "toolchain", dict)
        assert "not installed" in artifact.unavailable("cpu", 9)
    with cute_emulator.device("sm_103a"):
        assert artifact.unavailable("cpu", 9) is not None
    assert Memory().kernels == {}
