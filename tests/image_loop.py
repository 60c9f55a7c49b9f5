"""The oracle of the tests of images in an engine: the whole forward pass for every token."""

import dataclasses
import functools

import jax
import numpy as np

from megajax.data.images import fitted, piece, row_of
from megajax.models import vlm
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig
from tests.tiny import MODEL

# Images of 1 to 20 merged patches of 8 x 8 pixels.
TOWER = VitConfig(
    layers=1, width=32, heads=2, mlp=64, patch=4, merge=2, min_pixels=64, max_pixels=64 * 20
)
PLACEHOLDER = 60
CFG = VlmConfig(dataclasses.replace(MODEL, max_positions=320), TOWER, PLACEHOLDER, "2,1,1")
# As few and as small programs as possible: steps of 8 and 16 tokens.
SMALL = {"dtype": "float32", "prefill_chunk": 16, "max_batch": 6}


@functools.cache
def sharp(cfg=CFG):
    """Parameters large enough that the likeliest token is clear, and depends on images. The
    placeholder is never drawn: a row with one more than it has images has no meaning."""
    params = jax.jit(vlm.parts(cfg).init)(jax.random.key(0))
    params = jax.tree.map(lambda x: 4 * x, params)
    return params | {"tokens": params["tokens"].at[PLACEHOLDER].set(0)}


@functools.cache
def _logits(cfg):
    return jax.jit(vlm.parts(cfg).logits)


def picture(seed, height=24, width=24):
    """A random image."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def one_by_one(prompt, images, new, row=128, cfg=CFG):
    """Runs a whole row again for every token: the greedy continuation of a prompt with images."""
    tokens, patches = list(prompt), 4 * 64
    for _ in range(new):
        made = piece(np.array(tokens), [fitted(image, cfg.tower) for image in images], cfg)
        batch = row_of([made], row, patches, cfg.tower)
        batch = {name: x[None] for name, x in batch.items() if name != "targets"}
        logits = np.asarray(_logits(cfg)(sharp(cfg), batch))[0, len(made.tokens) - 1]
        tokens.append(int(np.argmax(logits[: cfg.vocab])))
    return tokens[len(prompt) :]


def requests(count, seed=0, vocab=PLACEHOLDER):
    """Prompts with 0 to 2 images: [(ids, images)]. Every third one is the text before it with the
    same images, and every third one that text with others."""
    random, made = np.random.default_rng(seed), []
    for i in range(count):
        if i % 3 == 0:
            ids = random.integers(0, vocab, int(random.integers(3, 20))).tolist()
            images = [
                picture(100 * i + k, *(8 * random.integers(1, 5, 2)))
                for k in range(int(random.integers(0, 3)))
            ]
            for _ in images:
                ids.insert(int(random.integers(0, len(ids) + 1)), PLACEHOLDER)
        elif i % 3 == 1:
            ids, images = made[-1][0] + [int(random.integers(vocab))], made[-1][1]
        else:
            images = [picture(100 * i + k, *x.shape[:2]) for k, x in enumerate(made[-1][1])]
            ids = made[-1][0]
        made.append((ids, images))
    return made
