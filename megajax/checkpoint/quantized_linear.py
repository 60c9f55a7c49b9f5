"""One Linear in few bits: the tensors of GPTQ's and AWQ's files, read and made.

A matrix becomes a QTensor: codes from 0, float32 scales, and zero points -z s, which float32 holds
exactly, so that import and export give the same bits. Where the rows of a group lie apart
(desc_act), they are sorted by group, and `order` says which inputs they multiply; export puts them
back.

Legend: K inputs, N outputs, G groups of C rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.formats import integers
from megajax.checkpoint.formats.quantization_config import AWQ_BITS, Form, Settings
from megajax.checkpoint.formats.safetensors import TensorFolder
from megajax.core.errors import UserError
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import QTensor, dequantize, from_codes

PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


@dataclasses.dataclass(frozen=True)
class Linear:
    """A matrix (K, N). order_K: the input that each row multiplies; None: in their order."""

    weight: QTensor
    order_K: np.ndarray | None

    def columns(self, start: int, stop: int) -> "Linear":
        """Returns some of its columns."""
        q = jax.tree.map(lambda x: x[:, start:stop], self.weight)
        shape = self.weight.shape[0], stop - start
        return Linear(dataclasses.replace(q, shape=shape), self.order_K)

    def kernel(self, shape: tuple[int, ...], ordered: bool) -> QuantKernel:
        """Returns the matrix as a parameter of a model.

        shape: of the dense array. ordered: whether to state the order of the rows even if they are
        in the order of the inputs, because another layer of the same stack has an order.
        """
        order_K = np.arange(self.weight.shape[0]) if self.order_K is None else self.order_K
        order = jnp.asarray(order_K, jnp.int32) if ordered else None
        return QuantKernel(shape, self.weight, order=order)

    def dense(self) -> np.ndarray:
        """Returns float32 (K, N), rows in the order of the inputs."""
        w_KN = np.asarray(dequantize(self.weight))
        if self.order_K is None:
            return w_KN
        out_KN = np.empty_like(w_KN)
        out_KN[self.order_K] = w_KN
        return out_KN


def names_of(files: TensorFolder, stem: str) -> list[str]:
    """Returns those of a quantized Linear's tensors that are there."""
    return [stem + end for end in PARTS if stem + end in files]


def read(files: TensorFolder, stem: str, settings: Settings, K: int, N: int) -> Linear:
    """Returns a Linear. Raises: UserError that names the folder and the tensor."""
    kind = settings.of(stem)
    if kind is None:
        raise UserError(
            f"{files.folder}: {stem} is quantized, and a dynamic rule of config.json says it is not"
        )
    fmt = Format(kind[0], kind[1], 0, symmetric=False)
    order_K = _order(files, stem, K, fmt.group_of(K))
    if settings.method == "awq":
        return Linear(_read_awq(files, stem, fmt, K, N), order_K)
    return Linear(_read_gptq(files, stem, order_K, fmt, K, N, settings.is_less), order_K)


