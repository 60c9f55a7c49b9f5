"""Generation with a key-value cache: one prefill, then one token at a time, in one program.

Rows may have prompts of different lengths; each continues from its own end. The cache is laid out
by position, stacked over layers, cut over rows and key-value heads.

Legend: L layers, B rows, P prompt positions, M memory positions (prompt and continuation), G
key-value heads, K head width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, reshard

from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError
from megajax.core.tree import Tree
from megajax.layers.mask import Context
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import sharding, tensor
from megajax.parallel.overlap import Overlap, compiler_options
from megajax.serving.sampling import SamplingConfig, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, by absolute position. Unwritten places lie in the future.

    attention: Ops.attend of the model's layers.
    """

    k_BMGK: jax.Array
    v_BMGK: jax.Array
    attention: Callable = dataclasses.field(metadata={"static": True})

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context, window: int | None
    ) -> "tuple[jax.Array, Cache]":
        """As layers.attention.Cache."""
        cache = self._write(k, v, context.positions_BS)
        y_BSHK = self.attention(q, cache.k_BMGK, cache.v_BMGK, context, cache._context(), window)
        return y_BSHK, cache

    def _write(self, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_BS: jax.Array) -> "Cache":
        """Puts S new tokens at their positions, which differ by row."""
        S, M = k_BSGK.shape[1], self.k_BMGK.shape[1]
        if S == 1:  # decoding: a select keeps the cut over rows and heads, a scatter would not
            here_BM11 = (jnp.arange(M)[None] == positions_BS)[:, :, None, None]
            return dataclasses.replace(
                self,
                k_BMGK=jnp.where(here_BM11, k_BSGK, self.k_BMGK),
                v_BMGK=jnp.where(here_BM11, v_BSGK, self.v_BMGK),
            )
        pad = ((0, 0), (0, M - S), (0, 0), (0, 0))  # prefill: positions are 0..S-1
        return dataclasses.replace(self, k_BMGK=jnp.pad(k_BSGK, pad), v_BMGK=jnp.pad(v_BSGK, pad))

    def _context(self) -> Context:
        """Returns the positions of the memory, 0..M-1 in every row."""
        B, M = self.k_BMGK.shape[:2]
        return Context(positions_BS=jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, M)))


