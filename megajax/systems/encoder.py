"""A trained encoder that makes vectors or classes of texts: opened from a folder, used on texts.

Folders: of Hugging Face, with sentence-transformers' files or without, and runs of
experiments/finetune.py that learned labels. Texts are computed without padding: those of a call are
packed into one row of tokens (ByteTransformer, arXiv 2210.03052), whose length is one of a few, so
that few programs are compiled.

Legend: B texts, T packed tokens, D model width or classes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder
from megajax.core.tree import Tree
from megajax.data.passages import Template
from megajax.data.tokenizer import Tokenizer, check_vocabulary, need_tokenizer, open_tokenizer
from megajax.foreign import hf
from megajax.models import encoder
from megajax.models.encoder_config import EncoderConfig
from megajax.parallel import sharding
from megajax.training.finetune import load_run
from megajax.training.run_dir import saved_labels, saved_tokenizer
from pallas_kernels import bucket

TEXTS = 64  # (chosen) texts of a call
TOKENS = {"cpu": 1024}  # (chosen) tokens of a call: attention on a CPU has T x T scores a head
MANY = 16384  # (chosen) the same elsewhere
MAX_SETTINGS = 2**20  # (chosen) bytes of a file of sentence-transformers
KINDS = ("Transformer", "Pooling", "Normalize")
POOLINGS: dict[str, Literal["mean", "cls"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How vectors are made of what the encoder gives for tokens. most: tokens of a text, with the
    special ones; what is behind them is not read. normalize: to length 1."""

    most: int
    kind: Literal["mean", "cls"] = "mean"
    normalize: bool = False


@dataclasses.dataclass(frozen=True)
class OpenEncoder:
    """An encoder that has not been read yet. labels: of a classifier, else ()."""

    name: str
    cfg: EncoderConfig
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    pooling: Pooling
    _load: Callable[[], Tree]

    def load(self) -> "Encoder":
        """Reads the parameters onto the first device."""
        return Encoder(self, self._load())


