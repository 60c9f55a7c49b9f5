"""What tune.py measures of each folder of kernels: `tunings()` of the module of its name."""

from . import (
    attention,
    collective,
    expert,
    gemm,
    grouped,
    norm,
    paged,
    quant_gemm,
    quantize,
    tile_sparse,
)

FOLDERS = {
    "attention": attention,
    "collective": collective,
    "expert": expert,
    "gemm": gemm,
    "grouped": grouped,
    "norm": norm,
    "paged": paged,
    "quant_gemm": quant_gemm,
    "quantize": quantize,
    "tile_sparse": tile_sparse,
}
