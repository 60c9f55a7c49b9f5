"""Kernels: the shape of what is computed at once, and the FLOPs and array elements that follow.

A kernel says nothing about devices, data types or models: an `Op` (cost/base.py) is a kernel with
data types, a place in a model and a number of executions. A table of measured times or a learned
model finds an entry by the kernel's `name` and `shape`. If a mesh shards a dimension, the dimension
is the mean over devices, which need not be a whole number.
"""

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The base class of kernels. TOKENS: the dimensions that grow with the tokens of a batch."""

    TOKENS: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """What a table of measured times calls this kernel."""
        return type(self).__name__.lower()

    @property
    def shape(self) -> tuple:
        """All dimensions and options, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def flops(self) -> float:
        """Floating-point operations of one execution; 0 where memory traffic is all that counts."""
        return 0.0

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of each operand, then of the result."""
        raise NotImplementedError

    @property
    def params(self) -> float:
        """Elements that are parameters of a model."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class Matmul(Kernel):
    """y (m, n) = x (m, k) w (k, n), `batch` times with a weight each."""

    TOKENS: ClassVar = ("m",)
    m: float
    k: float
    n: float
    batch: float = 1

    @property
    def flops(self) -> float:  # noqa: D102
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of x, w and y."""
        m, k, n = self.m, self.k, self.n
        return self.batch * m * k, self.batch * k * n, self.batch * m * n

    @property
    def params(self) -> float:  # noqa: D102
        return self.batch * self.k * self.n


@dataclasses.dataclass(frozen=True)
class TileSparse(Kernel):
    """y (m, n) = x (m, k) w (k, n) with a pruned w, of which `stored` elements are multiplied.

    The padding to full tiles is included in `stored`.
    """

    TOKENS: ClassVar = ("m",)
    m: float
    k: float
    n: float
    stored: float

    @property
    def flops(self) -> float:  # noqa: D102
        return 2 * self.m * self.stored

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of x, w and y."""
        return self.m * self.k, self.stored, self.m * self.n

    @property
    def params(self) -> float:  # noqa: D102
        return self.stored


@dataclasses.dataclass(frozen=True)
class Attention(Kernel):
    """softmax(q k^T) v for each row of a batch and each query head.

    window: the largest number of keys that a query attends to; None: all. fused: the kernel leaves
    out blocks of keys beyond the window, and no (queries x keys) array exists; if False, each query
    is multiplied by all keys. A causal mask does not halve the FLOPs, which are those of the
    Megatron convention (cost/base.py).
    """

    TOKENS: ClassVar = ("batch",)
    batch: float
    queries: float
    keys: float
    heads: float
    kv_heads: float
    head_width: float
    causal: bool = True
    window: int | None = None
    fused: bool = True

    @property
    def reach(self) -> float:
        """Keys that the kernel multiplies for each query."""
        return min(self.window or self.keys, self.keys) if self.fused else self.keys

    @property
    def flops(self) -> float:  # noqa: D102
        pairs = self.batch * self.queries * self.reach
        return 4 * pairs * self.heads * self.head_width

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of the queries, keys, values and results."""
        asked = self.batch * self.queries * self.heads * self.head_width
        stored = self.batch * self.keys * self.kv_heads * self.head_width
        return asked, stored, stored, asked


@dataclasses.dataclass(frozen=True)
class Rowwise(Kernel):
    """A pass over `rows` of `width` elements: `reads` arrays in, one array of that shape out.

    kind: 'norm', 'activation', 'softmax', 'add', 'update', ...: whatever a table distinguishes.
    """

    TOKENS: ClassVar = ("rows",)
    kind: str
    rows: float
    width: float
    reads: float = 1

    @property
    def name(self) -> str:  # noqa: D102
        return self.kind

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of all operands together, then of the result."""
        return self.reads * self.rows * self.width, self.rows * self.width


