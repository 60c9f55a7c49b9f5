"""The trainer's log-probabilities of given tokens, and a critic's values of them.

Legend: B rows, S positions, D model width, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, reshard

from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.layers.attention import Context
from megajax.models.decoder_config import DecoderConfig
from megajax.models.heads import critic_parts
from megajax.models.networks import network_of
from megajax.models.vlm import VlmConfig
from megajax.parallel import sharding, tensor
from megajax.serving import tiles
from megajax.serving.engine import check_tokens
from megajax.serving.images import Images, images_batch, pictures

CHUNK = 256  # positions whose logits exist at one time
LOGITS = 2**26  # (chosen) float32 logits of a chunk of all rows of a batch, at most


def logprobs(
    cfg: DecoderConfig | VlmConfig,
    params: Tree,
    rows: Sequence[Sequence[int]],
    images: Sequence[Sequence[np.ndarray] | None] | None = None,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    numerics: Literal["fast", "exact"] = "fast",
) -> list[np.ndarray]:
    """Returns the log-probability of each row's tokens after those before them.

    Args: rows: token ids, of any lengths, with one placeholder (VlmConfig.image_token) for each
      image of the row. images: of each row, uint8 (H, W, 3) each, or None; None: no row has any.
      mesh: None: one device. dtype: of compute. numerics: 'exact': the bits that
      `serving.Engine(..., numerics='exact')` gives on a mesh of this shape.
    Returns: one float32 array a row, as long as the row; the first entry, of a token that nothing
      comes before, is NaN. The entry of a placeholder is that of the first token which shows its
      image.
    Raises: UserError for ids outside the vocabulary, rows that are too long, placeholders and
      images that are not equally many, or a mesh that cannot cut the model.
    """
    if numerics not in ("fast", "exact"):
        raise UserError(f"numerics={numerics!r} must be 'fast' or 'exact'")
    cfg, checked, mesh, dtype = _checked(cfg, rows, mesh, dtype)
    seen = _seen(cfg, checked, images)
    tokens = checked if seen is None else [each.tokens for each in seen]
    _check_lengths(cfg, tokens)
    if numerics == "exact":
        teacher = tiles.teacher(cfg, mesh, dtype)
        scores = teacher(teacher.forward.place(params, cast=True), tokens, seen)
    else:
        layout, run = _program(cfg, mesh, dtype)
        placed = sharding.place(layout, network_of(cfg).parts(cfg).axes, params)
        scores = _in_batches(cfg, mesh, functools.partial(run, placed), layout, tokens, images=seen)
    if seen is None:
        return scores
    return [score[each.starts] for score, each in zip(scores, seen, strict=True)]


def values(
    cfg: DecoderConfig,
    params: Tree,
    rows: Sequence[Sequence[int]],
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
) -> list[np.ndarray]:
    """Returns a critic's values (models/heads.py) of each row's positions, float32.

    Args and errors: as of `logprobs`. Entry i of a row is the value of its first i + 1 tokens.
    """
    cfg, checked, mesh, dtype = _checked(cfg, rows, mesh, dtype)
    _check_lengths(cfg, checked)
    layout, run = _value_program(cfg, mesh, dtype)
    placed = sharding.place(layout, critic_parts(cfg).axes, params)
    return _in_batches(cfg, mesh, functools.partial(run, placed), layout, checked, 0)


def _checked[C: DecoderConfig | VlmConfig](
    cfg: C, rows: Sequence[Sequence[int]], mesh: Mesh | None, dtype: str
) -> tuple[C, list[list[int]], Mesh, str]:
    """Returns the arguments as programs take them. Raises: UserError."""
    checked = [check_tokens(row, cfg.vocab, f"rows[{i}]") for i, row in enumerate(rows)]
    mesh = MeshSpec(data=1).build(jax.devices()[:1]) if mesh is None else mesh
    # As the engine: nothing is dropped, and the score of a row does not depend on its padding.
    moe = dataclasses.replace(cfg.moe, mode="dropless")
    if isinstance(cfg, VlmConfig):
        cfg = dataclasses.replace(cfg, decoder=dataclasses.replace(cfg.decoder, moe=moe))
    else:
        cfg = dataclasses.replace(cfg, moe=moe)
    return cfg, checked, mesh, jnp.dtype(dtype).name


def _check_lengths(cfg: DecoderConfig | VlmConfig, rows: Sequence[Sequence[int]]) -> None:
    for i, row in enumerate(rows):
        if len(row) > cfg.max_positions:
            raise UserError(
                f"rows[{i}] has {len(row)} tokens; the model has {cfg.max_positions} positions"
            )


def _seen(
    cfg: DecoderConfig | VlmConfig,
    rows: Sequence[Sequence[int]],
    images: Sequence[Sequence[np.ndarray] | None] | None,
) -> list[Images] | None:
    """Returns the rows with their images; None: the model sees none. Raises: UserError."""
    lists = [None] * len(rows) if images is None else images
    listed = [() if each is None else each for each in lists]
    if len(listed) != len(rows):
        raise UserError(f"images has {len(listed)} lists and rows {len(rows)} rows: give one a row")
    if not isinstance(cfg, VlmConfig):
        if any(map(len, listed)):
            raise UserError("images: this model sees none; it has no vision tower (VlmConfig)")
        return None
    made = []
    for i, (row, each) in enumerate(zip(rows, listed, strict=True)):
        try:
            made.append(Images(cfg, row, pictures(each, cfg.tower)))
        except UserError as error:
            raise UserError(f"rows[{i}]: {error}") from None
    return made


def _in_batches(
    cfg: DecoderConfig | VlmConfig,
    mesh: Mesh,
    run: Any,
    layout: Any,
    rows: list,
    first: int = 1,
    images: Sequence[Images] | None = None,
) -> list:
    """Rows of about one length together, in shapes of powers of two. first: place of a row's first
    score; what comes before is NaN. images: of each row."""
    scores_of: list[Any] = [None] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    ways = layout.ways(BATCH_AXES)
    while order:
        S = 16
        while S < len(rows[order[0]]):
            S *= 2
        most = max(1, LOGITS // (min(S, CHUNK) * cfg.padded_vocab) // ways)
        most = ways * min(8, 2 ** int(math.log2(most)))
        taken = [i for i in order[:most] if len(rows[i]) <= S]
        order = order[len(taken) :]
        B = ways
        while B < len(taken):
            B *= 2
        tokens = np.zeros((B, S), np.int32)
        for place, i in enumerate(taken):
            tokens[place, : len(rows[i])] = rows[i]
        more = {}
        if images is not None:
            more = images_batch([images[i] for i in taken], B, S)
        with jax.set_mesh(mesh):
            put = lambda x: jax.device_put(  # noqa: E731
                x, layout.named(layout.act("batch", *[None] * (x.ndim - 1)))
            )
            scores = run(put(tokens), jax.tree.map(put, more))
            scores = np.asarray(reshard(scores, jax.P(None, None)))
        for place, i in enumerate(taken):
            nothing = np.full(first, np.nan, np.float32)
            scores_of[i] = np.concatenate([nothing, scores[place, : len(rows[i]) - first]])
    return scores_of


@functools.lru_cache(maxsize=4)
def _program(cfg: DecoderConfig | VlmConfig, mesh: Mesh, dtype: str) -> tuple[Any, Any]:
    """Returns (layout, (params, tokens_BS, further members of the batch) -> logprobs_BS, of each
    next token)."""
    layout = sharding.layout(mesh, "none", decode=True, model=cfg)
    with jax.set_mesh(mesh):
        ops = tensor.ops(layout, "xla")
        if isinstance(cfg, VlmConfig):
            ops = dataclasses.replace(ops, attend=functools.partial(_attend, layout))
        parts = network_of(cfg).parts(cfg, layout, ops, dtype)

    def run(params: Tree, tokens_BS: jax.Array, more: dict[str, jax.Array]) -> jax.Array:
        B, S = tokens_BS.shape
        rows = layout.act("batch", None)
        positions_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        batch = {"tokens": tokens_BS, "positions": reshard(positions_BS, rows), **more}
        hidden_BSD, _ = parts.hidden(params, batch, None, "none")
        next_BS = jnp.concatenate([tokens_BS[:, 1:], tokens_BS[:, :1]], 1)
        chunks = []
        for start in range(0, S, CHUNK):
            part = slice(start, start + CHUNK)
            logits = reshard(
                parts.head(params, hidden_BSD[:, part]), layout.act("batch", None, None)
            )
            is_next = jnp.arange(logits.shape[-1])[None, None] == next_BS[:, part, None]
            logit = jnp.where(is_next, logits, 0.0).sum(-1)
            chunks.append(logit - jax.nn.logsumexp(logits, -1))
        return jnp.concatenate(chunks, 1)

    return layout, jax.jit(run)


def _attend(layout: Layout, q: jax.Array, k: jax.Array, v: jax.Array, query: Context, *more: Any):
    """Attention of text, or of the patches of images: segments, of which XLA would keep the logits
    of all pairs of patches of a row."""
    kernel = "xla" if query.segments_BS is None else "varlen"
    return tensor.attend(layout, q, k, v, query, *more, attention=kernel)


@functools.lru_cache(maxsize=4)
def _value_program(cfg: DecoderConfig, mesh: Mesh, dtype: str) -> tuple[Any, Any]:
    """Returns (layout, (params, tokens_BS) -> values_BS)."""
    layout = sharding.layout(mesh, "none", decode=True, model=cfg)
    with jax.set_mesh(mesh):
        parts = critic_parts(cfg, layout, tensor.ops(layout, "xla"), dtype)

    def run(params: Tree, tokens_BS: jax.Array, _: dict[str, jax.Array]) -> jax.Array:
        B, S = tokens_BS.shape
        rows = layout.act("batch", None)
        positions_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
        batch = {"tokens": tokens_BS, "positions": reshard(positions_BS, rows)}
        return reshard(parts.logits(params, batch)[..., 0], rows)

    return layout, jax.jit(run)
