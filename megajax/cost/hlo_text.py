"""Parses one line of a compiled module's text: an instruction's shapes, opcode and operands.

Only this module knows the syntax of an instruction in XLA's text. cost/hlo_module.py splits the
text into computations, which are lists of such lines. On these, cost/hlo.py finds the collectives,
and cost/program.py everything that a device launches.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "s8": 1, "u8": 1, "f8e4m3": 1, "f8e4m3fn": 1,
    "f8e5m2": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1, "f8e8m0fnu": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
    "token": 0, "opaque": 0,
}  # fmt: skip
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_LAYOUT = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([\d,]*)[^}]*\})?")
_BRACKET = re.compile(r"[()]")
_OPERAND = re.compile(r"%([\w.\-]+)")


def ints(text: str) -> list[int]:
    """Returns the numbers of '4,2,8'."""
    return [int(i) for i in text.split(",") if i]


def nbytes(array: tuple[str, str]) -> int:
    """Returns the bytes of one (dtype, dims) that ARRAY found."""
    dtype, dims = array
    return math.ceil(BYTES.get(dtype, 4) * math.prod(ints(dims)))


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    layout: the order of dimensions in memory, first the one whose elements are adjacent.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...]

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.dims)

    @property
    def itemsize(self) -> float:
        """Bytes of an element."""
        return BYTES.get(self.dtype, 4)

    @property
    def nbytes(self) -> float:
        """Bytes in memory, without padding."""
        return self.itemsize * self.elements

    @functools.cached_property
    def strides(self) -> dict[int, int]:
        """Elements between two neighbours along each dimension, in the order of `layout`."""
        found, below = {}, 1
        for dimension in self.layout:
            found[dimension] = below
            below *= self.dims[dimension]
        return found

    @property
    def minor(self) -> int:
        """Size of the dimension whose elements lie side by side; of a scalar 1."""
        return self.dims[self.layout[0]] if self.layout else 1

    @property
    def is_float(self) -> bool:
        """Whether arithmetic on it is floating-point arithmetic."""
        return self.dtype[0] == "f" or self.dtype[:2] == "bf" or self.dtype[0] == "c"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.dims)}{list(self.layout)}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction, as its line says it.

    shape: the text of the result's shape. arguments: the text between the brackets that follow the
    opcode. attributes: the text after these brackets.
    """

    name: str
    opcode: str
    shape: str
    arguments: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The result's arrays; of a tuple all, nested ones in their order."""
        return tuple(_array(*found) for found in _LAYOUT.findall(self.shape))

    @property
    def array(self) -> Array:
        """The result, or the first array of a tuple."""
        return self.arrays[0] if self.arrays else Array("token", (), ())

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        if "%" in self.arguments or not self.arguments:
            return tuple(_OPERAND.findall(self.arguments))
        # Before optimisation XLA writes names alone.
        return tuple(word.split()[-1] for word in self.arguments.split(", ") if word.strip())

    def get(self, name: str, default: str = "") -> str:
        """Returns the text of an attribute without its outer braces, 'calls' without its %."""
        match = _attribute(name).search(self.attributes)
        if match is None:
            return default
        return match[1] if match[1] is not None else match[2].lstrip("%")

    def dims(self, name: str) -> list[int]:
        """Returns the numbers of an attribute such as dimensions={0,2}."""
        return ints(self.get(name))

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation: its named scopes and its primitive."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations of a fusion, call, or async start."""
        return re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", self.attributes)

    @property
    def branches(self) -> list[str]:
        """Names of a conditional's computations, in the order of the index that chooses one.

        If a boolean chooses, the computation for false comes first.
        """
        if several := self.get("branch_computations"):
            return re.findall(r"%?([\w.\-]+)", several)
        both = self.get("false_computation"), self.get("true_computation")
        return [name for name in both if name]


@functools.cache
def _attribute(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[ ,]){name}=(?:\{{([^{{}}]*)\}}|([^\s,]+))")


@functools.lru_cache(maxsize=4096)
def _array(dtype: str, dims: str, layout: str) -> Array:
    sizes = tuple(ints(dims.replace("<=", "").replace(" ", "")))
    order = tuple(ints(layout)) if layout else tuple(reversed(range(len(sizes))))
    return Array(dtype, sizes, order if len(order) == len(sizes) else ())


def parse(line: str) -> Instruction | None:
    """Returns the instruction of a line, or None if there is none."""
    match = NAME.match(line)
    if match is None:
        return None
    start = match.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    bracket = line.find("(", end)
    if end <= 0 or bracket < 0:
        return None
    close = _closing(line, bracket)
    return Instruction(
        match[1],
        line[end:bracket].strip(),
        line[start:end],
        line[bracket + 1 : close],
        line[close + 1 :],
        line.lstrip().startswith("ROOT "),
    )


def instructions(lines: Sequence[str]) -> dict[str, Instruction]:
    """Returns the instructions of a computation's lines by name, in their order."""
    found = (parse(line) for line in lines)
    return {one.name: one for one in found if one is not None}


def _closing(line: str, start: int) -> int:
    """Returns the place of the bracket that closes the one at `start`, or the line's end."""
    depth = 0
    for match in _BRACKET.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
