"""In how many bits the products of a run's layers are computed, and on which devices.

Without a flag all products are of --train.dtype. --train.precision gives the products of all layers
one of the five precisions of quant/products.py. --precisions=FILE gives each kind of device its
own, product by product: QSync (arXiv 2407.02327), where weak devices compute some products in few
bits so that no strong device waits for them. Every process compiles the common step with the row of
its kind; the collectives are the same, so all devices exchange the same gradients and hold the same
parameters. With several kinds (--kind=A,B), equal parts of the processes have one each. In one
process that plays several kinds, a device branches at each product.

A product of a layer is named like its parameter, with the layer's number after the stack's name:
blocks.3.attention.query. Norms, attention, routers, experts, tables, head and losses stay in
--train.dtype, and so do evaluations and samples, which measure the parameters.

The layers run in runs of equal precisions; the parameters stay one stack. Runs begin at the same
layers for all kinds of the file, so that all programs have the same loops.
"""

import collections
import functools
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.core import mesh as mesh_
from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError, did_you_mean, nearest_divisors
from megajax.core.hardware import find_card
from megajax.core.layout import Layout, Words
from megajax.core.tree import is_words, named_leaves
from megajax.layers import ops
from megajax.layers.ops import LowPrecision
from megajax.models.parts import ModelParts, is_layered, is_stacked
from megajax.quant.precisions import RANK, Precisions
from megajax.training import shares

PLACE = "megajax_kinds"  # of the job's store: what each process says of itself


def products_of(
    cfg: Any, parts: ModelParts, layout: Layout
) -> tuple[Callable, dict[int, Callable]]:
    """Returns the local products of a run: (those of all layers, {the first layer of a run of
    layers: its products, in their place}).

    Args: cfg: a JobConfig. parts: of its model. layout: of its mesh.
    Raises: UserError for a model without layers, and a file of another model.
    """
    train = cfg.train
    if train.precision == "none" and cfg.precisions is None:
        return ops.matmul, {}
    if not parts.layers:
        flag = "--train.precision" if cfg.precisions is None else "--precisions"
        raise UserError(f"{flag}: this model computes its loss by itself and has no layers to name")
    if cfg.precisions is not None and parts.kinds:
        raise UserError(
            f"--precisions={cfg.precisions}: the layers of this model are of several kinds "
            "(model.pattern), and then all layers have one precision; use --train.precision"
        )
    if cfg.precisions is None:
        names = (n for n, words in named_leaves(parts.axes, is_words) if is_product(words))
        return LowPrecision(dict.fromkeys(names, train.precision)), {}
    names = [
        n
        for n, words in named_leaves(parts.axes, is_words)
        if is_layered(words) and is_product(words)
    ]
    file, kinds = load(cfg)
    check_names(file, names, parts, cfg.precisions)
    check_parts(cfg.kind, kinds, layout.ways(BATCH_AXES), "data-parallel ranks")
    rates = rates_of(cfg, file, kinds)

    def row(kind: str, layer: int) -> tuple[str, ...]:
        """The precisions of a layer, none of them wider than what the operands come in."""
        nodes = (file[kind][node_name(name, layer)] for name in names)
        return tuple(min(node, train.dtype, key=RANK.__getitem__) for node in nodes)

    rows = [tuple(row(kind, i) for kind in file) for i in range(parts.layers)]
    numbers = [list(file).index(kind) for kind in kinds]
    runs: dict[int, Callable] = {}
    for i in range(parts.layers):
        if i and rows[i] == rows[i - 1]:
            continue
        of_kinds = [rows[i][number] for number in numbers]
        chosen = of_kinds[0] if len(kinds) == 1 else list(zip(*of_kinds, strict=True))
        table = dict(zip(names, chosen, strict=True))
        number = functools.partial(_number, layout, len(kinds))
        runs[i] = Paced(table, number, rates) if rates else LowPrecision(table, number)
    return ops.matmul, runs


def explain(cfg: Any, parts: ModelParts) -> str:
    """Returns a line on which products have few bits, and what stays as it is; '' without."""
    asked, dtype = cfg.train.precision, cfg.train.dtype
    if asked == "none" and cfg.precisions is None:
        return ""
    words = [words for _, words in named_leaves(parts.axes, is_words)]
    line = f"{asked} operands in the layers' products"
    if cfg.precisions is not None:
        file = Precisions.load(cfg.precisions)
        rows = (f"{kind}: {shown(row)}" for kind, row in file.items())
        line = f"{'; '.join(rows)} ({cfg.precisions})"
    if any("expert" in axes for axes in words):
        line += f"; experts stay in {dtype}"
    if cfg.overlap in ("ring", "fused"):
        line += f"; --overlap={cfg.overlap} multiplies plain operands, so they overlap as xla"
    return f"{line}; all else in {dtype}"


