"""One run of the demo, from the text to the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_dsa.cli import availability, console
from cudnn_dsa.cli.demo import gradcheck, report, text
from cudnn_dsa.cli.demo.model import Config, LanguageModel, Selection
from cudnn_dsa.cli.demo.train import History, Run, Trainer

ROWS = 4  # sequences a step
SAMPLED_SYMBOLS = 160
PROMPT_SYMBOLS = 60
EVALUATIONS = 10


def config(device: str, symbols: int) -> Config:
    """Sizes for the device: on CUDA a layer has DeepSeek-V3.2's head_dim of 576, the latent's 512 and 64 rotary."""
    if device.startswith("cuda"):
        return Config(
            symbols, context=1024, layers=4, width=512, heads=16, latent=512, rotary=64, nope=64, value=64, topk=128,
            indexer_heads=8, indexer_dim=32,
        )  # fmt: skip
    return Config(
        symbols, context=256, layers=2, width=128, heads=4, latent=64, rotary=16, nope=32, value=32, topk=32,
        indexer_heads=4, indexer_dim=16,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What the demo found out, for the report.

    Attributes:
        before, after: the first layer's selection on the same held-out text.
        recalls: name of a way to select -> share of the true top-k's attention mass that it finds, after training.
        shares: part of a training step -> share of its time.
    """

    corpus: text.Text
    model: LanguageModel
    history: History
    tokens_a_step: int
    before: Selection
    after: Selection
    recalls: dict[str, float]
    shares: dict[str, float]
    sample: tuple[str, str]
    verdicts: list[gradcheck.Verdict]


def run(steps: int, out: Path, seed: int, device: str, text_file: Path | None) -> int:
    """Train, check, report. Returns the exit code."""
    plt = console.figures()
    backend = choose_backend(device)
    corpus = text.load(text_file)
    torch.manual_seed(seed)
    model = LanguageModel(config(device, len(corpus.symbols)), backend).to(device)
    trainer = Trainer(model, corpus, Run(steps, ROWS, device, half=device.startswith("cuda"), seed=seed))
    print(report.opening(corpus, model, device, backend))

    before = trainer.selections()[0]
    with console.progress(steps, "training") as bar:
        history = trainer.train(bar, evaluate_every=max(1, steps // EVALUATIONS))
    prompt = corpus.held_out[:PROMPT_SYMBOLS]
    outcome = Outcome(
        corpus=corpus,
        model=model,
        history=history,
        tokens_a_step=ROWS * model.config.context,
        before=before,
        after=trainer.selections()[0],
        recalls=trainer.recalls(),
        sample=(corpus.decode(prompt.tolist()), trainer.sample(prompt, SAMPLED_SYMBOLS)),
        verdicts=check_gradients(trainer),
        shares=trainer.shares(),  # last: it trains on
    )
    print(report.closing(outcome))
    path = out / "demo.png"
    report.draw(plt, path, outcome)
    print(f"\ndrawn: {path}")
    return 0 if all(verdict.passed for verdict in outcome.verdicts) else 1


def choose_backend(device: str) -> str:
    """The best backend that runs here."""
    return availability.runnable(device)[0]


def check_gradients(trainer: Trainer) -> list[gradcheck.Verdict]:
    """The first layer's attention call on a held-out sequence, in every dtype that its backend takes."""
    attention = trainer.model.attentions()[0]
    selection, scale = trainer.selections()[0], attention.scale
    q, kv = selection.q[0], selection.kv[0]
    generator = torch.Generator().manual_seed(trainer.run.seed)
    dout = torch.randn(*q.shape[:2], trainer.model.config.latent, generator=generator).to(q.device)
    call = gradcheck.Call(
        q, kv, selection.keys[0], selection.length[0], attention.sink.detach(), dout, scale, attention.backend
    )
    dtypes = [torch.bfloat16] if q.is_cuda else [torch.float32, torch.bfloat16]
    return [verdict for dtype in dtypes for verdict in gradcheck.check(call.to(dtype))]
