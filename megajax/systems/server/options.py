"""The settings of a server. Loads neither the ASGI stack nor a model."""

from dataclasses import dataclass
from typing import Literal

from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option, other_than
from megajax.parallel.overlap import Overlap


@dataclass(frozen=True)
class ModelOptions(Checked):
    """The model that is served, and how it is opened."""

    run_dir: str | None = option(None, "folder of a run; none: the newest nano run of runs/")
    hf: str | None = option(
        None, "Hugging Face folder (config.json, safetensors, tokenizer.json) or ORG/NAME"
    )
    gguf: str | None = option(None, "GGUF file, which has its tokenizer and chat template")
    step: int | None = option(
        None,
        "checkpoint of the run; none: the latest",
        needs=other_than("run_dir", None),
        at_least=0,
    )
    quantize: Literal["none", "int8", "int4", "int3"] = option(
        "none", "format to which the blocks' matrices are rounded, in groups of 128 inputs"
    )
    weights: Literal["auto", "dense", "packed"] = option(
        "auto",
        "packed: a GGUF file's matrices in few bits stay so in memory; dense: they are copied "
        "in the data type of computation; auto: packed if dense weights exceed the free memory",
        needs=other_than("gguf", None, harmless=("auto",)),
    )
    tokenizer: str | None = option(None, "bytes or a tokenizer.json; none: the model's own")
    chat_template: str | None = option(
        None, "file with a chat template in Jinja; none: the model's own"
    )
    parse_special: bool = option(
        True,
        "whether the text of a special token in a completion's prompt is that token, where the "
        "request does not say; in a chat, the text of messages is text",
    )
    sampling_defaults: Literal["model", "none"] = option(
        "model",
        "source of temperature, top_p, top_k, min_p, repetition_penalty that a request lacks; "
        "model: generation_config.json or the GGUF file; none: the defaults of the API",
    )
    served_model_name: str | None = option(
        None, "name of the model in requests; none: that of its folder or file"
    )
    adapter: tuple[str, ...] = option(
        (),
        "PEFT folders that are served beside the model, as NAME=FOLDER separated by commas; a "
        "request chooses one by its model",
    )


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How the engine runs; the names are serving.Engine's."""

    dtype: Literal["float32", "bfloat16"] = option(
        "bfloat16", "data type of computation, weights and pages"
    )
    numerics: Literal["fast", "exact"] = option(
        "fast", "exact: an answer has the same bits in every batch"
    )
    overlap: Overlap = option("auto", "how tensor ranks add up their sums; see the training flag")
    max_batch: int = option(64, "largest number of answers that run at a time", at_least=1)
    pages: int | None = option(
        None, "number of pages of keys and values; none: as many as fit", at_least=2
    )
    page_size: int = option(16, "tokens of a page, a power of two up to 128", "tokens", at_least=1)
    prefill_chunk: int | None = option(
        None,
        "most tokens of prompts in a step; none: 256 on a CPU, else 2048",
        "tokens",
        at_least=1,
    )
    context: int | None = option(
        None, "longest prompt and answer together; none: the model's", "tokens", at_least=2
    )
    decode_steps: int | None = option(
        None, "tokens that a dispatch decodes; none: 1 on a CPU, else 4", at_least=1
    )
    prefix_cache: bool = option(True, "whether prompts that begin alike share pages")
    image_cache: int = option(
        2**28, "features of images that are held for later requests", "bytes", at_least=0
    )
    seed: int = option(0, "random seed of requests that give none", at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class HttpOptions(Checked):
    """Who may ask, and how much."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = option(8000, "port to listen on; 0: any that is free", at_least=0, at_most=65535)
    api_key_file: str | None = option(
        None, "file of keys, one a line; a client must send one of them"
    )
    max_waiting: int = option(
        256, "number of answers that may wait; more are refused with 429", at_least=0
    )
    max_body: int = option(
        2**22, "largest body of a request; larger ones are refused with 413", "bytes", at_least=1
    )
    max_images: int = option(8, "largest number of images of a request", at_least=0)
    max_image_bytes: int = option(
        2**24, "largest size of the image files of a request together", "bytes", at_least=0
    )
    max_image_pixels: int = option(
        2**24, "largest number of pixels of an image; a side has at most 32768", at_least=1
    )
    max_image_memory: int = option(
        2**30,
        "largest size of the images, resized, of all requests that run or wait; more are refused "
        "with 429",
        "bytes",
        at_least=1,
    )
    request_log: bool = option(
        True,
        "print a line for each request: method, path, status, numbers of tokens, seconds; never "
        "its text",
    )
    strict_members: bool = option(
        False,
        "refuse members of requests that no answer here depends on (reasoning_effort, verbosity, "
        "modalities, ...)",
    )
    request_timeout_s: float = option(
        600.0, "longest time from a request to its last token", "s", above=0
    )
    max_connections: int | None = option(
        None,
        "largest number of connections; the oldest without a request make room for new ones; none: "
        "what the limit of descriptors allows",
        at_least=1,
    )
    stop_timeout_s: float = option(
        60.0,
        "time from SIGTERM to the end of the process; requests that still run are cut off before",
        "s",
        at_least=0,
    )


@dataclass(frozen=True)
class Config(HttpOptions, EngineOptions, ModelOptions):
    """What to serve, and to whom."""

    emulate: int | None = option(None, "CPU devices to emulate; none: real ones", at_least=1)
    cache_dir: str = option("~/.cache/megajax", "folder for compiled programs")
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, resets=True)
