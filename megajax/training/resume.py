"""The first state of a run: its newest checkpoint, else given weights, else new ones."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.checkpoint.run_folder import stored_like
from megajax.checkpoint.trust import DamagedError
from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.data.corpus import Corpus
from megajax.data.tokenizer import Tokenizer
from megajax.models import lora
from megajax.training.config import JobConfig
from megajax.training.optim import make_schedule
from megajax.training.step import TrainStep
from megajax.training.task import TrainState

# The members of optim that decide the learning rate, with train.steps.
COURSE = ("lr", "schedule", "warmup", "final", "decay")
KEPT = "exchange"  # the member of a data_state that has StorageOrder.exchange


@dataclasses.dataclass(frozen=True)
class Start:
    """The first state, the rows already consumed, and a line that says which way it began."""

    state: TrainState
    rows: int
    how: str


def identity(corpora: Sequence[Corpus], tokenizer: Tokenizer, cfg: JobConfig) -> dict[str, Any]:
    """Returns what must not change under a data position."""
    return {
        "corpora": [f"{c.name}:{c.weight:g}:{c.fingerprint}" for c in corpora],
        "tokenizer": tokenizer.identity,
        "seq_len": cfg.train.seq_len,
        "seed": cfg.train.seed,
    }


def begin(
    cfg: JobConfig,
    train_step: TrainStep,
    checkpoints: CheckpointManager,
    identity: dict[str, Any],
    memory: MemoryTier | None = None,
) -> Start:
    """Returns where training begins: from memory, if what storage has is not newer, else from
    storage, where a damaged step is reported and the one before it taken.

    Raises: UserError when the text changed under a run, none of its steps is whole, or it already
      has more steps than are asked for.
    """
    if memory is not None:
        like, rows = functools.partial(_like, train_step), train_step.rows
        copy = memory.take(like, checkpoints.agreed_latest(), rows)
        if copy is not None:
            step, state, data = copy
            _check_data(identity, data, "the copy in memory")
            how = _resumed(step, cfg, "the copy in memory", ", from memory")
            state, note = _completed(train_step, state, data)
            return Start(state, data["rows"], how + note)
    while (latest := checkpoints.agreed_latest()) is not None:
        try:
            return _go_on(cfg, train_step, checkpoints, identity, latest)
        except DamagedError as error:  # the manager forgets the step
            logging.error("%s", error)
    if checkpoints.steps():
        raise UserError(
            f"none of the steps {checkpoints.steps()} of {checkpoints.folder} is whole; move the "
            "folder away to begin anew, or give another --run_dir"
        )
    state = train_step.init(cfg.train.seed)
    if cfg.init_from is not None:
        dense = cfg.given_params(train_step.layout, lora.strip(state.params))
        params = train_step.storage.arranged(dense)
        if cfg.lora.rank:
            params = train_step.adopt(params, state.params)
        return _from_params(train_step, state, params, f"weights from {cfg.init_from}")
    return Start(state, 0, "initialised")


def _go_on(
    cfg: JobConfig,
    train_step: TrainStep,
    checkpoints: CheckpointManager,
    identity: dict[str, Any],
    step: int,
) -> Start:
    with checkpoints.together(step):
        data = checkpoints.data_state(step)
    if imported := data.get("imported"):
        how = f"weights imported from {imported}"
        if train_step.task.bare is not None:  # they have no adapters yet
            like = {"params": stored_like(train_step.bare_parts(), train_step.layout)}
            dense = checkpoints.restore(step, like=like)["params"]
            state = train_step.init(cfg.train.seed)
            params = train_step.adopt(train_step.storage.arranged(dense), state.params)
            return _from_params(train_step, state, params, how)
        like = {"params": train_step.abstract_state.params}
        rows = {n: order for n, order in train_step.rows.items() if n.startswith("params.")}
        restored = checkpoints.restore(step, like=like, order=rows)
        return _from_params(train_step, train_step.init(cfg.train.seed), restored["params"], how)
    how = _resumed(step, cfg, str(checkpoints.folder))
    like = _like(train_step, data)
    left_out = _holds(data) != train_step.storage.exchange
    restored = checkpoints.restore(
        step, like=like, partial=left_out, order=_order(train_step, like)
    )
    _check_data(identity, data, str(checkpoints.folder))
    state, note = _completed(train_step, restored, data)
    return Start(state, data["rows"], how + note)


def changes(cfg: JobConfig, former: JobConfig | None, step: int) -> list[str]:
    """Returns what differs from the run that is continued, the learning rate's course first, or
    from the model of the folder of init_from.

    former: what the run's folder said before; None: it is a new run. step: it goes on after.
    """
    if former is None:
        return _model_changes(cfg) if cfg.init_from is not None and step == 0 else []
    changed = [d for d in config.diff(cfg, former) if d[0] != "run_dir"]
    lines = [f"  {name}: {old} -> {new}" for name, old, new in changed]
    course = _course(cfg, former, step)
    return [*course, *(["settings that differ from the former start:"] if lines else []), *lines]


def _course(cfg: JobConfig, former: JobConfig, step: int) -> list[str]:
    """Returns a line on how the learning rate goes on, if it does not as it would have."""

    def rates(of: JobConfig) -> np.ndarray:
        schedule = make_schedule(of.optim, of.train.steps)
        at = (step, max(step, of.train.steps - 1))
        return np.array([np.asarray(schedule(s), float) for s in at])

    was, now = rates(former), rates(cfg)
    before, after = (dataclasses.asdict(c.optim) | {"steps": c.train.steps} for c in (former, cfg))
    if all(before[name] == after[name] for name in ("steps", *COURSE)):
        return []
    ended = step >= former.train.steps
    then = f"the run had ended at {was[0]:.3g}" if ended else f"it would have been {was[0]:.3g}"
    last = "" if ended else f", {was[1]:.3g} before"
    return [
        f"the learning rate takes another course: step {step + 1} learns with {now[0]:.3g} "
        f"({then}), the last one, {cfg.train.steps}, with {now[1]:.3g}"
        + (f" (step {former.train.steps}{last})" if last else "")
    ]


def _model_changes(cfg: JobConfig) -> list[str]:
    theirs = cfg.given_model()
    if type(theirs) is not type(cfg.model):
        return []
    changed = config.diff(cfg.model, theirs)
    lines = [f"  model.{name}: {old} -> {new}" for name, old, new in changed]
    return [f"settings that differ from {cfg.init_from}:", *lines] if lines else []


# ---- copies of weights and errors of gradients (--wire), which belong to a mesh and a codec


def _holds(data: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint says of the copies and errors in it, as StorageOrder.exchange."""
    held = data.get(KEPT)
    return held if isinstance(held, dict) else {}


def _like(train_step: TrainStep, data: dict[str, Any]) -> dict[str, Any]:
    """Returns what to ask a checkpoint for: copies and errors only where it has this run's."""
    held = _holds(data)
    other = [k for k in ("copies", "errors") if held.get(k) != train_step.storage.exchange.get(k)]
    return vars(train_step.abstract_state) | dict.fromkeys(other)


def _order(train_step: TrainStep, like: dict[str, Any]) -> dict[str, Any]:
    """Returns TrainStep.rows of the leaves that are asked for."""
    names = {n for n, _ in named_leaves(like)}
    return {n: rows for n, rows in train_step.rows.items() if n in names}


def _completed(
    train_step: TrainStep, restored: dict[str, Any], data: dict[str, Any]
) -> tuple[TrainState, str]:
    """Returns (the state with the copies and errors that this run needs, a note on what differs).

    New copies are the masters in the type of compute: the same bits on all devices.
    """
    state, held, exchange, notes = (
        TrainState(**restored),
        _holds(data),
        train_step.storage.exchange,
        [],
    )
    lacks = [k for k in exchange if exchange[k] is not None and getattr(state, k) is None]
    if lacks:
        made = dict(zip(("copies", "errors"), train_step.init_exchange(state.params), strict=True))
        state = dataclasses.replace(state, **{k: made[k] for k in lacks})
    if "copies" in lacks:
        was = "it has none" if held.get("copies") is None else f"it has {held['copies']} ones"
        notes.append(f"copies of the weights are made again ({was})")
    elif held.get("copies") is not None and exchange.get("copies") is None:
        notes.append("its copies of the weights are not needed")
    if "errors" in lacks:
        was = "it has none" if held.get("errors") is None else "another mesh or codec"
        notes.append(f"errors of gradients begin at 0 ({was})")
    elif held.get("errors") is not None and exchange.get("errors") is None:
        notes.append("its errors of gradients are dropped")
    return state, "".join(f"; {note}" for note in notes)


def _from_params(train_step: TrainStep, state: TrainState, params: Any, how: str) -> Start:
    """Returns a start from a first state with other parameters, which its copies and errors
    follow. how: which way it began."""
    # What is not trained may rest in fewer bits than the weights came in.
    params = jax.tree.map(lambda x, like: x.astype(like.dtype), params, state.params)
    state = dataclasses.replace(state, params=params)
    if train_step.storage.exchange:
        copies, errors = train_step.init_exchange(params)
        state = dataclasses.replace(state, copies=copies, errors=errors)
    if state.copies is not None:
        how += "; copies of the weights are made of them"
    if state.errors is not None:
        how += "; errors of gradients begin at 0"
    return Start(state, 0, how)


def _resumed(step: int, cfg: JobConfig, where: str, note: str = "") -> str:
    """Returns how the run goes on. note: appended. Raises: UserError when it is past its end."""
    steps = cfg.train.steps
    if step > steps:
        raise UserError(
            f"train.steps={steps}: {where} already has {step} steps, and a run cannot go back; "
            f"give at least {step} to keep it (more to train on), or another --run_dir to begin "
            "anew (--train.steps)"
        )
    if step == steps:
        note += (
            f": all of train.steps={steps} are done; a larger --train.steps, with --run_dir of "
            "this folder, trains on"
        )
    return f"resumed after step {step}{note}"


def _check_data(identity: dict[str, Any], data: dict[str, Any], where: str) -> None:
    changed = [k for k, v in identity.items() if data.get(k) != v]
    if changed:
        raise UserError(
            f"{where} was trained on other data ({', '.join(changed)} changed), "
            "so its position means nothing here; restore the text or give another --run_dir"
        )
    if type(rows := data.get("rows")) is not int or rows < 0:
        raise UserError(f"{where} says that {rows!r} rows were read; give another --run_dir")
