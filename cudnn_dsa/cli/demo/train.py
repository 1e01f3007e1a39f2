"""Training, held-out evaluation and sampling of the demo's model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from cudnn_dsa.cli.demo.model import LanguageModel, Selection, select
from cudnn_dsa.cli.demo.text import Text

# Peak learning rates at a width of 128; a wider model learns in inverse proportion slower.
PEAK_RATE = 5e-3
INDEXER_PEAK_RATE = 3e-3
RATE_WIDTH = 128
CLIP = 1.0
EVALUATION_ROWS = 8
# Part of a training step -> the profiler's name of it.
PARTS = {
    "sparse attention, forward": "cudnn_dsa::sparse_attention_forward",
    "sparse attention, backward": "cudnn_dsa::sparse_attention_backward",
    "indexer and its loss": "demo::indexer",
}


@dataclass(frozen=True)
class Run:
    """How to train: ``steps`` of ``rows`` sequences, on ``device``, in bf16 where ``half``."""

    steps: int
    rows: int
    device: str
    half: bool
    seed: int

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=self.half)


@dataclass(frozen=True)
class Evaluation:
    """On held-out text: nats a symbol, the indexer's KL, and its recall of the attention mass of the true top-k."""

    loss: float
    kl: float
    recall: float


@dataclass
class History:
    """Of every step: nats a symbol and the mean KL a layer; by step number: evaluations. ``seconds`` of training."""

    loss: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    seconds: float = 0.0


class Trainer:
    """One model, its text and its optimiser."""

    def __init__(self, model: LanguageModel, text: Text, run: Run):
        self.model, self.text, self.run = model, text, run
        self.generator = torch.Generator().manual_seed(run.seed)
        narrower = RATE_WIDTH / model.config.width
        groups = [
            {"params": model.main_parameters(), "lr": PEAK_RATE * min(1, narrower)},
            {"params": model.indexer_parameters(), "lr": INDEXER_PEAK_RATE * min(1, narrower)},
        ]
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda step: rate(step, run.steps))
        held_out = torch.Generator().manual_seed(run.seed + 1)
        self.held_out = self._batch(text.held_out, EVALUATION_ROWS, held_out)

    def step(self) -> tuple[float, float]:
        """One update; (nats a symbol, mean KL a layer) before it."""
        ids = self._batch(self.text.train, self.run.rows, self.generator)
        with self.run.autocast():
            logits, selections = self.model(ids[:, :-1], with_loss=True)
        loss = cross_entropy(logits, ids)
        kl = torch.stack([s.kl for s in selections if s.kl is not None])
        self.optimiser.zero_grad(set_to_none=True)
        # Two graphs that share nothing: the language model's, and the indexers'.
        loss.backward()
        with torch.profiler.record_function("demo::indexer"):
            kl.sum().backward()
        for group in self.optimiser.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], CLIP)
        self.optimiser.step()
        self.schedule.step()
        return loss.item(), kl.mean().item()

    def train(self, bar: Any, evaluate_every: int) -> History:
        history = History(evaluations={0: self.evaluate()})
        for number in range(1, self.run.steps + 1):
            start = time.perf_counter()
            loss, kl = self.step()
            history.seconds += time.perf_counter() - start
            history.loss.append(loss)
            history.kl.append(kl)
            if number % evaluate_every == 0 or number == self.run.steps:
                history.evaluations[number] = self.evaluate()
            bar.set_postfix_str(f"loss {loss:.3f} nats, indexer KL {kl:.3f}")
            bar.update()
        return history

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        ids = self.held_out
        with self.run.autocast():
            logits, selections = self.model(ids[:, :-1], with_loss=True)
        scale = self.model.attentions()[0].scale
        kls = [s.kl.item() for s in selections if s.kl is not None]
        recalls = [recall(selection, scale, selection.keys) for selection in selections]
        return Evaluation(cross_entropy(logits, ids).item(), sum(kls) / len(kls), sum(recalls) / len(recalls))

    @torch.no_grad()
    def selections(self) -> list[Selection]:
        """Every layer's selection on the held-out batch."""
        with self.run.autocast():
            return self.model(self.held_out[:, :-1])[1]

    def recalls(self) -> dict[str, float]:
        """Recall on held-out text of the indexer's choice, and of two that look at nothing."""
        selections = self.selections()
        scores = selections[0].scores
        positions = torch.arange(scores.shape[-1], dtype=torch.float32, device=scores.device)
        generator = torch.Generator(scores.device).manual_seed(self.run.seed)
        noise = torch.rand(scores.shape, generator=generator, device=scores.device)
        blind = {"the most recent keys": positions.expand_as(scores), "random keys": noise}
        keys = {"the indexer's keys": [s.keys for s in selections]}
        for name, order in blind.items():
            chosen, _ = select(order.masked_fill(scores == -torch.inf, -torch.inf), self.model.config.topk)
            keys[name] = [chosen] * len(selections)
        scale = self.model.attentions()[0].scale
        return {
            name: sum(recall(s, scale, k) for s, k in zip(selections, chosen, strict=True)) / len(selections)
            for name, chosen in keys.items()
        }

    def shares(self, steps: int = 3) -> dict[str, float]:
        """Share of a training step's time by part, from a few more steps: of the GPU's busy time, or of the CPU's."""
        on_gpu = self.run.device.startswith("cuda")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        # In one thread, a backward's operators are inside of the range that the profiler sees around it.
        with torch.autograd.set_multithreading_enabled(False), profile(activities=activities, acc_events=True) as found:
            for _ in range(steps):
                self.step()
        events = [event for event in found.key_averages() if event.device_type == DeviceType.CPU]
        times = {e.key: e.device_time_total if on_gpu else e.cpu_time_total for e in events}
        total = sum(e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events)
        shares = {part: times.get(name, 0) / max(total, 1) for part, name in PARTS.items()}
        return {**shares, "everything else": 1 - sum(shares.values())}

    @torch.no_grad()
    def sample(self, prompt: torch.Tensor, symbols: int, temperature: float = 0.7) -> str:
        """The prompt's continuation, one symbol at a time."""
        generator = torch.Generator().manual_seed(self.run.seed)
        ids = prompt.tolist()
        for _ in range(symbols):
            context = torch.tensor([ids[-self.model.config.context :]], device=self.run.device)
            with self.run.autocast():
                logits = self.model(context)[0][0, -1].cpu()
            ids.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        return self.text.decode(ids[len(prompt) :])

    def _batch(self, part: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
        return self.text.batch(part, rows, self.model.config.context, generator).to(self.run.device)


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up over a twentieth of the steps, then a cosine to a twentieth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Nats a symbol of ids (B, T + 1) under logits (B, T, symbols)."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def dense_attention(selection: Selection, scale: float) -> torch.Tensor:
    """(B, T, T): what the main attention would look at if it could see every earlier key, the mean over heads."""
    length = selection.q.shape[1]
    positions = torch.arange(length, device=selection.q.device)
    scores = torch.einsum("bthd,bsd->bhts", selection.q.float(), selection.kv.float()) * scale
    return scores.masked_fill(positions > positions[:, None], -torch.inf).softmax(-1).mean(1)


def recall(selection: Selection, scale: float, keys: torch.Tensor) -> float:
    """Attention mass of ``keys`` (B, T, K) over that of the best K, the mean over queries that must choose."""
    mass = dense_attention(selection, scale)
    topk = keys.shape[-1]
    found = (mass.gather(-1, keys.clamp(min=0).long()) * (keys >= 0)).sum(-1)
    best = mass.topk(topk, dim=-1).values.sum(-1)
    return (found / best)[:, topk:].mean().item()
