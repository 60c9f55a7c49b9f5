"""How a fused kernel reaches the other ranks: one interface with four implementations.

A kernel is written once against `Peers`; when it is traced, the caller picks the implementation:

- RemotePeer: a rank is a GPU of a mesh axis, or of several as one; peers' arrays and flags are
  remote memory (NVLink).
- VirtualPeer: several ranks on one GPU, each on its share of the thread blocks, all resident at
  once; every array has the pages of all ranks. Shows that the signalling is right for every rank.
- GhostPeer: one rank of full size beside ghosts that hold what it holds and do what it does; copies
  are held back to a link's rate and latency by the GPU's clock, and what it sends comes back to it
  as theirs would. For times: tiles, waves, communication blocks and memory are the real ones.
- ReadyPeer: one rank whose peers' rows are there already; nothing travels and nobody waits. It
  measures the product alone, and the interpreter of Mosaic GPU, which has no flags, can run it.

An array that is reached has pages first: (pages of a rank, rows, columns); VirtualPeer's has those
of rank 0, then of rank 1, ...

Legend: R ranks. Papers: Flux (arXiv 2406.06858) section 4.
"""

import dataclasses
from typing import Any, override

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils

Axis = str | tuple[str, ...]  # several: one index over all of them, the last one fastest
Ref = Any  # a reference in a kernel, or a part of one
Int = Any  # traced int32


def clock() -> Int:
    """Returns the GPU's clock in ns, modulo 2^32: differences below 2^31 ns are right."""

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    )
    def read(_):
        low = utils.globaltimer("low")
        return fragmented_array.FragmentedArray.splat(low, (), is_signed=True)

    return read()


def spin(began: Int, ns: Int) -> None:
    """Holds a warpgroup until `ns` after `began`."""
    lax.while_loop(lambda _: clock() - began < ns, lambda x: x, jnp.int32(0))


def fence() -> None:
    """Makes TMA see what other threads and GPUs stored before they raised a flag."""

    @plgpu.inline_mgpu()
    def emit(_):
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    emit()


