"""Refuses programs whose devices would wait for each other in different branches.

If each device chooses the precision of its products (QSync, arXiv 2407.02327), by lax.switch on its
index, devices run different branches of one program. A collective operation in such a branch
compiles without a word, and its devices wait for those that took another branch, or take wrong
numbers from them. `check_collectives` follows through a jaxpr over which mesh axes each value may
differ, from axis_index and from the arrays that a shard_map cuts, and refuses a collective inside
a branch or loop whose predicate differs over an axis that the collective communicates over.

It may refuse what is right, but does not overlook: outputs of unknown primitives differ as their
inputs do, all together; what is read from a mutable array differs over all manual axes; the false
dependencies that order the collectives of emulated devices (parallel/exchange.py) count as real. A
sum or a gather over an axis is the same again for all of its devices, and so is what depends on it
alone.

Where a predicate differs over 'pipe' alone, all devices of a 'tensor' group take the same branch,
and a collective over 'tensor' is legal. This does not hold of ppermute, nor of reshards that move a
cut from one dimension or axis to another: XLA runs a collective permute as one operation of all
devices of the program (observed on CPU devices with jax 0.11.2: the program waits forever, where
all-gather, reduce-scatter, all-reduce and all-to-all over 'tensor' work).

Not seen: collectives that XLA adds over axes of the type Auto, other than where a sharding
constraint stands; derivatives that f does not take.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from megajax.core.errors import UserError

Axes = frozenset[str]
NONE: Axes = frozenset()
# Primitives by name. Those that hold one jaxpr with their inputs and outputs, and run it once:
CALLS = frozenset(
    "jit closed_call core_call remat2 eval_jaxpr custom_jvp_call custom_vjp_call "
    "custom_vmap_call".split()
)
KERNELS = ("pallas_call", "core_map", "mpmd_map")  # of Pallas
# In a kernel, which may then communicate over any axis:
SIGNALS = frozenset(("semaphore_signal", "semaphore_signal_parallel"))
# Give all devices of their groups the same:
UNIFORM = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant pbroadcast unreduced_psum "
    "unreduced_pmax unreduced_pmin".split()
)
ALL_DEVICES = ("ppermute", "ppermute_start", "psend", "precv")
# Return what they get; but for the barrier, casts of what jax says of an axis:
CASTS = frozenset(
    "pvary preduced vary_unreduced_cast_p reduced_vary_cast_p optimization_barrier".split()
)
FROM_OUTSIDE = ("io_callback", "infeed", "rng_uniform")


class Scope(NamedTuple):
    """The place of an operation.

    manual: {axis: size} of the shard_maps around it. regions: (axes over which the predicate
    differs, description) of the branches and loops around it that not all devices run alike.
    """

    manual: Mapping[str, int]
    regions: tuple[tuple[Axes, str], ...] = ()

    def named(self, names: Any) -> Axes:
        """Returns the axes of more than one device among names; numbers are dimensions."""
        names = names if isinstance(names, tuple | list | frozenset) else (names,)
        return frozenset(n for n in names if isinstance(n, str) and self.manual.get(n, 2) > 1)

    def inside(self, eqn: JaxprEqn, part: str, axes: Axes) -> "Scope":
        """Returns the scope of a part that depends on a predicate which differs over axes."""
        region = f"{part} of the {eqn.primitive.name}{_line(eqn)}"
        return self._replace(regions=(*self.regions, (axes, region))) if axes else self

    def check(self, eqn: JaxprEqn, axes: Axes, *, of_all: bool = False) -> None:
        """Raises: UserError where devices that communicate over axes may not all be here.

        of_all: the operation is one of all devices.
        """
        for differs, region in self.regions if axes else ():
            if of_all or axes & differs:
                text = "runs as one operation of all devices" if of_all else "communicates"
                raise UserError(
                    f"{eqn.primitive.name}{_line(eqn)} {text} over {_quoted(axes)} and is in "
                    f"{region}, whose predicate may differ between devices of {_quoted(differs)}: "
                    "those in another branch would not join it. Move the collective out of the "
                    "branch, or make the predicate equal on all of its devices, e.g. by lax.pmax "
                    "over these axes"
                )


def check_collectives(f: Callable[..., Any], *args: Any) -> None:
    """Checks that no device can leave others waiting in a collective of f(*args).

    Args: f: traced, not run, by its method `trace` if it has one, as a TrainStep's functions do;
        with the derivatives that it takes, inside jax.set_mesh if it needs a mesh. args: arrays, or
        their shapes and shardings (jax.ShapeDtypeStruct).
    Raises: UserError that names the collective, its branch or loop, the axes and both source lines.
      Branch 0 of a cond is what runs where the predicate is false.
    """
    traced: Any = f.trace(*args) if hasattr(f, "trace") else jax.make_jaxpr(f)(*args)
    jaxpr = getattr(traced.jaxpr, "jaxpr", traced.jaxpr)
    _outputs(jaxpr, [NONE] * len(jaxpr.invars), Scope({}))


def _outputs(jaxpr: Any, inputs: Iterable[Axes], scope: Scope) -> list[Axes]:
    """Returns the axes over which each output may differ, from those of the inputs.

    Raises: UserError where a collective may lack devices.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    everywhere = scope.named(tuple(scope.manual))
    differs: dict[Var, Axes] = dict.fromkeys(jaxpr.constvars, NONE)

    def bind(variables: list[Var], sets: Iterable[Axes]) -> None:
        for var, axes in zip(variables, sets, strict=True):
            is_mutable = hasattr(var.aval, "inner_aval")  # others may write to it
            differs[var] = everywhere if is_mutable else axes

    def read(variables: list[Var | Literal]) -> list[Axes]:
        return [NONE if isinstance(v, Literal) else differs[v] for v in variables]

    bind(jaxpr.invars, inputs)
    for eqn in jaxpr.eqns:
        bind(eqn.outvars, _apply(eqn, read(eqn.invars), scope))
    return read(jaxpr.outvars)


