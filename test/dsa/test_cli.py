"""``python -m cudnn_dsa``: what info says, what bench measures, what demo trains and checks."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import dsa_oracle as oracle
import pytest
import torch
from dsa_memory import allocated_peak

import cudnn_dsa
from cudnn_dsa import backends
from cudnn_dsa.__main__ import COMMANDS, main
from cudnn_dsa.cli import availability, bench, console
from cudnn_dsa.cli.bench import measure, memory
from cudnn_dsa.cli.bench.plain import plain_bytes, plain_sparse_attention
from cudnn_dsa.cli.demo import gradcheck, session, text
from cudnn_dsa.cli.demo.model import Config, LanguageModel, LightningIndexer, attention_target, indexer_loss, select
from cudnn_dsa.cli.demo.train import Run, Trainer, recall
from cudnn_dsa.cli.shapes import MODEL_SHAPES, backward_flops, forward_flops
from cudnn_dsa.contracts.sparse_attention import BACKENDS

TINY = Config(
    symbols=7, context=24, layers=2, width=32, heads=3, latent=16, rotary=4, nope=8, value=8, topk=6, indexer_heads=2,
    indexer_dim=8,
)  # fmt: skip


def image(path: Path) -> torch.Tensor:
    """A PNG's pixels, (height, width, channels)."""
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    return torch.from_numpy(pixels[..., :3].copy())


# --- the entry point


def test_help_does_not_import_torch():
    heavy = "{'torch', 'jax', 'numpy', 'matplotlib'} & set(sys.modules)"
    code = f"import sys, cudnn_dsa.__main__ as m; m.parser(); sys.exit(bool({heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(cudnn_dsa.__file__).parent.parent, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["bench", "--rounds", "0"], ["bench", "--shape", "v9"]])
def test_what_makes_no_sense_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


# --- info


def test_info_as_json(capsys, tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.bin").write_bytes(b"x" * 1000)
    (tmp_path / "b.bin").write_bytes(b"x" * 24)
    (tmp_path / "link").symlink_to(tmp_path / "b.bin")
    monkeypatch.setenv("CUDNN_DSA_CACHE_DIR", str(tmp_path))
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kernel_cache"] == {"directory": str(tmp_path), "exists": True, "bytes": 1024}
    assert {b["name"] for b in facts["backends"]} == set(BACKENDS) - {"auto"}
    for backend in facts["backends"]:
        assert backend["available"] == (backend["reason"] is None)
    by_name = {b["name"]: b for b in facts["backends"]}
    assert by_name["reference"]["available"]
    assert facts["versions"]["cudnn_dsa"] == cudnn_dsa.__version__
    assert facts["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert len(facts["cuda"]["devices"]) == torch.cuda.device_count()


def test_info_as_text_names_every_backend_and_version(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDNN_DSA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing here"))
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    for name in set(BACKENDS) - {"auto"}:
        assert any(line.startswith(name + " ") for line in lines), name
    assert str(tmp_path / "nothing here" / "cudnn_dsa") + " (empty)" in said
    assert torch.__version__.partition("+")[0] in said
    assert not any(line != line.rstrip() for line in lines)


def test_info_says_what_is_wrong_with_a_backend_that_does_not_load(monkeypatch):
    monkeypatch.setitem(backends.MODULES, "triton", "no_such_package.backend")
    monkeypatch.setattr(availability, "version", lambda name: None if name == "triton" else "1.0")
    monkeypatch.setattr(availability, "cuda_devices", lambda: ["cuda:0"])
    state = next(s for s in availability.states() if s.backend == "triton")
    assert state.device == "cuda:0"
    assert not state.available
    assert "no_such_package" in state.reason
    assert state.install == "pip install 'cudnn-dsa[cuda]' (missing: triton)"


def test_a_backend_outside_this_version_needs_nothing_installed(monkeypatch):
    monkeypatch.delitem(backends.MODULES, "sm100", raising=False)
    assert availability.state("sm100", "cuda") == availability.State("sm100", "cuda", "not in this version", None)


def test_the_default_device_is_a_gpu_that_a_cuda_backend_runs_on(monkeypatch):
    can = {"cuda:0": ["triton", "reference"], "cpu": ["cpu", "reference"]}
    monkeypatch.setattr(availability, "runnable", can.__getitem__)
    monkeypatch.setattr(availability, "cuda_devices", lambda: ["cuda:0", "cuda:1"])
    assert availability.resolve_device(None) == availability.resolve_device("cuda") == "cuda:0"
    assert availability.resolve_device("cuda:1") == "cuda:1"
    can["cuda:0"] = ["reference"]
    assert availability.resolve_device(None) == availability.resolve_device("cpu") == "cpu"


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_a_device_that_is_not_here_is_refused(command, capsys):
    assert main([command, "--device", "cuda:99"]) == 2
    assert "no device 'cuda:99' here: there is cpu" in capsys.readouterr().err


# --- what the commands share


def test_table_aligns():
    assert console.table(["a", "bb"], [["xyz", "1"], ["", "100"]], " >") == "a     bb\n---  ---\nxyz    1\n     100"


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**43, "8192.0 GiB")]
)
def test_size(number, said):
    assert console.size(number) == said


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(console.CannotRun, match=r"needs no_such_package: pip install 'cudnn-dsa\[demo\]'"):
        console.require("no_such_package.part", "demo")


