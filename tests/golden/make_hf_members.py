"""Makes megajax/models/hf_members.json and tests/golden/hf_variants.npz with transformers.

Run it in a separate environment with torch and transformers, which megajax does not need:

    python tests/golden/make_hf_members.py table       # members of transformers' configurations
    python tests/golden/make_hf_members.py variants    # variants of config.json and their logits
    python tests/golden/make_hf_members.py check DIR   # logits of folders that megajax wrote
    python tests/golden/make_hf_members.py export DIR  # writes them, in megajax' environment

A variant is a small model's config.json with members changed, absent, null or contradictory, and
what transformers makes of it: logits of a few tokens, or a refusal. Its weights are drawn by name
(`weights`), so both environments have them and no file holds them. tests/checkpoint/
test_hf_variants.py compares. Made with transformers 5.24.0, torch 2.13.0.
"""

import itertools
import json
import pathlib
import sys
import tempfile
import zlib

import numpy as np

HERE = pathlib.Path(__file__).parent
TABLE = HERE.parents[1] / "megajax" / "models" / "hf_members.json"
VARIANTS = HERE / "hf_variants.npz"
DECODERS = "gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"
TABLED = "gpt_oss", "deepseek_v3"  # decoders without variants (make_hf_experts.py)
ENCODERS = "bert", "roberta", "distilbert", "albert"
LATER = "gemma3_text", "olmo2", "smollm3", "phi3"  # whose members alone are in the table
PARTS = "qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision"  # whose members alone are needed
REMOVE = "<absent>"
MOST = 100_000  # parameters; a variant of more has sizes by default, which no small file has
VOCAB = 24
LENGTHS = 12, 5
PLACES = 4, 11  # of a row, whose logits are kept

SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
ROPE = SMALL | dict(num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu")
BERT = SMALL | dict(hidden_act="gelu", type_vocab_size=2, layer_norm_eps=1e-6, pad_token_id=0)
# What each family's variants begin from; members that are not here are absent.
BASES = {
    "gpt2": dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64,
                 layer_norm_epsilon=1e-5, activation_function="gelu_new"),
    "llama": ROPE | dict(head_dim=4, tie_word_embeddings=False),
    "mistral": ROPE | dict(head_dim=4, sliding_window=5),
    "qwen2": ROPE | dict(use_sliding_window=False, max_window_layers=0, sliding_window=5),
    "qwen3": ROPE | dict(head_dim=6, use_sliding_window=False, max_window_layers=0),
    "mixtral": ROPE | dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": ROPE | dict(head_dim=6, num_experts=4, num_experts_per_tok=2,
                             moe_intermediate_size=12, norm_topk_prob=True),
    "bert": BERT,
    "roberta": BERT | dict(pad_token_id=1),
    "distilbert": dict(vocab_size=VOCAB, dim=16, hidden_dim=20, n_layers=2, n_heads=4,
                       max_position_embeddings=64, activation="gelu"),
    "albert": BERT | dict(embedding_size=8, num_hidden_groups=1, hidden_act="gelu_new"),
}  # fmt: skip
CLASSES = dict(
    gpt2="GPT2LMHeadModel",
    llama="LlamaForCausalLM",
    mistral="MistralForCausalLM",
    qwen2="Qwen2ForCausalLM",
    qwen3="Qwen3ForCausalLM",
    mixtral="MixtralForCausalLM",
    qwen3_moe="Qwen3MoeForCausalLM",
    bert="BertForMaskedLM",
    roberta="RobertaForMaskedLM",
    distilbert="DistilBertForMaskedLM",
    albert="AlbertForMaskedLM",
)


def base(family: str) -> dict:
    """Returns the config.json that a family's variants begin from."""
    return {"model_type": family, "architectures": [CLASSES[family]]} | BASES[family]


def changed(config: dict, changes: dict) -> dict:
    """Returns a config.json with members set, or removed."""
    both = config | changes
    return {name: value for name, value in both.items() if value != REMOVE}


