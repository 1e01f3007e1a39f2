"""The demo's words, tables and picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cudnn_dsa.cli import console
from cudnn_dsa.cli.demo.model import LanguageModel, Selection
from cudnn_dsa.cli.demo.text import Text
from cudnn_dsa.cli.demo.train import dense_attention

if TYPE_CHECKING:
    from cudnn_dsa.cli.demo.session import Outcome

MAP_QUERIES = 256  # at most so many rows and columns of the selection are drawn


def opening(text: Text, model: LanguageModel, device: str, backend: str) -> str:
    c = model.config
    parameters = sum(p.numel() for p in model.parameters())
    symbols = len(text.train) + len(text.held_out)
    return (
        f"text: {text.name}, {symbols:,} symbols of an alphabet of {len(text.symbols)}; the last tenth is held out\n"
        f"model: {parameters:,} parameters, {c.layers} layers of width {c.width}; attention: H {c.heads}, "
        f"D {c.latent + c.rotary}, D_v {c.latent}, K {c.topk} of {c.context} keys; backend {backend} on {device}"
    )


def closing(o: Outcome) -> str:
    first, last = (o.history.evaluations[step] for step in (0, max(o.history.evaluations)))
    tokens = len(o.history.loss) * o.tokens_a_step
    unigram, bigram = o.corpus.unigram_entropy(), o.corpus.bigram_entropy()
    learning = [
        ["loss on held-out text, nats a symbol", f"{first.loss:.3f}", f"{last.loss:.3f}"],
        ["  unigram entropy of the text (no context)", "", f"{unigram:.3f}"],
        ["  bigram entropy of the text (one symbol back)", "", f"{bigram:.3f}"],
        ["indexer: KL from the attention, nats", f"{first.kl:.3f}", f"{last.kl:.3f}"],
        ["indexer: recall of the true top-k's attention", f"{first.recall:.1%}", f"{last.recall:.1%}"],
        *[[f"  recall of {name}", "", f"{share:.1%}"] for name, share in list(o.recalls.items())[1:]],
    ]
    speed = [["training, tokens/s", f"{tokens / o.history.seconds:,.0f}"], ["training, s", f"{o.history.seconds:.1f}"]]
    speed += [[f"  share: {part}", f"{share:.1%}"] for part, share in o.shares.items()]
    checks = [
        [v.dtype, v.tensor, f"{v.error:.1e}", f"{v.bound:.0e}", "PASS" if v.passed else "FAIL"] for v in o.verdicts
    ]
    prompt, continuation = o.sample
    passed = all(v.passed for v in o.verdicts)
    return "\n".join(
        [
            "",
            console.table(["learning", "before", "after"], learning, " >>"),
            "",
            console.table(["speed", ""], speed, " >"),
            "",
            "a sample: the prompt, then | and what the model makes of it",
            textwrap.indent(f"{prompt}|{continuation}", "    "),
            "",
            "one trained attention call against a dense float64 autograd formulation, relative L2 error:",
            console.table(["dtype", "tensor", "error", "bound", "verdict"], checks, "  >>"),
            f"gradient check: {'PASS' if passed else 'FAIL'}",
        ]
    )


def draw(plt: Any, path: Path, o: Outcome) -> None:
    """Loss, indexer quality, and the keys that a layer picked before and after training."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 10), layout="constrained")
    _draw_loss(panels[0, 0], o)
    _draw_indexer(panels[0, 1], o)
    scale = o.model.attentions()[0].scale
    for panel, selection, when in ((panels[1, 0], o.before, "before"), (panels[1, 1], o.after, "after")):
        image = _draw_map(panel, selection, scale)
        panel.set_title(f"keys picked in layer 1, {when} training (held-out text)")
    bar = figure.colorbar(image, ax=panels[1].tolist(), shrink=0.9)
    bar.set_label("attention to a picked key, log10 (mean over heads)")
    figure.suptitle("A language model on DeepSeek sparse attention")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_loss(panel: Any, o: Outcome) -> None:
    steps = range(1, len(o.history.loss) + 1)
    panel.plot(steps, o.history.loss, color="C0", alpha=0.5, linewidth=1, label="training batch")
    evaluations = o.history.evaluations
    panel.plot(list(evaluations), [e.loss for e in evaluations.values()], "o-", color="C0", label="held-out text")
    for entropy, name, style in (
        (o.corpus.unigram_entropy(), "unigram entropy (no context)", "--"),
        (o.corpus.bigram_entropy(), "bigram entropy (one symbol back)", ":"),
    ):
        panel.axhline(entropy, color="0.3", linestyle=style, label=name)
    panel.set(xlabel="step", ylabel="loss, nats a symbol", title="language model")
    panel.legend()
    panel.grid(alpha=0.3)


def _draw_indexer(panel: Any, o: Outcome) -> None:
    evaluations = o.history.evaluations
    panel.plot(
        list(evaluations), [e.recall for e in evaluations.values()], "o-", color="C2", label="the indexer's keys"
    )
    for (name, share), style in zip(list(o.recalls.items())[1:], ("--", ":"), strict=True):
        panel.axhline(share, color="0.3", linestyle=style, label=f"{name} (after training)")
    panel.set(xlabel="step", ylabel="share of the true top-k's attention", ylim=(0, 1.05), title="indexer")
    panel.grid(alpha=0.3)
    beside = panel.twinx()
    beside.plot(range(1, len(o.history.kl) + 1), o.history.kl, color="C1", linewidth=1, alpha=0.7)
    beside.set_ylabel("KL from the attention, nats (training batch)", color="C1")
    beside.set_ylim(bottom=0)
    panel.legend(loc="lower right")


def _draw_map(panel: Any, selection: Selection, scale: float) -> Any:
    size = min(MAP_QUERIES, selection.scores.shape[-1])
    mass = dense_attention(selection, scale)[0, :size, :size].cpu()
    keys = selection.keys[0, :size].cpu()
    picked = torch.zeros(size, size + 1, dtype=torch.bool)
    picked.scatter_(1, torch.where((keys >= 0) & (keys < size), keys, size).long(), True)
    shown = torch.where(picked[:, :size], mass.clamp(min=1e-4).log10(), torch.nan)
    image = panel.imshow(shown.numpy(), cmap="viridis", vmin=-4, vmax=0, interpolation="nearest")
    panel.set(xlabel="key (position in the text)", ylabel="query (position in the text)")
    panel.set_facecolor("0.92")
    return image
