"""What a pipeline's loops have moved for them: chunks of weights in, their gradients out.

One stage's layers travel chunk by chunk, each chunk's matrices in one message, and what is in no
layer by itself (parallel/exchange.py says which leaves share a message).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.core.tree import Tree
from megajax.layers.losses import LossSums
from megajax.models.parts import map_words
from megajax.parallel.exchange import Exchange, lead, led

Array = jax.Array
REST = 2**16  # folded into a key for what is in no layer; layers and chunks fold their numbers


class Turn(NamedTuple):
    """What a step gives its gradients. key: of a micro-batch, or of the wire. step: the number of
    finished steps, int32. copies: as in Exchange.copies. errors: of `first_errors`."""

    key: Any
    step: Any
    copies: Tree = None
    errors: Tree = None


class Gradients(NamedTuple):
    """The gradients of a step and what came with them.

    sums: of the loss, over the whole step. grads: stored as the parameters are, float32; None where
    a leaf is not trained. copies, errors: of the exchange, after the step. squares: of
    Exchange.gather; None: no exchange. count: what the step's total counts, int32.
    """

    sums: LossSums
    grads: Tree
    copies: Tree = None
    squares: Array | None = None
    errors: Tree = None
    count: Array | None = None


def first_errors(exchange: Exchange | None, params: Tree, stack: str, chunks: int | None) -> Any:
    """Returns the first errors of a run, None without feedback, under an Explicit mesh.

    params: the masters. chunks: of a pipeline's stage: the errors are then {"chunks": of each of
    them, "rest"}; None: no pipeline, and they are Exchange.errors.
    """
    if exchange is None or not exchange.keeps_errors:
        return None
    if chunks is None:
        return exchange.errors(params)
    specs = map_words(lambda words: exchange.masters.stored(*words), exchange.axes)

    def local(params: Tree) -> Tree:
        moves = Moves(exchange, stack, chunks, None)
        return lead(moves.errors_of(params))

    return jax.shard_map(
        local,
        mesh=exchange.masters.mesh,
        in_specs=(specs,),
        out_specs=exchange.devices,
        check_vma=False,
    )(params)


class Moves:
    """The moves of one step, in the order in which the loops ask for them.

    For code inside a shard_map over the whole mesh.
    """

    def __init__(self, exchange: Exchange, stack: str, chunks: int, turn: Turn | None):
        """stack: the member that holds the layers. chunks: of a stage. turn: None where the
        exchange has no codec."""
        self._stack, self._chunks, self._turn = stack, chunks, turn
        # One message a chunk: its layers are a dimension like any other.
        self._layers = exchange.part(lambda tree: tree[stack], lambda words: (None, *words[1:]))
        self._outer = exchange.part(
            lambda tree: {k: x for k, x in tree.items() if k != stack}, lambda words: words
        )
        self.squares = jnp.zeros((1, 2))
        self._new: dict[int, Tree] = {}
        self._new_rest: Tree = None
        errors = None if turn is None else led(turn.errors)
        self._errors: Any = errors and {"chunks": list(errors["chunks"]), "rest": errors["rest"]}

    def cut(self, layers: Tree) -> tuple[Tree, Tree]:
        """Returns a stage's masters, and their copies, cut into chunks (chunks, layers, ...)."""
        copies = None if self._turn is None else self._turn.copies
        held = None if copies is None else copies[self._stack]
        return jax.tree.map(
            lambda x: x.reshape(self._chunks, x.shape[0] // self._chunks, *x.shape[1:]),
            (layers, held),
        )

    def chunk(self, cut: tuple[Tree, Tree], chunk: int) -> Tree:
        """Returns one chunk's weights in use."""
        mine, held = jax.tree.map(lambda x: x[chunk], cut)
        used, self._new[chunk], more = self._layers.gather_local(mine, held, self._key(chunk))
        self.squares += more
        return used

    def rest(self, params: Tree) -> Tree:
        """Returns the weights in use of what is in no layer."""
        copies = None if self._turn is None else self._turn.copies
        held = None if copies is None else {k: copies[k] for k in params}
        used, self._new_rest, more = self._outer.gather_local(params, held, self._key(REST))
        self.squares += more
        return used

    def scatter_chunk(self, grads: Tree, chunk: int) -> Tree:
        """Returns this rank's pieces of a chunk's summed gradients."""
        error = self._errors and self._errors["chunks"][chunk]
        found, error = self._layers.scatter_local(grads, self._key(chunk), self._step(), error)
        if self._errors:
            self._errors["chunks"][chunk] = error
        return found

    def scatter_rest(self, grads: Tree) -> Tree:
        """Returns this rank's pieces of the summed gradients of what is in no layer."""
        error = self._errors and self._errors["rest"]
        found, error = self._outer.scatter_local(grads, self._key(REST), self._step(), error)
        if self._errors:
            self._errors["rest"] = error
        return found

    def errors(self) -> Tree:
        """Returns the errors that the moves left, as TrainState.errors holds them."""
        return lead(self._errors)

    def errors_of(self, params: Tree) -> Tree:
        """Returns the first errors of this device. params: its pieces of the masters."""
        cut, _ = self.cut(params[self._stack])
        chunks = [jax.tree.map(lambda x, c=c: x[c], cut) for c in range(self._chunks)]
        rest = {k: x for k, x in params.items() if k != self._stack}
        return {
            "chunks": [self._layers.errors_local(chunk) for chunk in chunks],
            "rest": self._outer.errors_local(rest),
        }

    def copies(self) -> Tree:
        """Returns the copies that the moves made, as TrainState.copies holds them."""
        if self._turn is None or self._turn.copies is None:
            return None
        chunks = [self._new[c] for c in range(self._chunks)]
        return self._new_rest | {self._stack: jax.tree.map(lambda *x: jnp.concatenate(x), *chunks)}

    def _key(self, number: int) -> Array | None:
        return None if self._turn is None else jax.random.fold_in(self._turn.key, number)

    def _step(self) -> Array | None:
        return None if self._turn is None else self._turn.step
