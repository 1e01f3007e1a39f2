"""Whether a call may run: the contract applied to its tensors, and remembered for the calls that look the same.

``gate`` is the whole check, for a plan's samples, meta and fake tensors. ``admit`` and ``check_addresses`` are the same
rules at the speed of a launch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cudnn_dsa import backends, transforms
from cudnn_dsa.backends import BackwardTensors, ForwardTensors
from cudnn_dsa.contracts import TensorSpec, describe
from cudnn_dsa.contracts.errors import ContractError
from cudnn_dsa.contracts.rules import reach
from cudnn_dsa.contracts.sparse_attention import (
    ARGUMENTS,
    WORKSPACE_ALIGNMENT,
    Options,
    Problem,
    check,
    check_aliases,
    check_properties,
    check_workspace,
)

Tensors = ForwardTensors | BackwardTensors
FORWARD = Options("forward", layout="interface")
BACKWARD = Options("backward", layout="interface")


def by_name(tensors: Tensors) -> dict[str, Any]:
    """The tensors of a call by argument name."""
    return dict(zip(tensors._fields[:-1], tensors, strict=False))  # the last field is the scale


def describe_all(tensors: Tensors | Mapping[str, Any]) -> dict[str, TensorSpec | None]:
    """Specs by argument name. Raises ``ContractError`` for what is no strided tensor."""
    specs: dict[str, TensorSpec | None] = {}
    for name, tensor in (tensors if isinstance(tensors, Mapping) else by_name(tensors)).items():
        try:
            specs[name] = None if tensor is None else describe(tensor)
        except TypeError as error:
            raise ContractError(name, "a strided tensor", type(tensor).__name__, str(error)) from None
    return specs


def gate(tensors: Tensors | Mapping[str, Any], options: Options) -> Problem:
    """Every rule of the contract, applied to real, meta or fake tensors (or specs). Nothing is launched."""
    return check(describe_all(tensors), options)


def options_of(base: Options, **changes: Any) -> Options:
    """``base`` with changes. ``deterministic`` None follows ``torch.use_deterministic_algorithms``."""
    if "deterministic" in changes and changes["deterministic"] is None:
        changes["deterministic"] = torch.are_deterministic_algorithms_enabled()
    try:
        return _changed(base, **changes)
    except TypeError:  # something in it cannot be a key: a list, say, or a symbolic size
        return replace(base, **changes)


# By type as well, since 16.0 == 16. A refused one is not remembered.
_changed = functools.lru_cache(maxsize=1024, typed=True)(replace)


class Verdict:
    """A call that passed, and what follows for every call with tensors of the same shapes, dtypes, strides, devices.

    Attributes:
        problem, backend: what runs, and who runs it.
        device, scale: of the problem, resolved.
        as_given: no tensor has to be copied or staged.
        outputs, given: places of the outputs, and of those that the caller gives.
        missing: (place, shape, dtype) of the outputs to allocate.
        spans: (place, bytes, whether it is written) of every tensor that has memory.
        planned: the plan's problem that this one was last compared with.
        tested: the self-test need not be asked again.
    """

    __slots__ = (
        "as_given", "backend", "device", "given", "missing", "outputs", "planned", "problem", "scale", "spans",
        "tested",
    )  # fmt: skip

    def __init__(self, specs: Mapping[str, TensorSpec | None], options: Options, plain: bool):
        self.problem = problem = check_properties(specs, options)
        check_aliases(specs, problem.direction)
        self.backend = backends.select(problem)
        self.device = torch.device(problem.device)
        self.scale = problem.head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
        self.planned: Problem | None = None
        self.tested = False
        shapes = output_shapes(problem)
        self.as_given = plain and all(spec is None or spec.is_contiguous for spec in specs.values())
        self.outputs: list[int] = []
        self.given: list[int] = []
        self.missing: list[tuple[int, tuple[Any, ...], torch.dtype]] = []
        self.spans: list[tuple[int, int, bool]] = []
        for place, argument in enumerate(ARGUMENTS[problem.direction]):
            spec = specs[argument.name]
            if spec is not None and reach(spec):
                self.spans.append((place, reach(spec), argument.output))
            if argument.output:
                self.outputs.append(place)
                if spec is not None:
                    self.given.append(place)
                elif argument.name != "d_sink" or problem.has_sink:
                    self.missing.append((place, *shapes[argument.name]))


# A whole check costs a few times what a kernel launch does, and a training loop repeats its calls: what does not depend
# on addresses is remembered by exactly what it depends on. Emptied when full; a lost or doubled entry costs a check.
_verdicts: dict[tuple, Verdict] = {}
_VERDICTS_KEPT = 1024
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # another type may be anything: it is looked at every time


def admit(tensors: Tensors, options: Options) -> Verdict:
    """The verdict on a call, remembered or new. Of a remembered one addresses are not looked at."""
    if transforms.active():
        return _examine(tensors, options)
    entries: list[Any] = [options]
    try:
        for tensor in tensors:
            if tensor is None:
                entries.append(None)
            elif type(tensor) in _PLAIN_TENSORS and not tensor.is_neg():
                entries += (tensor.shape, tensor.dtype, tensor.stride(), tensor.device)
            else:
                return _examine(tensors, options)
    except RuntimeError:  # a layout that has no strides
        return _examine(tensors, options)
    key = tuple(entries)
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _examine(tensors, options)
        if len(_verdicts) >= _VERDICTS_KEPT:
            _verdicts.clear()
        _verdicts[key] = verdict
    return verdict


def _examine(tensors: Tensors, options: Options) -> Verdict:
    """Everything about a call, addresses as well."""
    plain = True
    for name, tensor in by_name(tensors).items():
        if isinstance(tensor, torch.Tensor):
            transforms.refuse_wrapped(name, tensor)
            plain = plain and not tensor.is_neg()
    return Verdict(describe_all(tensors), options, plain)


def check_addresses(tensors: Any, workspace: torch.Tensor | None, needed: int, verdict: Verdict) -> None:
    """What differs from call to call: the workspace, and that what is written shares no memory with anything else."""
    if not verdict.given and workspace is None:
        return
    spans = [(tensors[place].data_ptr(), size, written) for place, size, written in verdict.spans]
    if workspace is not None:
        start, size = workspace.data_ptr(), workspace.numel()
        fits = workspace.dtype is torch.uint8 and workspace.ndim == 1 and workspace.is_contiguous() and size >= needed
        if not fits or workspace.device != verdict.device or start % WORKSPACE_ALIGNMENT:
            _check_workspace(workspace, needed, tensors)
        if size:
            spans.append((start, size, True))
    spans.sort()
    end = end_of_written = 0
    for start, size, written in spans:
        if start < end_of_written or (written and start < end):  # or views that interleave: for the rules to say
            check_aliases(describe_all(tensors), verdict.problem.direction)
            if workspace is not None:
                _check_workspace(workspace, needed, tensors)
            return
        if start + size > end:
            end = start + size
        if written and start + size > end_of_written:
            end_of_written = start + size


def _check_workspace(workspace: torch.Tensor, needed: int, tensors: Tensors) -> None:
    specs = describe_all({**by_name(tensors), "workspace": workspace})
    given = {name: spec for name, spec in specs.items() if spec is not None}
    check_workspace(given.pop("workspace"), needed, given["q"], given)


def output_shapes(problem: Problem) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
    """(shape, dtype) of each output of a problem; d_sink is (0,) without a sink."""
    p = problem
    if p.direction == "forward":
        return {
            "out": ((p.s_q, p.heads, p.head_dim_v), _torch_dtype(p.out_dtype)),
            "lse": ((p.s_q, p.heads), _torch_dtype(p.stat_dtype)),
        }
    return {
        "dq": ((p.s_q, p.heads, p.head_dim), _torch_dtype(p.dtype)),
        "dkv": ((p.s_kv, p.head_dim), _torch_dtype(p.dkv_dtype)),
        "d_sink": ((p.heads if p.has_sink else 0,), _torch_dtype(p.sink_dtype or p.stat_dtype)),
    }


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