# --- bench


def run_bench(tmp_path: Path, *more: str) -> tuple[int, list[dict[str, str]]]:
    arguments = [
        "bench", "--shape", "glm-5", "v4-flash", "--device", "cpu", "--backend", "reference", "--s-q", "2", "--s-kv",
        "12", "--heads", "3", "--topk", "8", "--dtype", "float32", "--rounds", "3", "--csv", str(tmp_path / "b.csv"),
        *more,
    ]  # fmt: skip
    code = main(arguments)
    with (tmp_path / "b.csv").open() as file:
        return code, list(csv.DictReader(file))


def test_bench_writes_what_it_measured(tmp_path, capsys):
    code, rows = run_bench(tmp_path, "--plot", str(tmp_path / "plots" / "b.png"))
    assert code == 0
    assert len(rows) == 2 * 2 * 2  # shapes, sides, directions
    times = {(r["shape"], r["side"], r["direction"]): float(r["ms_median"]) for r in rows}
    assert len(times) == 8
    for row in rows:
        assert 0 < float(row["ms_min"]) <= float(row["ms_median"]) <= float(row["ms_max"])
        d, d_v = int(row["head_dim"]), int(row["head_dim_v"])
        assert (row["s_q"], row["s_kv"], row["heads"], row["topk"]) == ("2", "12", "3", "8")
        assert (d, d_v) == ({"GLM-5": 576, "DeepSeek-V4-Flash": 512}[row["shape"]], 512)
        products = {"forward": d + d_v, "backward": 3 * d + 2 * d_v}[row["direction"]]
        flops = 2 * 2 * 3 * 8 * products
        assert float(row["gflops"]) == pytest.approx(flops / float(row["ms_median"]) / 1e6, rel=0.01, abs=0.006)
        plain = times[row["shape"], measure.PLAIN, row["direction"]]
        assert float(row["ratio_to_plain"]) == pytest.approx(plain / float(row["ms_median"]), rel=0.01)
        assert float(row["relative_l2_error"]) < 1e-5
    pixels = image(tmp_path / "plots" / "b.png")
    assert pixels.shape[0] > 400
    assert pixels.std() > 0.05
    said = capsys.readouterr().out
    for words in ("GLM-5", "S_q 4096 -> 2 (as asked)", "S_kv 8192 -> 12 (as asked)", "reference", measure.PLAIN):
        assert words in said


def test_bench_flags_a_wrong_gradient(tmp_path, capsys, monkeypatch):
    right = measure.BackendSide.results
    monkeypatch.setattr(
        measure.BackendSide, "results", lambda side: right(side) | {"dkv": right(side)["dkv"] * (1 + 3e-5)}
    )
    code, _ = run_bench(tmp_path, "--rounds", "1")
    assert code == 1
    assert "WRONG" in capsys.readouterr().out


def test_bench_says_which_backend_cannot_be_timed(capsys, monkeypatch):
    monkeypatch.delitem(backends.MODULES, "sm90", raising=False)
    assert main(["bench", "--device", "cpu", "--backend", "sm90"]) == 2
    assert "not timed: sm90: not in this version" in capsys.readouterr().err


