"""Megatron checkpoints as Hugging Face ones: tensors renamed, qkv and gates split, padding cut.

The training's saved arguments become a config.json, so everything that reads a Hugging Face folder
(hf.py, transformers) reads the result. Families: llama, qwen2 (biases of q, k, v), qwen3 (norms of
queries and keys), gpt2. Not there, each an error: experts, multi-latent attention, fp8 weights,
windows, partial or interleaved rotation, norms of weight - 1. The optimizer's state is never taken:
it is cut over data-parallel ranks in ways of its own.

Legend: D width, G key-value heads, R queries of one of them, K head width.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.boxes import Box
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.foreign.pickles import Global, Record
from megajax.foreign.torch_files import (
    METADATA,
    DcpFolder,
    Plain,
    Tensor,
    TorchFile,
    Unread,
    show,
    tensors,
    word,
)
from megajax.layers.mlp import ACTIVATIONS, Activation
from megajax.models import names
from megajax.models.decoder_config import DecoderConfig

# ---- where tensors lie
#
# Where the tensors of a Megatron checkpoint lie: one name and one whole tensor for each.
#
# Two forms, both under iter_0000100/ or release/: `torch`, one file of torch.save for each tensor
# and pipeline rank (mp_rank_01_003/model_optim_rng.pt), of the legacy model or of Megatron-Core;
# and `torch_dist`, a DCP folder, its layers stacked or apart. Layers are numbered over the pipeline
# here: chunk c of stage s follows chunk c of stage s - 1 (interleaving: arXiv 2104.04473). Source
# of names and cuts: NVIDIA/Megatron-LM, tools/checkpoint and megatron/core. No jax.


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
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}
_KNOWN = r"model\d*|args|checkpoint_version|iteration"
# Of no use to a model: state of fp8, rotary tables.
NEEDLESS = ("_extra_state", "rotary_pos_emb.inv_freq")
NOT_MODEL = (
    "optimizer",
    "chained_",
    "rng_state",
    "rerun_state",
    "opt_param_scheduler",
    "common_state",
    "iteration",
    "checkpoint_version",
    "num_floating_point",
    "param_state",
)


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
    step_folder = folder / (f"iter_{int(said):07d}" if is_number else "release")
    if not step_folder.is_dir() or not (is_number or said == "release"):
        raise UserError(f"{folder} has no checkpoint {said[:50]} (--step)")
    return step_folder


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
        pipe = 1 + max(p for _, p in ranks)
        for kind, there in (("tensor", self._tensor_ranks), ("pipeline", pipe)):
            said = self.args.get(f"{kind}_model_parallel_size", there)
            if said != there:
                raise UserError(
                    f"{self.folder} has {there} {kind} ranks, its arguments say {show(said)}: "
                    "files are missing or of another run"
                )
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
        ranks = {}
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
            if place in ranks:
                raise UserError(f"{home} is a second folder of tensor and pipeline rank {place}")
            ranks[place] = opened
        if not ranks:
            raise UserError(f"{self.folder} has no mp_rank_* folders")
        tensor, pipe = (1 + max(r[d] for r in ranks) for d in (0, 1))
        places = ((t, p) for t in range(tensor) for p in range(pipe))  # may be 10^14 of them
        if missing := list(itertools.islice((r for r in places if r not in ranks), 5)):
            words = ", ".join(f"mp_rank_{t:02d}_{p:03d}" for t, p in missing)
            raise UserError(f"{self.folder} lacks {words}")
        return ranks

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
        common: Any = {}
        if (self.folder / COMMON).is_file():
            common = TorchFile(self.folder / COMMON).value
        elif name is not None:
            common = self._files.value(name)
            common = common[0] if isinstance(common, list) and common else common
        if not isinstance(common, dict):
            raise UserError(f"{self.folder}: {COMMON} holds no dictionary")
        return common


def _number(chunk: str) -> int:
    return int(chunk.removeprefix("model") or 0)


def _arguments(state_dict: dict) -> dict[str, Any]:
    """Returns the members of the argparse.Namespace that training saved, as JSON can say them."""
    args = state_dict.get("args")
    state = args.state if isinstance(args, Record) else args
    plain, arguments = Plain(), {}
    for name, value in state.items() if isinstance(state, dict) else ():
        try:
            if isinstance(name, str):
                arguments[name] = value if isinstance(value, Global) else plain(value)
        except ValueError as error:
            raise UserError(f"argument {name[:200]} of the checkpoint is {error}") from None
    return arguments


def _model_tensors(file: TorchFile, chunk: str) -> list[tuple[str, Tensor]]:
    model: dict[str, Tensor] = {}
    for stored, tensor in tensors(file.value.get(chunk, {}), file.where):
        name = rename(stored)
        if name.endswith(NEEDLESS):
            continue
        if isinstance(tensor, Unread):
            raise UserError(f"{file.where}: {stored[:200]} is {tensor.what}; {tensor.remedy}")
        if not isinstance(tensor, Tensor):
            raise UserError(f"{file.where}: {stored[:200]} is no tensor")
        if name in model:
            raise UserError(f"{file.where} has two tensors of the name {name[:200]}")
        model[name] = tensor
    return list(model.items())


# ---- arguments and tensors, as Hugging Face has them


_TABLE, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
Change = Callable[[np.ndarray, DecoderConfig], np.ndarray]
MAX_ITERATION = 10**12  # (chosen) steps that a training may have

# Arguments that become config.json.
READ = {
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups",
    "group_query_attention", "kv_channels", "normalization", "position_embedding_type", "swiglu",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "norm_epsilon", "layernorm_epsilon",
    "untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size", "seq_length",
    "max_position_embeddings", "rotary_base", "use_rope_scaling", "rope_scaling_factor",
    "bias_gelu_fusion", "openai_gelu",
}  # fmt: skip
# Arguments that change what is computed, and the values with which nothing changes. What only one
# of these switches on (moe_*, yarn_*, q_lora_rank) is inert without it.
PLAIN: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0), "num_moe_experts": (None, 0), "multi_latent_attention": (False,),
    "apply_layernorm_1p": (False,), "layernorm_zero_centered_gamma": (False,),
    "rotary_interleaved": (False,), "rotary_percent": (1.0,), "window_size": (None,),
    "squared_relu": (False,), "quick_geglu": (False,), "rotary_seq_len_interpolation_factor":
    (None,), "mtp_num_layers": (None, 0), "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,), "softmax_type": ("vanilla",), "softmax_scale": (None,),
    "no_rope_freq": (None,), "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,), "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,), "qk_l2_norm": (False,), "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,), "use_mup": (False,), "enable_mhc_connections": (False,),
    "is_hybrid_model": (False,), "hybrid_layer_pattern": (None,), "hybrid_override_pattern":
    (None,), "hybrid_attention_ratio": (0.0,), "hybrid_mlp_ratio": (0.0,), "spec": (None,),
    "retro_add_retriever": (False,), "retro_attention_gate": (1,), "mamba_ssm_ratio": (None, 0.0),
    "rope_type": (None, "rope"), "quant_recipe": (None,), "mrope_section": (None,),
}  # fmt: skip
_NAMES = Path(__file__).with_name("megatron_arguments.json")


class MegatronFolder:
    """A checkpoint of a decoder.

    config: its config.json. tensors: {Hugging Face's name: (shape, dtype)}.
    iteration: steps that it was trained. left_out: what is there and was not taken.
    """

    def __init__(
        self,
        path: str | Path,
        step: int | None = None,
        vocab: int | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        """Opens it. step: None: the latest. vocab: words without padding; None: as the arguments
        say, else with it. config: a config.json, for a checkpoint that has no arguments.

        Raises: UserError for one that is damaged, not whole or of a model that we cannot compute.
        """
        self._source = open_step(find_step(path, step))
        self.folder, self.left_out = self._source.folder, self._source.left_out
        self.iteration = self._source.iteration if type(self._source.iteration) is int else 0
        if not 0 <= self.iteration <= MAX_ITERATION:
            raise UserError(f"{self.folder} is of iteration {show(self.iteration)}")
        try:
            if config is None:
                config = to_hf_config(self._source.args, vocab)
            self._cfg = names.from_hf_config(config)
        except UserError:
            raise
        except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
            raise UserError(f"the configuration lacks or distorts {error} (--hf_config)") from None
        self.config = dict(config)
        self._homes = self._find()
        rules, sizes = names.rules(self._cfg), names.sizes(self._cfg)
        shapes = {
            r.name(i): r.their_shape(sizes) for r in rules for i in np.ndindex(r.stack(sizes))
        }
        self.tensors = {
            name: (shapes[name], self._source.dtype(home))
            for name, (home, _) in self._homes.items()
        }

    def view(self, name: str) -> np.ndarray:
        """Returns a tensor under Hugging Face's name. Raises: UserError for damage, other shapes.

        At most two tensors are in memory while it is made.
        """
        home, change = self._homes[name]
        try:
            stored = self._source.read(home, self._cfg.activation == "swiglu")
            if home == _TABLE and self._cfg.tied and _HEAD in self._source.names:
                self._check_head(stored)
            x = change(stored, self._cfg)
        except UserError:
            raise
        except (ValueError, IndexError, TypeError) as error:  # NumPy's words on the shapes
            raise UserError(
                f"{self.folder}: the shapes of {home} are not those of the configuration: {error}"
            ) from None
        if x.shape != self.tensors[name][0]:
            raise UserError(
                f"{self.folder}: {home} gives {name} the shape {x.shape}, the configuration "
                f"says {self.tensors[name][0]}"
            )
        return x

    def _check_head(self, table: np.ndarray) -> None:
        """Refuses a head that differs from the table, which the arguments say it is."""
        if not np.array_equal(table, self._source.read(_HEAD), equal_nan=True):
            raise UserError(
                f"{self.folder}: {_HEAD} differs from {_TABLE}, and the configuration ties the two "
                "(untie_embeddings_and_output_weights=False); if it is a head of its own, give a "
                'config.json with "tie_word_embeddings": false (--hf_config)'
            )

    def _find(self) -> dict[str, tuple[str, Change]]:
        """Returns {Hugging Face's name: (Megatron's, what to do)}; refuses strangers."""
        cfg, source = self._cfg, self._source
        table = _GPT2 if names.family(cfg) == "gpt2" else _LLAMA
        sizes, homes = names.sizes(cfg), {}
        for rule in names.rules(cfg):
            home, change = table[rule.theirs]
            for index in np.ndindex(rule.stack(sizes)):
                stored = home.format(**dict(zip("i", index, strict=False)))
                if stored not in source.names:
                    raise UserError(f"{self.folder} has no {stored}, of {rule.name(index)}")
                homes[rule.name(index)] = stored, change
        used = {home for home, _ in homes.values()}
        used |= {_HEAD} if cfg.tied else set()  # a copy of the table, which `view` compares
        if strangers := sorted(set(source.names) - used):
            raise UserError(
                f"{self.folder} has tensors that a {names.family(cfg)} does not: "
                f"{', '.join(strangers[:5])}"
            )
        return homes


def to_hf_config(args: Mapping[str, Any], vocab: int | None = None) -> dict[str, Any]:
    """Returns the config.json of a training's arguments (megatron/training/arguments.py).

    Raises: UserError for an argument that is missing, or that we cannot compute with.
    """
    if not args:
        raise UserError("the checkpoint has no arguments; give its config.json (--hf_config)")
    for name, value in args.items():
        _check_argument(name, value)
    try:
        kind = _family(args)
        words = vocab or args.get("vocab_size") or args["padded_vocab_size"]
        positions = args.get("max_position_embeddings") or args["seq_length"]
        eps = args["norm_epsilon"] if "norm_epsilon" in args else args["layernorm_epsilon"]
        tied = not args["untie_embeddings_and_output_weights"]
        common = {"model_type": kind, "vocab_size": words, "tie_word_embeddings": tied}
        heads, width = args["num_attention_heads"], args["hidden_size"]
        if kind == "gpt2":
            return common | {
                "n_layer": args["num_layers"],
                "n_embd": width,
                "n_head": heads,
                "n_inner": args["ffn_hidden_size"],
                "n_positions": positions,
                "layer_norm_epsilon": eps,
                "activation_function": _word("gelu_tanh"),
            }
        grouped = args.get("group_query_attention", False)
        return common | {
            "num_hidden_layers": args["num_layers"],
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": args["num_query_groups"] if grouped else heads,
            "head_dim": args.get("kv_channels") or width // heads,
            "intermediate_size": args["ffn_hidden_size"],
            "rms_norm_eps": eps,
            "max_position_embeddings": positions,
            "hidden_act": _word("swiglu"),
            "rope_theta": float(args.get("rotary_base", 10000)),
            "rope_scaling": _scaling(args),
        }
    except KeyError as error:
        raise UserError(
            f"the checkpoint's arguments lack {error}; give its config.json (--hf_config)"
        ) from None


def _word(activation: Activation) -> str:
    return ACTIVATIONS[activation].hugging_face[0]


@functools.cache
def _known() -> frozenset[str]:
    """Returns the names of Megatron's arguments (tests/golden/make_megatron_arguments.py)."""
    return frozenset(json.loads(_NAMES.read_text()))


