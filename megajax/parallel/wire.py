"""What data parallelism sends: the flags of the quantized exchange, and what they resolve to.

`--wire` names a codec (megajax/quant/codecs.py) for the gradients and the weights that travel
between data-parallel ranks; the flags `--wire.*` change one part of it. The exchange has two
levels: `inside` a node (mesh axes data, expert and context) and `between` nodes (mesh axis node).
No jax import here.
Sources: SDP4Bit (arXiv 2410.15526) sections 3 and 4, ZeRO++ (arXiv 2306.10209) section 3, LoCo
(arXiv 2407.04480) section 3.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megajax import quant
from megajax.core.axes import ZERO_AXES
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, nearest_multiples

Wire = Literal["none", "fp8", "zeropp", "loco", "sdp4bit"]
Payload = Literal["float32", "bf16", "fp8", "int8", "int4"]
Kernels = Literal["auto", "hopper", "reference", "interpret"]
BLOCK = 32  # elements of a block of the Hadamard transform, which no group may split
# A level of the exchange -> the flags of its group and of what it sends.
FLAGS = {
    "weights": ("wire.weight_group", "wire.weights"),
    "inside": ("wire.inside_group", "wire.gradients"),
    "between": ("wire.between_group", "wire.gradients"),
}
BETWEEN = "node"
INSIDE = tuple(axis for axis in ZERO_AXES if axis != BETWEEN)
SHOWN = 12  # names that a line lists (chosen)
COPIES = ("sdp4bit", "loco")  # wires that keep a copy of the weights on every rank


@dataclass(frozen=True)
class WireSpec(Checked, section="wire"):
    """What data-parallel ranks send to each other, where it differs from the codec of --wire."""

    weights: Payload | None = option(None, "format in which weights are sent; none: that of --wire")
    gradients: Payload | None = option(
        None,
        "format in which gradients are sent, inside nodes and between them; none: that of --wire",
    )
    weight_group: int | None = option(
        None,
        "number of weights that share a scale, a multiple of 32; none: that of --wire",
        "elements",
        at_least=BLOCK,
    )
    inside_group: int | None = option(
        None,
        "number of gradients that share a scale inside a node, a multiple of 32; none: that of "
        "--wire",
        "elements",
        at_least=BLOCK,
    )
    between_group: int | None = option(
        None,
        "number of gradients that share a scale between nodes, a multiple of 32; none: that of "
        "--wire",
        "elements",
        at_least=BLOCK,
    )
    rounding: Literal["nearest", "stochastic"] | None = option(
        None, "how gradients are rounded; none: as in the codec of --wire"
    )
    hadamard: bool | None = option(
        None,
        "apply a Hadamard transform to blocks of 32 gradients before they are quantized; none: as "
        "in the codec of --wire",
    )
    difference: bool | None = option(
        None,
        "whether weights are sent as differences from the copy that every rank holds; none: true "
        "with --wire=sdp4bit, unless parameters are fully sharded",
    )
    start_step: int = option(
        0, "gradients are sent in float32 before this step", "steps", at_least=0
    )
    kernels: Kernels = option(
        "auto",
        "implementation of quantization; hopper: our kernels; reference: plain JAX, which gives "
        "the same bits; interpret: our kernels in interpret mode, for tests; auto: our kernels "
        "where a tuning table measured them correct and faster",
    )
    check_every: int = option(
        100,
        "interval of comparing copies of one array on several ranks, which is done before each "
        "save too; 0: never",
        "steps",
        at_least=0,
    )

    def __post_init__(self):
        """Refuses groups that split a block of the transform."""
        super().__post_init__()
        for name in ("weight_group", "inside_group", "between_group"):
            group = getattr(self, name)
            if group is not None and group % BLOCK:
                raise UserError(
                    f"wire.{name}={group} must be a multiple of {BLOCK}; "
                    f"{nearest_multiples(group, BLOCK)} (--wire.{name})"
                )


def sends_differences(cfg: Any) -> bool:
    """Tells whether weights travel as differences against a copy. cfg: a JobConfig."""
    asked = cfg.exchange.difference
    if asked is None:
        return cfg.wire == "sdp4bit" and cfg.zero != "full"
    return cfg.wire != "none" and asked


def check(cfg: Any, sizes: Mapping[str, int]) -> None:
    """Refuses a wire that the rest of a configuration cannot have. One rank sends nothing, legally.

    Args: cfg: a JobConfig. sizes: {mesh axis: size}.
    Raises: UserError with the value, the rule, the nearest legal value and the flag.
    """
    once = f"--wire={cfg.wire}" if cfg.wire != "none" else f"--shard.zero={cfg.zero}"
    if sizes["pipe"] > 1 and cfg.pipeline.gradients == "sharded":
        if cfg.wire != "none" or cfg.zero == "optimizer":
            raise UserError(
                f"pipeline.gradients=sharded: {once} sends gradients once a step; nearest: local "
                f"(--pipeline.gradients, {once.partition('=')[0]})"
            )
    if cfg.wire == "none":
        return
    codec(cfg)
    if cfg.zero in ("hybrid", "none"):
        near = "full" if cfg.zero == "hybrid" and not sends_differences(cfg) else "optimizer"
        raise UserError(
            f"shard.zero={cfg.zero}: --wire={cfg.wire} needs an optimizer state that is cut over "
            f"all data-parallel ranks; nearest: {near}, or leave the flag out (--shard.zero, "
            "--wire)"
        )
    if cfg.zero == "full" and codec(cfg).feedback is not None:
        raise UserError(
            f"shard.zero=full: --wire={cfg.wire} keeps the errors of gradients that are summed "
            "once a step, and fully sharded ones are summed layer by layer in the backward pass; "
            "nearest: optimizer (--shard.zero)"
        )
    if cfg.zero == "full" and sends_differences(cfg):
        raise UserError(
            f"shard.zero=full: --wire={cfg.wire} sends differences against a copy of the weights, "
            "which no rank holds; nearest: optimizer, or send the weights as they are "
            "(--shard.zero, --wire.difference=false)"
        )


def codec(cfg: Any) -> "quant.Codec":
    """Returns the codec of a configuration: `.weights`, `.inside`, `.between`, `.hadamard`.

    cfg: a JobConfig. `--wire=none` gives float32 on all levels, whatever the other flags say. Fully
    sharded weights have no copy to differ from, and as they are four bits are too few (SDP4Bit,
    table 1): with sdp4bit they travel as ZeRO++'s do.
    Raises: UserError for a group of numbers that travel without scales.
    """
    spec = cfg.exchange if cfg.wire != "none" else WireSpec()
    is_sharded = cfg.wire == "sdp4bit" and cfg.zero == "full"
    return _codec(cfg.wire, spec, "zeropp" if is_sharded else cfg.wire)


@functools.cache
def _codec(wire: Wire, spec: WireSpec, weights: Wire) -> "quant.Codec":
    """weights: the wire that says what weights travel as."""
    base = quant.codec(wire, rounding=spec.rounding)
    # The rounding is that of gradients only: what one gather of weights drops, the next one sends.
    defaults = quant.codec(weights).weights, base.inside, base.between
    payloads = spec.weights, spec.gradients, spec.gradients
    groups = spec.weight_group, spec.inside_group, spec.between_group
    levels = []
    for place, level, payload, group in zip(FLAGS, defaults, payloads, groups, strict=True):
        if payload is not None:
            rounding = "nearest" if place == "weights" else base.inside.rounding
            name = "none" if payload == "float32" else payload
            level = quant.codec(name, rounding=rounding)
        if group is not None:
            if level.format is None:
                flag, other = FLAGS[place]
                raise UserError(
                    f"{flag}={group}: {level.dtype} has no groups; leave it out, or send fp8, int8 "
                    f"or int4 (--{flag}, --{other})"
                )
            level = replace(level, format=replace(level.format, group=group))
        levels.append(replace(level, name=f"{wire}.{place}"))
    block = base.hadamard if spec.hadamard is None else BLOCK * spec.hadamard
    return replace(base, format=None, levels=tuple(levels), hadamard=block)


def line(cfg: Any, unquantized: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Returns one line on what travels, for the start of a run.

    Args: cfg: a JobConfig. unquantized: names of the leaves that travel as without a wire. sizes:
      {mesh axis: size}.
    """
    nodes, ranks = sizes[BETWEEN], math.prod(sizes[axis] for axis in INSIDE)
    if nodes * ranks == 1:
        return f"wire: {cfg.wire}; one data-parallel rank, nothing travels"
    coded, kind = codec(cfg), "differences of weights" if sends_differences(cfg) else "weights"
    levels = [("inside a node", ranks, coded.inside), ("between nodes", nodes, coded.between)]
    how = coded.inside.rounding + (f", transformed by {coded.hadamard}" if coded.hadamard else "")
    parts = [f"{kind} {_spell(coded.weights)}"]
    parts += [f"gradients {where} ({n}) {_spell(level)}" for where, n, level in levels if n > 1]
    text = f"wire: {cfg.wire}; {', '.join(parts)}; rounded {how}"
    if cfg.exchange.start_step:
        text += f"; gradients in float32 before step {cfg.exchange.start_step}"
    return text + (f"; not quantized: {_listed(unquantized)}" if unquantized else "")


def kernels_line(plain: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Returns one line on which passes of an exchange run in kernels, for the start of a run.

    plain: {bucket: {pass: why it runs in plain JAX; empty: it does not}}.
    """
    total = sum(len(passes) for passes in plain.values())
    places: dict[str, dict[str, list[str]]] = {}
    for bucket, passes in plain.items():
        for name, why in passes.items():
            if why:
                places.setdefault("; ".join(why), {}).setdefault(name, []).append(bucket)
    left = sum(len(buckets) for names in places.values() for buckets in names.values())
    parts = [
        f"{_listed(list(names))} of {_listed(sorted({b for bs in names.values() for b in bs}))} "
        f"({why})"
        for why, names in places.items()
    ]
    text = f"wire: kernels run {total - left} of {total} passes"
    return text + (f"; plain JAX: {', '.join(parts)}" if parts else "")


def _spell(level: "quant.Codec") -> str:
    """Returns e.g. '4 bits by 2048'."""
    if level.format is None:
        return level.dtype
    bits = level.format.bits
    return f"{bits if isinstance(bits, str) else f'{bits} bits'} by {level.format.group}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
