"""The one object that turns logical words into shardings.

A module says what the dimensions of its arrays ARE ('batch', 'seq', 'heads'); `Layout` says where
they live. It answers three questions: how a parameter rests (`stored`), how it looks while in use
(`whole`), and how an activation lies (`act`). The rules are plain data; parallel/sharding.py builds
them. A mesh of one device is a mesh like any other.

Why `whole` says `reduced`: the type system of an Explicit mesh then keeps the weight's gradient a
partial sum over those axes until ONE reduce-scatter at the reshard's transposition. Without it the
compiler inserts all-reduces, which cost twice the bytes.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.axes import Axes, Rules
from megajax.core.check import check_weights
from megajax.core.errors import UserError

Words = tuple[str | None, ...]


@dataclass(frozen=True)
class Layout:
    """A mesh and the rules for it.

    Mesh axes of size 1 never appear in an answer: an array of one row would lose them in a reshape,
    and then not match its neighbours.
    """

    mesh: Mesh
    rules: Rules

    def stored(self, *words: str | None) -> P:
        """Returns the spec of a stored parameter with these dimensions."""
        return P(*map(self._entry, self._cuts(words)))

    def whole(self, *words: str | None) -> P:
        """Returns its spec in use: gathered over the axes that share the gradient."""
        partial = self.partial(*words)
        cuts = self._cuts(words, shared=True)
        remaining = (tuple(a for a in axes if a not in partial) for axes in cuts)
        return P(*map(self._entry, remaining), reduced=set(self.live(partial)))

    def shared(self, *words: str | None) -> P:
        """Returns `stored` once dimensions shorter than their axes are repeated (Rules.copies)."""
        return P(*map(self._entry, self._cuts(words, shared=True)))

    def copies(self, word: str | None) -> int:
        """Returns how often a dimension is repeated before the axes of `act` cut it."""
        return self.rules.copies.get(word or "", 1)

    def partial(self, *words: str | None) -> Axes:
        """Returns the axes that share a parameter's gradient. For experts, these do not include the
        axes along which the experts differ."""
        expert_axes = self.rules.stored.get("expert", ()) if "expert" in words else ()
        return tuple(a for a in self.rules.partial if a not in expert_axes)

    def act(
        self,
        *words: str | None,
        residual: bool = False,
        reduced: Axes = (),
        unreduced: Axes = (),
    ) -> P:
        """Returns the spec of an activation.

        residual: on the residual stream, else inside a block. reduced: axes over which its gradient
        is a partial sum. unreduced: axes over which it is itself one.
        """
        rules = self.rules.residual if residual else self.rules.act
        entries = (self._entry(rules.get(w or "", ())) for w in words)
        return P(*entries, reduced=set(self.live(reduced)), unreduced=set(self.live(unreduced)))

    def check(self, model: Any) -> None:
        """Refuses a model that this mesh cannot cut. model: a configuration with `.sizes`.

        Raises: UserError with the value, the rule, the nearest legal value and the flag.
        """
        check_weights(model, self.mesh.shape, self.rules)
        for word in self.rules.sharable:
            size, flag = model.sizes.get(word, (0, ""))
            ways = self.ways(self.rules.act.get(word, ()))
            if size * self.copies(word) % ways:
                raise UserError(
                    f"{flag}={size} is shared by {ways} devices, which this layout does not know; "
                    "make it for the model: parallel.sharding.layout(mesh, model=cfg)"
                )

    def named(self, spec: P) -> NamedSharding:
        """Returns the spec on this mesh, for placing arrays from outside jit."""
        return NamedSharding(self.mesh, spec)

    def live(self, axes: Axes) -> Axes:
        """Returns those of the axes that have more than one device."""
        return tuple(a for a in axes if self.mesh.shape[a] > 1)

    def zero_axes(self, *words: str | None) -> tuple[Axes, Axes]:
        """Returns (the axes that cut the width of a stored parameter, those that hold copies of
        it), of the axes that share its gradient and have more than one device."""
        partial = self.live(self.partial(*words))
        cut = tuple(a for a in partial if a in self.rules.stored.get("embed", ()))
        return cut, tuple(a for a in partial if a not in cut)

    @property
    def cuts_sequence(self) -> bool:
        """Whether tensor parallelism cuts the sequence of the residual stream. In decoding it does
        not."""
        return "tensor" in self.rules.residual.get("seq", ())

    def ways(self, axes: Axes) -> int:
        """Returns into how many pieces these axes cut together."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def _cuts(self, words: Words, shared: bool = False) -> list[Axes]:
        """The axes that cut each dimension at rest; an axis cuts the first one that names it.

        shared: with the dimensions repeated that are shorter than the axes of `act`.
        """
        cuts: list[Axes] = []
        for word in words:
            repeated = shared and self.copies(word) > 1
            axes = (self.rules.act if repeated else self.rules.stored).get(word or "", ())
            cuts.append(tuple(a for a in axes if not any(a in before for before in cuts)))
        return cuts

    def _entry(self, axes: Axes) -> Axes | str | None:
        live = self.live(axes)
        return (live[0] if len(live) == 1 else live) if live else None
