"""Hugging Face folders whose Linears are in few bits: GPTQ and AWQ files, in and out.

A Linear in few bits becomes a QuantKernel; a quantized head is dequantized.
What is not quantized there (embeddings, norms, some Linears) is read and written as
foreign/hf.py does. Layers whose matrices have unlike bits or groups, or of which one is dense,
become several runs (core.packed.LayerRuns); in GPTQ's form they are the member `dynamic` of
quantization_config. Sections: packed integers, the settings, one Linear, a folder.
"""

import collections
import dataclasses
import itertools
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core import files as files_
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.packed import LayerRuns, runs_of
from megajax.core.tree import Tree, is_words, named_leaves, nest
from megajax.data.tokenizer import Tokenizer
from megajax.foreign import hf
from megajax.foreign.safetensors import INDEX, SINGLE, TensorFolder
from megajax.models import decoder, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.names import Rule, Sizes
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import QTensor, dequantize, from_codes
from megajax.quant.quantized_model import inputs_of, matrices

# ---- packed integers
#
# Matrices in few bits as GPTQ and AWQ files have them, in NumPy.
#
# Of a Linear with K inputs and N outputs (AutoGPTQ and GPTQModel, quant_method 'gptq'):
#
#     qweight  int32 (K b / 32, N)     codes 0..2^b - 1, a stream of bits down each column
#                                      (the lowest bits first)
#     qzeros   int32 (G, N b / 32)     z - 1 the same way along each row; format 'gptq_v2': z itself
#     scales   float16 (G, N)          w = scale (code - z)
#     g_idx    int32 (K,)              the group of each row; k // group unless desc_act
#
# and AutoAWQ's 'gemm' (quant_method 'awq', 4 bits): qweight int32 (K, N / 8) and qzeros (G, N / 8),
# whose nibble i is of column 8 j + _AWQ[i]; z itself. Source: the packing code of both libraries.
#
# Legend: K inputs, N outputs, G groups, b bits.


BITS = (2, 3, 4, 8)
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD = np.dtype("<i4")


def bytes_of_rows(qweight: np.ndarray) -> np.ndarray:
    """Returns uint8 (K b / 8, N): the bytes of each column's stream of bits, first ones first."""
    rows, columns = qweight.shape
    words = np.ascontiguousarray(qweight.astype(_WORD)).view(np.uint8).reshape(rows, columns, 4)
    return words.transpose(0, 2, 1).reshape(4 * rows, columns)