class Encoder:
    """An encoder on the first device, in float32."""

    def __init__(self, opened: OpenEncoder, params: Tree):
        """params: of opened.cfg."""
        self.opened, self._params = opened, params
        self.name, self.labels, self.tokenizer = opened.name, opened.labels, opened.tokenizer
        self.pooling = opened.pooling
        self.template = Template.of(opened.tokenizer, opened.pooling.most)
        device = jax.local_devices()[0].platform
        self._most = max(TOKENS.get(device, MANY), opened.pooling.most)
        parts = encoder.parts(opened.cfg)

        def work(params: Tree, packed: dict[str, jax.Array], starts_B: jax.Array) -> jax.Array:
            if opened.labels:
                logits = encoder.classify_packed(parts, params, packed, starts_B)
                return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
            kind, normalize = opened.pooling.kind, opened.pooling.normalize
            vectors_BD = encoder.embed_packed(parts, params, packed, starts_B, kind)
            if not normalize:
                return vectors_BD
            # (sentence-transformers, models/Normalize.py) the least length is that of torch
            lengths = jnp.linalg.norm(vectors_BD, axis=-1, keepdims=True)
            return vectors_BD / jnp.maximum(lengths, 1e-12)

        self._work = jax.jit(work)

    @property
    def width(self) -> int:
        """Numbers of a vector, or of classes."""
        return len(self.labels) or self.opened.cfg.width

    def compile(self, say: Callable[[str], None]) -> None:
        """Compiles the programs of all sizes, and says so."""
        sizes = sorted({self._capacity(n) for n in range(1, self._most + 1)})
        for number, size in enumerate(sizes, 1):
            self._run([np.zeros(1, np.int32)], size)
            say(f"program {number} of {len(sizes)} is compiled")

    def row(self, text: str, special: bool = True) -> tuple[np.ndarray, bool]:
        """Returns (the token ids of a text with the special ones around it, whether all of it is
        read). special: as of Tokenizer.encode."""
        (ids,) = self.tokenizer.encode([text], special, self.template.room)
        return self.template.row(ids), len(ids) <= self.template.room

    def batches(self, rows: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
        """Yields the rows in the parts that one call computes."""
        begin, tokens = 0, 0
        for i, row in enumerate(rows):
            if i > begin and (i - begin == TEXTS or tokens + len(row) > self._most):
                yield rows[begin:i]
                begin, tokens = i, 0
            tokens += len(row)
        if begin < len(rows):
            yield rows[begin:]

    def __call__(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns a vector, or the probabilities of the classes, of each row of `row` (B, D)."""
        made = [self.compute(batch) for batch in self.batches(rows)]
        return np.concatenate(made) if made else np.zeros((0, self.width), np.float32)

    def compute(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the same of a part of `batches`."""
        return self._run(batch, self._capacity(sum(map(len, batch))))[: len(batch)]

    def _capacity(self, tokens: int) -> int:
        return bucket(tokens, most=self._most, steps=1)

    def _run(self, batch: Sequence[np.ndarray], capacity: int) -> np.ndarray:
        lengths_B = [len(row) for row in batch]
        ids_T, places_T = np.zeros((2, 1, capacity), np.int32)
        segments_T = np.full((1, capacity), -1, np.int32)
        ids_T[0, : sum(lengths_B)] = np.concatenate(batch)
        places_T[0, : sum(lengths_B)] = np.concatenate([np.arange(n) for n in lengths_B])
        segments_T[0, : sum(lengths_B)] = np.repeat(np.arange(len(batch)), lengths_B)
        starts_B = np.zeros(TEXTS, np.int32)
        starts_B[: len(batch)] = np.cumsum([0, *lengths_B[:-1]])
        packed = {"tokens": ids_T, "positions": places_T, "segments": segments_T}
        return np.asarray(self._work(self._params, packed, starts_B))


def open_encoder(
    *,
    run_dir: str | None = None,
    hf: str | None = None,
    step: int | None = None,
    tokenizer: str | None = None,
) -> OpenEncoder | None:
    """Opens a run or a Hugging Face folder that has an encoder; None: it has another model.

    Args: as of open_model. Raises: UserError for an encoder that makes neither vectors nor classes.
    """
    if run_dir is not None:
        return _open_run(expand(run_dir, "run_dir"), step, tokenizer)
    if hf is None:
        return None
    return _open_folder(model_folder(hf, "hf"), tokenizer, expand(hf, "hf").name)


def _open_run(folder: Path, step: int | None, tokenizer: str | None) -> OpenEncoder | None:
    run: Any = load_run(folder)
    if not isinstance(run.model, EncoderConfig):
        return None
    named = open_tokenizer(tokenizer) if tokenizer else saved_tokenizer(folder)
    labels = _labels(run.model, saved_labels(folder))

    def load() -> Tree:
        from megajax.checkpoint.run_folder import load_params  # Orbax comes with it

        key = run.checkpoint.key_file
        return load_params(folder, run.model, _layout(), step, run.checkpoint.dir, key, run.lora)[0]

    return OpenEncoder(folder.name, run.model, named, labels, Pooling(run.train.seq_len), load)


def _open_folder(folder: Path, tokenizer: str | None, name: str) -> OpenEncoder | None:
    cfg = hf.load_config(folder, "hf")
    if not isinstance(cfg, EncoderConfig):
        return None
    if tokenizer is None:
        need_tokenizer(folder, "hf")
    named = open_tokenizer(tokenizer or str(folder))
    check_vocabulary(named, cfg.vocab)
    labels = _labels(cfg, hf.load_labels(folder, "hf") if cfg.head == "classify" else None)

    def load() -> Tree:
        return hf.load_params(folder, cfg)

    return OpenEncoder(name, cfg, named, labels, read_pooling(folder, cfg), load)


def _layout() -> Any:
    from megajax.core.mesh import MeshSpec

    return sharding.layout(MeshSpec().build(jax.local_devices()[:1]))


def _labels(cfg: EncoderConfig, labels: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of a classifier's classes; of another encoder, ()."""
    if cfg.head != "classify":
        return ()
    return tuple(labels) if labels else tuple(f"LABEL_{i}" for i in range(cfg.labels))


def read_pooling(folder: Path, cfg: EncoderConfig) -> Pooling:
    """Returns what the files of sentence-transformers in a folder say; without them, the mean over
    all tokens. Raises: UserError for modules that this program does not compute."""
    most = cfg.max_positions - cfg.position_offset
    kind: Literal["mean", "cls"] = "mean"
    normalize = False
    settings = _settings(folder / "tokenizer_config.json")
    most = _least(most, settings.get("model_max_length"))
    most = _least(most, _settings(folder / "sentence_bert_config.json").get("max_seq_length"))
    file = folder / "modules.json"
    if not file.is_file():
        return Pooling(most)
    try:
        modules = files.parse_json(files.read_bytes(file, MAX_SETTINGS))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error} (--hf)") from None
    for module in modules if isinstance(modules, list) else [None]:
        named = module if isinstance(module, dict) else {}
        name = str(named.get("type", "")).rpartition(".")[2]
        if name not in KINDS:
            raise UserError(
                f"{file} has a module {name!r:.80}; this program computes {', '.join(KINDS)} (--hf)"
            )
        normalize |= name == "Normalize"
        if name == "Pooling":
            path = named.get("path")
            if not isinstance(path, str) or Path(path).name != path:
                raise UserError(f"{file}: path={path!r:.80} must be a folder beside it (--hf)")
            kind = _kind(folder / path / "config.json")
    return Pooling(most, kind, normalize)


def _kind(file: Path) -> Literal["mean", "cls"]:
    said = _settings(file)
    modes = [name for name, value in said.items() if name.startswith("pooling_mode_") and value]
    modes += [f"pooling_mode_{said['pooling_mode']}"] if "pooling_mode" in said else []
    known = POOLINGS | {f"pooling_mode_{kind}": kind for kind in POOLINGS.values()}
    if len(modes) != 1 or modes[0] not in known:
        raise UserError(
            f"{file}: {', '.join(modes) or 'no pooling'}; this program computes one of "
            f"{', '.join(POOLINGS)} (--hf)"
        )
    return known[modes[0]]


def _settings(file: Path) -> dict[str, Any]:
    return files.read_object(file, MAX_SETTINGS, "hf") if file.is_file() else {}


def _least(most: int, value: Any) -> int:
    """Returns the smaller number; a value that is none, or not sensible, counts for nothing."""
    whole_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return min(most, value) if whole_number else most
