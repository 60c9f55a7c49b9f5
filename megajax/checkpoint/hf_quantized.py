"""Hugging Face folders whose Linears are in few bits: GPTQ and AWQ files, in and out.

A file's matrix becomes a QuantKernel: codes from 0, float32 scales, and zero points -z s, which
float32 holds exactly, so that import and export give the same bits. What is not quantized there
(embeddings, norms, the head) is read and written as checkpoint/hf.py does. Where a file's groups
are of rows that lie apart (desc_act), the rows are sorted by group, and QuantKernel.order says
which inputs they multiply; export puts them back. Layers in `dynamic` rules of unlike bits are not
supported; each tensor's bits are those of the file's configuration.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import hf
from megajax.checkpoint.formats import integers
from megajax.checkpoint.formats.safetensors import TensorFolder
from megajax.core import files as files_
from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.core.tree import Tree, is_words, named_leaves, nest
from megajax.models import decoder, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.name_rules import Rule
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import QTensor, from_codes
from megajax.quant.quantized_model import inputs_of, matrices

SECTION = "quantization_config"
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


def settings(path: str | Path, flag: str = "hf") -> Mapping[str, Any] | None:
    """Returns the quantization_config of a folder's config.json; None: it is not quantized."""
    found = files_.read_object(expand(path) / "config.json", hf.MAX_CONFIG, flag).get(SECTION)
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{path}/config.json: {SECTION} must be an object")
    return found


def load(path: str | Path) -> tuple[DecoderConfig, Tree]:
    """Returns (configuration, parameters) of a folder in GPTQ's or AWQ's form, on one device.

    Raises: UserError for forms that are not supported (groups of unlike sizes; other methods), and
        for a folder that is incomplete or damaged.
    """
    folder, found = expand(path), settings(path)
    if found is None:
        raise UserError(f"{folder}/config.json has no {SECTION}; checkpoint.hf reads it")
    cfg = hf.load_decoder_config(path, "hf")
    method, bits, group, is_less = integers.checked(dict(found))
    files, sizes = TensorFolder(folder), names.sizes(cfg)
    quantized, used, leaves = set(matrices(cfg.axes)), set(), {}
    fmt = Format(bits, group, 0, symmetric=False)
    abstract = dict(named_leaves(decoder.parts(cfg).abstract))
    words = dict(named_leaves(cfg.axes, is_words))
    for rule in names.rules(cfg):
        stack = [rule.name(index) for index in np.ndindex(*rule.stack(sizes))]
        stems = [name.removesuffix(".weight") for name in stack]
        if rule.ours in quantized and all(f"{s}.qweight" in files for s in stems):
            shape = abstract[rule.ours].shape[1:]
            K = inputs_of(words[rule.ours][1:], shape)
            N = int(np.prod(shape)) // K
            if method == "gptq":
                read = functools.partial(_read_gptq, fmt=fmt, N=N, is_less=is_less)
            else:
                read = functools.partial(_read_awq, fmt=fmt, N=N)
            orders = [_order(files, s, K, fmt.group_of(K)) for s in stems]
            apart = any((order != np.arange(K)).any() for order in orders)
            layers = [
                QuantKernel(shape, read(files, stem, o), order=jnp.asarray(o) if apart else None)
                for stem, o in zip(stems, orders, strict=True)
            ]
            leaves[rule.ours] = jax.tree.map(lambda *x: jnp.stack(x)[:, None], *layers)
            used |= {f"{s}{end}" for s in stems for end in _PARTS}
        else:
            leaves[rule.ours] = _dense(files, rule, stack, sizes, abstract[rule.ours])
            used |= {n for s in stack for n in names.spellings(s)}
    strangers = [
        n
        for n in files.names()
        if n not in used and not names.is_needless(n, cfg) and not _is_empty_bias(files, n)
    ]
    if strangers:
        raise UserError(f"{folder} has tensors that this form does not know: {strangers[:5]}")
    return cfg, nest(leaves)


def _is_empty_bias(files: TensorFolder, name: str) -> bool:
    """Tells a bias of zeros, which some writers give every Linear."""
    return name.endswith(".bias") and not np.asarray(files.view(name)).any()


def _dense(
    files: TensorFolder, rule: Rule, stack: list[str], sizes: Any, like: jax.ShapeDtypeStruct
) -> jax.Array:
    out = np.zeros(like.shape, np.float32)
    flat = out.reshape(-1, *like.shape[len(rule.stack(sizes)) :])
    for place, name in enumerate(stack):
        stored = next((n for n in names.spellings(name) if n in files), name)
        view = files.view(stored)
        if view.shape != rule.their_shape(sizes):
            raise UserError(
                f"{files.folder}: {stored} has shape {view.shape}, config.json says "
                f"{rule.their_shape(sizes)}"
            )
        part = rule.to_ours(view, sizes)
        flat[(place, *(slice(0, n) for n in part.shape))] = part
    return jnp.asarray(out)


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
    return _tensor(files, name, shape, kind if kind in legal else legal[0]).astype(np.float32)


