"""Hugging Face name maps of the encoders: bert, roberta, distilbert, albert.

The counterpart of names.py for EncoderConfig, with its rules. Which head a folder has is in its
`architectures`: ...ForMaskedLM, ...ForSequenceClassification, or ...Model, which has none; of other
classes, and of the pre-training ones, the head for masked tokens is read. Left out: DeBERTa, whose
attention this encoder does not compute, and position embeddings that are relative or not learned.

Legend: D width, F feed-forward, H heads, K head width, V vocabulary, N positions, Y token types, W
table width, C classes, X the width as a result.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from megajax.core.errors import UserError
from megajax.layers.mlp import ACTIVATIONS
from megajax.models.encoder_config import EncoderConfig, Head
from megajax.models.hf_members import check_kinds, check_members, require, spelled
from megajax.models.names import Rule

Family = Literal["bert", "roberta", "distilbert", "albert"]
FAMILIES = get_args(Family)
MOST_LABELS = 2**16  # (chosen) classes of a classifier whose names are read

# Parts of checkpoints that no head of ours has: next-sentence prediction and its pooler, buffers.
IGNORED = (
    ".position_ids",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
    "sop_classifier.classifier.weight",
    "sop_classifier.classifier.bias",
)
POOLERS = (".pooler.dense.weight", ".pooler.dense.bias", ".pooler.weight", ".pooler.bias")
HEADS = ("cls.", "lm_head.", "vocab_", "predictions.", "classifier.", "pre_classifier.")
# What the tied product with the table is called, where it has a name of its own.
_DECODERS = {
    "bert": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
    "distilbert": "vocab_projector",
    "albert": "predictions.decoder",
}

# {ours: (dims of the weight, dims of the bias)}, of the blocks' linears; the rest are norms.
_DIMS = {
    "attention.query": ("HKD->DHK", "HK->HK"),
    "attention.key": ("HKD->DHK", "HK->HK"),
    "attention.value": ("HKD->DHK", "HK->HK"),
    "attention.out": ("DHK->HKD", "D->D"),
    "mlp.up": ("FD->DF", "F->F"),
    "mlp.down": ("DF->FD", "D->D"),
}
# Where each family keeps a block, and what they call its members, in this order: the six above, the
# norm after attention, the norm after the MLP.
_MEMBERS = (*_DIMS, "attention_norm", "mlp_norm")
_BERT = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
    "attention.output.LayerNorm",
    "output.LayerNorm",
)
_DISTILBERT = (
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "ffn.lin1",
    "ffn.lin2",
    "sa_layer_norm",
    "output_layer_norm",
)
_ALBERT = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.dense",
    "ffn",
    "ffn_output",
    "attention.LayerNorm",
    "full_layer_layer_norm",
)
_BLOCKS = {
    "bert": ("bert.encoder.layer.{i}", _BERT),
    "roberta": ("roberta.encoder.layer.{i}", _BERT),
    "distilbert": ("distilbert.transformer.layer.{i}", _DISTILBERT),
    "albert": ("albert.encoder.albert_layer_groups.{i}.albert_layers.0", _ALBERT),
}
# (dense, its norm, bias of the tied product) and (dense, classes).
_MLM = {
    "bert": (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
}
_CLASSIFY = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "classifier"),
    "albert": ("albert.pooler", "classifier"),
}


def sizes(cfg: EncoderConfig) -> dict[str, int]:
    """Returns {letter of a rule's dims: size}; '{i}': the blocks."""
    return {
        "{i}": cfg.layers,
        "D": cfg.width,
        "F": cfg.mlp,
        "H": cfg.heads,
        "K": cfg.head_width,
        "V": cfg.vocab,
        "N": cfg.max_positions,
        "Y": cfg.types,
        "W": cfg.table_width,
        "C": cfg.labels,
        "X": cfg.width,
    }


def rules(cfg: EncoderConfig) -> list[Rule]:
    """Returns one rule for each leaf. Raises: UserError when no family has this shape."""
    kind = family(cfg)
    home, names = _BLOCKS[kind]
    mapped = []
    for member, theirs in zip(_MEMBERS, names, strict=True):
        dims = _DIMS.get(member)
        if dims is None:
            mapped += _norm(f"blocks.{member}", f"{home}.{theirs}", "D")
        else:
            mapped += _linear(f"blocks.{member}", f"{home}.{theirs}", *dims)
    tables = {"tokens": ("word", "V"), "positions": ("position", "N"), "types": ("token_type", "Y")}
    for ours, (theirs, rows) in tables.items():
        name = f"{kind}.embeddings.{theirs}_embeddings.weight"
        if ours != "types" or cfg.types:
            mapped.append(Rule(ours, name, f"{rows}W->{rows}W"))
    mapped += _norm("embed_norm", f"{kind}.embeddings.LayerNorm", "W")
    if cfg.embed_width:
        name = f"{kind}.encoder.embedding_hidden_mapping_in"
        mapped += _linear("widen", name, "DW->WD", "D->D")
    if cfg.head == "classify":
        dense, classes = _CLASSIFY[kind]
        mapped += _linear("dense", dense, "XD->DX", "X->X")
        return mapped + _linear("classes", classes, "CD->DC", "C->C")
    if cfg.head == "none":
        return mapped
    dense, norm, bias = _MLM[kind]
    mapped += _linear("dense", dense, "WD->DW", "W->W") + _norm("head_norm", norm, "W")
    return [*mapped, Rule("head_bias", bias, "V->V")]


def _linear(ours: str, theirs: str, weight: str, bias: str) -> list[Rule]:
    return [Rule(ours, f"{theirs}.weight", weight), Rule(f"{ours}_bias", f"{theirs}.bias", bias)]


def _norm(ours: str, theirs: str, width: str) -> list[Rule]:
    dims = f"{width}->{width}"
    return [
        Rule(f"{ours}.scale", f"{theirs}.weight", dims),
        Rule(f"{ours}.shift", f"{theirs}.bias", dims),
    ]


def spellings(name: str) -> tuple[str, ...]:
    """Returns how files may call a tensor: those of a network without a head leave the family out,
    and the first BERTs call a norm's two gamma and beta."""
    family, _, bare = name.partition(".")
    names = (name, bare) if family in FAMILIES else (name,)
    old = [n.replace("LayerNorm.weight", "LayerNorm.gamma") for n in names]
    return *names, *(n.replace("LayerNorm.bias", "LayerNorm.beta") for n in old)


def is_needless(name: str, cfg: EncoderConfig) -> bool:
    """Tells whether a tensor of a checkpoint has no part in this network: a head that config.json
    does not name, heads of pre-training, buffers."""
    if cfg.head == "none" and name.startswith(HEADS):
        return True
    pooler = cfg.head != "classify" and f".{name}".endswith(POOLERS)
    return pooler or name.endswith(IGNORED)


def copies(cfg: EncoderConfig) -> dict[str, str]:
    """Returns {tensor that a file may hold again: the tied one that it must equal}."""
    if cfg.head != "mlm":
        return {}
    kind = family(cfg)
    homes = {r.ours: r.theirs for r in rules(cfg)}
    again = {f"{_DECODERS[kind]}.weight": homes["tokens"]}
    if kind != "distilbert":  # whose bias has this name only
        again[f"{_DECODERS[kind]}.bias"] = homes["head_bias"]
    return again


def free(cfg: EncoderConfig) -> set[str]:
    """Returns the members that may differ from a folder whose weights are loaded."""
    return {"dropout", "vocab_multiple", "norm_eps"}


def family(cfg: EncoderConfig) -> Family:
    """Returns the Hugging Face model type of this shape. Raises: UserError when there is none."""
    kind: Family = "bert"
    if cfg.embed_width:
        kind = "albert"
    elif cfg.position_offset:
        kind = "roberta"
    elif not cfg.types:
        kind = "distilbert"
    fixed: dict[str, Any] = {"repeats": 1, "position_offset": 0, "pooler": "tanh"}
    if kind == "distilbert":
        fixed |= {"pooler": "relu", "norm_eps": 1e-12}
    for name in {"albert": ("repeats",), "roberta": ("position_offset",)}.get(kind, ()):
        del fixed[name]
    wrong = [f"{n} {getattr(cfg, n)}" for n, v in fixed.items() if getattr(cfg, n) != v]
    if kind != "distilbert" and not cfg.types:
        wrong.append("no token types")
    if wrong:
        raise UserError(f"no Hugging Face family has this shape: like {kind}, but {wrong}")
    return kind


# ---- config.json

_CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "distilbert": "DistilBert",
    "albert": "Albert",
}
_HEADS: dict[str, Head] = {
    "ForMaskedLM": "mlm",
    "ForSequenceClassification": "classify",
    "Model": "none",
}
# DistilBERT's own words for what the others call alike.
_DISTIL_WORDS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
}


