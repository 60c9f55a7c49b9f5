"""Payloads of 32-bit words: where a tile's codes and scales are, and their copies in and out.

A row is the codes of all its groups, then their float32 scales; a tile has a run of each. Legend: T
groups of a tile, L words or blocks of a group, C columns, W words.

Copies in bulk want a tile's words as one line, registers want them by group and thread. A view of
another shape makes both of one buffer; the interpreter has no such views, and reshapes the value.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize.stream import INSIDE


class Payloads:
    """The payloads that a body reads (`payload` in `at`) and writes (`sent`), in shared memory."""

    def __init__(self, at: dict, smem: dict, problem: Any, tile: Any, interpret: bool):
        """at: arrays in memory, smem: buffers, by name. problem, tile: as in hopper.py."""
        self.at, self.smem, self.problem, self.tile = at, smem, problem, tile
        self.interpret = interpret

    def fetch(self, row: Any, t: Any, slot: Any, part: Any) -> None:
        """Starts the copies of the t-th tile of a row that is read, into a part of a slot."""
        T, words = self.tile.groups, self.problem.words(self.problem.bits)
        scales = self.at["payload"].shape[1] * words // (words + 1)  # where a row's codes end
        for name, start, size in (
            ("word_slots", t * (T * words), T * words),
            ("scale_slots", scales + t * T, T),
        ):
            source = self.at["payload"].at[row, pl.ds(pl.multiple_of(start, 4), size)]
            target, ready = self.smem[name].at[slot, part, 0], self.smem["ready"].at[slot]
            plgpu.copy_gmem_to_smem(source, target, ready, oob_mode=INSIDE)

    def words(self, slot: Any, part: Any, shape: tuple[int, ...], layout: Any) -> Any:
        """Returns the words of a part of a slot as an array of this shape."""
        line_W = self.smem["word_slots"].at[slot, part, 0]
        if self.interpret:
            return line_W[...].reshape(shape)
        return plgpu.load(line_W.reshape(*shape), layout=layout, optimized=False)

    def columns(self, slot: Any, part: Any, shape: tuple[int, ...], layout: Any) -> list[Any]:
        """Returns the columns (T, L, 1) of what `words` does."""
        line_W, (T, L, C) = self.smem["word_slots"].at[slot, part, 0], shape
        if self.interpret:
            word_TLC = line_W[...].reshape(shape)
            return [word_TLC[:, :, c : c + 1] for c in range(C)]
        view = line_W.reshape(T, L, C)
        columns = (view.at[:, :, pl.ds(c, 1)] for c in range(C))
        return [plgpu.load(column, layout=layout, optimized=False) for column in columns]

    def scales(self, slot: Any, part: Any, layout: Any) -> Any:
        """Returns the float32 scale_T of a part of a slot."""
        line_T = self.smem["scale_slots"].at[slot, part, 0]
        word_T = plgpu.load(line_T, layout=layout, optimized=False)
        return lax.bitcast_convert_type(word_T, jnp.float32)

    def store(self, place: Any, words: list[Any], scale_T: Any) -> None:
        """Writes a tile's codes and scales to the shared memory from which they are sent.

        words: one (T, L, 4), or the columns (T, L, 1). scale_T: or (T, 1).
        """
        line_W = self.smem["words_out"].at[place]
        if self.interpret:
            line_W[...] = jnp.concatenate(words, -1).reshape(-1)
        elif len(words) == 1:
            line_W.reshape(*words[0].shape)[...] = words[0]
        else:
            view = line_W.reshape(*words[0].shape[:-1], len(words))
            for i, word in enumerate(words):
                view.at[:, :, pl.ds(i, 1)][...] = word
        scales = self.smem["scales_out"].at[place]
        if scale_T.ndim == 1:
            scales = scales.at[:, 0]
        scales[...] = lax.bitcast_convert_type(scale_T, jnp.int32)

    def group_sent(self, t: Any) -> Any:
        """Returns the first group of the t-th tile, counted over all rows that are written."""
        row, first = self._place(t)
        return row * (self.problem.places * self.problem.groups) + first

    def _place(self, t: Any) -> tuple[Any, Any]:
        """Returns (the row of the t-th tile, its first group in the row)."""
        problem, T = self.problem, self.tile.groups
        tiles, rows = problem.groups // T, problem.pieces // problem.places
        piece = lax.div(t, jnp.int32(tiles))
        row = lax.rem(piece, jnp.int32(rows))
        return row, (lax.div(piece, jnp.int32(rows)) * tiles + lax.rem(t, jnp.int32(tiles))) * T

    def send(self, t: Any, place: Any) -> None:
        """Starts the copies of the t-th tile of all: its piece says to which row, and where."""
        problem, T = self.problem, self.tile.groups
        words = problem.words(problem.new_bits)
        row, first = self._place(t)
        scales = problem.places * problem.groups * words
        for source, start, size in (
            (self.smem["words_out"].at[place], first * words, T * words),
            (self.smem["scales_out"].at[place, :, 0], scales + first, T),
        ):
            target = self.at["sent"].at[row, pl.ds(pl.multiple_of(start, 4), size)]
            plgpu.copy_smem_to_gmem(source, target, commit_group=False)
