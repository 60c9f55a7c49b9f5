"""Weights between the layout that trains and the layout that generates, on the same devices.

HybridFlow (arXiv 2409.19256) section 5 trains with p x t parts of a model and generates with
p_g x t_g, on the same devices and from the same weights. Its 3D-HybridEngine groups ranks so that
the part a device needs for generation contains the part that it trains. Here that grouping is a
choice of mesh factors: an axis of size t is split into a major factor t_g and a minor factor
t / t_g. Training cuts over both, generation over the major one, and the minor factor, which spans
neighbouring ranks, becomes data parallelism. Going to generation is one all-gather over the minor
factors; going back cuts locally, without a collective.

Two modes. 'donate' uses the training arrays up, leaf by leaf: for weights that rest in the dtype
they compute in. 'share' leaves float32 masters where they are and makes the copy that Engine
computes with. Only the vocabulary moves more than the gather where pipe shrinks, because pipe and
tensor cut one dimension of it.

Not here: engines (megajax/serving), who calls this when (megajax/systems/hybridflow).
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.axes import MESH_AXES
from megajax.core.boxes import Box
from megajax.core.mesh import MeshSpec, make_mesh
from megajax.core.tree import Tree, is_words, named_leaves
from megajax.cost import hlo
from megajax.parallel.exchange import is_quantized

CUT = ("pipe", "expert", "tensor")  # the axes that generation may cut, too
MINOR = {axis: f"{axis}_minor" for axis in CUT}
Mode = Literal["donate", "share"]
Report = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Move:
    """One kind of leaf: what is compiled for it.

    source, target: how it lies on the joint mesh. dtype: of the generation's copy. layers: the
    model's layer at each place of the first dimension, for stages that are interleaved.
    """

    source: P
    target: P
    dtype: Any
    layers: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The origin of an array of the generation's layout. ref: a weak reference to the array."""

    ref: weakref.ref
    sharding: NamedSharding
    move: _Move
    mode: Mode