def weights(shapes: dict) -> dict:
    """Returns float32 tensors, each drawn by its name."""
    tensors = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        x = rng.standard_normal(shape, np.float32)
        is_scale = "norm" in name.lower() and name.endswith("weight") or "ln_" in name
        tensors[name] = (1 + 0.2 * x if is_scale else 0.5 * x).astype(np.float32)
    return tensors


def inputs(family: str) -> dict:
    """Returns the tokens that every variant of a family computes with; encoders' end in padding."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(4, VOCAB, (2, max(LENGTHS))).astype(np.int32)
    types = rng.integers(0, 2, tokens.shape).astype(np.int32)
    if family in DECODERS:
        return {"tokens": tokens}
    return {"tokens": tokens, "types": types, "lengths": np.asarray(LENGTHS, np.int32)}


def head_of(config: dict) -> str:
    """Returns what an encoder of this config.json predicts."""
    name = (config.get("architectures") or [""])[0]
    ends = {"ForSequenceClassification": "classify", "Model": "none"}
    return next((head for end, head in ends.items() if name.endswith(end)), "mlm")


# ---- the variants


def member_variants(family: str, members: dict) -> dict:
    """Returns {name: changes}: each member absent, null and with other values."""
    variants, start = {}, base(family)
    for name, member in members.items():
        default = start.get(name, member["default"])
        values = [REMOVE, None]
        if isinstance(default, bool):
            values += [not default]
        elif isinstance(default, int):
            values += [default * 2]
        elif isinstance(default, float):
            values += [default * 10]
        elif default is None:
            values += [3]
        for value in values:
            if value != start.get(name, REMOVE) or type(value) is not type(start.get(name)):
                variants[f"{name}={value}"] = {name: value}
    return variants


ACTIVATIONS = (
    "gelu gelu_new gelu_pytorch_tanh gelu_fast gelu_python gelu_python_tanh gelu_accurate gelu_10 "
    "quick_gelu silu swish relu relu2 relu6 tanh sigmoid mish linear laplace leaky_relu"
).split()
LLAMA3 = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
OLD = "original_max_position_embeddings"


def rope_variants() -> dict:
    """Returns spellings of the rotary settings of transformers 4 and 5, contradictory ones too."""
    gone = {"rope_theta": REMOVE}
    scalings = {
        "default": {"rope_type": "default"}, "type default": {"type": "default"},
        "linear": {"type": "linear", "factor": 2.0}, "linear 1": {"type": "linear", "factor": 1.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "dynamic 1": {"rope_type": "dynamic", "factor": 1.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, OLD: 16},
        "yarn 1": {"rope_type": "yarn", "factor": 1.0, OLD: 64},
        "longrope": {"rope_type": "longrope", "short_factor": [2.0] * 2, "long_factor": [2.0] * 2,
                     OLD: 16},
        "llama3": {"rope_type": "llama3", OLD: 16} | LLAMA3,
        "llama3 as type": {"type": "llama3", OLD: 16} | LLAMA3,
        "llama3 of positions": {"rope_type": "llama3"} | LLAMA3,
        "llama3 without low": {"rope_type": "llama3", OLD: 16, "factor": 4.0,
                               "high_freq_factor": 4.0},
        "llama3 1": {"rope_type": "llama3", OLD: 16} | LLAMA3 | {"factor": 1.0},
        "llama3 null": {"rope_type": "llama3", OLD: 16} | LLAMA3 | {"factor": None},
        "two types": {"type": "linear", "rope_type": "default", "factor": 2.0},
        "two types turned": {"type": "default", "rope_type": "linear", "factor": 2.0},
        "type null": {"rope_type": None}, "unknown": {"rope_type": "su", "factor": 2.0},
        "mrope": {"type": "mrope", "mrope_section": [1, 1]},
        "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
        "factor without type": {"factor": 2.0}, "empty": {},
        "nested": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
        "strange": {"rope_type": "default", "strange": 1},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    }  # fmt: skip
    variants = {}
    for name, scaling in scalings.items():
        variants[f"scaling {name}"] = {"rope_scaling": scaling}
        variants[f"parameters {name}"] = {"rope_parameters": scaling}
        variants[f"parameters {name}, theta"] = gone | {
            "rope_parameters": scaling | {"rope_theta": 500.0}
        }
    return variants | {
        "theta absent": gone, "theta null": {"rope_theta": None}, "theta 5": {"rope_theta": 500},
        "theta text": {"rope_theta": "500"}, "theta 0": {"rope_theta": 0},
        "theta twice": {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 100.0}},
        "theta twice typed": {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 100.0,
                                                                      "rope_type": "default"}},
        "theta in scaling": {"rope_scaling": {"rope_type": "default", "rope_theta": 100.0}},
        "both dicts": {"rope_scaling": {"rope_type": "default", "rope_theta": 100.0},
                       "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        "both dicts, parts": {"rope_scaling": {"rope_type": "llama3", OLD: 16} | LLAMA3,
                              "rope_parameters": {"rope_theta": 300.0}},
        "scaling null": {"rope_scaling": None}, "parameters null": {"rope_parameters": None},
        "all null": {"rope_scaling": None, "rope_parameters": None, "rope_theta": None},
        "all absent": gone, "partial": {"partial_rotary_factor": 0.5},
        "partial 1": {"partial_rotary_factor": 1.0},
        "old positions above": {OLD: 8, "rope_scaling": {"rope_type": "llama3", OLD: 16} | LLAMA3},
        "old positions": {OLD: 8, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
        "old positions alone": {OLD: 8}, "rotary_pct": {"rotary_pct": 0.5},
        "rotary_dim": {"rotary_dim": 2}, "interleaved": {"rope_interleaved": True},
        "not interleaved": {"rope_interleaved": False},
    }  # fmt: skip


def head_variants(family: str) -> dict:
    """Returns head widths and numbers of heads that agree, and that do not."""
    variants = {
        "kv absent": {"num_key_value_heads": REMOVE},
        "kv null": {"num_key_value_heads": None},
        "kv 1": {"num_key_value_heads": 1},
        "kv 3": {"num_key_value_heads": 3},
        "kv 0": {"num_key_value_heads": 0},
        "heads 3": {"num_attention_heads": 3},
        "heads 2": {"num_attention_heads": 2},
        "head_dim absent": {"head_dim": REMOVE},
        "head_dim null": {"head_dim": None},
        "head_dim 8": {"head_dim": 8},
        "head_dim 3": {"head_dim": 3},
        "head_dim 0": {"head_dim": 0},
        "heads 8, no head_dim": {"num_attention_heads": 8, "head_dim": REMOVE},
        "kv and head_dim absent": {"num_key_value_heads": REMOVE, "head_dim": REMOVE},
    }
    return variants


def window_variants() -> dict:
    """Returns combinations of what says whether a layer has a window."""
    variants = {}
    kinds = ("full_attention", "sliding_attention")
    layers = [REMOVE, None, [kinds[0]] * 2, [kinds[1]] * 2, list(kinds)]
    for use, window, most, types in itertools.product(
        (True, False, REMOVE), (5, None, REMOVE), (0, 1), layers
    ):
        name = f"use {use} window {window} above {most} types {types and types[:2]}"
        variants[name.replace("_attention", "")] = {
            "use_sliding_window": use,
            "sliding_window": window,
            "max_window_layers": most,
            "layer_types": types,
        }
    return variants | {
        "one type": {"layer_types": [kinds[1]]},
        "above absent": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": REMOVE,
        },
        "window 0": {"use_sliding_window": True, "sliding_window": 0},
        "window 1": {"use_sliding_window": True, "sliding_window": 1},
        "window true": {"use_sliding_window": True, "sliding_window": True},
        "chunked": {"layer_types": ["chunked_attention"] * 2},
        "chunk size": {"attention_chunk_size": 4},
    }


def general_variants(family: str) -> dict:
    """Returns members of other kinds: of other families, of forks, of housekeeping."""
    twin = "GPT2Model" if family == "gpt2" else CLASSES[family].replace("ForCausalLM", "Model")
    variants = {
        "is_causal": {"is_causal": False}, "is_causal true": {"is_causal": True},
        "layer config": {"per_layer_config": {"0": {"num_attention_heads": 2}}},
        "auto_map": {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
        "softcap": {"final_logit_softcapping": 30.0}, "soft null": {"attn_logit_softcapping": None},
        "logit_scale": {"logit_scale": 0.5}, "residual": {"residual_multiplier": 0.2},
        "embedding": {"embedding_multiplier": 12.0}, "scaling": {"logits_scaling": 8.0},
        "query scalar": {"query_pre_attn_scalar": 256}, "qk_norm": {"use_qk_norm": True},
        "bidirectional": {"use_bidirectional_attention": True},
        "parallel": {"use_parallel_residual": True}, "unknown": {"frobnicate": 3},
        "unknown null": {"frobnicate": None}, "bias": {"attention_bias": True},
        "bias false": {"attention_bias": False}, "mlp bias": {"mlp_bias": True},
        "mlp bias false": {"mlp_bias": False}, "bias plain": {"bias": True},
        "torch_dtype": {"torch_dtype": "bfloat16"}, "dtype": {"dtype": "float16"},
        "both dtypes": {"dtype": "float32", "torch_dtype": "bfloat16"},
        "house": {"_name_or_path": "x/y", "transformers_version": "4.40.0", "use_cache": False},
        "ids": {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 3},
        "sampling": {"temperature": 0.5, "top_k": 3, "max_length": 7, "do_sample": True},
        "encoder-decoder": {"is_encoder_decoder": True}, "decoder": {"is_decoder": True},
        "cross": {"add_cross_attention": True}, "chunks": {"chunk_size_feed_forward": 2},
        "pruned": {"pruned_heads": {"0": [1]}}, "pruned none": {"pruned_heads": {}},
        "no class": {"architectures": REMOVE}, "null class": {"architectures": None},
        "tp": {"pretraining_tp": 2}, "range": {"initializer_range": 9.0},
        "head": {"tie_word_embeddings": True}, "no head": {"tie_word_embeddings": False},
        "tied null": {"tie_word_embeddings": None}, "tied absent": {"tie_word_embeddings": REMOVE},
        "quantized": {"quantization_config": {"quant_method": "bitsandbytes",
                                              "load_in_8bit": True}},
        "mlx": {"quantization": {"bits": 4, "group_size": 64}},
        "dropout": {"attention_dropout": 0.5}, "dropouts": {"resid_pdrop": 0.5, "embd_pdrop": 0.5},
        "output": {"output_hidden_states": True, "output_attentions": True, "return_dict": False},
        "text": {"text_config": {"hidden_size": 3}}, "name": {"name_or_path": "x"},
        "attention": {"attn_implementation": "sdpa"}, "_attention": {"_attn_implementation": "x"},
        "unsloth": {"unsloth_version": "2025.1", "unsloth_fixed": True},
        "last states": {"tie_last_hidden_states": True}, "scale": {"scale_embedding": True},
        "layers": {"num_layers": 1}, "nextn": {"num_nextn_predict_layers": 1},
    }  # fmt: skip
    if family in DECODERS:
        variants["body"] = {"architectures": [twin]}
        variants["other head"] = {
            "architectures": [twin.replace("Model", "ForTokenClassification")]
        }
    return variants


def moe_variants(family: str) -> dict:
    """Returns settings of the experts of Mixtral and Qwen3-MoE."""
    variants = {
        f"top {k} normalise {n}": {"num_experts_per_tok": k, "norm_topk_prob": n}
        for k in (REMOVE, None, 1, 4, 5)
        for n in (REMOVE, None, False, True)
    }
    return variants | {
        "experts": {"num_experts": 3},
        "local experts": {"num_local_experts": 3},
        "both experts": {"num_experts": 4, "num_local_experts": 3},
        "both experts turned": {"num_experts": 3, "num_local_experts": 4},
        "experts absent": {"num_experts": REMOVE, "num_local_experts": REMOVE},
        "sparse step": {"decoder_sparse_step": 2},
        "sparse step 0": {"decoder_sparse_step": 0},
        "mlp layers": {"mlp_only_layers": [0]},
        "mlp layers null": {"mlp_only_layers": None},
        "mlp layers none": {"mlp_only_layers": []},
        "mlp layer beyond": {"mlp_only_layers": [9]},
        "shared": {"n_shared_experts": 1},
        "shared width": {"shared_expert_intermediate_size": 8},
        "routed": {"n_routed_experts": 4},
        "jitter": {"router_jitter_noise": 0.5},
        "scaling": {"routed_scaling_factor": 2.5},
        "coefficient": {"router_aux_loss_coef": 9.0},
        "logits": {"output_router_logits": True},
        "width null": {"moe_intermediate_size": None},
    }


def gpt2_variants() -> dict:
    """Returns GPT-2's own switches, and the general words for its members."""
    return {
        "inner null": {"n_inner": None}, "inner 24": {"n_inner": 24}, "inner 0": {"n_inner": 0},
        "unscaled": {"scale_attn_weights": False}, "n_ctx": {"n_ctx": 32},
        "by layer": {"scale_attn_by_inverse_layer_idx": True},
        "upcast": {"reorder_and_upcast_attn": True}, "n_ctx equal": {"n_ctx": 64},
        "hidden_size": {"hidden_size": 16}, "hidden_size other": {"hidden_size": 8},
        "layers": {"num_hidden_layers": 1}, "heads": {"num_attention_heads": 2},
        "positions": {"max_position_embeddings": 32}, "heads 3": {"n_head": 3},
        "words of others": {"n_embd": REMOVE, "hidden_size": 16, "n_layer": REMOVE,
                            "num_hidden_layers": 2, "n_head": REMOVE, "num_attention_heads": 4},
    }  # fmt: skip