def _order(files: TensorFolder, stem: str, K: int, C: int) -> np.ndarray:
    """Returns int32 (K,): the rows sorted by their groups. Raises: UserError for unlike groups."""
    name = f"{stem}.g_idx"
    if name not in files:
        return np.arange(K, dtype=np.int32)
    place = _tensor(files, name, (K,), np.int32)
    order = np.argsort(place, kind="stable").astype(np.int32)
    if not np.array_equal(place[order], np.arange(K) // C):
        raise UserError(f"{files.folder}: {name} must have {C} rows in each group, the last aside")
    return order


def _read_gptq(
    files: TensorFolder, stem: str, order_K: np.ndarray, *, fmt: Format, N: int, is_less: bool
) -> QTensor:
    K = len(order_K)
    bits, C = fmt.width, fmt.group_of(K)
    G = -(-K // C)
    if K * bits % 32 or N * bits % 32:
        raise UserError(f"{files.folder}: {stem} of {K} x {N} fills no whole words of 32 bits")
    zeros = _tensor(files, f"{stem}.qzeros", (G, N * bits // 32), np.int32)
    words = _tensor(files, f"{stem}.qweight", (K * bits // 32, N), np.int32)
    scale = _scales(files, stem, (G, N))
    point = integers.unpack(zeros, bits, N).astype(np.float32) + is_less
    return QTensor(
        jnp.asarray(integers.bytes_of_rows(integers.with_rows(words, bits, order_K))),
        jnp.asarray(scale),
        jnp.asarray(-point * scale),
        fmt,
        (K, N),
        np.dtype(np.float32),
    )


def _read_awq(
    files: TensorFolder, stem: str, order_K: np.ndarray, *, fmt: Format, N: int
) -> QTensor:
    K = len(order_K)  # in their order: the form has no g_idx
    G = -(-K // fmt.group_of(K))
    if N % 8:
        raise UserError(f"{files.folder}: {stem} has {N} columns, no multiple of 8")
    codes = integers.unpack_awq(_tensor(files, f"{stem}.qweight", (K, N // 8), np.int32))
    point = integers.unpack_awq(_tensor(files, f"{stem}.qzeros", (G, N // 8), np.int32))
    scale = _scales(files, stem, (G, N))
    return from_codes(
        jnp.asarray(codes), jnp.asarray(scale), jnp.asarray(-point.astype(np.float32) * scale), fmt
    )


def save(
    params: Tree, cfg: DecoderConfig, path: str | Path, tokenizer: str | Path | None = None
) -> None:
    """Writes a folder in GPTQ's form ('gptq_v2', whole zero points), float16 beside it.

    All matrices must have one format; symmetric codes get the zero point 2^(b-1). AWQ's scales of
    inputs have no place in this form.
    Raises: UserError for unlike layers, scales that float16 does not hold, zero points that are no
        whole number of scales, and as `hf.save`.
    """
    dense, tensors, found, desc_act = {}, {}, set(), False
    rules = {rule.ours: rule for rule in names.rules(cfg)}
    for n, leaf in named_leaves(params, lambda x: isinstance(x, QuantKernel)):
        if not isinstance(leaf, QuantKernel):
            dense[n] = leaf
            continue
        if leaf.scale is not None:
            raise UserError(
                f"{n} has scales of its inputs (AWQ), for which GPTQ's form has no place"
            )
        if n not in rules:
            raise UserError(f"{n} is in a run of layers of unlike formats; export takes one format")
        found.add(leaf.weight.format)
        for layer in range(cfg.layers):
            one = jax.tree.map(lambda x, i=layer: np.asarray(x[i, 0]), leaf)
            stem = rules[n].name((layer,)).removesuffix(".weight")
            parts = _gptq_tensors(n, one.weight, one.order)
            tensors |= {f"{stem}.{end}": x for end, x in parts.items()}
        desc_act |= leaf.order is not None
    if len(found) != 1:
        raise UserError(f"export needs matrices of one format, found {len(found)} of them")
    fmt = found.pop()
    members = names.to_hf_config(cfg, "float16") | {
        SECTION: {
            "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": fmt.bits,
            "group_size": -1 if fmt.group is None else fmt.group, "desc_act": desc_act,
            "sym": fmt.symmetric, "lm_head": False,
        }
    }  # fmt: skip
    plain, produce = hf.tensors_of(dense, [rules[n] for n in dense], cfg, "float16")
    kinds = {n: (x.shape, "F16" if x.dtype == np.float16 else "I32") for n, x in tensors.items()}
    hf.write(
        path, plain | kinds, lambda n: tensors[n] if n in tensors else produce(n), members,
        tokenizer=tokenizer,
    )  # fmt: skip


def _gptq_tensors(n: str, q: QTensor, order_K: np.ndarray | None) -> dict[str, np.ndarray]:
    K, N = q.shape
    bits, C = q.format.width, q.format.group_of(K)
    if K * bits % 32 or N * bits % 32:
        raise UserError(f"{n} of {K} x {N} fills no whole words of 32 bits")
    scale = np.asarray(q.scales, np.float32)
    if not np.array_equal(scale.astype(np.float16).astype(np.float32), scale):
        raise UserError(
            f"{n}: float16 does not hold its scales; quantize with scale_dtype='float16'"
        )
    words = integers.rows_of_bytes(np.asarray(q.values))
    if q.zeros is None:
        half = 1 << (bits - 1)
        codes = integers.unpack(np.ascontiguousarray(words.T), bits, K)  # two's complement
        words = integers.pack(codes ^ np.uint8(half), bits).T
        point = np.full(scale.shape, half, np.uint8)
    else:
        zero = np.asarray(q.zeros, np.float32)
        exact = np.rint(-zero / scale)
        if not np.array_equal(-exact * scale, zero) or exact.min() < 0 or exact.max() >= 2**bits:
            raise UserError(
                f"{n}: a zero point is no whole number of scales; quantize with symmetric=True"
            )
        point = exact.astype(np.uint8)
    place = np.arange(K) if order_K is None else np.argsort(order_K)  # of each input's row
    return {
        "qweight": integers.with_rows(words, bits, place),
        "qzeros": integers.pack(point, bits),
        "scales": scale.astype(np.float16),
        "g_idx": (place // C).astype(np.int32),
    }