class HybridMesh:
    """Two meshes over the same devices, and the moves of weights from one to the other.

    train, generate: Explicit meshes with the six axes of megajax. What `generate` does not cut of
    pipe, expert and tensor, and train's data and context, is its data axis; node stays node.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        train: Mapping[str, int],
        generate: Mapping[str, int],
    ):
        """Args: devices: in mesh order, tensor innermost. train: {axis: size}; data left out: what
            remains. generate: sizes of pipe, expert and tensor, each a divisor of train's; one
            that is left out is 1.

        Raises: UserError (a ValueError) for other axes, sizes that do not divide, or devices that
            are listed twice.
        """
        if len(set(devices)) < max(len(devices), 1):
            raise ValueError(f"a mesh needs distinct devices, at least one; {devices} given")
        odd = sorted(set(train) - set(MESH_AXES)) + sorted(set(generate) - set(CUT))
        if odd:
            raise ValueError(
                f"axis {odd[0]!r}: train has the axes {', '.join(MESH_AXES)}, "
                f"generate {', '.join(CUT)}; the others of generate follow from train"
            )
        sizes = MeshSpec(**train).sizes(len(devices))
        if math.prod(sizes.values()) != len(devices):
            raise ValueError(
                f"train={dict(train)} needs {math.prod(sizes.values())} devices, not {len(devices)}"
            )
        for axis in CUT:
            size = generate.get(axis, 1)
            if not isinstance(size, int | np.integer) or size < 1 or sizes[axis] % size:
                divisors = [n for n in range(1, sizes[axis] + 1) if sizes[axis] % n == 0]
                near = min(divisors, key=lambda n: abs(n - size))
                raise ValueError(
                    f"generate {axis}={size} must divide train's {axis}={sizes[axis]}; "
                    f"nearest: {near}"
                )
        self.train = make_mesh(devices, sizes)
        major = {axis: generate.get(axis, 1) for axis in CUT}
        factors = {}
        for axis in MESH_AXES:
            factors[axis] = major.get(axis, sizes[axis])
            if axis in MINOR:
                factors[MINOR[axis]] = sizes[axis] // major[axis]
        grid = np.array(devices).reshape(tuple(factors.values()))
        self._joint = Mesh(grid, tuple(factors), axis_types=(AxisType.Auto,) * len(factors))
        freed = ("data", MINOR["pipe"], MINOR["expert"], "context", MINOR["tensor"])
        order = [*factors].index
        axes = [order(a) for a in ("pipe", "node", *freed, "expert", "tensor")]
        generate_sizes = major | {
            "node": factors["node"],
            "data": math.prod(factors[a] for a in freed),
        }
        self.generate = make_mesh(list(grid.transpose(axes).flat), generate_sizes)
        self._origins: dict[int, _Origin] = {}

    # ---- the moves

    def to_generation(
        self,
        params: Tree,
        mode: Mode = "donate",
        axes: Tree | None = None,
        rows: Mapping[str, Sequence[int]] | None = None,
        dtype: str = "bfloat16",
    ) -> Tree:
        """Returns the arrays on `.generate`: cut over pipe, expert and tensor as their shardings on
        `.train` say, and repeated over all other axes.

        Args:
          params: a tree of arrays on `.train`, of any dtype, PRNG keys too.
          mode: 'donate': the training arrays are used up, leaf by leaf, and dtypes stay. 'share':
            they stay; float32 comes in `dtype`, all of it, or with `axes` what Engine casts.
          axes: words of the leaves, as ModelParts.axes.
          rows: TrainStep.rows, for interleaved stages; the result has the model's order.
          dtype: of Engine's computation.
        Raises: ValueError naming a leaf that is not on `.train`, or has been used up; for axes of
            another tree; and for interleaved stages with more than one generation stage.
        """
        moves = self._moves(params, mode, axes, rows, dtype)
        leaves, treedef = jax.tree.flatten(params)
        moved: dict[tuple[int, _Move], jax.Array] = {}  # an array may stand at several places
        for i in self._order(leaves, moves):
            key = id(leaves[i]), moves[i]
            if key not in moved:
                moved[key] = self._to_generation(leaves[i], moves[i], mode)
        moved_leaves = (moved[id(leaf), move] for leaf, move in zip(leaves, moves, strict=True))
        return treedef.unflatten(moved_leaves)

    def to_training(self, params: Tree) -> Tree:
        """Returns what `to_generation` gave, sharded as before; of 'donate', used up.

        Raises: ValueError naming a leaf that `to_generation` did not give, or has been used up.
        """
        origins: dict[int, _Origin] = {}
        for leaf_name, leaf in named_leaves(params):
            origin = self._origins.get(id(leaf))
            if origin is None or origin.ref() is not leaf:
                raise ValueError(f"{leaf_name} is not an array that to_generation gave")
            _check_alive(leaf_name, leaf)
            origins[id(leaf)] = origin
        leaves, treedef = jax.tree.flatten(params)
        each = {id(leaf): leaf for leaf in leaves}
        back = {key: self._to_training(leaf, origins[key]) for key, leaf in each.items()}
        return treedef.unflatten(back[id(leaf)] for leaf in leaves)

    def report(
        self,
        params: Tree,
        mode: Mode = "donate",
        axes: Tree | None = None,
        rows: Mapping[str, Sequence[int]] | None = None,
        dtype: str = "bfloat16",
    ) -> Report:
        """Returns what `to_generation` will do, read from its compiled programs. Nothing runs.

        Args: as of `to_generation`; ShapeDtypeStructs with shardings do.
        Returns:
          bytes: received by a device. formula: the paper's (table 2), leaf by leaf: M / (p_g t_g) -
          M / (p t), of leaves that these axes cut. naive: received where generation's groups are
          consecutive ranks. groups: of all collectives, lists of device ids. nodes: those of the
          groups that cross hosts. peak: of a device's bytes: the arrays of both layouts that are
          alive together, and the programs' temporary memory.
        """
        moves = self._moves(params, mode, axes, rows, dtype)
        leaves = [leaf for _, leaf in named_leaves(params)]
        totals = dict.fromkeys(("bytes", "formula", "naive"), 0)
        groups: set[tuple[int, ...]] = set()
        ids = [d.id for d in self.train.devices.flat]
        alive = sum(_part_bytes(leaf, self.train, _spec(leaf)) for leaf in leaves)
        peak = alive
        for leaf, move in ((leaves[i], moves[i]) for i in self._order(leaves, moves)):
            compiled = self._compiled(leaf, move, mode)
            for collective in hlo.collectives(compiled.as_text(), self._joint.shape):
                totals["bytes"] += _received(collective)
                groups |= {
                    tuple(sorted(ids[i] for i in group))
                    for group in _groups(collective, self._joint.shape)
                }
            totals["formula"] += _formula(leaf, move, self._joint)
            totals["naive"] += self._naive(leaf, move)
            before = _part_bytes(leaf, self.train, _spec(leaf))
            after = _part_bytes(leaf, self._joint, move.target, move.dtype)
            is_alias = _is_alias(leaf, move, self._joint)
            memory = compiled.memory_analysis()
            peak = max(peak, alive + (0 if is_alias else after) + memory.temp_size_in_bytes)
            alive += 0 if is_alias else after - (before if mode == "donate" else 0)
        hosts = {d.id: d.process_index for d in self.train.devices.flat}
        crossing = [list(g) for g in sorted(groups) if len({hosts[i] for i in g}) > 1]
        return totals | {
            "groups": [list(g) for g in sorted(groups)],
            "nodes": crossing,
            "peak": int(peak),
        }

    # ---- one leaf

    def _moves(
        self,
        params: Tree,
        mode: Mode,
        axes: Tree | None,
        rows: Mapping[str, Sequence[int]] | None,
        computes: str,
    ) -> list[_Move]:
        """Returns the move of each leaf, in the tree's order. Raises: ValueError."""
        if mode not in ("donate", "share"):
            raise ValueError(f"mode={mode!r} must be 'donate' or 'share'")
        words = [w for _, w in named_leaves(axes, is_words)] if axes is not None else None
        orders = {
            n.partition(".")[2]: tuple(order)
            for n, order in (rows or {}).items()
            if n.startswith("params.")
        }
        if orders and self.generate.shape["pipe"] > 1:
            raise ValueError(
                f"interleaved stages cannot go to {self.generate.shape['pipe']} generation stages, "
                "whose layers lie in the model's order; generate pipe=1"
            )
        named, moves = named_leaves(params), []
        if words is not None and len(words) != len(named):
            raise ValueError(f"axes name {len(words)} leaves; there are {len(named)}")
        for i, (leaf_name, leaf) in enumerate(named):
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, NamedSharding) or not _same(sharding.mesh, self.train):
                raise ValueError(
                    f"{leaf_name} is not on the training mesh: it lies on {sharding}"
                    if sharding is not None
                    else f"{leaf_name} is not on the training mesh: it is a {type(leaf).__name__}"
                )
            _check_alive(leaf_name, leaf)
            dtype = leaf.dtype
            if mode == "share" and dtype == jnp.float32:
                if words is None or is_quantized(words[i]):
                    dtype = jnp.dtype(computes)
            spec = tuple(_spec(leaf)) + (None,) * (len(leaf.shape) - len(_spec(leaf)))
            source = P(*(self._factored(entry) for entry in spec))
            target = P(*(_only(entry, CUT) for entry in spec))
            moves.append(_Move(source, target, dtype, orders.get(leaf_name)))
        return moves

    def _order(self, leaves: Sequence[Any], moves: Sequence[_Move]) -> list[int]:
        """Returns the leaves' numbers: first those that take temporary memory, then the largest.
        So little else has been gathered by then, and the peak is what generation needs in the end.
        """

        def key(i: int) -> tuple[bool, int]:
            nbytes = _part_bytes(leaves[i], self._joint, moves[i].target, moves[i].dtype)
            is_spare = nbytes <= PIECE or _gathers_in_pieces(self._joint, moves[i], leaves[i])
            return is_spare, -nbytes

        return sorted(range(len(leaves)), key=key)

    def _factored(self, entry: Any) -> tuple[str, ...] | None:
        """Returns the joint mesh's axes for the entry of a training sharding."""
        return (
            tuple(f for a in _axes(entry) for f in ((a, MINOR[a]) if a in MINOR else (a,))) or None
        )

    def _generate_sharding(self, move: _Move) -> NamedSharding:
        """Returns the target on `.generate`; axes of size 1 are left out, as in core.layout."""
        live = [a for a in CUT if self.generate.shape[a] > 1]
        entries = (_only(entry, live) for entry in move.target)
        return NamedSharding(self.generate, P(*(e[0] if e and len(e) == 1 else e for e in entries)))

    def _to_generation(self, leaf: jax.Array, move: _Move, mode: Mode) -> jax.Array:
        sharding: Any = leaf.sharding
        if mode == "share" and _is_alias(leaf, move, self._joint):
            y = _rewrapped(leaf, self._generate_sharding(move))
        else:
            x = _rewrapped(leaf, NamedSharding(self._joint, move.source))
            y = _rewrapped(
                _jitted(self._joint, move, self._donates(leaf, move, mode))(x),
                self._generate_sharding(move),
            )
        if mode == "donate" and not leaf.is_deleted():
            leaf.delete()
        key = id(y)
        ref = weakref.ref(y, lambda _, key=key: self._origins.pop(key, None))
        self._origins[key] = _Origin(ref, sharding, move, mode)
        return y

    def _to_training(self, leaf: jax.Array, origin: _Origin) -> jax.Array:
        x = _rewrapped(leaf, NamedSharding(self._joint, origin.move.target))
        donates = self._donates(leaf, origin.move, origin.mode)
        x = _jitted_back(self._joint, origin.move, donates)(x)
        if origin.mode == "donate" and not leaf.is_deleted():
            leaf.delete()
        return _rewrapped(x, origin.sharding)

    def _donates(self, leaf: Any, move: _Move, mode: Mode) -> bool:
        """Whether the program may reuse the leaf's memory; it can only where nothing changes."""
        return mode == "donate" and _is_alias(leaf, move, self._joint)

    def _compiled(self, leaf: Any, move: _Move, mode: Mode) -> Any:
        abstract = jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(self._joint, move.source)
        )
        program = _jitted(self._joint, move, self._donates(leaf, move, mode))
        return program.lower(abstract).compile()

    def _naive(self, leaf: Any, move: _Move) -> int:
        """Returns the bytes that the busiest device lacks if generation's groups are consecutive
        ranks: with the minor factor of each axis before the major one."""
        shape = tuple(leaf.shape)
        swapped = [
            MINOR[a] if a in CUT else next((k for k, v in MINOR.items() if v == a), a)
            for a in self._joint.axis_names
        ]
        sizes = [self._joint.shape[a] for a in swapped]
        naive = Mesh(self._joint.devices.reshape(sizes), tuple(swapped))
        target = NamedSharding(naive, move.target).devices_indices_map(shape)
        source = NamedSharding(self._joint, move.source).devices_indices_map(shape)
        most = 0
        for device, index in target.items():
            needed = Box.of(index, shape)
            common = needed & Box.of(source[device], shape)
            most = max(most, needed.size - (common.size if common else 0))
        return most * (_part_bytes(leaf, self.train, P(), move.dtype) // max(math.prod(shape), 1))


# ---- programs


@functools.cache
def _jitted(joint: Mesh, move: _Move, donates: bool) -> Any:
    """Returns the program that takes a leaf to generation."""
    target = NamedSharding(joint, move.target)

    def go(x: jax.Array) -> jax.Array:
        if _gathers_in_pieces(joint, move, x):
            return jax.shard_map(
                functools.partial(_gathered, joint, move),
                mesh=joint,
                in_specs=move.source,
                out_specs=move.target,
                check_vma=False,
            )(x)
        x = x if x.dtype == move.dtype else x.astype(move.dtype)
        if move.source != move.target:
            x = _as_sent(joint, x, lambda bits: jax.lax.with_sharding_constraint(bits, target))
        # In the order of the stages; each device then orders what it has.
        return x if move.layers is None else x[np.argsort(move.layers)]

    return jax.jit(go, out_shardings=target, donate_argnums=0 if donates else ())


def _as_sent(joint: Mesh, x: jax.Array, send: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns send(x). On CPUs, floats of 16 bits go as integers: XLA's CPU backend would widen
    them for a collective and send twice the bytes."""
    is_widened = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    if joint.devices.flat[0].platform != "cpu" or not is_widened:
        return send(x)
    # Without the barriers XLA takes the two conversions for none.
    bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(x, jnp.uint16))
    sent = jax.lax.optimization_barrier(send(bits))
    return jax.lax.bitcast_convert_type(sent, x.dtype)


PIECE = 2**26  # (chosen) bytes of a leaf's generation part above which it is gathered in pieces
PIECES = 128  # (chosen: the largest models have as many layers) at most, of one leaf


def _freed(move: _Move) -> list[tuple[str, ...]]:
    """Returns, of each dimension, the axes that generation does not cut."""
    return [
        tuple(a for a in _axes(before) if a not in _axes(after))
        for before, after in zip(move.source, move.target, strict=True)
    ]


def _gathers_in_pieces(joint: Mesh, move: _Move, x: Any) -> bool:
    """Whether a leaf is gathered along its first dimension, piece by piece.

    XLA gathers a dimension that is not the first into memory of its own and copies that to where it
    belongs: as much temporary memory as the result. The freed axes must be the minor ones of their
    dimension: a vocabulary that pipe and tensor cut is left to XLA, and so are PRNG keys.
    """
    if jnp.issubdtype(move.dtype, jax.dtypes.prng_key):
        return False
    freed = _freed(move)
    if not any(live for axes in freed[1:] if (live := _live(joint, axes))):
        return False
    entries = zip(move.source, move.target, freed, strict=True)
    minor = all(_axes(b)[len(_axes(a)) :] == axes for b, a, axes in entries)
    part = math.prod(x.shape) // _ways(joint, move.target)
    return minor and part * jnp.dtype(move.dtype).itemsize > PIECE


def _live(joint: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(a for a in axes if joint.shape[a] > 1)


def _gathered(joint: Mesh, move: _Move, x: jax.Array) -> jax.Array:
    """Returns generation's part of a leaf, inside a shard_map: a loop over the first dimension that
    writes each gathered piece where it belongs."""
    freed = [_live(joint, axes) for axes in _freed(move)]
    stages = math.prod(joint.shape[a] for a in freed[0])
    rows = x.shape[0]
    pieces = rows if move.layers else max(n for n in range(1, PIECES + 1) if rows % n == 0)
    parts = x.reshape(pieces, rows // pieces, *x.shape[1:])
    wide = [
        n * math.prod(joint.shape[a] for a in axes)
        for n, axes in zip(x.shape[1:], freed[1:], strict=True)
    ]
    # Piece i of stage s begins at row s * rows + i * (rows // pieces) of the leaf: among the pieces
    # of all stages it is number s * pieces + i.
    order = np.arange(stages * pieces) if move.layers is None else np.asarray(move.layers)
    places = jnp.asarray(order.reshape(stages, pieces), jnp.int32)

    def together(piece: jax.Array) -> jax.Array:
        for dim, axes in enumerate(freed[1:], 1):
            if axes:  # as a first dimension: along another one XLA turns all the loop's arrays over
                ranks = jnp.moveaxis(jax.lax.all_gather(piece, axes), 0, dim)
                piece = ranks.reshape((*piece.shape[:dim], -1, *piece.shape[dim + 1 :]))
        return piece if stages == 1 else jax.lax.all_gather(piece, freed[0])

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_index_in_dim(parts, i, keepdims=False).astype(move.dtype)
        piece = _as_sent(joint, piece, together)
        if stages == 1:
            return jax.lax.dynamic_update_index_in_dim(out, piece, places[0, i], 0)
        for stage in range(stages):
            out = jax.lax.dynamic_update_index_in_dim(out, piece[stage], places[stage, i], 0)
        return out

    empty = jnp.zeros((stages * pieces, rows // pieces, *wide), move.dtype)
    return jax.lax.fori_loop(0, pieces, step, empty).reshape(stages * rows, *wide)


@functools.cache
def _jitted_back(joint: Mesh, move: _Move, donates: bool) -> Any:
    """Returns the program that takes a leaf back to training."""
    source = NamedSharding(joint, move.source)

    def go(x: jax.Array) -> jax.Array:
        return x if move.layers is None else x[np.asarray(move.layers)]

    return jax.jit(go, out_shardings=source, donate_argnums=0 if donates else ())


def _rewrapped(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns the same buffers under an equivalent sharding of the same devices."""
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    ordered = [parts[d] for d in sharding.addressable_devices_indices_map(x.shape)]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, ordered)


# ---- small questions


def _check_alive(leaf_name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{leaf_name} has been used up, by an earlier move or another program")


def _spec(leaf: Any) -> P:
    return leaf.sharding.spec


def _same(mesh: Any, other: Mesh) -> bool:
    return (
        isinstance(mesh, Mesh)
        and mesh.axis_names == other.axis_names
        and mesh.devices.shape == other.devices.shape
        and (mesh.devices == other.devices).all()
    )


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _only(entry: Any, axes: Sequence[str]) -> tuple[str, ...] | None:
    return tuple(a for a in _axes(entry) if a in axes) or None


def _ways(mesh: Mesh, spec: P) -> int:
    return math.prod(mesh.shape[a] for entry in spec for a in _axes(entry))


def _part_bytes(leaf: Any, mesh: Mesh, spec: P, dtype: Any = None) -> int:
    """Returns the bytes of one device's part of a leaf that lies so."""
    dtype = leaf.dtype if dtype is None else dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, dtype))
        return data.size * data.dtype.itemsize // _ways(mesh, spec)
    return math.prod(leaf.shape) * jnp.dtype(dtype).itemsize // _ways(mesh, spec)


