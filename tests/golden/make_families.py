"""Makes hf_gemma3_text.npz, hf_olmo2.npz, hf_smollm3.npz, hf_phi3.npz and rope_scalings.json here.

Run it in a separate environment with torch and transformers, which megajax does not need:

    hf/bin/python tests/golden/make_families.py               # writes all
    hf/bin/python tests/golden/make_families.py check FOLDER  # logits of folders megajax wrote

A file of a family holds what make_hf.py's do, and more: `greedy`, the tokens that `generate` adds
to the first PROMPT tokens of the first row, and grad:NAME, the gradient of the mean cross-entropy
of the next token of all rows by each tensor. rope_scalings.json holds transformers' frequencies and
its factor of cosines and sines, by settings and length. `check` prints, for folders named like the
families in FOLDER, how far their logits are from the files'.
Made with transformers 5.24.0, torch 2.13.0.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = pathlib.Path(__file__).parent
PROMPT, NEW = 18, 12
SMALL = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=100,
    attention_dropout=0.0,
)
LONG = [1.0, 2.5, 6.0]
CASES = {
    # Two sliding layers, a full one with other frequencies, a sliding one.
    "gemma3_text": transformers.Gemma3TextConfig(
        **SMALL | dict(num_hidden_layers=4),
        head_dim=12,
        sliding_window=5,
        sliding_window_pattern=3,
        query_pre_attn_scalar=20,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "smollm3": transformers.SmolLM3Config(**SMALL | dict(num_hidden_layers=4)),
    # 6 of the 8 numbers of a head are rotated; rows are longer than the original context.
    "phi3": transformers.Phi3Config(
        **SMALL,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3],
            "long_factor": LONG,
        },
    ),
}
SCALINGS = [
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 0.9,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
    },
]


def main(verb: str = "make", folder: str = "") -> None:
    """Writes all files, or checks folders."""
    transformers.logging.set_verbosity_error()
    if verb == "check":
        return check(pathlib.Path(folder))
    for name, config in CASES.items():
        make(name, config)
    make_scalings()


def make(name: str, config: transformers.PreTrainedConfig) -> None:
    """Writes the file of one family."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for p in model.parameters():  # the usual initial values hide much; and a small file
            p.copy_(((p + 0.15 * torch.randn_like(p)) * 512).round() / 512)
    tokens = torch.randint(2, 100, (2, 24))
    logits = model(tokens).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    losses.backward()
    greedy = model.generate(
        tokens[:1, :PROMPT], max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        text = (pathlib.Path(folder) / "config.json").read_text()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if n in state}
    np.savez_compressed(
        HERE / f"hf_{name}.npz",
        config=text,
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.detach().numpy(),
        greedy=greedy[0, PROMPT:].numpy().astype(np.int32),
        **{f"tensor:{k}": v for k, v in state.items()},
        **{f"grad:{k}": v for k, v in gradients.items()},
    )
    print(name, float(losses), float(logits.abs().max()), greedy[0, PROMPT:].tolist())


def make_scalings() -> None:
    """Writes the frequencies of heads of 16 numbers."""
    rows = []
    for settings in SCALINGS:
        for length in (16, 64, 100):
            config = transformers.LlamaConfig(
                hidden_size=32,
                num_attention_heads=2,
                max_position_embeddings=64,
                rope_parameters={"rope_theta": 10000.0} | settings,
            )
            frequencies, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](
                config, "cpu", seq_len=length
            )
            rows.append([settings, length, frequencies.tolist(), float(factor)])
    (HERE / "rope_scalings.json").write_text(json.dumps(rows, indent=0) + "\n")


def check(place: pathlib.Path) -> None:
    """Prints how far the logits of each folder are from its file's."""
    for name in CASES:
        golden = np.load(HERE / f"hf_{name}.npz")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place / name, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            logits = model(torch.tensor(golden["tokens"]).long()).logits
        print(name, type(model).__name__, float(np.abs(logits.numpy() - golden["logits"]).max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
