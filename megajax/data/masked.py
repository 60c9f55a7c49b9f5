"""Masked tokens: packed rows of text of which a model predicts some hidden tokens.

BERT's corruption (arXiv 1810.04805, section 3.1): 15 % of the tokens are targets; of these 80 % are
replaced by the mask, 10 % by any token, 10 % stay. Row i is a pure function of (seed, i).

Legend: S tokens of a row.
"""

import numpy as np

from megajax.data.loader import Rows
from megajax.data.pack import IGNORED, mix

SHARE, MASKED, REPLACED = 0.15, 0.8, 0.1  # (arXiv 1810.04805, section 3.1)


class MaskedRows:
    """Rows of text with some tokens hidden, whose ids are the targets."""

    def __init__(self, rows: Rows, mask: int, vocab: int, seed: int):
        """mask: the id that hides a token. vocab: ids below it may replace one."""
        self.rows, self.mask, self.vocab, self.seed = rows, mask, vocab, seed

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i."""
        row = self.rows[i]
        tokens_S = row["tokens"]
        random = np.random.default_rng(mix(self.seed, i, "masks"))
        draw_S, kind_S = random.random(tokens_S.shape), random.random(tokens_S.shape)
        other_S = random.integers(0, self.vocab, tokens_S.shape, np.int32)
        chosen_S = draw_S < SHARE
        hidden_S = np.where(kind_S < MASKED, np.int32(self.mask), other_S)
        changes_S = chosen_S & (kind_S < MASKED + REPLACED)
        return row | {
            "tokens": np.where(changes_S, hidden_S, tokens_S),
            "targets": np.where(chosen_S, tokens_S, np.int32(IGNORED)),
        }