def encoder_variants(family: str) -> dict:
    """Returns an encoder's own switches under each head."""
    stem = CLASSES[family].removesuffix("ForMaskedLM")
    classify, body = [f"{stem}ForSequenceClassification"], [f"{stem}Model"]
    labels = {
        "3 labels": {"id2label": {"0": "a", "1": "b", "2": "c"}},
        "num 3": {"num_labels": 3},
        "num null": {"num_labels": None},
        "labels null": {"id2label": None},
        "labels absent": {},
        "one label": {"num_labels": 1},
        "one named": {"id2label": {"0": "x"}},
        "two counts": {"num_labels": 4, "id2label": {"0": "a", "1": "b", "2": "c"}},
        "regression": {"num_labels": 1, "problem_type": "regression"},
        "several": {"num_labels": 3, "problem_type": "multi_label_classification"},
        "no problem": {"problem_type": None},
        "strange problem": {"problem_type": "x"},
        "single of one": {"num_labels": 1, "problem_type": "single_label_classification"},
        "label2id": {"label2id": {"a": 0, "b": 1, "c": 2}},
        "no labels": {"num_labels": 0},
        "empty labels": {"id2label": {}},
        "dropout": {"classifier_dropout": 0.5},
        "head dropout": {"seq_classif_dropout": 0.9},
    }
    shapes = {
        "relative": {"position_embedding_type": "relative_key"},
        "absolute": {"position_embedding_type": "absolute"},
        "position null": {"position_embedding_type": None},
        "decoder": {"is_decoder": True}, "types 1": {"type_vocab_size": 3},
        "types 0": {"type_vocab_size": 0}, "pad 0": {"pad_token_id": 0},
        "pad 1": {"pad_token_id": 1}, "pad 3": {"pad_token_id": 3}, "pad null": {
            "pad_token_id": None}, "pad absent": {"pad_token_id": REMOVE},
        "pad far": {"pad_token_id": 70}, "pad negative": {"pad_token_id": -1},
        "eps 1e-2": {"layer_norm_eps": 1e-2}, "eps absent": {"layer_norm_eps": REMOVE},
        "eps null": {"layer_norm_eps": None}, "eps 0": {"layer_norm_eps": 0.0},
        "sinusoids": {"sinusoidal_pos_embds": True}, "groups 2": {"num_hidden_groups": 2},
        "groups 3": {"num_hidden_groups": 3}, "inner 2": {"inner_group_num": 2},
        "groups 2 of 3": {"num_hidden_groups": 2, "num_hidden_layers": 3},
        "groups 2 of 4": {"num_hidden_groups": 2, "num_hidden_layers": 4},
        "layers 3": {"num_hidden_layers": 3}, "embedding 16": {"embedding_size": 16},
        "embedding absent": {"embedding_size": REMOVE}, "dim": {"hidden_size": 16},
        "n_layers": {"num_hidden_layers": 2}, "n_heads": {"num_attention_heads": 2},
        "hidden_size 8": {"hidden_size": 8}, "pooler": {"pooler_type": "first_token_transform"},
        "directionality": {"directionality": "bidi"},
        "gap": {"gap_size": 0, "net_structure_type": 0, "down_scale_factor": 1},
        "tie_weights_": {"tie_weights_": True}, "layers null": {"num_hidden_layers": None},
    }  # fmt: skip
    variants = {f"classify, {n}": c | {"architectures": classify} for n, c in labels.items()}
    for word, head in (("classify, ", classify), ("body, ", body), ("", [f"{stem}ForMaskedLM"])):
        variants |= {word + n: c | {"architectures": head} for n, c in shapes.items()}
    for name in ("ForPreTraining", "ForQuestionAnswering", "ForTokenClassification", "LMHeadModel"):
        variants[name] = {"architectures": [stem + name]}
    act = "activation" if family == "distilbert" else "hidden_act"
    for word in ("gelu_new", "gelu", "relu", "gelu_pytorch_tanh"):
        variants[f"classify, {word}"] = {act: word, "architectures": classify}
    return variants


