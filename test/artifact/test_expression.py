"""Sizes as expressions: what they compute, and that nothing else can be said in them."""

from __future__ import annotations

import random

import pytest

from cudnn_dsa.artifact.expression import Expression

VALUES = {"s_q": 4096, "heads": 128, "n": 7}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (5, 5),
        ("-n", -7),
        ("s_q * heads + n", 4096 * 128 + 7),
        ("s_q - heads * n", 4096 - 128 * 7),
        ("(s_q + n) // heads % 5", 4103 // 128 % 5),
        ("min(s_q, heads, n)", 7),
        ("max(2 * n, 3)", 14),
        ("ceil_div(s_q + 1, heads) * 2", 66),
    ],
)
def test_values(text: str | int, value: int) -> None:
    assert Expression(text)(VALUES) == value


def test_ceil_div_is_the_least_multiple_that_covers() -> None:
    draw = random.Random(0)
    for _ in range(500):
        a, b = draw.randrange(2**40), draw.randrange(1, 2**20)
        n = Expression("ceil_div(a, b)")({"a": a, "b": b})
        assert (n - 1) * b < a <= n * b or a == n == 0


@pytest.mark.parametrize(
    "text",
    [
        "", "s_q +", "1.5", "'x'", "True", "s_q ** 99", "s_q / 2", "1 << 40", "s_q.real", "s_q[0]", "(1, 2)", "[1]",
        "lambda: 1", "s_q if n else 1", "s_q < n", "not n", "~n", "s_q and n", "open('x')", "__import__('os')", "min",
        "min()", "min(s_q, key=n)", "min(*n)", "abs(n)", "(lambda: 1)()", "min(1, 2)(3)", "x := 1", "f'{n}'", "n; n",
        "1" * 500, "(" * 300,
    ],
)  # fmt: skip
def test_nothing_else_parses(text: str) -> None:
    with pytest.raises(ValueError):
        Expression(text)


def test_names_are_only_those_given() -> None:
    expression = Expression("ceil_div(s_q, heads) + n")
    assert expression.names == {"s_q", "heads", "n"}
    with pytest.raises(NameError):
        Expression("s_q + print_")({"s_q": 1})
