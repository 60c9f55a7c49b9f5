"""Makes tests/golden/hf_gpt_oss.npz, hf_deepseek_v3.npz and mxfp4.npz with transformers.

Run it in a separate environment with torch and transformers, which megajax does not need:

    python tests/golden/make_hf_experts.py [gpt_oss] [deepseek_v3] [mxfp4]
    python tests/golden/make_hf_experts.py check FOLDER...  # logits of folders that megajax wrote

The files of models have, beside what make_hf.py's have (config.json, tensors, tokens, logits), the
greedy continuation of the first row's first tokens, the gradient of the mean cross-entropy of the
rows by every tensor, and with YaRN ('yarn_config') logits and continuation once more. Weights are
multiples of 1/512, so that the files are small. mxfp4.npz has blocks and scales of all codes and
what transformers makes of them. Made with transformers 5.24.0, torch 2.13.0.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = pathlib.Path(__file__).parent
PLAIN = dict(rope_type="default", rope_theta=10000.0)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
)
SCALED = {
    "gpt_oss": YARN | dict(truncate=False),
    "deepseek_v3": YARN | dict(mscale=1.0, mscale_all_dim=0.5),
}
CASES = {
    "gpt_oss": transformers.GptOssConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        max_position_embeddings=128,
        rope_parameters=PLAIN,
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=40,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        kv_lora_rank=10,
        q_lora_rank=14,
        qk_rope_head_dim=8,
        qk_nope_head_dim=6,
        v_head_dim=12,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        num_mtp_layers=0,
        rope_parameters=PLAIN,
    ),
}
PROMPT, ANSWER = 5, 12  # tokens


def main() -> None:
    """Writes one file for each case."""
    if sys.argv[1:2] == ["check"]:
        return check(sys.argv[2:])
    for name in sys.argv[1:] or [*CASES, "mxfp4"]:
        make_mxfp4() if name == "mxfp4" else make_model(name)


def make_model(name: str) -> None:
    """Writes the file of one model."""
    config = CASES[name]
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for key, p in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in key:
                continue
            wide = 0.6 if "experts" in key else 0.2
            p.copy_(((p + wide * torch.randn_like(p)) * 512).round() / 512)
    tokens = torch.randint(0, 101, (2, 24))
    out = model(tokens, labels=tokens)
    out.loss.backward()
    answer = continued(model, tokens)
    scaled = transformers.AutoConfig.for_model(**config.to_dict())
    scaled.rope_parameters, scaled._attn_implementation = SCALED[name], "eager"
    other = transformers.AutoModelForCausalLM.from_config(scaled).eval().float()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        yarn = other(tokens).logits
    yarn_answer = continued(other, tokens)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        # The gradients under the names of the file: saved as another model's weights.
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.grad)
        model.save_pretrained(folder)
        gradients = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    np.savez_compressed(
        FOLDER / f"hf_{name}.npz",
        config=text(model),
        yarn_config=text(other),
        yarn_logits=yarn.numpy(),
        yarn_answer=yarn_answer,
        tokens=tokens.numpy().astype(np.int32),
        answer=answer,
        logits=out.logits.detach().numpy(),
        **{f"tensor:{k}": v for k, v in state.items()},
        **{f"gradient:{k}": v for k, v in gradients.items() if "correction_bias" not in k},
    )
    print(name, out.loss.item(), (yarn - out.logits).abs().max().item(), answer, yarn_answer)


def continued(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Returns the greedy continuation of the first row's first tokens."""
    with torch.no_grad():
        rows = model.generate(
            tokens[:1, :PROMPT], max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
    return rows[0, PROMPT:].numpy().astype(np.int32)


def text(model: torch.nn.Module) -> str:
    """Returns the config.json of a model."""
    members = json.loads(model.config.to_json_string(use_diff=False))
    return json.dumps(members | {"model_type": model.config.model_type})


def make_mxfp4() -> None:
    """Writes blocks with every byte, scales with every exponent that float32 holds, and values."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 6, 4, 16)).astype(np.uint8)
    blocks[0].reshape(-1)[:256] = np.arange(256)
    scales = random.integers(100, 150, (3, 6, 4)).astype(np.uint8)
    scales[1].reshape(-1)[:4] = 4, 127, 200, 250
    values = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    np.savez_compressed(FOLDER / "mxfp4.npz", blocks=blocks, scales=scales, values=values.numpy())
    print("mxfp4", values.shape)


def check(folders: list[str]) -> None:
    """Prints, as JSON, how far the logits of folders are from those of the golden files."""
    apart = {}
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        golden = np.load(FOLDER / f"hf_{model.config.model_type}.npz")
        with torch.no_grad():
            logits = model(torch.tensor(golden["tokens"]).long()).logits
        apart[folder] = float(np.abs(logits.numpy() - golden["logits"]).max())
    print(json.dumps(apart))


if __name__ == "__main__":
    main()
