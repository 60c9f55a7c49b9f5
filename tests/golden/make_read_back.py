"""Makes tests/golden/read_back.npz: logits by GPTQModel of folders that megajax writes.

In two environments: GPTQModel needs torch and transformers, which megajax does not. No GPU:

    uv run python -m tests.golden.make_read_back write FOLDER
    python -m venv other && other/bin/pip install torch transformers gptqmodel
    other/bin/python tests/golden/make_read_back.py read FOLDER

The folders are random codes of tests/quant_files_oracle.py, read and written again by megajax, so
that zero points other than 2^(b-1) and desc_act are among them. The file has, for each case, a
SHA-256 of the folder's tensors and quantization_config, and the logits of GPTQModel's model with
the matrices of its own dequantization in float32. tests/foreign/test_read_back.py compares both.
Made with gptqmodel 7.7.0, torch 2.13.0 on a CPU, transformers 5.24.0, Python 3.11.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np
import safetensors.numpy

OUT = pathlib.Path(__file__).parent / "read_back.npz"
TOKENS = np.array([[5, 17, 80, 3, 44, 44, 91, 0]])
CASES = ("gptq3_order", "gptq4_dynamic", "gptq4_first_version", "awq4_dense")


def write(path: pathlib.Path, case: str) -> None:
    """Writes a folder as megajax does."""
    from megajax.foreign import hf_quantized
    from tests import quant_files_oracle as oracle

    def down_differs(module: str) -> tuple[int, int] | None:
        if not module.endswith("down_proj"):
            return 4, 32
        return None if case == "awq4_dense" or ".0." in module else (8, 64)

    rules = {r"-:.*\.0\..*down_proj": {}, r".*down_proj": {"bits": 8, "group_size": 64}}
    spec = {
        "gptq3_order": oracle.Spec(bits=3, symmetric=False, order=True, version=1),
        "gptq4_dynamic": oracle.Spec(of=down_differs, more={"dynamic": rules}),
        "gptq4_first_version": oracle.Spec(order=True),
        "awq4_dense": oracle.Spec(method="awq", symmetric=False, of=down_differs),
    }[case]
    oracle.write(path / f"{case}_made", spec)
    cfg, params = hf_quantized.load(path / f"{case}_made")
    form = "gptq_v1" if case == "gptq4_first_version" else spec.method
    hf_quantized.save(params, cfg, path / case, form=form)


def digest(folder: pathlib.Path) -> str:
    """Returns the SHA-256 of a folder's tensors and of what it says of them."""
    checksum = hashlib.sha256()
    for name, x in sorted(safetensors.numpy.load_file(folder / "model.safetensors").items()):
        checksum.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
    members = json.loads((folder / "config.json").read_text())["quantization_config"]
    checksum.update(json.dumps(members, sort_keys=True).encode())
    return checksum.hexdigest()


def read(folder: pathlib.Path) -> np.ndarray:
    """Returns the logits of TOKENS by GPTQModel's model, computed in float32."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")
    Tokenizer(words).save(str(folder / "tokenizer.json"))  # GPTQModel opens none without
    is_awq = folder.name.startswith("awq")
    backend = BACKEND.TORCH_AWQ if is_awq else BACKEND.TORCH
    model = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=torch.float16).model
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, module in list(model.named_modules()):
        if not hasattr(module, "qweight"):
            continue
        scales = torch.tensor(stored[f"{name}.scales"]).float()
        if is_awq:
            parts = module.qweight, module.qzeros, scales
            w_KN = dequantize_gemm(*parts, module.bits, module.group_size)
        else:
            module.scales = scales
            w_KN = module.dequantize_weight()
        assert w_KN.dtype == torch.float32
        dense = torch.nn.Linear(*w_KN.shape, bias=False)
        dense.weight.data = w_KN.T.contiguous()
        home, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(home), leaf, dense)
    torch.nn.Module.float(model).eval()
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)).logits.numpy()


def main(what: str, home: str) -> None:
    """Writes the folders, or reads them."""
    if what == "write":
        for case in CASES:
            write(pathlib.Path(home), case)
        return
    arrays = {}
    for case in CASES:
        folder = pathlib.Path(home) / case
        arrays |= {f"{case}.logits": read(folder), f"{case}.digest": np.array(digest(folder))}
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