def test_the_reference_backend_is_timed_only_where_nothing_else_is(monkeypatch):
    monkeypatch.setattr(availability, "runnable", lambda device: ["cpu", "reference"])
    assert bench.choose_backends("cpu", None) == ["cpu"]
    assert bench.choose_backends("cpu", ["reference"]) == ["reference"]
    monkeypatch.setattr(availability, "runnable", lambda device: ["reference"])
    assert bench.choose_backends("cpu", None) == ["reference"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_plain_formulation_is_the_operator(dtype):
    g = torch.Generator().manual_seed(0)
    q, kv = torch.randn(5, 3, 20, generator=g).to(dtype), torch.randn(11, 20, generator=g).to(dtype)
    sink, idxs = torch.randn(3, generator=g), torch.randint(0, 11, (5, 6), generator=g, dtype=torch.int32)
    want, _ = oracle.forward(q, kv, idxs, sink.double(), None, 20**-0.5, 16)
    got = plain_sparse_attention(q, kv, idxs, sink, 16)
    assert got.dtype == dtype
    assert oracle.relative_error(got, want) < (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("shape", MODEL_SHAPES.values(), ids=list(MODEL_SHAPES))
def test_flop_counts_are_those_of_the_matrix_products(shape):
    """By multiplying out every product of the forward and the backward for one query."""
    h, d, k, d_v = shape.heads, shape.head_dim, shape.topk, 512
    product = lambda m, n, inner: 2 * m * n * inner  # noqa: E731
    assert forward_flops(3, h, k, d, d_v) == 3 * (product(h, k, d) + product(h, d_v, k))
    again = product(h, k, d) + product(h, k, d_v) + product(h, d, k) + product(k, d, h) + product(k, d_v, h)
    assert backward_flops(3, h, k, d, d_v) == 3 * again


def fitted(monkeypatch, budget: float, seconds_a_query: float, free: float) -> measure.Case:
    plan = measure.Plan([MODEL_SHAPES["glm-5"]], ["reference"], "cpu", "bfloat16", None, None, 5, budget, 0)
    monkeypatch.setattr(measure, "_one_pass", lambda plan, case: case.s_q * seconds_a_query)
    monkeypatch.setattr(measure, "free_bytes", lambda device: free)
    return measure.choose_case(plan, plan.shapes[0])


def test_sizes_fit_the_time(monkeypatch):
    case = fitted(monkeypatch, budget=9.0, seconds_a_query=0.01, free=1e15)  # 9 passes of at most a second
    assert (case.s_q, case.s_kv, case.shape.topk) == (64, 4096, 2048)
    assert case.scaled == (
        "S_q 4096 -> 64 (time: one pass over all sides takes 0.64 s), S_kv 8192 -> 4096 (with S_q, at least 2 K)"
    )


def test_sizes_fit_the_memory(monkeypatch):
    case = fitted(monkeypatch, budget=1e9, seconds_a_query=0.01, free=2 * plain_bytes(256, 64, 2048, 576, 2))
    assert case.s_q == 256
    assert "memory: for twice as many, plain PyTorch wants" in case.scaled


def test_full_sizes_where_everything_fits(monkeypatch):
    case = fitted(monkeypatch, budget=1e9, seconds_a_query=1e-6, free=1e15)
    assert (case.s_q, case.s_kv, case.scaled) == (4096, 8192, "")


def test_peak_memory_sees_what_is_gone_afterwards():
    """So much of it that what the kernel's own counters are off by (they are kept per core) does not matter."""
    mebibyte = 2**20
    peak = memory.peak_bytes("cpu", lambda: torch.ones(64 * mebibyte, dtype=torch.float32).max())
    if peak is None:
        pytest.skip("this system does not tell a process its peak")
    assert 200 * mebibyte < peak < 320 * mebibyte
    assert memory.peak_bytes("cpu", lambda: None) < 64 * mebibyte


def test_peak_memory_is_the_high_water_mark_beyond_what_was_resident(monkeypatch, tmp_path):
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")

    def say(peak, resident):
        status.write_text(f"Name:\tpython\nVmHWM:\t{peak} kB\nVmRSS:\t  {resident} kB\n")

    say(900, 100)
    assert memory.peak_bytes("cpu", lambda: say(350, 120)) == 250 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"  # the mark starts again
    assert memory.peak_bytes("cpu", lambda: say(90, 80)) == 0
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    called = []
    assert memory.peak_bytes("cpu", lambda: called.append(1)) is None
    assert called


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", MODEL_SHAPES.values(), ids=list(MODEL_SHAPES))
def test_the_estimate_of_the_plain_memory_holds(shape, dtype):
    s_q, topk = 16, 512
    plan = measure.Plan([], [], "cpu", dtype, None, None, 1, 1.0, 0)
    side = measure.PlainSide(measure.make_inputs(plan, measure.Case(shape._replace(topk=topk), s_q, 2 * topk)))
    peak = allocated_peak(lambda: (side.forward(), side.backward()))
    assert peak < plain_bytes(s_q, shape.heads, topk, shape.head_dim, plan.torch_dtype.itemsize) < 2 * peak


def test_bench_inputs_select_different_keys_everywhere():
    plan = measure.Plan([], [], "cpu", "float32", None, None, 1, 1.0, 0)
    keys = measure.make_inputs(plan, measure.Case(MODEL_SHAPES["v4-flash"]._replace(topk=9), 50, 30)).topk_idxs
    assert all(len(set(row)) == 9 for row in keys.tolist())
    assert set(keys.flatten().tolist()) == set(range(30))


# --- demo


def test_demo_trains_checks_and_draws(tmp_path, capsys, monkeypatch):
    code = main(["demo", "--steps", "2", "--out", str(tmp_path / "d"), "--device", "cpu", "--seed", "3"])
    said = capsys.readouterr().out
    assert code == 0
    assert "gradient check: PASS" in said
    for words in ("unigram entropy", "bigram entropy", "recall", "tokens/s", "sparse attention, backward"):
        assert words in said
    pixels = image(tmp_path / "d" / "demo.png")
    assert min(pixels.shape[:2]) > 800
    lower = pixels[pixels.shape[0] // 2 :]  # the maps of the selection have colour
    assert (lower.max(-1).values - lower.min(-1).values > 0.2).float().mean() > 0.02


def test_a_wrong_operator_fails_the_demo(tmp_path, capsys, monkeypatch):
    class Scaled(torch.autograd.Function):
        """The identity, whose gradient is off by 0.1%."""

        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, g: g * 1.001)

    right = gradcheck._operator
    monkeypatch.setattr(gradcheck, "_operator", lambda call, q, kv, sink: right(call, Scaled.apply(q), kv, sink))
    monkeypatch.setattr(session, "config", lambda device, symbols: TINY._replace(symbols=symbols))
    assert main(["demo", "--steps", "1", "--out", str(tmp_path), "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "gradient check: FAIL" in said
    failed = [line.split()[1] for line in said.splitlines() if line.startswith("float32") and line.endswith("FAIL")]
    assert failed == ["dq"]


@pytest.mark.parametrize(("error", "passed"), [(1e-6, True), (1e-5, True), (1.01e-5, False), (math.nan, False)])
def test_a_verdict_needs_an_error_within_its_bound(error, passed):
    assert gradcheck.Verdict("float32", "dq", error, 1e-5).passed is passed


def test_the_dense_formulation_of_the_check_is_the_operator():
    """With repeated, invalid and cut-off entries, against the test suite's own oracle."""
    g = torch.Generator().manual_seed(1)
    q, kv, dout = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((6, 2, 12), (9, 12), (6, 2, 8)))
    sink, length = torch.randn(2, generator=g, dtype=torch.float64), torch.tensor([5, 1, 0, 7, 3, 9], dtype=torch.int32)
    idxs = torch.randint(-2, 12, (6, 7), generator=g, dtype=torch.int32)
    call = gradcheck.Call(q, kv, idxs, length, sink, dout, 0.3, "reference")
    counts = gradcheck.multiplicity(idxs, length, 9)
    assert torch.equal(counts, oracle.multiplicity(idxs, length, 9))
    got = gradcheck._differentiate(q, kv, sink, dout, lambda *leaves: gradcheck._dense(call, counts, *leaves))
    want = oracle.end_to_end(q, kv, idxs, sink, length, 0.3, 8, dout)
    for name, expected in zip(("dq", "dkv", "d_sink"), want, strict=True):
        assert oracle.relative_error(got[name], expected) < 1e-12, name
    assert all(verdict.passed for verdict in gradcheck.check(call))


@pytest.mark.parametrize("topk", [1, 5, 16, 40])
@pytest.mark.parametrize("kind", ["indexer", "equal", "integers"])
def test_selection_is_causal_and_the_best(topk, kind):
    torch.manual_seed(topk)
    length = 16
    if kind == "indexer":
        with torch.no_grad():
            scores = LightningIndexer(TINY)(torch.randn(3, length, TINY.width))
    else:
        scores = (
            torch.zeros(3, length, length) if kind == "equal" else torch.randint(-2, 3, (3, length, length)).float()
        )
        for t in range(length):
            scores[:, t, t + 1 :] = -torch.inf
    keys, lengths = select(scores, topk)
    assert keys.dtype == lengths.dtype == torch.int32
    for b in range(3):
        for t in range(length):
            row, count = keys[b, t].tolist(), lengths[b, t].item()
            assert count == min(t + 1, topk)
            assert all(0 <= key <= t for key in row[:count])
            assert len(set(row[:count])) == count
            assert all(key == -1 for key in row[count:])
            best = sorted(scores[b, t, : t + 1].tolist(), reverse=True)[:count]
            assert [scores[b, t, key].item() for key in row[:count]] == best


def test_index_scores_by_an_explicit_loop():
    """With rotary embedding by complex multiplication."""
    torch.manual_seed(0)
    indexer, x = LightningIndexer(TINY).double(), torch.randn(1, 5, TINY.width, dtype=torch.float64)
    dim, half = TINY.indexer_dim, TINY.indexer_dim // 2

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        angle = torch.tensor([position * 10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
        rotated = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([rotated.real, rotated.imag])

    with torch.no_grad():
        got = indexer(x)[0]
        for t in range(5):
            q, w = indexer.query(x[0, t]).view(-1, dim), indexer.weight(x[0, t])
            for s in range(5):
                k = turned(indexer.key_norm(indexer.key(x[0, s])), s)
                want = sum(w[j] * max(0.0, (turned(q[j], t) @ k).item()) for j in range(TINY.indexer_heads))
                want = want * (TINY.indexer_heads * dim) ** -0.5 if s <= t else -math.inf
                assert float(got[t, s]) == pytest.approx(float(want), rel=1e-5, abs=1e-6)


def test_the_model_does_not_see_the_future():
    torch.manual_seed(0)
    model = LanguageModel(TINY, "reference")
    torch.nn.init.normal_(model.head.weight)
    ids = torch.randint(0, TINY.symbols, (2, TINY.context))
    with torch.no_grad():
        logits, selections = model(ids)
        for t in (0, 5, 13, TINY.context - 2):
            other = ids.clone()
            other[:, t + 1 :] = (other[:, t + 1 :] + 1) % TINY.symbols
            changed, _ = model(other)
            torch.testing.assert_close(changed[:, : t + 1], logits[:, : t + 1], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(changed[:, t + 1 :], logits[:, t + 1 :], atol=1e-3)
    for selection in selections:
        assert (selection.keys <= torch.arange(TINY.context)[:, None]).all()


def test_absorbed_latent_attention_is_multi_head_attention():
    """Without the absorption: per-head keys and values out of the latent, and a dense softmax over the selection."""
    torch.manual_seed(0)
    attention = LanguageModel(TINY, "reference").attentions()[0].double()
    torch.nn.init.normal_(attention.sink)
    x = torch.randn(1, TINY.context, TINY.width, dtype=torch.float64)
    with torch.no_grad():
        got, selection = attention(x, False)
        c, d_c = TINY, TINY.latent
        nope = attention.query(x).unflatten(-1, (c.heads, -1))[0, :, :, : c.nope]
        latent, rotary_key = selection.kv[0].split([d_c, c.rotary], -1)
        rotary_query = selection.q[0, :, :, d_c:]
        outs = []
        for h in range(c.heads):
            key, value = latent @ attention.up_key[h].T, latent @ attention.up_value[h]
            rows = []
            for t in range(c.context):
                chosen = [s for s in selection.keys[0, t].tolist() if s >= 0]
                logits = key[chosen] @ nope[t, h] + rotary_key[chosen] @ rotary_query[t, h]
                weights = torch.exp(logits * (c.nope + c.rotary) ** -0.5)
                rows.append(weights @ value[chosen] / (weights.sum() + attention.sink[h].exp()))
            outs.append(torch.stack(rows))
        want = attention.project(torch.cat(outs, -1))
    assert oracle.relative_error(got[0], want) < 1e-6  # rotations are computed in fp32


def test_the_indexers_objective_by_an_explicit_loop():
    torch.manual_seed(0)
    batch, length, heads, dim, topk, scale = 2, 7, 3, 5, 4, 0.7
    q, kv = torch.randn(batch, length, heads, dim), torch.randn(batch, length, dim)
    scores = torch.randn(batch, length, length).masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
    keys, _ = select(scores, topk)
    target = attention_target(q, kv, keys, scale)
    total = 0.0
    for b in range(batch):
        for t in range(length):
            chosen = [s for s in keys[b, t].tolist() if s >= 0]
            summed = [0.0] * len(chosen)
            for h in range(heads):
                exps = [math.exp(scale * float(q[b, t, h].double() @ kv[b, s].double())) for s in chosen]
                summed = [p + e / sum(exps) for p, e in zip(summed, exps, strict=True)]
            p = [value / sum(summed) for value in summed]
            assert target[b, t].tolist() == pytest.approx(p + [0.0] * (topk - len(p)), abs=1e-6)
            exps = [math.exp(float(scores[b, t, s])) for s in chosen]
            total += sum(pi * math.log(pi / (e / sum(exps))) for pi, e in zip(p, exps, strict=True))
    got = indexer_loss(scores, keys, target)
    assert float(got) == pytest.approx(total / (batch * length), rel=1e-5)
    assert float(got) > 0.01


def test_the_indexer_and_the_model_learn_from_their_own_losses_alone():
    torch.manual_seed(0)
    model = LanguageModel(TINY, "reference")
    torch.nn.init.normal_(model.head.weight)
    ids = torch.randint(0, TINY.symbols, (2, TINY.context))
    logits, selections = model(ids, with_loss=True)
    indexer, main_ = model.indexer_parameters(), model.main_parameters()
    assert len(indexer) + len(main_) == len(list(model.parameters()))
    of_text = torch.autograd.grad(logits.square().sum(), [*main_, *indexer], retain_graph=True, allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in of_text[: len(main_)])
    assert all(g is None for g in of_text[len(main_) :])
    of_kl = torch.autograd.grad(sum(s.kl for s in selections), [*indexer, *main_], allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in of_kl[: len(indexer)])
    assert all(g is None for g in of_kl[len(indexer) :])


def test_recall_of_the_best_keys_is_one_and_of_the_worst_is_low():
    torch.manual_seed(0)
    model = LanguageModel(TINY, "reference")
    with torch.no_grad():
        _, (selection, _) = model(torch.randint(0, TINY.symbols, (2, TINY.context)))
        selection.q = selection.q * 20  # far from uniform attention
        scale, positions = 0.5, torch.arange(TINY.context)
        mean = torch.einsum("bthd,bsd->bhts", selection.q, selection.kv).mul(scale)
        mass = mean.masked_fill(positions > positions[:, None], -torch.inf).softmax(-1).mean(1)
        future = mass.masked_fill(positions > positions[:, None], -torch.inf)
        best, _ = select(future, TINY.topk)
        worst, _ = select((-mass).masked_fill(positions > positions[:, None], -torch.inf), TINY.topk)
    assert recall(selection, scale, best) == pytest.approx(1, abs=1e-6)
    assert recall(selection, scale, worst) < 0.3


def test_entropies_of_a_text_that_can_be_counted(tmp_path):
    path = tmp_path / "text"
    path.write_text("abac" * 500)
    corpus = text.load(path)
    assert corpus.symbols == "abc"
    assert len(corpus.train) == 1800
    assert corpus.decode(corpus.held_out[:4].tolist()) == "abac"
    assert corpus.unigram_entropy() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4), abs=1e-3)
    assert corpus.bigram_entropy() == pytest.approx(0.5 * math.log(2), abs=2e-3)  # after an a: b or c


def test_the_text_that_ships_with_python_is_prose():
    corpus = text.load()
    assert len(corpus.train) + len(corpus.held_out) > 200_000
    assert " the " in corpus.decode(corpus.held_out[:2000].tolist())
    assert 2.5 < corpus.unigram_entropy() < 4


class NoBar:
    def set_postfix_str(self, said: str) -> None: ...
    def update(self) -> None: ...


def test_training_learns_what_only_attention_can_see(tmp_path):
    """A period of 12 symbols in which each is followed by different ones: one symbol back does not tell the next."""
    path = tmp_path / "text"
    path.write_text("aabacbbcacda" * 400)
    corpus = text.load(path)
    torch.manual_seed(0)
    model = LanguageModel(TINY._replace(symbols=4), "reference")
    history = Trainer(model, corpus, Run(steps=60, rows=8, device="cpu", half=False, seed=0)).train(NoBar(), 60)
    first, last = history.evaluations[0], history.evaluations[60]
    assert first.loss == pytest.approx(math.log(4), abs=1e-4)
    assert last.loss < 0.5 * corpus.bigram_entropy() < corpus.unigram_entropy()
    assert len(history.loss) == len(history.kl) == 60
