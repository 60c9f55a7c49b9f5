"""Reading the parameters of a run's folder, for sampling and export."""

from pathlib import Path

import jax

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.trust import DamagedError
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.models import lora
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.lora import LoraConfig
from megajax.models.networks import network_of
from megajax.models.parts import ModelParts, map_words
from megajax.models.vlm import VlmConfig


def load_params(
    folder: str | Path,
    cfg: DecoderConfig | EncoderConfig | VlmConfig,
    layout: Layout,
    step: int | None = None,
    checkpoints: str | None = None,
    key_file: str | None = None,
    adapters: LoraConfig = LoraConfig(),
    merged: bool = True,
) -> tuple[Tree, int]:
    """Returns (parameters as the layout stores them, their step). Raises: UserError if none.

    checkpoints: where they are, when not in the run's folder. key_file: that signs what counts.
    adapters: of the run. merged: whether they are merged into the weights; otherwise the parameters
      have them beside.
    """
    manager = CheckpointManager(
        checkpoints or Path(folder) / "checkpoints", keep=0, key_file=key_file
    )
    parts = bare = network_of(cfg).parts(cfg)
    if adapters.rank:
        with jax.set_mesh(layout.mesh):  # which decides the pieces of packed matrices
            parts = lora.adapt_parts(parts, adapters, layout)
    abstract = {"params": stored_like(parts, layout)}
    while True:
        chosen = manager.latest() if step is None else step
        if chosen is None:
            raise UserError(f"{folder} has no checkpoint yet (--run_dir)")
        try:
            params = manager.restore(chosen, like=abstract, partial=True)["params"]
            if adapters.rank and merged:
                params = lora.unpacked(params, bare)
            return params, chosen
        except DamagedError:
            if step is not None or chosen in manager.steps():
                raise  # else a run that goes on removed it, and has a newer one


def stored_like(parts: ModelParts, layout: Layout) -> Tree:
    """Returns the abstract parameters of a model as the layout stores them."""

    def like(words: tuple, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        named = layout.named(layout.stored(*words))
        return jax.tree.map(  # of a packed weight, all of its arrays
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named), x
        )

    return map_words(like, parts.axes, parts.abstract)
