"""Packed tokens, under the name by which the rest of the library knows them: see
pallas_kernels/packing."""

from pallas_kernels.packing.api import PackedTokens as PackedTokens
from pallas_kernels.packing.api import PackInfo as PackInfo
from pallas_kernels.packing.api import bucket as bucket
from pallas_kernels.packing.api import pack as pack
from pallas_kernels.packing.api import unpack as unpack