def shown(row: Mapping[str, str]) -> str:
    """Returns how many products of a row have which precision."""
    counts = collections.Counter(row.values())
    return ", ".join(f"{counts[one]} {one}" for one in sorted(counts, key=RANK.__getitem__))


def is_product(words: Words) -> bool:
    """Tells a matrix of a stack of layers that is multiplied by tokens: no bias, norm, router or
    expert."""
    is_other = "expert" in words or "router" in words
    return is_stacked(words) and len(words) > 2 and "embed" in words and not is_other


def node_name(name: str, layer: int) -> str:
    """Returns the name of a product: that of its parameter with the layer after the stack."""
    stack, _, member = name.partition(".")
    return f"{stack}.{layer}.{member}"


def _number(layout: Layout, kinds: int) -> jax.Array:
    """Returns the number of this device's kind, inside a shard_map: equal parts of the ranks of
    data parallelism, in their order, are the kinds of a process that plays several."""
    ranks = layout.ways(BATCH_AXES)
    return lax.axis_index(BATCH_AXES) * kinds // ranks if ranks > 1 else jnp.int32(0)


# ---- a device that is played by waiting


@dataclass(frozen=True)
class Paced(LowPrecision):
    """Products that take as long as on a device of other rates, for emulated jobs: after each one
    the process waits for the time that the device would compute, and once more, for two products,
    in the backward pass. What this machine takes itself comes on top.

    rates: FLOP/s by precision.
    """

    rates: Mapping[str, float] = MappingProxyType({})
    busy: Any = field(default_factory=threading.Lock)  # a device computes one product at a time

    def __call__(self, x: jax.Array, w: Any, *more: Any, name: str | None = None, **named: Any):
        """Returns what LowPrecision does, later."""
        y = super().__call__(x, w, *more, name=name, **named)
        if name not in self.precisions:
            return y
        inputs = x.size * w.size // max(y.size, 1)  # K^2, of (M K)(K N) / (M N)
        seconds = 2 * y.size * math.isqrt(inputs) / self.rates[self.precisions[name]]
        return waited(y, self.busy, seconds, 2 * seconds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def waited(x: jax.Array, busy: Any, forward_s: float, backward_s: float) -> jax.Array:
    """Returns x, so many seconds later; its gradient too, after so many others."""
    return _after(x, busy, forward_s)


waited.defvjp(
    lambda x, busy, forward_s, backward_s: (_after(x, busy, forward_s), None),
    lambda busy, forward_s, backward_s, _, dy: (_after(dy, busy, backward_s),),
)


def _after(x: jax.Array, busy: Any, seconds: float) -> jax.Array:
    def wait(_: Any) -> Any:
        with busy:
            time.sleep(seconds)
        return np.zeros((), np.int32)

    done = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.int32), x.reshape(-1)[0])
    return jnp.where(done == 0, x, jnp.nan)  # so that nothing that reads x comes earlier


def parsed_rates(text: str, flag: str) -> dict[str, float]:
    """Returns {precision: FLOP/s} of float32:20,int8:80, in GFLOP/s. flag: whose value it is.

    Raises: UserError for what is no precision with a rate.
    """
    rates: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        try:
            rates[name.strip()] = 1e9 * float(number)
        except ValueError:
            rates[name.strip()] = 0.0
        if name.strip() not in RANK or not 0 < rates[name.strip()] < math.inf:
            raise UserError(
                f"{flag}={text}: {part!r} must be a precision ({', '.join(RANK)}) and a rate in "
                f"GFLOP/s, e.g. float32:20,int8:80 (--{flag})"
            )
    return rates


def rates_of(cfg: Any, file: Precisions, kinds: Sequence[str]) -> dict[str, float]:
    """Returns the FLOP/s of --play by precision; {} without. Raises: UserError for rates that are
    none, or are missing for a precision that is used."""
    if cfg.play is None:
        return {}
    rates = parsed_rates(cfg.play, "play")
    used = {min(p, cfg.train.dtype, key=RANK.__getitem__) for k in kinds for p in file[k].values()}
    if lacking := sorted(used - rates.keys()):
        raise UserError(
            f"play={cfg.play}: no rate of {lacking[0]}, in which kind {kinds[0]} computes; add "
            f"{lacking[0]}:20 (--play)"
        )
    if len(kinds) > 1:
        raise UserError(f"play={cfg.play}: a process with the kinds {cfg.kind} plays none (--play)")
    return rates


# ---- the file, and the kinds of a job


def load(cfg: Any) -> tuple[Precisions, tuple[str, ...]]:
    """Returns (the file of --precisions, the kinds that this process's devices are).

    Raises: UserError for a damaged file, and as kinds_of.
    """
    file = Precisions.load(cfg.precisions)
    return file, kinds_of(cfg, file, cfg.precisions)


