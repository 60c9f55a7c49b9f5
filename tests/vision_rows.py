"""Rows of texts and images for tests of vision-language models, written without the library."""

import dataclasses

import numpy as np

from megajax.models.decoder_config import DecoderConfig
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig

IMAGE = 60
MODEL = VlmConfig(
    decoder=DecoderConfig(
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        head_width=8,
        mlp=64,
        vocab=61,
        vocab_multiple=16,
        bias="qkv",
    ),
    tower=VitConfig(layers=2, width=32, heads=4, mlp=48, patch=4, min_pixels=64, max_pixels=1024),
    image_token=IMAGE,
    mrope="2,1,1",
)


@dataclasses.dataclass
class Sample:
    """tokens (S,), with a placeholder for each merged patch; the images' grids of merged patches
    and their patches uint8 (patches, values)."""

    tokens: np.ndarray
    grids: list[tuple[int, int]]
    pixels: list[np.ndarray]


def sample(random, *grids, text=3, cfg=MODEL):
    """A text with these images in it."""
    tokens, pixels = [], []
    for rows, columns in grids:
        tokens += [*random.integers(0, IMAGE, text), *[IMAGE] * (rows * columns)]
        shape = rows * columns * cfg.tower.merge**2, cfg.tower.patch_values
        pixels.append(random.integers(0, 256, shape, dtype=np.uint8))
    tokens += [*random.integers(0, IMAGE, text)]
    return Sample(np.array(tokens, np.int32), list(grids), pixels)


def row(samples, tokens, patches, cfg=MODEL):
    """One packed row of a batch, {member: array without the dimension of rows}."""
    merge = cfg.tower.merge
    out = {
        "tokens": np.zeros(tokens, np.int32),
        "targets": np.full(tokens, -1, np.int32),
        "segments": np.full(tokens, -1, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "places": np.full(tokens, -1, np.int32),
        "rotary": np.zeros((tokens, 3), np.int32),
        "patches": np.zeros((patches, cfg.tower.patch_values), np.uint8),
        "patch_places": np.zeros((patches, 2), np.int32),
        "images": np.full(patches, -1, np.int32),
    }
    at, patch, image = 0, 0, 0
    for number, one in enumerate(samples):
        stop = at + len(one.tokens)
        out["tokens"][at:stop] = one.tokens
        targets = np.append(one.tokens[1:], -1)
        out["targets"][at:stop] = np.where(targets == cfg.image_token, -1, targets)
        out["segments"][at:stop] = number
        out["positions"][at:stop] = np.arange(stop - at)
        token, position, following = at, 0, [iter(np.ndindex(*g)) for g in one.grids]
        for grid, places, pixels in zip(one.grids, following, one.pixels, strict=True):
            while out["tokens"][token] != cfg.image_token:
                out["rotary"][token] = position
                token, position = token + 1, position + 1
            for n, (i, j) in enumerate(places):
                out["rotary"][token] = position, position + i, position + j
                out["places"][token] = patch // merge**2 + n
                token += 1
            position += max(grid)
            n = patch
            for i, j in np.ndindex(*grid):
                for di, dj in np.ndindex(merge, merge):
                    out["patch_places"][n] = merge * i + di, merge * j + dj
                    n += 1
            out["patches"][patch:n], out["images"][patch:n] = pixels, image
            patch, image = n, image + 1
        out["rotary"][token:stop] = position + np.arange(stop - token)[:, None]
        at = stop
    return out


def batch(rows):
    """Rows side by side."""
    return {name: np.stack([one[name] for one in rows]) for name in rows[0]}


def batch_of(seed, rows=16, tokens=32, patches=64):
    """A batch whose rows have texts alone, one image or three, by turns."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(rows):
        kinds = [
            [sample(random, text=9), sample(random, text=12)],
            [sample(random, (2, 3), text=4), sample(random, text=10)],
            [sample(random, (1, 2), (2, 1), text=3), sample(random, (3, 1))],
        ]
        made.append(row(kinds[i % 3], tokens, patches))
    return batch(made)
