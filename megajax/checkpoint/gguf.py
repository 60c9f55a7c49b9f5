"""GGUF files of the Llama family as our decoder: configuration, parameters and tokenizer.

Import dequantizes to float32 one tensor at a time, and of that only the part that a device's piece
needs: the host never holds a whole leaf beside the piece that is being made. Formats of weights are
those of formats/gguf_blocks.py; models/gguf_names.py has the architectures. Export is absent.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint import hf
from megajax.checkpoint.formats.gguf import Array, GgufFile
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.data import gguf_vocabulary
from megajax.data.tokenizer import JsonTokenizer
from megajax.models import decoder, gguf_names, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.name_rules import Rule, Sizes


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
    """A GGUF file whose configuration has been read; parameters and tokenizer when asked for."""

    def __init__(self, path: str | Path):
        """Raises: UserError as `load`."""
        self._file = file = GgufFile(path)
        self.path = file.path
        try:
            self._kind = gguf_names.architecture(file.metadata)
            shapes = {name: info.shape for name, info in file.tensors.items()}
            factors = shapes.get(gguf_names.FACTORS)
            table = None
            if factors is not None:
                if np.prod(factors) > 2**16:  # of half a head
                    raise UserError(f"{gguf_names.FACTORS} has the shape {factors}")
                table = file.read(gguf_names.FACTORS)[0]
            self.cfg = gguf_names.from_metadata(file.metadata, shapes, table)
        except UserError as error:
            raise UserError(f"{file.path}: {error} (--gguf)") from None

    def tokenizer(self) -> JsonTokenizer:
        """Returns the tokenizer that the file describes. Raises: UserError."""
        file = self._file
        keys = {name: key for name, key in gguf_vocabulary.ARRAYS.items() if key in file.metadata}
        wrong = [k for k in keys.values() if not isinstance(file.metadata[k], Array)]
        if wrong:
            raise UserError(f"{file.path}: {wrong[0]} is no array (--gguf)")
        counts = {name: file.metadata[key].count for name, key in keys.items()}
        try:
            spare = gguf_vocabulary.check_counts(counts, file.size)
            arrays: dict[str, Any] = {name: file.array(key) for name, key in keys.items()}
            text, settings = gguf_vocabulary.tokenizer_json(file.metadata, spare, **arrays)
        except UserError as error:
            raise UserError(f"{file.path}: {error} (--gguf, --tokenizer=FILE)") from None
        return JsonTokenizer(text, settings, str(file.path))

    def params(self, layout: Layout | None = None) -> Tree:
        """Returns float32 parameters as `layout` stores them. Raises: UserError."""
        cfg, file = self.cfg, self._file
        rules, sizes = names.rules(cfg), names.sizes(cfg)
        self._check_tensors(rules, sizes)

        def read(rule: Rule, index: tuple[int, ...], inner: tuple[slice, ...]) -> np.ndarray:
            return _read(file, self._kind, rule, index, inner, sizes)

        return hf.make_params(decoder.parts(cfg), rules, sizes, read, layout)

    def _check_tensors(self, rules: list[Rule], sizes: Sizes) -> None:
        """Refuses missing tensors, wrong shapes, and tensors that no leaf of ours is made of."""
        there, used = self._file.tensors, {gguf_names.FACTORS}
        for rule in rules:
            shape = rule.their_shape(sizes)
            for index in np.ndindex(rule.stack(sizes)):
                name, expert = gguf_names.find(rule.name(index), there)
                wanted = shape if expert is None else (sizes["{e}"], *shape)
                if name not in there:
                    raise UserError(f"{self.path} has no tensor {name} (--gguf)")
                if there[name].shape != wanted:
                    raise UserError(
                        f"{self.path}: {name} has shape {there[name].shape}, its metadata says "
                        f"{wanted} (--gguf)"
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
    wanted = dict(zip(ours, inner, strict=True))
    spans, here, rest = [], dict(sizes), dict(wanted)
    for group in re.findall("[HG]K|.", theirs):  # heads and their width are one dimension there
        lead, each = group[0], int(np.prod([sizes[c] for c in group[1:]]))
        begin, end, _ = wanted[lead].indices(sizes[lead])
        spans.append((begin * each, max(begin, end) * each))
        here[lead], rest[lead] = max(0, end - begin), slice(None)
    name, expert = gguf_names.find(rule.name(index), file.tensors)
    rows, columns = (spans[0], spans[1]) if len(spans) == 2 else (None, spans[0])
    if expert is not None:
        each = rule.their_shape(sizes)[0]
        assert rows is not None
        rows = (rows[0] + expert * each, rows[1] + expert * each)
    found = file.read(name, rows, columns).reshape([here[c] for c in theirs])
    if gguf_names.is_permuted(kind, rule.ours):
        found = _unpermute(found, theirs.index("K"))
    found = found.transpose([theirs.index(c) for c in ours])
    return found[tuple(rest[c] for c in ours)]


def _unpermute(x: np.ndarray, axis: int) -> np.ndarray:
    """Puts the dimensions of a head from (pair, which of the two) into (which, pair)."""
    before, K, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    return x.reshape(*before, K // 2, 2, *after).swapaxes(axis, axis + 1).reshape(x.shape)