def _tensor(files: TensorFolder, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    view = files.view(name)
    if view.shape != shape or view.dtype != np.dtype(dtype):
        raise UserError(
            f"{files.folder}: {name} is {view.dtype}{view.shape}, must be {np.dtype(dtype)}{shape}"
        )
    return np.asarray(view)


def _scales(files: TensorFolder, stem: str, shape: tuple[int, int]) -> np.ndarray:
    """Returns float32: float16 of most writers, the model's own type of some."""
    name = f"{stem}.scales"
    kind = files.view(name).dtype
    legal = (np.dtype(np.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32))
    scale = _tensor(files, name, shape, kind if kind in legal else legal[0]).astype(np.float32)
    if not np.isfinite(scale).all():
        raise UserError(f"{files.folder}: {name} is not finite everywhere")
    return scale


def _order(files: TensorFolder, stem: str, K: int, C: int) -> np.ndarray | None:
    """Returns int32 (K,): the rows sorted by their groups; None: they are. Raises: UserError for
    unlike groups."""
    name = f"{stem}.g_idx"
    if name not in files:
        return None
    place_K = _tensor(files, name, (K,), np.int32)
    order_K = np.argsort(place_K, kind="stable").astype(np.int32)
    if not np.array_equal(place_K[order_K], np.arange(K) // C):
        raise UserError(
            f"{files.folder}: {name} must have {C} rows in each of the groups 0 to {-(-K // C) - 1}"
            f", the last aside; it has groups {place_K.min()} to {place_K.max()}"
        )
    return None if np.array_equal(order_K, np.arange(K)) else order_K


def _read_gptq(
    files: TensorFolder, stem: str, order_K: np.ndarray | None, fmt: Format, K: int, N: int,
    is_less: bool,
) -> QTensor:  # fmt: skip
    bits = fmt.width
    G = -(-K // fmt.group_of(K))
    if K * bits % 32 or N * bits % 32:
        raise UserError(f"{files.folder}: {stem} of {K} x {N} fills no whole words of 32 bits")
    zeros = _tensor(files, f"{stem}.qzeros", (G, N * bits // 32), np.int32)
    words = _tensor(files, f"{stem}.qweight", (K * bits // 32, N), np.int32)
    scale_GN = _scales(files, stem, (G, N))
    point_GN = (integers.unpack(zeros, bits, N).astype(np.int32) + is_less) % 2**bits  # z - 1 wraps
    rows = words if order_K is None else integers.with_rows(words, bits, order_K)
    return QTensor(
        jnp.asarray(integers.bytes_of_rows(rows)),
        jnp.asarray(scale_GN),
        jnp.asarray(-point_GN.astype(np.float32) * scale_GN),
        fmt,
        (K, N),
        np.dtype(np.float32),
    )


def _read_awq(files: TensorFolder, stem: str, fmt: Format, K: int, N: int) -> QTensor:
    G = -(-K // fmt.group_of(K))
    if N % 8:
        raise UserError(f"{files.folder}: {stem} has {N} columns, no multiple of 8")
    code_KN = integers.unpack_awq(_tensor(files, f"{stem}.qweight", (K, N // 8), np.int32))
    point_GN = integers.unpack_awq(_tensor(files, f"{stem}.qzeros", (G, N // 8), np.int32))
    scale_GN = _scales(files, stem, (G, N))
    zero_GN = -point_GN.astype(np.float32) * scale_GN
    return from_codes(jnp.asarray(code_KN), jnp.asarray(scale_GN), jnp.asarray(zero_GN), fmt)


# ---- written


def check_shape(stem: str, fmt: Format, K: int, N: int, form: Form) -> None:
    """Refuses a matrix (K, N) for which a form has no place. Raises: UserError."""
    bits = fmt.width
    if form == "awq" and (bits != AWQ_BITS or N % 8):
        raise UserError(
            f"{stem}: AWQ's form has {AWQ_BITS} bits and columns in eights; this one has {bits} "
            f"bits and {N} columns"
        )
    if form == "awq" and fmt.group is not None and K % fmt.group:
        raise UserError(
            f"{stem}: AWQ's form has groups of one size, and {fmt.group} does not divide the {K} "
            "inputs; quantize in groups that divide them (--group), or use --form=gptq"
        )
    if form != "awq" and (K * bits % 32 or N * bits % 32):
        raise UserError(f"{stem} of {K} x {N} fills no whole words of 32 bits")


def tensors(stem: str, linear: Linear, form: Form) -> dict[str, np.ndarray]:
    """Returns {end of a name: array} of a form of quantization_config.Form; zero points are whole.

    Symmetric codes get the zero point 2^(b-1).
    Raises: UserError for what the form cannot hold.
    """
    q, order_K = linear.weight, linear.order_K
    K, N = q.shape
    bits, C = q.format.width, q.format.group_of(K)
    check_shape(stem, q.format, K, N, form)
    if form == "awq" and order_K is not None:
        raise UserError(f"{stem}: AWQ's form has rows in the order of the inputs, not desc_act")
    scale_GN = np.asarray(q.scales, np.float32)
    if not np.isfinite(scale_GN).all():
        raise UserError(f"{stem}: its scales are not finite everywhere")
    if not np.array_equal(scale_GN.astype(np.float16).astype(np.float32), scale_GN):
        raise UserError(
            f"{stem}: float16 does not hold its scales; quantize with scale_dtype='float16'"
        )
    words, point_GN = _codes(stem, q, scale_GN)
    found = {"scales": scale_GN.astype(np.float16)}
    if form == "awq":
        code_KN = integers.unpack(np.ascontiguousarray(words.T), bits, K).T
        return found | {
            "qweight": integers.pack_awq(code_KN), "qzeros": integers.pack_awq(point_GN),
        }  # fmt: skip
    if form == "gptq_v1":
        if point_GN.min() == 0:
            raise UserError(
                f"{stem} has a zero point of 0; the first version of GPTQ's form holds z - 1, and "
                "programs disagree about -1; write the second version (--form=gptq)"
            )
        point_GN = point_GN - 1
    place_K = np.arange(K) if order_K is None else np.argsort(order_K)  # of each input's row
    return found | {
        "qweight": integers.with_rows(words, bits, place_K),
        "qzeros": integers.pack(point_GN, bits),
        "g_idx": (place_K // C).astype(np.int32),
    }


def is_symmetric(q: QTensor) -> bool:
    """Tells whether every zero point is 2^(b-1), as the files' `sym` says."""
    if q.zeros is None:
        return True
    half = np.float32(1 << (q.format.width - 1))
    return np.array_equal(np.asarray(q.zeros), -half * np.asarray(q.scales, np.float32))


def _codes(stem: str, q: QTensor, scale_GN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (words of codes from 0, whole zero points)."""
    bits = q.format.width
    half = 1 << (bits - 1)
    words = integers.rows_of_bytes(_filled(np.asarray(q.values)))
    if q.zeros is None:
        count = 32 * len(words) // bits
        codes = integers.unpack(np.ascontiguousarray(words.T), bits, count)  # two's complement
        return integers.pack(codes ^ np.uint8(half), bits).T, np.full(
            scale_GN.shape, half, np.uint8
        )
    zero_GN = np.asarray(q.zeros, np.float32)
    exact_GN = np.rint(-zero_GN / np.where(scale_GN == 0, 1, scale_GN))
    is_whole = np.array_equal(-exact_GN * scale_GN, zero_GN)
    if not is_whole or exact_GN.min() < 0 or exact_GN.max() >= 2**bits:
        raise UserError(
            f"{stem}: a zero point is no whole number of scales; quantize with symmetric=True"
        )
    return words, exact_GN.astype(np.uint8)


def _filled(values: np.ndarray) -> np.ndarray:
    """Returns the bytes of columns, with zeros up to whole words."""
    return np.pad(values, ((0, -len(values) % 4), (0, 0)))
