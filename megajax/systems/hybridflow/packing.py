"""Responses packed into rows of fixed length, for one update of a model.

A prompt and its response stand in one row, as one segment. The number of rows and their length
never change, so an update compiles once. The longest response is placed first, and each goes into
the row that has the fewest tokens, so that all devices have about the same work.

Legend: B rows, S positions.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from megajax.core.errors import UserError

Batch = dict[str, np.ndarray]


def pack(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[np.ndarray]],
    rows: int,
    seq_len: int,
) -> Batch:
    """Returns the members of a batch that a decoder trains on.

    Args: columns: {name: for each response, float32 of its tokens}.
    Returns: tokens, targets, segments, positions: int32 (B, S), and each column, float32 (B, S).
      The target at the place before a token of a response is that token, and its column's number
      stands there too; other targets are -1. What no response fills is a segment of its own.
    Raises: UserError if the responses do not fit; ValueError for a prompt without a token.
    """
    if empty := [i for i, prompt in enumerate(prompts) if not len(prompt)]:
        raise ValueError(f"prompt {empty[0]} has no token, so nothing predicts its response")
    shape = rows, seq_len
    batch: Batch = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.full(shape, -1, np.int32),
        "segments": np.zeros(shape, np.int32),
        "positions": np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1)),
    }
    batch |= {name: np.zeros(shape, np.float32) for name in columns}
    used, members = [0] * rows, [0] * rows
    lengths = [len(p) + len(r) - 1 for p, r in zip(prompts, responses, strict=True)]
    for i, row in enumerate(places(lengths, rows, seq_len)):
        tokens, first = [*prompts[i], *responses[i]], len(prompts[i]) - 1
        start, length = used[row], len(tokens) - 1
        span = slice(start, start + length)
        answer = slice(start + first, start + length)
        batch["tokens"][row, span] = tokens[:-1]
        batch["targets"][row, answer] = tokens[first + 1 :]
        batch["segments"][row, span] = members[row]
        batch["positions"][row, span] = np.arange(length)
        for name, values in columns.items():
            batch[name][row, answer] = values[i]
        used[row], members[row] = start + length, members[row] + 1
        batch["segments"][row, start + length :] = members[row]
        batch["positions"][row, start + length :] = np.arange(seq_len - start - length)
    return batch


def places(lengths: Sequence[int], rows: int, seq_len: int) -> list[int]:
    """Returns the row of each sequence: the longest first, into the row with the fewest tokens.

    Raises: UserError if one does not fit into that row, which is the emptiest.
    """
    chosen = [0] * len(lengths)
    heap = [(0, row) for row in range(rows)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, row = heapq.heappop(heap)
        if tokens + lengths[i] > seq_len:
            raise UserError(
                f"{len(lengths)} responses with {sum(lengths)} tokens do not fit into {rows} "
                f"rows of {seq_len} (--train.global_batch, --train.seq_len)"
            )
        chosen[i] = row
        heapq.heappush(heap, (tokens + lengths[i], row))
    return chosen
