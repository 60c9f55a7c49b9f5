"""Makes tests/golden/hf_*.npz: tiny random Hugging Face models and their logits.

Run it in an environment of its own (it needs torch and transformers, which megajax does not):

    python -m venv hf && hf/bin/pip install torch torchvision transformers numpy pillow
    hf/bin/python tests/golden/make_hf.py [case ...]
    hf/bin/python tests/golden/make_hf.py check FOLDER  # logits of a Qwen2-VL that megajax wrote

Each file holds the config.json text, every tensor that transformers saves, the tokens and the
float32 logits of eager attention; encoders' also token types and the lengths of padded rows, and
Qwen2-VL's what `make_vision` says.
Made with transformers 5.23.0, torch 2.13.0; Qwen2-VL's with 5.24.0 and 2.15.0.
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
from transformers.vision_utils import get_vision_position_ids

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
IMAGE, VIDEO, BEGIN, END = 95, 96, 93, 94  # special tokens of Qwen2-VL
# Sizes (height, width) of each row's images; all are multiples of 28 but those that are resized.
ROWS = {
    "none": [],
    "one": [(28, 28)],
    "three": [(56, 84), (28, 28), (84, 28)],
    "wide": [(28, 980)],
    "resized": [(50, 75), (180, 240)],
}
PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 36}


def main() -> None:
    """Writes one file for each case."""
    if sys.argv[1:2] == ["check"]:
        return check_vision(sys.argv[2])
    every = [*CASES, *ENCODERS, *(f"{n}_classify" for n in ENCODERS), "qwen2_vl"]
    for name in sys.argv[1:] or every:
        if name == "qwen2_vl":
            make_vision()
            continue
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


def make_vision() -> None:
    """Writes Qwen2-VL's file: rows of tokens and images, one by one.

    Of each row of ROWS: its images (H, W, 3), tokens (S,) with a placeholder for each merged patch,
    logits (S, V), positions (3, S) by get_rope_index, grids (images, 2) of merged patches, and what
    the image processor on Pillow makes of the images: patches uint8 (P, 588), in the order
    (channel, y, x), before they are normalised, and their (row, column) in the image, (P, 2).
    """
    config = transformers.Qwen2VLConfig(
        text_config=dict(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3]),
        ),
        vision_config=dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.Qwen2VLForConditionalGeneration(config).eval().float()
    disturb(model)
    with torch.no_grad():
        for p in model.parameters():  # so that the file is small
            p.copy_((512 * p).round() / 512)
    processor = transformers.Qwen2VLImageProcessorPil(size=PIXELS)
    arrays = {}
    for row, sizes in ROWS.items():
        images = [picture(i, *size) for i, size in enumerate(sizes)]
        arrays |= {f"{row}:image{i}": image for i, image in enumerate(images)}
        tokens, options = list(range(3, 9)), {}
        if images:
            pixels = processor(images, return_tensors="pt")
            grids = pixels["image_grid_thw"]
            for _, rows, columns in grids.tolist():
                tokens += [BEGIN, *[IMAGE] * (rows * columns // 4), END, rows + 10, columns % 80]
            arrays[f"{row}:grids"] = (grids[:, 1:] // 2).numpy().astype(np.int32)
            arrays[f"{row}:patches"] = unnormalised(processor, pixels["pixel_values"].numpy())
            places = get_vision_position_ids(grids, 2)
            arrays[f"{row}:patch_places"] = places.numpy().astype(np.int32)
            options = dict(pixels)
        tokens = torch.tensor([tokens])
        kinds = (tokens == IMAGE).int()
        with torch.no_grad():
            logits = model(tokens, mm_token_type_ids=kinds, **options).logits
        positions, _ = model.model.get_rope_index(tokens, kinds, options.get("image_grid_thw"))
        arrays[f"{row}:tokens"] = tokens[0].numpy().astype(np.int32)
        arrays[f"{row}:positions"] = positions[:, 0].numpy().astype(np.int32)
        arrays[f"{row}:logits"] = logits[0].numpy()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        text = (pathlib.Path(folder) / "config.json").read_text()
    tensors = {f"tensor:{k}": v for k, v in state.items()}
    np.savez_compressed(FOLDER / "hf_qwen2_vl.npz", config=text, **arrays, **tensors)


def check_vision(folder: str) -> None:
    """Prints, as JSON, how far the logits of each row of the golden file are from a folder's."""
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    golden, apart = np.load(FOLDER / "hf_qwen2_vl.npz"), {}
    for row, sizes in ROWS.items():
        tokens, options = torch.tensor(golden[f"{row}:tokens"])[None].long(), {}
        if sizes:
            images = [golden[f"{row}:image{i}"] for i in range(len(sizes))]
            options = dict(processor(images, return_tensors="pt"))
        with torch.no_grad():
            logits = model(tokens, mm_token_type_ids=(tokens == IMAGE).int(), **options).logits
        apart[row] = float(np.abs(logits[0].numpy() - golden[f"{row}:logits"]).max())
    print(json.dumps(apart))


def picture(number: int, height: int, width: int) -> np.ndarray:
    """Returns a picture that compresses well, and of which no two parts are alike."""
    y, x = np.mgrid[:height, :width].astype(float)
    waves = [y / 19 + x / (17 + i) + np.sin(x / (23 + number)) * y / 15 for i in range(3)]
    return np.uint8(np.stack([127.5 + 127.4 * np.sin(w + number) for w in waves], -1)) // 16 * 16


def unnormalised(processor: object, values: np.ndarray) -> np.ndarray:
    """Returns the pixels of an image processor's patches; both frames must be alike."""
    frames = values.reshape(len(values), 3, 2, -1)
    assert (frames[:, :, 0] == frames[:, :, 1]).all()
    mean, std = (np.reshape(x, (3, 1)) for x in (processor.image_mean, processor.image_std))
    exact = (frames[:, :, 0] * std + mean) * 255
    pixels = np.rint(exact)
    assert abs(pixels - exact).max() < 1e-3
    return pixels.astype(np.uint8).reshape(len(values), -1)


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