class Generator:
    """Continues prompts with a decoder whose parameters rest as training leaves them, or packed
    for this mesh (systems.prune_export.to_tiles)."""

    def __init__(
        self,
        cfg: DecoderConfig,
        mesh: Mesh,
        zero: sharding.Zero = "full",
        dtype: str = "float32",
        sampling: SamplingConfig = SamplingConfig(),
        overlap: Overlap = "auto",
    ):
        """zero: how the parameters are stored. dtype: of compute and cache. overlap: how tensor
        ranks add up what they know of a position: 'fused', in the product's kernel; 'xla'; 'auto',
        as measured (a ring, of so few rows, is 'xla').

        Raises: UserError for an overlap that cannot run on this mesh.
        """
        self._cfg, self._mesh = cfg, mesh
        self._layout = sharding.layout(mesh, zero, decode=True, model=cfg)
        with jax.set_mesh(mesh):
            self._ops = tensor.ops(self._layout, "xla", overlap=overlap)
            self._parts = decoder.parts(cfg, self._layout, self._ops, dtype)
        self._sampling, self._dtype = sampling, dtype
        options = compiler_options(overlap, mesh)
        self._run = jax.jit(
            self._generate, static_argnames=("total", "end"), compiler_options=options
        )

    def __call__(
        self,
        params: Tree,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        seed: int = 0,
        end: int | None = None,
    ) -> list[list[int]]:
        """Returns the continuation of each prompt, without the prompt and from `end` on cut off.

        Raises: UserError for a prompt that is empty or no ids of the vocabulary, or more positions
        than the model has.
        """
        check_request(prompts, new_tokens, self._cfg.vocab)
        longest = max(map(len, prompts))
        total = longest + new_tokens
        if total > self._cfg.max_positions:
            raise UserError(
                f"prompt and continuation take {total} positions; the model has "
                f"{self._cfg.max_positions} (--new_tokens)"
            )
        ways = self._layout.ways(BATCH_AXES)
        rows = -(-len(prompts) // ways) * ways  # the mesh cuts rows evenly: repeat the last
        padded = [prompts[min(i, len(prompts) - 1)] for i in range(rows)]
        tokens = np.zeros((rows, longest), np.int32)
        for i, prompt in enumerate(padded):
            tokens[i, : len(prompt)] = prompt
        lengths = np.array([len(p) for p in padded], np.int32)
        with jax.set_mesh(self._mesh):

            def place(x: np.ndarray, *words: str | None) -> jax.Array:
                return jax.device_put(x, self._layout.named(self._layout.act(*words)))

            out = self._run(
                # As they are, unless pipeline stages hold them.
                sharding.place(self._layout, self._parts.axes, params),
                place(tokens, "batch", None),
                place(lengths, "batch"),
                jax.random.key(seed),
                total=total,
                end=end,
            )
            out = np.asarray(reshard(out, jax.P(None, None)))
        continued = [out[i, len(p) : len(p) + new_tokens].tolist() for i, p in enumerate(prompts)]
        return [row[: row.index(end)] if end in row else row for row in continued]

    def _generate(
        self,
        params: Tree,
        tokens_BP: jax.Array,
        lengths_B: jax.Array,
        key: jax.Array,
        *,
        total: int,
        end: int | None,
    ) -> jax.Array:
        """Returns tokens_BM: prompts and continuations, M = total."""
        layout, cfg = self._layout, self._cfg
        B, P = tokens_BP.shape
        heads = cfg.kv_heads * layout.copies("kv_heads")
        shape = (cfg.layers, B, total, heads, cfg.head_width)
        spec = layout.act("layers", "batch", None, "kv_heads", None)
        empty = jnp.zeros(shape, self._dtype, out_sharding=spec)
        rows = layout.act("batch", None)
        positions_BP = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
        forward = functools.partial(self._forward, params)
        logits_BV, cache = forward(
            tokens_BP,
            reshard(positions_BP, rows),
            lengths_B - 1,
            Cache(empty, empty, self._ops.attend),
        )
        tokens_BM = jnp.pad(tokens_BP, ((0, 0), (0, total - P)))

        def put(tokens_BM: jax.Array, next_B: jax.Array, position_B: jax.Array) -> jax.Array:
            here_BM = jnp.arange(total)[None] == position_B[:, None]
            return jnp.where(here_BM, next_B[:, None], tokens_BM)

        def step(carry: tuple) -> tuple:
            tokens_BM, cache, logits_BV, position_B, done_B, i = carry
            next_B = sample(logits_BV, jax.random.fold_in(key, i), self._sampling)
            tokens_BM = put(tokens_BM, next_B, position_B)
            if end is not None:
                done_B = done_B | (next_B == end)
            zero_B = jnp.zeros_like(position_B)
            logits_BV, cache = forward(next_B[:, None], position_B[:, None], zero_B, cache)
            return tokens_BM, cache, logits_BV, position_B + 1, done_B, i + 1

        def unfinished(carry: tuple) -> jax.Array:
            *_, done_B, i = carry
            return (i < total - P) & ~jnp.all(done_B)

        done_B = jnp.zeros_like(lengths_B, dtype=bool)
        carry = (tokens_BM, cache, logits_BV, lengths_B, done_B, jnp.zeros((), jnp.int32))
        return jax.lax.while_loop(unfinished, step, carry)[0]

    def _forward(
        self,
        params: Tree,
        tokens_BS: jax.Array,
        positions_BS: jax.Array,
        last_B: jax.Array,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """Returns (logits_BV after position last_B of each row, the cache with these tokens)."""
        parts = self._parts
        batch = {"tokens": tokens_BS, "positions": positions_BS}
        context = parts.context(batch, None)

        def layer(x: jax.Array, stacked: tuple[Any, Cache]) -> tuple[jax.Array, Any]:
            return parts.block(stacked[0], x, context, stacked[1])[:2]

        x_BSD = parts.embed(params, batch, context)
        x_BSD, cache = jax.lax.scan(layer, x_BSD, (params[parts.stack], cache))
        here_BS1 = (jnp.arange(x_BSD.shape[1])[None] == last_B[:, None])[..., None]
        x_B1D = jnp.where(here_BS1, x_BSD, 0).sum(1, keepdims=True)
        logits_BV = parts.head(params, x_B1D)[:, 0]
        return reshard(logits_BV, self._layout.act("batch", None)), cache


def check_request(prompts: Sequence[Sequence[int]], new_tokens: int, vocab: int) -> None:
    """Refuses what no table of embeddings has a row for, which JAX would clip without a word.

    Raises: UserError.
    """
    try:
        rows = [np.asarray(prompt) for prompt in prompts]
    except ValueError as error:  # lists of several lengths
        raise UserError(f"each prompt must be a list of token ids: {error} (--prompt)") from None
    if not rows or any(row.size == 0 for row in rows):
        raise UserError("a prompt must have at least one token (--prompt)")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise UserError(f"prompts[{i}] must be a list of token ids, whole numbers (--prompt)")
        if row.min() < 0 or row.max() >= vocab:
            wrong = row[(row < 0) | (row >= vocab)][0]
            raise UserError(
                f"prompts[{i}] has the token id {wrong}; the vocabulary has 0 to {vocab - 1} "
                "(--prompt)"
            )
    if not isinstance(new_tokens, (int, np.integer)) or new_tokens < 0:
        raise UserError(
            f"new_tokens={new_tokens} must be a whole number of at least 0 (--new_tokens)"
        )
