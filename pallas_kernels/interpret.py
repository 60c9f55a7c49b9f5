"""Runs Mosaic GPU kernels in Pallas' interpreter on a CPU, with race detection.

Blocks, warpgroups, shared memory, barriers and TMA are simulated with vector clocks. `checked` adds
what the interpreter lacks: the reads of wgmma, which go on until they are waited for, and the races
of all kernels of a program. Layouts, swizzles and unaligned offsets are not simulated. Slow: tiny
shapes only.

In a shard_map, the kernels of all devices run together, as jax 0.11.2 has it, with two differences:
no races are looked for, because on devices other than the first it reports some that are none (a
copy after the commit of what it reads), and a device waits for the others before it looks whether
all barriers are gone.

With two cores and one jax CPU device it hangs, with 8 devices not: a warpgroup that waits at a
barrier seems to hold a thread of XLA's pool, which has one for each core or device.
"""

import collections
import contextlib
import functools
import math
import os
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src import core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state

THREADS = 4  # three warpgroups, and the one that drives them
COPIES = 512  # places in a vector clock that copies share: a race with one COPIES later is not seen
PRODUCTS = 1 << 20  # a wait for so many stores, and n more, stands for a wait for n products


def params() -> plgpu.InterpretGPUParams:
    """Returns the interpreter's settings: unwritten memory is NaN, and on one device races are
    looked for.

    Raises: RuntimeError where it would hang.
    """
    if max(os.cpu_count() or 1, jax.device_count("cpu")) < THREADS:
        raise RuntimeError(
            f"the interpreter needs {THREADS} threads, found {os.cpu_count()} cores and "
            f"{jax.device_count('cpu')} CPU devices; set jax_num_cpu_devices={THREADS} or more"
        )
    _look_together()
    alone = math.prod(core.get_axis_env().axis_sizes.values()) == 1
    return plgpu.InterpretGPUParams(
        detect_races=alone, uninitialized_memory="nan", num_tma_threads_per_device=COPIES
    )


@functools.cache
def _look_together() -> None:
    """Lets the first device that has ended wait for the others before it looks for barriers."""
    memory = shared_memory.GPUSharedMemory
    look = memory.assert_no_barriers_allocated

    def wait_and_look(self: Any) -> None:
        self.barrier.wait()
        look(self)

    memory.assert_no_barriers_allocated = wait_and_look


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Interpreted kernels run inside: a data race in any of them raises RuntimeError at the end.

    The interpreter's state is made new before and after, for it does not survive an error.
    Raises: RuntimeError also where no kernel was interpreted.
    """
    state.reset_gpu_interpret_mode_state()
    try:
        with _all_races() as races:
            yield
        if not races:
            raise RuntimeError("no kernel was interpreted")
        if any(kernel.races_found for kernel in races):
            raise RuntimeError("the interpreter found a data race")
    finally:
        state.reset_gpu_interpret_mode_state()


class _Products:
    """The reads of wgmma that a warpgroup has not waited for, as clocks of their own.

    They are reads by the asynchronous proxy: what a warpgroup wrote must be committed before, and
    who overwrites what they read must come after the wait. Their place in a vector clock is that of
    the warpgroup's first warp, which does not run where whole warpgroups do.
    """

    def __init__(self):
        self.pending = collections.defaultdict(collections.deque)
        self.count = collections.Counter()

    def start(self, thread, operands) -> None:
        """Notes the reads of one product. operands: (key, transforms) of each."""
        memory, races = gpu_callbacks._get_shared_memory(), state.get_races()
        clock = memory.incr_clock(thread)
        place = memory.thread_to_vc_position(thread.warp(0))
        self.count[thread] += 1
        for part in (clock.generic_clock, clock.async_smem_clock):
            part.clock[place] = self.count[thread]
        for key, transforms in operands:
            access = memory.access(key, transforms)
            races.check_read(thread, clock.async_smem_clock.copy(), key, access)
        self.pending[thread].append(clock)

    def wait(self, thread, most: int) -> None:
        """The warpgroup knows that all but the last `most` products are over."""
        memory = gpu_callbacks._get_shared_memory()
        memory.incr_clock(thread)
        while len(self.pending[thread]) > most:
            with memory.lock:
                memory.clocks[thread].update(self.pending[thread].popleft())


@contextlib.contextmanager
def _all_races() -> Iterator[list[Any]]:
    """Yields the races of each kernel that is interpreted inside, with those of its products.

    The interpreter of jax 0.11.2 forgets a kernel's races when the next one starts, and does not
    look for those of wgmma.
    """
    races, products = [], _Products()
    make, multiply = gpu_callbacks.GPURaceDetectionState, gpu_callbacks.wgmma
    read, wait = gpu_callbacks.wgmma_accumulator_deref, gpu_callbacks.wait_smem_to_gmem

    def make_noted(**options: Any):
        products.__init__()
        races.append(make(**options))
        return races[-1]

    @functools.wraps(multiply)
    def multiply_noted(**options: Any):
        bare = gpu_callbacks._remove_noop_transforms
        operands = [
            (
                gpu_callbacks.HostAllocationKey.from_array(options[f"{x}_allocation_key_as_array"]),
                jax.tree.map(int, bare(options[f"{x}_transforms"])),
            )
            for x in "ab"
        ]
        products.start(options["thread"], operands)
        return multiply(**options)

    @functools.wraps(read)
    def read_after_wait(**options: Any):
        products.wait(options["thread"], options["wait_n"] or 0)
        return read(**options)

    @functools.wraps(wait)
    def wait_for_either(**options: Any):
        if options["n"] < PRODUCTS:
            return wait(**options)
        products.wait(options["thread"], options["n"] - PRODUCTS)
        return options["token"]

    # The interpreter drops `wgmma_wait`, so it travels as a wait for a large number of stores.
    def wait_for_products(*, n: int):
        return primitives.wait_smem_to_gmem_p.bind(n=PRODUCTS + n, wait_read_only=False)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (gpu_callbacks, "GPURaceDetectionState", make_noted),
            (gpu_callbacks, "wgmma", multiply_noted),
            (gpu_callbacks, "wgmma_accumulator_deref", read_after_wait),
            (gpu_callbacks, "wait_smem_to_gmem", wait_for_either),
            (primitives, "wgmma_wait_p", types.SimpleNamespace(bind=wait_for_products)),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield races
