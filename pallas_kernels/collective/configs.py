"""Every tile of the fused kernels that is shipped: its deviceless compile.

All tiles that `fusions.candidates` can give, for eight replicas with remote memory; the largest,
whose registers are nearly all taken, with every epilogue, on an axis of a mesh, and as what a
single GPU runs: virtual ranks and the ghost peer.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.collective.all_gather_gemm import all_gather, all_gather_gemm
from pallas_kernels.collective.gemm_all_reduce import gemm_all_reduce
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.hopper import FILES, FUSED
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.fused import Fusion, fitted
from pallas_kernels.hopper.peers import GhostPeer, Peers, RemotePeer, VirtualPeer
from pallas_kernels.hopper.tiles import BLOCKS, Tile

LARGEST, *SMALLER = (f"{m}x{n}" for m, n in BLOCKS)
WIDE = ("128x128", "64x256", "64x128")  # of the all-reduce: columns in whole vectors of 128
GATHERS = ("", " alone", " axis", " bias gelu", " several kept", " turned")
SCATTERS = ("", " alone", " axis", " bias residual", " narrow", " turned pairs")
CONFIGS = (
    *(f"gather {LARGEST}{words}" for words in GATHERS),
    *(f"gather {block}" for block in SMALLER),
    *(f"scatter {LARGEST}{words}" for words in SCATTERS),
    *(f"scatter {block}" for block in SMALLER),
    f"reduce {LARGEST} bias residual",
    *(f"reduce {block}" for block in WIDE),
    "reduce 64x128 axis",
    *(
        f"{kind} {block} {peer}"
        for peer in ("virtual", "ghost")
        for kind, block in (("gather", LARGEST), ("scatter", LARGEST), ("reduce", "64x128"))
    ),
    "copy ghost",
)
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns (function, its abstract arguments on H100s, the fusion) of a configuration.

    'axis': one of a mesh of 2 x 4; 'alone': without a cluster; 'narrow': bf16 sums cross ranks.
    'turned': w is stored (N, K); 'pairs': two products are added.
    """
    kind, *words = name.split()
    ranks = 4 if "axis" in words else 8
    devices, peers = np.array(aot.devices(1, 8)), _peers(words, ranks)
    if isinstance(peers, RemotePeer):
        mesh = Mesh(devices.reshape(-1, ranks), ("other", "x"))
    else:
        mesh = Mesh(devices[:1].reshape(1, 1), ("other", "x"))
    rows, K, N = 512, 1024, 1536
    sums = "float32" if kind in ("scatter", "reduce") and "narrow" not in words else "bfloat16"
    fusion = _fusion(kind, words, sums)
    gelu: Any = "gelu" if "gelu" in words else None
    static = {"peers": peers, "fusion": fusion, "rows": rows, "spec": Spec(gelu, sums)}

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    C = peers.copies
    turned = "turned" in words
    static |= {"turned": turned}
    w, bias = (
        array(C, *((N, K) if turned else (K, N))),
        array(C, N, dtype=jnp.float32) if "bias" in words else None,
    )
    residual = array(C, rows, N) if "residual" in words else None
    if kind == "copy":
        copy = functools.partial(all_gather, peers=peers, comm=fusion.comm, chunk=fusion.chunk)
        return _mapped(copy, mesh), (array(8, rows, N, dtype=jnp.float32),), {"comm": fusion.comm}
    if kind == "gather":
        static |= {"keep": "kept" in words}
        ws = (w, array(C, K, 2 * N)) if "several" in words else (w,)
        args = (array(peers.reached, rows, K), ws, bias)
        run = functools.partial(all_gather_gemm, **static)
    elif kind == "scatter":
        pairs = 1 + ("pairs" in words)
        args = ((array(C * ranks, rows, K),) * pairs, (w,) * pairs, bias, residual)
        run = functools.partial(gemm_reduce_scatter, **static)
    else:
        args = (array(C, rows, K), w, bias, residual)
        run = functools.partial(gemm_all_reduce, **static)
    return _mapped(run, mesh), args, dataclasses.asdict(fusion)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    kernels = {"scatter": "gemm_reduce_scatter.py", "reduce": "gemm_all_reduce.py"}
    kernel = kernels.get(name.split()[0], "all_gather_gemm.py")
    return FOLDER / kernel, *FUSED, *FILES


def _peers(words: list[str], ranks: int) -> Peers:
    if "virtual" in words:
        return VirtualPeer(ranks)
    if "ghost" in words:
        return GhostPeer(ranks, 3, bytes_per_s=1e11, latency_ns=2000)
    return RemotePeer(ranks, "x")


def _fusion(kind: str, words: list[str], sums: str) -> Fusion:
    if kind == "copy":
        return Fusion(Tile(64, 64, 64, 2, 1), 4, 128)
    m, n = map(int, words[0].split("x"))
    cluster = 1 if kind == "reduce" or "alone" in words else 2
    tile = fitted(Tile(m, n, 64, 6, m // 64, cluster), sums)
    comm = 0 if kind == "reduce" else 2 if "virtual" in words else 4
    return Fusion(tile, comm, 128)


def _mapped(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    spec = PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
