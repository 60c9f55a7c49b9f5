"""What a rank computes between two messages of the exchange: plain JAX, or one kernel a pass.

    send      transforms a buffer, orders it and encodes a row for each receiver
    relay     sums what the ranks of a node sent, encodes a row for each node
    receive   sums what came last, transforms back
    subtract  encodes what the copy lacks of the masters
    add       moves the copy by what all ranks sent

A pass of plain JAX reads and writes its arrays several times, a kernel of pallas_kernels/quantize
once; both give the same bits. Kernels take some codes, groups and sizes only: `why_not` tells.
parallel/zero.py has the messages, and the sources.

Legend: N elements of a flat buffer, R rows, C elements of a piece, W wire bytes of a row.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.cost.exchange import gradient_length, weight_length
from megajax.quant.codecs import Codec
from megajax.quant.feedback import Feedback
from megajax.quant.qtensor import QTensor, need_key
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quantize import api, problems
from pallas_kernels.quantize.fused_reference import BLOCK

Array = jax.Array
Pass = Literal["send", "relay", "receive", "subtract", "add"]


def piece_length(n: int, ranks: int, codec: Codec | None = None) -> int:
    """Returns the elements of a rank's piece of a buffer of n: an even share, rounded up.

    The codec does not change it: what a row needs beyond is added to the rows that travel.
    """
    return -(-n // ranks)


def row_length(n: int, ranks: int, codec: Codec) -> int:
    """Returns the elements of a piece of gradients as it travels (cost/exchange.py)."""
    return gradient_length(piece_length(n, ranks), codec.hadamard or 1, codec.inside, codec.between)


class Coded(NamedTuple):
    """payload_RW: a row for each receiver. bad: something that was encoded was not finite. error:
    what the next step adds, None without feedback."""

    payload_RW: Array
    bad: Array
    error: QTensor | None = None


@dataclass(frozen=True)
class Fed:
    """An error of earlier steps, how it is kept, and the number of the step."""

    error: QTensor
    keep: Feedback
    step: Array


@dataclass(frozen=True)
class Passes:
    """The passes of one buffer of n elements.

    nodes, ranks: that share it, of each node. kernels: which implementation runs a pass that the
    kernel takes, as in pallas_kernels/dispatch.py; one that it does not take runs in plain JAX.
    dtype: of the copy of the weights.
    """

    n: int
    codec: Codec
    nodes: int
    ranks: int
    kernels: Implementation | None = None
    dtype: Any = jnp.float32

    @property
    def whole(self) -> int:
        """The ranks of all nodes."""
        return self.nodes * self.ranks

    @property
    def piece(self) -> int:
        """The elements of a rank's piece."""
        return piece_length(self.n, self.whole)

    @property
    def row(self) -> int:
        """The elements of a piece of gradients as it travels."""
        return row_length(self.n, self.whole, self.codec)

    @property
    def fetched(self) -> int:
        """The elements of a piece of weights as it travels."""
        return weight_length(self.piece, self.codec.weights)

    @property
    def names(self) -> tuple[Pass, ...]:
        """The passes of a step."""
        if self.whole == 1:
            return ()
        between: tuple[Pass, ...] = ("relay",) if self.nodes > 1 and self.ranks > 1 else ()
        weights: tuple[Pass, ...] = () if is_exact(self.codec.weights) else ("subtract", "add")
        return ("send", *between, "receive", *weights)

    def why_plain(self, name: Pass) -> list[str]:
        """Returns why a pass runs in plain JAX on the GPUs that the program is for; empty: the
        kernel runs it."""
        return self.why_not(name) or api.why_plain(self._problem(name), self.kernels)

    def why_not(self, name: Pass) -> list[str]:
        """Returns why the kernel of a pass does not take it, on whatever GPU; empty: it does."""
        levels = [level for level in self._levels(name) if level.format is None]
        if levels:
            return [f"{levels[0].dtype} is no code of a group"]
        if name not in ("subtract", "add") and self.codec.feedback is not None:
            return ["the kernels do not keep errors for the next step"]
        if name not in ("subtract", "add") and self.codec.hadamard not in (0, BLOCK):
            return [f"needs a transform of {BLOCK}, found {self.codec.hadamard}"]
        groups = {level.format.group for level in self._levels(name) if level.format}
        if None in groups:
            return ["needs groups, found one scale for all of a row"]
        if len(groups) > 1:
            return ["needs groups of one size on both levels, found " + _listed(groups)]
        return api.why_not(self._problem(name))

    def _fused(self, name: Pass) -> bool:
        if self.kernels == "reference" or self.why_not(name):
            return False
        return api.runs_kernel(self._problem(name), self.kernels)

    def _levels(self, name: Pass) -> tuple[Codec, ...]:
        codec = self.codec
        first = codec.inside if self.ranks > 1 else codec.between
        last = codec.between if self.nodes > 1 else codec.inside
        return {
            "send": (first,),
            "relay": (codec.inside, codec.between),
            "receive": (last,),
            "subtract": (codec.weights,),
            "add": (codec.weights,),
        }[name]

    def _options(self, name: Pass) -> dict[str, Any]:
        """What the kernel's function takes beside arrays and a key."""
        levels = self._levels(name)
        form = levels[-1].format
        assert form is not None
        found: dict[str, Any] = {"bits": form.bits, "group": form.group}
        if name == "send":
            rows = (self.ranks, self.nodes) if self.ranks > 1 else (self.nodes, 1)
            found |= {"rows": rows[0], "nodes": rows[1]}
        if name in ("send", "receive"):
            found["hadamard"] = bool(self.codec.hadamard)
        if name == "relay":
            first = levels[0].format
            assert first is not None
            found |= {"rows": self.nodes, "bits": first.bits, "new_bits": form.bits}
        return found

    def _problem(self, name: Pass) -> Any:
        options, random = self._options(name), self._levels(name)[-1].stochastic
        last = self.nodes if self.nodes > 1 else self.ranks
        match name:
            case "send":
                n = self.whole * self.row
                return problems.hadamard_quantize(n, **options, random=random)
            case "relay":
                n = self.nodes * self.row
                return problems.reduce_requantize(n, **options, senders=self.ranks, random=random)
            case "receive":
                return problems.reduce_hadamard(self.row, **options, senders=last)
            case "subtract":
                return problems.subtract_quantize(
                    self.fetched, **options, random=random, dtype=self.dtype
                )
        n = self.whole * self.fetched
        return problems.dequantize_add(n, **options, senders=self.whole, dtype=self.dtype)

    # ---- gradients

    def send(self, x_N: Array, key: Array | None, fed: Fed | None = None) -> Coded:
        """The first level's payloads of a float32 buffer. key: of this rank and level."""
        [level], shape = self._levels("send"), (self.whole, self.piece)
        x = jnp.pad(x_N, (0, self.whole * self.piece - self.n)).reshape(shape)
        x = jnp.pad(x, ((0, 0), (0, self.row - self.piece)))
        if fed is None and self._fused("send"):
            payload_RW = api.hadamard_quantize(
                x.reshape(-1), **self._options("send"), key=_key(level, key),
                implementation=self.kernels,
            )  # fmt: skip
            line = self.whole * self.row // payload_RW.shape[0]
            return Coded(payload_RW, ~level.is_finite(payload_RW, line))
        rows = (self.ranks, self.nodes) if self.ranks > 1 else (self.nodes, 1)
        x = self.codec.transform(x).reshape(rows[1], rows[0], -1).swapaxes(0, 1)
        return _encode(level, x.reshape(rows[0], -1), key, fed)

    def relay(self, payload_RW: Array, key: Array | None, fed: Fed | None = None) -> Coded:
        """The second level's payloads of what the first level brought."""
        inside, between = self._levels("relay")
        n = self.nodes * self.row
        if fed is None and self._fused("relay"):
            payload_RW = api.reduce_requantize(
                payload_RW, n, **self._options("relay"), key=_key(between, key),
                implementation=self.kernels,
            )  # fmt: skip
            return Coded(payload_RW, ~between.is_finite(payload_RW, self.row))
        return _encode(between, sum_rows(payload_RW, inside, n).reshape(self.nodes, -1), key, fed)

    def receive(self, payload_RW: Array) -> Array:
        """The float32 sum (row,) of what the last level brought, transformed back."""
        [level] = self._levels("receive")
        if self._fused("receive"):
            options = self._options("receive")
            return api.reduce_hadamard(payload_RW, self.row, **options, implementation=self.kernels)
        return self.codec.restore(sum_rows(payload_RW, level, self.row), self.row)

    def finish(self, total: Array, rank: Array) -> Array:
        """The piece (piece,) of a row of sums: zero beyond n."""
        piece_C = total[: self.piece]
        if self.n == self.whole * self.piece:
            return piece_C
        # Quantized zeros come back from the transform as noise.
        return jnp.where(rank * self.piece + jnp.arange(self.piece) < self.n, piece_C, 0.0)

    # ---- weights

    def subtract(self, main_C: Array, lossy_C: Array, key: Array | None) -> Array:
        """The payload (W,) of main - lossy, in float32. key: of this rank."""
        level, beyond = self.codec.weights, (0, self.fetched - self.piece)
        main_C, lossy_C = jnp.pad(main_C, beyond), jnp.pad(lossy_C, beyond)
        if self._fused("subtract"):
            return api.subtract_quantize(
                main_C, lossy_C, **self._options("subtract"), key=_key(level, key),
                implementation=self.kernels,
            )  # fmt: skip
        return level.encode(main_C - lossy_C.astype(jnp.float32), key)

    def add(self, payload_RW: Array, copy: Array) -> Array:
        """The copy (whole, piece), moved by all ranks' payloads, in its type."""
        if self._fused("add"):
            copy = jnp.pad(copy, ((0, 0), (0, self.fetched - self.piece)))
            options = self._options("add")
            new = api.dequantize_add(
                payload_RW, copy.reshape(-1), **options, implementation=self.kernels
            )
            return new.reshape(self.whole, -1)[:, : self.piece]
        moved = self.codec.weights.decode(payload_RW, self.fetched)[:, : self.piece]
        return (copy.astype(jnp.float32) + moved).astype(copy.dtype)


