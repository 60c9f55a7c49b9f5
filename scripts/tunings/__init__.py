"""What tune.py measures of each folder of kernels: `tunings()` of the module of its name."""

from . import attention, collective, expert, gemm, grouped, norm, paged, quantize, tile_sparse

FOLDERS = {
    "attention": attention,
    "collective": collective,
    "expert": expert,
    "gemm": gemm,
    "grouped": grouped,
    "norm": norm,
    "paged": paged,
    "quantize": quantize,
    "tile_sparse": tile_sparse,
}
