"""PTX text to statements (PTX ISA: Syntax; State Spaces, Types, and Variables; Directives).

Reads what compilers emit: several ``.entry`` functions, scoped blocks from inline assembly that reuse labels and
registers, parameterised register names, ``.loc`` lines. Nothing is interpreted here; that is what
:mod:`cute_emulator.lowering` does.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from .errors import PtxSyntaxError


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    size: int
    type: str


@dataclass(frozen=True)
class Variable:
    """A ``.shared``, ``.local``, ``.global`` or ``.const`` variable; ``size`` is None for ``.extern .shared x[]``."""

    name: str
    space: str
    size: int | None
    align: int
    data: bytes | None = None


@dataclass(frozen=True)
class Statement:
    """``kind`` is "label", "reg", "variable" or "instruction"; ``scope`` is a path of block numbers."""

    kind: str
    text: str
    line: int
    scope: tuple[int, ...]


@dataclass
class Entry:
    name: str
    parameters: list[Parameter]
    statements: list[Statement]
    variables: list[Variable]
    max_threads: tuple[int, ...] | None = None
    cluster: tuple[int, ...] | None = None
    source_lines: list[tuple[int, str, int]] = field(default_factory=list)  # PTX line, file, line of the source


@dataclass
class Module:
    text: str
    target: str
    entries: dict[str, Entry]
    variables: list[Variable]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$.]+)\s*(\()?")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+((?:\.ptr\s*|\.global\s*|\.shared\s*|\.const\s*|\.align\s+\d+\s*)*)([\w$]+)(?:\[(\d+)\])?"
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|local|global|const)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?(?:\.v[24]\s+)?\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_SPACE = re.compile(r"\s+")


def type_bytes(type_: str) -> int:
    """Bytes of a fundamental type: ``type_bytes("b32") == 4``."""
    if type_ == "pred":
        return 1
    return int(re.sub(r"\D", "", type_)) // 8


def _blank_comments(text: str) -> str:
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def _variable(text: str, line: int) -> Variable:
    m = _VARIABLE.match(text.strip())
    if not m:
        raise PtxSyntaxError(f"line {line}: cannot read the variable declaration {text.strip()!r}")
    space, align, type_, name, dims, init = m.groups()
    size: int | None = type_bytes(type_)
    for d in re.findall(r"\[(\d*)\]", dims or ""):
        size = None if d == "" or size is None else size * int(d)
    data = None
    if init is not None:
        values = [int(v, 0) for v in re.findall(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", init)]
        n = type_bytes(type_)
        data = b"".join((v % (1 << (8 * n))).to_bytes(n, "little") for v in values)
    return Variable(name, space, size, int(align or type_bytes(type_)), data)


def parse(text: str) -> Module:
    """Reads a PTX module. Raises :class:`PtxSyntaxError`, naming the line, where the text cannot be read."""
    clean = _blank_comments(text)
    newlines = [m.start() for m in re.finditer("\n", clean)]

    def line_of(position: int) -> int:
        return bisect_right(newlines, position - 1) + 1

    target = re.search(r"\.target\s+(\w+)", clean)
    files = {int(n): name for n, name in _FILE.findall(clean)}
    entries: dict[str, Entry] = {}
    variables: list[Variable] = []
    position = 0
    outside: list[tuple[int, int]] = []
    while True:
        m = _ENTRY.search(clean, position)
        if not m:
            outside.append((position, len(clean)))
            break
        outside.append((position, m.start()))
        head_end = clean.find("{", m.end())
        if head_end < 0:
            raise PtxSyntaxError(f"line {line_of(m.start())}: .entry {m.group(1)} has no body")
        if m.group(2):
            close = clean.index(")", m.end())
            head_end = clean.index("{", close)
            parameter_text, directives = clean[m.end() : close], clean[close + 1 : head_end]
        else:
            parameter_text, directives = "", clean[m.end() : head_end]
        depth, i = 0, head_end
        for brace in re.finditer(r"[{}]", clean[head_end:]):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                i = head_end + brace.start()
                break
        else:
            raise PtxSyntaxError(f"line {line_of(m.start())}: .entry {m.group(1)} is not closed")
        entry = Entry(m.group(1), _parameters(parameter_text, line_of(m.start())), [], [])
        for name, attribute in (("reqntid", "max_threads"), ("reqnctapercluster", "cluster")):
            d = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
            if d:
                setattr(entry, attribute, tuple(int(x or 1) for x in d.groups()))
        _body(clean, head_end + 1, i, line_of, entry, files)
        entries[entry.name] = entry
        position = i + 1
    for begin, end in outside:
        for m in re.finditer(
            r"^\s*((?:\.(?:visible|extern|weak|common)\s+)*\.(?:shared|global|const)\b[^;]*);", clean[begin:end], re.M
        ):
            variables.append(_variable(m.group(1), line_of(begin + m.start(1))))
    return Module(text, target.group(1) if target else "", entries, variables)


def _parameters(text: str, line: int) -> list[Parameter]:
    out: list[Parameter] = []
    offset = 0
    for item in filter(None, (p.strip() for p in text.split(","))):
        m = _PARAMETER.match(item)
        if not m:
            raise PtxSyntaxError(f"line {line}: cannot read the parameter {item!r}")
        align, type_, _, name, count = m.groups()
        size = type_bytes(type_) * int(count or 1)
        # tensor maps are parameters too, and have to lie at multiples of 64 bytes
        a = max(int(align or type_bytes(type_)), 64 if size >= 128 else 1)
        offset = (offset + a - 1) // a * a
        out.append(Parameter(name, offset, size, type_))
        offset += size
    return out


def _body(clean: str, position: int, end: int, line_of, entry: Entry, files: dict[int, str]) -> None:
    scope: tuple[int, ...] = ()
    blocks = 0
    skip = re.compile(r"\s*")
    while True:
        position = skip.match(clean, position).end()  # type: ignore[union-attr]
        if position >= end:
            return
        c = clean[position]
        if c == "{":
            blocks += 1
            scope = (*scope, blocks)
            position += 1
            continue
        if c == "}":
            scope = scope[:-1]
            position += 1
            continue
        if c == ";":
            position += 1
            continue
        if c == ".":
            m = _LOC.match(clean, position)
            if m:
                entry.source_lines.append((line_of(position), files.get(int(m.group(1)), "?"), int(m.group(2))))
                position = m.end()
                continue
        else:
            m = _LABEL.match(clean, position)
            if m:
                entry.statements.append(Statement("label", m.group(1), line_of(position), scope))
                position = m.end()
                continue
        stop = clean.find(";", position, end)
        line = line_of(position)
        if stop < 0:
            raise PtxSyntaxError(f"line {line}: a statement without ';'")
        text = _SPACE.sub(" ", clean[position:stop].strip())
        position = stop + 1
        if text.startswith(".param"):  # of a call in the same block: a register as good as any
            text = ".reg" + text[len(".param") :]
        if text.startswith(".reg"):
            entry.statements.append(Statement("reg", text, line, scope))
        elif text.startswith((".pragma", ".branchtargets", ".callprototype", ".calltargets")):
            continue
        elif text.startswith((".shared", ".local", ".extern")):
            entry.variables.append(_variable(text, line))
        elif text.startswith("."):
            entry.statements.append(Statement("instruction", text, line, scope))
        else:
            entry.statements.append(Statement("instruction", text, line, scope))


_OPEN, _CLOSE = "{[(", "}])"


def split_operands(text: str) -> list[str]:
    """``"{a, b}, [c+4], d"`` to ``["{a, b}", "[c+4]", "d"]``."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [x.strip() for x in text.split(",")] if text else []
    out, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        if c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
        elif c == "," and depth == 0:
            out.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    if last:
        out.append(last)
    return out
