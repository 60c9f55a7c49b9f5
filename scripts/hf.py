"""Hugging Face folders and GGUF files to runs, and runs to folders, without torch.

    uv run scripts/hf.py import FOLDER RUN
    uv run scripts/hf.py import FILE.gguf RUN
    uv run experiments/pretrain.py --run_dir=RUN --config=RUN/config.json    # goes on from there
    uv run scripts/hf.py export RUN FOLDER [--step=100] [--dtype=bfloat16]

`import` makes a run that has trained 0 steps; `export` writes config.json and safetensors (sharded
above 5 GB) that transformers can load. Families: gpt2, llama, mistral, qwen2, qwen3, mixtral,
qwen3_moe, gpt_oss, deepseek_v3, gemma3_text, olmo2, smollm3, phi3. A run of experiments/finetune.py
is exported too: of chats as a decoder with its chat template, with --lora.rank also as an adapter
of PEFT (--adapters=peft), of labels as bert, roberta, distilbert or albert, a classifier with the
names of its classes; experiments/finetune.py --init_from reads such a folder.
"""

import megajax.core.interrupted  # noqa: F401

import sys
from dataclasses import dataclass, replace
from typing import Literal

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.run_folder import load_params
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder, write_whole
from megajax.core.tree import count
from megajax.data.config import DataConfig
from megajax.data.labelled import shown
from megajax.data.tokenizer import check_vocabulary, need_tokenizer
from megajax.foreign import companions, gguf, hf, peft
from megajax.parallel import sharding
from megajax.training.finetune import load_run
from megajax.training.presets import finetune
from megajax.training.run_dir import saved_labels, saved_tokenizer


@dataclass(frozen=True)
class Config(Checked):
    """How to convert."""

    step: int | None = option(
        None, "checkpoint of the run; none: the latest", verbs=("export",), at_least=0
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "data type of the tensors", verbs=("export",)
    )
    adapters: Literal["merged", "peft"] = option(
        "merged",
        "form of a run with --lora.rank; merged: its weights with the adapters added; peft: "
        "adapter_config.json and adapter_model.safetensors alone, for PEFT",
        verbs=("export",),
    )
    tokenizer: str | None = option(
        None,
        "export: folder or file of a tokenizer to put beside the model; import: instead of its "
        "own, bytes for none",
    )
    key_file: str | None = option(
        None, "file of keys; import: signs the step; export: must have signed it; none: not asked"
    )
    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, resets=True)


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def import_folder(cfg: Config, source: str, run_dir: str) -> None:
    """Makes a run whose step 0 has the weights of the folder or GGUF file."""
    target = expand(run_dir)
    if (target / "config.json").exists():
        raise UserError(f"{target} already holds a run; name a new folder")
    manager = CheckpointManager(target / "checkpoints", keep=0, key_file=cfg.key_file)
    if steps := [step for step in manager.steps() if step]:  # 0: of an import that was stopped
        raise UserError(f"{target} already holds the steps {steps} of a run; name a new folder")
    folder = model_folder(source, "import")
    opened = gguf.GgufModel(source) if folder.is_file() else None
    model = opened.cfg if opened else hf.load_decoder_config(source)  # a run trains decoders
    layout = sharding.layout(cfg.mesh.build(), model=model)
    if opened is None and cfg.tokenizer is None:
        need_tokenizer(source, "import")  # before the work
    params = opened.params(layout) if opened else hf.load_params(source, model, layout)
    data = DataConfig()
    if opened and cfg.tokenizer is None:
        opened.tokenizer().copy_to(target)
    elif cfg.tokenizer != "bytes":
        companions.copy_tokenizer(cfg.tokenizer or folder, target)
    if cfg.tokenizer != "bytes":
        data = DataConfig(tokenizer=str((target / "tokenizer.json").absolute()))
    if opened is None:  # what others may do with the weights, and what they are
        companions.copy_files(companions.licences([source]), target)
    run = replace(finetune(model), data=data)  # what it goes on from there with
    manager.save(0, {"params": params}, data_state={"imported": str(source), "rows": 0})
    manager.close()  # it is read back by then
    write_whole(target / "config.json", config.to_json(run))
    print(f"{count(params):,} parameters of {source} are step 0 of {target}")


def export_run(cfg: Config, run_dir: str, target: str) -> None:
    """Writes a run's parameters as a Hugging Face folder."""
    run = load_run(run_dir)
    layout = sharding.layout(cfg.mesh.build(), model=run.model)
    key = cfg.key_file or run.checkpoint.key_file
    params, step = load_params(
        expand(run_dir),
        run.model,
        layout,
        cfg.step,
        run.checkpoint.dir,
        key,
        run.lora,
        merged=cfg.adapters == "merged",
    )
    if cfg.adapters == "peft":
        peft.save(params, run.lora, target, run.init_from)
        print(f"the adapters of step {step} of {run_dir} are in {target}, as PEFT reads them")
        return
    words = companions.find_tokenizer(cfg.tokenizer or saved_tokenizer(run_dir))
    check_vocabulary(words, run.model.vocab)
    licences = companions.licences([run_dir, run.init_from])
    labels = saved_labels(run_dir)
    hf.save(params, run.model, target, cfg.dtype, tokenizer=words, licences=licences, labels=labels)
    print(f"step {step} of {run_dir} is in {target} ({cfg.dtype})")
    ends = ", ".join(map(str, words.ends)) or "none"
    print(f"tokenizer {words.name}: begin {words.begin}, ends {ends}")
    print(f"licence and model card: {', '.join(f.name for f in licences) or 'none found'}")
    if companions.is_replaced(words, expand(target)):
        print(
            "note: AutoTokenizer of transformers 5 cuts words of this family as Qwen does, not "
            "as this tokenizer; load it with PreTrainedTokenizerFast.from_pretrained"
        )
    if getattr(run.model, "head", None) == "classify":
        names = f"classes {shown(labels)}" if labels else "its classes have no names"
        print(f"{names} (id2label in config.json)")


def main(verb: str, source: str, target: str) -> int:
    """Imports or exports."""
    cfg, _ = config.from_flags(PRESETS, verb=verb)
    convert = config.choose(verb, {"import": import_folder, "export": export_run})
    mesh_.start(cfg.emulate)
    convert(cfg, source, target)
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main, positional=3))
