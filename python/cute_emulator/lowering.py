"""Statements to predecoded operations: registers, constants, guards, labels; the units lower the opcodes.

A unit is a module of :mod:`cute_emulator.units`. It registers, for the first part of an opcode, a function that gets a
:class:`Lowering` and an :class:`Instruction` and emits operations of the C++ core (:meth:`Lowering.emit`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from . import ptx
from .errors import PtxSyntaxError, UnsupportedInstruction

NONE = 0xFFFFFFFF
NO_GUARD = 0xFFFFFFFF

SPECIAL = {
    name: 4 * group + i
    for group, names in enumerate(
        [
            ["tid.x", "tid.y", "tid.z"],
            ["ntid.x", "ntid.y", "ntid.z"],
            ["ctaid.x", "ctaid.y", "ctaid.z"],
            ["nctaid.x", "nctaid.y", "nctaid.z"],
            ["cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z"],
            ["cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z"],
            ["clusterid.x", "clusterid.y", "clusterid.z"],
            ["nclusterid.x", "nclusterid.y", "nclusterid.z"],
            ["laneid", "warpid", "nwarpid"],
            ["cluster_ctarank", "cluster_nctarank", "dynamic_smem_size", "total_smem_size"],
            ["lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge"],
            ["lanemask_gt", "smid", "nsmid", "gridid"],
        ]
    )
    for i, name in enumerate(names)
}
CLOCKS = {
    "clock": "clock32",
    "clock_hi": "clock32",
    "clock64": "clock64",
    "globaltimer": "clock64",
    "globaltimer_lo": "clock32",
}


@dataclass
class Instruction:
    opcode: str
    parts: list[str]  # the opcode's parts: "add.s32" -> ["add", "s32"]
    operands: list[str]
    line: int
    scope: tuple[int, ...]
    text: str

    @property
    def type(self) -> str:
        return self.parts[-1]

    def has(self, part: str) -> bool:
        return part in self.parts

    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        return UnsupportedInstruction(f"PTX line {self.line}: {self.text}" + (f": {why}" if why else ""))


@dataclass
class Register:
    offset: int
    bits: int  # 1 for a predicate


@dataclass
class Operation:
    handler: str
    operands: tuple[int, ...]
    immediates: tuple[int, ...]
    guard: int
    guard_xor: int
    always: bool
    line: int


@dataclass
class Kernel:
    """A lowered entry: everything the C++ core needs, and the maps back to the PTX text."""

    entry: ptx.Entry
    operations: list[Operation]
    constants: bytes
    special: list[tuple[int, int]]
    register_bytes: int
    static_shared: int
    local_bytes: int
    parameter_bytes: int
    globals: list[object] = field(default_factory=list)  # keeps module variables alive


Unit = Callable[["Lowering", Instruction], None]
_UNITS: dict[str, Unit] = {}


def unit(*opcodes: str) -> Callable[[Unit], Unit]:
    """Registers a function as the lowering of all instructions whose opcode begins with one of ``opcodes``."""

    def register(f: Unit) -> Unit:
        for o in opcodes:
            _UNITS[o] = f
        return f

    return register


def bits_of(type_: str) -> int:
    """Width in bits of an instruction type: ``bits_of("f32x2") == 64``."""
    if type_ == "pred":
        return 1
    m = re.fullmatch(r"([a-z]+)(\d+)(?:x(\d+))?", type_)
    if not m:
        raise KeyError(type_)
    return int(m.group(2)) * int(m.group(3) or 1)


_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")


class Lowering:
    """Lowers one entry. Operands are byte offsets shifted left by one, the low bit set for the pool of constants."""

    def __init__(self, module: ptx.Module, entry: ptx.Entry) -> None:
        self.module, self.entry = module, entry
        self.operations: list[Operation] = []
        self.registers: dict[tuple[int, ...], dict[str, Register]] = {}
        self.labels: dict[tuple[int, ...], dict[str, int]] = {}
        self.constants = bytearray()
        self._constant_at: dict[tuple[int, int], int] = {}
        self._special_at: dict[str, int] = {}
        self._condition_code: int | None = None
        self._free_temporaries: dict[int, list[int]] = {1: [], 32: [], 64: []}
        self._temporaries: list[tuple[int, int]] = []
        self._after: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.size = 0
        self.line = 0
        self.guard, self.guard_xor = NO_GUARD, 0
        self.parameters = {p.name: p for p in entry.parameters}
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.globals: dict[str, int] = {}
        self._keep: list[object] = []
        self._branches: list[tuple[int, str, tuple[int, ...], int]] = []
        self.static_shared, self.local_bytes = self._place_variables()

    # ---------------------------------------------------------------- variables and registers

    def _place_variables(self) -> tuple[int, int]:
        import ctypes

        shared = local = 0
        for v in [*self.module.variables, *self.entry.variables]:
            if v.space in ("global", "const"):
                buffer = ctypes.create_string_buffer(v.data or b"", (v.size or 0) + v.align + 16)
                base = (ctypes.addressof(buffer) + v.align - 1) // v.align * v.align
                ctypes.memset(base, 0, v.size or 0)
                if v.data:
                    ctypes.memmove(base, v.data, len(v.data))
                self._keep.append(buffer)
                self.globals[v.name] = base
            elif v.space == "local":
                local = (local + v.align - 1) // v.align * v.align
                self.local[v.name] = local
                local += v.size or 0
            elif v.size is not None:
                shared = (shared + v.align - 1) // v.align * v.align
                self.shared[v.name] = shared
                shared += v.size
        for v in [*self.module.variables, *self.entry.variables]:
            if v.space == "shared" and v.size is None:  # dynamic shared memory begins after the static part
                shared = (shared + v.align - 1) // v.align * v.align
                self.shared[v.name] = shared
        return shared, (local + 15) // 16 * 16

    def _allocate(self, bits: int) -> int:
        align = 128 if bits > 1 else 4
        self.size = (self.size + align - 1) // align * align
        offset = self.size
        self.size += {1: 4, 32: 128, 64: 256}[bits]
        return offset << 1

    def temporary(self, bits: int) -> int:
        """A scratch register that lives until the end of the current instruction."""
        free = self._free_temporaries[bits]
        x = free.pop() if free else self._allocate(bits)
        self._temporaries.append((bits, x))
        return x

    def _declare(self, s: ptx.Statement) -> None:
        m = _REG.fullmatch(s.text)
        if not m:
            raise PtxSyntaxError(f"line {s.line}: cannot read {s.text!r}")
        type_, names = m.groups()
        bits = 1 if type_ == "pred" else max(32, bits_of(type_))
        table = self.registers.setdefault(s.scope, {})
        for name in names.split(","):
            name = name.strip()
            r = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
            if r:
                for i in range(int(r.group(2))):
                    table[f"{r.group(1)}{i}"] = Register(-1, bits)
            else:
                table[name] = Register(-1, bits)

    def register(self, name: str, scope: tuple[int, ...]) -> Register | None:
        while True:
            table = self.registers.get(scope)
            if table is not None and name in table:
                r = table[name]
                if r.offset < 0:  # 128 bits are two registers of 64, one after the other
                    r.offset = self._allocate(min(r.bits, 64))
                    if r.bits == 128:
                        self._allocate(64)
                return r
            if not scope:
                return None
            scope = scope[:-1]

    # ---------------------------------------------------------------- operands

    def constant(self, value: int, bits: int) -> int:
        value %= 1 << bits if bits > 1 else 1 << 32
        key = (value, bits)
        if key not in self._constant_at:
            width = {1: 4, 32: 4, 64: 8}[bits]
            align = 64
            self.constants.extend(bytes(-len(self.constants) % align))
            self._constant_at[key] = len(self.constants) << 1 | 1
            self.constants.extend(value.to_bytes(width, "little") * (1 if bits == 1 else 32))
        return self._constant_at[key]

    def immediate(self, text: str, type_: str) -> int | None:
        """The bit pattern of a literal read as ``type_``, or None if ``text`` is no literal."""
        if _INTEGER.fullmatch(text):
            v = int(text.rstrip("U"), 0)
            if type_[0] == "f" or type_.startswith("bf"):
                return self.immediate(f"{v}.0", type_)
            return v
        if text[:2] in ("0f", "0F"):
            v = int(text[2:], 16)
            return (
                struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", v))[0]))[0]
                if type_ == "f64"
                else v
            )
        if text[:2] in ("0d", "0D"):
            v = int(text[2:], 16)
            if bits_of(type_) == 32:
                return struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", v))[0]))[0]
            return v
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
            if type_ == "f64":
                return struct.unpack("<Q", struct.pack("<d", float(text)))[0]
            return struct.unpack("<I", struct.pack("<f", float(text)))[0]
        return None

    def source(self, ins: Instruction, text: str, type_: str) -> int:
        """The operand ``text`` read as ``type_``, in a slot of 64 bits for 64-bit types and of 32 bits otherwise."""
        if type_ == "pred":
            return self.predicate(ins, text)
        bits = 64 if bits_of(type_) == 64 else 32
        r = self.register(text, ins.scope)
        if r is not None:
            if r.bits == bits:
                return r.offset
            if r.bits in (1, 128):
                raise ins.unsupported(f"register {text} used as .{type_}")
            t = self.temporary(bits)
            if bits == 64:
                self.raw("widen", (t, r.offset))
            else:
                self.raw("part64", (t, r.offset), (0, 0xFFFFFFFF))
            return t
        if text.startswith("%"):
            return self._special(ins, text[1:], bits)
        v = self.immediate(text, type_)
        if v is not None:
            return self.constant(v, bits)
        symbol = self.symbol(text)
        if symbol is not None:
            handler, value = symbol
            if handler is None:
                return self.constant(value, bits)
            t = self.temporary(bits)
            if handler == "param_address" and bits != 64:
                raise ins.unsupported("the address of a parameter in 32 bits")
            self.raw(handler if handler == "param_address" else f"{handler}.u{bits}", (t,), (value,))
            return t
        raise ins.unsupported(f"what is {text!r}?")

    def symbol(self, name: str) -> tuple[str | None, int] | None:
        """A variable's address: (handler that computes it, or None for a constant; its argument)."""
        m = re.fullmatch(r"([\w$]+)(?:\+(\d+))?", name)
        if not m:
            return None
        name, plus = m.group(1), int(m.group(2) or 0)
        if name in self.shared:
            return "shared_address", self.shared[name] + plus
        if name in self.parameters:
            return "param_address", self.parameters[name].offset + plus
        if name in self.local:
            return None, self.local[name] + plus
        if name in self.globals:
            return None, self.globals[name] + plus
        return None

    def _special(self, ins: Instruction, name: str, bits: int) -> int:
        if name in CLOCKS:
            t = self.temporary(64 if CLOCKS[name] == "clock64" else 32)
            self.raw(CLOCKS[name], (t,))
            return t
        if name == "is_explicit_cluster":
            return self.constant(0xFFFFFFFF, 1)
        if name not in SPECIAL:
            raise ins.unsupported(f"special register %{name}")
        if name not in self._special_at:
            self._special_at[name] = self._allocate(32)
        x = self._special_at[name]
        if bits == 64:
            t = self.temporary(64)
            self.raw("widen", (t, x))
            return t
        return x

    def predicate(self, ins: Instruction, text: str) -> int:
        """A predicate read by an instruction; ``!p`` and literals included."""
        if text.startswith("!"):
            t = self.temporary(1)
            self.raw("not.pred", (t, self.predicate(ins, text[1:].strip())))
            return t
        if _INTEGER.fullmatch(text):
            return self.constant(0xFFFFFFFF if int(text.rstrip("U"), 0) else 0, 1)
        r = self.register(text, ins.scope)
        if r is None or r.bits != 1:
            raise ins.unsupported(f"{text!r} is no predicate")
        return r.offset

    def call_parameter(self, ins: Instruction, text: str) -> str | None:
        """The name in ``[name+0]`` if it is a parameter or result of a call, declared in the call's block."""
        m = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*0)?\s*\]", text)
        return m.group(1) if m and self.register(m.group(1), ins.scope) is not None else None

    def condition_code(self) -> int:
        """The carry flag of the extended-precision instructions, a predicate."""
        if self._condition_code is None:
            self._condition_code = self._allocate(1)
        return self._condition_code

    def halves(self, ins: Instruction, text: str) -> tuple[int, int]:
        """The low and the high 64 bits of a 128-bit register."""
        r = self.register(text, ins.scope)
        if r is None or r.bits != 128:
            raise ins.unsupported(f"{text!r} is no 128-bit register")
        return r.offset, r.offset + (256 << 1)

    def destination(self, ins: Instruction, text: str, bits: int) -> int:
        """Where a result of ``bits`` (1, 32 or 64) goes; ``_`` gives a scratch register."""
        if text == "_":
            return self.temporary(bits)
        r = self.register(text, ins.scope)
        if r is None:
            raise ins.unsupported(f"what is {text!r}?")
        if r.bits == bits:
            return r.offset
        if 1 in (r.bits, bits) or r.bits == 128:
            raise ins.unsupported(f"{text} cannot hold the result")
        t = self.temporary(bits)
        self._after.append(("widen", (r.offset, t), ()) if r.bits == 64 else ("part64", (r.offset, t), (0, 0xFFFFFFFF)))
        return t

    def optional(self, ins: Instruction, text: str, bits: int) -> int:
        """Like :meth:`destination`, but ``_`` is an absent operand."""
        return NONE if text == "_" else self.destination(ins, text, bits)

    def register_bits(self, ins: Instruction, text: str) -> int:
        r = self.register(text, ins.scope)
        return r.bits if r else 32

    def address(self, ins: Instruction, text: str, bits: int) -> tuple[int, int]:
        """``[base+offset]`` as (operand, constant offset)."""
        m = _ADDRESS.fullmatch(text)
        if not m:
            raise ins.unsupported(f"address {text!r}")
        base, offset = m.group(1), int(m.group(2) or "0", 0)
        if _INTEGER.fullmatch(base):
            return self.constant(int(base, 0), bits), offset
        return self.source(ins, base, f"b{bits}"), offset

    # ---------------------------------------------------------------- emission

    def raw(self, handler: str, operands: tuple[int, ...], immediates: tuple[int, ...] = ()) -> None:
        """Emits an unguarded helper operation."""
        self.operations.append(Operation(handler, operands, immediates, NO_GUARD, 0, False, self.line))

    def emit(
        self,
        handler: str,
        operands: tuple[int, ...] | list[int],
        immediates: tuple[int, ...] | list[int] = (),
        always: bool = False,
    ) -> None:
        """Emits the operation of the current instruction, under its guard."""
        self.operations.append(
            Operation(handler, tuple(operands), tuple(immediates), self.guard, self.guard_xor, always, self.line)
        )

    def branch(self, ins: Instruction, label: str) -> None:
        self._branches.append((len(self.operations), label, ins.scope, ins.line))
        self.emit("bra", (), (0,), always=True)

    def lower(self) -> Kernel:
        import_units()
        for s in self.entry.statements:
            if s.kind == "reg":
                self._declare(s)
            elif s.kind == "label":
                self.labels.setdefault(s.scope, {})[s.text] = len(self.operations)
            else:
                self._instruction(s)
        self.line = self.entry.statements[-1].line if self.entry.statements else 0
        self.guard, self.guard_xor = NO_GUARD, 0
        self.emit("ret", ())
        for at, label, scope, line in self._branches:
            target = None
            s2 = scope
            while target is None:
                target = self.labels.get(s2, {}).get(label)
                if target is None and not s2:
                    raise PtxSyntaxError(f"line {line}: label {label} is not defined")
                s2 = s2[:-1]
            self.operations[at].immediates = (target,)
        last = self.entry.parameters[-1] if self.entry.parameters else None
        return Kernel(
            self.entry,
            self.operations,
            bytes(self.constants),
            [(SPECIAL[n], x >> 1) for n, x in self._special_at.items()],
            self.size,
            self.static_shared,
            self.local_bytes,
            last.offset + last.size if last else 0,
            self._keep,
        )

    def _instruction(self, s: ptx.Statement) -> None:
        text = s.text
        self.line = s.line
        self.guard, self.guard_xor = NO_GUARD, 0
        body = text
        guard = None
        if text.startswith("@"):
            head, _, body = text.partition(" ")
            guard = head[1:]
        opcode, _, rest = body.partition(" ")
        parts = opcode.split(".")
        ins = Instruction(opcode, parts, ptx.split_operands(rest), s.line, s.scope, text)
        if guard:
            negated = guard.startswith("!")
            r = self.register(guard.lstrip("!"), s.scope)
            if r is None or r.bits != 1:
                raise ins.unsupported(f"guard {guard}")
            self.guard, self.guard_xor = r.offset >> 1, 0xFFFFFFFF if negated else 0
        f = _UNITS.get(parts[0])
        if f is None:
            raise ins.unsupported("unknown opcode")
        try:
            f(self, ins)
        except (KeyError, IndexError, ValueError, AttributeError) as e:
            raise ins.unsupported(f"{type(e).__name__}: {e}") from e
        for handler, operands, immediates in self._after:
            self.emit(handler, operands, immediates)
        self._after.clear()
        for bits, x in self._temporaries:
            self._free_temporaries[bits].append(x)
        self._temporaries.clear()


def import_units() -> None:
    from . import units  # noqa: F401  (registers the opcodes)


def lower(module: ptx.Module, name: str) -> Kernel:
    """Lowers the entry ``name``. Raises :class:`UnsupportedInstruction`, naming the PTX line."""
    return Lowering(module, module.entries[name]).lower()
