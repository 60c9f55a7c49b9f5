"""Torchvision's weights as parameters of a detector: what --init_from of a detector reads.

A file of torch.save or of safetensors with the state dict of a classifier (ResNet, VGG16), which
gives the backbone, or of a Faster R-CNN, which gives everything but the predictions of classes
where their number differs. models/torchvision_names.py has the names. No pickle is run, and nothing
that a file says of sizes is believed (torch_files.py, safetensors.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.tree import Tree, name, named_leaves
from megajax.foreign import readers
from megajax.foreign.readers import Foreign, some
from megajax.models import torchvision_names
from megajax.models.faster_rcnn import FasterRcnnConfig
from megajax.models.torchvision_names import Source, StateDict


class Loaded(NamedTuple):
    """Parameters with the weights of a file. new: the leaves that the file does not give."""

    params: Tree
    new: tuple[str, ...]


def describe(path: str | Path) -> StateDict:
    """Returns what network a file holds and the settings that a detector needs to take it.

    Raises: UserError for a file that cannot be read, or holds another network.
    """
    return _open(path)[1]


def load_params(path: str | Path, cfg: FasterRcnnConfig, fresh: Tree) -> Loaded:
    """Returns the parameters of a detector, with those that a file has in the place of new ones.

    Args: fresh: the parameters of a FasterRcnn of `cfg`, with their shardings.
    Raises: UserError for a file that is damaged, hostile, of another network, or that lacks tensors
      or has ones that the detector has no place for; it names them.
    """
    file, state = _open(path)
    settings = {n: getattr(cfg, n) for n in (*state.settings, "maps")}
    _check_settings(path, state, cfg)
    leaves = {n: x.shape for n, x in named_leaves(fresh)}
    sources = torchvision_names.sources(state, leaves)
    if state.classes is not None and state.classes != cfg.classes:
        of_classes = {n: sources.pop(n) for n in leaves if n.startswith(_OF_CLASSES)}
    else:
        of_classes = {}
    _check_tensors(path, file, state, sources, of_classes, settings)
    made = {n: _leaf(path, file, state, source) for n, source in sources.items()}

    def placed(where: tuple, old: jax.Array) -> jax.Array:
        if name(where) not in made:
            return old
        array = made[name(where)].astype(old.dtype)
        return jax.make_array_from_callback(old.shape, old.sharding, lambda index: array[index])

    params = jax.tree_util.tree_map_with_path(placed, fresh)
    return Loaded(params, tuple(n for n in leaves if n not in made))


_OF_CLASSES = torchvision_names.OF_CLASSES


def _open(path: str | Path) -> tuple[Foreign, StateDict]:
    file = expand(path, "init_from")
    if not file.exists():
        raise UserError(f"init_from={path}: there is no such file (--init_from)")
    foreign = readers.open_foreign(file, readers.detect(file))
    shapes = {n: shape for n, (shape, _) in foreign.shapes.items()}
    try:
        return foreign, torchvision_names.describe(shapes)
    except UserError as error:
        raise UserError(f"init_from={path}: {error} (--init_from)") from None


def _check_settings(path: str | Path, state: StateDict, cfg: FasterRcnnConfig) -> None:
    """Refuses a model of another shape."""
    needed = {**state.settings, "width": 1.0}
    if wrong := {n: x for n, x in needed.items() if getattr(cfg, n) != x}:
        has = ", ".join(f"model.{n}={getattr(cfg, n)}" for n in wrong)
        flags = " ".join(f"--model.{n}={x}" for n, x in wrong.items())
        raise UserError(
            f"init_from={path} holds a {_TITLES[state.kind]} of torchvision, which {has} cannot "
            f"take; give {flags}, or leave --init_from out"
        )


_TITLES: Mapping[str, str] = {"detector": "Faster R-CNN", "resnet": "ResNet", "vgg16": "VGG16"}


def _check_tensors(
    path: str | Path,
    file: Foreign,
    state: StateDict,
    sources: Mapping[str, Source],
    of_classes: Mapping[str, Source],
    settings: Mapping[str, Any],
) -> None:
    """Refuses a file that lacks tensors, has others, or has them in other shapes."""
    needed = {n: s.shape for s in sources.values() for n in s.theirs}
    lacking = sorted(n for n in needed if n not in state.names)
    used = {*needed, *(n for source in of_classes.values() for n in source.theirs)}
    strangers = [
        n
        for n in state.names
        if n not in used and not torchvision_names.is_needless(n, state, settings)
    ]
    problems = []
    if lacking:
        problems.append(f"it lacks {len(lacking)} tensors of the detector: {some(lacking)}")
    if strangers:
        problems.append(f"it has {len(strangers)} that the detector has not: {some(strangers)}")
    for theirs, shape in needed.items():
        if theirs in state.names:
            stored, dtype = file.shapes[state.names[theirs]]
            if stored != shape:
                problems.append(f"{theirs} has the shape {list(stored)}, not {list(shape)}")
            elif not jnp.issubdtype(dtype, jnp.floating):
                problems.append(f"{theirs} is {dtype}; weights are of a floating type")
    if problems:
        raise UserError(f"init_from={path}: {some(problems, '; ')} (--init_from)")


def _leaf(path: str | Path, file: Foreign, state: StateDict, source: Source) -> np.ndarray:
    tensors = [file.view(state.names[n]).astype(np.float32) for n in source.theirs]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        leaf = source.make(*tensors)
    if not np.isfinite(leaf).all():
        raise UserError(
            f"init_from={path}: {', '.join(source.theirs)} give weights that are not finite "
            "(--init_from)"
        )
    return leaf
