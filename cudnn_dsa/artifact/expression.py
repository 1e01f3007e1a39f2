"""Sizes as small expressions: integers that a launch computes from its scalar arguments.

``"ceil_div(s_q * heads, 64)"``: names, integer constants, ``+ - * // %``, ``min``, ``max`` and ``ceil_div``. Nothing
else parses, so an expression that comes from a file can compute a number and do nothing more.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

MAX_LENGTH = 400
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)


FUNCTIONS: dict[str, Callable[..., int]] = {"ceil_div": ceil_div, "max": max, "min": min}


class Expression:
    """An integer in terms of named integers.

    Args:
        text: the expression, or a constant.

    Raises:
        ValueError: the text has anything else in it.
    """

    __slots__ = ("_code", "names", "text")

    def __init__(self, text: str | int) -> None:
        self.text = str(text)
        if len(self.text) > MAX_LENGTH:
            raise ValueError(f"an expression of {len(self.text)} characters (at most {MAX_LENGTH})")
        try:
            tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, RecursionError) as error:
            raise ValueError(f"not an expression: {self.text!r}") from error
        self.names = frozenset(self._names(tree.body))
        self._code = compile(tree, self.text, "eval")

    def _names(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return []
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
            return [node.id]
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            return self._names(node.left) + self._names(node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._names(node.operand)
        if isinstance(node, ast.Call) and _is_function(node.func) and node.args and not node.keywords:
            return [name for argument in node.args for name in self._names(argument)]
        raise ValueError(f"not allowed in an expression: {ast.unparse(node)!r} in {self.text!r}")

    def __call__(self, values: Mapping[str, Any]) -> int:
        return int(eval(self._code, {"__builtins__": {}, **FUNCTIONS}, values))


def _is_function(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in FUNCTIONS


@functools.lru_cache(maxsize=1024)
def parse(text: str | int) -> Expression:
    """The expression of a text; the same object for the same text."""
    return Expression(text)