def all_variants(table: dict) -> dict:
    """Returns {(family, name): changes}."""
    variants = {}
    for family in (*DECODERS, *ENCODERS, *PARTS):
        members = table["common"] | table["families"][family]["members"]
        named = {"base": {}} | member_variants(family, members) | general_variants(family)
        activation = {"gpt2": "activation_function", "distilbert": "activation"}
        word = activation.get(family, "hidden_act")
        some = ACTIVATIONS if family in ("gpt2", "llama", "bert") else ACTIVATIONS[::4]
        named |= {f"{word} {a}": {word: a} for a in some}
        if family == "gpt2":
            named |= gpt2_variants()
        elif family in DECODERS:
            every = 1 if family in ("llama", "mixtral") else 4
            named |= dict(list(rope_variants().items())[::every]) | head_variants(family)
            every = 1 if family in ("qwen2",) else 7
            named |= dict(list(window_variants().items())[::every])
            if family in ("mixtral", "qwen3_moe"):
                named |= moe_variants(family)
        else:
            named |= encoder_variants(family)
        variants |= {(family, name): changes for name, changes in named.items()}
    return variants


# ---- in the separate environment


def make_table() -> dict:
    """Writes transformers' members and their defaults."""
    import dataclasses

    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def fields_of(kind) -> dict:
        members = {}
        for f in dataclasses.fields(kind):
            default = None if f.default is dataclasses.MISSING else f.default
            members[f.name] = {"default": default, "null": "None" in str(f.type)}
        return members

    common = fields_of(transformers.PreTrainedConfig)
    families = {}
    for family in (*DECODERS, *TABLED, *LATER, *ENCODERS, *PARTS):
        kind = CONFIG_MAPPING[family]
        members = {n: m for n, m in fields_of(kind).items() if m != common.get(n)}
        families[family] = {"members": members, "other_words": dict(kind.attribute_map)}
        if "rope_parameters" in members:
            families[family]["rope_theta"] = kind.default_theta
    generation = sorted(transformers.GenerationConfig._get_default_generation_params())
    table = {
        "source": f"transformers {transformers.__version__}, by tests/golden/make_hf_members.py",
        "common": common,
        "families": families,
        "generation": generation,
    }
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return table


