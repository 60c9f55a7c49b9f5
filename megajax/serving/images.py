"""Images of prompts: placeholders, rotary positions, and the features that the tower gives.

A prompt has one placeholder an image. It becomes as many tokens as the image has merged patches,
each of which enters the model with its feature in the place of an embedding. A prompt is fed in
chunks, so an image may be cut anywhere; its features are computed once, by a program of its own for
one image, and stay on the host as long as the request lives, however often it is preempted. What
follows the prompt has rotary positions that go on after the largest one, whereas its place in the
pages is the number of tokens before it (Qwen2-VL, arXiv 2409.12191, section 2.1).

Legend: T tokens, D model width, P patches of an image, Q merged patches, C values of a patch.
"""

import hashlib
import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as PS

from megajax.core.errors import UserError
from megajax.core.tree import Tree
from megajax.data.images import expanded, patchify
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig, positions
from megajax.serving import forward as forward_
from megajax.serving.forward import Forward
from megajax.serving.scheduler import Shown

LEAST = 16  # (chosen) merged patches of the smallest program of the tower
ROOM = 2**28  # (chosen) bytes of features that are held for later requests


# ---- images as the tower reads them


@dataclass(frozen=True, eq=False)
class Picture:
    """An image cut into patches.

    digest: SHA-256 of its shape, grid and pixels. patches: uint8 (P, C). places: int32 (P, 2), row
    and column of each. grid: (rows, columns) of merged patches, which are as many tokens.
    """

    digest: bytes
    patches: np.ndarray
    places: np.ndarray
    grid: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Returns how many tokens of a prompt show it."""
        return self.grid[0] * self.grid[1]


def picture(image: np.ndarray, tower: VitConfig) -> Picture:
    """Resizes an image and cuts it into patches. image: uint8 (H, W, 3). Raises: ValueError."""
    image = np.ascontiguousarray(image)
    patches, places, grid = patchify(image, tower)
    content = hashlib.sha256(struct.pack("<5q", *image.shape, *grid))
    content.update(image.data)
    return Picture(content.digest(), patches, places, grid)


def pictures(images: Sequence[np.ndarray | Picture], tower: VitConfig) -> list[Picture]:
    """Returns images cut into patches; those that are cut already, unchanged.

    Raises: UserError that names the first one that cannot be used.
    """
    made = []
    for i, image in enumerate(images):
        try:
            made.append(image if isinstance(image, Picture) else picture(np.asarray(image), tower))
        except ValueError as error:
            raise UserError(f"images[{i}]: {error}") from None
    return made


def further(images: Iterable[Picture]) -> int:
    """Returns how many tokens images have in addition to their placeholders."""
    return sum(image.tokens - 1 for image in images)


# ---- the images of one prompt


class Sight(NamedTuple):
    """What a model that sees reads of neighbouring tokens in addition to their ids.

    rotary_T3: int32. features: of the tokens that show images, (number of the first one among these
    tokens, features (n, D)) for each image.
    """

    rotary_T3: np.ndarray
    features: Sequence[tuple[int, np.ndarray]] = ()

    def part(self, start: int, stop: int) -> "Sight":
        """Returns the sight of some of the tokens."""
        features = [
            (max(first - start, 0), rows[max(start - first, 0) : stop - first])
            for first, rows in self.features
            if first < stop and start < first + len(rows)
        ]
        return Sight(self.rotary_T3[start:stop], features)


class Images:
    """A prompt with its images. tokens: its ids, with a placeholder for each merged patch. starts:
    of each token of the prompt that was given, its place there. shown: for the keys of pages.
    images: in order."""

    def __init__(self, cfg: VlmConfig, prompt: Sequence[int], images: Sequence[Picture]):
        """prompt: with one placeholder an image. Raises: UserError where their numbers differ."""
        count = sum(token == cfg.image_token for token in prompt)
        if count != len(images):
            raise UserError(
                f"prompt_tokens has {count} placeholders of images (token {cfg.image_token}) and "
                f"there are {len(images)} images: give one placeholder an image (prompt_tokens, "
                "images)"
            )
        grids = [each.grid for each in images]
        tokens_T, _, _ = expanded(np.asarray(prompt), grids, cfg.image_token)
        self.tokens: list[int] = tokens_T.tolist()
        self._rotary_T3 = np.ascontiguousarray(positions(tokens_T, grids, cfg.image_token).T)
        # What the rotary position of a token behind the prompt has more than its index.
        self._further = int(self._rotary_T3.max()) + 1 - len(self.tokens)
        self.images, self._features = list(images), {}  # type: ignore[var-annotated]
        waiting = iter(images)
        sizes = [next(waiting).tokens if token == cfg.image_token else 1 for token in prompt]
        self.starts = [0, *itertools.accumulate(sizes[:-1])]
        places = [
            start for start, t in zip(self.starts, prompt, strict=True) if t == cfg.image_token
        ]
        self.shown = tuple(
            Shown(start, start + image.tokens, image.digest)
            for start, image in zip(places, images, strict=True)
        )

    def rotary(self, start: int, count: int) -> np.ndarray:
        """Returns rotary_T3 of tokens of the prompt and of those behind it."""
        inside_T3 = self._rotary_T3[start : start + count]
        behind_T1 = np.arange(start + len(inside_T3), start + count, dtype=np.int32)[:, None]
        return np.concatenate([inside_T3, np.repeat(behind_T1 + self._further, 3, 1)])

    def sight(self, start: int, count: int, tower: "Tower", params: Tree) -> Sight:
        """Returns what is read of `count` tokens from `start` on. Features of images are computed
        when their first token is read, and are held from then on."""
        features = []
        for shown, image in zip(self.shown, self.images, strict=True):
            first, stop = max(start, shown.start), min(start + count, shown.stop)
            if first >= stop:
                continue
            if image.digest not in self._features:
                self._features[image.digest] = tower.features(params, image)
            rows = self._features[image.digest][first - shown.start : stop - shown.start]
            features.append((first - start, rows))
        return Sight(self.rotary(start, count), features)

    def forget(self) -> None:
        """Drops the features, as the weights are new."""
        self._features.clear()


def images_batch(rows: Sequence[Images], B: int, S: int) -> dict[str, np.ndarray]:
    """Returns what a batch of models/vlm.py has in addition to tokens and positions, of B rows of S
    tokens of which these are the first. Patches are padded to a power of two of merged ones; there
    are none where no row has an image.
    """
    batch = {"rotary": np.zeros((B, S, 3), np.int32), "places": np.full((B, S), -1, np.int32)}
    most = max((sum(len(image.patches) for image in row.images) for row in rows), default=0)
    for b, row in enumerate(rows):
        batch["rotary"][b, : len(row.tokens)] = row.rotary(0, len(row.tokens))
    if not most:
        return {"rotary": batch["rotary"]}
    example = next(row.images[0] for row in rows if row.images)
    P = len(example.patches) // example.tokens  # of a merged one
    while P < most:
        P *= 2
    batch["patches"] = np.zeros((B, P, example.patches.shape[1]), np.uint8)
    batch["patch_places"] = np.zeros((B, P, 2), np.int32)
    batch["images"] = np.full((B, P), -1, np.int32)
    for b, row in enumerate(rows):
        patch = merged = 0
        for number, (shown, image) in enumerate(zip(row.shown, row.images, strict=True)):
            at = slice(patch, patch + len(image.patches))
            batch["patches"][b, at], batch["patch_places"][b, at] = image.patches, image.places
            batch["images"][b, at] = number
            batch["places"][b, shown.start : shown.stop] = merged + np.arange(image.tokens)
            patch, merged = at.stop, merged + image.tokens
    return batch


def write(
    tokens: forward_.Tokens, sights: Iterable[tuple[int, Sight | None]], like: Any
) -> np.ndarray | None:
    """Writes sights into the arrays of a step. sights: with the place of the first token of each.

    like: shape (D,) and type of a feature.
    Returns: features_TD in NumPy, or None where no token shows an image.
    """
    features_TD = None
    for place, sight in sights:
        assert sight is not None, "each segment of a model that sees has one"
        tokens.rotary_T3[place : place + len(sight.rotary_T3)] = sight.rotary_T3
        for first, rows in sight.features:
            if features_TD is None:
                features_TD = np.zeros((len(tokens.ids_T), *like.shape), like.dtype)
            at = slice(place + first, place + first + len(rows))
            features_TD[at], tokens.shows_T[at] = rows, 1
    return features_TD


# ---- the tower


def _is_ready(program: Future) -> bool:
    return program.done() and not program.cancelled() and program.exception() is None


class Tower:
    """Computes the features of images, one image a call: so they do not depend on other images.

    computed: how many images it has read.
    """

    def __init__(self, forward: Forward, room: int = ROOM):
        """room: bytes of features that are held for later requests; 0: none."""
        self._forward, self._room, self._size = forward, room, 0
        self._held: OrderedDict[bytes, np.ndarray] = OrderedDict()  # least recently used first
        self._run: Any = None
        self._ahead: dict[int, Future] = {}  # programs that `prepare` compiles, by merged patches
        self.computed = 0

    @property
    def compiled(self) -> int:
        """Returns the number of its programs: one for each power of two of merged patches."""
        ahead = sum(map(_is_ready, self._ahead.values()))
        return ahead + (0 if self._run is None else self._run._cache_size())

    def prepare(self, params: Tree, context: int, after: Sequence[Future] = ()) -> list[Future]:
        """Starts a thread that compiles the programs of all sizes, the smallest first.

        params: as `features` will get them; ShapeDtypeStructs with their shardings are enough.
        context: tokens of a prompt, at most. after: what is done before.
        Returns: one for each program, done when it is ready. Nothing on several processes.
        """
        forward = self._forward
        if forward.mesh.is_multi_process:
            return []
        assert forward.vlm is not None
        tower = forward.vlm.tower
        most = min(context, tower.max_pixels // (tower.patch * tower.merge) ** 2)
        sizes = [LEAST]
        while sizes[-1] < most:
            sizes.append(2 * sizes[-1])
        self._ahead = {size: Future() for size in sizes}
        like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
        outer = jax.tree.map(like, forward.parts.outer(params))
        jobs = dict(self._ahead)
        threading.Thread(
            target=self._compile, args=(self._program(outer), outer, jobs, after), name="compiler"
        ).start()
        return list(jobs.values())

    def _compile(
        self, run: Any, outer: Tree, jobs: dict[int, Future], after: Sequence[Future]
    ) -> None:
        main = threading.main_thread()
        while main.is_alive() and not all(job.done() for job in after):
            wait(after, timeout=1)
        for size, job in jobs.items():
            # A request may have needed the program sooner, and has cancelled this.
            if not main.is_alive() or not job.set_running_or_notify_cancel():
                job.cancel()
                continue
            try:
                with jax.set_mesh(self._forward.mesh):
                    job.set_result(run.lower(outer, self._blank(size)).compile())
            except Exception as error:
                job.set_exception(error)

    def _blank(self, size: int) -> dict[str, np.ndarray]:
        """Returns a batch without an image that has room for so many merged patches."""
        vlm = self._forward.vlm
        assert vlm is not None
        P = size * vlm.tower.merged
        return {
            "patches": np.zeros((1, P, vlm.tower.patch_values), np.uint8),
            "patch_places": np.zeros((1, P, 2), np.int32),
            "images": np.full((1, P), -1, np.int32),
        }

    def _program(self, outer: Tree) -> Any:
        if self._run is None:
            specs = ({name: PS() for name in self._blank(LEAST)},)
            run = self._forward.everywhere(self._forward.see, outer, specs, PS())
            self._run = jax.jit(run)
        return self._run

    def features(self, params: Tree, image: Picture) -> np.ndarray:
        """Returns features_QD of an image in the compute type, in NumPy. params: of the engine."""
        held = self._held.pop(image.digest, None)
        if held is None:
            held = self._compute(params, image)
            self._size += held.nbytes
        self._held[image.digest] = held
        while self._size > self._room:
            self._size -= self._held.popitem(last=False)[1].nbytes
        return held

    def forget(self) -> None:
        """Drops all features, as the weights are new."""
        self._held.clear()
        self._size = 0

    def _compute(self, params: Tree, image: Picture) -> np.ndarray:
        forward, params = self._forward, self._forward.parts.outer(params)
        size = LEAST
        while size < image.tokens:
            size *= 2
        batch = self._blank(size)
        count = len(image.patches)
        batch["patches"][0, :count], batch["patch_places"][0, :count] = image.patches, image.places
        batch["images"][0, :count] = 0
        run, ahead = self._program(params), self._ahead.get(size)
        if ahead is not None and not ahead.cancel():  # it is compiled, or is being compiled
            run = ahead.result()
        with jax.set_mesh(forward.mesh):
            features_1QD = run(params, batch)
        self.computed += 1
        # A view would hold the padding, which `features` does not count.
        return np.asarray(features_1QD)[0, : image.tokens].copy()
