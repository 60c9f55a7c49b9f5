"""Checkpoints of other systems as named tensors, whatever they are stored as.

What a folder is can be seen: safetensors, torch.distributed.checkpoint (torch_files.py) or Megatron
(megatron.py); a file is safetensors by its name, or one of torch.save (torch_files.py). Nothing in
them is run. A tensor is read when it is asked for; so writing safetensors holds one at a time,
while a step of ours is saved from the whole state. A tensor of a kind that cannot be read is an
error that names it, unless the caller leaves it out by name; everything that does not become a
tensor or a note is listed.
Not here: a GGUF file, which is a complete model with its tokenizer (gguf.py), and a folder of
Hugging Face as a model (hf.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.foreign.safetensors import (
    CODES,
    INDEX,
    SHARD_BYTES,
    SINGLE,
    TensorFolder,
    write_folder,
)
from megajax.foreign.torch_files import (
    METADATA,
    Array,
    DcpFolder,
    Plain,
    Tensor,
    TorchFile,
    Unread,
    tensors,
)

# What `detect` returns and `open_foreign` opens; --format of scripts/checkpoint.py has the same.
Kind = Literal["safetensors", "dcp", "megatron", "torch"]
DATA_STATE = "data_state.json"  # beside exported tensors
MAX_JSON = 2**26  # (chosen) bytes of a file of settings or notes
NAMED = 10  # (chosen) names that a message lists


@dataclass(frozen=True)
class Foreign:
    """Named tensors. shapes: {name: (shape, dtype)}. config: a config.json, if they are of one of
    Hugging Face's models. notes: what goes into a step's data state. left_out: what was not taken,
    each with the reason where there is one.
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
        return "safetensors" if folder.suffix == ".safetensors" else "torch"
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
    leave_out: Sequence[str] = (),
) -> Foreign:
    """Opens a checkpoint.

    Args: step: of a Megatron folder the one to take, None: the latest; of others the number that it
    gets. vocab, config: as MegatronFolder has them; config is a file. leave_out: names of values
    that are not taken, or the first parts of their names.
    Raises: UserError for one that is damaged, not whole, or wants code run; for one that holds
    tensors of a kind that cannot be read, which it names; for a name in leave_out that nothing has.
    """
    path = expand(path)
    if kind == "megatron":
        if leave_out:
            raise UserError("--leave_out is for other checkpoints than Megatron's")
        return _megatron(path, step, vocab, config)
    if vocab is not None or config is not None:
        raise UserError(f"--vocab and --hf_config are for Megatron's checkpoints; {path} is {kind}")
    opened = {"dcp": _dcp, "torch": _torch, "safetensors": _safetensors}[kind]
    return opened(path, step or 0, _Selection(path, leave_out))