def sum_rows(payload_RW: Array, codec: Codec, n: int) -> Array:
    """Returns the float32 sum (n,) of the decoded rows, from the first to the last.

    A fixed order, of numbers that `decode` rounded to float32: every program gives the same bits.
    """

    def add(total: Array, payload: Array) -> tuple[Array, None]:
        return total + codec.decode(payload, n), None

    rest = payload_RW.shape[0] - 1
    return lax.scan(add, codec.decode(payload_RW[0], n), payload_RW[1:], unroll=min(rest, 8))[0]


def is_exact(codec: Codec) -> bool:
    """Tells whether a codec of one level drops nothing."""
    return codec.format is None and codec.dtype == "float32"


def not_finite(x: Array) -> Array:
    """Tells whether any element is not."""
    return ~jnp.isfinite(x).all()


def _encode(level: Codec, rows_RN: Array, key: Array | None, fed: Fed | None) -> Coded:
    bad = not_finite(rows_RN)
    if fed is None:
        return Coded(level.encode(rows_RN, key), bad)
    rows_RN = fed.keep.compensate(rows_RN, fed.error)
    payload_RW = level.encode(rows_RN, key)
    received_RN = level.decode(payload_RW, rows_RN.shape[1])
    return Coded(payload_RW, bad, fed.keep.update(rows_RN, received_RN, fed.error, fed.step))


def _key(level: Codec, key: Array | None) -> Array | None:
    return need_key(f"codec {level.name}", key) if level.stochastic else None


def _listed(values: Any) -> str:
    return " and ".join(map(str, sorted(values)))
