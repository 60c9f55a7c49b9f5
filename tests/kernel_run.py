"""Runs kernels of pallas_kernels as they are written: all ranks, blocks and warpgroups together.

Inside `Gpu.patched`, the modules of pallas_kernels have an emulated GPU (kernel_threads.py) behind
the names jnp, lax, pl and plgpu: a kernel's calls are collected, one for each rank, and `Gpu.run`
carries out their bodies. Peers are the real ones, and so are the engine, the relays and the
epilogues. Layouts, swizzles, registers and alignment are not emulated.

A mutant changes what one call in the source does: tests/kernel_calls.py.
"""

import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax import lax

from pallas_kernels.hopper import peers
from tests.kernel_calls import Call, Calls
from tests.kernel_memory import GENERIC, GLOBAL, SHARED, Fault, Lost, Memory, Ref
from tests.kernel_threads import PRODUCTS, READ, STORED, Barrier, Block, Flags, Machine, Thread

ALIGNMENT = 1024  # of a buffer in shared memory


class _Accumulator:
    def __init__(self, gpu, shape):
        self.gpu, self.value = gpu, np.zeros(shape, np.float32)

    def __getitem__(self, _):
        self.gpu.wgmma_wait(0)
        return self.value.copy()


class _Barriers:
    """The barriers of one name: barriers.at[i]."""

    def __init__(self, all_of_them):
        self.all_of_them = all_of_them

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        if not 0 <= index < len(self.all_of_them):
            raise Fault(f"barrier {index} of {len(self.all_of_them)}")
        return self.all_of_them[int(index)]


