"""Where the tensors of a Megatron checkpoint lie: one name and one whole tensor for each.

Two forms, both under iter_0000100/ or release/: `torch`, one file of torch.save for each tensor and
pipeline rank (mp_rank_01_003/model_optim_rng.pt), of the legacy model or of Megatron-Core; and
`torch_dist`, a DCP folder, its layers stacked or apart. Layers are numbered over the pipeline here:
chunk c of stage s follows chunk c of stage s - 1 (interleaving: arXiv 2104.04473). Source of names
and cuts: NVIDIA/Megatron-LM, tools/checkpoint and megatron/core. No jax.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint.formats.pickles import Global, Record
from megajax.checkpoint.formats.torch_dcp import METADATA, DcpFolder
from megajax.checkpoint.formats.torch_files import (
    Plain,
    Tensor,
    TorchFile,
    Unread,
    show,
    tensors,
    word,
)
from megajax.core import files
from megajax.core.boxes import Box
from megajax.core.errors import UserError
from megajax.core.paths import expand

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
MAX_LAYERS = 2**14  # (chosen: ten times the deepest networks)
RANK = re.compile(r"mp_rank_([0-9]{1,7})(?:_([0-9]{1,7}))?")
CHUNK = re.compile(r"model[0-9]{0,4}")
LAYER = re.compile(r"decoder\.layers\.([0-9]{1,7})\.(.+)")
STACKED = re.compile(r"decoder\.layers\.([^.\d].*)")

# The legacy model's words and Transformer Engine's fused norms -> Megatron-Core's plain words.
WORDS = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^(module\.|model\.)+", ""),
        (r"^language_model\.", ""),
        (r"^(encoder|transformer)\.", "decoder."),
        (r"(?<=\d\.)attention\.", "self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"self_attention\.dense\.", "self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"^word_embeddings_for_head\.", "output_layer."),  # a last stage's copy of the table
        (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
        (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    )
)
# Dimension that tensor parallelism cuts; everything else is alike on all its ranks.
CUT = {
    "word_embeddings.weight": 0, "output_layer.weight": 0, "linear_qkv.weight": 0,
    "linear_qkv.bias": 0, "linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}  # fmt: skip
_KNOWN = r"model\d*|args|checkpoint_version|iteration"
# Of no use to a model: state of fp8, rotary tables.
NEEDLESS = ("_extra_state", "rotary_pos_emb.inv_freq")
NOT_MODEL = (
    "optimizer", "chained_", "rng_state", "rerun_state", "opt_param_scheduler", "common_state",
    "iteration", "checkpoint_version", "num_floating_point", "param_state",
)  # fmt: skip


def find_step(path: str | Path, step: int | None = None) -> Path:
    """Returns the folder of a checkpoint: of iteration `step`, or of the latest one.

    Raises: UserError when there is none.
    """
    folder = expand(path)
    if step is None and any(folder.glob("mp_rank_*")) or (folder / METADATA).is_file():
        return folder
    said = f"{step}"
    if step is None:
        try:
            said = files.read_bytes(folder / TRACKER, 2**12).decode().strip()
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{folder} has neither {TRACKER} nor ranks of Megatron") from None
    is_number = said.isdecimal() and len(said) <= 18
    found = folder / (f"iter_{int(said):07d}" if is_number else "release")
    if not found.is_dir() or not (is_number or said == "release"):
        raise UserError(f"{folder} has no checkpoint {said[:50]} (--step)")
    return found


def open_step(folder: Path) -> "Ranks | Stacked":
    """Opens one checkpoint of either form. Raises: UserError when it is damaged or not whole."""
    return Stacked(folder) if (folder / METADATA).is_file() else Ranks(folder)


def rename(name: str) -> str:
    """Returns a tensor's name in Megatron-Core's words."""
    for old, new in WORDS:
        name = old.sub(new, name)
    return name


class Ranks:
    """A checkpoint of form `torch`: files by tensor and pipeline rank.

    names: {name: its piece on each tensor rank}. args: the training's arguments, {} without.
    left_out: what there is besides the model.
    """

    def __init__(self, folder: Path):
        """Reads the structure of every file."""
        self.folder = folder
        ranks = self._files()
        first = ranks[0, 0].value
        self.args = _arguments(first)
        self.iteration = first.get("iteration", 0)
        self.left_out = sorted(w for w in map(word, first) if not re.fullmatch(_KNOWN, w))
        version = first.get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version < 2:
            raise UserError(
                f"{folder} has checkpoint_version {show(version)}: its queries, keys and "
                "values are in another order; load it with Megatron-LM and save it again"
            )
        self._tensor_ranks = 1 + max(t for t, _ in ranks)
        self._check_args(1 + max(p for _, p in ranks))
        self.names: dict[str, list[Tensor]] = {}
        self._copies: dict[str, list[tuple[int, Tensor]]] = {}  # by rank, of a table's pieces
        self._collect(ranks)

    def read(self, name: str, gated: bool = False) -> np.ndarray:
        """Returns a whole tensor. gated: each rank holds a piece of the gate, then one of up."""
        pieces = [t.read() for t in self.names[name]]
        for rank, copy in self._copies.get(name, ()):
            if not np.array_equal(pieces[rank], copy.read(), equal_nan=True):
                raise UserError(f"{self.folder}: two stages hold {name}, with unlike values")
        if any(p.dtype != pieces[0].dtype for p in pieces):
            raise UserError(f"{self.folder}: {name} is of several types on its tensor ranks")
        cut = CUT.get(".".join(name.split(".")[-2:]))
        if cut is None:
            if any(not np.array_equal(pieces[0], p, equal_nan=True) for p in pieces[1:]):
                raise UserError(f"{self.folder}: {name} is not alike on all tensor ranks")
            return pieces[0]
        if gated and ".linear_fc1." in name:
            halves = [np.split(p, 2) for p in pieces]
            pieces = [h[k] for k in (0, 1) for h in halves]
        return np.concatenate(pieces, cut) if len(pieces) > 1 else pieces[0]

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's type."""
        return self.names[name][0].dtype

    def _files(self) -> dict[tuple[int, int], TorchFile]:
        """Returns {(tensor rank, pipeline rank): file}, none missing."""
        found = {}
        for home in sorted(self.folder.glob("mp_rank_*")):
            rank = RANK.fullmatch(home.name)
            if rank is None:
                raise UserError(f"{home}: experts over ranks are not supported")
            names = ("model_optim_rng.pt", "model_rng.pt")
            file = next((home / n for n in names if (home / n).is_file()), None)
            if file is None:
                raise UserError(f"{home} has no {names[0]}")
            opened = TorchFile(file)
            if not isinstance(opened.value, dict):
                raise UserError(f"{file} holds no dictionary")
            place = int(rank[1]), int(rank[2] or 0)
            if place in found:
                raise UserError(f"{home} is a second folder of tensor and pipeline rank {place}")
            found[place] = opened
        if not found:
            raise UserError(f"{self.folder} has no mp_rank_* folders")
        tensor, pipe = (1 + max(r[d] for r in found) for d in (0, 1))
        places = ((t, p) for t in range(tensor) for p in range(pipe))  # may be 10^14 of them
        if missing := list(itertools.islice((r for r in places if r not in found), 5)):
            words = ", ".join(f"mp_rank_{t:02d}_{p:03d}" for t, p in missing)
            raise UserError(f"{self.folder} lacks {words}")
        return found

    def _check_args(self, pipe: int) -> None:
        for kind, there in (("tensor", self._tensor_ranks), ("pipeline", pipe)):
            said = self.args.get(f"{kind}_model_parallel_size", there)
            if said != there:
                raise UserError(
                    f"{self.folder} has {there} {kind} ranks, its arguments say {show(said)}: "
                    "files are missing or of another run"
                )

    def _collect(self, ranks: dict[tuple[int, int], TorchFile]) -> None:
        """Gathers the model's tensors; layers get their numbers over the pipeline."""
        first = ranks[0, 0].value
        named = (k for k in first if isinstance(k, str) and CHUNK.fullmatch(k))
        chunks = sorted(named, key=_number)
        if not chunks:
            raise UserError(f"{ranks[0, 0].where} has no model")
        stages, before = 1 + max(p for _, p in ranks), 0
        for chunk in chunks:
            for stage in range(stages):
                layers: set[int] = set()
                for rank in range(self._tensor_ranks):
                    file = ranks[rank, stage]
                    for name, tensor in _model_tensors(file, chunk):
                        if layer := LAYER.fullmatch(name):
                            layers.add(int(layer[1]))
                            name = f"decoder.layers.{before + int(layer[1])}.{layer[2]}"
                        self._add(name, rank, tensor, file.where)
                if layers != set(range(len(layers))):
                    some = ", ".join(map(str, sorted(layers)[:20]))
                    raise UserError(f"{ranks[0, stage].where} lacks layers: it has {some}")
                before += len(layers)
        for name, pieces in self.names.items():
            if len(pieces) != self._tensor_ranks:
                raise UserError(f"{self.folder}: {name} is on {len(pieces)} tensor ranks only")

    def _add(self, name: str, rank: int, tensor: Tensor, where: str) -> None:
        pieces = self.names.setdefault(name, [])
        if len(pieces) == rank:
            pieces.append(tensor)
        elif name.startswith(("embedding.", "output_layer.")) and rank < len(pieces):
            self._copies.setdefault(name, []).append((rank, tensor))  # of another stage
        else:
            raise UserError(f"{where}: {name} is there twice, or not on every tensor rank")


