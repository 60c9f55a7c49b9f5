"""Lets a planner take the times of operations from a learned predictor instead of from Roofline.

`Learned` implements the interface `cost.CostModel`. It turns each operation of a plan into the
records that a device would launch for it: a matrix product is one record, attention without a fused
kernel is two products and a softmax, experts are their grouped products. The time of the operation
is the sum of the predicted times of its records. `load` makes the cost model that a planner's flag
names, be it a learned one or not.
"""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.hardware import DeviceCard, Link
from megajax.cost.base import CostModel, Op
from megajax.cost.kernels import (
    Attention,
    Collective,
    Convolution,
    Embedding,
    Experts,
    Matmul,
    PatchEmbedding,
    Pooling,
    RoiAlign,
    Rowwise,
)
from megajax.cost.record import OpRecord, itemsize, peak, product, record, rowwise
from megajax.cost.roofline import Roofline
from megajax.cost.table import Table

# The elementary operations of a `Rowwise` kernel by its `kind`. A kind that is not listed here is
# treated as one addition.
_PASSES: Mapping[str, tuple[str, ...]] = {
    "norm": ("multiply", "reduce", "add", "power", "multiply", "multiply"),
    "activation": ("exponential", "add", "divide", "multiply"),
    "softmax": ("reduce", "add", "exponential", "reduce", "divide"),
    "add": ("add",),
    "update": ("multiply", "add", "multiply", "multiply", "add", "power", "divide", "add"),
    "quantize": ("maximum", "divide", "convert"),
}


