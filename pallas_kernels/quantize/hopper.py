"""The fused kernels of SDP4Bit's messages on Hopper: what fits, tiles, and how they are called.

The kernels stream tiles (stream.py) and differ in how a tile lies in registers: `columns` where a
Hadamard transform is in it, `rows` elsewhere. Payloads travel as 32-bit words: XLA makes of uint8
rows what the kernels take, and back, without a copy.

Legend: N elements, R payloads, W 32-bit words of a payload, P its bytes.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.memory import varying_as
from pallas_kernels.quantize import columns, reference, rows
from pallas_kernels.quantize.stream import PLACES
from pallas_kernels.work import Work

Array = jax.Array
WORD = 32  # bits
MOST_SENDERS = 16  # (chosen) whose tiles lie side by side in shared memory
MOST_ELEMENTS = 2**31  # that an int32 index names
STEP = 4096  # (chosen) elements of a tile: 32 of a thread
BODIES = {
    "hadamard_quantize": columns.encode,
    "reduce_hadamard": columns.reduce,
    "reduce_requantize": rows.recode,
    "subtract_quantize": rows.difference,
    "dequantize_add": rows.apply,
}


@dataclasses.dataclass(frozen=True)
class Tile:
    """groups: how many a tile has. stages: slots of the ring, at least 2. blocks: of the grid."""

    groups: int
    stages: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. op: a key of BODIES. pieces: runs of `groups` groups, together in both arrays.

    payloads: rows that are read, or written. places: of pieces in a row that is written. dtype: of
    x or of the copy. bits, new_bits: of codes that are read or written, and of the sum's. noise:
    rounds at random. hadamard: transforms. short: elements of a piece beyond whole groups.
    """

    op: str
    pieces: int
    groups: int
    group: int
    payloads: int = 1
    places: int = 1
    dtype: Any = jnp.float32
    bits: Any = 4
    new_bits: Any = 4
    noise: bool = False
    hadamard: bool = False
    short: int = 0

    @property
    def elements(self) -> int:
        """The number of elements of all pieces."""
        return self.pieces * self.groups * self.group

    def tiles(self, tile: Tile) -> int:
        """Returns the number of tiles of all pieces."""
        return self.pieces * self.groups // tile.groups

    @property
    def columned(self) -> bool:
        """Whether a thread has 32 neighbours, not the codes of a word."""
        return self.op in ("hadamard_quantize", "reduce_hadamard")

    @property
    def summed(self) -> bool:
        """Whether payloads are added."""
        return self.op in ("reduce_requantize", "reduce_hadamard")

    @property
    def near(self) -> int:
        """Neighbours that a thread holds together."""
        return columns.BLOCK if self.columned else WORD // self.new_bits

    @property
    def inside(self) -> tuple[int, ...]:
        """The shape of a group."""
        threads = self.group // self.near
        if self.columned:
            return (threads, self.near)
        return (threads // rows.FOUR, rows.FOUR, self.near)

    @property
    def lanes(self) -> int:
        """Threads of a warp that share a group."""
        return min(32, self.group // self.near)

    @property
    def least(self) -> int:
        """Groups of the smallest tile: all threads of a warpgroup have some."""
        return max(tiles.WARPGROUP // self.lanes, 4)

    def words(self, bits: int) -> int:
        """Returns the number of words of a group's codes."""
        return self.group * bits // WORD

    def buffers(self, tile: Tile) -> dict[str, tuple[tuple[int, ...], Any]]:
        """The shared memory of a thread block."""
        S, T = tile.stages, tile.groups
        shared: dict[str, tuple[tuple[int, ...], Any]] = {}
        wide = (T, *self.inside)
        if self.op in ("hadamard_quantize", "subtract_quantize", "dequantize_add"):
            shared["x_slots"] = ((S, *wide), self.dtype)
        if self.op == "subtract_quantize":
            shared["main_slots"] = ((S, *wide), jnp.float32)
        if self.summed or self.op == "dequantize_add":
            # The 1 keeps layout inference from tiling these.
            parts = (S, self.payloads if self.summed else 1, 1)
            shared["word_slots"] = ((*parts, T * self.words(self.bits)), jnp.int32)
            shared["scale_slots"] = ((*parts, T), jnp.int32)
        if self.op in ("reduce_hadamard", "dequantize_add"):
            shared["out"] = ((PLACES, *wide), self.dtype)
        else:
            shared["words_out"] = ((PLACES, T * self.words(self.new_bits)), jnp.int32)
            shared["scales_out"] = ((PLACES, T, 1), jnp.int32)
        return shared

    @property
    def copies(self) -> int:
        """The number of copies that bring a tile."""
        lines = {"hadamard_quantize": 1, "subtract_quantize": 2, "dequantize_add": 3}
        return lines.get(self.op, 2 * self.payloads)


def cut(op: str, n: int, pieces: int, group: int, **fields: Any) -> Problem:
    """Returns the problem of n elements in equal pieces."""
    groups, short = divmod(n // pieces, group)
    return Problem(op, pieces, groups, group, short=short, **fields)


def heuristic(problem: Problem) -> Tile:
    """Returns the tile if nothing was measured: 4096 elements or the fewest.

    As many thread blocks share an SM as fit.
    """
    most = max(STEP // problem.group // problem.least, 1)
    times = math.gcd(max(problem.groups // problem.least, 1), 1 << most.bit_length() - 1)
    groups = problem.least * times
    total = max(problem.pieces * problem.groups // groups, 1)
    tile = Tile(groups, 2, min(SMS, total))
    for blocks, stages in ((4, 3), (3, 3), (3, 2), (2, 3), (2, 2), (1, 3), (1, 2)):
        tile = Tile(groups, stages, min(SMS * blocks, total))
        if _fits(problem, tile, blocks):
            return tile
    return tile


def fit(problem: Problem, tile: Tile | None) -> Tile:
    """Returns a tile that was measured for a like problem as it suits this one, or the heuristic's.

    None: none was measured.
    """
    if tile is not None:
        groups = math.gcd(problem.groups, tile.groups)
        total = problem.pieces * problem.groups // max(groups, 1)
        tile = dataclasses.replace(tile, groups=groups, blocks=min(tile.blocks, max(total, 1)))
        if groups and groups % problem.least == 0 and _fits(problem, tile):
            return tile
    return heuristic(problem)


def misfits(problem: Problem, tile: Tile) -> list[str]:
    """Returns why the kernel cannot take it, empty when it can."""
    if reasons := unknown(problem):
        return reasons
    unit = problem.least
    if problem.short:
        size = problem.groups * problem.group + problem.short
        return [f"needs whole groups of {problem.group}, found pieces of {size} elements"]
    if not problem.groups or problem.groups % unit:
        size = problem.groups * problem.group
        reasons.append(
            f"needs pieces of a multiple of {unit * problem.group} elements ({unit} groups of "
            f"{problem.group}), found {size}"
        )
    if problem.elements >= MOST_ELEMENTS:
        reasons.append(f"needs fewer than 2^31 elements, found {problem.elements}")
    if problem.payloads > MOST_SENDERS and problem.summed:
        reasons.append(f"needs at most {MOST_SENDERS} senders, found {problem.payloads}")
    elif not reasons and not _fits(problem, tile):
        needed = tiles.shared_bytes(problem.buffers(tile))
        reasons.append(
            f"{tile} needs {needed} bytes of shared memory, there are {tiles.SHARED_BYTES}"
        )
    return reasons


def unknown(problem: Problem) -> list[str]:
    """Returns the reasons why no tile fits: codes or groups that the bodies do not handle."""
    reasons = []
    known = (8,) if problem.op == "reduce_requantize" else (4, 8)
    if problem.bits not in known:
        reasons.append(f"needs codes of {' or '.join(map(str, known))} bits, found {problem.bits}")
    if problem.new_bits not in (4,) + (8,) * (problem.op != "reduce_requantize"):
        reasons.append(f"does not make codes of {problem.new_bits} bits")
    sizes = columns.GROUPS if problem.columned else rows.GROUPS
    if problem.group not in sizes:
        reasons.append(f"needs groups of {', '.join(map(str, sizes))}, found {problem.group}")
    return reasons


def _fits(problem: Problem, tile: Tile, blocks: int = 1) -> bool:
    """Whether so many thread blocks fit in the shared memory of an SM."""
    room = tiles.SHARED_BYTES // blocks - tiles.RESERVED_BYTES
    return tiles.shared_bytes(problem.buffers(tile)) <= room


def hadamard_quantize(
    x_N: Array,
    key_W: Array | None,
    *,
    problem: Problem,
    tile: Tile,
    interpret: bool = False,
) -> Array:
    """Returns what fused_reference.hadamard_quantize does."""
    inputs = {"x": x_N, "key": _signed(key_W)}
    return _call(problem, tile, inputs, interpret)


def reduce_requantize(
    payload_RP: Array,
    key_W: Array | None,
    *,
    problem: Problem,
    tile: Tile,
    interpret: bool = False,
) -> Array:
    """Returns what fused_reference.reduce_requantize does."""
    return _call(problem, tile, {"payload": payload_RP, "key": _signed(key_W)}, interpret)


def reduce_hadamard(
    payload_RP: Array, *, problem: Problem, tile: Tile, interpret: bool = False
) -> Array:
    """Returns what fused_reference.reduce_hadamard does."""
    return _call(problem, tile, {"payload": payload_RP}, interpret)


def subtract_quantize(
    main_N: Array,
    copy_N: Array,
    key_W: Array | None,
    *,
    problem: Problem,
    tile: Tile,
    interpret: bool = False,
) -> Array:
    """Returns what fused_reference.subtract_quantize does."""
    inputs = {"x": copy_N, "main": main_N, "key": _signed(key_W)}
    return _call(problem, tile, inputs, interpret)[0]


def dequantize_add(
    payload_RP: Array, copy_N: Array, *, problem: Problem, tile: Tile, interpret: bool = False
) -> Array:
    """Returns what fused_reference.dequantize_add does."""
    return _call(problem, tile, {"payload": payload_RP, "x": copy_N}, interpret)


def _signed(key_W: Array | None) -> Array | None:
    return None if key_W is None else lax.bitcast_convert_type(key_W, jnp.int32)


def _words(payload_RP: Array) -> Array:
    """The bytes of payloads as int32 words."""
    R, P = payload_RP.shape
    return lax.bitcast_convert_type(payload_RP.reshape(R, P // 4, 4), jnp.int32)


def _payload(word_RW: Array) -> Array:
    return lax.bitcast_convert_type(word_RW, jnp.uint8).reshape(word_RW.shape[0], -1)


def _call(problem: Problem, tile: Tile, inputs: dict[str, Any], interpret: bool) -> Array:
    """Runs a body on named arrays, some of which are None."""
    operands = {name: x for name, x in inputs.items() if x is not None}
    total = problem.pieces * problem.groups
    wide = (total, *problem.inside)
    for name in ("x", "main"):
        if name in operands:
            operands[name] = operands[name].reshape(wide)
    if "payload" in operands:
        operands["payload"] = _words(operands["payload"])
    output = {"reduce_hadamard": "x", "dequantize_add": "new"}.get(problem.op, "sent")
    row = problem.groups * problem.places * (problem.words(problem.new_bits) + 1)
    shape = jax.ShapeDtypeStruct((problem.pieces // problem.places, row), jnp.int32)
    if output in ("x", "new"):
        shape = jax.ShapeDtypeStruct(wide, problem.dtype)
    scratch: dict[str, Any] = {
        name: plgpu.SMEM(size, kind, transforms=_transforms(problem, name, kind))
        for name, (size, kind) in problem.buffers(tile).items()
    }
    scratch["ready"] = plgpu.Barrier(num_arrivals=problem.copies, num_barriers=tile.stages)
    body, names = BODIES[problem.op], (*operands, output)
    options = {"names": names, "problem": problem, "tile": tile, "interpret": interpret}
    kernel = plgpu.kernel(
        functools.partial(body, **options),
        out_type=(shape,),
        scratch_types=scratch,
        grid=(tile.blocks,),
        grid_names=("block",),
        kernel_name=problem.op,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpreter.params() if interpret else None,
    )
    each = reference.flops(problem.op, problem.payloads, problem.noise)
    with Work(problem.op, problem.elements * each).scope(operands.values(), [shape]):
        [result] = kernel(*operands.values())
    like = next(iter(inputs.values()))
    result = result.reshape(-1) if output in ("x", "new") else _payload(result)
    return varying_as(like, result)


def _transforms(problem: Problem, name: str, kind: Any) -> tuple[Any, ...]:
    """Columns of numbers are read and written: rows of a block are swizzled."""
    if not problem.columned or name not in ("x_slots", "out"):
        return ()
    return (plgpu.SwizzleTransform(columns.BLOCK * jnp.dtype(kind).itemsize),)
