"""The self-test: right kernels pass once, wrong ones are refused, whatever is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from artifact_demo import backend  # noqa: E402

import cudnn_dsa  # noqa: E402
import cute_emulator  # noqa: E402
from cudnn_dsa import backends, interface, selftest  # noqa: E402
from cudnn_dsa.__main__ import main  # noqa: E402
from cudnn_dsa.artifact import library  # noqa: E402
from cudnn_dsa.artifact.driver import install  # noqa: E402
from cudnn_dsa.backends import reference  # noqa: E402
from cudnn_dsa.cli.aot import problems  # noqa: E402
from cudnn_dsa.cli.shapes import ModelShape  # noqa: E402
from cudnn_dsa.contracts import UnsupportedError  # noqa: E402
from cudnn_dsa.contracts.sparse_attention import Problem  # noqa: E402


class Fake(SimpleNamespace):
    """What stands for a backend module."""

    __hash__ = object.__hash__


SMALL = ModelShape("small", heads=3, head_dim=576, topk=200)


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_DSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(selftest, "_passed", set())
    monkeypatch.setattr(library, "_artifacts", {})


def variants(dtype: str, **changes: Any) -> Iterator[Problem]:
    """Every kernel key of a small model, on the CPU."""
    for problem in problems(SMALL, [dtype], False):
        yield replace(problem, device="cpu", **changes)


def problem(direction: str, **changes: Any) -> Problem:
    """With a sink and lengths."""
    return [p for p in variants("bfloat16", **changes) if p.direction == direction][-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("topk", [1, 100, 113, 200])
def test_a_right_backend_passes_every_variant(dtype: str, topk: int) -> None:
    """The C++ kernels, which round once, where they are built; else the reference, whose arithmetic is fp32 here."""
    cpu = backends.load("cpu")
    right = cpu if cpu.unavailable("cpu") is None else reference
    for p in variants(dtype, topk=topk):
        for q in (p, replace(p, accumulate=True, dkv_dtype="float32")) if p.direction == "backward" else (p,):
            errors = selftest.compare(right, q)
            assert set(errors) == (
                {"dq", "dkv", *(["d_sink"] if q.has_sink else [])} if q.direction == "backward" else {"out", "lse"}
            )
            assert all(error <= selftest._tolerance(name, q) / 3 for name, error in errors.items()), (q, errors)


def test_the_reference_alone_passes() -> None:
    for p in variants("bfloat16"):
        assert max(selftest.compare(reference, p).values()) < 3e-3


def test_the_callers_defaults_change_nothing() -> None:
    wanted = [selftest.compare(reference, p) for p in variants("bfloat16")]
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert [selftest.compare(reference, p) for p in variants("bfloat16")] == wanted
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_selection_is_no_test() -> None:
    selftest.ensure(Fake(), problem("backward", topk=0))


def test_a_large_problem_is_tested_on_its_own_kernels() -> None:
    large = replace(problem("backward"), s_kv=2**31 // 576 + 1)
    tiny = selftest._tiny(large)
    assert tiny.s_kv == selftest.S_KV
    assert tiny.kernel_key("a") == large.kernel_key("a")
    assert tiny.kernel_key("a") != selftest._tiny(problem("backward")).kernel_key("a")


def _wrong(change: Any) -> Any:
    """The reference with its result changed."""

    def call(direction: str) -> Any:
        def run(p: Problem, tensors: Any, workspace: Any, stream: Any) -> None:
            getattr(reference, direction)(p, tensors, workspace, stream)
            change(tensors)

        return run

    return Fake(
        workspace_bytes=lambda p: 0, forward=call("forward"), backward=call("backward"), fingerprint=lambda p: "wrong",
        __name__="package.wrong",
    )  # fmt: skip


# What kernels get wrong: (direction, change of the tensors after a right result).
WRONG = {
    "one key of one query": ("backward", lambda t: t.dkv[t.topk_idxs[1][t.topk_idxs[1] >= 0][0]].zero_()),
    "one row of dq": ("backward", lambda t: t.dq[2, 1].zero_()),
    "the empty row": ("backward", lambda t: t.dq[0, 0, 0].fill_(0.5)),
    "a scale": ("backward", lambda t: t.dq.mul_(1.02)),
    "the rotary columns": ("backward", lambda t: t.dq[..., 512:].neg_()),
    "one NaN": ("backward", lambda t: t.dkv[3, 3].fill_(float("nan"))),
    "an unwritten sink gradient": ("backward", lambda t: t.d_sink[2].fill_(float("nan"))),
    "a sink gradient two in a thousand off": ("backward", lambda t: t.d_sink.mul_(1.002)),
    "the second query of one CTA of four": ("backward", lambda t: t.dq[7].mul_(1.5)),
    "the third query of a CTA": ("forward", lambda t: t.out[8].zero_()),
    "a tile of columns": ("forward", lambda t: t.out[..., 64:128].zero_()),
    "an lse in base 2": ("forward", lambda t: t.lse.mul_(1.4427)),
    "an lse of +inf for the empty row": ("forward", lambda t: t.lse.neg_() if t.lse.isinf().any() else None),
    "an lse of one key too few": ("forward", lambda t: t.lse.sub_(0.02)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused_and_says_what_differed(name: str) -> None:
    direction, change = WRONG[name]
    with (
        install(SimpleNamespace(kind="a device", multiprocessors=4)),
        pytest.raises(UnsupportedError, match="allowed: ") as caught,
    ):
        selftest.ensure(_wrong(change), problem(direction))
    assert "kernels that compute what the reference does on a device" in str(caught.value)
    (verdict,) = selftest.verdicts()
    assert (verdict["passed"], verdict["backend"], verdict["kind"]) == (False, "wrong", "a device")


def test_what_a_kernel_does_not_write_is_found() -> None:
    nothing = Fake(workspace_bytes=lambda p: 64, backward=lambda *a: None, forward=lambda *a: None)
    for direction in ("forward", "backward"):
        assert min(selftest.compare(nothing, problem(direction)).values()) == float("inf")


def test_a_verdict_is_remembered_by_device_kind_and_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(
        selftest, "compare", lambda b, p, repeats: compared.append(b.fingerprint(p)) or {"dq": errors[-1]}
    )
    errors = [0.0]
    fingerprints = ["first"]
    tested = Fake(fingerprint=lambda p: fingerprints[-1], __name__="tested")

    def ensure(kind: str, passes: bool = True) -> None:
        with install(SimpleNamespace(kind=kind, multiprocessors=4)):
            if passes:
                selftest.ensure(tested, problem("backward"))
            else:
                with pytest.raises(UnsupportedError):
                    selftest.ensure(tested, problem("backward"))

    ensure("H200")
    ensure("H200")
    assert compared == ["first"]
    ensure("B200")
    fingerprints.append("second")
    ensure("B200")
    assert compared == ["first", "first", "second"]
    errors.append(1.0)
    ensure("B200")
    ensure("H200", passes=False)
    ensure("H200", passes=False)
    assert compared[3:] == ["second", "second"], "a failure is tested again, success is not"
    errors.append(0.0)
    ensure("H200")
    fingerprints.append(None)
    ensure("never tested")
    assert len(compared) == 6
    assert [(v["kind"], v["passed"]) for v in selftest.verdicts()] == [("B200", True)] * 2 + [("H200", True)] * 2


def test_on_silicon_a_kernel_that_passed_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while a graph is captured nothing is tested."""
    calls: list[Problem] = []
    monkeypatch.setattr(selftest, "_verify", lambda b, p: calls.append(p))
    capturing = [True]
    monkeypatch.setattr(selftest, "_capturing", lambda device: capturing[-1])
    for state in (True, False, False, True):
        capturing.append(state)
        selftest.ensure(reference, replace(problem("backward"), s_q=len(capturing)))
    assert len(calls) == 1
    selftest.ensure(reference, replace(problem("backward"), heads=9))
    assert len(calls) == 1
    capturing.append(False)
    selftest.ensure(reference, replace(problem("backward"), heads=9))
    assert len(calls) == 2
    selftest.ensure(reference, replace(problem("backward"), heads=9, topk=129))
    assert len(calls) == 2
    selftest.ensure(reference, replace(problem("backward"), heads=9, topk=257))
    assert len(calls) == 3, "another class of K is another tile of Triton's"


