"""How a run begins: from its own newest checkpoint, else from given weights, else from scratch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megajax.checkpoint.manager import CheckpointManager
from megajax.core.errors import UserError
from megajax.data.corpus import Corpus
from megajax.data.tokenizer import Tokenizer
from megajax.training.config import Config
from megajax.training.state import TrainState
from megajax.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Start:
    """The first state, the rows already consumed, and a line that says which way it began."""

    state: TrainState
    rows: int
    how: str


def identity(corpora: Sequence[Corpus], tokenizer: Tokenizer, cfg: Config) -> dict[str, Any]:
    """Returns what must not change under a data position."""
    return {
        "corpora": [f"{c.name}:{c.weight:g}:{c.fingerprint}" for c in corpora],
        "tokenizer": f"{cfg.data.tokenizer}:{tokenizer.vocab}",
        "seq_len": cfg.train.seq_len,
        "seed": cfg.train.seed,
    }


def begin(
    cfg: Config, train_step: TrainStep, checkpoints: CheckpointManager, identity: dict[str, Any]
) -> Start:
    """Returns where training begins. Raises: UserError when the text changed under a run."""
    latest = checkpoints.latest
    if latest is not None:
        if imported := checkpoints.data_state(latest).get("imported"):
            like = {"params": train_step.abstract_state.params}
            restored, _ = checkpoints.restore(latest, like=like)
            state = dataclasses.replace(
                train_step.init(cfg.train.seed), **train_step.arranged(restored)
            )
            return Start(state, 0, f"weights imported from {imported}")
        restored, data = checkpoints.restore(latest, like=vars(train_step.abstract_state))
        changed = [k for k, v in identity.items() if data.get(k) != v]
        if changed:
            raise UserError(
                f"{checkpoints.folder} was trained on other data ({', '.join(changed)} changed), "
                "so its position means nothing here; restore the text or give another --run_dir"
            )
        state = train_step.arranged(TrainState(**restored))
        return Start(state, data["rows"], f"resumed after step {latest}")
    state = train_step.init(cfg.train.seed)
    if cfg.init_from is not None:
        from megajax.checkpoint import hf  # the weights' own format; unused otherwise

        params = hf.load_params(cfg.init_from, cfg.model, train_step.layout)
        params = train_step.arranged(params)
        return Start(dataclasses.replace(state, params=params), 0, f"weights from {cfg.init_from}")
    return Start(state, 0, "initialised")