def rows_of_bytes(values: np.ndarray) -> np.ndarray:
    """Returns qweight of such bytes. Raises: UserError where they fill no whole words."""
    rows, columns = values.shape
    if rows % 4:
        raise UserError(f"a column of {rows} bytes fills no whole words of 32 bits")
    words = np.ascontiguousarray(values.reshape(rows // 4, 4, columns).transpose(0, 2, 1))
    return words.view(_WORD).reshape(rows // 4, columns).astype(np.int32)


def with_rows(qweight: np.ndarray, bits: int, order_K: np.ndarray) -> np.ndarray:
    """Returns the qweight whose row k of codes is row order_K[k] of this one."""
    if np.array_equal(order_K, np.arange(len(order_K))):
        return np.ascontiguousarray(qweight)
    codes = unpack(np.ascontiguousarray(qweight.T), bits, len(order_K))
    return np.ascontiguousarray(pack(codes[:, order_K], bits).T)


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns uint8 (rows, count): the codes of each row's stream of bits, int32 words."""
    words = np.ascontiguousarray(packed.astype(_WORD)).view(np.uint8)
    flat = np.unpackbits(words, axis=1, bitorder="little")[:, : count * bits]
    weights = 1 << np.arange(bits, dtype=np.uint16)
    return (flat.reshape(len(packed), count, bits) * weights).sum(-1).astype(np.uint8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns int32 (rows, ceil(count b / 32)) of codes (rows, count)."""
    flat = (codes[:, :, None].astype(np.uint16) >> np.arange(bits)) & 1
    flat = flat.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view(_WORD).astype(np.int32)


def unpack_awq(packed: np.ndarray) -> np.ndarray:
    """Returns uint8 (rows, N) of AWQ's int32 (rows, N / 8)."""
    nibbles = unpack(packed, 4, 8 * packed.shape[1]).reshape(len(packed), -1, 8)
    codes = np.empty_like(nibbles)
    codes[..., _AWQ] = nibbles
    return codes.reshape(len(packed), -1)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """Returns AWQ's int32 (rows, N / 8). N must be a multiple of 8."""
    nibbles = codes.reshape(len(codes), -1, 8)[..., _AWQ]
    return pack(nibbles.reshape(len(codes), -1), 4)


# ---- the settings of a folder
#
# The quantization_config of a Hugging Face folder in GPTQ's or AWQ's form: checked, and written.
#
# It states bits and group for all Linears. GPTQModel's member `dynamic` states others for some, by
# the names of the modules: "PATTERN" or "+:PATTERN" has the members that differ, "-:PATTERN" leaves
# the module dense. The first pattern that matches from the beginning of the name counts. AWQ's
# member `modules_to_not_convert` lists parts of the names of dense modules. Our reader does not
# need it, because a dense module has a `.weight`. Of AWQ's form, transformers and AutoAWQ read that
# list, and GPTQModel reads `dynamic`, so both are written. A symmetric AWQ folder has no member
# `sym`: GPTQModel reads `zero_point` as its opposite.


Form = Literal["gptq", "gptq_v1", "awq"]  # checkpoint_format gptq_v2, gptq; version gemm
Kind = tuple[int, int | None]  # bits, group (None: the whole column)
SECTION = "quantization_config"
AWQ_BITS = 4
SUPPORTED = "gptq (2, 3, 4 and 8 bits) and awq (4 bits, version gemm)"
MAX_GROUP = 2**31 - 1  # (chosen) rows: more than a Linear has, and arrays of places hold it
# (chosen) of a folder of strangers: Python's `re` may take for ever. Names have some 40 characters.
MAX_RULES, MAX_PATTERN, MAX_REPEATS = 10_000, 1000, 4
NAME, MAX_STEPS = 40, 3_000_000  # steps of all patterns on one name, NAME ** repeats each
_LAYER = re.compile(r".*?\.\d+\.")  # model.layers.3. of model.layers.3.mlp.up_proj
_REPEAT, _REPEATED_GROUP = re.compile(r"[*+]|\{\d*,"), re.compile(r"\)[*+{]")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a quantization_config says. bits, group: of most modules; None: the whole column.
    is_less: whether qzeros hold z - 1. dynamic: ((pattern, kind or None: dense), ...)."""

    method: Literal["gptq", "awq"]
    bits: int
    group: int | None
    is_less: bool
    dynamic: tuple[tuple[re.Pattern[str], Kind | None], ...] = ()

    def of(self, module: str) -> Kind | None:
        """Returns bits and group of a module; None: it is dense."""
        for pattern, kind in self.dynamic:
            if pattern.match(module):
                return kind
        return self.bits, self.group


def checked_settings(section: Mapping[str, Any]) -> Settings:
    """Returns the settings of a quantization_config.

    section: its members. Raises: UserError for a setting that is not supported, with the reason.
    """
    method = section.get("quant_method")
    if method not in ("gptq", "awq"):
        raise UserError(f"{SECTION}: quant_method={method!r} is not supported; {SUPPORTED} are")
    if section.get("is_marlin_format") or section.get("pack_dtype", "int32") not in ("int32", None):
        raise UserError(
            f"{SECTION}: codes must be packed in words of int32 (pack_dtype), not for Marlin"
        )
    form = _first_of(section, "checkpoint_format", "format")
    form = {"awq": "gemm", "gptq": "gptq"}[method] if form is None else form
    if method == "awq":
        for name, value in {"version": section.get("version", "gemm"), "format": form}.items():
            if str(value).lower() != "gemm":
                raise UserError(f"{SECTION}: {name}={value!r} of awq must be gemm")
    elif form not in ("gptq", "gptq_v2"):
        raise UserError(f"{SECTION}: checkpoint_format={form!r} must be gptq or gptq_v2")
    kind = _kind(section, method, {"bits": None, "group_size": 128}, SECTION)
    rules = section.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise UserError(f"{SECTION}: dynamic must be an object of patterns and their members")
    if len(rules) > MAX_RULES:
        raise UserError(
            f"{SECTION}: dynamic has {len(rules):,} patterns; at most {MAX_RULES:,} are read"
        )
    base = {"bits": kind[0], "group_size": -1 if kind[1] is None else kind[1]}
    dynamic = tuple(_rule(pattern, more, method, base) for pattern, more in rules.items())
    steps = sum(NAME ** len(_REPEAT.findall(compiled.pattern)) for compiled, _ in dynamic)
    if steps > MAX_STEPS:
        raise UserError(
            f"{SECTION}: the patterns of dynamic may take {steps:,} steps for a name, at most "
            f"{MAX_STEPS:,} are allowed: give fewer of them or fewer repeats without end"
        )
    return Settings(method, *kind, method == "gptq" and form == "gptq", dynamic)


def _first_of(section: Mapping[str, Any], *names: str) -> Any:
    return next((section[name] for name in names if section.get(name) is not None), None)


def _kind(section: Mapping[str, Any], method: str, base: Mapping[str, Any], where: str) -> Kind:
    bits = _first_of(section, "bits", "w_bit")
    bits = base["bits"] if bits is None else bits
    group = _first_of(section, "group_size", "q_group_size")
    group = base["group_size"] if group is None else group
    legal = BITS if method == "gptq" else (AWQ_BITS,)
    if isinstance(bits, bool) or bits not in legal:
        raise UserError(f"{where}: bits={bits!r} of {method} must be one of {legal}")
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or group > 0):
        raise UserError(f"{where}: group_size={group!r:.100} must be at least 1, or -1")
    if group > MAX_GROUP:
        raise UserError(
            f"{where}: group_size={reprlib.repr(group)} must be at most {MAX_GROUP:,}, or -1 for "
            "one group of all inputs"
        )
    return int(bits), None if group == -1 else group


def _rule(
    pattern: str, more: Any, method: str, base: Mapping[str, Any]
) -> tuple[re.Pattern[str], Kind | None]:
    where = f"{SECTION}: dynamic {pattern[:200]!r}"
    text = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
    repeats = len(_REPEAT.findall(text))
    if len(text) > MAX_PATTERN or repeats > MAX_REPEATS or _REPEATED_GROUP.search(text):
        raise UserError(
            f"{where}: a pattern may have {MAX_PATTERN} characters, {MAX_REPEATS} repeats without "
            "end, and no repeated group"
        )
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{where} is no regular expression: {error}") from None
    if pattern[:2] == "-:":
        return compiled, None
    if not isinstance(more, Mapping):
        raise UserError(f"{where} must have an object of members, such as {{'bits': 8}}")
    other = _first_of(more, "quant_method", "method", "checkpoint_format", "format", "pack_dtype")
    if other is not None:
        raise UserError(f"{where}: all modules must have one method and form, found {other!r}")
    return compiled, _kind(more, method, base, where)


# ---- writing


def section_of(
    form: Form,
    kinds: Mapping[str, Kind],
    dense: Sequence[str],
    *,
    desc_act: bool,
    symmetric: bool,
) -> dict[str, Any]:
    """Returns a quantization_config.

    Args: kinds: {module: (bits, group)}. dense: modules of the same blocks without codes.
      desc_act: whether rows of a group lie apart. symmetric: whether all zero points are 2^(b-1).
    Raises: UserError for more than MAX_RULES rules, which `checked` would refuse.
    """
    most = collections.Counter(kinds.values()).most_common(1)[0][0]
    if form == "awq":
        members = {
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head", *dense],
        }
    else:
        members = {
            "quant_method": "gptq",
            "desc_act": desc_act,
            "lm_head": False,
            "sym": symmetric,
            "checkpoint_format": "gptq_v2" if form == "gptq" else "gptq",
        }
    rules = {}
    for name, kind in _named({**dict.fromkeys(dense), **kinds}).items():
        if kind is None:
            rules[f"-:{name}"] = {}
        elif kind != most:
            rules[f"+:{name}"] = _sizes(kind)
    if len(rules) > MAX_RULES:
        raise UserError(
            f"{SECTION}: {len(rules):,} modules or layers differ from the most common format; "
            f"dynamic may have {MAX_RULES:,} rules; use fewer formats"
        )
    return members | _sizes(most) | ({"dynamic": rules} if rules else {})


def _sizes(kind: Kind) -> dict[str, int]:
    bits, group = kind
    return {"bits": bits, "group_size": -1 if group is None else group}


def _named(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {pattern: kind}: one for a layer whose modules are alike, so that a program which
    fuses some of them (vLLM) finds it by the fused name too; else one for each module."""
    layers: dict[str, dict[str, Any]] = {}
    for module, kind in kinds.items():
        home = _LAYER.match(module)
        layers.setdefault(home[0] if home else module, {})[module] = kind
    patterns = {}
    for home, modules in layers.items():
        if len(set(modules.values())) == 1 and home not in modules:
            patterns[f"^{re.escape(home)}"] = next(iter(modules.values()))
        else:
            patterns |= {f"^{re.escape(module)}$": kind for module, kind in modules.items()}
    return patterns


# ---- one Linear
#
# One Linear in few bits: the tensors of GPTQ's and AWQ's files, read and made.
#
# A matrix becomes a QTensor: codes from 0, float32 scales, and zero points -z s, which float32
# holds exactly, so that import and export give the same bits. Where the rows of a group lie apart
# (desc_act), they are sorted by group, and `order` says which inputs they multiply; export puts
# them back.
#
# Legend: K inputs, N outputs, G groups of C rows.


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
    """Returns the names of the tensors of a quantized Linear that the files have."""
    return [stem + end for end in PARTS if stem + end in files]


def read_linear(files: TensorFolder, stem: str, settings: Settings, K: int, N: int) -> Linear:
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


def _read_tensor(files: TensorFolder, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
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
    scale = _read_tensor(files, name, shape, kind if kind in legal else legal[0]).astype(np.float32)
    if not np.isfinite(scale).all():
        raise UserError(f"{files.folder}: {name} is not finite everywhere")
    return scale


def _order(files: TensorFolder, stem: str, K: int, C: int) -> np.ndarray | None:
    """Returns int32 (K,): the rows sorted by their groups; None: they are. Raises: UserError for
    unlike groups."""
    name = f"{stem}.g_idx"
    if name not in files:
        return None
    place_K = _read_tensor(files, name, (K,), np.int32)
    order_K = np.argsort(place_K, kind="stable").astype(np.int32)
    if not np.array_equal(place_K[order_K], np.arange(K) // C):
        raise UserError(
            f"{files.folder}: {name} must have {C} rows in each of the groups 0 to {-(-K // C) - 1}"
            f", the last aside; it has groups {place_K.min()} to {place_K.max()}"
        )
    return None if np.array_equal(order_K, np.arange(K)) else order_K


def _read_gptq(
    files: TensorFolder,
    stem: str,
    order_K: np.ndarray | None,
    fmt: Format,
    K: int,
    N: int,
    is_less: bool,
) -> QTensor:
    bits = fmt.width
    G = -(-K // fmt.group_of(K))
    if K * bits % 32 or N * bits % 32:
        raise UserError(f"{files.folder}: {stem} of {K} x {N} fills no whole words of 32 bits")
    zeros = _read_tensor(files, f"{stem}.qzeros", (G, N * bits // 32), np.int32)
    words = _read_tensor(files, f"{stem}.qweight", (K * bits // 32, N), np.int32)
    scale_GN = _scales(files, stem, (G, N))
    point_GN = (unpack(zeros, bits, N).astype(np.int32) + is_less) % 2**bits  # z - 1 wraps
    rows = words if order_K is None else with_rows(words, bits, order_K)
    return QTensor(
        jnp.asarray(bytes_of_rows(rows)),
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
    code_KN = unpack_awq(_read_tensor(files, f"{stem}.qweight", (K, N // 8), np.int32))
    point_GN = unpack_awq(_read_tensor(files, f"{stem}.qzeros", (G, N // 8), np.int32))
    scale_GN = _scales(files, stem, (G, N))
    zero_GN = -point_GN.astype(np.float32) * scale_GN
    return from_codes(jnp.asarray(code_KN), jnp.asarray(scale_GN), jnp.asarray(zero_GN), fmt)


# ---- writing


def check_shape(stem: str, fmt: Format, K: int, N: int, form: Form) -> None:
    """Refuses a matrix (K, N) that a form cannot store. Raises: UserError."""
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


def tensors_of(stem: str, linear: Linear, form: Form) -> dict[str, np.ndarray]:
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
    tensors = {"scales": scale_GN.astype(np.float16)}
    if form == "awq":
        code_KN = unpack(np.ascontiguousarray(words.T), bits, K).T
        return tensors | {
            "qweight": pack_awq(code_KN),
            "qzeros": pack_awq(point_GN),
        }
    if form == "gptq_v1":
        if point_GN.min() == 0:
            raise UserError(
                f"{stem} has a zero point of 0; the first version of GPTQ's form holds z - 1, and "
                "programs disagree about -1; write the second version (--form=gptq)"
            )
        point_GN = point_GN - 1
    place_K = np.arange(K) if order_K is None else np.argsort(order_K)  # of each input's row
    return tensors | {
        "qweight": with_rows(words, bits, place_K),
        "qzeros": pack(point_GN, bits),
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
    words = rows_of_bytes(_padded_to_words(np.asarray(q.values)))
    if q.zeros is None:
        count = 32 * len(words) // bits
        codes = unpack(np.ascontiguousarray(words.T), bits, count)  # two's complement
        return pack(codes ^ np.uint8(half), bits).T, np.full(scale_GN.shape, half, np.uint8)
    zero_GN = np.asarray(q.zeros, np.float32)
    exact_GN = np.rint(-zero_GN / np.where(scale_GN == 0, 1, scale_GN))
    is_whole = np.array_equal(-exact_GN * scale_GN, zero_GN)
    if not is_whole or exact_GN.min() < 0 or exact_GN.max() >= 2**bits:
        raise UserError(
            f"{stem}: a zero point is no whole number of scales; quantize with symmetric=True"
        )
    return words, exact_GN.astype(np.uint8)


def _padded_to_words(values: np.ndarray) -> np.ndarray:
    """Returns the bytes of columns, with zeros up to whole words."""
    return np.pad(values, ((0, -len(values) % 4), (0, 0)))


# ---- a folder


HEAD = "head"
# Settings before transformers read GPTQ and AWQ: AutoGPTQ's file, and AutoAWQ's, whose members
# (w_bit, q_group_size) some folders have in a file of the first name.
OLDER = ("quantize_config.json", "quant_config.json")


def settings(path: str | Path, flag: str = "hf") -> Settings | None:
    """Returns the quantization settings of a folder's config.json; None: it is not quantized, or
    its experts are in MXFP4, which hf.load_params dequantizes.

    If config.json says nothing, a file of OLDER is read.
    Raises: UserError for a form that is not supported, and for several such files.
    """
    file = expand(path) / "config.json"
    section = files_.read_object(file, hf.MAX_CONFIG, flag).get(SECTION)
    older = [p for name in OLDER if section is None and (p := file.with_name(name)).is_file()]
    if len(older) > 1:
        raise UserError(
            f"{file.parent} has {' and '.join(OLDER)}, and config.json has no {SECTION} to say "
            f"which of them counts; move one away (--{flag})"
        )
    if older:
        file = older[0]
        section = files_.read_object(file, hf.MAX_CONFIG, flag)
        if section.get("quant_method") is None:
            is_awq = file.name == OLDER[1] or "w_bit" in section
            section |= {"quant_method": "awq" if is_awq else "gptq"}
    if section is None or hf.is_mxfp4(section):
        return None
    if not isinstance(section, dict):
        raise UserError(f"{file}: {SECTION} must be an object")
    try:
        return checked_settings(section)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def load(path: str | Path) -> tuple[DecoderConfig, Tree]:
    """Returns (configuration, parameters) of a folder in GPTQ's or AWQ's form, on one device.

    Raises: UserError for forms that are not supported (groups of unlike sizes in one matrix; other
        methods; experts), and for a folder that is incomplete or damaged.
    """
    folder, quantization = expand(path), settings(path)
    if quantization is None:
        raise UserError(f"{folder}/config.json has no {SECTION}; checkpoint.hf reads it")
    cfg = hf.load_decoder_config(path, "hf")
    if cfg.moe.experts:
        raise UserError(
            f"{folder} is a model with experts in few bits ({quantization.method}), which is not "
            "supported; models without experts are"
        )
    tensors = _Folder(TensorFolder(folder, _single_file(folder)), quantization, cfg)
    leaves = {rule.ours: tensors.leaf(rule) for rule in names.rules(cfg)}
    tensors.check_all_used()
    stack = decoder.parts(cfg).stack
    return cfg, nest(_in_runs(leaves, stack, cfg.layers))


def _single_file(folder: Path) -> str:
    """Returns the name of the file that has all tensors: model.safetensors, or the only one that
    ends so. AutoGPTQ called it gptq_model-4bit-128g.safetensors, and other programs as they liked.

    Raises: UserError for none and for several, if no index lists them.
    """
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return SINGLE
    names = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if len(names) == 1:
        return names[0]
    rule = f"{folder} has neither {SINGLE} nor {INDEX}"
    if names:
        raise UserError(
            f"{rule}, but {len(names)} other files of weights: {', '.join(names[:8])}; leave only "
            "the one that has all tensors (--hf)"
        )
    pickles = sorted(p.name for end in ("bin", "pt", "pth") for p in folder.glob(f"*.{end}"))
    more = f"; codes are not read from {', '.join(pickles[:8])}" if pickles else ""
    raise UserError(f"{rule}, nor another file of safetensors{more} (--hf)")


class _Folder:
    """The tensors of a folder, as leaves."""

    def __init__(self, files: TensorFolder, quantization: Settings, cfg: DecoderConfig):
        """Reads nothing yet."""
        self._files, self._quantization, self._cfg = files, quantization, cfg
        self._sizes: Sizes = names.sizes(cfg)
        self._quantized = set(matrices(cfg.axes))
        self._abstract = dict(named_leaves(decoder.parts(cfg).abstract))
        self._words = dict(named_leaves(cfg.axes, is_words))
        self._used: set[str] = set()

    def leaf(self, rule: Rule) -> Any:
        """Returns an array (stacked over the layers, if it has any), or a list of each layer's leaf
        for a matrix that may be quantized."""
        like = self._abstract[rule.ours]
        stack = [rule.name(index) for index in np.ndindex(*rule.stack(self._sizes))]
        if rule.ours not in self._quantized:
            out = np.zeros(like.shape, np.float32)
            flat = out.reshape(-1, *like.shape[len(rule.stack(self._sizes)) :])
            for place, name in enumerate(stack):
                part = self._dense(rule, name)
                flat[(place, *(slice(0, n) for n in part.shape))] = part
            return jnp.asarray(out)
        shape = like.shape[1:]
        layers = [self._linear(rule, name, shape) for name in stack]
        ordered = any(isinstance(x, Linear) and x.order_K is not None for x in layers)
        return [
            x.kernel(shape, ordered) if isinstance(x, Linear) else jnp.asarray(x) for x in layers
        ]

    def _linear(self, rule: Rule, name: str, shape: tuple[int, ...]) -> Linear | np.ndarray:
        """Returns a layer's matrix: codes, or a dense array."""
        if (stem := self._stem(name)) is None:
            return np.array(self._dense(rule, name), np.float32)
        K = inputs_of(self._words[rule.ours][1:], shape)
        N = int(np.prod(shape)) // K
        parts = 1 if rule.part is None else self._sizes["3"]
        linear = self._read(stem, K, parts * N)
        return linear if rule.part is None else linear.columns(rule.part * N, (rule.part + 1) * N)

    def _stem(self, name: str) -> str | None:
        """Returns what the tensors of a quantized Linear begin with; None: it is dense."""
        stems = [n.removesuffix(".weight") for n in names.spellings(name)]
        return next((s for s in stems if names_of(self._files, s)), None)

    def _read(self, stem: str, K: int, N: int) -> Linear:
        self._used |= set(names_of(self._files, stem))
        return read_linear(self._files, stem, self._quantization, K, N)

    def _dense(self, rule: Rule, name: str) -> np.ndarray:
        """Returns a tensor in our order of dimensions."""
        expected = rule.their_shape(self._sizes)
        if rule.ours == HEAD and (stem := self._stem(name)) is not None:
            return rule.to_ours(self._read(stem, expected[1], expected[0]).dense().T, self._sizes)
        stored = next((n for n in names.spellings(name) if n in self._files), name)
        view = self._files.view(stored)
        self._used.add(stored)
        hf.check_tensor(self._files, stored, expected)
        return rule.to_ours(view, self._sizes)

    def check_all_used(self) -> None:
        """Raises: UserError for tensors that nobody read."""
        self._used |= hf.equal_copies(self._files, self._cfg)
        strangers = [
            n
            for n in self._files.names()
            if n not in self._used
            and not names.is_needless(n, self._cfg)
            and not _is_empty_bias(self._files, n)
        ]
        if strangers:
            raise UserError(
                f"{self._files.folder} has tensors that this form does not know: {strangers[:5]}"
            )


def _is_empty_bias(files: TensorFolder, name: str) -> bool:
    """Tells a bias of zeros, which some writers give every Linear."""
    return name.endswith(".bias") and not np.asarray(files.view(name)).any()


def _in_runs(leaves: Mapping[str, Any], stack: str, layers: int) -> dict[str, Any]:
    """Returns the leaves with layers stacked: as LayerRuns if layers have unlike formats."""
    each = {n: x for n, x in leaves.items() if isinstance(x, list)}
    alike = [jax.tree.structure([x[i] for x in each.values()]) for i in range(layers)]
    starts = [i for i in range(layers) if i == 0 or alike[i] != alike[i - 1]]

    def run(start: int, stop: int) -> dict[str, Any]:
        return {
            n: _stacked(x[start:stop]) if isinstance(x, list) else x[start:stop]
            for n, x in leaves.items()
            if n.startswith(f"{stack}.")
        }

    if len(starts) == 1:
        return {**leaves, **run(0, layers)}
    spans = itertools.pairwise([*starts, layers])
    stacks = tuple(nest(run(*span))[stack] for span in spans)
    ends = {n: x for n, x in leaves.items() if not n.startswith(f"{stack}.")}
    return ends | {stack: LayerRuns(stacks, tuple(starts), layers)}


def _stacked(layers: Sequence[Any]) -> Any:
    """Returns one leaf of consecutive layers. A QuantKernel's arrays are (layers, 1 piece, ...)."""
    if isinstance(layers[0], QuantKernel):
        return jax.tree.map(lambda *x: jnp.stack(x)[:, None], *layers)
    return jnp.stack(layers)


# ---- saving a model


def check(cfg: DecoderConfig, fmt: Format, form: Form) -> None:
    """Refuses a format whose matrices a form cannot all store, before they are quantized.

    Raises: UserError that names the first such matrix.
    """
    words, abstract = dict(named_leaves(cfg.axes, is_words)), decoder.parts(cfg).abstract
    shapes = {n: x.shape[1:] for n, x in named_leaves(abstract)}
    for n in matrices(cfg.axes):
        K = inputs_of(words[n][1:], shapes[n])
        check_shape(n, fmt, K, int(np.prod(shapes[n])) // K, form)


def save(
    params: Tree,
    cfg: DecoderConfig,
    path: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    *,
    form: Form = "gptq",
    licences: Sequence[Path] = (),
) -> None:
    """Writes a folder in GPTQ's form or AWQ's ('gemm').

    form: 'gptq' is GPTQ's second version, checkpoint_format 'gptq_v2'; 'gptq_v1' is the first,
    'gptq', whose zero points are stored less 1 and may not be 0.
    What is dense is written in float16. AWQ's form takes one format of 4 bits, beside dense
    matrices, and groups that divide the inputs. Scales of inputs (quant.awq) have no place in
    either form; models.folding puts them elsewhere.
    Raises: UserError for what the form cannot hold: scales that float16 does not hold, zero points
        that are no whole number of scales; and as `hf.save`.
    """
    if form not in get_args(Form):
        raise UserError(f"form={form!r} must be one of {', '.join(get_args(Form))} (--form)")
    if not isinstance(cfg, DecoderConfig):
        raise UserError(f"hf_quantized.save: cfg must be a DecoderConfig, got {type(cfg).__name__}")
    dense, rules, linears, singles = _parted(params, cfg)
    if not linears:
        raise UserError("no matrix is quantized; hf.save writes dense models")
    arrays, kinds, ordered, symmetric = {}, {}, False, True
    for stem, linear in linears.items():
        parts = tensors_of(stem, linear, form)
        arrays |= {f"{stem}.{end}": x for end, x in parts.items()}
        fmt = linear.weight.format
        kinds[stem] = fmt.width, fmt.group
        ordered |= linear.order_K is not None
        symmetric &= is_symmetric(linear.weight)
    if form == "awq" and len({group for _, group in kinds.values()}) > 1:
        raise UserError("AWQ's form has one size of groups for all matrices; GPTQ's takes several")
    still_dense = [n.removesuffix(".weight") for n in singles]
    members = names.to_hf_config(cfg, "float16") | {
        SECTION: section_of(form, kinds, still_dense, desc_act=ordered, symmetric=symmetric)
    }
    plain, produce = hf.tensors_of(dense, rules, cfg, "float16")
    shapes = {n: (x.shape, "F16" if x.dtype == np.float16 else "I32") for n, x in arrays.items()}
    shapes |= {n: (x.shape, "F16") for n, x in singles.items()}
    ready = arrays | singles
    hf.write(
        path,
        plain | shapes,
        lambda n: ready[n] if n in ready else produce(n),
        members,
        tokenizer=tokenizer,
        licences=licences,
    )


def _parted(
    params: Tree, cfg: DecoderConfig
) -> tuple[dict[str, Any], list[Rule], dict[str, Linear], dict[str, np.ndarray]]:
    """Returns (whole leaves, their rules; {stem: Linear}; {name: dense Linear of a block})."""
    stack, sizes = decoder.parts(cfg).stack, names.sizes(cfg)
    runs = runs_of(params[stack], cfg.layers)
    rules = {rule.ours: rule for rule in names.rules(cfg)}
    unstacked = dict(named_leaves({n: x for n, x in params.items() if n != stack}))
    blocks: dict[str, list[Any]] = {}  # a leaf's stack in each run
    for part in runs.stacks:
        for n, leaf in named_leaves(part, lambda x: isinstance(x, QuantKernel)):
            blocks.setdefault(f"{stack}.{n}", []).append(leaf)
    if other := sorted((unstacked.keys() | blocks.keys()) ^ rules.keys()):
        raise UserError(f"the parameters are not this configuration's: {', '.join(other[:5])}")
    linear = set(matrices(cfg.axes))  # each is named, if it is dense: others expect codes of it
    groups: dict[str, list[tuple[Rule, Any]]] = {}
    for n, rule in rules.items():  # parts of a fused Linear in their order
        if n not in blocks:
            continue
        if n not in linear:
            unstacked[n] = blocks[n][0] if len(blocks[n]) == 1 else jnp.concatenate(blocks[n])
            continue
        for leaf, start, stop in zip(blocks[n], runs.starts, runs.stops, strict=True):
            for layer in range(start, stop):
                one = jax.tree.map(lambda x, i=layer - start: np.asarray(x[i]), leaf)
                groups.setdefault(rule.name((layer,)), []).append((rule, one))
    linears, singles = {}, {}
    for name, parts in groups.items():
        stem = name.removesuffix(".weight")
        dense = [not isinstance(x, QuantKernel) for _, x in parts]
        if all(dense):
            singles[name] = hf.join([r for r, _ in parts], [x for _, x in parts], sizes)
        elif any(dense):
            raise UserError(f"{stem}: some parts of one Linear are quantized, and others are not")
        else:
            linears[stem] = _joined(stem, [x for _, x in parts])
    return unstacked, [rules[n] for n in unstacked], linears, singles


def _joined(stem: str, kernels: Sequence[QuantKernel]) -> Linear:
    """Returns one Linear of the parts that a file fuses, one piece each."""
    each = [jax.tree.map(lambda x: np.asarray(x[0]), k) for k in kernels]
    if any(k.scale is not None for k in each):
        raise UserError(
            f"{stem} has scales of its inputs (quant.awq), for which no form has a place; quantize "
            "with sources=folding.sources(cfg) and fold them (megajax/models/folding.py)"
        )
    orders = [None if k.order is None else k.order.tolist() for k in each]
    if any(k.weight.format != each[0].weight.format for k in each) or orders.count(orders[0]) < len(
        orders
    ):
        raise UserError(f"{stem}: the parts of one Linear must have one format and one order")
    weights = [k.weight for k in each]
    order_K = each[0].order
    if order_K is not None and np.array_equal(order_K, np.arange(len(order_K))):
        order_K = None
    if len(weights) == 1:
        return Linear(weights[0], order_K)
    q = jax.tree.map(
        lambda *x: np.concatenate(x, -1),
        *(dataclasses.replace(w, shape=weights[0].shape) for w in weights),
    )
    shape = weights[0].shape[0], sum(w.shape[1] for w in weights)
    joined: QTensor = dataclasses.replace(q, shape=shape)
    return Linear(joined, order_K)
