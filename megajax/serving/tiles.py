"""Exact numerics: every forward pass, of an engine or a trainer, is one program of TILE tokens.

A sum of floating-point numbers depends on its order, and compilers choose another one for another
shape. So the log-probability of a token differs between a batch of 1 and of 64, between a prompt
computed at once and in chunks, and between a sampler and a trainer. With exact numerics all of them
run the same compiled shape: TILE tokens of any sequences, whose attention adds up keys in blocks of
absolute positions (pallas_kernels.paged_attention). The rows of a product do not mix, so the bits
of a token depend on its sequence only.

Legend: T tokens of a tile, M pages of the longest sequence, V vocabulary with its padding.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.models.vlm import VlmConfig
from megajax.serving import forward as forward_
from megajax.serving.forward import Forward
from megajax.serving.images import Images, Tower, write

TILE = 32  # (chosen) tokens: a decode step of as many costs about what one token does
PAGE = 16


def tile(
    forward: Forward, params: Tree, pages: forward_.Pages, tokens: forward_.Tokens
) -> tuple[jax.Array, jax.Array, forward_.Pages]:
    """Returns (logits_TV after every token, their log-sum-exp_T, the pages). Inside `everywhere`.

    tokens: T = B = TILE.
    """
    # Not the Hopper kernel: how it splits the keys of a sequence depends on the other sequences.
    logits_TV, pages = forward.run(params, pages, tokens, jnp.arange(TILE), "reference")
    return logits_TV, jax.nn.logsumexp(logits_TV, -1), pages


class Teacher:
    """Computes log-probabilities of rows of tokens in the tiles in which an exact engine draws."""

    def __init__(self, cfg: DecoderConfig | VlmConfig, mesh: Mesh, dtype: Any):
        """Raises: UserError when the mesh cannot cut the model."""
        self.forward = Forward(cfg, mesh, "none", dtype, "xla")
        self.tower = Tower(self.forward)
        self._run: Any = None

    def __call__(
        self,
        params: Tree,
        rows: Sequence[Sequence[int]],
        images: Sequence[Images] | None = None,
    ) -> list[np.ndarray]:
        """Returns for each row the log-probability of each token given those before it, float32
        (len(row),); NaN for the first token.

        params: as Forward.place returns them. images: of a model that sees them, of each row, whose
        ids then have a placeholder for each merged patch.
        """
        forward, tower = self.forward, self.tower
        tower.forget()  # the weights may be new
        if self._run is None:
            specs = forward_.Pages(self.forward.page_spec, self.forward.page_spec)
            everyone = jax.tree.map(lambda _: PS(), self._tokens(1, 1, 1))
            run = self.forward.everywhere(
                self._local, params, (specs, everyone, PS()), (PS(), specs)
            )
            self._run = jax.jit(run, donate_argnums=1)
        width = 1
        while width * PAGE < max(map(len, rows), default=0):
            width *= 2
        pages = self.forward.pages(width + 1, PAGE)
        table_M = np.arange(1, width + 1, dtype=np.int32)
        scored: list[list[tuple[int, jax.Array]]] = []
        with jax.set_mesh(self.forward.mesh):
            for i, row in enumerate(rows):
                scored.append([])
                for start in range(0, len(row) - 1, TILE):
                    ids = np.asarray(row[start : start + TILE + 1], np.int32)
                    count = len(ids) - 1
                    tokens = self._tokens(TILE, TILE, width)
                    tokens.ids_T[:count], tokens.table_BM[0] = ids[:-1], table_M
                    tokens.positions_T[:count] = np.arange(start, start + count)
                    tokens.count_B[0], tokens.context_B[0] = count, start + count
                    if images is not None:
                        sight = images[i].sight(start, count, tower, params)
                        features_TD = write(tokens, [(0, sight)], forward.features)
                        if features_TD is not None:
                            tokens = dataclasses.replace(tokens, features_TD=features_TD)
                    next_T = np.zeros(TILE, np.int32)
                    next_T[:count] = ids[1:]
                    logprobs_T, pages = self._run(params, pages, tokens, next_T)
                    scored[-1].append((count, logprobs_T))
        nothing = np.full(1, np.nan, np.float32)
        return [
            np.concatenate([nothing, *(np.asarray(x)[:count] for count, x in parts)])
            for parts in scored
        ]

    def _tokens(self, T: int, B: int, M: int) -> forward_.Tokens:
        """Returns Tokens of zeros, with features if the model sees images."""
        like = self.forward.features
        tokens = forward_.tokens_like(T, B, M, like is not None)
        if like is None:
            return tokens
        return dataclasses.replace(tokens, features_TD=np.zeros((T, *like.shape), like.dtype))

    def _local(
        self, params: Tree, pages: forward_.Pages, tokens: forward_.Tokens, next_T: Any
    ) -> tuple[Any, forward_.Pages]:
        logits_TV, log_z_T, pages = tile(self.forward, params, pages, tokens)
        logit_T = jnp.take_along_axis(logits_TV, next_T[:, None], 1)[:, 0]
        return logit_T - log_z_T, pages


@functools.lru_cache(maxsize=4)
def teacher(cfg: DecoderConfig | VlmConfig, mesh: Mesh, dtype: str) -> Teacher:
    """Returns a teacher, compiled once."""
    return Teacher(cfg, mesh, dtype)
