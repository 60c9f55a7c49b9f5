"""GGUF files as our decoder: configuration, parameters and tokenizer.

Import dequantizes to float32 one tensor at a time, and of that only the part that a device's piece
needs: the host never holds a whole leaf beside the piece that is being made. Formats of weights are
those of gguf_file.py; models/gguf_names.py has the architectures. Export is absent.
"""

import functools
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree, named_leaves, nest
from megajax.data import vocabulary_files
from megajax.data.tokenizer import JsonTokenizer
from megajax.foreign import hf
from megajax.foreign.gguf_file import Array, GgufFile, Packing
from megajax.models import decoder, gguf_names, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.names import Rule, Sizes
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import QTensor
from megajax.quant.quantized_model import matrices
from pallas_kernels.quantize import reference


def load(
    path: str | Path, layout: Layout | None = None
) -> tuple[DecoderConfig, Tree, JsonTokenizer]:
    """Returns (configuration, float32 parameters as `layout` stores them, tokenizer) of a file.

    layout: None: whole on the first device.
    Raises: UserError for a file that is damaged, or of a model that cannot be computed here.
    """
    opened = GgufModel(path)
    return opened.cfg, opened.params(layout), opened.tokenizer()


class GgufModel:
    """A GGUF file whose configuration has been read; parameters and tokenizer when asked for.

    path: of the file. metadata: {key: number, truth value, text or Array}.
    """

    def __init__(self, path: str | Path):
        """Raises: UserError as `load`."""
        self._file = file = GgufFile(path)
        self.path, self.metadata = file.path, file.metadata
        try:
            self._kind = gguf_names.architecture(file.metadata)
            shapes = {name: info.shape for name, info in file.tensors.items()}
            tables = {}
            for name in gguf_names.TABLES:
                if name in shapes:
                    if np.prod(shapes[name]) > 2**16:  # of half a head
                        raise UserError(f"{name} has the shape {shapes[name]}")
                    tables[name] = file.read(name)[0]
            self.cfg = gguf_names.from_metadata(file.metadata, shapes, tables)
        except UserError as error:
            raise UserError(f"{file.path}: {error} (--gguf)") from None

    def tokenizer(self) -> JsonTokenizer:
        """Returns the tokenizer that the file describes. Raises: UserError."""
        file = self._file
        keys = {name: key for name, key in vocabulary_files.ARRAYS.items() if key in file.metadata}
        wrong = [k for k in keys.values() if not isinstance(file.metadata[k], Array)]
        if wrong:
            raise UserError(f"{file.path}: {wrong[0]} is no array (--gguf)")
        counts = {name: file.metadata[key].count for name, key in keys.items()}
        try:
            spare = vocabulary_files.check_counts(counts, file.size)
            arrays: dict[str, Any] = {name: file.array(key) for name, key in keys.items()}
            text, settings = vocabulary_files.tokenizer_json(file.metadata, spare, **arrays)
        except UserError as error:
            raise UserError(f"{file.path}: {error} (--gguf, --tokenizer=FILE)") from None
        return JsonTokenizer(text, settings, str(file.path))

    def params(
        self, layout: Layout | None = None, dtype: Any = "float32", packed: bool = False
    ) -> Tree:
        """Returns parameters as `layout` stores them.

        dtype: of dense matrices and tables. packed: the blocks' matrices stay in few bits where
          all layers have them in one format; for one tensor rank. They stand for the same float32
          weights, bit for bit.
        Raises: UserError.
        """
        cfg, file = self.cfg, self._file
        rules, sizes = self._rules, names.sizes(cfg)
        self._check_tensors(rules, sizes)
        packings = self._packings() if packed else {}
        ready = {
            rule.ours: self._packed(rule, packings[rule.ours])
            for rule in rules
            if rule.ours in packings
        }

        def read(rule: Rule, index: tuple[int, ...], inner: tuple[slice, ...]) -> np.ndarray:
            return _read(file, self._kind, rule, index, inner, sizes)

        return hf.make_params(
            decoder.parts(cfg), rules, sizes, read, layout, dtype=dtype, ready=ready
        )

    @property
    def _rules(self) -> list[Rule]:
        return gguf_names.as_stored(names.rules(self.cfg), self._file.tensors)

    def outline(self, packed: bool = False) -> Tree:
        """Returns what `params` does, in float32, as ShapeDtypeStructs."""
        abstract = decoder.parts(self.cfg).abstract
        if not packed:
            return abstract
        leaves, rules = dict(named_leaves(abstract)), {r.ours: r for r in self._rules}
        for name, packing in self._packings().items():
            leaves[name] = self._kernel(rules[name], packing, jax.ShapeDtypeStruct)
        return nest(leaves)

    def _packings(self) -> dict[str, Packing]:
        """Returns how the leaves are quantized that can stay so: the blocks' matrices, but experts
        and those of which layers have unlike formats."""
        cfg, packings = self.cfg, {}
        packable = set() if cfg.moe.experts else set(matrices(cfg.axes))
        for rule in self._rules:
            theirs, ours = rule.dims.split("->")
            turned = any(ours == theirs[i:] + theirs[:i] for i in range(1, len(theirs)))
            if rule.ours not in packable or rule.part is not None or not turned:
                continue
            there = self._file.tensors
            kinds = {there[name].format for name in self._stored(rule) if name in there}
            if len(kinds) == 1 and (packing := kinds.pop().packing) is not None:
                packings[rule.ours] = packing
        return packings

    def _stored(self, rule: Rule) -> list[str]:
        """Returns the names of the tensors of a leaf without experts."""
        indices = np.ndindex(rule.stack(names.sizes(self.cfg)))
        return [gguf_names.find(rule.name(i), self._file.tensors)[0] for i in indices]

    def _packed(self, rule: Rule, packing: Packing) -> QuantKernel:
        """Returns a leaf of all layers in few bits."""
        layers = []
        for name in self._stored(rule):
            parts = self._file.read_parts(name)
            layers.append([None if x is None else self._turned(rule, x) for x in parts])
        code_LKN, *scales = (
            None if x[0] is None else np.stack(x) for x in zip(*layers, strict=True)
        )
        assert code_LKN is not None
        L, K, N = code_LKN.shape
        count, size = reference.unit(packing.bits)
        lane_LUCN = code_LKN.view(np.uint8).reshape(L, K // count, count, N) & (2**packing.bits - 1)
        word = np.uint32 if size > 1 else np.uint8
        lanes = (lane_LUCN[:, :, i].astype(word) << (packing.bits * i) for i in range(count))
        word_LUN: np.ndarray = functools.reduce(operator.or_, lanes)
        bytes_LUSN = np.stack([(word_LUN >> 8 * i & 255).astype(np.uint8) for i in range(size)], 2)
        arrays = iter([bytes_LUSN.reshape(L, -1, N), *(x for x in scales if x is not None)])

        def next_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            x = next(arrays).reshape(shape)
            with np.errstate(over="ignore"):
                out = x.astype(dtype)
            if dtype != np.uint8 and not np.array_equal(out, x, equal_nan=True):
                raise UserError(
                    f"{self.path}: scales of {rule.ours} are no {np.dtype(dtype).name} numbers; "
                    "serve it with --weights=dense"
                )
            return out

        return self._kernel(rule, packing, next_array)

    def _kernel(self, rule: Rule, packing: Packing, array: Callable[..., Any]) -> QuantKernel:
        """Returns a leaf whose arrays, in their order, are array(shape, dtype)."""
        sizes = names.sizes(self.cfg)
        ours = rule.dims.split("->")[1]
        N, K = rule.their_shape(sizes)
        fmt = Format(
            packing.bits,
            packing.group,
            0,
            symmetric=not packing.zeros,
            scale_dtype=packing.scale_dtype,
        )
        lead, grouped = (self.cfg.layers, 1), (K // packing.group, N)
        values = array((*lead, reference.code_bytes(K, packing.bits), N), np.uint8)
        scales = array((*lead, *grouped), fmt.scale_dtype)
        zeros = array((*lead, *grouped), fmt.scale_dtype) if packing.zeros else None
        weight = QTensor(values, scales, zeros, fmt, (K, N), np.dtype(np.float32))
        return QuantKernel(tuple(sizes[c] for c in ours), weight)

    def _turned(self, rule: Rule, x: np.ndarray) -> np.ndarray:
        """Returns (outputs, inputs) as (inputs, outputs), the outputs in our order."""
        theirs, sizes = rule.dims.split("->")[0], names.sizes(self.cfg)
        if gguf_names.is_permuted(self._kind, rule.ours):
            rows = [sizes[c] for c in theirs[:-1]]
            x = _unpermute(x.reshape(*rows, -1), theirs.index("K")).reshape(x.shape)
        return x.T

    def _check_tensors(self, rules: list[Rule], sizes: Sizes) -> None:
        """Refuses missing tensors, wrong shapes, and tensors that no leaf of ours is made of."""
        there, used = self._file.tensors, set(gguf_names.TABLES)
        for rule in rules:
            shape = rule.their_shape(sizes)
            for index in np.ndindex(rule.stack(sizes)):
                name, expert = gguf_names.find(rule.name(index), there)
                expected = shape if expert is None else (sizes["{e}"], *shape)
                if name not in there:
                    raise UserError(f"{self.path} has no tensor {name} (--gguf)")
                if there[name].shape != expected:
                    raise UserError(
                        f"{self.path}: {name} has shape {there[name].shape}, its metadata says "
                        f"{expected} (--gguf)"
                    )
                used.add(name)
        if strangers := sorted(there.keys() - used):
            raise UserError(
                f"{self.path} has tensors that this architecture does not have here: "
                f"{', '.join(strangers[:5])} (--gguf)"
            )


def _read(
    file: GgufFile,
    kind: str,
    rule: Rule,
    index: tuple[int, ...],
    inner: tuple[slice, ...],
    sizes: Sizes,
) -> np.ndarray:
    """Returns a part of a tensor in our order of dimensions; only that part is dequantized."""
    theirs, ours = rule.dims.split("->")
    slices = dict(zip(ours, inner, strict=True))
    spans, read_sizes, inner_slices = [], dict(sizes), dict(slices)
    for group in re.findall("[HG]K|.", theirs):  # heads and their width are one dimension there
        lead, each = group[0], int(np.prod([sizes[c] for c in group[1:]]))
        begin, end, _ = slices[lead].indices(sizes[lead])
        spans.append((begin * each, max(begin, end) * each))
        read_sizes[lead], inner_slices[lead] = max(0, end - begin), slice(None)
    name, expert = gguf_names.find(rule.name(index), file.tensors)
    rows, columns = (spans[0], spans[1]) if len(spans) == 2 else (None, spans[0])
    if expert is not None:
        each = rule.their_shape(sizes)[0]
        assert rows is not None
        rows = (rows[0] + expert * each, rows[1] + expert * each)
    if rule.rows and rule.part is not None:  # the rows of several leaves, one after the other
        assert rows is not None
        before = sum(rule.row_counts(sizes)[: rule.part])
        rows = (rows[0] + before, rows[1] + before)
    x = file.read(name, rows, columns).reshape([read_sizes[c] for c in theirs])
    if gguf_names.is_permuted(kind, rule.ours):
        x = _unpermute(x, theirs.index("K"))
    if less := gguf_names.offset(kind, rule.ours):
        x = x - np.float32(less)
    x = x.transpose([theirs.index(c) for c in ours])
    return x[tuple(inner_slices[c] for c in ours)]


def _unpermute(x: np.ndarray, axis: int) -> np.ndarray:
    """Puts the dimensions of a head from (pair, which of the two) into (which, pair)."""
    before, K, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    return x.reshape(*before, K // 2, 2, *after).swapaxes(axis, axis + 1).reshape(x.shape)