def test_what_one_device_or_silicon_passed_is_not_known_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(selftest, "_verify", lambda b, p: asked.append(p.device))
    monkeypatch.setattr(selftest, "_capturing", lambda device: False)
    p = problem("backward")
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        assert selftest.ensure(reference, replace(p, device=device)) is True
    assert asked == ["cuda:0", "cuda:1"]
    with install(Fake(kind="another")):  # runs instead of silicon, whatever the problem's device
        for _ in range(2):
            assert selftest.ensure(reference, replace(p, device="cuda:0")) is False
    assert asked[2:] == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_launch_path_asks_first(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's compile(), and the first call of what has no plan; not a call that launches nothing."""
    asked: list[Problem] = []
    monkeypatch.setattr(selftest, "ensure", lambda b, p: asked.append(p))
    q, kv, idxs = torch.randn(2, 3, 8), torch.randn(5, 8), torch.zeros(2, 4, dtype=torch.int32)
    out, lse = interface.sparse_attention_forward(q, kv, idxs, backend="reference")
    assert len(asked) == 1
    if direction == "forward":
        plan = cudnn_dsa.SparseAttentionForward(q, kv, idxs, backend="reference")
        interface.sparse_attention_forward(q, kv, idxs[:, :0], backend="reference")
    else:
        interface.sparse_attention_backward(q, kv, out, out, lse, None, idxs, backend="reference")
        plan = cudnn_dsa.SparseAttentionBackward(q, kv, out, out, lse, None, idxs, backend="reference")
        assert len(asked) == 2
    before = len(asked)
    plan.compile()
    assert [(p.direction, p.accumulate) for p in asked[before:]] == (
        [("forward", False)] if direction == "forward" else [("backward", False), ("backward", True)]
    )


def test_every_backend_has_every_call() -> None:
    calls = [name for name in vars(backends.Backend) if not name.startswith("_")]
    assert "fingerprint" in calls
    for name in backends.MODULES:
        assert [call for call in calls if not callable(getattr(backends.load(name), call, None))] == [], name


@pytest.mark.parametrize("arch", ["sm_90a"])
def test_an_emulated_kernel_passes_and_a_broken_one_is_refused(arch: str, capsys) -> None:
    p = problem("backward")
    with cute_emulator.device(arch) as device:
        selftest.ensure(backend, p)
        launches = len(device.report.launches)
        assert launches == 1
        selftest.ensure(backend, p)
        assert len(device.report.launches) == launches, "tested twice"

    changed = []

    def add_the_factor(ptx: str) -> str:
        """A sum where the product with the row's factor was."""
        changed.append(re.subn(r"mul\.rn\.f32|mul\.f32|mul\.ftz\.f32", "add.f32", ptx, count=1))
        return changed[-1][0]

    with cute_emulator.device(arch, transform=add_the_factor), pytest.raises(UnsupportedError, match=r"dq \d"):
        selftest.ensure(backend, p)
    assert changed[0][1] == 1, "the line to break is not there"
    assert {(v["kind"], v["passed"]) for v in selftest.verdicts()} == {
        ("emulator sm_90a", True), ("emulator sm_90a, altered kernels", False),
    }  # fmt: skip
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"backend +emulator sm_90a +1 +0\n", text)
    assert re.search(r"backend +emulator sm_90a, altered kernels +0 +1\n", text)
    assert "FAILED: " in text
