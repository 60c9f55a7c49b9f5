"""Records that are made by hand: features, trees and bounds."""

import dataclasses

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost import record
from megajax.cost.record import FEATURES, LEAF, LEAF_FEATURES, OPCODES


def leaf(column, tree):
    return tree.leaves[:, len(OPCODES) + LEAF_FEATURES.index(column)].tolist()


def opcodes(tree):
    return [OPCODES[i] for i in tree.leaves[:, : len(OPCODES)].argmax(1)]


def test_a_product_counts_two_mnk_and_its_three_arrays():
    made = record.product(1, 128, 256, 512, "bfloat16")
    assert made.kind == "product" and made.dtype == "bfloat16" and made.executions == 1
    assert made.flops == made["flops"] == 2 * 128 * 256 * 512
    assert made["bytes_read"] == 2 * (128 * 512 + 512 * 256)
    assert made["bytes_written"] == 2 * 128 * 256
    assert made.nbytes == made["bytes_read"] + made["bytes_written"]
    shape = [made[name] for name in ("batch", "m", "n", "k", "itemsize", "operands")]
    assert shape == [1, 128, 256, 512, 2, 2]
    assert made.features.shape == (len(FEATURES),) and made.features.dtype == np.float64


def test_a_bias_is_one_addition_an_element():
    plain = record.product(3, 4, 5, 6, "float32", transposed=1)
    biased = record.product(3, 4, 5, 6, "float32", transposed=1, bias=True)
    assert plain.kind == biased.kind == "batched_product" and plain["transposed"] == 1
    assert biased.flops - plain.flops == 3 * 4 * 5
    assert biased.nbytes - plain.nbytes == 4 * 3 * 5
    assert opcodes(biased.tree) == ["dot", "add"]
    assert sum(leaf("bytes_written", biased.tree)) == 4 * 3 * 4 * 5
    assert plain.hash != biased.hash


def test_softmax_reduces_its_rows_twice():
    made = record.rowwise(
        ["reduce", "add", "exponential", "reduce", "divide"], 64, 100, 1, "float32"
    )
    assert made.kind == "reduction" and made["reduces_minor"] == 1
    assert made.flops == 2 * 64 * 100 + 2 * 64 * 99 and made["transcendentals"] == 64 * 100
    assert made.nbytes == 2 * 4 * 64 * 100 and made["reduced"] == 2 * 64 * 100
    assert (made["rows"], made["width"]) == (64, 100)
    assert sum(leaf("flops", made.tree)) == made.flops


def test_an_addition_reads_two_arrays():
    made = record.rowwise(["add"], 8, 16, 2, "float16")
    assert made.kind == "fusion" and made["reduced"] == 0 and made.flops == 8 * 16
    assert made.nbytes == 3 * 2 * 8 * 16


def test_positions_count_the_ways_back_to_parents():
    """root a ^ (region b ^ c ^) ^ d: CDMPP's serialisation, whose -1 are the marks ^."""
    a, b, c, d = ({"opcode": "add"} for _ in range(4))
    grown = record.tree([a, [b, c], d])
    #  0     1  2  3       4  5  6  7  8  9
    #  root  a  ^  region  b  ^  c  ^  ^  d
    assert grown.positions.tolist() == [1, 4, 6, 9]
    assert leaf("depth", grown) == [1, 2, 2, 1]
    assert grown.leaves.shape == (4, LEAF)
    assert record.tree([a, b, c, d]).positions.tolist() == [1, 3, 5, 7]


def test_an_empty_tree_has_no_leaves():
    grown = record.tree([])
    assert grown.leaves.shape == (0, LEAF) and grown.positions.shape == (0,)


def test_deep_trees_need_no_recursion():
    node = [{"opcode": "add"}]
    for _ in range(5000):
        node = [node]
    assert record.tree(node).positions.tolist() == [5001]


def test_the_hash_knows_shapes_and_no_names():
    one = record.product(1, 8, 8, 8, "float32")
    again = record.product(1, 8, 8, 8, "float32")
    assert one.hash == again.hash and len(one.hash) == 16
    others = {
        record.product(1, 8, 8, 16, "float32").hash,
        record.product(1, 8, 8, 8, "bfloat16").hash,
        record.product(2, 8, 8, 8, "float32").hash,
        record.product(1, 8, 8, 8, "float32", transposed=2).hash,
    }
    assert len(others | {one.hash}) == 5
    named = record.record("custom", [], {"flops": 1}, name="a")
    assert named.hash == record.record("custom", [], {"flops": 1}, name="b", executions=3).hash
    assert named.hash != record.record("custom", [], {"flops": 1}, structure="x").hash


def test_the_floor_is_the_larger_of_arithmetic_and_traffic():
    card = CARDS["H100"]
    product = record.product(1, 4096, 4096, 4096, "bfloat16")
    assert product.floor_s(card) == product.flops / 989.5e12
    added = record.rowwise(["add"], 1024, 1024, 2, "float32")
    assert added.floor_s(card) == added.nbytes / 3.35e12


def test_the_floor_of_a_type_without_a_peak_is_no_higher_than_physics():
    """float64 is never faster than float32; float8 on an A100 runs as another narrow type."""
    card = CARDS["A100"]
    for dtype, peak in (("float64", 19.5e12), ("float8", 624e12)):
        made = record.product(1, 4096, 4096, 4096, dtype)
        assert made.floor_s(card) == made.flops / peak
    narrow = dataclasses.replace(card, flops={"bfloat16": 1e12})
    assert record.product(1, 512, 512, 512, "float64").floor_s(narrow) == 2 * 512**3 / 1e12


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: record.product(1, 2, 3, 4, "f32"), "dtype=f32 must be one of float32"),
        (lambda: record.record("matmul", [], {}), "kind=matmul must be one of product"),
        (lambda: record.record("custom", [], {"flop": 1}), "feature=flop must be one of flops"),
        (lambda: record.record("custom", [], {"flops": -1}), "flops=-1 of a custom"),
        (lambda: record.record("custom", [], {"flops": float("nan")}), "finite"),
        (lambda: record.rowwise(["sum"], 1, 1, 1, "float32"), "opcode=sum must be one of add"),
        (lambda: record.tree([{"opcode": "add", "x": 1}]), "feature of a leaf=x"),
    ],
)
def test_what_cannot_be_a_record_is_explained(call, match):
    with pytest.raises(UserError, match=match):
        call()