class Gpu:
    """An emulated GPU for each rank.

    axis: of the mesh, on which the ranks are. slow: a rank that hardly runs. mutant: a call that
    does something else.
    """

    def __init__(
        self, seed: int, *, axis: str = "x", slow: int | None = None, mutant: Call | None = None
    ):
        """Has no kernels yet."""
        self.machine, self.axis, self.slow = Machine(seed), axis, slow
        # Whether loads may race with stores, and then bring NaN.
        self.lenient = False
        self.calls = Calls(self, mutant)
        self.arrays: list[list[Memory]] = []  # of each rank
        self.flags: dict[tuple[int, int], Flags] = {}
        self.bodies: list[tuple[Thread, Callable[[], None]]] = []

    def run(self, *kernels: Callable[[], Any]) -> list[Any]:
        """Calls a kernel on each rank; returns what they return, when all have ended.

        Raises: Fault, or what a kernel raises.
        """
        with self.patched():
            results = [kernel() for kernel in kernels]
            with np.errstate(all="ignore"):
                self.machine.run(self.bodies)
        return results

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The modules of pallas_kernels run on this GPU inside."""
        real = {"lax": lax, "pl": pl, "plgpu": plgpu, "jnp": jax.numpy}
        fake = {"lax": _lax(self), "pl": _pl(self), "plgpu": _plgpu(self), "jnp": _Numbers()}
        with contextlib.ExitStack() as stack:
            for name in [name for name in sys.modules if name.startswith("pallas_kernels.")]:
                module = sys.modules[name]
                for key in real:
                    if getattr(module, key, None) is real[key]:
                        stack.enter_context(mock.patch.object(module, key, fake[key]))
            stack.enter_context(
                mock.patch.object(peers, "fence", self.calls.watched("fence", self.fence))
            )
            for kind in (peers.Peers, peers.RemotePeer, peers.VirtualPeer):
                for key in ("signal", "wait", "own", "mine", "peer"):
                    if key in vars(kind):
                        method = self.calls.watched(key, vars(kind)[key])
                        stack.enter_context(mock.patch.object(kind, key, method))
            yield

    # ---- kernels

    def kernel(
        self,
        body: Callable[..., None],
        *,
        out_type: Any,
        scratch_types: dict[str, Any],
        grid: tuple[int],
        grid_names: tuple[str],
        **options: Any,
    ) -> Callable[..., Any]:
        """As plgpu.kernel: a call allocates, and returns results that `run` fills in."""
        (clusters,), (grid_name,) = grid, grid_names
        (size,), threads = options.get("cluster", (1,)), options.get("num_threads", 1)

        def call(*inputs: Any) -> Any:
            rank = len(self.arrays)
            outputs = out_type if isinstance(out_type, list) else [out_type]
            arrays = [np.asarray(x) for x in inputs]
            made = [np.full(out.shape, np.nan, out.dtype) for out in outputs]
            self.arrays.append(
                [
                    Memory(self.machine, data, rank, i, i < len(arrays))
                    for i, data in enumerate((*arrays, *made))
                ]
            )
            self.machine.ranks[rank] = [*self.arrays[rank]]
            pace = self.machine.weight(1) * (1e-4 if rank == self.slow else 1)
            refs = [memory.ref() for memory in self.arrays[rank]]
            for cluster in range(clusters):
                blocks: list[Block] = []
                for number in range(size):
                    block, scratch = self._block(scratch_types, rank, number, size)
                    blocks.append(block)
                    block.cluster = blocks
                    for warpgroup in range(threads):
                        axes = {
                            self.axis: rank,
                            grid_name: cluster,
                            "cluster": number,
                            "warpgroup": warpgroup,
                        }
                        weight = pace * self.machine.weight(1)
                        thread = Thread(axes, block, self.machine.component(4), weight)
                        block.threads.append(thread)
                        self.bodies.append((thread, functools.partial(body, *refs, **scratch)))
            return made if isinstance(out_type, list) else made[0]

        return call

    def _block(
        self, types: dict[str, Any], rank: int, number: int, size: int
    ) -> tuple[Block, dict[str, Any]]:
        sized: list[tuple[Any, int]] = []  # shared memory, and where it begins

        def place(tree: Any, first: int) -> int:
            """Returns where the memory of a tree ends."""
            if isinstance(tree, tuple | list):
                for leaf in tree:
                    first = place(leaf, first)
                return first
            if isinstance(tree, plgpu.RefUnion):
                return max(place(group, first) for group in tree.refs)
            if isinstance(tree, plgpu.Barrier | plgpu.ClusterBarrier):
                return first
            sized.append((tree, first))
            width = math.prod(tree.shape) * np.dtype(tree.dtype).itemsize
            return -(-(first + width) // ALIGNMENT) * ALIGNMENT

        # Of nothing but bits that are set, every type of float is NaN.
        total = place(list(types.values()), 0)
        memory = Memory(self.machine, np.full(total, 255, np.uint8), rank, -1, False)
        block = Block(memory, rank, number)
        where = iter(sized)

        def make(tree: Any) -> Any:
            if isinstance(tree, tuple | list):
                return tuple(make(leaf) for leaf in tree)
            if isinstance(tree, plgpu.RefUnion):
                return make(tuple(tree.refs))
            if isinstance(tree, plgpu.Barrier | plgpu.ClusterBarrier):
                need = tree.num_arrivals * (size if isinstance(tree, plgpu.ClusterBarrier) else 1)
                shared = isinstance(tree, plgpu.ClusterBarrier)
                count = math.prod(tree.num_barriers)
                made: list[Barrier] = []
                made += [Barrier(self.machine, block, need, shared, made) for _ in range(count)]
                return _Barriers(made) if tree.num_barriers else made[0]
            leaf, first = next(where)
            assert leaf is tree
            dtype = np.dtype(tree.dtype)
            data = memory.data[first : first + math.prod(tree.shape) * dtype.itemsize]
            data = data.view(dtype).reshape(tree.shape)
            shape = data.shape
            return Ref(memory, data, [0] * len(shape), shape, range(len(shape)), first)

        return block, {name: make(tree) for name, tree in types.items()}

    # ---- what others see

    def fence(self):
        """What flags have announced TMA sees from now on."""
        clock = self.machine.me.clock
        np.maximum(clock[GLOBAL], clock[GENERIC], out=clock[GLOBAL])

    def commit_smem(self):
        """What this warpgroup stored in shared memory TMA and wgmma see from now on."""
        clock = self.machine.me.clock
        np.maximum(clock[SHARED], clock[GENERIC], out=clock[SHARED])

    def get_global(self, shape: tuple[int]) -> Flags:
        """The flags of this thread's rank, of which it may ask for several."""
        thread = self.machine.me
        thread.flags += 1
        return self._flags(thread.rank, thread.flags, shape[0])

    def _flags(self, rank: int, number: int, count: int) -> Flags:
        if (rank, number) not in self.flags:
            self.flags[rank, number] = Flags(self.machine, count, rank, number)
            self.machine.ranks[rank].append(self.flags[rank, number])
        return self.flags[rank, number]

    def semaphore_signal(self, flag: tuple[Flags, int], device_id: Any = None):
        """Adds 1 to a flag of this rank, or of another one's."""
        self.machine.switch(signal=True)
        thread, (flags, index) = self.machine.me, flag
        self.calls.applied |= thread.late is not None
        if device_id is not None:
            flags = self._flags(int(device_id[self.axis]), flags.number, flags.shape[0])
        flags.signal(index, thread)

    def semaphore_wait(self, flag: tuple[Flags, int], *, value: int, decrement: bool):
        """Until a flag of this rank is at least `value`."""
        assert not decrement
        self.machine.switch()
        flags, index = flag
        flags.wait(index, int(value), self.machine.me)

    def remote_ref(self, ref: Ref, device_id: Any) -> Ref:
        """The same array of another rank."""
        return ref.on(self.arrays[int(device_id[self.axis])][ref.memory.number])

    def barrier_wait(self, barrier: Barrier):
        """Until the next phase is over."""
        self.machine.switch()
        barrier.wait(self.machine.me)

    def barrier_arrive(self, barrier: Barrier):
        """Arrives, in all blocks of the cluster if they share the barrier."""
        self.machine.switch()
        thread = self.machine.me
        clock = thread.released()
        for block in thread.block.cluster if barrier.shared else [thread.block]:
            barrier.on(block).arrive(clock, thread)

    # ---- copies and products

    def copy_gmem_to_smem(
        self,
        source: Ref,
        target: Ref,
        barrier: Barrier,
        *,
        collective_axes: Any = None,
        oob_mode: Any = None,
    ):
        """Starts a load; of a whole cluster, each block's brings its share of the rows to all."""
        self.machine.switch()
        if oob_mode is plgpu.OOBFillMode.PROMISE_IN_BOUNDS and not source.within:
            raise Fault(f"a copy from past the end of {source.memory.name}: {source.box}")
        assert source.shape == target.shape, (source.shape, target.shape)
        thread = self.machine.me
        blocks = thread.block.cluster if collective_axes else [thread.block]
        rows = target.shape[0] // len(blocks)
        block_rows = slice(0, None) if len(blocks) == 1 else _rows(thread.block.number * rows, rows)
        knows = thread.released()
        read = barrier.component, barrier.phase + 1
        lost: Lost = [] if self.lenient else None
        source.memory.read(source.box, read, knows, GLOBAL, thread.rank, lost)
        barrier.arrive(knows, thread, tx=_bytes(target))
        for block in blocks:
            to, theirs = target.on(block.memory).part(block_rows), barrier.on(block)
            written = theirs.component, theirs.phase + 1
            block.memory.write(to.box, written, knows, SHARED, thread.rank)

            def arrive(to=to, theirs=theirs):
                to.write(source.part(block_rows).read(lost))
                theirs.came(_bytes(to))

            self.machine.later(arrive)

    def copy_smem_to_gmem(self, source: Ref, target: Ref, *, commit_group: bool = True):
        """Starts a store: it reads shared memory at some time, and later writes."""
        self.machine.switch()
        machine, thread = self.machine, self.machine.me
        assert source.shape == target.shape, (source.shape, target.shape)
        clock, rank = thread.clock, thread.rank
        source.memory.read(source.box, thread.event(READ), clock, SHARED, rank, None)
        target.memory.write(target.box, thread.event(STORED), clock, GLOBAL, rank)
        reading, writing = machine.begin(READ), machine.begin(STORED)

        def read():
            value = source.read()
            machine.finish(reading)

            def write():
                target.write(value)
                machine.finish(writing)

            machine.later(write)

        machine.later(read)
        if commit_group:
            self.commit_smem_to_gmem_group()

    def commit_smem_to_gmem_group(self):
        """The stores since the last one are a group, which may be empty."""
        self.machine.me.started[STORED] += 1

    def wait_smem_to_gmem(self, n: int, wait_read_only: bool = False):
        """Until all but the last n groups are stored, or have only been read."""
        self.machine.switch()
        last = self.machine.me.started[STORED] - n
        self.machine.wait_groups(READ if wait_read_only else STORED, last)

    def wgmma(self, accumulator: _Accumulator, left: Ref, right: Ref):
        """Starts a product, which reads shared memory until it is waited for."""
        machine, thread = self.machine, self.machine.me
        thread.started[PRODUCTS] += 1
        for ref in (left, right):
            event = thread.event(PRODUCTS)
            ref.memory.read(ref.box, event, thread.clock, SHARED, thread.rank, None)
        running = machine.begin(PRODUCTS)

        def multiply():
            accumulator.value += left.read().astype(np.float32) @ right.read().astype(np.float32)
            machine.finish(running)

        machine.later(multiply)

    def wgmma_wait(self, n: int):
        """Until all but the last n products are over."""
        self.machine.switch()
        self.machine.wait_groups(PRODUCTS, self.machine.me.started[PRODUCTS] - n)