def from_hf_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Returns our configuration of a config.json. Raises: UserError for what we cannot compute."""
    members, config = config, check_members(config, FAMILIES)
    kind = config["model_type"]
    if kind == "distilbert":
        config = config | {word: config[theirs] for word, theirs in _DISTIL_WORDS.items()}
    head = _head(config.get("architectures") or ())
    if head == "mlm":
        require(config, tie_word_embeddings=True)
    if head == "classify":
        require(config, problem_type="single_label_classification")
    word = "activation" if kind == "distilbert" else "hidden_act"
    activation = spelled(word, config["hidden_act"], ("gelu", "gelu_tanh"))
    layers = config["num_hidden_layers"]
    groups = config["num_hidden_groups"] if kind == "albert" else layers
    if layers % groups:
        raise UserError(f"config.json: num_hidden_groups={groups} must divide {layers} layers")
    return EncoderConfig(
        layers=groups,
        repeats=layers // groups,
        width=config["hidden_size"],
        heads=config["num_attention_heads"],
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        position_offset=_pad(config) + 1 if kind == "roberta" else 0,
        types=0 if kind == "distilbert" else config["type_vocab_size"],
        embed_width=config["embedding_size"] if kind == "albert" else 0,
        activation=activation,  # type: ignore[arg-type]
        norm_eps=1e-12 if kind == "distilbert" else config["layer_norm_eps"],
        dropout=config["hidden_dropout_prob"],
        head=head,
        labels=len(label_names(members)) if head == "classify" else 2,
        pooler="relu" if kind == "distilbert" else "tanh",
    )


def _pad(config: Mapping[str, Any]) -> int:
    pad = config.get("pad_token_id")
    if type(pad) is not int or not 0 <= pad < config["max_position_embeddings"]:
        raise UserError(
            f"config.json: pad_token_id is {pad!r:.60}; a RoBERTa counts positions from it, so it "
            "must be a whole number below max_position_embeddings="
            f"{config['max_position_embeddings']}"
        )
    return pad


def _head(architectures: Sequence[str]) -> Head:
    named = (head for name in architectures for end, head in _HEADS.items() if name.endswith(end))
    return next(named, "mlm")


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a classifier's classes, in the order of their numbers; LABEL_0, LABEL_1,
    ... where config.json has none, as transformers calls them.

    Raises: UserError for members that contradict each other, or that do not number the classes.
    """
    config = check_kinds(config)
    named, count = config.get("id2label"), config.get("num_labels")
    if named is None:
        names = [f"LABEL_{i}" for i in range(2 if count is None else min(count, MOST_LABELS + 1))]
    else:
        names = [named.get(str(i)) for i in range(len(named))]
    if not 0 < len(names) <= MOST_LABELS or not all(isinstance(name, str) for name in names):
        raise UserError(
            "config.json: id2label must give each of the numbers 0, 1, ... of its classes a name, "
            f"at most {MOST_LABELS} of them"
        )
    if count not in (None, len(names)):
        raise UserError(f"config.json: num_labels={count}, but id2label has {len(names)} classes")
    numbered = config.get("label2id")
    if named is not None and numbered:
        wrong = [n for i, n in enumerate(names) if names.count(n) == 1 and numbered.get(n, i) != i]
        if wrong or len(numbered) > len(names):
            raise UserError(
                f"config.json: id2label and label2id contradict each other ({', '.join(wrong[:5])})"
            )
    return tuple(str(name) for name in names)