def _check_argument(name: str, value: Any) -> None:
    """Refuses an argument that is not read, not known to be inert, and not switched off."""
    shown = value if isinstance(value, bool | int | float) else show(value)
    if name in PLAIN:
        if not any(value == v and type(value) is type(v) for v in PLAIN[name]) and value:
            raise UserError(f"{name}={shown} is not supported, only {PLAIN[name][0]}")
    elif name not in READ and name not in _known() and value not in (None, False, 0, "", [], {}):
        raise UserError(
            f"{name}={shown} is no argument of Megatron-LM that is known here, so it may change "
            "what the model computes; if it does not, give the model's config.json (--hf_config)"
        )


def _family(args: Mapping[str, Any]) -> str:
    """Returns the model type of a shape. Raises: UserError when there is none."""
    norm, place = args.get("normalization", "LayerNorm"), args["position_embedding_type"]
    swiglu, biased = args.get("swiglu", False), args.get("add_bias_linear", True)
    qkv_bias, qk_norm = args.get("add_qkv_bias", False), args.get("qk_layernorm", False)
    if place != "rope" and args.get("use_rotary_position_embeddings"):
        raise UserError(
            f"use_rotary_position_embeddings=True and position_embedding_type={show(place)} say "
            "two things; give the model's config.json (--hf_config)"
        )
    if (norm, place, swiglu, biased) == ("RMSNorm", "rope", True, False):
        if not (qkv_bias and qk_norm):
            return "qwen2" if qkv_bias else "qwen3" if qk_norm else "llama"
    elif (norm, place, swiglu, biased) == ("LayerNorm", "learned_absolute", False, True):
        tanh = args.get("bias_gelu_fusion", True) or args.get("openai_gelu", False)
        if not args.get("add_position_embedding", True):
            raise UserError("add_position_embedding=False is not supported, only True")
        if tanh and not qk_norm and not args.get("group_query_attention", False):
            return "gpt2"
    raise UserError(
        f"no family of ours has normalization={show(norm)}, position_embedding_type={show(place)}, "
        f"swiglu={show(swiglu)}, add_bias_linear={show(biased)}, add_qkv_bias={show(qkv_bias)}, "
        f"qk_layernorm={show(qk_norm)}; llama, qwen2, qwen3 and gpt2 (GELU by tanh) can be imported"
    )


