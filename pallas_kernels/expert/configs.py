"""Every tile of the expert kernels that is shipped: its deviceless compile.

All tiles that `fusions.candidates` can give, for eight replicas with remote memory; the largest,
whose registers are nearly all taken, with every epilogue, on an axis of a mesh and on two as one,
and as what a single GPU runs: virtual ranks and the ghost peer.
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
from pallas_kernels.expert import tables
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.gemm_combine import gemm_combine
from pallas_kernels.expert.product import ExpertFusion, height
from pallas_kernels.expert.tables import Tables
from pallas_kernels.hopper import FILES, FUSED
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.fused import fitted
from pallas_kernels.hopper.peers import GhostPeer, Peers, RemotePeer, VirtualPeer
from pallas_kernels.hopper.tiles import BLOCKS, Tile

LARGEST, *SMALLER = (f"{m}x{n}" for m, n in BLOCKS)
WIDE = ("128x128", "64x256", "64x128")  # of a combine: columns in whole vectors of 128
DISPATCHES = ("", " alone", " axis", " joint", " gelu", " several", " turned")
COMBINES = ("", " alone", " axis", " joint", " narrow", " turned pairs", " ten choices")
CONFIGS = (
    *(f"dispatch {LARGEST}{words}" for words in DISPATCHES),
    *(f"dispatch {block}" for block in SMALLER),
    *(f"combine {LARGEST}{words}" for words in COMBINES),
    *(f"combine {block}" for block in WIDE),
    *(
        f"{kind} {LARGEST} {peer}"
        for peer in ("virtual", "ghost")
        for kind in ("dispatch", "combine")
    ),
)
FOLDER = pathlib.Path(__file__).parent
TOKENS, EXPERTS, K, N, CHUNK = 256, 4, 1024, 1536, 64


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns (function, its abstract arguments on H100s, the fusion) of a configuration.

    'axis': one of a mesh of 2 x 4; 'joint': both of it, experts over 2, their columns over 4, three
    choices of a token; 'alone': without a cluster; 'narrow': bf16 answers cross ranks. 'turned': w
    is stored (N, K); 'pairs': two products are added.
    """
    kind, *words = name.split()
    ranks = 4 if "axis" in words else 8
    devices, peers = np.array(aot.devices(1, 8)), _peers(words, ranks)
    if isinstance(peers, RemotePeer):
        mesh = Mesh(devices.reshape(-1, 4 if "joint" in words else ranks), ("other", "x"))
    else:
        mesh = Mesh(devices[:1].reshape(1, 1), ("other", "x"))
    sums = "float32" if kind == "combine" and "narrow" not in words else "bfloat16"
    m, n = map(int, words[0].split("x"))
    cluster = 1 if "alone" in words else 2
    tile = fitted(Tile(m, n, 64, 6, m // 64, cluster), sums)
    fusion, C = ExpertFusion(tile, 2 if "virtual" in words else 4, CHUNK), peers.copies
    gelu: Any = "gelu" if "gelu" in words else None
    choices = 10 if "ten" in words else 3 * 4 if "joint" in words else 2
    rows = ranks * TOKENS * choices
    turned = "turned" in words

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def integers(*shape: int) -> Any:
        return array(*shape, dtype=jnp.int32)

    entries = tables.FLAGS + 2 * ranks if kind == "dispatch" else tables.NEAR
    jobs = integers(C, rows // CHUNK + ranks, tables.PAIRS + 2 * CHUNK)
    work = Tables(integers(C, rows // 64 + EXPERTS, entries), jobs, integers(C, 5))
    w = array(C, EXPERTS, *((N, K) if turned else (K, N)))
    static = {"peers": peers, "fusion": fusion, "spec": Spec(gelu, sums), "turned": turned}
    if kind == "dispatch":
        args = (array(C, TOKENS, K), (w,) * (1 + ("several" in words)), work)
        static |= {"rows": rows, "flags": rows // CHUNK}
        run = functools.partial(dispatch_gemm, **static)
    else:
        pairs = 1 + ("pairs" in words)
        hs = (array(C, height(rows, fusion.tile), K),) * pairs
        chosen = C, TOKENS, choices
        args = (hs, (w,) * pairs, work, integers(*chosen), array(*chosen, dtype=jnp.float32))
        run = functools.partial(gemm_combine, **static)
    spec = PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return mapped, args, dataclasses.asdict(fusion)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    kernel = "dispatch_gemm.py" if name.startswith("dispatch") else "gemm_combine.py"
    files = (kernel, "product.py", "rows.py", "tables.py")
    return *(FOLDER / file for file in files), *FUSED, *FILES


def _peers(words: list[str], ranks: int) -> Peers:
    if "virtual" in words:
        return VirtualPeer(ranks)
    if "ghost" in words:
        return GhostPeer(ranks, 3, bytes_per_s=1e11, latency_ns=2000)
    return RemotePeer(ranks, ("other", "x") if "joint" in words else "x")