@dataclasses.dataclass(frozen=True)
class Peers:
    """One rank of `ranks` with arrays of its own; each subclass overrides what differs."""

    ranks: int

    @property
    def copies(self) -> int:
        """How many ranks' pages an array has."""
        return 1

    @property
    def reached(self) -> int:
        """How many ranks' pages an array has that the other ranks reach."""
        return self.copies

    @property
    def ready(self) -> bool:
        """Whether peers' rows are read where they are, without flags."""
        return False

    def flags(self, count: int) -> Ref:
        """`count` flags of each rank."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((self.copies * count,)))

    def rank(self) -> Int:
        """Returns the rank that this thread block works for."""
        raise NotImplementedError

    def cluster(self) -> Int:
        """Returns the number of this cluster of thread blocks among those of its rank."""
        return lax.axis_index("block")

    def private_page(self, ref: Ref, page: Int = 0) -> Ref:
        """Returns a page of this rank's array that no other rank reaches."""
        return ref.at[page]

    def shared_page(self, ref: Ref, page: Int = 0) -> Ref:
        """Returns a page of this rank's array that the other ranks reach."""
        return self.private_page(ref, page)

    def peer(self, ref: Ref, rank: Int, page: Int = 0) -> Ref:
        """Returns a page of another rank's array, which its `shared_page` is of."""
        return ref.at[rank * (ref.shape[0] // self.ranks) + page]

    def signal(self, flags: Ref, to: Int, index: Int) -> None:
        """Adds 1 to a flag of rank `to`; what this warpgroup stored before is seen with it."""
        pl.semaphore_signal(flags.at[index])

    def wait(self, flags: Ref, index: Int, value: Int) -> None:
        """Waits until a flag of this rank is at least `value`; TMA then sees the data behind it.

        Flags only count upwards, from 0 in each call.
        """
        pl.semaphore_wait(flags.at[index], value=value, decrement=False)
        fence()

    def now(self) -> Int:
        """Returns the time at which copies begin, for `pace`."""
        return jnp.int32(0)

    def pace(self, began: Int, moved: Int) -> None:
        """Waits until a link would have brought `moved` bytes since `began`."""


@dataclasses.dataclass(frozen=True)
class RemotePeer(Peers):
    """Ranks are the GPUs along a mesh axis, or several; runs inside a shard_map over them."""

    axis: Axis

    @override
    def rank(self) -> Int:
        return lax.axis_index(self.axis)

    @override
    def peer(self, ref: Ref, rank: Int, page: Int = 0) -> Ref:
        device: Any = {self.axis: rank}
        return plgpu.remote_ref(ref, device).at[page]

    @override
    def signal(self, flags: Ref, to: Int, index: Int) -> None:
        pl.semaphore_signal(flags.at[index], device_id={self.axis: to})


@dataclasses.dataclass(frozen=True)
class VirtualPeer(Peers):
    """Ranks share one GPU: cluster c of thread blocks works for rank c % ranks."""

    @property
    @override
    def copies(self) -> int:
        return self.ranks

    @override
    def rank(self) -> Int:
        return lax.rem(lax.axis_index("block"), jnp.int32(self.ranks))

    @override
    def cluster(self) -> Int:
        return lax.div(lax.axis_index("block"), jnp.int32(self.ranks))

    @override
    def private_page(self, ref: Ref, page: Int = 0) -> Ref:
        return self.peer(ref, self.rank(), page)

    @override
    def signal(self, flags: Ref, to: Int, index: Int) -> None:
        super().signal(flags, to, to * (flags.shape[0] // self.ranks) + index)

    @override
    def wait(self, flags: Ref, index: Int, value: Int) -> None:
        first = self.rank() * (flags.shape[0] // self.ranks)
        super().wait(flags, first + index, value)


@dataclasses.dataclass(frozen=True)
class GhostPeer(Peers):
    """One rank with a GPU of its own, whose peers hold what it holds and do what it does.

    So what goes to a peer is what comes from one: a copy from a peer's page is one from the own
    page, a copy to the page of this rank at a peer goes to the page of that peer here, and signals
    come back. Results are complete, those of ranks that are all alike.

    me: its rank. bytes_per_s: the rate of the emulated link for each communication block (a link's
    rate over the number of blocks); 0: as fast as memory is. latency_ns: that of a copy.
    """

    me: int
    bytes_per_s: float = 0.0
    latency_ns: int = 0

    @override
    def rank(self) -> Int:
        return jnp.int32(self.me)

    @override
    def peer(self, ref: Ref, rank: Int, page: Int = 0) -> Ref:
        return ref.at[rank if ref.shape[0] == self.ranks else 0]

    @override
    def now(self) -> Int:
        return clock()

    @override
    def pace(self, began: Int, moved: Int) -> None:
        if self.bytes_per_s:
            ns = moved.astype(jnp.float32) * (1e9 / self.bytes_per_s)
            spin(began, ns.astype(jnp.int32) + self.latency_ns)


@dataclasses.dataclass(frozen=True)
class ReadyPeer(Peers):
    """One rank without communication: all ranks' pages are there. me: its rank."""

    me: int

    @property
    @override
    def reached(self) -> int:
        return self.ranks

    @property
    @override
    def ready(self) -> bool:
        return True

    @override
    def flags(self, count: int) -> Ref:
        return None

    @override
    def rank(self) -> Int:
        return jnp.int32(self.me)

    @override
    def shared_page(self, ref: Ref, page: Int = 0) -> Ref:
        return self.peer(ref, self.me, page)

    @override
    def signal(self, flags: Ref, to: Int, index: Int) -> None:
        pass

    @override
    def wait(self, flags: Ref, index: Int, value: Int) -> None:
        pass