def class_of(config: dict):
    """Returns transformers' class for a config.json."""
    import transformers

    if config["model_type"] in DECODERS:
        return transformers.AutoModelForCausalLM
    head = head_of(config)
    if head == "classify":
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModel if head == "none" else transformers.AutoModelForMaskedLM


def logits_of(folder: pathlib.Path, config: dict) -> np.ndarray:
    """Returns what transformers computes: logits, or the last states of a body."""
    import torch

    model = class_of(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    batch = {n: torch.tensor(x).long() for n, x in inputs(config["model_type"]).items()}
    options = {"input_ids": batch["tokens"]}
    if "lengths" in batch:
        live = torch.arange(max(LENGTHS))[None] < batch["lengths"][:, None]
        pad = model.config.pad_token_id
        tokens = torch.where(live, batch["tokens"], 0 if pad is None else pad)
        options = {"input_ids": tokens, "attention_mask": live.long()}
        if config["model_type"] != "distilbert":
            top = max(getattr(model.config, "type_vocab_size", 2) - 1, 0)
            options["token_type_ids"] = batch["types"].clamp(max=top)
    with torch.no_grad():
        out = model.eval()(**options, return_dict=True)
    logits = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if not torch.isfinite(logits).all():
        raise ValueError("not finite")
    return logits.numpy()


def shapes_of(config: dict) -> dict:
    """Returns {tensor: shape} that transformers saves for a config.json."""
    import safetensors
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        made = transformers.AutoConfig.from_pretrained(folder)
        made._attn_implementation = "eager"
        with torch.device("meta"):
            model = class_of(config).from_config(made)
        size = sum(p.numel() for p in model.parameters())
        if size > MOST:
            raise OverflowError(f"{size} parameters")
        if config["model_type"] not in ("mixtral", "qwen3_moe"):  # whose experts are saved apart
            tied = getattr(model, "all_tied_weights_keys", {})
            return {n: tuple(x.shape) for n, x in model.state_dict().items() if n not in tied}
        class_of(config).from_config(made).float().save_pretrained(folder / "saved")
        with safetensors.safe_open(folder / "saved" / "model.safetensors", "np") as file:
            return {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}


def outcome(config: dict) -> tuple[dict | None, np.ndarray | str]:
    """Returns ({tensor: shape}, logits), or what transformers says against a config.json."""
    import safetensors.numpy

    shapes = None
    try:
        shapes = shapes_of(config)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "config.json").write_text(json.dumps(config))
            safetensors.numpy.save_file(
                weights(shapes), folder / "model.safetensors", {"format": "pt"}
            )
            return shapes, logits_of(folder, config)
    except Exception as error:  # whatever it is, transformers has no logits of this
        return shapes, f"{type(error).__name__}: {str(error)[:120]}"


