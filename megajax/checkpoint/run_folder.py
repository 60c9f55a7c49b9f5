"""Reading the parameters of a run's folder, for sampling and export."""

from pathlib import Path

import jax

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.trust import DamagedError
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.networks import network_of
from megajax.models.parts import map_words
from megajax.models.vlm import VlmConfig


def load_params(
    folder: str | Path,
    cfg: DecoderConfig | EncoderConfig | VlmConfig,
    layout: Layout,
    step: int | None = None,
    checkpoints: str | None = None,
    key_file: str | None = None,
) -> tuple[Tree, int]:
    """Returns (parameters as the layout stores them, their step). Raises: UserError if none.

    checkpoints: where they are, when not in the run's folder. key_file: that signs what counts.
    """
    manager = CheckpointManager(
        checkpoints or Path(folder) / "checkpoints", keep=0, key_file=key_file
    )
    parts = network_of(cfg).parts(cfg)

    def like(words: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        named = layout.named(layout.stored(*words))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named)

    abstract = {"params": map_words(like, parts.axes, parts.abstract)}
    while True:
        chosen = manager.latest() if step is None else step
        if chosen is None:
            raise UserError(f"{folder} has no checkpoint yet (--run_dir)")
        try:
            return manager.restore(chosen, like=abstract, partial=True)["params"], chosen
        except DamagedError:
            if step is not None or chosen in manager.steps():
                raise  # else a run that goes on removed it, and has a newer one
