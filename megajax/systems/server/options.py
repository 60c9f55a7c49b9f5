"""The settings of a server. Loads neither the ASGI stack nor a model."""

from dataclasses import dataclass
from typing import Literal

from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.needs import other_than
from megajax.parallel.overlap import Overlap


@dataclass(frozen=True)
class ModelOptions(Checked):
    """Which model, and how it is opened."""

    run_dir: str | None = option(None, "folder of a run; none: the newest nano run of runs/")
    hf: str | None = option(None, "Hugging Face folder (config.json, safetensors, tokenizer.json)")
    gguf: str | None = option(None, "GGUF file, which has its tokenizer and chat template")
    step: int | None = option(
        None,
        "checkpoint of the run; none: the latest",
        needs=other_than("run_dir", None),
        at_least=0,
    )
    quantize: Literal["none", "int8", "int4", "int3"] = option(
        "none", "the blocks' matrices, rounded to nearest in groups of 128 inputs"
    )
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    chat_template: str | None = option(None, "file with a chat template in Jinja; none: its own")
    served_model_name: str | None = option(None, "that requests give; none: of its folder or file")


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How the engine runs; the names are serving.Engine's."""

    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "of compute, weights and pages")
    numerics: Literal["fast", "exact"] = option("fast", "exact: the same bits in every batch")
    overlap: Overlap = option("auto", "how tensor ranks add up their sums; see the training flag")
    max_batch: int = option(64, "answers that run at a time", at_least=1)
    pages: int | None = option(None, "of keys and values; none: what fits", at_least=2)
    page_size: int = option(16, "a power of two up to 128", "tokens", at_least=1)
    prefill_chunk: int | None = option(
        None, "of a prompt in a step; none: 256 on a CPU, else 2048", "tokens", at_least=1
    )
    context: int | None = option(
        None, "of prompt and answer; none: the model's", "tokens", at_least=2
    )
    decode_steps: int | None = option(
        None, "tokens that a dispatch decodes; none: 1 on a CPU, else 4", at_least=1
    )
    prefix_cache: bool = option(True, "prompts that begin alike share pages")
    seed: int = option(0, "of requests without one", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class HttpOptions(Checked):
    """Who may ask, and how much."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = option(8000, "to listen on; 0: any that is free", at_least=0, at_most=65535)
    api_key_file: str | None = option(None, "a key a line, one of which a client must send")
    max_waiting: int = option(256, "answers that may wait; more get 429", at_least=0)
    max_body: int = option(2**22, "of a request; longer ones get 413", "bytes", at_least=1)
    request_timeout_s: float = option(600.0, "from a request to its last token", "s", above=0)
    stop_timeout_s: float = option(60.0, "for running requests after SIGTERM", "s", at_least=0)


@dataclass(frozen=True)
class Config(HttpOptions, EngineOptions, ModelOptions):
    """What to serve, and to whom."""

    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, whole=True)