class Stacked:
    """A checkpoint of form `torch_dist`, with the members that Ranks has."""

    def __init__(self, folder: Path):
        """Reads the metadata and the arguments."""
        self.folder = folder
        self._files = DcpFolder(folder)
        common = self._common()
        self.args = _arguments(common)
        self.iteration = common.get("iteration", 0)
        self.names: dict[str, Any] = {}
        others = set(self._files.objects) | set(map(word, common)) - {"args"}
        for stored, tensor in self._files.tensors.items():
            name = rename(stored)
            if name.startswith(NOT_MODEL):
                others.add(stored)
            elif name.endswith(NEEDLESS):
                continue
            elif stack := STACKED.fullmatch(name):
                layers = tensor.shape[0] if tensor.shape else 0
                if layers > MAX_LAYERS:
                    raise UserError(f"{folder}: {stored[:200]} stacks {layers:,} layers")
                for i in range(layers):
                    self._add(f"decoder.layers.{i}.{stack[1]}", stored, i)
            else:
                self._add(name, stored, None)
        for stored, unread in self._files.unread.items():
            if not rename(stored).startswith(NOT_MODEL):
                raise UserError(f"{folder}: {stored[:200]} is {unread.what}; {unread.remedy}")
            others.add(stored)
        for name in [n for n in self.names if n.endswith("_w")]:  # a gate apart from its up
            gate, up = self.names.pop(name), self.names.pop(f"{name[:-2]}_v", None)
            if up is None:
                raise UserError(f"{folder} has {name} without {name[:-2]}_v")
            self._add(name.removesuffix("_w"), gate, up)
        heads = {n.split(".")[0].split("/")[0] for n in others if "_extra_state" not in n}
        self.left_out = sorted(heads - {"common_state", "checkpoint_version", "iteration"})

    def _add(self, name: str, *place: Any) -> None:
        if name in self.names:
            raise UserError(f"{self.folder} has two tensors of the name {name[:200]}")
        self.names[name] = place

    def read(self, name: str, gated: bool = False) -> np.ndarray:
        """Returns a whole tensor; gates lie before their ups already."""
        place = self.names[name]
        if isinstance(place[0], tuple):
            return np.concatenate([self._piece(*p) for p in place])
        return self._piece(*place)

    def dtype(self, name: str) -> np.dtype:
        """Returns a tensor's type."""
        place = self.names[name]
        return self._files.tensors[(place[0] if isinstance(place[0], tuple) else place)[0]].dtype

    def _piece(self, stored: str, layer: int | None) -> np.ndarray:
        if layer is None:
            return self._files.view(stored)
        shape = self._files.tensors[stored].shape[1:]
        return self._files.view(stored, Box((layer, *(0,) * len(shape)), (layer + 1, *shape)))[0]

    def _common(self) -> dict:
        """Returns what is alike on all ranks: in a file of its own, or in the folder's objects."""
        name = next((n for n in self._files.objects if n.split("/")[0] == "common_state"), None)
        found: Any = {}
        if (self.folder / COMMON).is_file():
            found = TorchFile(self.folder / COMMON).value
        elif name is not None:
            found = self._files.value(name)
            found = found[0] if isinstance(found, list) and found else found
        if not isinstance(found, dict):
            raise UserError(f"{self.folder}: {COMMON} holds no dictionary")
        return found


def _number(chunk: str) -> int:
    return int(chunk.removeprefix("model") or 0)


def _arguments(found: dict) -> dict[str, Any]:
    """Returns the members of the argparse.Namespace that training saved, as JSON can say them."""
    args = found.get("args")
    state = args.state if isinstance(args, Record) else args
    plain, kept = Plain(), {}
    for name, value in state.items() if isinstance(state, dict) else ():
        try:
            if isinstance(name, str):
                kept[name] = value if isinstance(value, Global) else plain(value)
        except ValueError as error:
            raise UserError(f"argument {name[:200]} of the checkpoint is {error}") from None
    return kept


def _model_tensors(file: TorchFile, chunk: str) -> list[tuple[str, Tensor]]:
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors(file.value.get(chunk, {}), file.where):
        name = rename(stored)
        if name.endswith(NEEDLESS):
            continue
        if isinstance(tensor, Unread):
            raise UserError(f"{file.where}: {stored[:200]} is {tensor.what}; {tensor.remedy}")
        if not isinstance(tensor, Tensor):
            raise UserError(f"{file.where}: {stored[:200]} is no tensor")
        if name in found:
            raise UserError(f"{file.where} has two tensors of the name {name[:200]}")
        found[name] = tensor
    return list(found.items())