def kinds_of(cfg: Any, known: Collection[str], where: str) -> tuple[str, ...]:
    """Returns the kinds that this process's devices are. known: those that `where` has.

    Of several kinds (--kind=A,B), equal parts of a job's processes, in their order, have one each;
    a process that is alone has all of them.
    Raises: UserError for a kind that is not known, and kinds that do not divide the processes.
    """
    if cfg.kind is None:
        card = find_card(jax.local_devices()[0].device_kind)
        named = [kind for kind in known if card and kind.lower() == card.name.lower()]
        if not named:
            raise UserError(
                f"{where} has no kind for this {jax.local_devices()[0].device_kind}, it has "
                f"{', '.join(known)}; name one of them (--kind={next(iter(known))})"
            )
        return (named[0],)
    kinds = tuple(cfg.kind.split(","))
    for kind in kinds:
        if kind not in known:
            raise UserError(
                f"kind={cfg.kind}: {where} has no kind {kind!r}, it has {', '.join(known)}."
                f"{did_you_mean(kind, known)} (--kind)"
            )
    if (processes := jax.process_count()) > 1:
        check_parts(cfg.kind, kinds, processes, "processes of the job")
        kinds = (kinds[jax.process_index() * len(kinds) // processes],)
    return kinds


def check_parts(kind: str, kinds: Sequence[str], count: int, of: str) -> None:
    """Raises: UserError where so many processes or ranks are not equal parts of these kinds."""
    if count % len(kinds):
        raise UserError(
            f"kind={kind}: {len(kinds)} kinds must divide the {count} {of} into equal parts; "
            f"number of kinds: {nearest_divisors(count, len(kinds))}; a kind may be named several "
            "times (--kind)"
        )


def check_names(file: Precisions, names: Sequence[str], parts: ModelParts, path: str) -> None:
    """Raises: UserError where the products of a file are not those of the model."""
    expected = {node_name(name, i) for name in names for i in range(parts.layers)}
    for kind, row in file.items():
        for unlike in (row.keys() - expected, expected - row.keys()):
            if unlike:
                node = min(unlike)
                says = "is no product of this model" if node in row else "is missing"
                raise UserError(
                    f"{path} is of another model: of kind {kind}, {node} {says}, which has "
                    f"{parts.layers} layers with {', '.join(n.partition('.')[2] for n in names)}."
                    f"{did_you_mean(node, expected) if node in row else ''} (--precisions)"
                )


def agree(cfg: Any) -> tuple[str, ...]:
    """Returns the kind of each process of the job, in their order; () without --precisions and
    --shares.

    A process that cannot read its file, or has another one or other shares, stops the whole job
    before anything is compiled. Raises: UserError in every process.
    """
    store = mesh_.job_store()
    record = {"precisions": "", "shares": cfg.shares or "", "kind": "", "error": ""}
    try:
        if cfg.precisions is not None:
            file, kinds = load(cfg)
            rates_of(cfg, file, kinds)
            digest = hashlib.sha256(json.dumps(file, sort_keys=True).encode()).hexdigest()
            record |= {"precisions": digest, "kind": ",".join(kinds)}
        if cfg.shares is not None:
            kinds = kinds_of(cfg, shares.parse(cfg.shares), f"shares={cfg.shares}")
            if len(kinds) > 1:
                raise UserError(
                    f"kind={cfg.kind}: with --shares a process has one kind, because its program "
                    "has equal rows on all devices; start one process for each kind, or leave "
                    f"--shares out (--kind={kinds[0]}, --shares)"
                )
            record["kind"] = kinds[0]
    except UserError as error:
        record["error"] = str(error)
        if store is None:
            raise
    if store is None:
        return (record["kind"],) if cfg.is_unlike else ()
    said = [json.loads(text) for text in mesh_.tell_all(PLACE, json.dumps(record))]
    check_said(said)
    return tuple(one["kind"] for one in said) if cfg.is_unlike else ()


def check_said(said: Sequence[Mapping[str, str]]) -> None:
    """Refuses a job whose processes do not compute by one file and one --shares. said: what each of
    them says."""
    for rank, one in enumerate(said):
        if one["error"]:
            raise UserError(f"process {rank}: {one['error']}")
    for flag, what in (("precisions", "file of precisions"), ("shares", "text of shares")):
        for rank, one in enumerate(said):
            if one[flag] == said[0][flag]:
                continue
            if not one[flag] or not said[0][flag]:
                raise UserError(
                    f"process {0 if one[flag] else rank} has no --{flag}, others have; give all "
                    "processes of the job the same, each with its own --kind"
                )
            raise UserError(
                f"process {rank} (kind {one['kind']}) has another {what} than process 0 (kind "
                f"{said[0]['kind']}); give both the same (--{flag})"
            )
