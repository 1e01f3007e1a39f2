"""The errors of a refused call. Each names the argument, what was expected and what came."""

from __future__ import annotations


class ContractError(ValueError, AssertionError):
    """A call breaks the contract: shape, dtype, device, layout, range or alias.

    It is a ``ValueError`` and an ``AssertionError``, so that code written for either catches it.

    Args:
        argument: name of the offending argument as the caller wrote it.
        expected: what the contract asks for.
        got: what came.
        hint: optional sentence that says what to do.

    The message reads ``<argument>: expected <expected>, got <got>`` with the hint behind it in parentheses.
    """

    def __init__(self, argument: str, expected: str, got: str, hint: str = ""):
        self.argument = argument
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(f"{argument}: expected {expected}, got {got}" + (f" ({hint})" if hint else ""))

    def __reduce__(self):  # the default would call __init__ with the finished message
        return type(self), (self.argument, self.expected, self.got, self.hint)


class UnsupportedError(ContractError, NotImplementedError):
    """A layout or a mode that is meaningful but that nothing here runs. Also a ``NotImplementedError``."""
