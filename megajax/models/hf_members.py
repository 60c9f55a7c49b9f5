"""Members of a Hugging Face config.json that name maps read, and of what kind each must be."""

import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megajax.core.errors import UserError

_COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "original_max_position_embeddings", "n_layer", "n_embd", "n_head", "n_inner", "n_positions",
    "num_hidden_groups", "num_labels", "dim", "hidden_dim", "n_layers", "n_heads",
)  # fmt: skip
_STACKED = ("num_hidden_layers", "n_layer", "n_layers", "num_local_experts", "num_experts",
            "num_hidden_groups")  # fmt: skip
MOST = 2**31 - 1  # (chosen) of a size; the product of two is one that NumPy can count to
MOST_STACKED = 2**14  # (chosen: ten times the deepest networks) layers, or experts
_WHOLE = ("max_window_layers", "pad_token_id", "type_vocab_size", "embedding_size")
_POSITIVE = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "rope_theta", "factor",
             "low_freq_factor", "high_freq_factor")  # fmt: skip
_SHARES = ("hidden_dropout_prob", "dropout")
_FLAGS = ("tie_word_embeddings", "norm_topk_prob", "use_sliding_window")
_TEXTS = ("model_type", "hidden_act", "activation", "rope_type", "type")
_LISTS = ("layer_types", "architectures")
_OBJECTS = ("rope_scaling", "rope_parameters", "id2label")


def _is_number(x: Any) -> bool:
    # A comparison, which is False for NaN and takes whole numbers that no float holds.
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return is_number and abs(x) <= sys.float_info.max


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(word, str) for word in x)


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    f"a whole number in [1, {MOST}]": (_COUNTS, lambda x: _is_whole(x) and 1 <= x <= MOST),
    f"a whole number in [1, {MOST_STACKED}]": (_STACKED, lambda x: x <= MOST_STACKED),
    f"a whole number in [0, {MOST}]": (_WHOLE, lambda x: _is_whole(x) and 0 <= x <= MOST),
    "a finite number above 0": (_POSITIVE, lambda x: _is_number(x) and x > 0),
    "a number in [0, 1)": (_SHARES, lambda x: _is_number(x) and 0 <= x < 1),
    "true or false": (_FLAGS, lambda x: isinstance(x, bool)),
    "a string": (_TEXTS, lambda x: isinstance(x, str)),
    "a list of strings": (_LISTS, _is_texts),
    "an object": (_OBJECTS, lambda x: isinstance(x, dict)),
}


def check_members(found: Any) -> dict[str, Any]:
    """Returns a config.json's members; those that are null count as missing.

    Raises: UserError for what is no object, and for a member of another kind than it must be.
    """
    if not isinstance(found, Mapping):
        raise UserError(f"config.json must hold a JSON object, not {reprlib.repr(found):.40}")
    kept = dict(found)
    for kind, (names, is_legal) in _KINDS.items():
        for name in names:
            value = kept.get(name)
            if value is None:
                kept.pop(name, None)
            elif not is_legal(value):
                raise UserError(
                    f"config.json: {name} is {reprlib.repr(value):.60}, it must be {kind}"
                )
    return kept
