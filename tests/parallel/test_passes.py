"""Kernels between the messages of the exchange: the bits of plain JAX, and why one does not run."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.core import config
from megajax.core.errors import UserError
from megajax.parallel import zero
from megajax.parallel.exchange import refuse_kernels
from megajax.parallel.wire import kernels_line
from megajax.parallel.zero import Passes
from megajax.quant import Format, codec
from megajax.training.config import Config
from pallas_kernels import interpret
from tests.zero_run import bits, buffers, sharded

TILE, WEIGHTS = 4096, 8192  # what kernels take whole of gradients and of weights
H100, CPU = (types.SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H100 80GB HBM3", "cpu"))


def run(nodes, ranks, name, implementation, bad=None):
    """One exchange on a mesh: (pieces, the new copy). bad: put into the last rank's gradients."""
    used, n = codec(name), nodes * ranks * WEIGHTS
    x, main, copy = buffers(nodes, ranks, n)
    x = x[:, :, : n // 2 - 5]  # pieces of a tile; the last one has an end
    if bad is not None:
        x[-1, -1, 7] = bad

    def step(x, main, copy):
        options = {"key": jax.random.key(3), "implementation": implementation}
        return zero.reduce_scatter(x, used, **options), zero.gather_difference(
            main, copy, used, **options
        )

    cut = P("node", "data")
    return jax.tree.map(bits, sharded(step, nodes, ranks, (cut, P()))(x, main, copy))


@pytest.mark.parametrize(
    ("nodes", "ranks", "name", "bad"),
    [
        (2, 2, "sdp4bit", None),
        pytest.param(2, 2, "sdp4bit", np.inf, marks=pytest.mark.slow),
        pytest.param(1, 2, "sdp4bit", np.nan, marks=pytest.mark.slow),
        pytest.param(2, 1, "sdp4bit", None, marks=pytest.mark.slow),
        pytest.param(1, 2, "zeropp", None, marks=pytest.mark.slow),
        pytest.param(2, 2, "zeropp", None, marks=pytest.mark.slow),  # its relay is plain JAX
    ],
)
def test_kernels_and_plain_jax_have_the_same_bits(nodes, ranks, name, bad):
    plain = run(nodes, ranks, name, "reference", bad)
    with interpret.checked():
        kernel = run(nodes, ranks, name, "interpret", bad)
    np.testing.assert_array_equal(kernel[0], plain[0])
    np.testing.assert_array_equal(kernel[1], plain[1])
    pieces = plain[0].view(np.float32)
    assert np.isnan(pieces).all() if bad is not None else np.isfinite(pieces).all()


def passes(name="sdp4bit", n=8 * WEIGHTS, nodes=2, ranks=4, **options):
    used = codec(name) if isinstance(name, str) else name
    return Passes(n, used, nodes, ranks, **options)


def reasons(one):
    return {name: why for name in one.names if (why := "; ".join(one.why_not(name)))}


def test_every_pass_of_sdp4bit_has_a_kernel():
    assert passes().names == ("send", "relay", "receive", "subtract", "add")
    assert passes(ranks=1).names == passes(nodes=1).names == ("send", "receive", "subtract", "add")
    assert passes(nodes=1, ranks=1).names == ()
    for sizes in ({}, {"nodes": 1}, {"ranks": 1}):
        assert not reasons(passes(**sizes))


def leveled(**changes):
    """sdp4bit with other levels, by name."""
    base = codec("sdp4bit")
    levels = {"weights": base.weights, "inside": base.inside, "between": base.between} | changes
    return dataclasses.replace(base, levels=tuple(levels.values()))


@pytest.mark.parametrize(
    ("one", "name", "why"),
    [
        (passes("zeropp"), "relay", "needs codes of 8 bits, found 4"),
        (passes("loco"), "add", "bfloat16 is no code of a group"),
        (passes("loco"), "send", "the kernels do not keep errors for the next step"),
        (passes("fp8"), "receive", "needs codes of 4 or 8 bits, found e4m3"),
        (passes(n=8 * 1024), "send",
         "needs pieces of a multiple of 4096 elements (32 groups of 128), found 1024"),
        (passes(n=8 * TILE), "add",
         "needs pieces of a multiple of 8192 elements (4 groups of 2048), found 4096"),
        (passes(leveled(between=codec("none"))), "receive", "float32 is no code of a group"),
        (passes(leveled(inside=dataclasses.replace(codec("int8"), format=Format(8, 256)))), "relay",
         "needs groups of one size on both levels, found 128 and 256"),
        (passes(leveled(inside=dataclasses.replace(codec("int8"), format=Format(8, None)))), "send",
         "needs groups, found one scale for all of a row"),
        (passes(dataclasses.replace(codec("sdp4bit"), hadamard=64)), "send",
         "needs a transform of 32, found 64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_why_a_pass_is_plain(one, name, why):
    assert reasons(one)[name].startswith(why)
    assert one.why_plain(name)[0].startswith(why.partition(";")[0])
    exact = passes(leveled(weights=codec("none")))
    assert exact.names == ("send", "relay", "receive")  # weights travel as they are


def test_rows_are_filled_up_where_that_costs_little():
    """To whole tiles where these add at most 1/256; to blocks of 32 elsewhere. Exact codecs not."""
    one = passes(n=8 * (TILE - 7))
    assert (one.piece, one.row) == (TILE - 7, TILE) and one.fetched == one.piece
    assert passes(n=8 * (TILE - 40)).row == TILE - 32
    assert passes(n=8 * (2 * WEIGHTS - 60)).fetched == 2 * WEIGHTS
    assert passes("none", n=8 * (2 * WEIGHTS - 60)).fetched == 2 * WEIGHTS - 60
    assert passes("none", n=8 * (TILE - 7)).row == TILE - 7
    sent = zero.wire_bytes(8 * (2 * WEIGHTS - 60), codec("sdp4bit"), 2, 4)
    assert sent["weights"] == 8 * (WEIGHTS + 4 * 8)
    assert sent["inside"] == 4 * 4 * WEIGHTS * (1 + 4 / 128)


def test_the_start_names_what_runs_in_plain_jax():
    plain = {
        "blocks": {"send": [], "relay": [], "add": ["odd"]},
        "table": {"send": ["too small", "odd"], "relay": [], "add": ["odd"]},
    }
    assert kernels_line(plain) == (
        "wire: kernels run 3 of 6 passes; plain JAX: add of blocks, table (odd), send of table "
        "(too small; odd)"
    )
    assert kernels_line({"blocks": {"send": []}}) == "wire: kernels run 1 of 1 passes"


@pytest.mark.parametrize(
    ("flags", "device", "words"),
    [
        (("sdp4bit", "hopper"), CPU, r"found cpu; nearest: auto \(--wire.kernels\)"),
        (("fp8", "hopper"), H100, r"take nothing of --wire=fp8: .*e4m3.*kernels, --wire\)"),
        (("loco", "interpret"), CPU, "take nothing of --wire=loco: the kernels do not keep errors"),
        (("sdp4bit", "hopper"), H100, None),
        (("loco", "auto"), CPU, None),
    ],
)
def test_kernels_that_could_do_nothing_are_refused(flags, device, words):
    cfg = config.override(Config(), dict(zip(("wire", "exchange.kernels"), flags, strict=True)))
    if words is None:
        refuse_kernels(cfg, device)
        return
    with pytest.raises(UserError, match=words):
        refuse_kernels(cfg, device)