def to_hf_config(
    cfg: EncoderConfig, dtype: str, labels: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns the config.json that `from_hf_config` and transformers read.

    labels: the names of a classifier's classes; None: they have none (LABEL_0, LABEL_1, ...).
    """
    if labels is None or cfg.head != "classify":
        labels = [f"LABEL_{i}" for i in range(cfg.labels)]
    if len(labels) != cfg.labels:
        raise UserError(f"{len(labels)} names cannot name the {cfg.labels} classes of the model")
    kind = family(cfg)
    head = {value: end for end, value in _HEADS.items()}[cfg.head]
    shared = {
        "hidden_size": cfg.width,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers * cfg.repeats,
        "num_attention_heads": cfg.heads,
        "hidden_act": ACTIVATIONS[cfg.activation].hugging_face[0],
        "hidden_dropout_prob": cfg.dropout,
    }
    if kind == "distilbert":
        shared = {_DISTIL_WORDS[word]: value for word, value in shared.items()}
    else:
        shared |= {"type_vocab_size": cfg.types, "layer_norm_eps": cfg.norm_eps}
    if kind == "albert":
        shared |= {
            "embedding_size": cfg.embed_width,
            "num_hidden_groups": cfg.layers,
            "inner_group_num": 1,
        }
    if kind == "roberta":
        shared["pad_token_id"] = cfg.position_offset - 1
    return shared | {
        "architectures": [_CLASSES[kind] + head],
        "model_type": kind,
        "vocab_size": cfg.vocab,
        "max_position_embeddings": cfg.max_positions,
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }
