"""Random problems against the float64 oracle: everything drawn at once, no outlier."""

import random

import dsa_cases
import pytest
import torch
from dsa_cases import CASES, Sizes, assert_gradients, make

from cudnn_dsa import interface

# Changes that may be combined: each keeps the data generic enough for the contract's relative bounds.
COMBINED = (
    "logits_200",  # first: it looks at the data
    "topk_length", "sink", "sink_mixed", "empty_rows", "scattered_invalid", "duplicates", "odd_lengths",
    "poisoned_rows",
)  # fmt: skip


def draw(target, seed):
    """(name of the loosest bound, case, options) of one random problem."""
    r = random.Random(seed)
    dtype = r.choice(target.dtypes)
    head_dims = (3, 20, 64, 130, 512, 576) if target.wide else target.head_dims
    sizes = Sizes(
        s_q=r.randint(1, 24), s_kv=r.randint(8, 300), heads=r.choice((1, 2, 3, 8, 16, 17, 24, 33, 64, 96, 128)),
        head_dim=r.choice(head_dims), topk=r.randint(3, 200),
    )  # fmt: skip
    picked = sorted(r.sample(COMBINED, r.randint(0, 3)), key=COMBINED.index)

    def together(case, sizes, generator):
        for name in picked:
            CASES[name](case, sizes, generator)

    key = f"fuzz {seed}"
    dsa_cases.CASES[key] = together
    try:
        case = make(key, dtype, sizes, seed)
    finally:
        del dsa_cases.CASES[key]
    options = {"deterministic": r.random() < 0.3}
    if r.random() < 0.3:
        options["dkv"] = torch.empty(case.kv.shape, dtype=torch.promote_types(dtype, torch.float32)).to(target.device)
    name = "logits_200" if "logits_200" in picked else "random"
    return name, case.to(target.device), options, f"{dtype} {sizes} {picked}"


def run(target, seeds):
    for seed in seeds:
        name, case, options, about = draw(target, seed)
        got = interface.sparse_attention_backward(
            case.q, case.kv, case.out, case.dout, case.lse, case.attn_sink, case.topk_idxs, case.softmax_scale,
            case.topk_length, backend=target.backend, **options,
        )  # fmt: skip
        # Where next to every row has one key, or one that takes all, dq is rounding: the size of its terms decides.
        dq, _, _, terms = case.to("cpu").backward_oracle()
        cancels = dq.norm() < 0.02 * terms["dq"].norm()
        try:
            assert_gradients(
                "leading_invalid" if cancels else name, case, got, limit=dsa_cases.bound(name, case.q.dtype)
            )
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {about} {list(options)}: {error}") from None


def test_random_problems(target):
    run(target, range(40))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_problems(target):
    run(target, range(1000))
