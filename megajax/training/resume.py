"""How a run begins: from its own newest checkpoint, else from given weights, else from scratch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import logging

from megajax.checkpoint.integrity import DamagedError
from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.memory_tier import MemoryTier
from megajax.core.errors import UserError
from megajax.data.corpus import Corpus
from megajax.data.tokenizer import Tokenizer
from megajax.training.config import JobConfig
from megajax.training.state import TrainState
from megajax.training.step import TrainStep


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
        like, rows = vars(train_step.abstract_state), train_step.rows
        found = memory.take(like, checkpoints.agreed_latest(), rows)
        if found is not None:
            step, state, data = found
            _check_data(identity, data, "the copy in memory")
            how = _resumed(step, cfg, "the copy in memory", ", from memory")
            return Start(TrainState(**state), data["rows"], how)
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
        params = train_step.arranged(cfg.given_params(train_step.layout, state.params))
        return Start(dataclasses.replace(state, params=params), 0, f"weights from {cfg.init_from}")
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
        like = {"params": train_step.abstract_state.params}
        rows = {n: own for n, own in train_step.rows.items() if n.startswith("params.")}
        restored = checkpoints.restore(step, like=like, order=rows)
        state = dataclasses.replace(train_step.init(cfg.train.seed), **restored)
        return Start(state, 0, f"weights imported from {imported}")
    how = _resumed(step, cfg, str(checkpoints.folder))
    like = vars(train_step.abstract_state)
    restored = checkpoints.restore(step, like=like, order=train_step.rows)
    _check_data(identity, data, str(checkpoints.folder))
    return Start(TrainState(**restored), data["rows"], how)


def _resumed(step: int, cfg: JobConfig, where: str, note: str = "") -> str:
    """Returns how the run goes on. note: appended. Raises: UserError when it is past its end."""
    wanted = cfg.train.steps
    if step > wanted:
        raise UserError(
            f"train.steps={wanted}: {where} already has {step} steps, and a run cannot go back; "
            f"give at least {step} to keep it (more to train on), or another --run_dir to begin "
            "anew (--train.steps)"
        )
    if step == wanted:
        note += f": all of train.steps={wanted} are done, a larger --train.steps trains on"
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