def _scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    if not args.get("use_rope_scaling", False):
        return None
    return {
        "rope_type": "llama3",
        "factor": float(args.get("rope_scaling_factor", 8.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


# ---- one tensor of theirs -> one of Hugging Face's


def _same(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return x


def _turned(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return x.T  # GPT-2's Conv1D holds (in, out)


def _words(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    return x[: cfg.vocab]  # what pads it is noise there, not zeros


def _heads(part: int) -> Change:
    """Makes the function that takes queries, keys or values out of (G (R + 2) K, ...)."""

    def take(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
        ratio = cfg.heads // cfg.kv_heads
        shape = (cfg.kv_heads, ratio + 2, cfg.head_width)
        if x.shape[0] != np.prod(shape):
            raise UserError(f"a linear_qkv of {x.shape} does not hold {shape} (groups, heads, K)")
        split = x.reshape(*shape, *x.shape[1:])
        which = (slice(0, ratio), slice(ratio, ratio + 1), slice(ratio + 1, None))[part]
        return split[:, which].reshape(-1, *x.shape[1:])

    return take


def _half(part: int) -> Change:
    """Makes the function that takes the gate or the up of (2 F, D)."""
    return lambda x, cfg: x[part * (x.shape[0] // 2) :][: x.shape[0] // 2]


def _qkv(x: np.ndarray, cfg: DecoderConfig) -> np.ndarray:
    """All queries, all keys, all values, as GPT-2 has them."""
    joined = np.concatenate([_heads(part)(x, cfg) for part in range(3)])
    return joined.T


def _llama() -> dict[str, tuple[str, Change]]:
    ours, theirs = "decoder.layers.{i}", "model.layers.{i}"
    rows: dict[str, tuple[str, Change]] = {
        "model.embed_tokens.weight": (_TABLE, _words),
        "lm_head.weight": (_HEAD, _words),
        "model.norm.weight": ("decoder.final_layernorm.weight", _same),
    }
    attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
    for part, letter in enumerate("qkv"):
        for kind in ("weight", "bias"):
            name = f"{theirs}.self_attn.{letter}_proj.{kind}"
            rows[name] = (f"{attention}.linear_qkv.{kind}", _heads(part))
        norm = f"{theirs}.self_attn.{letter}_norm.weight"
        rows[norm] = (f"{attention}.{letter}_layernorm.weight", _same)
    return rows | {
        f"{theirs}.self_attn.o_proj.weight": (f"{attention}.linear_proj.weight", _same),
        f"{theirs}.mlp.gate_proj.weight": (f"{mlp}.linear_fc1.weight", _half(0)),
        f"{theirs}.mlp.up_proj.weight": (f"{mlp}.linear_fc1.weight", _half(1)),
        f"{theirs}.mlp.down_proj.weight": (f"{mlp}.linear_fc2.weight", _same),
        f"{theirs}.input_layernorm.weight": (f"{ours}.input_layernorm.weight", _same),
        f"{theirs}.post_attention_layernorm.weight": (f"{ours}.pre_mlp_layernorm.weight", _same),
    }


def _gpt2() -> dict[str, tuple[str, Change]]:
    ours, theirs = "decoder.layers.{i}", "transformer.h.{i}"
    rows: dict[str, tuple[str, Change]] = {
        "transformer.wte.weight": (_TABLE, _words),
        "transformer.wpe.weight": ("embedding.position_embeddings.weight", _same),
        "lm_head.weight": (_HEAD, _words),
    }
    for name, home, change in (
        ("attn.c_attn", "self_attention.linear_qkv", _qkv),
        ("attn.c_proj", "self_attention.linear_proj", _turned),
        ("mlp.c_fc", "mlp.linear_fc1", _turned),
        ("mlp.c_proj", "mlp.linear_fc2", _turned),
        ("ln_1", "input_layernorm", _same),
        ("ln_2", "pre_mlp_layernorm", _same),
    ):
        for kind in ("weight", "bias"):
            rows[f"{theirs}.{name}.{kind}"] = (f"{ours}.{home}.{kind}", change)
    for kind in ("weight", "bias"):
        rows[f"transformer.ln_f.{kind}"] = (f"decoder.final_layernorm.{kind}", _same)
    return rows


_LLAMA, _GPT2 = _llama(), _gpt2()