def _bytes(ref: Ref) -> int:
    return math.prod(ref.shape) * ref.dtype.itemsize


def _rows(first: Any, count: Any) -> slice:
    return slice(first, first + count)


def _named(real: types.ModuleType, **fakes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**(vars(real) | fakes))


def _plgpu(gpu: Gpu) -> types.SimpleNamespace:
    watched = (
        "barrier_wait",
        "barrier_arrive",
        "copy_gmem_to_smem",
        "copy_smem_to_gmem",
        "commit_smem",
        "commit_smem_to_gmem_group",
        "wait_smem_to_gmem",
        "wgmma",
        "wgmma_wait",
    )
    calls = {name: gpu.calls.watched(name, getattr(gpu, name)) for name in watched}
    return _named(
        plgpu,
        **calls,
        kernel=gpu.kernel,
        remote_ref=gpu.remote_ref,
        load=lambda ref, **_: gpu.machine.load(ref),
        layout_cast=lambda x, _: x,
        set_max_registers=lambda *_, **__: None,
        ACC=lambda shape: shape,
        SemaphoreType=types.SimpleNamespace(REGULAR=lambda shape: shape),
    )


def _pl(gpu: Gpu) -> types.SimpleNamespace:
    def loop(lower, upper, init_carry=None):
        def over(body):
            carry = init_carry
            for i in range(int(lower), int(upper)):
                carried = () if init_carry is None else (carry,)
                carry = body(np.int32(i), *carried)
            return carry

        return over

    def multiple_of(x, n):
        if x % n:
            raise Fault(f"{x} is no multiple of {n}")
        return x

    return _named(
        pl,
        loop=loop,
        multiple_of=multiple_of,
        ds=_rows,
        when=lambda condition: lambda do: do() if condition else None,
        run_scoped=lambda do, *shapes: do(*(_Accumulator(gpu, shape) for shape in shapes)),
        get_global=gpu.get_global,
        semaphore_signal=gpu.semaphore_signal,
        semaphore_wait=gpu.semaphore_wait,
    )


def _lax(gpu: Gpu) -> types.SimpleNamespace:
    def div(a, b):
        quotient = abs(int(a)) // abs(int(b))
        return np.int32(quotient if (a < 0) == (b < 0) else -quotient)

    def fori_loop(lower, upper, body, value):
        for i in range(int(lower), int(upper)):
            value = body(np.int32(i), value)
        return value

    def broadcast_in_dim(x, shape, dimensions):
        return np.broadcast_to(
            np.expand_dims(x, [d for d in range(len(shape)) if d not in dimensions]), shape
        )

    return _named(
        lax,
        div=div,
        rem=lambda a, b: np.int32(a - div(a, b) * b),
        fori_loop=fori_loop,
        axis_index=lambda axis: np.int32(gpu.machine.me.axes[axis]),
        broadcast_in_dim=broadcast_in_dim,
    )


class _Numbers:
    """NumPy under the names of jax.numpy; numbers are int32, and overflow is an error."""

    def where(self, condition, a, b):
        return np.where(condition, a, b)[()]

    def __getattr__(self, name):
        return getattr(np, name)
