"""The addresses that a fusion reads one after the other, against NumPy's arrays of indices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.cost.hlo import Module, parse
from megajax.cost.program_body import reads, region

M, K, N = 6, 10, 14
BY_CHANCE = M  # a loop may start at the address after the one where the last one ended


def fused(function, *shapes, by_library=False):
    """Returns how a fusion of all of a function's operations reads its parameters."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arrays).compiler_ir("hlo").as_hlo_text()
    text = re.sub(r"(\[[\d,]*\])\{[\d,]*\}", r"\1", text)  # arrays in the usual layout
    body = text[text.index("ENTRY ") + len("ENTRY ") :]
    parameters = re.findall(r"^.* = \S+ parameter\(\d+\)", body, re.M)
    names = [parse(line).name for line in parameters]
    shape = re.search(r"ROOT \S+ = (\S+) ", body)[1]
    inner = text[: text.index("ENTRY ")] + body
    call = ", ".join(f"%{name}" for name in names)
    lines = [line.strip().removeprefix("ROOT ") for line in parameters]
    root = (
        f"ROOT %fusion = {shape} fusion({call}), kind=kLoop, calls=%{body.split()[0].lstrip('%')}"
    )
    module = Module("\n".join([inner, "ENTRY %whole () -> f32[] {", *lines, root, "}", ""]))
    around = module.instructions("whole")
    return reads(region(module, around["fusion"], around), by_library)


def addresses(indices):
    """Returns (jumps, length of a run, distance of two runs) of the addresses in this order.

    An address that is read again at once, because a loop does not move it, is read once.
    """
    flat = np.ravel(indices)
    flat = flat[np.concatenate([[True], np.diff(flat) != 0])]
    ends = np.flatnonzero(np.diff(flat) != 1) + 1
    if not len(ends):
        return 0, len(flat), 0
    starts = np.concatenate([[0], ends])
    return len(starts), int(ends[0]), int(flat[starts[1]] - flat[starts[0]])


def last_axis(axes):
    """Returns the order of dimensions in which a sum over these axes reads its operand."""
    return [d for d in range(3) if d not in axes] + sorted(axes)


# Movements of an array, with an operation on its values (of indices: none) somewhere between.
CHAINS = {
    "transposed": lambda x, op: op(x.transpose(2, 0, 1)),
    "transposed behind another operation": lambda x, op: op(x).transpose(1, 0, 2),
    "two transpositions": lambda x, op: op(x.transpose(1, 0, 2)).transpose(0, 2, 1),
    "split and transposed": lambda x, op: op(x.reshape(M, K, 2, 7)).transpose(0, 2, 1, 3),
    "transposed and joined": lambda x, op: op(x.transpose(1, 0, 2).reshape(K, M * N)),
    "part": lambda x, op: op(x[1:4, 2:7]),
    "part of adjacent elements": lambda x, op: op(x)[:, :, 3:8],
    "every second one": lambda x, op: op(x[:, ::2]),
    "transposed part": lambda x, op: op(x[:, 1:4]).transpose(2, 1, 0),
    "nothing": lambda x, op: op(x.reshape(M * K, N)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_jumps_are_those_of_the_addresses_in_the_result_s_order(name):
    [read] = fused(lambda x: CHAINS[name](x, jnp.tanh), (M, K, N))
    where = CHAINS[name](np.arange(M * K * N).reshape(M, K, N), lambda x: x)
    jumps, run, stride = addresses(where)
    assert read.stride == 4 * stride and jumps <= read.jumps <= jumps + BY_CHANCE
    assert read.run == 4 * run or not jumps


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_a_sum_reads_what_it_adds_up_one_after_the_other(axes):
    [read] = fused(lambda x: x.sum(axes) * 2, (M, K, N))
    where = np.arange(M * K * N).reshape(M, K, N).transpose(last_axis(axes))
    jumps, run, stride = addresses(where)
    assert read.stride == 4 * stride and jumps <= read.jumps <= jumps + BY_CHANCE
    assert read.run == 4 * run or not jumps


def test_a_library_reads_what_it_adds_up_in_the_order_of_memory():
    for axes in ((0,), (0, 1), (2,)):
        [read] = fused(lambda x, axes=axes: x.sum(axes) * 2, (M, K, N), by_library=True)
        assert (read.jumps, read.reads) == (0, M * K * N)


def test_the_windows_of_a_sum_are_read_one_after_the_other():
    """XLA divides a sum over many elements into windows, which are sums of neighbours."""

    def run(x, window):
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") * 2

    for window in ((1, 1, 7), (1, 5, 1), (2, 5, 7)):
        [read] = fused(functools.partial(run, window=window), (M, K, N))
        parts = [n // w for n, w in zip((M, K, N), window, strict=True)]
        split = np.arange(M * K * N).reshape(
            [i for pair in zip(parts, window, strict=True) for i in pair]
        )
        jumps, run_, stride = addresses(split.transpose(0, 2, 4, 1, 3, 5))
        assert read.stride == 4 * stride and jumps <= read.jumps <= jumps + BY_CHANCE * K
        assert read.run == 4 * run_ or not jumps


def test_each_array_behind_a_transposition_jumps_and_others_do_not():
    nests = fused(lambda a, b, row, c: (a * b + row[None]).T + c, (M, N), (M, N), (N,), (N, M))
    assert sorted(read.jumps for read in nests) == [0, 0, M * N, M * N]
    assert sum(read.reads for read in nests) == 3 * M * N + N


def test_two_uses_of_one_array_are_two_reads():
    nests = fused(lambda a: a + a.T, (M, M))
    assert sorted(read.jumps for read in nests) == [0, M * M]


def test_a_lookup_jumps_from_row_to_row():
    places = jnp.asarray([3, 1, 4, 1, 5, 1, 2, 2])
    numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    nests = fused(lambda t: jax.lax.gather(t, places[:, None], numbers, (1, N)) * 2, (M, N))
    [read] = [read for read in nests if read.stride]
    assert (read.jumps, read.run, read.stride) == (len(places), 4 * N, 4 * N * M // 3)


def test_an_update_in_place_jumps_where_it_writes():
    def run(target, part):
        return jax.lax.dynamic_update_slice(target, part * 2, (0, 3))

    nests = fused(run, (M, N), (M, 2))
    assert sorted((read.jumps, read.run) for read in nests) == [(0, 4 * 2 * M), (M, 4 * 2)]


def test_a_part_of_a_concatenation_is_read_by_its_own_size():
    nests = fused(lambda a, b: jnp.concatenate([a.T, b], 1) * 2, (N, M), (M, 4))
    assert sorted(read.reads for read in nests) == [4 * M, N * M]
