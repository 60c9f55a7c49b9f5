"""Makes tests/golden/peft: adapter folders of PEFT for the model of hf_llama.npz, and its logits.

Run it in an environment of its own (it needs torch, transformers and peft, which megajax does not):

    python -m venv hf && hf/bin/pip install torch transformers peft numpy
    hf/bin/python tests/golden/make_peft.py
    hf/bin/python tests/golden/make_peft.py check FOLDER OUT.npy  # logits of a folder that we wrote

`all` has adapters of all seven matrices, `rslora` of two with PEFT's other factor, in one of the
two layers. logits.npz has the float32 logits of each over the tokens of hf_llama.npz.
Made with peft 0.21.2, transformers 5.x, torch 2.13.0.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import peft
import safetensors.numpy
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "all": dict(r=3, lora_alpha=6, target_modules=EVERY),
    "rslora": dict(
        r=2,
        lora_alpha=3,
        target_modules=["q_proj", "v_proj"],
        use_rslora=True,
        layers_to_transform=[1],
    ),
}


def base(folder: pathlib.Path) -> tuple[torch.nn.Module, torch.Tensor]:
    """Returns the model of hf_llama.npz and its tokens."""
    with np.load(FOLDER / "hf_llama.npz") as file:
        golden = dict(file)
    (folder / "config.json").write_text(str(golden["config"]))
    tensors = {k.removeprefix("tensor:"): golden[k] for k in golden if k[:7] == "tensor:"}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval().float(), torch.from_numpy(golden["tokens"]).long()


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Returns float32 logits."""
    with torch.no_grad():
        return model(tokens).logits.float().numpy()


def main() -> None:
    """Writes the folders, or the logits of one."""
    logits = {}
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:2] == ["check"]:
            model, tokens = base(pathlib.Path(folder))
            np.save(
                sys.argv[3], logits_of(peft.PeftModel.from_pretrained(model, sys.argv[2]), tokens)
            )
            return
        for name, options in CASES.items():
            torch.manual_seed(0)
            model, tokens = base(pathlib.Path(folder))
            cfg = peft.LoraConfig(task_type="CAUSAL_LM", **options)
            model = peft.get_peft_model(model, cfg).eval()
            for n, w in model.named_parameters():
                if "lora_B" in n:
                    torch.nn.init.normal_(w, std=0.3)
            logits[name] = logits_of(model, tokens)
            out = FOLDER / "peft" / name
            model.save_pretrained(out)
            (out / "README.md").unlink(missing_ok=True)
            members = json.loads((out / "adapter_config.json").read_text())
            members["base_model_name_or_path"] = "hf_llama"
            members["target_modules"] = sorted(members["target_modules"])
            (out / "adapter_config.json").write_text(json.dumps(members, indent=2) + "\n")
    np.savez_compressed(FOLDER / "peft" / "logits.npz", **logits)


if __name__ == "__main__":
    main()
