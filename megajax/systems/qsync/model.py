"""The graph of a training step on one device of a kind, from a run's configuration and a card.

`step_graph` lays out the stack of a decoder or an encoder node by node: the matrix products, which
may have fewer bits, named like their parameters (blocks.3.attention.query), and norms, attention,
activations, experts, tables and head, which compute in the run's --train.dtype. Times come from a
CostModel, so they are estimates of the card; `limit` is the memory that the saved values may take.

A product in few bits casts both operands in each execution. The weight's cast is part of its
seconds; that of the activations is the graph's `cast_s`, in and out. Its backward pass multiplies
the gradient in the second type of `CODES`. With --train.remat=none a product saves the codes of
both operands for itself, and products in full precision that read one input share it (measured in a
compiled scan on a CPU, jax 0.11.2: 3 products of one input keep 3 arrays of int8 codes, and 1 of
float32). So with few bits for some of these products, both are kept: the node `...input` stands for
the shared array. Other rematerialisation computes the codes again, so precisions change no memory.

omega of a product in layer i of L, from 0: gamma (L - i) forward + (i + 1) backward (QSync,
indicator), errors of a forward pass reach the layers above, those of a backward pass the ones
below. Without a profile both errors are those of normal numbers, relative to the product's own
variance (`assumed_errors`): an assumption that tells precisions and depths apart, and nothing else.

Legend: T tokens of a micro-batch, D model width, K inputs and N outputs of a product.
Not here: pipelines and cut tensors or sequences; the optimizer's update.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard, Link
from megajax.cost import memory
from megajax.cost.base import ITEMSIZE, CostModel, Op, Part
from megajax.cost.kernels import Attention, Kernel, Matmul, Rowwise
from megajax.cost.roofline import Group, Roofline, collective_time
from megajax.cost.step import Pipeline, StepShape, passes
from megajax.models.encoder_config import EncoderConfig
from megajax.systems.qsync.graph import PRECISIONS, RANK, Graph, Node
from megajax.training.shape import step_shape

Buckets = Literal["step", "layer"]
PRODUCTS = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
STACK = "blocks"  # the member of the parameters that holds the layers of decoders and encoders
TYPES = {precision: precision for precision in PRECISIONS} | {"fp8": "float8"}  # of cost/base.py
# Types of the operands' codes, and of a gradient's (quant/products.py).
CODES = {precision: (name, name) for precision, name in TYPES.items()} | {
    "int8": ("int8", "bfloat16")
}
LINEAR = 2**24  # (chosen) elements of a large array, whose cast takes no fixed time to speak of
# Stored bits of the significand: of an operand, of a gradient. fp8 is e4m3, its gradient e5m2.
BITS = {"fp8": (3, 2), "float16": (10, 10), "bfloat16": (7, 7), "float32": (23, 23)}
LEVELS = 127  # of int8
# E[(2^e / x)^2] of numbers x in [2^e, 2^(e+1)) whose logarithm is uniform: 3 / (8 ln 2).
BINADE = 3 / (8 * math.log(2))


@dataclasses.dataclass(frozen=True)
class UnlikeJob:
    """What the graphs of all kinds of devices have in common.

    cfg: a JobConfig of a decoder or an encoder. devices: of all kinds together, which exchange
    gradients, each over a `link` to all others. omega: {product: {precision: error}} of a profile;
    None: assumed. gamma: weight of the assumed errors of forward passes. buckets: 'step': all
    gradients are exchanged after the backward pass; 'layer': those of a layer when they are there,
    in float32. int8_backward: data type in which a gradient meets int8 codes; float32 on a card
    that does not compute in this type, because XLA widens the product.
    """

    cfg: Any
    devices: int
    link: Link
    omega: Mapping[str, Mapping[str, float]] | None = None
    gamma: float = 1.0
    buckets: Buckets = "step"
    int8_backward: str = "bfloat16"


def step_graph(
    job: UnlikeJob,
    card: DeviceCard,
    rows: float,
    costs: CostModel = Roofline(),
    is_strong: bool = False,
) -> Graph:
    """Returns the step of one device that computes `rows` rows of the batch.

    Args: costs: gives the seconds of operations. is_strong: products have their full precision,
      --train.dtype, and no other.
    Raises: UserError for a mesh that cuts more than the batch, a model without a stack of blocks,
      a card without --train.dtype, and an omega that lacks a product.
    """
    cfg = job.cfg
    check(cfg)
    made = _Nodes(job, card, rows, costs, is_strong)
    stack, layers = cfg.model.stack, range(cfg.model.stack.layers)
    load = cfg.workload(1)
    bounds = {part: [op for op in load.ops if op.part == part] for part in ("embedding", "head")}
    made.fixed("embed", (), [], made.T * stack.width)
    last = ("embed",)
    for i in layers:
        last = made.layer(i, last)
    head = [op.cut(1 / (made.rows), *op.kernel.TOKENS) for op in bounds["head"]]
    made.fixed("head", last, [("head", op.kernel, op.count) for op in head], 0)
    machine = dataclasses.replace(
        card, network_bytes_per_s=min(card.network_bytes_per_s, job.link.bytes_per_s)
    )

    def bucket(names: Sequence[str], params: float) -> tuple[tuple[str, ...], float]:
        nbytes = memory.MASTER * params
        return tuple(names), collective_time("all-reduce", nbytes, Group(1, job.devices), machine)

    outer = sum(op.params for op in load.ops if op.part in ("embedding", "head"))
    inner = (load.params - outer) / stack.layers
    if job.buckets == "step":
        sent = [bucket(["embed"], load.params)]
    else:
        sent = [bucket(made.trained[i], inner) for i in reversed(layers)]
        sent.append(bucket(["embed"], outer))
    return Graph(tuple(made.nodes), tuple(sent), made.cast_s)


def products(graph: Graph) -> list[str]:
    """Returns the names of the nodes that are products of the stack, whatever they may choose."""
    leaves = {f"{room}.{name}" for room, names in PRODUCTS.items() for name in names}
    return [node.name for node in graph.nodes if ".".join(node.name.split(".")[2:]) in leaves]


def limit(job: UnlikeJob, card: DeviceCard, rows: float, share: float = 1.0) -> float:
    """Returns the bytes that the saved values of `rows` rows may take on a device, which are what
    its memory leaves beside parameters, optimizer, gradients and a working set (cost/memory.py).

    share: of the card's memory that a step may fill. Below 0: not even the others fit.
    """
    sizes = memory.terms(_shape(job.cfg, rows, job.devices)) | {"stash": 0.0}
    return share * card.memory_bytes - memory.bound(sizes)


def assumed_errors(precision: str, inputs: float) -> tuple[float, float]:
    """Returns the variances of a product's result and of its gradients, relative to their own.

    Both operands are normal numbers and rounded to the nearest; the error is the sum of theirs.
    inputs: elements of an operand, whose largest magnitude scales int8: sqrt(2 ln inputs)
    deviations.
    """
    if precision == "int8":
        step = math.sqrt(2 * math.log(max(inputs, 2))) / LEVELS
        code, gradient = step**2 / 12, BINADE * 4.0 ** -BITS["bfloat16"][1] / 12
    else:
        code, gradient = (BINADE * 4.0**-bits / 12 for bits in BITS[precision])
    return 2 * code, code + gradient


def check(cfg: Any) -> None:
    """Refuses a mesh that cuts more than the batch, and a model without a stack of blocks.

    Raises: UserError.
    """
    for axis in MESH_AXES:
        if axis not in ("node", "data") and getattr(cfg.mesh, axis) != 1:
            raise UserError(
                f"mesh.{axis}={getattr(cfg.mesh, axis)} must be 1: unlike kinds of devices divide "
                f"the rows of a batch only (--mesh.{axis})"
            )
    if not hasattr(cfg.model, "stack"):
        raise UserError(f"{type(cfg.model).__name__} is no decoder or encoder, whose step is known")


def _shape(cfg: Any, rows: float, devices: int) -> StepShape:
    sizes = dict.fromkeys(MESH_AXES, 1) | {"data": devices}
    shape = step_shape(cfg, sizes)
    return dataclasses.replace(shape, load=cfg.workload(rows * devices))


class _Nodes:
    """The nodes so far. rows, T: rows and tokens of a micro-batch. trained: of each layer the nodes
    with parameters."""

    def __init__(
        self, job: UnlikeJob, card: DeviceCard, rows: float, costs: CostModel, is_strong: bool
    ) -> None:
        cfg = job.cfg
        self.cfg, self.card, self.costs = cfg, card, costs
        self.omega, self.gamma = job.omega, job.gamma
        self.stack, self.dtype = cfg.model.stack, cfg.train.dtype
        self.remat, self.steps = cfg.train.keeps, cfg.train.accumulate
        self.rows = rows / self.steps
        self.shape = _shape(cfg, rows, job.devices)
        self.gathers = bool(self.shape.zero_axes) and not self.shape.exchanges
        self.T, self.size = self.rows * cfg.train.seq_len, ITEMSIZE[self.dtype]
        self.nodes: list[Node] = []
        self.trained: list[list[str]] = []
        if self.dtype not in card.flops:
            raise UserError(
                f"{card.name} does not compute in train.dtype={self.dtype}; use one of "
                f"{', '.join(card.flops)} (--train.dtype, --cluster)"
            )
        self.codes = dict(CODES)
        fits = job.int8_backward in card.flops
        self.codes["int8"] = ("int8", job.int8_backward if fits else "float32")
        narrower = PRECISIONS[: RANK[self.dtype]]
        self.options = [p for p in narrower if TYPES[p] in card.flops and not is_strong]
        few, many = (self.seconds(Rowwise("quantize", n, 1, 2)) for n in (1, LINEAR))
        # Half of a cast: the graph casts in both passes of an edge, a program in one of them. The
        # input is cast in the forward pass, the gradient in the backward pass; sums of products are
        # written in --train.dtype as they are.
        self.cast_s = max(many - few, 0.0) / LINEAR / 2, few / 2

    def seconds(self, kernel: Kernel, *dtypes: str, part: Part = "activation") -> float:
        """Returns the seconds of one execution."""
        op = Op(part, kernel, dtypes=dtypes or (self.dtype,))
        return self.costs.op_time(op, self.card)[0]

    def fixed(
        self,
        name: str,
        inputs: Sequence[str],
        work: Sequence[tuple[Part, Kernel, float]],
        elements: float,
        saved: float = 0.0,
    ) -> str:
        """Adds operations in --train.dtype: (part of the model, kernel, executions)."""
        forward = backward = 0.0
        for part, kernel, count in work:
            once = self.steps * count * self.seconds(kernel, part=part)
            again = 2.0 + (self.cfg.train.loss_chunks > 1)
            if part != "head":
                again = passes(part, self.remat, Pipeline())["B"]
            forward += once
            backward += again * once
        table = {self.dtype: forward}, {self.dtype: backward}
        self.nodes.append(
            Node(name, tuple(inputs), *table, elements, {self.dtype: saved}, {self.dtype: 0.0})
        )
        return name

    def product(
        self, i: int, name: str, inputs: Sequence[str], part: Part, K: float, N: float
    ) -> str:
        """Adds a product of layer i, in all precisions that it may have."""
        path, T, full = f"{STACK}.{i}.{name}", self.T, self.dtype
        again = passes(part, self.remat, Pipeline())["B"] - 2
        times = self.steps * self.stack.repeats
        forward: dict[str, float] = {}
        backward, saved, omega = dict(forward), dict(forward), dict(forward)
        for precision in (*self.options, full):
            code, gradient = self.codes[precision]
            once = self.seconds(Matmul(T, K, N), code, code, full, part=part)
            if precision != full:
                once += self.seconds(Rowwise("quantize", K, N, 2), "float32")
            dx = self.seconds(Matmul(T, N, K), gradient, gradient, full, part=part)
            dw = self.seconds(Matmul(K, T, N), gradient, gradient, "float32", part=part)
            forward[precision] = times * once
            backward[precision] = times * (dx + dw + again * once)
            saved[precision] = self.stack.repeats * self._saved(precision, part, K, N)
            omega[precision] = 0.0
            if precision != full:
                omega[precision] = self._omega(i, path, precision, T * K)
        node = Node(path, tuple(inputs), forward, backward, T * N, saved, omega)
        self.nodes.append(node)
        return path

    def _saved(self, precision: str, part: Part, K: float, N: float) -> float:
        if self.remat == "dots" and part == "input":
            # A product in few bits is summed in float32 or int32, and that sum is what is kept.
            return self.T * N * (self.size if precision == self.dtype else 4)
        if self.remat != "none":
            return 0.0
        if precision != self.dtype:
            return (self.T * K + K * N) * ITEMSIZE[self.codes[precision][0]]
        # The weight lies gathered where ZeRO cuts it (cost/memory.py).
        weight = K * N * self.size if self.gathers else 0.0
        return weight + (self.T * K * self.size if part == "output" else 0.0)

    def _omega(self, i: int, path: str, precision: str, inputs: float) -> float:
        if self.omega is None:
            forward, backward = assumed_errors(precision, inputs)
            return depth_weighted(i, self.stack.layers, forward, backward, self.gamma)
        if precision not in self.omega.get(path, {}):
            raise UserError(
                f"the profile has no error of {path} in {precision}; profile this model (--profile)"
            )
        return self.omega[path][precision]

    def shared(self, i: int, room: str, readers: Sequence[str], K: float) -> None:
        """Adds the input that products in full precision share, where it is saved at all."""
        if self.remat != "none":
            return
        every = dict.fromkeys((*self.options, self.dtype), 0.0)
        saved = every | {self.dtype: self.stack.repeats * self.T * K * self.size}
        self.nodes.append(Node(f"{STACK}.{i}.{room}.input", tuple(readers), every, every, 0, saved))

    def layer(self, i: int, stream: tuple[str, ...]) -> tuple[str, ...]:
        """Adds a layer that reads these nodes. Returns the nodes that its successor reads."""
        stack, T, D = self.stack, self.T, self.stack.width
        asked, stored = stack.heads * stack.head_width, stack.kv_heads * stack.head_width
        where, repeats = f"{STACK}.{i}.", stack.repeats
        is_post = isinstance(self.cfg.model, EncoderConfig)
        everything = self.remat == "none"
        first, routed = len(self.nodes), stack.routed

        def norm(name: str, inputs: tuple[str, ...], is_saved: bool) -> tuple[str, ...]:
            saved = repeats * is_saved * T * D * self.size
            kernel = Rowwise("norm", T, D)
            return (self.fixed(where + name, inputs, [("norm", kernel, repeats)], T * D, saved),)

        def inputs(room: str, names: dict[str, float], reads: tuple[str, ...]) -> tuple[str, ...]:
            """Adds the products of one input: {name: outputs}."""
            return tuple(
                self.product(i, f"{room}.{name}", reads, "input", D, N) for name, N in names.items()
            )

        def attend(reads: tuple[str, ...]) -> str:
            kernels = (op.kernel for op in self._ops())
            attention = next(kernel for kernel in kernels if isinstance(kernel, Attention))
            saved = T * asked * self.size if self.remat in ("outputs", "dots") else 0.0
            if everything:
                pairs = T * stack.heads * attention.keys
                saved = T * (asked + 2 * stored) * self.size
                saved += pairs * (memory.SOFTMAX + self.size)
            attended = self.fixed(
                where + "attention",
                reads,
                [("attention", attention, repeats)],
                T * asked,
                repeats * saved,
            )
            return self.product(i, "attention.out", (attended,), "output", asked, D)

        def feed(reads: tuple[str, ...]) -> str:
            width = stack.hidden * (1 + stack.gated)
            kernel = Rowwise("activation", T, stack.hidden, 1 + stack.gated)
            saved = repeats * everything * T * width * self.size
            hidden = self.fixed(
                where + "mlp", reads, [("activation", kernel, repeats)], T * stack.hidden, saved
            )
            return self.product(i, "mlp.down", (hidden,), "output", stack.hidden, D)

        qkv = {"query": asked, "key": stored, "value": stored}
        into = dict.fromkeys(("gate", "up") if stack.gated else ("up",), stack.hidden)
        results: list[str] = []
        if not is_post:
            stream = norm("attention_norm", stream, True)
        if stack.parallel:
            read = inputs("attention", qkv, stream)
            read_mlp = inputs("mlp", into, stream) if stack.hidden else ()
            self.shared(i, "attention", (*read, *read_mlp), D)
            results += [attend(read), *([feed(read_mlp)] if stack.hidden else [])]
        else:
            read = inputs("attention", qkv, stream)
            self.shared(i, "attention", read, D)
            after = attend(read)
            if is_post:
                stream = norm("attention_norm", (after, *stream), True)
            else:
                stream = norm("mlp_norm", (after, *stream), self.remat != "full")
            if stack.hidden:
                read = inputs("mlp", into, stream)
                self.shared(i, "mlp", read, D)
                results.append(feed(read))
        if routed is not None:
            results.append(self._experts(i, stream, self.nodes[first:]))
        results = [*results, *stream]
        if is_post:
            results = list(norm("mlp_norm", tuple(results), self.remat != "full"))
        self.trained.append([node.name for node in self.nodes[first:]])
        return tuple(results)

    def _ops(self) -> Sequence[Op]:
        """The operations of one layer for a micro-batch."""
        one = dataclasses.replace(self.stack, layers=1, repeats=1)
        seq_len = self.cfg.train.seq_len
        return [
            op.cut(1 / self.rows, *op.kernel.TOKENS)
            for op in one.ops(1, seq_len, seq_len, self.dtype)
        ]

    def _experts(self, i: int, stream: Sequence[str], others: Sequence[Node]) -> str:
        """Adds the routed experts, which save what the stash has beside the other nodes."""
        work = [(op.part, op.kernel, op.count * self.stack.repeats) for op in self._ops()[-3:]]
        stash = memory.terms(self.shape)["stash"] / self.stack.layers
        has = sum(node.saved_bytes[self.dtype] for node in others if ".input" not in node.name)
        saved = max(stash - has, 0.0)
        return self.fixed(f"{STACK}.{i}.moe", stream, work, self.T * self.stack.width, saved)


def depth_weighted(layer: int, layers: int, forward: float, backward: float, gamma: float) -> float:
    """Returns omega of a product in a layer, from 0, of so many layers."""
    return gamma * (layers - layer) * forward + (layer + 1) * backward
