"""The one place where parts of a configuration are checked against each other and the mesh.

Each config class checks its own fields when it is made; what needs two of them, or the number of
devices, is here. Pure arithmetic: an illegal combination is refused before jax compiles anything.
"""

from collections.abc import Mapping
from typing import Any

from megajax.core.axes import BATCH_AXES, Rules
from megajax.core.errors import UserError, divisors, nearest_divisors, nearest_multiples


def check(cfg: Any, sizes: Mapping[str, int], rules: Rules) -> None:
    """Refuses what cannot run.

    Args: cfg: has `.model` (with `.sizes`, `.position`, `.max_positions`) and `.train`.
      sizes: {mesh axis: size}. rules: the rule table of the run.
    Raises: UserError with the value, the rule, the nearest legal value and the flag.
    """
    check_weights(cfg.model, sizes, rules)
    train = cfg.train
    ways, spelled = _ways(BATCH_AXES, sizes)
    pieces = ways * train.accumulate
    if train.global_batch % pieces:
        parts = [spelled] if spelled else []
        parts += [f"train.accumulate {train.accumulate}"] if train.accumulate > 1 else []
        raise UserError(
            f"train.global_batch={train.global_batch} must be divisible by {' x '.join(parts)} = "
            f"{pieces}; {nearest_multiples(train.global_batch, pieces)} (--train.global_batch)"
        )
    _check_sequence(cfg, sizes)
    if sizes["context"] > 1:
        _check_context(cfg, sizes)


def _ways(axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, str]:
    """Returns (product of the sizes, its spelling 'data 4 x node 2')."""
    pieces = 1
    for axis in axes:
        pieces *= sizes[axis]
    return pieces, " x ".join(f"mesh.{a} {sizes[a]}" for a in axes if sizes[a] > 1)


def check_weights(model: Any, sizes: Mapping[str, int], rules: Rules) -> None:
    """Refuses a mesh that cannot cut a model's weights. model: has `.sizes`; a word of a further
    stack has a name and a dot before it ('tower.heads')."""
    for word, (size, flag) in model.sizes.items():
        axes = rules.stored.get(word.rpartition(".")[2], ())
        ways, spelled = _ways(axes, sizes)
        if word in rules.sharable:
            if size % ways and ways % size:
                raise UserError(_unshared(model, word, spelled.rsplit(" ", 1)[0], ways))
        elif size % ways:
            widest = max(axes, key=lambda a: sizes[a])
            others = ways // sizes[widest]
            near = nearest_divisors(size // others, sizes[widest]) if size % others == 0 else ""
            advice = f" or mesh.{widest} ({near})" if near else ""
            zero = ", --shard.zero" if word == "embed" else ""
            raise UserError(
                f"{flag}={size} must be divisible by {spelled} = {ways}; change {flag} "
                f"({nearest_multiples(size, ways)}){advice} (--{flag}, --mesh.{widest}{zero})"
            )


def _unshared(model: Any, word: str, axis: str, ways: int) -> str:
    """Returns why ranks can neither cut a dimension nor share it. The query heads, which `ways`
    divides, are a legal number of key-value heads."""
    (size, flag), (heads, _) = model.sizes[word], model.sizes["heads"]
    legal = [n for n in divisors(heads) if not (n % ways and ways % n)]
    near = [n for n in legal if n < size][-1:] + [n for n in legal if n > size][:1]
    return (
        f"{flag}={size} must be divisible by {axis} {ways}, or divide it; change {flag} (nearest: "
        f"{', '.join(map(str, near))}) or {axis} ({nearest_divisors(size, ways)}) "
        f"(--{flag}, --{axis})"
    )


def _check_sequence(cfg: Any, sizes: Mapping[str, int]) -> None:
    train, model = cfg.train, cfg.model
    if not model.max_positions:  # its rows are no sequences
        return
    for factor, spelled in (
        (sizes["context"] * sizes["tensor"], "mesh.context x mesh.tensor"),
        (sizes["context"] * max(train.loss_chunks, 1), "mesh.context x train.loss_chunks"),
    ):
        if train.seq_len % factor:
            raise UserError(
                f"train.seq_len={train.seq_len} must be divisible by {spelled} = {factor}; "
                f"{nearest_multiples(train.seq_len, factor)} (--train.seq_len)"
            )
    if train.seq_len > model.max_positions:
        raise UserError(
            f"train.seq_len={train.seq_len} is beyond the model's positions; at most "
            f"{model.max_positions} (--train.seq_len, --model.max_positions)"
        )


def _check_context(cfg: Any, sizes: Mapping[str, int]) -> None:
    train, kind, ways = cfg.train, cfg.context.kind, sizes["context"]
    if kind == "ulysses":
        if "heads" not in cfg.model.sizes:
            raise UserError(
                "context.kind=ulysses cuts attention heads, and the model's `sizes` has no "
                "'heads'; use a ring (--context.kind=ring)"
            )
        heads, (size, flag) = sizes["tensor"] * ways, cfg.model.sizes["heads"]
        if size % heads:
            near = nearest_divisors(size // sizes["tensor"], ways)
            raise UserError(
                f"{flag}={size} must be divisible by mesh.tensor {sizes['tensor']} x mesh.context "
                f"{ways} = {heads} for ulysses; change {flag} ({nearest_multiples(size, heads)}) "
                f"or mesh.context ({near}), or use a ring (--{flag}, --mesh.context, "
                "--context.kind=ring)"
            )
    elif cfg.context.order == "zigzag" and train.seq_len % (2 * ways):
        raise UserError(
            f"train.seq_len={train.seq_len} must be divisible by 2 x mesh.context = {2 * ways} for "
            f"the zigzag order; {nearest_multiples(train.seq_len, 2 * ways)} (--train.seq_len, "
            "--context.order=plain)"
        )
    if kind == "ring" and train.attention in ("cudnn", "varlen", "hopper"):
        raise UserError(
            f"train.attention={train.attention} gives no log-sum-exp to join the blocks of a ring "
            "with; use auto or xla, or another context.kind: ulysses, gather (--train.attention, "
            "--context.kind)"
        )
    if kind == "gather" and train.attention in ("varlen", "hopper"):
        raise UserError(
            f"train.attention={train.attention} is among a row's own tokens, and gather brings "
            "others' keys; use auto, xla or cudnn, or ulysses (--train.attention, --context.kind)"
        )
