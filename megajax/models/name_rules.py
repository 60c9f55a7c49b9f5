"""One leaf of ours <-> one tensor (or several) of Hugging Face: what every name map is made of.

A rule says how one tensor's dimensions are read and in which order ours has them, letter by letter
('HKD->DHK': a torch Linear of q_proj). Both directions are views, so a shard of a leaf is read
from the file without touching the rest. names.py has the decoders' rules, encoder_names.py the
encoders', each with the meaning of its letters.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.layers.mlp import ACTIVATIONS, Activation

Sizes = Mapping[str, int]  # {letter of a rule's dims: size}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One leaf and its tensor, or tensors: '{i}' in `theirs` is the layer, '{e}' the expert, and
    our leaf is stacked over both. part: of a fused tensor's '3'."""

    ours: str
    theirs: str
    dims: str
    part: int | None = None

    def stack(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns how many tensors make the leaf, by leading dimension: (), (L,) or (L, E)."""
        return tuple(sizes[mark] for mark in ("{i}", "{e}") if mark in self.theirs)

    def name(self, index: tuple[int, ...]) -> str:
        """Returns the name of one of the tensors."""
        return self.theirs.format(**dict(zip("ie", index, strict=False)))

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the tensor's shape: heads and head width are one dimension there."""
        merged = self.dims.split("->")[0]
        for fused in ("3HK", "HK", "GK"):
            if fused in merged:
                size = int(np.prod([sizes[c] for c in fused]))
                others = [sizes[c] for c in merged.replace(fused, "*") if c != "*"]
                return (size, *others) if merged.startswith(fused) else (*others, size)
        return tuple(sizes[c] for c in merged)

    def to_ours(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Returns their tensor as a view in our shape (of one layer, of one expert)."""
        theirs, ours = self.dims.split("->")
        view = tensor.reshape([sizes[c] for c in theirs])
        if self.part is not None:
            view = view[(slice(None),) * theirs.index("3") + (self.part,)]
            theirs = theirs.replace("3", "")
        return view.transpose([theirs.index(c) for c in ours])

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Returns one piece of our leaf with their order of dimensions (the '3' left out)."""
        theirs, ours = self.dims.split("->")
        return array.transpose([ours.index(c) for c in theirs.replace("3", "")])


def spelled(member: str, word: str, known: tuple[Activation, ...]) -> Activation:
    """Returns the activation that transformers calls `word`. Raises: UserError for another one."""
    names = {w: a for a in known for w in ACTIVATIONS[a].hugging_face}
    if word not in names:
        raise UserError(f"config.json: {member}={word} is not supported, only {', '.join(names)}")
    return names[word]


def require(found: Mapping[str, Any], **wanted: Any) -> None:
    """Refuses settings that change the arithmetic."""
    for name, value in wanted.items():
        if found.get(name, value) != value:
            raise UserError(f"config.json: {name}={found[name]} is not supported, only {value}")