def _apply(eqn: JaxprEqn, inputs: list[Axes], scope: Scope) -> list[Axes]:
    """Returns the axes over which each output of an operation may differ."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return _cond(eqn, inputs, scope)
    if name == "while":
        return _while(eqn, inputs, scope)
    if name == "scan":
        consts, carry, xs = (list(part) for part in params["ft_in"].update(inputs).unpack())
        while True:
            outputs = _outputs(params["jaxpr"], [*consts, *carry, *xs], scope)
            wider = [a | b for a, b in zip(carry, outputs, strict=False)]
            if wider == carry:
                return outputs if params["length"] else [*carry, *outputs[len(carry) :]]
            carry = wider
    if name == "shard_map":
        return _shard_map(eqn, inputs, scope)
    jaxprs = list(_jaxprs(params.values()))
    if name in CALLS and len(jaxprs) == 1:
        return _outputs(jaxprs[0], inputs, scope)
    together, everywhere = NONE.union(*inputs), scope.named(tuple(scope.manual))
    if name in KERNELS:
        for inner in _equations(jaxprs):
            together |= scope.named(inner.params.get("axis_name", ())) & everywhere
            if inner.primitive.name in SIGNALS:
                scope.check(eqn, everywhere)
                together = everywhere
        return [together] * len(eqn.outvars)
    for jaxpr in jaxprs:
        together |= NONE.union(*_outputs(jaxpr, [together] * len(jaxpr.invars), scope))
    axes = scope.named(params.get("axes", ())) | scope.named(params.get("axis_name", ()))
    if name == "axis_index":
        return [axes]
    if name in CASTS:
        return inputs
    if name in FROM_OUTSIDE:
        return [everywhere] * len(eqn.outvars)
    if not axes:
        if scope.regions:
            communicating, permuted = _resharded(eqn)
            scope.check(eqn, communicating, of_all=permuted)
        return [together] * len(eqn.outvars)
    scope.check(eqn, axes, of_all=name in ALL_DEVICES)
    if name in UNIFORM and params.get("axis_index_groups") is None:
        return [a - axes for a in inputs]
    return [together | axes] * len(eqn.outvars)


def _cond(eqn: JaxprEqn, inputs: list[Axes], scope: Scope) -> list[Axes]:
    predicate, *operands = inputs
    branches = [
        _outputs(branch, operands, scope.inside(eqn, f"branch {number}", predicate))
        for number, branch in enumerate(eqn.params["branches"])
    ]
    return [predicate.union(*outputs) for outputs in zip(*branches, strict=True)]


def _while(eqn: JaxprEqn, inputs: list[Axes], scope: Scope) -> list[Axes]:
    """Devices whose predicate differs run different numbers of passes."""
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    tested, used, carry = (
        inputs[:first],
        inputs[first : first + second],
        inputs[first + second :],
    )
    while True:
        condition = eqn.params["cond_jaxpr"], [*tested, *carry]
        (predicate,) = _outputs(*condition, scope)
        _outputs(*condition, scope.inside(eqn, "the condition", predicate))
        inner = scope.inside(eqn, "the body", predicate)
        outputs = _outputs(eqn.params["body_jaxpr"], [*used, *carry], inner)
        wider = [predicate | a | b for a, b in zip(carry, outputs, strict=True)]
        if wider == carry:
            return carry
        carry = wider


def _shard_map(eqn: JaxprEqn, inputs: list[Axes], scope: Scope) -> list[Axes]:
    """Outside, a value that differs although its specification says that it does not, still does.

    check_vma does not exclude this: it does not see that a branch was chosen, or a loop's length,
    by a predicate that differs (jax 0.11.2).
    """
    params = eqn.params
    sizes = {axis: params["mesh"].shape[axis] for axis in params["newly_manual_axes"]}
    inner = scope._replace(manual={**scope.manual, **sizes})

    def cut(spec: Any) -> Axes:
        return inner.named(_names_of(spec.partitions)) & frozenset(sizes)

    specs = params["in_specs"], params["out_specs"]
    entering = [a | cut(spec) for a, spec in zip(inputs, specs[0], strict=True)]
    outputs = _outputs(params["jaxpr"], entering, inner)
    return [a - cut(spec) for a, spec in zip(outputs, specs[1], strict=True)]


def _resharded(eqn: JaxprEqn) -> tuple[Axes, bool]:
    """Returns the axes that sharded operands communicate over, and whether XLA may permute.

    A sum over a dimension that is cut communicates, and so does a reshard, unless it only cuts
    further.
    """
    if eqn.primitive.name == "sharding_constraint":
        sizes = eqn.params["context_mesh"].shape
        return frozenset(axis for axis, size in sizes.items() if size > 1), True
    before, after = ([_cuts(v.aval) for v in vs] for vs in (eqn.invars, eqn.outvars))
    if eqn.primitive.name != "reshard":
        lost = {axis for cuts in before for axis in _names_of(cuts)}
        return frozenset(lost - {axis for cuts in after for axis in _names_of(cuts)}), False
    left, arriving = set(), set()
    for source, target in zip(before[0], after[0], strict=True):
        pairs = zip(source, target, strict=False)
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        left |= set(source[common:])
        arriving |= set(target[common:])
    return frozenset(left), bool(arriving)


def _cuts(aval: Any) -> list[tuple[str, ...]]:
    """Returns the axes that cut each dimension, and last those of sums that are not yet taken."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return []
    spec, sizes = sharding.spec, sharding.mesh.shape
    partitions = spec.partitions
    entries = [*partitions, *[None] * (aval.ndim - len(partitions)), tuple(spec.unreduced)]
    return [tuple(axis for axis in _names_of([entry]) if sizes[axis] > 1) for entry in entries]


def _names_of(spec: Iterable[Any]) -> tuple[str, ...]:
    """Returns the axes of a PartitionSpec's entries."""
    listed = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return tuple(axis for entry in listed for axis in entry if isinstance(axis, str))


def _jaxprs(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an operation."""
    for value in values:
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _equations(jaxprs: Iterable[Any]) -> Iterator[JaxprEqn]:
    """Yields the operations at any depth."""
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            yield eqn
            yield from _equations(_jaxprs(eqn.params.values()))


def _line(eqn: JaxprEqn) -> str:
    """Returns ' (file:line)' of the innermost call outside of jax, or ''."""
    library = str(Path(jax.__file__).parent)
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(library):
            return f" ({frame.file_name}:{frame.line_num})"
    return ""


def _quoted(axes: Axes) -> str:
    return ", ".join(map(repr, sorted(axes)))
