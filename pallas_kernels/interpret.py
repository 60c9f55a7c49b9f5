"""Running a Mosaic GPU kernel in Pallas' interpreter on a CPU, with race detection.

Blocks, warpgroups, shared memory, barriers, TMA and wgmma are simulated with vector clocks; missing
waits for wgmma, layouts, swizzles and unaligned offsets are not. Slow: tiny shapes only.

With two cores and one jax CPU device it hangs, with 8 devices not: a warpgroup that waits at a
barrier seems to hold a thread of XLA's pool, which has one for each core or device.
"""

import contextlib
import os
from collections.abc import Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state

THREADS = 4  # three warpgroups, and the one that drives them


def params() -> plgpu.InterpretGPUParams:
    """Returns the interpreter's settings: races are looked for, unwritten memory is NaN.

    Raises: RuntimeError where it would hang.
    """
    if max(os.cpu_count() or 1, jax.device_count("cpu")) < THREADS:
        raise RuntimeError(
            f"the interpreter needs {THREADS} threads, found {os.cpu_count()} cores and "
            f"{jax.device_count('cpu')} CPU devices; set jax_num_cpu_devices={THREADS} or more"
        )
    return plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Interpreted kernels run inside: a data race raises RuntimeError at the end.

    The interpreter's state is made new before and after, for it does not survive an error.
    """
    state.reset_gpu_interpret_mode_state()
    try:
        yield
        if state.get_races().races_found:
            raise RuntimeError("the interpreter found a data race")
    finally:
        state.reset_gpu_interpret_mode_state()