@dataclasses.dataclass(frozen=True)
class Embedding(Kernel):
    """Rows of a table (table, width), looked up for `rows` tokens."""

    TOKENS: ClassVar = ("rows",)
    rows: float
    table: float
    width: float

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of the rows that are read, then of the result."""
        return self.rows * self.width, self.rows * self.width

    @property
    def params(self) -> float:  # noqa: D102
        return self.table * self.width


@dataclasses.dataclass(frozen=True)
class Experts(Kernel):
    """The grouped products of routed feed-forward experts, without sending tokens to them.

    pairs: expert rows that are computed for each token. This is top_k, or more if experts have a
    fixed capacity, because all of its slots are computed, filled or not. dropless: experts have no
    fixed capacity. hidden: inner width of an expert. gated: whether it has two input matrices.
    """

    TOKENS: ClassVar = ("tokens",)
    tokens: float
    experts: float
    top_k: int
    width: float
    hidden: float
    gated: bool
    pairs: float
    dropless: bool = True

    @property
    def matrices(self) -> int:
        """Weights of one expert."""
        return 2 + self.gated

    @property
    def flops(self) -> float:  # noqa: D102
        rows = self.tokens * self.pairs
        return 2 * rows * self.matrices * self.width * self.hidden

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of the rows, weights and inner values, then of the answers."""
        rows = self.tokens * self.pairs
        wide = rows * self.width
        return wide, self.params, self.matrices * rows * self.hidden, wide

    @property
    def params(self) -> float:  # noqa: D102
        return self.experts * self.matrices * self.width * self.hidden


@dataclasses.dataclass(frozen=True)
class Convolution(Kernel):
    """A convolution of `images`; height and width are those of the result. window: rows and columns
    of the kernel. stride: the step of the window in both directions. groups: the number of groups
    of channels that are not combined (depthwise: as many as channels)."""

    TOKENS: ClassVar = ("images",)
    images: float
    height: float
    width: float
    channels: float
    filters: float
    window: tuple[int, int] = (3, 3)
    stride: int = 1
    groups: int = 1

    @property
    def flops(self) -> float:  # noqa: D102
        return 2 * self.images * self.height * self.width * self.params

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of the images, the kernel and the result."""
        places = self.images * self.height * self.width
        return places * self.stride**2 * self.channels, self.params, places * self.filters

    @property
    def params(self) -> float:  # noqa: D102
        rows, columns = self.window
        return rows * columns * self.channels / self.groups * self.filters


@dataclasses.dataclass(frozen=True)
class PatchEmbedding(Kernel):
    """Patches of images, `patch` rows and columns of `channels`, as tokens of a width."""

    TOKENS: ClassVar = ("tokens",)
    tokens: float
    patch: int
    channels: int
    width: float

    @property
    def flops(self) -> float:  # noqa: D102
        return 2 * self.tokens * self.params

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of the images, the kernel and the tokens."""
        pixels = self.tokens * self.patch**2 * self.channels
        return pixels, self.params, self.tokens * self.width

    @property
    def params(self) -> float:  # noqa: D102
        return self.patch**2 * self.channels * self.width


@dataclasses.dataclass(frozen=True)
class Pooling(Kernel):
    """The largest or mean value of windows of `window` rows and columns. height and width are those
    of the result."""

    TOKENS: ClassVar = ("images",)
    images: float
    height: float
    width: float
    channels: float
    window: int
    stride: int

    @property
    def flops(self) -> float:
        """One operation for each value that is read."""
        return self.sizes[1] * self.window**2

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements of the images and of the result."""
        result = self.images * self.height * self.width * self.channels
        return result * self.stride**2, result


@dataclasses.dataclass(frozen=True)
class RoiAlign(Kernel):
    """Regions of a map, each as size x size places of the mean of sampling x sampling bilinear
    samples (arXiv 1703.06870, section 3)."""

    TOKENS: ClassVar = ("regions",)
    regions: float
    size: int
    channels: float
    sampling: int = 2

    @property
    def flops(self) -> float:
        """Four products and four additions for each sample."""
        return 8 * self.sizes[1] * self.sampling**2

    @property
    def sizes(self) -> tuple[float, ...]:
        """Elements that are read, four for each sample, and of the result."""
        result = self.regions * self.size**2 * self.channels
        return 4 * result * self.sampling**2, result


@dataclasses.dataclass(frozen=True)
class Collective(Kernel):
    """A collective of `inside` devices on each of `hosts` hosts.

    nbytes: bytes on one device, of the operand or the result, whichever is larger: the result of an
    all-gather, the operand of a reduce-scatter.
    """

    kind: str
    nbytes: float
    inside: int
    hosts: int

    @property
    def name(self) -> str:  # noqa: D102
        return self.kind

    @property
    def sizes(self) -> tuple[float, ...]:
        """None that a data type scales: `nbytes` says it all."""
        return ()
