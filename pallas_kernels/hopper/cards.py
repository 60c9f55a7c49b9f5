"""Shared memory, registers, SMs and rates of GPUs, in one place for all kernels.

Sources: CUDA C programming guide, technical specifications of compute capabilities 8.0, 9.0, 10.0;
datasheets of A100 80 GB SXM, H100 SXM5, H200 and DGX B200.
"""

import jax

# What XLA's GPU compiler must know of a chip: name, compute capability, SMs, shared memory of an SM
# and of a block, L2, clock in GHz, HBM bytes, HBM bytes a second. (B200's clock and L2 are second
# hand.)
CHIPS = {
    "a100": ("A100-SXM4-80GB", 8, 108, 167936, 166912, 41943040, 1.41, 85e9, 2.039e12),
    "h100": ("H100 80GB HBM3", 9, 132, 233472, 232448, 52428800, 1.98, 84942979072, 3.35232e12),
    "h200": ("H200", 9, 132, 233472, 232448, 52428800, 1.98, 150.1e9, 4.8e12),
    "h800": ("H800", 9, 132, 233472, 232448, 52428800, 1.98, 84942979072, 3.35232e12),
    "b200": ("B200", 10, 148, 233472, 232448, 132644864, 1.965, 191.5e9, 7.7e12),
}
SMS, SHARED_BYTES = CHIPS["h100"][2], CHIPS["h100"][4]  # of all Hopper GPUs above; of a block
RESERVED_BYTES = 1024  # (measured, deviceless: barriers and their alignment)
ALIGNMENT = 1024  # of a buffer with a 128-byte swizzle
WARPGROUP = 128  # threads
ROWS = 64  # of a wgmma instruction
REGISTERS = 255  # that a thread can name
# Registers of a thread once a producer has handed its own over, by compute warpgroups: 65536 of an
# SM, 40 (or 24) kept by the producer, in steps of 8 (FlashAttention-3 section 3.1).
COMPUTE_REGISTERS = {1: 240, 2: 232, 3: 160}
# What one SM may expect (0.8 of H200's datasheet; L2 second hand, in doubt), and elements that it
# finishes in a second, without and with an activation (counted: of that, 2 special functions an
# element, 16 a clock; clock: H100's datasheet).
SM_FLOPS, SM_L2_BYTES = 0.8 * 989.5e12 / SMS, 5.5e12 / SMS
SM_EPILOGUE = (32 * 1.755e9, 8 * 1.755e9)


def resident_blocks() -> int:
    """Returns the thread blocks that run at one time, one an SM, on the mesh that is in use.

    A kernel whose blocks wait for each other would wait for ever with more.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return min(SMS, device.num_cores or SMS) if device else SMS
