"""Shape of an encoder and its presets, each with the source of its numbers.

Tables (tokens, positions, token types) are padded to a multiple that every tensor-parallel size
divides; logits of the added rows are masked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from megajax.core.config import EPS, Checked, option
from megajax.core.errors import UserError, nearest_divisors
from megajax.cost.base import Op, Phase, Stack, Workload, lookup
from megajax.cost.kernels import Matmul, Rowwise
from megajax.layers.attention import AttentionConfig
from megajax.layers.mlp import MlpConfig

Head = Literal["mlm", "classify", "none"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Checked, section="model"):
    """Everything that decides the parameters and the arithmetic of an encoder."""

    layers: int = option(4, "number of blocks with weights of their own", at_least=1)
    repeats: int = option(
        1, "how often each block is applied in turn (ALBERT shares weights)", at_least=1
    )
    width: int = option(128, "model width D", at_least=1)
    heads: int = option(4, "number of heads H; must divide the width", at_least=1)
    mlp: int = option(512, "feed-forward width F", at_least=1)
    vocab: int = option(512, "number of token ids that the model can predict", at_least=1)
    vocab_multiple: int = option(
        128, "the rows of all tables are padded to a multiple of this", at_least=1
    )
    max_positions: int = option(512, "number of rows of the position table", "tokens", at_least=1)
    position_offset: int = option(0, "row of a sequence's first token (RoBERTa: 2)", at_least=0)
    types: int = option(2, "number of token types (sentence A or B); 0: none", at_least=0)
    embed_width: int = option(
        0,
        "width of the embedding tables, which are then projected; 0: the model's width",
        at_least=0,
    )
    activation: Literal["gelu", "gelu_tanh"] = option(
        "gelu", "activation function of the feed-forward layer"
    )
    norm_eps: float = option(1e-12, "number that the norm adds to the variance", at_least=EPS)
    dropout: float = option(
        0.0, "dropout rate on the embedding and on each sublayer's output", at_least=0, below=1
    )
    head: Head = option(
        "mlm",
        "what is predicted: token ids, a label from the first token, or nothing (no training)",
    )
    labels: int = option(2, "number of classes of a classification head", at_least=1)
    pooler: Literal["tanh", "relu"] = option("tanh", "activation function before the classes")

    def __post_init__(self):
        """Refuses shapes that cannot be built."""
        super().__post_init__()
        if self.width % self.heads:
            raise UserError(
                f"model.heads={self.heads} must divide model.width={self.width}; "
                f"{nearest_divisors(self.width, self.heads)} (--model.heads)"
            )
        if self.position_offset >= self.max_positions:
            raise UserError(
                f"model.position_offset={self.position_offset} must be from 0 to "
                f"model.max_positions - 1 = {self.max_positions - 1} (--model.position_offset)"
            )

    @property
    def head_width(self) -> int:
        """Width of one head, K."""
        return self.width // self.heads

    @property
    def table_width(self) -> int:
        """Width of the tables and of the tied product with them."""
        return self.embed_width or self.width

    def padded(self, rows: int) -> int:
        """Returns the rows of a table that holds this many."""
        return -(-rows // self.vocab_multiple) * self.vocab_multiple

    @property
    def sizes(self) -> dict[str, tuple[int, str]]:
        """{logical word: (size of that dimension, the field that sets it)}."""
        table = "model.embed_width" if self.embed_width else "model.width"
        return {
            "embed": (self.table_width, table),
            "heads": (self.heads, "model.heads"),
            "kv_heads": (self.heads, "model.heads"),
            "mlp": (self.mlp, "model.mlp"),
            "vocab": (self.padded(self.vocab), "model.vocab_multiple"),
            "positions": (self.padded(self.max_positions), "model.vocab_multiple"),
            "layers": (self.layers, "model.layers"),
        }

    @property
    def kv_heads(self) -> int:
        """Key-value heads: as many as heads."""
        return self.heads

    @property
    def attention(self) -> AttentionConfig:
        """The attention layer's own shape."""
        return AttentionConfig(
            self.width,
            self.heads,
            self.heads,
            self.head_width,
            qkv_bias=True,
            out_bias=True,
            qk_norm=False,
            norm_eps=self.norm_eps,
            window=None,
            out_std=0.02,
        )

    @property
    def feed_forward(self) -> MlpConfig:
        """The feed-forward layer's own shape."""
        return MlpConfig(self.width, self.mlp, self.activation, True, 0.02)

    @property
    def stack(self) -> Stack:
        """The blocks, as the cost model sees them."""
        return Stack(
            self.layers,
            self.width,
            self.heads,
            self.heads,
            self.head_width,
            self.mlp,
            causal=False,
            repeats=self.repeats,
        )

    def workload(
        self, batch: int, seq_len: int, dtype: str = "bfloat16", phase: Phase = "train"
    ) -> Workload:
        """Returns the forward pass of this many rows, without padding, as a list of operations.

        Every token is scored, by a classifier too: the program keeps the shape of its input.
        phase: 'train', or 'prefill' for one pass without gradients. Raises: UserError for 'decode'.
        """
        if phase == "decode":
            raise UserError("an encoder generates no tokens: phase=decode must be train or prefill")
        T, D, E = batch * seq_len, self.width, self.table_width
        rows = [self.vocab, self.max_positions, *([self.types] if self.types else [])]
        before = [lookup(T, table, E, dtype) for table in rows]
        out = E if self.head == "mlm" else D
        after = [Matmul(T, D, out), Rowwise("activation", T, out)]
        after += [Rowwise("norm", T, E)] if self.head == "mlm" else [Matmul(T, D, self.labels)]
        if self.head == "none":
            after = []
        head = [Op("head", kernel, dtypes=(dtype,)) for kernel in after]
        if self.head == "mlm":  # scored with the table of the tokens
            head.append(Op("head", Matmul(T, E, self.vocab), 1, 0, (dtype,)))
        if self.embed_width:
            head.append(Op("head", Matmul(T, E, D), dtypes=(dtype,)))
        blocks = self.stack.ops(batch, seq_len, seq_len, dtype)
        layers = self.layers * self.repeats
        return Workload((*before, *blocks, *head), batch, seq_len, layers, D, phase)