def _formula(leaf: Any, move: _Move, joint: Mesh) -> int:
    """Returns M / (p_g t_g) - M / (p t) of a leaf's bytes M (HybridFlow table 2), for the ways in
    which pipe, expert and tensor cut it."""
    trained = P(*(_only(entry, (*CUT, *MINOR.values())) for entry in move.source))
    return _part_bytes(leaf, joint, move.target, move.dtype) - _part_bytes(
        leaf, joint, trained, move.dtype
    )


def _is_alias(leaf: Any, move: _Move, joint: Mesh) -> bool:
    """Whether the leaf lies on generation's devices as it must, so that nothing is copied."""
    ways = (_ways(joint, move.source), _ways(joint, move.target))
    return ways[0] == ways[1] and leaf.dtype == move.dtype and move.layers is None


def _groups(collective: hlo.Collective, shape: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Returns all groups of devices, by their places in the mesh, that a collective runs in."""
    if collective.kind == "collective-permute":
        joined: list[set[int]] = []
        for pair in collective.groups:
            touched = [g for g in joined if g & set(pair)]
            joined = [g for g in joined if g not in touched] + [set(pair).union(*touched)]
        return [tuple(sorted(g)) for g in joined if len(g) > 1]
    first = collective.groups[0]
    across = [list(shape).index(axis) for axis in collective.axes]
    if len(first) != math.prod(shape[axis] for axis in collective.axes):
        return [first]  # a part of an axis: the compiler factored it further
    places = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    last = range(places.ndim - len(across), places.ndim)
    return [tuple(g) for g in np.moveaxis(places, across, last).reshape(-1, len(first)).tolist()]


def _received(collective: hlo.Collective) -> int:
    """Returns the bytes that a device receives in one execution, by rings."""
    members = len(collective.groups[0])
    if collective.kind == "collective-permute":
        return collective.total
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * collective.total * (members - 1) // members
