"""Makes tests/golden/hf_*.npz: tiny random Hugging Face models and their logits.

Run it in an environment of its own (it needs torch and transformers, which megajax does not):

    python -m venv hf && hf/bin/pip install torch transformers numpy
    hf/bin/python tests/golden/make_hf.py [case ...]

Each file holds the config.json text, every tensor that transformers saves, the tokens and the
float32 logits of eager attention; encoders' also token types and the lengths of padded rows.
Made with transformers 5.23.0, torch 2.13.0.
"""

import copy
import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
SMALL = dict(
    vocab_size=101,  # not a multiple of anything: the padding of the vocabulary is exercised
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
SMALL_MOE = SMALL | dict(intermediate_size=24)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "gpt2": transformers.GPT2Config(vocab_size=101, n_embd=48, n_layer=2, n_head=4, n_positions=64),
    "llama": transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama3_tied": transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=5, head_dim=12),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**SMALL_MOE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SMALL_MOE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        head_dim=16,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
TINY = dict(vocab_size=101, max_position_embeddings=32)
TINY_BERT = TINY | dict(
    hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4
)
TINY_DISTILBERT = TINY | dict(dim=32, hidden_dim=56, n_layers=2, n_heads=4)
ENCODERS = {
    "bert": transformers.BertConfig(**TINY_BERT),
    "roberta": transformers.RobertaConfig(**TINY_BERT, type_vocab_size=1, layer_norm_eps=1e-5),
    "distilbert": transformers.DistilBertConfig(**TINY_DISTILBERT),
    # Two groups of two layers that share their weights.
    "albert": transformers.AlbertConfig(
        **TINY_BERT | dict(num_hidden_layers=4), embedding_size=16, num_hidden_groups=2
    ),
}
LENGTHS = (20, 7, 1)


def main() -> None:
    """Writes one file for each case."""
    for name in sys.argv[1:] or [*CASES, *ENCODERS, *(f"{n}_classify" for n in ENCODERS)]:
        if name.removesuffix("_classify") in ENCODERS:
            make_encoder(name)
            continue
        config = CASES[name]
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        disturb(model)
        tokens = torch.randint(0, 101, (2, 24))
        with torch.no_grad():
            logits = model(tokens).logits
        save(name, model, logits, tokens=tokens)


def make_encoder(name: str) -> None:
    """Writes the file of one encoder, for masked tokens or with three classes."""
    config = copy.deepcopy(ENCODERS[name.removesuffix("_classify")])
    torch.manual_seed(0)
    config._attn_implementation, config.num_labels = "eager", 3
    if name.endswith("_classify"):
        kind = transformers.AutoModelForSequenceClassification
    else:
        kind = transformers.AutoModelForMaskedLM
    model = kind.from_config(config).eval().float()
    disturb(model)
    lengths = torch.tensor(LENGTHS)
    live = torch.arange(max(LENGTHS))[None] < lengths[:, None]
    tokens = torch.where(live, torch.randint(4, 101, live.shape), config.pad_token_id)
    types = torch.randint(0, max(getattr(config, "type_vocab_size", 1), 1), live.shape)
    options = {} if config.model_type == "distilbert" else {"token_type_ids": types}
    with torch.no_grad():
        logits = model(tokens, attention_mask=live.long(), **options).logits
    save(name, model, logits, tokens=tokens, types=types, lengths=lengths)


def disturb(model: torch.nn.Module) -> None:
    """Moves all weights: the usual initial values hide biases and norm scales."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.08 * torch.randn_like(p))


def save(name: str, model: torch.nn.Module, logits: torch.Tensor, **inputs: torch.Tensor) -> None:
    """Writes one file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False))  # saving adds the classes
    np.savez_compressed(
        FOLDER / f"hf_{name}.npz",
        config=json.dumps(config | {"model_type": model.config.model_type}),
        **{k: v.numpy().astype(np.int32) for k, v in inputs.items()},
        logits=logits.numpy(),
        **{f"tensor:{k}": v for k, v in state.items()},
    )
    print(name, logits.shape, float(logits.abs().max()))


if __name__ == "__main__":
    main()
