"""A language model to use from Python: chat, generate, score.

    from megajax import LLM
    llm = LLM("runs/pretrain/nano-...")        # or a Hugging Face folder, ORG/NAME, a GGUF file
    llm.generate("def ", max_tokens=64, temperature=0.8)
    llm.chat([{"role": "user", "content": "What is the capital of Italy?"}])

It opens a model as scripts/serve.py does and runs one serving.Engine, in this process. Nothing is
served; `llm.engine` is what megajax.evaluation takes.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.core import mesh as mesh_
from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand
from megajax.data.chat import Chat
from megajax.data.tokenizer import prompt_ids
from megajax.evaluation import generate, token_logprobs
from megajax.serving import Engine, SamplingParams
from megajax.systems.open_model import OpenModel, kind_of, open_model
from megajax.systems.server.options import EngineOptions

CONTEXT = 4096  # (chosen) tokens of a context by default, where the model has as many or more
ANSWER = 512  # (chosen) tokens of an answer by default, where the context leaves as many
ADAPTER = "adapter"  # its name in the engine
AXES = tuple(axis for axis in MESH_AXES if axis != "context")  # that is the engine's option here
ENGINE = {field.name for field in dataclasses.fields(EngineOptions)}


class LLM:
    """A model with its tokenizer and an engine. Not thread-safe."""

    def __init__(
        self,
        path_or_run: str | Path | OpenModel,
        *,
        step: int | None = None,
        tokenizer: str | None = None,
        adapter: str | Path | None = None,
        quantize: Literal["none", "int8", "int4", "int3"] = "none",
        sampling_defaults: Literal["model", "none"] = "model",
        emulate: int | None = None,
        cache_dir: str | Path | None = "~/.cache/megajax",
        **options: Any,
    ):
        """Opens the model and reads its parameters.

        Args: path_or_run: the folder of a training run, a Hugging Face folder or a GGUF file, told
          apart by what is in it, or ORG/NAME at huggingface.co; or what systems.open_model returns.
          step: checkpoint of the run; None: the latest. tokenizer: 'bytes' or a tokenizer.json;
          None: the model's. adapter: PEFT folder of an adapter for the model. quantize: format to
          which the blocks' matrices are rounded. sampling_defaults: 'model': parameters that a call
          leaves out are those that the model's files recommend, if they do. emulate:
          CPU devices to emulate, before jax has touched a device. cache_dir: folder for compiled
          programs, unless jax has one; None: none is kept. options: of the engine: context
          (default: the model's, at most CONTEXT tokens), dtype (float32 on a CPU, else bfloat16),
          max_batch (16 on a CPU, else 64), pages, page_size, prefill_chunk, numerics, seed, ...;
          and sizes of the mesh: tensor, expert, data, node, pipe; or mesh, a MeshSpec over all
          devices. Without any of these there is one device.
        Raises: UserError for a model that cannot be opened, and options that cannot be.
        """
        mesh_options, engine_options = _sort(options)
        if sampling_defaults not in ("model", "none"):
            raise UserError(f"sampling_defaults={sampling_defaults!r} must be 'model' or 'none'")
        if isinstance(path_or_run, OpenModel):
            opened = path_or_run
        else:
            source: Any = {kind_of(path_or_run): str(path_or_run)}
            opened = open_model(**source, step=step, tokenizer=tokenizer)
        self.name, self.cfg = opened.name, opened.cfg
        self.tokenizer: Any = opened.tokenizer
        self._template = opened.chat
        self._sampling = opened.sampling_defaults()[0] if sampling_defaults == "model" else {}
        _start(emulate)
        if cache_dir is not None and jax.config.jax_compilation_cache_dir is None:
            mesh_.cache_programs(cache_dir)
        mesh = _mesh(mesh_options)
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        defaults: dict[str, Any] = {
            "context": min(CONTEXT, opened.cfg.max_positions),
            "dtype": "float32" if is_cpu else "bfloat16",
            "max_batch": 16 if is_cpu else 64,
        }
        set_all = dataclasses.asdict(EngineOptions(**{**defaults, **engine_options}))
        packed = quantize == "none" and bool(opened.too_large(mesh, set_all["dtype"]))
        self.engine: Engine
        self.engine, self.source, first = opened.engine(
            mesh,
            lambda: opened.load_to_serve(mesh, quantize, set_all["dtype"], packed),
            (1,),  # programs of other sizes are compiled when they are needed
            outlined=quantize == "none",
            packed=packed,
            **({} if adapter is None else {"adapters": {ADAPTER: expand(adapter, "adapter")}}),
            **set_all,
        )
        self.engine.adapter = None if adapter is None else ADAPTER
        for program in first:
            program.result()

    def __repr__(self) -> str:
        return f"LLM({self.source}; context {self.engine.context} tokens)"

    # ---- text

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a prompt, with the begin token if the tokenizer writes one.

        special: whether the text of a special token is that token.
        """
        return prompt_ids(self.tokenizer, text, special)

    def generate(self, prompts: str | Sequence[str], **params: Any) -> list[str]:
        """Returns the continuation of each prompt, without the end token or a stop string.

        Args: prompts: a text or several. params: of serving.SamplingParams: max_tokens (default:
          what the context leaves, at most ANSWER), temperature, top_p, stop, seed, n, ... With n
          there are n texts for each prompt, one prompt after the other.
        Raises: UserError for a prompt without tokens or too long, and parameters that cannot be.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        if not all(isinstance(prompt, str) for prompt in listed):
            raise UserError("prompts must be a text or a list of texts")
        ids = [self.encode(prompt) for prompt in listed]
        return [text for texts in self._answer(ids, params, "prompts") for text in texts]

    def chat(self, messages: Sequence[Mapping[str, Any]], **params: Any) -> str:
        """Returns the assistant's answer to the messages of a chat, by the model's chat template.

        Args: messages: each {'role': 'system', 'user' or 'assistant', 'content': a text}. params:
          as of `generate`, without n.
        Raises: UserError for a model without a chat template, messages that the template refuses,
          and as `generate`.
        """
        if params.get("n", 1) != 1:
            raise UserError(f"n={params['n']} must be 1: a chat has one answer")
        ids = self.prompt(messages)
        return self._answer([ids], params, "messages")[0][0]

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a chat, up to where the assistant answers. Raises: UserError."""
        if self._template is None:
            raise UserError(
                f"{self.name} has no chat template: use generate, or name a model with one"
            )
        if not isinstance(messages, list | tuple) or not messages:
            raise UserError("messages must be a list with at least one message")
        for number, message in enumerate(messages):
            legal = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not legal or not isinstance(message.get("content"), str):
                raise UserError(f"messages[{number}] must have a role and a content, both texts")
        return self._renderer.encode(messages, {}, False, self.engine.context)

    def logprobs(self, texts: str | Sequence[str], **windows: Any) -> list[np.ndarray]:
        """Returns for each text the log-probability of each of its tokens after the first, float32.

        The tokens are those of `encode`: their first one is the begin token if the tokenizer writes
        one. windows: as of evaluation.token_logprobs, for texts longer than the context.
        Raises: UserError for a text without tokens.
        """
        listed = [texts] if isinstance(texts, str) else list(texts)
        rows = [self.encode(text) for text in listed]
        return token_logprobs(self.engine, rows, name="texts", **windows)

    # ---- parts

    def _answer(
        self, ids: Sequence[Sequence[int]], params: Mapping[str, Any], name: str
    ) -> list[list[str]]:
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        if unknown := [member for member in params if member not in known]:
            raise UserError(
                f"{unknown[0]} is no sampling parameter.{did_you_mean(unknown[0], known)}"
            )
        if not ids:
            return []
        longest = max(map(len, ids))
        left = {"max_tokens": max(1, min(ANSWER, self.engine.context - longest))}
        left["max_tokens"] = max(left["max_tokens"], params.get("min_tokens", 0))
        asked = SamplingParams(**{**left, **self._sampling, **params})
        return generate(self.engine, ids, asked, name)

    @functools.cached_property
    def _renderer(self) -> Chat:
        return Chat(self._template, self.tokenizer)


def _sort(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (options of the mesh, of the engine). Raises: UserError for an unknown name."""
    of_mesh = {"mesh", *AXES}
    for name in options:
        if name not in ENGINE and name not in of_mesh:
            raise UserError(
                f"{name} is no option of an engine and no axis of a mesh."
                f"{did_you_mean(name, [*ENGINE, *AXES])}"
            )
    if "mesh" in options and len(of_mesh & set(options)) > 1:
        raise UserError("give either mesh or sizes of its axes")
    parts = [{n: v for n, v in options.items() if (n in of_mesh) is side} for side in (True, False)]
    return parts[0], parts[1]


def _mesh(options: Mapping[str, Any]) -> Mesh:
    """Returns the mesh of options of a mesh. Raises: UserError if there are too few devices."""
    devices = jax.devices()
    if "mesh" in options:
        return options["mesh"].build(devices)
    spec = mesh_.MeshSpec(**{"data": 1, **options})
    count = math.prod(getattr(spec, axis) for axis in MESH_AXES)
    if count > len(devices):
        raise UserError(
            f"the mesh has {count} devices, and there are {len(devices)}; give smaller sizes, or "
            f"emulate={count} on a CPU"
        )
    return spec.build(devices[:count])


def _start(emulate: int | None) -> None:
    """Prepares jax as core.mesh.start does, but leaves devices that it has already as they are."""
    if emulate is None:
        if mesh_.count_gpus():
            mesh_.set_memory_share()
        return
    try:
        mesh_.start(emulate)
    except UserError:
        there = jax.devices()
        if emulate < 1 or there[0].platform != "cpu" or len(there) < emulate:
            raise
