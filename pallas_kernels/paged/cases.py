"""Named steps over paged keys and values for reports and benchmarks, and their floors.

A step that decodes reads every key and value once and does little with it: the floor is the
memory's. A piece of a prompt does many products with each. FLOPs count the pairs that are seen, 4 K
a pair and query head; bytes count pages that are seen, scales, queries and results once.
"""

import dataclasses

import numpy as np

from pallas_kernels.cases import Workload


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One step. contexts: keys of each sequence, this step's included. counts: its rows.

    heads: (H, G). pages: their type. room: pages of a table's row hold so many tokens.
    """

    name: str
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    width: int = 128
    page: int = 16
    pages: str = "bfloat16"
    room: int = 4096

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(self.counts)

    def flops(self, backward: bool = False) -> float:
        """Returns the FLOPs of the products. backward: there is none, so 0."""
        if backward:
            return 0.0
        pairs = sum(
            n * c - n * (n - 1) // 2 for c, n in zip(self.contexts, self.counts, strict=True)
        )
        return 4.0 * pairs * self.heads[0] * self.width

    def bytes(self, backward: bool = False) -> float:
        """Returns the bytes that are read and written, each once. backward: 0."""
        if backward:
            return 0.0
        size = np.dtype(self.pages).itemsize if self.pages in ("int8", "float16") else 2
        size = 1 if self.pages == "float8_e4m3fn" else size
        keys = sum(c for c, n in zip(self.contexts, self.counts, strict=True) if n)
        each = size * self.width + (4 if size == 1 else 0)
        return 2.0 * keys * self.heads[1] * each + 2 * 2 * self.tokens * self.heads[0] * self.width


def ragged(sequences: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Returns contexts of 1 to `longest`, half of them below an eighth: most requests are short."""
    random = np.random.default_rng(seed)
    few = random.integers(1, longest // 8 + 1, sequences)
    many = random.integers(1, longest + 1, sequences)
    return tuple(int(n) for n in np.where(random.random(sequences) < 0.5, few, many))


def decode(sequences: int, context: int, **more: object) -> Case:
    """Returns a step that decodes one token for each of several equal contexts."""
    name = f"decode {sequences} x {context}" + "".join(f" {value}" for value in more.values())
    return Case(
        name,
        (context,) * sequences,
        (1,) * sequences,
        room=context,
        **more,  # type: ignore
    )


CASES = (
    decode(64, 4096),
    decode(1, 4096),
    decode(8, 32768),
    decode(64, 4096, pages="int8"),
    decode(64, 4096, pages="float8_e4m3fn"),
    decode(256, 1024),
    Case("decode 64, ragged to 8192", ragged(64, 8192), (1,) * 64, room=8192),
    Case("chunk 2048 of 16384", (16384,), (2048,), room=16384),
    Case("chunk 1984 beside 64 x 2048", (*[2048] * 64, 4096), (*[1] * 64, 1984)),
)

# Of the engine that scripts/gpu_session/serving.py decodes with (Llama 3.2 1B's attention): its
# smallest step, 64 sequences, and a prompt in an engine for 64 of them.
SERVED = (
    decode(8, 768, width=64),
    decode(64, 768, width=64),
    Case("prompt 512 of 64", (512, *[0] * 63), (512, *[0] * 63), width=64, room=768),
)
