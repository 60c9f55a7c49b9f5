"""What tune.py measures of each folder of kernels: `tunings()` of the module of its name."""

from . import attention, collective, expert, gemm, grouped, norm, quantize, tile_sparse

FOLDERS = {
    "attention": attention,
    "collective": collective,
    "expert": expert,
    "gemm": gemm,
    "grouped": grouped,
    "norm": norm,
    "quantize": quantize,
    "tile_sparse": tile_sparse,
}
