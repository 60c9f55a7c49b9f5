"""Strides, runs, spans and the code that runs an instruction, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from megajax.cost.program import records

M, K, N = 24, 40, 56


def text_of(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().as_text()


def only(function, *shapes):
    [record] = records(text_of(function, *shapes))
    return record


@pytest.mark.parametrize(
    ("order", "stride", "run"),
    [
        ((1, 0, 2), 4 * N * K, 4 * N),  # whole rows of N move together
        ((2, 0, 1), 4 * N, 4),
        ((0, 2, 1), 4 * N, 4),
        ((2, 1, 0), 4 * N * K, 4),
    ],
)
def test_a_transposition_jumps_over_the_dimensions_that_it_moves(order, stride, run):
    record = only(lambda x: x.transpose(order) * 2, (M, K, N))
    assert (record["stride"], record["run"]) == (stride, run)
    assert (record["span"], record["custom"]) == (4 * M * K * N, 0)


def test_nothing_jumps_where_the_order_in_memory_stays():
    for run in (lambda x: x * 2, lambda x: x.reshape(M * K, N) + 1, lambda x: x[3:8] * 2):
        record = only(run, (M, K, N))
        assert (record["stride"], record["run"], record["jumps"]) == (0, 0, 0)


def test_dimensions_of_one_element_do_not_count():
    record = only(lambda x: x.transpose(2, 1, 0) * 2, (M, 1, N))
    assert (record["stride"], record["run"]) == (4 * N, 4)


DOT = """HloModule d, is_scheduled=true

ENTRY %main (x: f32[X], w: f32[W]) -> f32[24,56] {
  %x = f32[X]{1,0} parameter(0)
  %w = f32[W]{1,0} parameter(1)
  ROOT %dot = f32[24,56]{1,0} dot(%x, %w), lhs_contracting_dims={A}, rhs_contracting_dims={B}
}
"""


@pytest.mark.parametrize(
    ("left", "right", "stride", "stride_right"),
    [
        ((M, K), (K, N), 0, 0),
        ((K, M), (K, N), 4 * M, 0),
        ((M, K), (N, K), 0, 4 * K),
        ((K, M), (N, K), 4 * M, 4 * K),
    ],
)
def test_each_operand_of_a_product_has_a_stride_of_its_own(left, right, stride, stride_right):
    text = DOT.replace("X", ",".join(map(str, left))).replace("W", ",".join(map(str, right)))
    text = text.replace("A}", f"{left.index(K)}}}").replace("B}", f"{right.index(K)}}}")
    [record] = records(text)
    assert record.kind == "product" and record["transposed"] == (stride > 0) + (stride_right > 0)
    assert (record["stride"], record["stride_right"], record["run"]) == (stride, stride_right, 0)


def test_the_span_is_that_of_whole_arrays():
    record = only(lambda x: x[3:8] * 2, (M, N))
    assert (record["bytes_read"], record["span"]) == (4 * 5 * N, 4 * M * N)


def test_the_dilations_of_a_convolution_multiply():
    def run(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            ((1, 1), (1, 1)),
            lhs_dilation=(2, 1),
            rhs_dilation=(3, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    dilated = [r["dilated"] for r in records(text_of(run, (2, 16, 16, 8), (3, 3, 8, 16)))]
    assert max(dilated) == 2 * 3 * 2
    assert only(lambda x: x * 2, (M, N))["dilated"] == 0


def test_a_custom_fusion_and_the_parts_for_threads_are_told():
    plain = text_of(lambda x: jnp.tanh(x) * x, (4096, 1024))
    loop = "kind=kLoop"
    assert loop in plain
    config = ', backend_config={"outer_dimension_partitions":["2","3"]}'
    bare = plain.replace(', backend_config={"outer_dimension_partitions":["2"]}', "")
    lines = [line + config if loop in line else line for line in bare.splitlines()]
    [record] = records("\n".join(lines))
    assert (record["custom"], record["parts"]) == (0, 6)
    [one_thread] = records(bare)
    assert (
        one_thread["parts"] == 1 and one_thread.hash == record.hash
    )  # one structure with any threads
    [record] = records("\n".join(lines).replace(loop, "kind=kCustom"))
    assert record["custom"] == 1


SUM = """HloModule s, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (x: f32[24,56], z: f32[]) -> f32[56] {
  %x = f32[24,56]{1,0} parameter(0)
  %z = f32[] parameter(1)
  ROOT %reduce = f32[56]{0} reduce(%x, %z), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[24,56], z: f32[]) -> f32[56] {
  %x.1 = f32[24,56]{1,0} parameter(0)
  %z.1 = f32[] parameter(1)
  ROOT %fusion = f32[56]{0} fusion(%x.1, %z.1), kind=KIND, calls=%inner
}
"""


@pytest.mark.parametrize(("kind", "jumps"), [("kLoop", M * N), ("kCustom", 0)])
def test_a_library_s_sum_over_columns_does_not_jump(kind, jumps):
    [record] = records(SUM.replace("KIND", kind))
    assert (record.kind, record["jumps"]) == ("reduction", jumps)


@pytest.mark.parametrize(("axis", "rows", "width", "jumps"), [(0, N, M, M * N), (1, M, N, 0)])
def test_a_sort_has_the_rows_and_the_width_of_the_sorted_dimension(axis, rows, width, jumps):
    record = only(lambda x: jnp.sort(x, axis), (M, N))
    assert (record["rows"], record["width"], record["jumps"]) == (rows, width, jumps)
