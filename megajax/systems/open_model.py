"""Opens a trained model to sample from or to serve: a run, a Hugging Face folder or a GGUF file.

scripts/generate.py and scripts/serve.py open their models here. Opening reads configuration and
tokenizer only; `OpenModel.load` reads the parameters, once the mesh is known.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder
from megajax.core.layout import Layout
from megajax.core.mesh import describe, free_bytes
from megajax.core.packed import PackedWeight
from megajax.core.tree import Tree
from megajax.data.chat import ChatTemplate, bos_and_eos, chat_template
from megajax.data.token_ids import GENERATION
from megajax.data.tokenizer import (
    Tokenizer,
    check_vocabulary,
    need_tokenizer,
    open_tokenizer,
)
from megajax.foreign import gguf as gguf_
from megajax.foreign import hf as hf_
from megajax.foreign import hf_quantized
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.networks import network_of
from megajax.models.vlm import VlmConfig
from megajax.parallel import sharding
from megajax.quant.formats import Format
from megajax.quant.quantized_model import quantize_model
from megajax.serving import Engine, SamplingParams
from megajax.systems.prune_export import stored, to_tiles
from megajax.training.config import Config as RunConfig
from megajax.training.finetune import load_run
from megajax.training.run_dir import MAX_CONFIG, saved_tokenizer

# (vLLM, ModelConfig.get_diff_sampling_param) members of generation_config.json that a server takes
# as defaults of requests, and their keys in a GGUF file (llama.cpp, LLM_KV_GENERAL_SAMPLING_*).
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
BITS = {"int8": 8, "int4": 4, "int3": 3}
GROUP = 128  # (GPTQ and AWQ, the papers' group) inputs that share a scale


@dataclass(frozen=True)
class OpenModel:
    """A model whose parameters have not been read yet.

    name: that of its folder or file. cfg: a DecoderConfig, or a VlmConfig where `open_model` was
    told that images can be given. chat: None if the tokenizer has no chat template. outlined:
    whether `outline` knows the parameters before they are read. folder: a Hugging Face folder, in
    which there may be a generation_config.json.
    """

    name: str
    cfg: Any
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    _load: Callable[[Layout], tuple[Tree, str]]
    outlined: bool = True
    gguf: gguf_.GgufModel | None = None
    folder: Path | None = None

    def sampling_defaults(self) -> tuple[dict[str, Any], str]:
        """Returns ({member of SamplingParams: value that the model's files recommend}, a line that
        says so, or "" where they recommend nothing).

        They are members of a folder's generation_config.json, or keys of a GGUF file. As in vLLM, a
        value counts where do_sample is absent; do_sample=false means temperature 0. A run has none.
        Raises: UserError for a value that no request may have.
        """
        if self.gguf is not None:
            file, names = self.gguf.path, {n: f"general.sampling.{k}" for n, k in SAMPLING.items()}
            said = self.gguf.metadata
        elif self.folder is not None and (self.folder / GENERATION).is_file():
            file, names = self.folder / GENERATION, {n: n for n in SAMPLING}
            said = files.read_object(file, hf_.MAX_CONFIG, "sampling_defaults")
        else:
            return {}, ""
        ignore = "--sampling_defaults=none ignores the file's sampling"
        values = {n: said[key] for n, key in names.items() if said.get(key) is not None}
        for name, value in values.items():
            try:
                SamplingParams(**{name: value})
            except UserError as error:
                rule = str(error).replace(name, names[name], 1)
                raise UserError(f"{file}: {rule:.300}; {ignore}") from None
        does = said.get("do_sample")
        if not isinstance(does, bool | None):
            raise UserError(f"{file}: do_sample={does!r:.80} must be true or false; {ignore}")
        if does is False:
            values["temperature"] = 0.0
        listed = ", ".join(f"{name}={value:g}" for name, value in values.items())
        return values, f"sampling defaults of {file}: {listed} ({ignore})" if values else ""

    def outline(self, packed: bool = False) -> Tree:
        """Returns the parameters as ShapeDtypeStructs. packed: as of `load_to_serve`."""
        if self.gguf is not None:
            return self.gguf.outline(packed)
        return network_of(self.cfg).parts(self.cfg).abstract

    def too_large(self, mesh: Mesh, dtype: str) -> str:
        """Returns why a GGUF file's matrices have to stay in few bits, or "" if they need not or
        cannot (`one_rank`). Every process of the mesh must call it.

        dtype: of dense weights.
        """
        if self.gguf is None or mesh.shape["tensor"] > 1:
            return ""
        size = jnp.dtype(dtype).itemsize * sum(x.size for x in jax.tree.leaves(self.outline()))
        if mesh.devices.flat[0].platform == "cpu":  # whose devices share the memory
            size *= len(mesh.local_devices)
        packed = jax.tree.leaves(self.outline(packed=True), is_leaf=_is_packed)
        free = free_bytes(mesh)
        if size <= free or not any(map(_is_packed, packed)):
            return ""
        return f"dense weights need {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"

    def engine(
        self,
        mesh: Mesh,
        load: Callable[[], tuple[Tree, str]],
        tokens: Sequence[int] = (),
        *,
        outlined: bool = True,
        packed: bool = False,
        **options: Any,
    ) -> tuple[Engine, str, list[Future]]:
        """Returns (an engine, the line of `load`, futures that are done when the first programs
        are ready).

        On one CPU process, programs are compiled while the parameters are read.
        Args: load: reads the parameters. tokens: as of Engine.compile; with any, the programs of
          other sizes are compiled when a step needs them. outlined: whether `load` returns what
          `outline(packed)` says. options: of the engine.
        """
        start = functools.partial(Engine, self.cfg, mesh=mesh, tokenizer=self.tokenizer, **options)
        if outlined and self.outlined and mesh.devices.flat[0].platform == "cpu":
            engine = start(self.outline(packed))
            first = engine.compile(tokens, not tokens)
            params, what = load()
            engine.load(params, 0)
            return engine, what, first
        params, what = load()
        engine = start(params)
        return engine, what, engine.compile(tokens, not tokens)

    def load(self, layout: Layout) -> tuple[Tree, str]:
        """Returns (parameters as the layout stores them, a line that says what was read).

        Raises: UserError for a checkpoint or a folder that is missing, damaged or of another shape.
        """
        params, what = self._load(layout)
        return params, f"{what}, {describe(layout.mesh)}"

    def load_to_serve(
        self, mesh: Mesh, quantize: str = "none", dtype: str = "float32", packed: bool = False
    ) -> tuple[Tree, str]:
        """Returns what `load` returns, for `serving.Engine` on this mesh: all devices of a tensor
        rank have a copy.

        quantize: a name of BITS: the blocks' matrices rounded to nearest, in groups of GROUP
          inputs; 'none': as they are stored. dtype: in which a GGUF file's dense matrices are
          read, when the engine computes in it. packed: a GGUF file's matrices in few bits stay so.
        Raises: UserError also for `packed` with `quantize`, for experts, a stored form that is
          quantized already, and several tensor ranks, for which no matrix can be quantized yet.
        """
        layout = sharding.layout(mesh, "none", decode=True, model=self.cfg)
        if packed and quantize != "none":
            raise UserError(
                f"weights=packed keeps the bits of the file, and quantize={quantize} rounds its "
                "weights to others: leave out one (--weights, --quantize)"
            )
        if self.gguf is not None and quantize == "none":
            if packed:
                one_rank(layout)
            params = self.gguf.params(layout, dtype, packed)
            params = sharding.place(layout, self.cfg.axes, params)
            bits = ", its matrices in the file's bits" if packed else ""
            return params, f"{self.gguf.path}{bits}, {describe(layout.mesh)}"
        params, what = self.load(layout)
        if quantize == "none":
            return params, what
        if isinstance(self.cfg, VlmConfig):
            raise UserError(
                f"quantize={quantize}: a vision-language model is not quantized; the default is "
                "none (--quantize)"
            )
        one_rank(layout)
        if any(isinstance(w, PackedWeight) for w in jax.tree.leaves(params, is_leaf=_is_packed)):
            raise UserError(f"{self.name} is packed or quantized as it is stored (--quantize)")
        fmt = Format(BITS[quantize], GROUP, 0, scale_dtype="float16")
        quantized = quantize_model(params, self.cfg, fmt)
        return sharding.place(layout, self.cfg.axes, quantized), f"{what} in {quantize}"


def open_model(
    *,
    run_dir: str | None = None,
    hf: str | None = None,
    gguf: str | None = None,
    step: int | None = None,
    tokenizer: str | None = None,
    tiles: bool = False,
    vision: bool = False,
) -> OpenModel:
    """Opens the one model that is named.

    Args: run_dir: folder of a training run. hf: Hugging Face folder, or ORG/NAME. gguf: GGUF
      file. step: checkpoint of the run; None: the latest. tokenizer: 'bytes' or a tokenizer.json;
      None: the model's. tiles: the matrices of a pruned run become packed tiles. vision: a
      vision-language model is opened too.
    Raises: UserError for none or several, for a folder that cannot be read, or one with a model
      that is not opened.
    """
    if sum(name is not None for name in (run_dir, hf, gguf)) != 1:
        raise UserError("give one of --run_dir, --hf and --gguf")
    if run_dir is not None:
        opened = _open_run(expand(run_dir, "run_dir"), step, tokenizer, tiles, vision)
    elif hf is not None:
        opened = _open_hf(model_folder(hf, "hf"), tokenizer, vision, expand(hf, "hf").name)
    else:
        opened = _open_gguf(expand(gguf or "", "gguf"), tokenizer)
    check_vocabulary(opened.tokenizer, opened.cfg.vocab)
    return opened


def kind_of(path: str | Path) -> Literal["run_dir", "hf", "gguf"]:
    """Returns which argument of `open_model` a path is, by what is in it.

    Raises: UserError for what is no folder of a run, no Hugging Face folder, no GGUF file and no
      ORG/NAME.
    """
    place = model_folder(path)
    if place.is_dir():
        if not (place / "config.json").is_file():
            models = sorted(file.name for file in place.glob("*.gguf"))
            near = f"; nearest: {place / models[0]}" if models else ""
            raise UserError(
                f"{place} has no config.json, so it is neither the folder of a run nor a Hugging "
                f"Face folder{near}"
            )
        said = files.read_object(place / "config.json", MAX_CONFIG)
        return "run_dir" if isinstance(said.get("model"), dict) else "hf"
    try:
        with files.open_regular(place) as file:
            if file.read(4) == b"GGUF":
                return "gguf"
    except OSError as error:
        raise UserError(f"cannot read {place}: {error.strerror}") from None
    raise UserError(f"{place} is no GGUF file; give one, the folder of a run or a Hugging Face one")


def one_rank(layout: Layout) -> None:
    """Refuses quantized matrices on several tensor ranks. Raises: UserError."""
    if (ranks := layout.mesh.shape["tensor"]) > 1:
        raise UserError(
            f"quantized matrices are not cut over tensor ranks yet, and the mesh has {ranks} of "
            "them; serve with --mesh.tensor=1"
        )


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedWeight)


# The lines that data/vision.py:Dialogue makes of turns for a tokenizer without Qwen2-VL's control
# tokens. The end token of an earlier answer has no text: chats of one question are as in training.
LINES = """\
{% for message in messages %}{{ message.content }}{{ '' if message.role == 'assistant' else '\n' }}\
{% endfor %}"""


def _open_run(
    folder: Path, step: int | None, tokenizer: str | None, tiles: bool, vision: bool
) -> OpenModel:
    run = load_run(folder)
    sees = isinstance(run.model, VlmConfig)
    if not isinstance(run.model, DecoderConfig) and not (sees and vision):
        kind = "a vision-language model, which scripts/serve.py serves" if sees else "an encoder"
        raise UserError(f"{folder} is a run of {kind}; name the run of a decoder (--run_dir)")

    def load(layout: Layout) -> tuple[Tree, str]:
        # Orbax comes with it, whose import takes 0.4 s that no file of another kind needs.
        from megajax.checkpoint.run_folder import load_params

        params, chosen = load_params(
            folder, run.model, layout, step, run.checkpoint.dir, run.checkpoint.key_file, run.lora
        )
        what = f"{folder}, step {chosen}"
        return _pack(run, layout, params, what) if tiles else (params, what)

    named = open_tokenizer(tokenizer) if tokenizer else saved_tokenizer(folder)
    chat = chat_template(expand(tokenizer) if tokenizer else folder, named)
    if sees and chat is None:
        chat = ChatTemplate(LINES, "", "", () if named.begin is None else (named.begin,))
    return OpenModel(folder.name, run.model, named, chat, load)


def _pack(run: RunConfig, layout: Layout, params: Tree, what: str) -> tuple[Tree, str]:
    """Packs a run's pruned matrices as tiles. Raises: UserError."""
    if not run.prune.sparsity:
        raise UserError(
            "the run was not pruned, so no matrix has tiles to leave out; sample without --tiles, "
            "or train with --prune.sparsity (--tiles)"
        )
    packed = to_tiles(
        params,
        None,
        decoder.parts(run.model).axes,
        layout=layout,
        tile=run.prune.tile,
        chunk=run.prune.chunk,
        single=run.prune.pattern == "tew",
    )
    held = f"pruned matrices as tiles, which hold {stored(packed):.1%} of their entries"
    return packed, f"{what}, {held}"


def _open_hf(folder: Path, tokenizer: str | None, vision: bool, name: str) -> OpenModel:
    cfg: Any = hf_.load_config(folder, "hf")
    if not (vision and isinstance(cfg, VlmConfig)):
        cfg = hf_.load_decoder_config(folder, "hf")
    if tokenizer is None:
        need_tokenizer(folder, "hf")

    def load(layout: Layout) -> tuple[Tree, str]:
        if quantization is None:
            return hf_.load_params(folder, cfg, layout), str(folder)
        one_rank(layout)
        params = hf_quantized.load(folder)[1]
        what = f"{folder} ({quantization.method}, {quantization.bits} bits)"
        return sharding.place(layout, cfg.axes, params), what

    quantization = hf_quantized.settings(folder)
    named = open_tokenizer(tokenizer or str(folder))
    place = expand(tokenizer) if tokenizer else folder
    return OpenModel(
        name,
        cfg,
        named,
        chat_template(place, named),
        load,
        outlined=quantization is None,
        folder=folder,
    )


def _open_gguf(file: Path, tokenizer: str | None) -> OpenModel:
    opened = gguf_.GgufModel(file)

    def load(layout: Layout) -> tuple[Tree, str]:
        return opened.params(layout), str(file)

    if tokenizer is not None:
        named = open_tokenizer(tokenizer)
        return OpenModel(
            file.name,
            opened.cfg,
            named,
            chat_template(expand(tokenizer), named),
            load,
            gguf=opened,
        )
    named, chat = opened.tokenizer(), None
    if named.chat_template:
        chat = ChatTemplate(named.chat_template, *bos_and_eos(named))
    return OpenModel(file.name, opened.cfg, named, chat, load, gguf=opened)