def _bert(layers: int, width: int, heads: int, **changes) -> EncoderConfig:
    """BERT (arXiv 1810.04805, section 3; vocabulary of the uncased models' cards)."""
    values: dict[str, Any] = dict(
        layers=layers, width=width, heads=heads, mlp=4 * width, vocab=30522, dropout=0.1
    )
    return EncoderConfig(**(values | changes))


def _roberta(layers: int, width: int, heads: int) -> EncoderConfig:
    """RoBERTa (arXiv 1907.11692, table 9; tables and epsilon of its config.json)."""
    return _bert(
        layers,
        width,
        heads,
        vocab=50265,
        max_positions=514,
        position_offset=2,
        types=1,
        norm_eps=1e-5,
    )


def _albert(repeats: int, width: int, heads: int) -> EncoderConfig:
    """ALBERT version 2 (arXiv 1909.11942, table 1): all layers share one block's weights."""
    return _bert(
        1,
        width,
        heads,
        repeats=repeats,
        vocab=30000,
        embed_width=128,
        activation="gelu_tanh",
        dropout=0.0,
    )


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "nano": EncoderConfig,
    "bert_base": lambda: _bert(12, 768, 12),
    "bert_large": lambda: _bert(24, 1024, 16),
    "roberta_base": lambda: _roberta(12, 768, 12),
    "roberta_large": lambda: _roberta(24, 1024, 16),
    # arXiv 1910.01108 section 3: BERT with half its layers, no token types and no pooler.
    "distilbert_base": lambda: _bert(6, 768, 12, types=0, pooler="relu"),
    "albert_base": lambda: _albert(12, 768, 12),
    "albert_large": lambda: _albert(24, 1024, 16),
}
