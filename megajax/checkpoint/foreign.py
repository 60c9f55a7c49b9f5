"""Checkpoints of other systems as named tensors, whatever they are stored as.

What a folder is can be seen: safetensors, torch.distributed.checkpoint (torch_dcp.py) or Megatron
(megatron.py); a file is one of torch.save (torch_files.py). Nothing in them is run. A tensor is
read when it is asked for; so writing safetensors holds one at a time, while a step of ours is saved
from the whole state.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megajax.checkpoint.formats.safetensors import (
    INDEX,
    SHARD_BYTES,
    SINGLE,
    TensorFolder,
    write_folder,
)
from megajax.checkpoint.formats.torch_dcp import METADATA, DcpFolder
from megajax.checkpoint.formats.torch_files import Plain, Tensor, TorchFile, tensors
from megajax.checkpoint.offline import CODES
from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.paths import expand

Kind = Literal["safetensors", "dcp", "megatron", "torch"]
DATA_STATE = "data_state.json"  # beside exported tensors
MAX_JSON = 2**26  # (chosen) bytes of a file of settings or notes


@dataclass(frozen=True)
class Foreign:
    """Named tensors. shapes: {name: (shape, dtype)}. config: a config.json, if they are of one of
    Hugging Face's models. notes: what goes into a step's data state. left_out: what was not taken.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    view: Callable[[str], np.ndarray]
    step: int = 0
    config: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def detect(path: str | Path) -> Kind:
    """Returns what a path holds. Raises: UserError when it is nothing that can be imported."""
    folder = expand(path)
    if folder.is_file():
        return "torch"
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return "safetensors"
    tracker, common = "latest_checkpointed_iteration.txt", "common.pt"
    if (folder / tracker).is_file() or (folder / common).is_file() or any(folder.glob("mp_rank_*")):
        return "megatron"
    if (folder / METADATA).is_file():
        return "megatron" if _is_megatrons(folder) else "dcp"
    raise UserError(
        f"{folder} is none of {', '.join(get_args(Kind))}: it has no {SINGLE}, {INDEX}, "
        f"{METADATA}, {tracker} or mp_rank_*"
    )


def open_foreign(
    path: str | Path,
    kind: Kind,
    step: int | None = None,
    vocab: int | None = None,
    config: str | None = None,
) -> Foreign:
    """Opens a checkpoint.

    Args: step: of a Megatron folder the one to take, None: the latest; of others the number that it
    gets. vocab, config: as MegatronFolder has them; config is a file.
    Raises: UserError for one that is damaged, not whole, or wants code run.
    """
    path = expand(path)
    if kind == "megatron":
        return _megatron(path, step, vocab, config)
    if vocab is not None or config is not None:
        raise UserError(f"--vocab and --hf_config are for Megatron's checkpoints; {path} is {kind}")
    opened = {"dcp": _dcp, "torch": _torch, "safetensors": _safetensors}[kind]
    return opened(path, step or 0)


def write(source: Foreign, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the tensors as safetensors, one at a time, with config.json when there is one.

    Raises: UserError for a type that safetensors has not.
    """
    if unknown := [n for n, (_, dtype) in source.shapes.items() if dtype.name not in CODES]:
        raise UserError(f"safetensors has no type for {', '.join(unknown[:5])} (--to)")
    wanted = {n: (shape, CODES[dtype.name]) for n, (shape, dtype) in source.shapes.items()}
    write_folder(folder, wanted, source.view, shard_bytes)
    if source.config is not None:
        (folder / "config.json").write_text(json.dumps(source.config, indent=2) + "\n")
    (folder / DATA_STATE).write_text(json.dumps(source.notes) + "\n")


def _is_megatrons(folder: Path) -> bool:
    """Tells Megatron's DCP folders by the file that its writer puts beside."""
    try:
        return "sharded_backend" in files.read_object(folder / "metadata.json", MAX_JSON)
    except UserError:
        return False


def _megatron(path: Path, step: int | None, vocab: int | None, config: str | None) -> Foreign:
    # Here: it knows models, which need jax.
    from megajax.checkpoint.formats.megatron import MegatronFolder

    given = None
    if config is not None:
        given = files.read_object(expand(config, "hf_config"), MAX_JSON, "hf_config")
    found = MegatronFolder(path, step, vocab, given)
    notes = {"imported": str(path), "iteration": found.iteration, "config": found.config}
    return Foreign(found.tensors, found.view, found.iteration, found.config, notes, found.left_out)


def _dcp(path: Path, step: int) -> Foreign:
    found = DcpFolder(path)
    objects: dict[str, Any] = {}
    left_out, plain = [], Plain()
    for name in found.objects:
        _keep(name, found.value(name), plain, objects, left_out)
    shapes = {name: (x.shape, x.dtype) for name, x in found.tensors.items()}
    notes = {"imported": str(path), "objects": objects}
    return Foreign(shapes, found.view, step, None, notes, left_out)


def _torch(path: Path, step: int) -> Foreign:
    found: dict[str, Tensor] = {}
    objects: dict[str, Any] = {}
    left_out: list[str] = []
    plain = Plain()
    for name, value in tensors(TorchFile(path).value, str(path)):
        if isinstance(value, Tensor):
            found[name] = value
        else:
            _keep(name, value, plain, objects, left_out)
    shapes = {name: (x.shape, x.dtype) for name, x in found.items()}
    notes = {"imported": str(path), "objects": objects}
    return Foreign(shapes, lambda name: found[name].read(), step, None, notes, left_out)


def _keep(
    name: str, value: Any, plain: Plain, objects: dict[str, Any], left_out: list[str]
) -> None:
    """Files what is no tensor: what JSON can say is kept."""
    try:
        objects[name] = plain(value)
    except ValueError:
        left_out.append(name)


def _safetensors(path: Path, step: int) -> Foreign:
    found = TensorFolder(path)
    file = path / DATA_STATE
    notes = files.read_object(file, MAX_JSON) if file.exists() else {}
    shapes = {name: found.kind(name) for name in found.names()}
    return Foreign(shapes, found.view, step, None, notes)
