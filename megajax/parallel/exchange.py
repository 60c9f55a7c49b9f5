"""The exchange of data parallelism for a tree of parameters: weights in, their gradients out.

Masters rest cut along the model width over the axes that share their gradient (the rules of
`sharding.rules('full')`), weights in use are whole over them. Between the two lies a codec: what
moves the weights in use after an update is gathered in its `weights`, gradients are summed into
pieces by its `inside` and `between` (parallel/zero.py). parallel/buckets.py says what travels in
one message.

Sources: SDP4Bit (arXiv 2410.15526, section 3), ZeRO++ (arXiv 2306.10209, section 3), and for the
errors that a codec with feedback keeps LoCo (arXiv 2407.04480, section 3).

Legend: W ranks that share a gradient, C elements of a rank's piece of a bucket, L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from megajax.core.tree import Tree
from megajax.parallel.buckets import Bucket, is_quantized
from megajax.parallel.exchange_local import LocalExchange, fold, lead, led
from megajax.parallel.order import hold, never

Array = jax.Array


class Exchange(LocalExchange):
    """The exchange of one tree.

    Errors, of a codec with feedback, are a tuple with a zero.Errors a bucket, stacked like its
    leaves; None: the codec has none. Outside of a shard_map they have one more dimension in front,
    of all devices of the mesh, each of which has errors of its own.
    """

    # ---- under an Explicit mesh

    def copies(self, params: Tree) -> Tree:
        """Returns the first copies: the masters in the type of compute, None for leaves that are in
        no bucket. None: no copies are kept."""
        if not self.wire.difference:
            return None
        copies, values = [None] * len(self.words), self._values(params)
        for i in (i for bucket in self.buckets for i in bucket.leaves):
            copies[i] = reshard(values[i].astype(self.dtype), self.used.stored(*self.words[i]))
        return self._tree(copies)

    def copied_specs(self) -> Tree:
        """Returns how `copies` lie, None where there is none."""
        specs = [self.used.stored(*words) for words in self.words]
        return self._tree([None if i in self.exact else s for i, s in enumerate(specs)])

    def errors(self, params: Tree) -> Any:
        """Returns the first errors: zeros."""
        if not self.keeps_errors:
            return None
        specs = self._tree([self.masters.stored(*words) for words in self.words])
        return self._everywhere(
            lambda params: lead(self.errors_local(params)), (specs,), self.devices
        )(params)

    @property
    def devices(self) -> P:
        """How an array lies whose first dimension counts all devices."""
        return P(self.masters.mesh.axis_names)

    def fetch(
        self, params: Tree, copies: Tree, key: Array, step: Array
    ) -> tuple[Tree, Tree, Array]:
        """`gather`, whose gradient is `scatter`. step: int32, of the gradients."""

        @jax.custom_vjp
        def through(params: Tree, copies: Tree, key: Array, step: Array) -> tuple:
            return self.gather(params, copies, key)

        def forward(params: Tree, copies: Tree, key: Array, step: Array) -> tuple:
            return through(params, copies, key, step), (key, step)

        def backward(saved: tuple, grads: tuple) -> tuple:
            return self.scatter(grads[0], *saved)[0], None, None, None

        through.defvjp(forward, backward)
        weights, new, squares = through(params, copies, key, step)
        return weights, *lax.stop_gradient((new, squares))

    def gather(self, params: Tree, copies: Tree, key: Array) -> tuple[Tree, Tree, Array]:
        """Returns (the weights in use, the new copies, squares (devices, 2): each device's part of
        the sum of what the weights still lack of the masters, and of these).

        params: the masters. copies: as `copies` gave them or the last step did.
        """
        masters = self._values(params)
        old = self._values(copies) if self.wire.difference else []
        weights, new = list(masters), list(old)
        squares, turn = self.squares(), None
        for i in self.exact:
            w = masters[i].astype(self.dtype) if is_quantized(self.words[i]) else masters[i]
            weights[i] = reshard(w, self._whole(i))
        for number, bucket in enumerate(self.buckets):
            mine = [masters[i] for i in bucket.leaves]
            held = [old[i] for i in bucket.leaves] if old else None
            (moved, two), turn = self._in_turn(
                functools.partial(self.gather_bucket, bucket),
                (self._specs(bucket, self.masters), held and self._specs(bucket, self.used), P()),
                (self._specs(bucket, self.used), self.devices),
            )(turn, mine, held, fold(key, number))
            squares += two
            for i, x in zip(bucket.leaves, moved, strict=True):
                weights[i] = reshard(x.astype(self.dtype), self._whole(i))
                if old:
                    new[i] = x
        specs = [self._whole(i) for i in range(len(weights))]
        weights = self._after(turn, weights, specs)
        return self._tree(weights), self._tree(new) if old else None, squares

    def scatter(self, grads: Tree, key: Array, step: Array, errors: Any = None) -> tuple[Tree, Any]:
        """Returns (the gradients of the masters, float32, cut as these; the new errors).

        grads: of the weights in use, partial sums on each rank where `gather` says so. errors: as
        `errors` gave them or the last step did; None: nothing is fed back.
        """
        values = self._values(grads)
        specs = [self.masters.stored(*words) for words in self.words]
        live = [i for i in range(len(values)) if i not in self.frozen]
        turn = self._turn([values[i] for i in live], [self._sums(i) for i in live])
        found: list[Any] = [None] * len(values)
        after = []
        for i in self.exact_gradients:
            found[i] = reshard(values[i], specs[i])
        for number, bucket in enumerate(self.buckets):
            error = None if errors is None else errors[number]
            (pieces, error), turn = self._in_turn(
                functools.partial(self._scatter_led, bucket),
                (self._partial(bucket), P(), P(), self.devices),
                (self._specs(bucket, self.masters), self.devices),
            )(turn, [values[i] for i in bucket.leaves], fold(key, number), step, error)
            after.append(error)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        ordered = self._after(turn, [found[i] for i in live], [specs[i] for i in live])
        for i, x in zip(live, ordered, strict=True):
            found[i] = x
        return self._tree(found), None if errors is None else tuple(after)

    def squares(self) -> Array:
        """Returns the zeros that the squares of `gather` are added to."""
        return reshard(jnp.zeros((self.masters.mesh.size, 2)), self.devices)

    # ---- one layer, in two halves, for who has work to put beside them

    def send(self, grads: Tree, key: Array, sums: Any = None, index: Any = None) -> dict:
        """Returns what `receive` needs: the first half of `scatter`, of leaves that are not
        stacked. grads: as of `scatter`. sums: of `summed`, of which `index` is added; None: none.
        """
        values, exact = self._values(grads), []
        for number, i in enumerate(self.exact_gradients):
            found = reshard(values[i], self.masters.stored(*self.words[i]))
            if sums is not None:
                more = lax.dynamic_index_in_dim(sums["exact"][number], index, keepdims=False)
                found = more + found.astype(more.dtype)
            exact.append(found)
        sent: dict[str, Any] = {"exact": exact}
        for number, bucket in enumerate(self.buckets):
            more = None if sums is None else sums[str(number)]
            sent[str(number)] = self._everywhere(
                functools.partial(self._send_added, bucket),
                (self._partial(bucket), P(), self.devices, P()),
                self.devices,
            )([values[i] for i in bucket.leaves], fold(key, number), more, index)
        return sent

    def summed(self, sums: Tree) -> dict:
        """Returns stacked partial sums as `send` adds them: leaves that are in no bucket are small,
        and summed over the ranks here."""
        values = self._values(sums)
        found: dict[str, Any] = {
            "exact": [
                reshard(values[i], _stacked(self.masters.stored(*self.words[i])))
                for i in self.exact_gradients
            ]
        }
        # Loops and custom_vjp of jax 0.11.2 take partial sums, and XLA adds them up before: as
        # arrays with a dimension of devices they stay what each rank has.
        for number, bucket in enumerate(self.buckets):
            specs = [_stacked(spec) for spec in self._partial(bucket)]
            found[str(number)] = self._everywhere(lead, (specs,), self.devices)(
                [values[i] for i in bucket.leaves]
            )
        return found

    def _send_added(
        self, bucket: Bucket, grads: list[Array], key: Array, sums: Any, index: Any
    ) -> tuple:
        if sums is not None:
            grads = [
                lax.dynamic_index_in_dim(s, index, keepdims=False) + g.astype(s.dtype)
                for s, g in zip(led(sums), grads, strict=True)
            ]
        return self.send_bucket(bucket, grads, key)

    def leave(self, params: Tree, used: Tree, sums: Tree, key: Array, step: Array) -> Tree:
        """Returns the weights in use, whose gradient is `scatter` of it and of sums.

        sums: of earlier micro-batches, float32, partial sums as gradients of `used` are; None where
        a leaf has no gradient.
        """

        @jax.custom_vjp
        def through(params: Tree) -> Tree:
            return used

        def backward(_: None, grads: Tree) -> tuple:
            added = jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, self.trained(grads))
            return (self.scatter(added, key, step)[0],)

        through.defvjp(lambda params: (used, None), backward)
        return through(params)

    def receive(self, sent: dict, key: Array, like: Tree) -> Tree:
        """Returns what `scatter` does. key: as of `send`. like: the masters."""
        masters = self._values(like)
        found: list[Any] = [None] * len(masters)
        for i, x in zip(self.exact_gradients, sent["exact"], strict=True):
            found[i] = x
        for number, bucket in enumerate(self.buckets):
            shapes = [masters[i] for i in bucket.leaves]
            pieces = self._everywhere(
                functools.partial(self.receive_bucket, bucket),
                (self.devices, P(), self._specs(bucket, self.masters)),
                self._specs(bucket, self.masters),
            )(sent[str(number)], fold(key, number), shapes)
            for i, x in zip(bucket.leaves, pieces, strict=True):
                found[i] = x
        return self._tree(found)

    def in_use(self, params: Tree, copies: Tree) -> Tree:
        """Returns the weights in use of copies that a `gather` gave; what is in no bucket comes
        from the masters."""
        masters, held = self._values(params), self._values(copies)
        for i in range(len(masters)):
            x = masters[i] if i in self.exact else held[i]
            masters[i] = reshard(
                x.astype(self.dtype) if is_quantized(self.words[i]) else x, self._whole(i)
            )
        return self._tree(masters)

    def _partial(self, bucket: Bucket) -> list[P]:
        """How gradients of weights in use lie: partial sums."""
        return [self._sums(i) for i in bucket.leaves]

    def _sums(self, index: int) -> P:
        whole = self._whole(index)
        return P(*whole.partitions, unreduced=whole.reduced)

    # ---- order on emulated devices (parallel/order.py): a turn is `never` of each device, or None

    def _in_turn(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (turn, *args) -> (what `local` returns, the turn of what comes after it)."""
        if not self.order.emulated:
            call = self._everywhere(local, in_specs, out_specs)
            return lambda _, *args: (call(*args), None)

        def held(turn: Array | None, *args: Any) -> tuple[Any, Array]:
            found = local(*(args if turn is None else hold(args, turn[0])))
            return found, never(found)[None]

        return self._everywhere(held, (self.devices, *in_specs), (out_specs, self.devices))

    def _turn(self, values: list, specs: list[P]) -> Array | None:
        """Returns the turn of what comes after all values."""
        if not self.order.emulated:
            return None
        return self._everywhere(lambda x: never(x)[None], (specs,), self.devices)(values)

    def _after(self, turn: Array | None, values: list, specs: list[P]) -> list:
        """Returns the values in a turn."""
        if turn is None:
            return values
        plain = [P(*spec.partitions) for spec in specs]
        held = self._everywhere(
            lambda turn, values: hold(values, turn[0]), (self.devices, plain), plain
        )(turn, [reshard(x, spec) for x, spec in zip(values, plain, strict=True)])
        return [reshard(x, spec) for x, spec in zip(held, specs, strict=True)]

    def _everywhere(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        # The checker does not see that what was gathered is equal on all ranks.
        return jax.shard_map(
            local,
            mesh=self.masters.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )


def _stacked(spec: P) -> P:
    """How a stack of layers lies, given how one does."""
    return P(None, *spec.partitions, unreduced=spec.unreduced, reduced=spec.reduced)