def write(source: Foreign, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the tensors as safetensors, one at a time, with config.json when there is one.

    Raises: UserError for a type that safetensors has not.
    """
    if unknown := [n for n, (_, dtype) in source.shapes.items() if dtype.name not in CODES]:
        raise UserError(f"safetensors has no type for {', '.join(unknown[:5])} (--to)")
    shapes = {n: (shape, CODES[dtype.name]) for n, (shape, dtype) in source.shapes.items()}
    write_folder(folder, shapes, source.view, shard_bytes)
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
    from megajax.foreign.megatron import MegatronFolder

    members = None
    if config is not None:
        members = files.read_object(expand(config, "hf_config"), MAX_JSON, "hf_config")
    checkpoint = MegatronFolder(path, step, vocab, members)
    notes = {"imported": str(path), "iteration": checkpoint.iteration, "config": checkpoint.config}
    return Foreign(
        checkpoint.tensors,
        checkpoint.view,
        checkpoint.iteration,
        checkpoint.config,
        notes,
        checkpoint.left_out,
    )


class _Selection:
    """Sorts what a checkpoint holds into tensors, notes, what was left out, what cannot be read."""

    def __init__(self, path: Path, leave_out: Sequence[str]):
        self.path, self._unused = path, dict.fromkeys(leave_out)
        self._leave_out = tuple(leave_out)
        self.arrays: dict[str, Tensor | Array] = {}
        self.objects: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._refused: list[str] = []
        self._plain = Plain()

    def skips(self, name: str) -> bool:
        """Tells whether the caller leaves a name out, which is noted."""
        hits = [w for w in self._leave_out if name == w or name.startswith(f"{w}.")]
        for w in hits:
            self._unused.pop(w, None)
        if hits:
            self.left_out.append(name)
        return bool(hits)

    def add(self, name: str, value: Any) -> None:
        """Files a value of a file of torch.save."""
        if self.skips(name):
            return
        if isinstance(value, Tensor | Array):
            self.arrays[name] = value
        elif isinstance(value, Unread):
            self._refused.append(f"{name} is {value.what} ({value.remedy})")
        else:
            self._keep(name, value)

    def _keep(self, name: str, value: Any) -> None:
        """Files what is no tensor: what JSON can say becomes a note."""
        before = len(self._plain.named)
        try:
            self.objects[name] = self._plain(value)
        except ValueError as error:
            self.left_out.append(f"{name} ({error})")
            return
        if named := list(self._plain.named)[before:]:
            self.left_out.append(f"{name} (noted by its name only: {', '.join(named)})")
            for kind in named:
                del self._plain.named[kind]

    def check(self) -> None:
        """Raises: UserError for tensors that cannot be read, and words that nothing has."""
        if self._refused:
            raise UserError(
                f"{self.path} holds {len(self._refused)} tensor{'s' * (len(self._refused) > 1)} "
                f"that cannot be imported: "
                f"{some(self._refused, '; ')}; save it again as said there, or leave "
                "them out by name (--leave_out)"
            )
        if self._unused:
            raise UserError(
                f"{self.path} has no value named {', '.join(self._unused)} (--leave_out)"
            )


def some(names: Sequence[str], between: str = ", ") -> str:
    """Returns the first names as text, and how many there are besides."""
    more = len(names) - NAMED
    return between.join(names[:NAMED]) + (f"{between}and {more:,} more" if more > 0 else "")


def _dcp(path: Path, step: int, chosen: _Selection) -> Foreign:
    checkpoint = DcpFolder(path)
    for name in checkpoint.objects:
        value = checkpoint.value(name)
        parts = list(tensors(value, f"{path}: {name}"))
        if any(isinstance(x, Tensor | Array | Unread) for _, x in parts):
            for part, x in parts:
                chosen.add(f"{name}.{part}" if part else name, x)
        else:
            chosen.add(name, value)
    shapes = {n: (x.shape, x.dtype) for n, x in checkpoint.tensors.items() if not chosen.skips(n)}
    for name, unread in checkpoint.unread.items():
        chosen.add(name, unread)
    if both := sorted(shapes.keys() & chosen.arrays.keys()):
        raise UserError(f"{path} has two tensors of the name {both[0][:200]}")
    chosen.check()
    inner = chosen.arrays
    shapes |= {n: (x.shape, x.dtype) for n, x in inner.items()}
    notes = {"imported": str(path), "objects": chosen.objects}

    def view(name: str) -> np.ndarray:
        return inner[name].read() if name in inner else checkpoint.view(name)

    return Foreign(shapes, view, step, None, notes, chosen.left_out)


def _torch(path: Path, step: int, chosen: _Selection) -> Foreign:
    for name, value in tensors(TorchFile(path).value, str(path)):
        chosen.add(name or "tensor", value)
    chosen.check()
    shapes = {name: (x.shape, x.dtype) for name, x in chosen.arrays.items()}
    notes = {"imported": str(path), "objects": chosen.objects}
    view = chosen.arrays
    return Foreign(shapes, lambda name: view[name].read(), step, None, notes, chosen.left_out)


def _safetensors(path: Path, step: int, chosen: _Selection) -> Foreign:
    if path.is_file():
        checkpoint, notes = TensorFolder(path.parent, path.name, alone=True), {}
    else:
        checkpoint, file = TensorFolder(path), path / DATA_STATE
        notes = files.read_object(file, MAX_JSON) if file.exists() else {}
    shapes = {name: checkpoint.kind(name) for name in checkpoint.names() if not chosen.skips(name)}
    chosen.check()
    return Foreign(shapes, checkpoint.view, step, None, notes, chosen.left_out)