class Predictor(Protocol):
    """The interface of a predictor. kinds: kinds of records that it was fitted on."""

    @property
    def kinds(self) -> Collection[str]: ...  # noqa: D102

    def predict(  # noqa: D102
        self, records: Sequence[OpRecord], card: DeviceCard
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def basis(self, card: DeviceCard) -> str: ...  # noqa: D102

    def learnt_from(self, card: DeviceCard) -> str | None: ...  # noqa: D102


class Learned:
    """A CostModel around a predictor.

    The fallback model estimates collectives, transfers and memory. It also estimates, with one
    warning for each reason, operations of a kind that the predictor was not fitted on, devices
    without rows of compiled programs, and devices whose card lacks the number of SMs, the size of
    L2 or the clock. Each operation is predicted once for each card.
    """

    def __init__(self, predictor: Predictor, fallback: CostModel = Roofline()):
        """predictor: fitted. fallback: the model for everything else."""
        self._predictor, self._fallback = predictor, fallback
        self._known: dict[tuple, tuple[float, float]] = {}
        self._told: set[str] = set()

    def op_time(self, op: Op, device: DeviceCard, dtype: str | None = None) -> tuple[float, float]:
        """Returns (seconds of one execution, their standard deviation).

        The errors of an operation's records are assumed to be fully correlated.
        Args: dtype: replaces the data type of the operation; None: keeps it.
        """
        op = op if dtype is None else op.cast(dtype)
        if isinstance(op.kernel, Collective):
            return self._fallback.op_time(op, device)
        key = op.key, repr(device)  # two cards may have one name
        if key not in self._known:
            self._known[key] = self._asked(op, device)
        return self._known[key]

    def basis(self, device: DeviceCard) -> str:
        """Returns a sentence: whether times of this device rest on its rows or on its numbers."""
        return self._predictor.basis(device)

    def unknown(self, device: DeviceCard) -> str:
        """Returns a sentence for a device without rows of compiled programs; '': it has some."""
        return "" if self._predictor.learnt_from(device) else no_rows(device)

    def transfer_time(self, nbytes: float, link: Link) -> float:
        """Returns seconds from one device to another."""
        return self._fallback.transfer_time(nbytes, link)

    def memory(self, trees: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Returns bytes a device by name; leaves have shape, dtype and sharding."""
        return self._fallback.memory(trees)

    def _asked(self, op: Op, device: DeviceCard) -> tuple[float, float]:
        records = records_of(op)
        if records == []:
            return 0.0, 0.0
        missing = [name for name in ("sms", "l2_bytes", "clock_hz") if not getattr(device, name)]
        unseen = sorted({r.kind for r in records or ()} - set(self._predictor.kinds))
        if self.unknown(device):
            reason = f"{device.name} has no rows of compiled programs"
        elif missing:
            reason = f"the card of {device.name} has no {', '.join(missing)}"
        elif records is None:
            reason = f"no record describes the kernel {op.kernel.name}"
        elif unseen:
            reason = f"the predictor was not fitted on records of kind {', '.join(unseen)}"
        else:
            if len({itemsize(dtype) for dtype in op.dtypes}) > 1:
                self._tell(
                    f"operations of mixed types, such as {', '.join(op.dtypes)}, are unlike "
                    "what the predictor was fitted on; of their types only the bytes count"
                )
            seconds, sigma = self._predictor.predict(records, device)
            least = max(op.flops / peak(device, op.dtype), op.nbytes / device.memory_bytes_per_s)
            return max(float(np.sum(seconds)), least), float(np.sum(sigma))
        name = type(self._fallback).__name__
        self._tell(f"{reason}; such operations are estimated by {name}")
        return self._fallback.op_time(op, device)

    def _tell(self, what: str) -> None:
        """Warns once."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(what, stacklevel=4)


def no_rows(card: DeviceCard) -> str:
    """Returns what to say first of times of a GPU that no compiled program was measured on."""
    return (
        f"{card.name} has no rows of compiled programs: its times are those of the cost model, at "
        "assumed efficiencies."
    )


# ---- the cost model of a flag


Name = Literal["roofline", "learned", "table"]


def load(name: Name, path: str | None) -> CostModel:
    """Returns the cost model that a flag names.

    Args: path: a file that `Predictor.save` wrote, None for the predictor that ships with megajax;
      of a table, its JSON file.
    Raises: UserError where the file is missing, damaged or not asked for.
    """
    if name == "roofline":
        if path is not None:
            raise UserError(
                f"cost_file={path} needs --cost=learned or --cost=table (--cost_file, --cost)"
            )
        return Roofline()
    file = None if path is None else expand(path, "cost_file")
    if name == "table":
        if file is None:
            raise UserError("cost=table needs a file of measured times (--cost_file, --cost)")
        return Table.load(file)
    from megajax.systems.cdmpp import predictor  # a plan by the roofline needs no network

    return Learned(predictor.Predictor.load(file))


def source(model: CostModel, name: Name, path: str | None, card: DeviceCard, others: str) -> str:
    """Returns a text that says where a plan's times come from.

    Args: model, name, path: of the cost model, as in `load`. card: the plan's GPU. others: a text
      for the source of the times that the model does not predict: of transfers and of operations
      that it does not know. If a learned model does not know the GPU, these are all times.
    """
    if name == "roofline":
        return others
    file = path or "the predictor that ships with megajax"
    text = f"operations from {file}, the others and transfers from {others}"
    if name == "table":
        return text
    assert isinstance(model, Learned)
    if model.unknown(card):
        return others
    return f"{text}. {model.basis(card).rstrip('.')}"


def unknown(model: CostModel, card: DeviceCard) -> str:
    """Returns a sentence if a learned model has no rows of compiled programs of a GPU; else ''."""
    if isinstance(model, (Roofline, Table)):
        return ""
    assert isinstance(model, Learned)
    return model.unknown(card)


# ---- records of operations


def records_of(op: Op) -> list[OpRecord] | None:
    """Returns the records that a device launches for one execution of an operation.

    None means that no kind of record describes the operation's kernel. Where operands and result
    have several data types, the records count the bytes of each.
    """
    records = _records(op)
    size, sizes, types = itemsize(op.dtype), op.kernel.sizes, op.dtypes
    if not records or len(types) == 1 or len(set(types)) == 1:
        return records
    each = [count * itemsize(dtype) for count, dtype in zip(sizes, types, strict=True)]
    read = sum(each[:-1]) / max(size * sum(sizes[:-1]), 1)
    written = each[-1] / max(size * sizes[-1], 1)
    scaled = []
    for one in records:
        parts = {
            "bytes_read": read * one["bytes_read"],
            "bytes_written": written * one["bytes_written"],
        }
        scaled.append(dataclasses.replace(one.within(**parts), nbytes=sum(parts.values())))
    return scaled


def _records(op: Op) -> list[OpRecord] | None:
    kernel, dtype = op.kernel, op.dtype
    if op.nbytes == 0 and op.flops == 0:
        return []
    if isinstance(kernel, Matmul):
        return [product(kernel.batch, kernel.m, kernel.n, kernel.k, dtype)]
    if isinstance(kernel, Attention):
        return [_fused(kernel, dtype)] if kernel.fused else _plain(kernel, dtype)
    if isinstance(kernel, Experts):
        rows = kernel.tokens * kernel.pairs / kernel.experts
        up = product(kernel.experts, rows, kernel.hidden, kernel.width, dtype)
        down = product(kernel.experts, rows, kernel.width, kernel.hidden, dtype)
        return [*[up] * (kernel.matrices - 1), down]
    if isinstance(kernel, Rowwise):
        steps = _PASSES.get(kernel.kind, ("add",))
        return [rowwise(steps, kernel.rows, kernel.width, kernel.reads, dtype)]
    if isinstance(kernel, Embedding):
        # The record of a lookup of rows in an embedding table.
        size, elements = itemsize(dtype), kernel.rows * kernel.width
        values = {
            "bytes_read": size * elements,
            "bytes_written": size * elements,
            "elements": elements,
            "width": kernel.width,
            "operands": 2,
            "indices": kernel.rows,
            "itemsize": size,
        }
        return [record("gather", [{"opcode": "gather", **values}], values, dtype=dtype)]
    if isinstance(kernel, Convolution):  # as the product of its windows
        rows, columns = kernel.window
        places, depth = (
            kernel.images * kernel.height * kernel.width,
            rows * columns * kernel.channels,
        )
        each = kernel.filters / kernel.groups, depth / kernel.groups
        return [product(kernel.groups, places, *each, dtype)]
    if isinstance(kernel, PatchEmbedding):
        return [product(1, kernel.tokens, kernel.width, kernel.params / kernel.width, dtype)]
    if isinstance(kernel, Pooling | RoiAlign):
        read, written = kernel.sizes
        return [rowwise(("reduce",), written, read / written, 1, dtype)]
    return None


def _plain(kernel: Attention, dtype: str) -> list[OpRecord]:
    """Returns the records of attention without a fused kernel, as XLA runs it.

    They are the product of queries and keys, the softmax, and the product with the values.
    """
    batch = kernel.batch * kernel.heads
    q, m, k = kernel.queries, kernel.reach, kernel.head_width
    return [
        product(batch, q, m, k, dtype, transposed=1),
        rowwise(_PASSES["softmax"], batch * q, m, 1, dtype),
        product(batch, q, k, m, dtype),
    ]


def _fused(kernel: Attention, dtype: str) -> OpRecord:
    """Returns the record of a fused attention kernel, which writes no array of scores to memory."""
    size, batch = itemsize(dtype), kernel.batch * kernel.heads
    *read, written = kernel.sizes
    values = {
        "flops": kernel.flops,
        "bytes_read": size * sum(read),
        "bytes_written": size * written,
        "transcendentals": batch * kernel.queries * kernel.reach,
        "batch": batch,
        "m": kernel.queries,
        "n": kernel.reach,
        "k": kernel.head_width,
        "elements": written,
        "operands": 3,
        "itemsize": size,
    }
    leaf = {name: values[name] for name in values}
    return record("attention", [{"opcode": "attention", **leaf}], values, dtype=dtype)
