"""Norm of x + bias + residual on Hopper, forward and backward: the rows move once.

A thread block is one warpgroup; a few share an SM. Each takes every n-th group of rows through a
ring of slots in shared memory. Copies are in bulk, without a tensor map, so a row may start
anywhere:

    wait ready[s] | slot -> registers, statistics, results -> the same slot | slot -> HBM
    wait until the slot before was read out | start the copies of the group `stages` - 1 ahead

Every element of a slot is read and overwritten by one and the same GPU thread, and `commit_smem` is
a barrier before the copies out; Pallas' own barriers are therefore off. Backward, a block keeps its
sums over rows in registers, and XLA adds the blocks' sums: deterministic, no atomics. Sums of wide
rows do not fit there; XLA then makes them of what the kernel read and wrote.

Unpacking (ByteTransformer, arXiv 2210.03052, section 3.2), each row of y goes to its padded row
instead, and the rows that pad become 0.

Legend: T rows, D model width, P = D rounded up to whole loads, C columns in registers at one time,
R rows of a group, A sums over rows, B sequences, S padded length, x any leading dimensions.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.memory import varying_as
from pallas_kernels.norm import reference
from pallas_kernels.norm.reference import Spec
from pallas_kernels.packing import reference as packing
from pallas_kernels.work import Work

Array = jax.Array
GRAIN = 256  # columns: two for each thread
ELEMENTS = 4096  # (chosen) of a group in registers at one time: 32 of a thread
VECTORS = ("bias", "scale", "offset")
MOST_ROWS = 8  # (chosen) of a group
# (measured, deviceless: more spill) sums over rows of wide rows, 80 registers of a thread; columns
# of a row, 128 registers.
MOST_SUMS, MOST_WIDTH = 10240, 16384
INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


@dataclasses.dataclass(frozen=True)
class Tile:
    """rows: of a group, a divisor of T. stages: slots of the ring, at least 2.

    blocks: thread blocks of the whole grid. resident: bias, scale and offset stay in shared memory;
    otherwise every group reads them through the caches.
    """

    rows: int
    stages: int
    blocks: int
    resident: bool = True


@dataclasses.dataclass(frozen=True)
class Problem:
    """What decides whether a tile fits. streams: arrays in the ring, of type dtype.

    vectors: types of those of bias, scale, offset that are read. sums: over rows. zeros: rows are
    written that pad.
    """

    rows: int
    width: int
    dtype: Any
    streams: int
    vectors: tuple[Any, ...]
    sums: int = 0
    zeros: bool = False

    @property
    def padded(self) -> int:
        """P; of wide rows a multiple of the widest load, for they are cut into chunks of it."""
        grain = GRAIN if self.width <= ELEMENTS else 4 * GRAIN
        return -(-self.width // grain) * grain

    def buffers(self, tile: Tile) -> dict[str, tuple[tuple[int, ...], Any]]:
        """The shared memory of a thread block."""
        group = (tile.rows, self.padded)
        shared: dict[str, tuple[tuple[int, ...], Any]] = {}
        shared |= {f"slots {i}": ((tile.stages, *group), self.dtype) for i in range(self.streams)}
        if tile.resident:
            shared |= {f"vector {i}": (group[1:], kind) for i, kind in enumerate(self.vectors)}
        if self.zeros:
            shared["zeros"] = (group, self.dtype)
        return shared | {"across warps": ((tile.rows, tiles.WARPGROUP), jnp.float32)}


def heuristic(problem: Problem) -> Tile:
    """The tile where nothing was measured.

    Groups of a few thousand elements, as many blocks an SM as registers allow, then as many stages
    as shared memory does, at least one group on its way. The last resort may not fit.
    """
    most = max(1, min(MOST_ROWS, ELEMENTS // problem.padded))
    rows = math.gcd(problem.rows, 1 << most.bit_length() - 1)
    small = not problem.sums and problem.padded <= ELEMENTS
    shares = ((4, 3), (3, 3)) if small else ()
    tile = Tile(rows, 2, SMS)
    for resident in (True, False):
        for blocks, stages in (*shares, (2, 4), (2, 3), (1, 4), (1, 3), (1, 2)):
            tile = Tile(rows, stages, min(SMS * blocks, problem.rows // rows), resident)
            if _fits(problem, tile, blocks):
                return tile
    return tile


def fit(problem: Problem, tile: Tile | None) -> Tile:
    """Returns a tile that was measured for a like problem as it suits this one, or the heuristic's.

    None: none was measured.
    """
    if tile is not None:
        most = max(1, 2 * ELEMENTS // problem.padded)
        rows = math.gcd(problem.rows, tile.rows, 1 << most.bit_length() - 1)
        blocks = min(tile.blocks, problem.rows // rows)
        tile = dataclasses.replace(tile, rows=rows, blocks=blocks)
        if _fits(problem, tile):
            return tile
    return heuristic(problem)


def misfits(problem: Problem, tile: Tile) -> list[str]:
    """Returns why the kernel cannot take it, empty when it can."""
    reasons = []
    D, align = problem.width, 16 // jnp.dtype(problem.dtype).itemsize
    if D % align:
        reasons.append(f"needs a width that is a multiple of {align} (16 bytes), found {D}")
    if not problem.rows:
        reasons.append("there are no rows")
    if D > MOST_WIDTH:
        reasons.append(f"needs a width of {MOST_WIDTH} at most, for registers, found {D}")
    elif not _fits(problem, tile):
        needed, most = tiles.shared_bytes(problem.buffers(tile)), tiles.SHARED_BYTES
        reasons.append(f"rows of {D} need {needed} bytes of shared memory, there are {most}")
    return reasons


def _fits(problem: Problem, tile: Tile, blocks: int = 1) -> bool:
    """Whether so many thread blocks fit in the shared memory of an SM."""
    room = tiles.SHARED_BYTES // blocks - tiles.RESERVED_BYTES
    return tiles.shared_bytes(problem.buffers(tile)) <= room


def forward(
    x_xD: Array,
    residual_xD: Array | None,
    bias_D: Array | None,
    scale_D: Array,
    offset_D: Array | None,
    cu_seqlens: Array | None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Returns what reference.forward does."""
    lead, D = x_xD.shape[:-1], x_xD.shape[-1]
    T = math.prod(lead)
    problem = forward_problem(x_xD, residual_xD, bias_D, scale_D, offset_D, spec)
    P = problem.padded
    inputs = {
        "x": x_xD.reshape(T, D),
        "residual": None if residual_xD is None else residual_xD.reshape(T, D),
        "bias": _pad(bias_D, P),
        "scale": _pad(scale_D, P),
        "offset": _pad(offset_D, P),
    }
    rows = jax.ShapeDtypeStruct((T, D), x_xD.dtype)
    outputs = {"y": rows, "rate": _floats(T)} | ({"mean": _floats(T)} if spec.centred else {})
    y_shape = x_xD.shape
    if cu_seqlens is not None and spec.length is not None:
        y_shape = (cu_seqlens.shape[0] - 1, spec.length, D)
        ids_T = packing.segment_ids(cu_seqlens, T)
        target_T = ids_T * spec.length + packing.positions(cu_seqlens, T)
        inputs |= {"target": jnp.where(ids_T < 0, -1, target_T), "ends": cu_seqlens}
        outputs["y"] = jax.ShapeDtypeStruct((y_shape[0] * y_shape[1], D), x_xD.dtype)
    if spec.writes:
        outputs["h"] = rows
    results = _call(
        _norm_forward, inputs, outputs, problem, tile, ("x", "residual"), spec, interpret
    )
    y = results["y"].reshape(y_shape)
    h_xD = results["h"].reshape(x_xD.shape) if "h" in results else x_xD
    rate_x1 = results["rate"].reshape(*lead, 1)
    mean_x1 = results["mean"].reshape(*lead, 1) if spec.centred else jnp.zeros_like(rate_x1)
    return varying_as(x_xD, (y, h_xD, mean_x1, rate_x1))