def make_variants(only: str = "", processes: str = "4") -> None:
    """Writes all variants with their outcomes; prints how many of each there are."""
    import multiprocessing

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = json.loads(TABLE.read_text())
    named = {k: c for k, c in all_variants(table).items() if f"{k[0]}: {k[1]}".startswith(only)}
    configs = [changed(base(family), changes) for (family, _), changes in named.items()]
    with multiprocessing.get_context("fork").Pool(int(processes)) as pool:
        outcomes = []
        for one in pool.imap(outcome, configs, chunksize=8):
            outcomes.append(one)
            if len(outcomes) % 100 == 0:
                print(len(outcomes), "of", len(configs), flush=True)
    shapes_seen, arrays, rows = [], [], []
    for ((family, name), changes), (shapes, one) in zip(named.items(), outcomes, strict=True):
        row = {"family": family, "name": name, "changes": changes}
        if shapes is not None:
            listed = sorted(shapes.items())
            if listed not in shapes_seen:
                shapes_seen.append(listed)
            row["shapes"] = shapes_seen.index(listed)
        if isinstance(one, str):
            row["refused"] = one
        else:
            same = (i for i, x in enumerate(arrays) if np.array_equal(x, one))
            row["logits"] = next(same, len(arrays))
            arrays += [one] if row["logits"] == len(arrays) else []
        rows.append(row)
        if only:
            print(family, name, row.get("refused", row.get("logits")))
    if not only:
        freeze(rows, shapes_seen, [in_short(x) for x in arrays])
    refused = sum("refused" in r for r in rows)
    print(f"{len(rows)} variants: {len(arrays)} unlike logits, {refused} refused by transformers")


