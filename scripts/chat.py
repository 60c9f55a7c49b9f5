"""Talks with a model in the terminal: of a run, a Hugging Face folder, a GGUF file, or a server.

uv run --extra serve scripts/chat.py --hf=FOLDER
uv run --extra serve scripts/chat.py --gguf=FILE --system="Answer in one sentence."
uv run scripts/chat.py --url=http://127.0.0.1:8000
uv run scripts/chat.py --run_dir=RUN --raw           # no chat template: texts are continued

/help lists the commands. Ctrl-C stops an answer, and at the prompt twice leaves. If standard input
is a pipe, each line is a message, and standard output has the answers alone.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megajax.core import config, files
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, equal, group, option, other_than
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.serving.params import Sampling

MAX_KEYS = 2**20  # (chosen) bytes of a file of keys


@dataclass(frozen=True)
class Config(Checked):
    """The model to talk with, and how it answers."""

    run_dir: str | None = option(None, "folder of a run")
    hf: str | None = option(
        None, "Hugging Face folder (config.json, safetensors, tokenizer.json) or ORG/NAME"
    )
    gguf: str | None = option(None, "GGUF file, which has its tokenizer and chat template")
    url: str | None = option(None, "address of a server with OpenAI's interface")
    api_key_file: str | None = option(
        None, "file whose first line is the server's key", needs=other_than("url", None)
    )
    model: str | None = option(
        None,
        "name of one of the server's models, or of its adapters; none: the first",
        needs=other_than("url", None),
    )
    step: int | None = option(
        None,
        "checkpoint of the run; none: the latest",
        needs=other_than("run_dir", None),
        at_least=0,
    )
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    adapter: str | None = option(
        None, "PEFT folder of an adapter for the model; none: no adapter", needs=equal("url", None)
    )
    raw: bool = option(False, "continue the texts as they are, without a chat template")
    system: str = option("", "system prompt, the first message of every request")
    new_tokens: int = option(512, "length of the longest answer", "tokens", at_least=1)
    context: int = option(
        4096, "longest conversation, where the model's is longer", "tokens", at_least=4
    )
    sampling_defaults: Literal["model", "none"] = option(
        "model",
        "source of the sampling options that are not given; model: the model's files, or the "
        "server; none: the defaults of this script",
    )
    seed: int | None = option(
        None, "random seed of every answer; none: they differ", at_least=0, at_most=2**32 - 1
    )
    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    cache_dir: str = option("~/.cache/megajax", "folder for compiled programs")
    sampling: Sampling = group(Sampling)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, resets=True)


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def main() -> int:
    """Talks until the input ends."""
    flags_set: set[str] = set()

    def note(base: Config, flags: Mapping[str, Any], read: Mapping[str, Any]) -> Config:
        flags_set.update(flags, read)
        return base

    cfg, _ = config.from_flags(PRESETS, note)
    sampling = dataclasses.asdict(cfg.sampling)
    if cfg.sampling_defaults == "model" and cfg.url is not None:
        sampling = {n: v for n, v in sampling.items() if f"sampling.{n}" in flags_set}
    if cfg.seed is not None:
        sampling["seed"] = cfg.seed
    try:
        from megajax.systems import terminal

        model = remote(cfg, sampling) if cfg.url is not None else local(cfg, sampling, flags_set)
    except ImportError as error:
        raise UserError(
            f"{error}: chats need the server's packages: uv sync --extra serve"
        ) from None
    terminal.Chat(model, raw=cfg.raw, system=cfg.system).run()
    return 0


def remote(cfg: Config, sampling: dict[str, Any]) -> Any:
    """Returns the model of a server. Raises: UserError."""
    from megajax.systems import terminal

    if (cfg.run_dir or cfg.hf or cfg.gguf) is not None:
        raise UserError("give one of --run_dir, --hf, --gguf and --url")
    key = None
    if cfg.api_key_file is not None:
        path = expand(cfg.api_key_file, "api_key_file")
        try:
            key = files.read_bytes(path, MAX_KEYS).decode().split("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path}: {error} (--api_key_file)") from None
    model = terminal.RemoteModel(cfg.url or "", key, sampling, cfg.new_tokens, cfg.model)
    if "/v1/chat/completions" not in model.endpoints and not cfg.raw:
        raise UserError(f"{model.name} has no chat template; continue texts with it (--raw)")
    return model


def local(cfg: Config, sampling: dict[str, Any], flags_set: set[str]) -> Any:
    """Opens a model in this process. Raises: UserError."""
    from megajax import LLM
    from megajax.systems import terminal
    from megajax.systems.open_model import open_model

    opened = open_model(
        run_dir=cfg.run_dir, hf=cfg.hf, gguf=cfg.gguf, step=cfg.step, tokenizer=cfg.tokenizer
    )
    if opened.chat is None and not cfg.raw:
        raise UserError(
            f"{opened.name} has no chat template, so it knows no messages; continue texts with it "
            "(--raw), or name a model that was trained on chats"
        )
    if cfg.sampling_defaults == "model":
        values, line = opened.sampling_defaults()
        sampling |= {n: v for n, v in values.items() if f"sampling.{n}" not in flags_set}
        if line:
            print(line, file=sys.stderr)
    print(f"reading {opened.name}, compiling the first program ...", file=sys.stderr, flush=True)
    begun = time.monotonic()
    llm = LLM(
        opened,
        adapter=cfg.adapter,
        context=min(cfg.context, opened.cfg.max_positions),
        max_batch=8,
        emulate=cfg.emulate,
        cache_dir=cfg.cache_dir,
        **({} if cfg.mesh == mesh_.MeshSpec() else {"mesh": cfg.mesh}),
    )
    model = terminal.LocalModel(llm, sampling, cfg.new_tokens)
    # The programs that a short first message needs, so that the prompt comes when it can be used.
    for number, count in enumerate((16, 128), 1):
        text = [{"role": "user", "content": "x" * count}]
        list(terminal.LocalModel(llm, {"ignore_eos": True}, 2).answer(text, cfg.raw))
        print(
            f"program {number} of 2 is ready ({time.monotonic() - begun:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    return model


if __name__ == "__main__":
    sys.exit(config.run(main))