def backward(
    h_xD: Array,
    mean_x1: Array,
    rate_x1: Array,
    scale_D: Array,
    dy_xD: Array,
    dh_xD: Array | None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array, Array | None]:
    """Returns what reference.backward does."""
    D = h_xD.shape[-1]
    problem = backward_problem(h_xD, scale_D, dh_xD, spec)
    T = problem.rows
    inputs = {
        "h": h_xD.reshape(T, D),
        "dy": dy_xD.reshape(T, D),
        "dh": None if dh_xD is None else dh_xD.reshape(T, D),
        "scale": _pad(scale_D, problem.padded),
        "mean": mean_x1.reshape(T) if spec.centred else None,
        "rate": rate_x1.reshape(T),
    }
    outputs = {"dx": jax.ShapeDtypeStruct((T, D), h_xD.dtype)}
    if problem.sums:
        shape = (tile.blocks, problem.sums, problem.padded)
        outputs["sums"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    results = _call(
        _norm_backward, inputs, outputs, problem, tile, ("h", "dy", "dh"), spec, interpret
    )
    dx_xD = results["dx"].reshape(h_xD.shape)
    if problem.sums:
        sums = iter(results["sums"].sum(0)[:, :D])
        more = (
            next(sums),
            *(next(sums) if present else None for present in (spec.offset, spec.bias)),
        )
    else:
        more = reference.sums(h_xD, mean_x1, rate_x1, dy_xD, dx_xD, spec)
    dscale_D, doffset_D, dbias_D = more
    return varying_as(h_xD, (dx_xD, dbias_D, dscale_D, doffset_D))


def forward_problem(x_xD, residual_xD, bias_D, scale_D, offset_D, spec: Spec) -> Problem:
    """Returns what `forward` solves; only shapes and types are read."""
    streams = 2 if residual_xD is not None or spec.writes else 1
    vectors = tuple(v.dtype for v in (bias_D, scale_D, offset_D) if v is not None)
    zeros = spec.length is not None
    return Problem(_rows(x_xD), x_xD.shape[-1], x_xD.dtype, streams, vectors, zeros=zeros)


def backward_problem(h_xD, scale_D, dh_xD, spec: Spec) -> Problem:
    """Returns what `backward` solves; only shapes and types are read."""
    sums = 1 + spec.offset + spec.bias
    problem = Problem(
        _rows(h_xD), h_xD.shape[-1], h_xD.dtype, 2 if dh_xD is None else 3, (scale_D.dtype,), sums
    )
    fits = problem.padded <= ELEMENTS or problem.padded * sums <= MOST_SUMS
    return problem if fits else dataclasses.replace(problem, sums=0)


def _rows(x_xD) -> int:
    return math.prod(x_xD.shape[:-1])


def _floats(T: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((T,), jnp.float32)


def _pad(vector_D: Array | None, P: int) -> Array | None:
    return None if vector_D is None else jnp.pad(vector_D, (0, P - vector_D.shape[0]))


def _call(body, inputs, outputs, problem, tile, streams, spec, interpret) -> dict[str, Array]:
    """Runs a body on named arrays, some of which are None; returns what it makes, by name.

    streams: names of what the ring's slots hold, first of all what is loaded into them.
    """
    operands = {name: x for name, x in inputs.items() if x is not None}
    R, P, slots = tile.rows, problem.padded, streams[: problem.streams]
    vectors = [name for name in VECTORS if tile.resident and name in operands]
    copies = sum(name in operands for name in slots) * (1 if P == problem.width else R)
    scratch: dict[str, Any] = {}
    scratch |= {f"{n}_slots": plgpu.SMEM((tile.stages, R, P), problem.dtype) for n in slots}
    scratch |= {f"{n}_vector": plgpu.SMEM((P,), operands[n].dtype) for n in vectors}
    scratch["ready"] = plgpu.Barrier(num_arrivals=copies, num_barriers=tile.stages)
    if vectors:
        scratch["once"] = plgpu.Barrier(num_arrivals=len(vectors))
    if problem.zeros:
        scratch["zeros"] = plgpu.SMEM((R, P), problem.dtype)
    names, name = (*operands, *outputs), body.__name__.strip("_")
    kernel = plgpu.kernel(
        functools.partial(body, names=names, problem=problem, tile=tile, spec=spec),
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(tile.blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=4 * tiles.WARPGROUP * R,
        ),
        interpret=interpreter.params() if interpret else None,
    )
    added = any(inputs.get(more) is not None for more in ("residual", "dh"))
    each = reference.flops(spec.centred, name == "norm_backward", added, spec.bias)
    with Work(name, problem.rows * problem.width * each).scope(operands.values(), outputs.values()):
        results = kernel(*operands.values())
    return dict(zip(outputs, results, strict=True))


def _layout(columns: int) -> Any:
    """Returns the layout of rows over a warpgroup: up to 8 neighbours for a thread and a load."""
    near = next(n for n in (8, 4, 2) if columns % (n * tiles.WARPGROUP) == 0)
    tiling = plgpu.Tiling(((1, near * tiles.WARPGROUP), (32 * near,), (near,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _chunks(problem: Problem, tile: Tile, most: int = ELEMENTS) -> tuple[list[Any], int]:
    """Returns (the columns of each chunk, how many they are); the widest loads, then the fewest.

    most: elements of a chunk of all rows.
    """
    P = problem.padded
    sizes = range(GRAIN, max(most // tile.rows, GRAIN) + 1, GRAIN)
    size = max((c for c in sizes if P % c == 0), key=lambda c: (math.gcd(c, 4 * GRAIN), c))
    return [pl.ds(start, size) for start in range(0, P, size)], size


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _by_row(x_R, columns: int):
    return lax.broadcast_in_dim(x_R, (x_R.shape[0], columns), [0])


def _index(shape: tuple[int, int], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_layout(shape[1]))


def _inside(x_RC, columns, problem: Problem):
    """Returns x with 0 in the columns in which the slot is wider than a row."""
    if columns.start + x_RC.shape[1] <= problem.width:
        return x_RC
    return jnp.where(_index(x_RC.shape, 1) < problem.width - columns.start, x_RC, 0.0)


def _copy_out(slot_RP, target_TD, start, width: int):
    """Starts copies of a slot to rows from `start` on."""
    R, P = slot_RP.shape
    if P == width:
        target = target_TD.at[pl.ds(start, R)]
        plgpu.copy_smem_to_gmem(slot_RP, target, commit_group=False)
        return
    for r in range(R):
        row = slot_RP.at[r, pl.ds(0, width)]
        plgpu.copy_smem_to_gmem(row, target_TD.at[start + r], commit_group=False)


class _Ring:
    """The groups of rows of this thread block, and the copies that load them."""

    def __init__(self, at, smem, ready, once, loaded, problem: Problem, tile: Tile):
        """Starts the copies of what stays and of the first groups, and waits for what stays."""
        self.problem, self.tile, self.ready = problem, tile, ready
        self.block = lax.axis_index("block")
        self.steps = lax.div(problem.rows // tile.rows - 1 - self.block, tile.blocks) + 1
        self.pairs = [(at[name], smem[f"{name}_slots"]) for name in loaded if name in at]
        self.vectors = {name: at[name] for name in VECTORS if name in at}
        for name in VECTORS:
            if f"{name}_vector" in smem:
                self.vectors[name] = smem[f"{name}_vector"]
                plgpu.copy_gmem_to_smem(at[name], self.vectors[name], once, oob_mode=INSIDE)
        for i in range(tile.stages - 1):
            pl.when(i < self.steps)(functools.partial(self.fetch, jnp.int32(i)))
        if once is not None:
            plgpu.barrier_wait(once)

    def start(self, i):
        """The first row of the i-th group."""
        return pl.multiple_of((self.block + i * self.tile.blocks) * self.tile.rows, self.tile.rows)

    def slot(self, i):
        """Returns the slot of the ring in which the i-th group is."""
        return lax.rem(i, jnp.int32(self.tile.stages))

    def fetch(self, i):
        """Starts the copies of the i-th group."""
        R, D, start, slot = self.tile.rows, self.problem.width, self.start(i), self.slot(i)
        for source, slots in self.pairs:
            parts = [(source.at[pl.ds(start, R)], slots.at[slot])]
            if self.problem.padded != D:
                parts = [(source.at[start + r], slots.at[slot, r, pl.ds(0, D)]) for r in range(R)]
            for part, target in parts:
                plgpu.copy_gmem_to_smem(part, target, self.ready.at[slot], oob_mode=INSIDE)

    def refill(self, i):
        """Brings the last group that the ring holds, once the copies out of group i have begun."""
        plgpu.commit_smem_to_gmem_group()
        ahead = i + self.tile.stages - 1

        @pl.when(ahead < self.steps)
        def _():
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # all but this group's are read out
            self.fetch(ahead)

    def vector(self, name: str, columns, size: int):
        """Returns bias, scale or offset for a chunk of columns, the same in each row."""
        ref = self.vectors[name].at[columns]
        x_C = _load(ref, _layout(size).reduce(0))
        return lax.broadcast_in_dim(x_C, (self.tile.rows, x_C.shape[0]), [1])


def _norm_forward(*refs, names, problem, tile, spec, ready, once=None, zeros=None, **smem):
    at = dict(zip(names, refs, strict=True))
    R, D = tile.rows, problem.width
    chunks, size = _chunks(problem, tile)
    ring = _Ring(at, smem, ready, once, ("x", "residual"), problem, tile)
    if zeros is not None:
        _clear(at["y"], at["ends"], zeros, ring.block, problem, tile, spec.length)

    def mean_of(parts):
        return functools.reduce(jnp.add, parts).sum(1) * (1 / D)

    @pl.loop(0, ring.steps)
    def _(i):
        slot, start = ring.slot(i), ring.start(i)
        plgpu.barrier_wait(ready.at[slot])
        parts = []
        for columns in chunks:
            h_RC = _load(smem["x_slots"].at[slot, :, columns], _layout(size))
            if "bias" in at:
                h_RC += ring.vector("bias", columns, size)
            if "residual" in at:
                h_RC += _load(smem["residual_slots"].at[slot, :, columns], _layout(size))
            if "ends" in at:
                live_RC = _index((R, size), 0) < at["ends"][at["ends"].shape[0] - 1] - start
                h_RC = jnp.where(live_RC, h_RC, 0.0)
            h_RC = _inside(h_RC, columns, problem)
            if "h" in at:
                smem["residual_slots"][slot, :, columns] = h_RC.astype(problem.dtype)
            parts.append(h_RC)
        if spec.centred:
            mean_R = mean_of(parts)
            at["mean"][pl.ds(start, R)] = mean_R
            parts = [
                _inside(h_RC - _by_row(mean_R, size), columns, problem)
                for h_RC, columns in zip(parts, chunks, strict=True)
            ]
        rate_R = lax.rsqrt(mean_of([c_RC * c_RC for c_RC in parts]) + spec.eps)
        at["rate"][pl.ds(start, R)] = rate_R
        for c_RC, columns in zip(parts, chunks, strict=True):
            y_RC = c_RC * _by_row(rate_R, size) * ring.vector("scale", columns, size)
            if spec.offset:
                y_RC += ring.vector("offset", columns, size)
            smem["x_slots"][slot, :, columns] = y_RC.astype(problem.dtype)
        plgpu.commit_smem()
        if "h" in at:
            _copy_out(smem["residual_slots"].at[slot], at["h"], start, D)
        if "target" in at:
            _scatter(smem["x_slots"].at[slot], at["y"], at["target"], start, D)
        else:
            _copy_out(smem["x_slots"].at[slot], at["y"], start, D)
        ring.refill(i)

    plgpu.wait_smem_to_gmem(0)


def _scatter(slot_RP, y_ND, target_T, start, width: int):
    """Starts copies of a slot's rows to where `target` says, unless it is below 0."""
    for r in range(slot_RP.shape[0]):
        target = target_T[start + r]

        @pl.when(target >= 0)
        def _(r=r, target=target):
            row = slot_RP.at[r, pl.ds(0, width)]
            plgpu.copy_smem_to_gmem(row, y_ND.at[target], commit_group=False)


def _clear(y_ND, ends, zeros_RP, block, problem: Problem, tile: Tile, length: int):
    """Starts copies of 0 to the padding rows, which the thread blocks share."""
    R, D = tile.rows, problem.width
    chunks, size = _chunks(problem, tile)
    for columns in chunks:
        zeros = plgpu.layout_cast(jnp.zeros((R, size), jnp.float32), _layout(size))
        zeros_RP[:, columns] = zeros.astype(problem.dtype)
    plgpu.commit_smem()
    pieces = -(-length // R)  # of a sequence
    units = (ends.shape[0] - 1) * pieces

    @pl.loop(0, lax.div(units + tile.blocks - 1 - block, tile.blocks))
    def _(n):
        unit = block + n * tile.blocks
        sequence, piece = lax.div(unit, pieces), lax.rem(unit, pieces)
        first = piece * R
        tokens = ends[sequence + 1] - ends[sequence]
        start = sequence * length + first
        all_padding = (first >= tokens) & (first + R <= length) & (problem.padded == D)

        @pl.when(all_padding)
        def _():
            _copy_out(zeros_RP, y_ND, start, D)

        for r in range(R):
            pads = (first + r >= tokens) & (first + r < length)

            @pl.when(pads & jnp.logical_not(all_padding))
            def _(r=r):
                row = zeros_RP.at[r, pl.ds(0, D)]
                plgpu.copy_smem_to_gmem(row, y_ND.at[start + r], commit_group=False)


def _norm_backward(*refs, names, problem, tile, spec, ready, once=None, **smem):
    at = dict(zip(names, refs, strict=True))
    R, D = tile.rows, problem.width
    fits = problem.padded * R <= ELEMENTS  # in registers; else shared memory is read twice
    chunks, size = _chunks(problem, tile, ELEMENTS if fits else ELEMENTS // 4)
    ring = _Ring(at, smem, ready, once, ("h", "dy", "dh"), problem, tile)

    def statistics(i):
        rows, layout = pl.ds(ring.start(i), R), _layout(size).reduce(1)
        return [_load(at[name].at[rows], layout) for name in ("mean", "rate") if name in at]

    def terms(slot, mean_R, rate_R, columns):
        unit_RC, dy_RC = (
            _load(smem[f"{name}_slots"].at[slot, :, columns], _layout(size)) for name in ("h", "dy")
        )
        if spec.centred:
            unit_RC -= _by_row(mean_R, size)
        unit_RC *= _by_row(rate_R, size)
        unit_RC, dy_RC = (_inside(x_RC, columns, problem) for x_RC in (unit_RC, dy_RC))
        return unit_RC, dy_RC, dy_RC * ring.vector("scale", columns, size)

    def step(i, carry):
        (*mean_R, rate_R), sums = carry
        ahead = statistics(jnp.minimum(i + 1, ring.steps - 1))  # on their way for a whole step
        slot, start = ring.slot(i), ring.start(i)
        plgpu.barrier_wait(ready.at[slot])
        again = functools.partial(terms, slot, mean_R[0] if mean_R else None, rate_R)
        first = again(chunks[0])
        g, gn = first[2], first[2] * first[0]
        for columns in chunks[1:]:
            unit_RC, _, g_RC = again(columns)
            g, gn = g + g_RC, gn + g_RC * unit_RC
        mean_g_R = g.sum(1) * (1 / D) if spec.centred else None
        mean_gn_R = gn.sum(1) * (1 / D)
        new = []
        for n, columns in enumerate(chunks):
            unit_RC, dy_RC, g_RC = first if fits else again(columns)
            dx_RC = g_RC - unit_RC * _by_row(mean_gn_R, size)
            if spec.centred:
                dx_RC -= _by_row(mean_g_R, size)
            dx_RC *= _by_row(rate_R, size)
            if "dh" in at:
                dx_RC += _load(smem["dh_slots"].at[slot, :, columns], _layout(size))
            smem["dy_slots"][slot, :, columns] = dx_RC.astype(problem.dtype)
            more = [dy_RC * unit_RC, *[dy_RC] * spec.offset, *[dx_RC] * spec.bias]
            more = more[: problem.sums]
            sides = zip(sums[n], more, strict=True)
            # The compiler cannot lay out a sum over one row, so that keeps its row.
            new.append([cast(x + (x_RC if R == 1 else x_RC.sum(0))) for x, x_RC in sides])
        plgpu.commit_smem()
        _copy_out(smem["dy_slots"].at[slot], at["dx"], start, D)
        ring.refill(i)
        return ahead, new

    shape, layout = ((1, size), _layout(size)) if R == 1 else ((size,), _layout(size).reduce(0))
    cast = functools.partial(plgpu.layout_cast, new_layout=layout)
    zeros = [[cast(jnp.zeros(shape, jnp.float32))] * problem.sums for _ in chunks]
    _, sums = lax.fori_loop(0, ring.steps, step, (statistics(jnp.int32(0)), zeros))
    for columns, parts in zip(chunks, sums, strict=True):
        for n, x in enumerate(parts):
            at["sums"][ring.block, pl.ds(n, 1) if R == 1 else n, columns] = x
    plgpu.wait_smem_to_gmem(0)