def freeze(rows: list, shapes: list, arrays: list) -> None:
    """Writes the file of variants."""
    described = json.dumps({"rows": rows, "shapes": shapes, "forms": [x.shape for x in arrays]})
    flat = np.concatenate([x.astype(np.float32).ravel() for x in arrays])
    text = np.frombuffer(described.encode(), np.uint8)
    np.savez_compressed(VARIANTS, described=text, logits=flat)


def frozen() -> tuple[list, list, list]:
    """Returns (rows, each set of tensors' shapes, transformers' logits) of the file of variants."""
    with np.load(VARIANTS) as file:
        described, flat = json.loads(file["described"].tobytes()), file["logits"]
    sizes = [int(np.prod(form)) for form in described["forms"]]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    arrays = [x.reshape(form) for x, form in zip(parts, described["forms"], strict=True)]
    return described["rows"], [dict(s) for s in described["shapes"]], arrays


def in_short(logits: np.ndarray) -> np.ndarray:
    """Returns the logits of a few places of each row, or those of all classes."""
    return logits[:, PLACES] if logits.ndim == 3 else logits


def error_of(logits: np.ndarray, golden: np.ndarray, family: str) -> float:
    """Returns the largest difference of logits kept, over tokens that are no padding."""
    if family in ENCODERS and logits.ndim == 3:
        live = np.asarray(PLACES)[None] < np.asarray(LENGTHS)[:, None]
        logits, golden = logits[live], golden[live]
    return float(np.abs(logits - golden).max(initial=0))


