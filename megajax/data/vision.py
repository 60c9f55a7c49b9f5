"""What a vision-language model reads: samples of tokens and images, packed into rows.

A source is `rendered` (rendered.py), or conversations and captions in files (conversations.py).
When it is opened, each record is read once: its tokens are counted and the headers of its images
read, and what cannot be used is an error, or is left out and counted. Records are held out by the
content of their images, and those that share an image together, so that an image is on one side,
whatever is said of it.

A row holds samples until the next one would exceed its tokens or its patches. Samples are never
cut, so that no row ends inside an image. Which samples share a row follows from the seed; each
epoch has every row once, in an order of its own. Row i depends on (seed, i) alone.

Legend: S tokens of a row, P patches of a row.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from absl import logging

from megajax.core.config import Checked, option
from megajax.core.errors import UserError
from megajax.data import rendered
from megajax.data.conversations import (
    ImageFile,
    Inline,
    Record,
    Source,
    Turn,
    image_key,
    open_conversations,
)
from megajax.data.detection import Problems
from megajax.data.images import (
    ImageError,
    Piece,
    fitted,
    patch_count,
    piece,
    read_header,
    read_pixels,
    row_of,
)
from megajax.data.pack import IGNORED, mix, packed, permute
from megajax.data.source import SURROGATE
from megajax.data.tokenizer import JsonTokenizer, Tokenizer

RENDERED = "rendered"
TOGETHER = 1024  # (chosen) records that wait for readers at a time
READERS = 8  # (chosen) records that are looked at in parallel: a network disk takes its time
VERIFIED = 100  # (chosen: a second or two) megapixels of a small source, which are all decoded
HOLDOUT = 0.01, 0.99  # (chosen) of drawings: a side has some of every kind
GREY = 127  # the value of all pixels in place of an image that is not shown
SYSTEM = "You are a helpful assistant."  # (Qwen2-VL's chat template) where a record has no system

# The names of problems. What they count is left out.
MISFIT = "sample that does not fit a row"
FAULTY = "record that cannot be used"


@dataclass(frozen=True)
class VisionDataConfig(Checked, section="data"):
    """Source, hold-out, and how samples become rows."""

    source: str = option(
        RENDERED,
        "rendered: drawn images with questions, endless; or conversations and captions of images: "
        "a folder, a .jsonl or .parquet file, .tar files of WebDataset (a glob for several)",
    )
    tokenizer: str = option("bytes", "bytes, or a tokenizer.json")
    holdout: float = option(
        0.1, "fraction held out, by hash of the content of images", at_least=0, below=1
    )
    patches: int = option(
        96, "places of a row for patches of images; train.seq_len is that for tokens", at_least=1
    )
    misfit: Literal["skip", "error"] = option(
        "skip", "what to do with a sample that has more tokens or patches than a row"
    )
    faulty: Literal["error", "skip"] = option(
        "error", "what to do with a record or an image that cannot be read"
    )
    max_megapixels: float = option(
        16.8, "images with more are faulty, and never decoded", "megapixels", above=0
    )
    follow_links: bool = option(False, "follow symbolic links, wherever they lead")
    blank: bool = option(
        False, "show grey in the place of every image: the control of what questions alone give"
    )
    prefetch: int = option(4, "batches that threads prepare ahead", "batches", at_least=0)


# ---- samples


@dataclass(frozen=True, eq=False)
class Sample:
    """tokens, targets (n,) int32, with one placeholder an image. images: (H, W, 3) uint8, in the
    size that the tower reads. kind: by which results are reported. question, answer: for a person;
    answer is the last one."""

    tokens: np.ndarray
    targets: np.ndarray
    images: list[np.ndarray]
    kind: str
    question: str
    answer: str


class Dialogue:
    """Turns as token ids, with the answers as targets.

    A tokenizer with the control tokens of Qwen2-VL gets its chat template. Another gets the begin
    id, if it has one, a line for each turn, and its end id behind each answer.
    """

    def __init__(self, tokenizer: Tokenizer, image_token: int):
        """Raises: UserError for a tokenizer without an end, or that gives the image_token."""
        self.tokenizer, self.image_token = tokenizer, image_token
        names = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
        ids = [tokenizer.id_of(n) if isinstance(tokenizer, JsonTokenizer) else None for n in names]
        self._control = None if None in ids else tuple(i for i in ids if i is not None)
        if self._control is None and tokenizer.end is None:
            raise UserError(
                f"the tokenizer {tokenizer.name} has no end token, so that answers would have no "
                "end; give one that has (--data.tokenizer)"
            )
        if not isinstance(tokenizer, JsonTokenizer) and image_token < tokenizer.vocab:
            raise UserError(
                f"model.image_token={image_token} is an id of the tokenizer {tokenizer.name}; "
                f"nearest: {tokenizer.vocab} (--model.image_token)"
            )

    def encode(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens, targets), both int32 (n,); a target is IGNORED where no answer follows.

        Raises: UserError for a text that contains the placeholder, or a lone surrogate.
        """
        texts = [p for said in record.turns for p in said.parts if p is not None]
        if any(SURROGATE.search(text) for text in texts):
            raise UserError(f"{record.where}: a lone surrogate is not text (--data.source)")
        pieces: list[tuple[Sequence[int], bool]] = []
        if self._control is None:
            if self.tokenizer.begin is not None:
                pieces.append(([self.tokenizer.begin], False))
            for said in record.turns:
                is_answer = said.role == "assistant"
                pieces += [(ids, is_answer) for ids in self._contents(said.parts, (), ())]
                end = self.tokenizer.end
                assert end is not None
                pieces.append(([end], True) if is_answer else (self._ids("\n"), False))
        else:
            start, stop, before, behind = self._control
            turns = record.turns
            if turns[0].role != "system":
                turns = (type(turns[0])("system", (SYSTEM,)), *turns)
            for said in turns:
                is_answer = said.role == "assistant"
                pieces.append(([start, *self._ids(f"{said.role}\n")], False))
                pieces += [
                    (ids, is_answer) for ids in self._contents(said.parts, (before,), (behind,))
                ]
                pieces += [([stop], is_answer), (self._ids("\n"), False)]
        tokens = np.concatenate([np.asarray(ids, np.int32) for ids, _ in pieces])
        is_learned = np.repeat([learned for _, learned in pieces], [len(i) for i, _ in pieces])
        if (tokens == self.image_token).sum() != len(record.images):
            raise UserError(
                f"{record.where}: a text contains the token {self.image_token}, which stands for "
                "an image (--model.image_token)"
            )
        targets = np.full(len(tokens), IGNORED, np.int32)
        targets[:-1] = np.where(is_learned[1:], tokens[1:], IGNORED)
        return tokens, targets

    def _contents(
        self, parts: Sequence[str | None], before: tuple[int, ...], behind: tuple[int, ...]
    ) -> list[Sequence[int]]:
        shown = [*before, self.image_token, *behind]
        return [shown if part is None else self._ids(part) for part in parts]

    def _ids(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode([text])[0].tolist()


class Samples(Protocol):
    """Samples by their numbers. sizes: None for endless ones, else (tokens, patches) of each, int
    (n, 2)."""

    @property
    def sizes(self) -> np.ndarray | None: ...  # noqa: D102

    def sample(self, k: int) -> Sample:
        """Returns sample k. Raises: UserError."""
        ...


class Drawn:
    """Endless questions about drawn images, of one side."""

    sizes = None

    def __init__(self, dialogue: Dialogue, seed: int, holdout: float, held_out: bool, tower: Any):
        """seed: of the drawings. holdout, held_out: as of `rendered.question`."""
        self._dialogue, self._side, self._tower = dialogue, (seed, holdout, held_out), tower

    def sample(self, k: int) -> Sample:
        """Returns question k."""
        seed, holdout, held_out = self._side
        q = rendered.question(seed, k, holdout, held_out)
        tokens, targets = self._encoded(q.question, q.answer)
        return Sample(tokens, targets, [fitted(q.image, self._tower)], q.kind, q.question, q.answer)

    def _encoded(self, question: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
        turns = (Turn("user", (None, question)), Turn("assistant", (answer,)))
        return self._dialogue.encode(Record("a drawing", turns, (Inline("drawing", b""),)))


class Recorded:
    """The records of a source that a row can hold, of one side."""

    def __init__(
        self,
        source: Source,
        dialogue: Dialogue,
        numbers: Sequence[int],
        sizes: np.ndarray,
        tower: Any,
        max_megapixels: float,
    ):
        """numbers: of the records. sizes: of each, (tokens, patches)."""
        self._source, self._dialogue, self._numbers = source, dialogue, numbers
        self.sizes, self._tower, self._max_megapixels = sizes, tower, max_megapixels

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._numbers)

    def sample(self, k: int) -> Sample:
        """Returns a record with its images, in the size that the tower reads. Raises: UserError
        naming it."""
        record = self._source[self._numbers[k]]
        tokens, targets = self._dialogue.encode(record)
        images = [
            fitted(_pixels(image, record.where, self._max_megapixels), self._tower)
            for image in record.images  # one at a time is in memory as it was taken
        ]
        answers = [t.parts for t in record.turns if t.role == "assistant"]
        asked = [p for t in record.turns if t.role == "user" for p in t.parts if p is not None]
        answer = "".join(p for p in answers[-1] if p is not None)
        return Sample(tokens, targets, images, "all", " ".join(asked), answer)


def _header(image: ImageFile, file: Any, where: str, max_megapixels: float) -> Any:
    header = read_header(file, f"{where}: {image.name}", max_megapixels)
    if header.kind in ("TIFF", "BMP"):
        raise ImageError(
            "image of another kind",
            f"{where}: {image.name} is a {header.kind}; PNG, JPEG and WebP are read",
        )
    return header


def _pixels(image: ImageFile, where: str, max_megapixels: float) -> np.ndarray:
    try:
        with image.open() as file:
            header = _header(image, file, where, max_megapixels)
            return read_pixels(file, header, f"{where}: {image.name}")
    except OSError as error:
        raise UserError(
            f"{where}: cannot read {image.name}: {error.strerror} (--data.source)"
        ) from None
    except ImageError:
        raise
    except UserError as error:
        raise UserError(f"{where}: cannot read {image.name}: {error}") from None


# ---- a source, opened


@dataclass(frozen=True)
class VisionData:
    """Samples to learn from and held-out ones. rows: of training. held_out: their first numbers are
    evaluated. count: (samples to learn from, held-out ones); None: endless. fingerprint: changes
    when samples or sides would."""

    train: Samples
    held_out: Samples
    count: tuple[int, int] | None
    problems: Problems
    fingerprint: str
    facts: str


def open_vision(
    data: VisionDataConfig, seq_len: int, seed: int, model: Any, tokenizer: Tokenizer
) -> VisionData:
    """Opens the source of a run. model: VlmConfig. seed: of drawings.

    Raises: UserError for a source that cannot be read or has no sample that fits, and for a faulty
      record or a misfit where the configuration says so.
    """
    dialogue = Dialogue(tokenizer, model.image_token)
    unit = model.tower.merge**2
    if data.patches % unit:
        low = data.patches // unit * unit
        near = f"{low}, {low + unit}" if low else str(unit)
        raise UserError(
            f"data.patches={data.patches} must be a multiple of tower.merge^2 = {unit}; nearest: "
            f"{near} (--data.patches)"
        )
    if data.source == RENDERED:
        return _open_rendered(data, seq_len, seed, model, dialogue)
    source = open_conversations(data.source, data.follow_links)
    problems = Problems()
    for kind, count in source.unread.items():
        problems.add(f"{kind}, which is not read", data.source, count)
    look = functools.partial(_look, source, dialogue, model.tower, data.max_megapixels)
    numbers, sizes, images, pixels = [], [], [], 0
    digest = hashlib.sha256()
    for k, result in enumerate(_in_parallel(look, len(source))):
        if isinstance(result, UserError):
            if data.faulty == "error":
                raise result
            problems.add(FAULTY, str(result))
            continue
        tokens, patches, shown, where, count, content = result
        if tokens > seq_len or patches > data.patches:
            said = (
                f"{where} has {tokens:,} tokens and {patches:,} patches with its images; a row has "
                f"train.seq_len={seq_len:,} and data.patches={data.patches:,} "
                "(--train.seq_len, --data.patches, --tower.max_pixels)"
            )
            if data.misfit == "error":
                raise UserError(said)
            problems.add(MISFIT, said)
            continue
        numbers.append(k)
        sizes.append((tokens, patches))
        images.append(shown)
        digest.update(f"{k} {shown} {tokens} {patches} ".encode() + content)
        pixels += count
    if not numbers:
        raise UserError(
            f"data.source={data.source} has no sample that can be used{problems.reasons()} "
            "(--data.source)"
        )
    keys = side_keys(images)
    low, high, limit = min(keys), max(keys), int(data.holdout * 2**64)
    held = [
        bool(data.holdout) and low != high and (key < limit or key == low) and key != high
        for key in keys
    ]
    sides = []
    for is_held in (False, True):
        chosen = [i for i, h in enumerate(held) if h == is_held]
        sides.append(
            Recorded(
                source,
                dialogue,
                [numbers[i] for i in chosen],
                np.array([sizes[i] for i in chosen], np.int64).reshape(-1, 2),
                model.tower,
                data.max_megapixels,
            )
        )
    if pixels <= VERIFIED * 1e6:
        _verify(sides, data.faulty)
    return VisionData(
        sides[0],
        sides[1],
        (len(sides[0]), len(sides[1])),
        problems,
        f"{digest.hexdigest()[:16]} {data.holdout:g}",
        f"{len(sides[0]):,} samples to learn, {len(sides[1]):,} held out",
    )


def side_keys(images: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns a number for each record, the same one where records share an image, or others do
    that join them. images: of each record the keys of its images, one at least."""
    joined: dict[int, int] = {}  # a key -> a lesser one of the same records, or itself

    def least(key: int) -> int:
        while (over := joined.setdefault(key, key)) != key:
            joined[key] = joined[over]
            key = over
        return key

    for first, *others in images:
        for other in others:
            low, high = sorted((least(first), least(other)))
            joined[high] = low
    return [mix(least(keys[0])) for keys in images]


def _open_rendered(
    data: VisionDataConfig, seq_len: int, seed: int, model: Any, dialogue: Dialogue
) -> VisionData:
    low, high = HOLDOUT
    if not low <= data.holdout <= high:
        short = "drawing to evaluate" if data.holdout < low else "drawing to learn from"
        raise UserError(
            f"data.holdout={data.holdout:g} leaves no {short}, or hardly one; nearest: "
            f"{min(max(data.holdout, low), high)} (--data.holdout)"
        )
    train, held_out = (
        Drawn(dialogue, seed, data.holdout, held, model.tower) for held in (False, True)
    )
    for k, side in itertools.product(range(64), (train, held_out)):  # all kinds and lengths
        made = prepared(side.sample(k), model)
        if len(made.tokens) > seq_len or len(made.patches) > data.patches:
            raise UserError(_beyond(made, seq_len, data.patches))
    fingerprint = f"rendered, held out by what is shown {data.holdout:g}"
    return VisionData(train, held_out, None, Problems(), fingerprint, "drawings without end")


def _beyond(drawing: Piece, seq_len: int, patches: int) -> str:
    return (
        f"a drawing has {len(drawing.tokens)} tokens and {len(drawing.patches)} patches; a row "
        f"has train.seq_len={seq_len} and data.patches={patches} (--train.seq_len, --data.patches)"
    )


def _look(
    source: Source, dialogue: Dialogue, tower: Any, max_megapixels: float, k: int
) -> tuple[int, int, tuple[int, ...], str, int, bytes] | UserError:
    """Returns (tokens, patches, keys of the images, where, pixels, hash of the texts) of a record,
    or what is wrong with it. A record without images has a key of its texts."""
    name = f"{source.name} record {k}"
    try:
        record = source[k]
        name = record.where
        tokens, targets = dialogue.encode(record)
        content = hashlib.sha256(np.stack([tokens, targets]).tobytes()).digest()
        counts, keys, pixels = [], [], 0
        for image in record.images:
            try:
                with image.open() as file:
                    size = _header(image, file, name, max_megapixels).size
                    keys.append(image_key(file))
            except ImageError:
                raise
            except OSError as error:
                raise UserError(
                    f"{name}: cannot read {image.name}: {error.strerror} (--data.source)"
                ) from None
            except UserError as error:
                raise UserError(f"{name}: cannot read {image.name}: {error}") from None
            try:
                counts.append(patch_count(size, tower))
            except ImageError as error:
                raise UserError(f"{name}: {image.name}: {error}") from None
            pixels += size[0] * size[1]
        keys = keys or [mix("text", content.hex())]
        shown = sum(counts) // tower.merge**2 - len(counts)
        return len(tokens) + shown, sum(counts), tuple(keys), name, pixels, content
    except UserError as error:
        return error


def _in_parallel(look: Callable[[int], Any], count: int) -> Iterator[Any]:
    """Yields look(k) for each k below a number, in order, a block of them at a time."""
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for first in range(0, count, TOGETHER):
            yield from pool.map(look, range(first, min(first + TOGETHER, count)))


def _verify(sides: Sequence[Recorded], faulty: str) -> None:
    """Decodes all images of a small source, so that a damaged one is told at the start."""
    if faulty != "error":
        return
    for side in sides:
        for k in range(len(side)):
            side.sample(k)


# ---- rows


def prepared(sample: Sample, model: Any, blank: bool = False) -> Piece:
    """Returns a sample as rows have it. blank: with grey in the place of its images."""
    made = piece(sample.tokens, sample.images, model, sample.targets)
    return dataclasses.replace(made, patches=np.full_like(made.patches, GREY)) if blank else made


class VisionRows:
    """An endless sequence of rows of samples (loader.py: Rows)."""

    def __init__(
        self, samples: Samples, data: VisionDataConfig, seq_len: int, seed: int, model: Any
    ):
        """model: VlmConfig. seed: of which samples share a row, and of their order."""
        self._samples, self._data, self._model = samples, data, model
        self._seq_len, self._seed = seq_len, seed
        self._warned: set[int] = set()
        self._bins: list[list[int]] | None = None
        if samples.sizes is not None:
            if not len(samples.sizes):
                raise UserError("there is no sample to learn from (--data.source, --data.holdout)")
            order = np.random.RandomState(mix(seed, "samples") % 2**32)
            numbers = order.permutation(len(samples.sizes))
            self._bins = packed(numbers.tolist(), samples.sizes, (seq_len, data.patches))

    @property
    def rows_per_epoch(self) -> int | None:
        """Rows with all samples; None: there is no end."""
        return None if self._bins is None else len(self._bins)

    @property
    def fill(self) -> tuple[float, float] | None:
        """Fractions of all places for tokens and patches that samples take; None: endless."""
        if self._bins is None or self._samples.sizes is None:
            return None
        tokens, patches = self._samples.sizes.sum(0) / len(self._bins)
        return float(tokens / self._seq_len), float(patches / self._data.patches)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i, as `images.row_of` has it.

        An image that turns out to be damaged is an error, or leaves its sample out, as data.faulty
        says. Raises: UserError.
        """
        pieces = self._endless(i) if self._bins is None else self._of_bin(i, self._bins)
        return row_of(pieces, self._seq_len, self._data.patches, self._model.tower)

    def _of_bin(self, i: int, bins: list[list[int]]) -> list[Piece]:
        epoch, place = divmod(i, len(bins))
        number = permute(place, len(bins), mix(self._seed, epoch, "rows"))
        pieces = []
        for k in bins[number]:
            try:
                pieces.append(prepared(self._samples.sample(k), self._model, self._data.blank))
            except ImageError as error:  # a disk that fails for a moment is an error always
                if self._data.faulty == "error":
                    raise
                if k not in self._warned:
                    self._warned.add(k)
                    logging.warning("A sample is left out: %s", error)
        return pieces

    def _endless(self, i: int) -> list[Piece]:
        most = self._seq_len // 4 * 4 + 1  # odd, so that each kind begins as many rows
        pieces: list[Piece] = []
        tokens = patches = 0
        while True:
            sample = self._samples.sample(i * most + len(pieces))
            made = prepared(sample, self._model, self._data.blank)
            tokens, patches = tokens + len(made.tokens), patches + len(made.patches)
            if tokens > self._seq_len or patches > self._data.patches:
                if not pieces:
                    raise UserError(_beyond(made, self._seq_len, self._data.patches))
                return pieces
            pieces.append(made)


def evaluated(samples: Samples, most: int, faulty: str = "error") -> list[Sample]:
    """Returns the first samples of a side, `most` at most. faulty: 'skip' leaves out those with
    damaged images. Raises: UserError."""
    count = most if samples.sizes is None else min(most, len(samples.sizes))
    chosen = []
    for k in range(count):
        try:
            chosen.append(samples.sample(k))
        except ImageError as error:
            if faulty == "error":
                raise
            logging.warning("A sample is left out: %s", error)
    return chosen


def fixed_rows(
    samples: Sequence[Sample], data: VisionDataConfig, seq_len: int, model: Any, blank: bool
) -> list[tuple[dict[str, np.ndarray], list[int]]]:
    """Returns rows with these samples in their order, each with the samples' numbers. blank: with
    grey in the place of images."""
    pieces = [prepared(sample, model, blank) for sample in samples]
    sizes = np.array([(len(p.tokens), len(p.patches)) for p in pieces], np.int64).reshape(-1, 2)
    return [
        (row_of([pieces[k] for k in numbers], seq_len, data.patches, model.tower), numbers)
        for numbers in packed(range(len(pieces)), sizes, (seq_len, data.patches))
    ]
