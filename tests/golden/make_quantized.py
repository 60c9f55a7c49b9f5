"""Makes tests/golden/quantized: a tiny Llama in few bits, as GPTQModel quantizes and writes it.

Run it in an environment of its own (it needs torch, transformers and gptqmodel, which megajax does
not; no GPU):

    python -m venv quantized && quantized/bin/pip install torch transformers gptqmodel
    GPTQMODEL_CPU_WORKERS=2 quantized/bin/python tests/golden/make_quantized.py

Every folder has the files of GPTQModel.save that a reader needs, without its record of the run
(quantization_config's `meta`), and expected.npz: tokens, `logits` of transformers' float32 model
with the matrices that GPTQModel's own code makes of the stored codes. It prints how far they moved
the logits. Made with gptqmodel 7.7.0, torch 2.13.0 on a CPU, transformers 5.24.0, Python 3.11.
"""

import json
import pathlib
import shutil
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.quantization.config import AWQConfig
from tokenizers import Tokenizer, models, pre_tokenizers

FOLDER = pathlib.Path(__file__).parent / "quantized"
VOCAB, TOKENS = 120, 12
LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.12,
)
GPTQ = dict(device="cpu", act_group_aware=False)
CASES = {
    # The order of activations, whose g_idx mixes the rows of groups; zero points less 1.
    "gptq4_order": lambda: QuantizeConfig(bits=4, group_size=32, desc_act=True, sym=True, **GPTQ),
    # Codes that cross words, zero points of their own.
    "gptq3_v2": lambda: QuantizeConfig(
        bits=3, group_size=32, desc_act=False, sym=False, format="gptq_v2", **GPTQ
    ),
    # A group as long as the column.
    "gptq8_column": lambda: QuantizeConfig(bits=8, group_size=-1, desc_act=False, sym=True, **GPTQ),
    "awq4": lambda: AWQConfig(bits=4, group_size=32, sym=False, device="cpu"),
}


def main() -> None:
    """Writes every folder."""
    torch.manual_seed(0)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as home:
        dense = pathlib.Path(home) / "dense"
        model = write_dense(dense)
        calibration = [
            {"input_ids": row.tolist(), "attention_mask": [1] * len(row)}
            for row in torch.randint(3, VOCAB, (64, 48))
        ]
        for case, settings in CASES.items():
            quantizer = GPTQModel.load(str(dense), settings())
            backend = BACKEND.TORCH_AWQ if case.startswith("awq") else BACKEND.TORCH
            quantizer.quantize(calibration, batch_size=4, backend=backend)
            written = pathlib.Path(home) / case
            quantizer.save(str(written))
            keep(written, FOLDER / case, model)


def write_dense(path: pathlib.Path) -> transformers.LlamaForCausalLM:
    """Writes the model that is quantized, its gains not all 1, and a tokenizer; returns it."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    for name, x in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(x, 0.5, 1.5)
    model = model.half()
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(unk_token="t0", pad_token="t0", bos_token="t1", eos_token="t2")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    return model.float()


def keep(written: pathlib.Path, folder: pathlib.Path, dense: torch.nn.Module) -> None:
    """Copies what a reader needs, and adds the logits."""
    folder.mkdir(parents=True)
    shutil.copyfile(written / "model.safetensors", folder / "model.safetensors")
    config = json.loads((written / "config.json").read_text())
    config["quantization_config"].pop("meta", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokens = torch.randint(0, VOCAB, (2, TOKENS))
    with torch.inference_mode():
        after, before = (m(tokens).logits.numpy() for m in (dequantized(written, dense), dense))
    np.savez_compressed(folder / "expected.npz", tokens=tokens.numpy(), logits=after)
    print(f"{folder.name}: logits of {np.std(after):.2f}, moved {np.abs(after - before).max():.2f}")


def dequantized(written: pathlib.Path, dense: torch.nn.Module) -> torch.nn.Module:
    """Returns transformers' float32 model with the written folder's matrices.

    The codes and zero points are what GPTQModel loads and unpacks; it would round scales, and their
    products, to the 16 bits in which it computes, so the scales are the file's, in float32.
    """
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    is_awq = config["quant_method"] == "awq"
    backend = BACKEND.TORCH_AWQ if is_awq else BACKEND.TORCH
    loaded = GPTQModel.load(str(written), device="cpu", backend=backend)
    model = transformers.LlamaForCausalLM(dense.config).float().eval()
    modules = dict(loaded.model.named_modules())
    stored = safetensors.torch.load_file(written / "model.safetensors")
    for name, x in model.named_parameters():
        stem = name.removesuffix(".weight")
        if name in stored:
            x.data = stored[name].float()
            continue
        module, scales = modules[stem], stored[f"{stem}.scales"].float()
        if is_awq:
            parts = module.qweight, module.qzeros, scales
            x.data = dequantize_gemm(*parts, module.bits, module.group_size).T
        else:
            module.scales = scales
            x.data = module.dequantize_weight().T
        assert x.data.dtype == torch.float32
    return model


if __name__ == "__main__":
    main()