def check(folder: str) -> None:
    """Compares transformers' logits of folders that megajax exported with the frozen ones."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    worst, places = 0.0, sorted(pathlib.Path(folder).glob("*/wanted.npy"))
    for golden in places:
        config = json.loads((golden.parent / "config.json").read_text())
        logits, family = in_short(logits_of(golden.parent, config)), config["model_type"]
        error = error_of(logits, np.load(golden), family)
        worst = max(worst, error)
        if error > 2e-4:
            print("DIFFERS", golden.parent.name, error)
    print(f"{len(places)} exported folders, largest difference {worst:.1e}")


# ---- in megajax' environment


def export(folder: str) -> None:
    """Writes one folder for each model of the variants that megajax reads: its own export of it."""
    import safetensors.numpy

    from megajax.core.errors import UserError
    from megajax.foreign import hf

    rows, shapes, arrays = frozen()
    seen, place = set(), pathlib.Path(folder)
    for i, row in enumerate(rows):
        if "logits" not in row:
            continue
        source = place / "source"
        source.mkdir(parents=True, exist_ok=True)
        config = changed(base(row["family"]), row["changes"])
        (source / "config.json").write_text(json.dumps(config))
        try:
            key = (hf.load_config(source), row["shapes"])
            if key in seen:
                continue
            tensors = weights(shapes[row["shapes"]])
            safetensors.numpy.save_file(tensors, source / "model.safetensors")
            cfg, params = hf.load(source)
        except UserError:
            continue
        seen.add(key)
        hf.save(params, cfg, place / str(i))
        np.save(place / str(i) / "wanted.npy", arrays[row["logits"]])
    print(f"{len(seen)} models written")


if __name__ == "__main__":
    verb, *folders = sys.argv[1:]
    verbs = {"table": make_table, "variants": make_variants, "check": check, "export": export}
    verbs[verb](*folders)
