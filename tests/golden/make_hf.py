"""Makes tests/golden/hf_*.npz: tiny random Hugging Face models and their logits.

Run it in an environment of its own (it needs torch and transformers, which megajax does not):

    python -m venv hf && hf/bin/pip install torch transformers numpy
    hf/bin/python tests/golden/make_hf.py [case ...]

Each file holds the config.json text, every tensor that transformers saves, the tokens and the
float32 logits of eager attention. Made with transformers 5.23.0, torch 2.13.0.
"""

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


def main() -> None:
    """Writes one file for each case."""
    for name in sys.argv[1:] or CASES:
        config = CASES[name]
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        with torch.no_grad():  # the usual initial values hide biases and norm scales
            for p in model.parameters():
                p.add_(0.08 * torch.randn_like(p))
        tokens = torch.randint(0, 101, (2, 24))
        with torch.no_grad():
            logits = model(tokens).logits
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            state = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        np.savez_compressed(
            FOLDER / f"hf_{name}.npz",
            config=json.dumps(
                json.loads(config.to_json_string(use_diff=False))
                | {"model_type": config.model_type}
            ),
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy(),
            **{f"tensor:{k}": v for k, v in state.items()},
        )
        print(name, logits.shape, float(logits.abs().max()))


if __name__ == "__main__":
    main()
