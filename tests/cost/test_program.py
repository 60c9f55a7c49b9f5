"""Records of compiled programs: hand counts, loops, names and order, what launches nothing."""

import random
import re
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from megajax.cost.hlo import Module, collectives, parse
from megajax.cost.program import records
from megajax.cost.record import FEATURES, LEAF_FEATURES, OPCODES, PLACE
from tests.program_cases import PROGRAMS, compiled, scanned

SMALL = [p for p in PROGRAMS if "loop" not in p.name]


def total(launched, feature):
    return sum(r[feature] * r.executions for r in launched)


def text_of(function, *shapes, dtype=jnp.float32):
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().as_text()


def unnamed(launched):
    """What no name and no order may change, of each record; its place is the schedule's."""
    placeless = [name not in PLACE for name in FEATURES]
    return sorted(
        (
            r.hash,
            r.kind,
            r.dtype,
            r.executions,
            r.features[placeless].tobytes(),
            r.tree.leaves.tobytes(),
            r.tree.positions.tobytes(),
        )
        for r in launched
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_flops_and_bytes_are_those_of_the_hand_count(program):
    launched = records(compiled(program))
    assert sum(r.flops * r.executions for r in launched) == program.flops
    assert sum(r.nbytes * r.executions for r in launched) == program.nbytes
    assert total(launched, "transcendentals") == program.transcendentals
    if program.kinds:
        assert tuple(r.kind for r in launched) == program.kinds
    for one in launched:
        assert one.flops == one["flops"] and one.nbytes == one["bytes_read"] + one["bytes_written"]
        sums = dict(zip(LEAF_FEATURES, one.tree.leaves[:, len(OPCODES) :].sum(0), strict=True))
        for name in ("flops", "bytes_read", "bytes_written", "transcendentals"):
            assert sums[name] == one[name], name


def test_there_are_thirty_programs():
    assert len(PROGRAMS) >= 30 and len({p.name for p in PROGRAMS}) == len(PROGRAMS)


def test_a_product_has_its_shape():
    [plain], [turned] = (records(compiled(p)) for p in PROGRAMS[:2])
    for one, transposed in ((plain, 0), (turned, 1)):
        assert [one[f] for f in ("batch", "m", "n", "k")] == [1, 24, 56, 40]
        assert (one["rows"], one["width"], one["transposed"]) == (24, 56, transposed)
    assert plain.hash != turned.hash


def test_loops_scale_linearly():
    """A loop of 14 trips is one of 7 whose body runs twice as often, and adds nothing itself."""
    shapes = ((24, 40), (40, 40))
    seven, fourteen = (records(text_of(scanned(n), *shapes)) for n in (7, 14))
    assert [r.hash for r in seven] == [r.hash for r in fourteen]
    times = {(a.executions, b.executions) for a, b in zip(seven, fourteen, strict=True)}
    assert times == {(1, 1), (7, 14)}
    product = next(r for r in seven if r.kind == "product")
    assert product.flops == 2 * 24 * 40 * 40 and product.executions == 7


def test_a_loop_that_nobody_can_count_is_warned_of():
    def run(x):
        return lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, x)

    with pytest.warns(UserWarning, match="does not say how often"):
        launched = records(text_of(run, (8, 8)))
    assert {r.executions for r in launched} == {1}


def test_of_a_conditional_one_branch_is_launched():
    """The one that costs most where the program does not say which."""

    def run(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w + x)

    products = [r for r in records(text_of(run, (24, 40), (40, 40))) if r.kind == "product"]
    assert sum(r.flops for r in products) in (2 * 2 * 24 * 40 * 40, 2 * 2 * 24 * 40 * 40 + 24 * 40)


CHOICE = """HloModule choice, is_scheduled=true

%few (p: (f32[8,4])) -> f32[8,8] {
  %p = (f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=0
  ROOT %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%many (p.1: (f32[8,64])) -> f32[8,8] {
  %p.1 = (f32[8,64]{1,0}) parameter(0)
  %y = f32[8,64]{1,0} get-tuple-element(%p.1), index=0
  ROOT %e = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (a: f32[8,4], b: f32[8,64], i: s32[]) -> f32[8,8] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %ta = (f32[8,4]{1,0}) tuple(%a)
  %tb = (f32[8,64]{1,0}) tuple(%b)
  %c = CONSTANT
  ROOT %r = f32[8,8]{1,0} conditional(%c, BRANCHES
}
"""
INDEXED = "%ta, %tb), branch_computations={%few, %many}"
BOOLEAN = "%ta, %tb), true_computation=%few, false_computation=%many"


@pytest.mark.parametrize(
    ("constant", "branches", "k"),
    [
        ("s32[] constant(0)", INDEXED, 4),
        ("s32[] constant(1)", INDEXED, 64),
        ("s32[] constant(7)", INDEXED, 64),  # what is beyond takes the last one
        ("s32[] constant(-1)", INDEXED, 64),
        ("s32[] copy(%i)", INDEXED, 64),
        ("pred[] constant(true)", BOOLEAN, 4),
        ("pred[] constant(false)", BOOLEAN, 64),
    ],
)
def test_a_constant_chooses_its_branch(constant, branches, k):
    text = CHOICE.replace("CONSTANT", constant).replace("BRANCHES", branches)
    products = [r for r in records(text) if r.kind == "product"]
    assert [r.flops for r in products] == [2 * 8 * 8 * k]


def shuffled(text: str, seed: int) -> str:
    """The same module: other names for all instructions, independent lines in another order."""
    module, draw = Module(text), random.Random(seed)
    names = {
        name: f"v{draw.randrange(10**9)}.{i}"
        for i, name in enumerate(
            name for c in module.computations for name in module.instructions(c)
        )
    }
    blocks = []
    for block in re.split(r"(?<=\n\})\n", text):
        head, *lines = block.split("\n")
        start = next((i for i, line in enumerate(block.split("\n")) if line.endswith("{")), None)
        if start is None:
            blocks.append(block)
            continue
        lines = block.split("\n")
        body = [line for line in lines[start + 1 :] if parse(line)]
        blocks.append("\n".join([*lines[: start + 1], *_reordered(body, draw), "}"]))
    return re.sub(
        r"%([\w.\-]+)", lambda m: f"%{names.get(m[1], m[1])}", "\n".join(blocks)
    )  # computations keep their names: `calls=` and headers say them


def _reordered(lines, draw):
    """Lines in a random order in which operands come before what uses them; the root is last."""
    known = {one.name: line for line in lines if (one := parse(line))}
    waiting, placed, ordered = list(known), set(), []
    while waiting:
        ready = [
            n
            for n in waiting
            if all(o in placed or o not in known for o in parse(known[n]).operands)
            and (not parse(known[n]).is_root or len(waiting) == 1)
        ]
        name = draw.choice(ready)
        waiting.remove(name)
        placed.add(name)
        ordered.append(known[name])
    return ordered


def attention(x, w):
    q, k, v = (x @ w[i] for i in range(3))
    p = jax.nn.softmax(q @ k.T / 8.0, axis=-1)
    return jnp.tanh(p @ v) + x, p.sum()


def test_neither_names_nor_the_order_of_lines_matter():
    text = text_of(jax.grad(lambda w, x: attention(x, w)[0].sum()), (3, 32, 32), (16, 32))
    expected = unnamed(records(text))
    assert len(expected) > 10
    for seed in range(3):
        other = shuffled(text, seed)
        assert other != text and unnamed(records(other)) == expected


def test_the_order_in_the_source_does_not_matter():
    def one(x, y):
        a, b = jnp.sin(x) * 2, jnp.tanh(y) + x
        return a + b

    def other(x, y):
        b = x + jnp.tanh(y)
        a = 2 * jnp.sin(x)
        return b + a

    texts = [text_of(f, (8, 32), (8, 32)) for f in (one, other)]
    assert unnamed(records(texts[0])) == unnamed(records(texts[1]))

    def shared(x, y):  # both operands of the sum have one structure, and one has another use
        return jnp.exp(x) + jnp.exp(y) - 3 * jnp.exp(x)

    def swapped(x, y):
        return jnp.exp(y) + jnp.exp(x) - 3 * jnp.exp(x)

    texts = [text_of(f, (8, 32), (8, 32)) for f in (shared, swapped)]
    assert unnamed(records(texts[0])) == unnamed(records(texts[1]))


@pytest.mark.parametrize("n", [33, 65, 1000, 1025])
def test_the_padding_of_long_sums_is_not_added_up(n):
    """XLA's CPU compiler splits them into windows, the last of which are padded."""
    assert total(records(text_of(jnp.sum, (n,))), "flops") == n - 1


def test_a_pool_adds_up_what_its_windows_hold():
    def pool(x):
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 3), (1, 1), "SAME")

    inside = sum(min(i + 1, 7) - max(i - 1, 0) + 1 for i in range(8))
    assert total(records(text_of(pool, (8, 8))), "flops") == inside**2 - 64
    assert total(records(text_of(jnp.cumsum, (8,))), "flops") == 28


def test_other_shapes_types_and_operations_have_other_hashes():
    def hashes(function, *shapes, dtype=jnp.float32):
        return {r.hash for r in records(text_of(function, *shapes, dtype=dtype))}

    base = hashes(jnp.tanh, (8, 32))
    assert base == hashes(jnp.tanh, (8, 32))
    others = (
        hashes(jnp.tanh, (8, 33)),
        hashes(jnp.sin, (8, 32)),
        hashes(jnp.exp, (8, 32)),
        hashes(jnp.tanh, (8, 32), dtype=jnp.float16),
        hashes(lambda x: jnp.tanh(x) * x, (8, 32)),
    )
    assert not base & set().union(*others)


def test_float32_products_of_a_gpu_use_its_tensor_cores_unless_told_otherwise():
    dot = "f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    text = CHOICE.replace("CONSTANT", "s32[] constant(1)").replace("BRANCHES", INDEXED)
    exact = text.replace(dot, dot + ", operand_precision={highest,highest}")
    assert exact != text
    for module, platform, dtype in (
        (text, "gpu", "tfloat32"),
        (exact, "gpu", "float32"),
        (text, "cpu", "float32"),
    ):
        [dot_record] = [r for r in records(module, platform=platform) if r.kind == "product"]
        assert dot_record.dtype == dtype and dot_record["itemsize"] == 4


def test_collectives_carry_their_bytes_and_devices():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    def run(x):
        return lax.psum(x * 2, "x")

    sharding = jax.NamedSharding(mesh, jax.P("x"))
    array = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=sharding)
    launched = records(run.lower(array).compile())
    [one] = [r for r in launched if r.kind == "collective"]
    assert one.flops == 0 and one["width"] == 4 and one["elements"] == 8 * 16
    assert one.nbytes == 2 * 4 * 8 * 16


ASYNC = """HloModule a, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[4,16]) -> f32[32,16] {
  %x = f32[4,16]{1,0} parameter(0)
  %s = ((f32[4,16]{1,0}), f32[32,16]{1,0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %cs = (f32[4,16]{1,0}, f32[4,16]{1,0}, u32[]) copy-start(%x)
  %cd = f32[4,16]{1,0} copy-done(%cs)
  ROOT %d = f32[32,16]{1,0} all-gather-done(%s)
}
"""


def test_the_second_half_of_what_is_asynchronous_launches_nothing():
    gather, copy = records(ASYNC)
    assert gather.kind == "collective" and gather["width"] == 8
    assert (gather["bytes_read"], gather["bytes_written"]) == (4 * 64, 4 * 512)
    assert copy.kind == "copy" and copy.nbytes == 2 * 4 * 64


CALL = """HloModule c, is_scheduled=true

ENTRY %main (x: f32[4,16], w: f32[16,8]) -> f32[4,8] {
  %x = f32[4,16]{1,0} parameter(0)
  %w = f32[16,8]{1,0} parameter(1)
  ROOT %c = f32[4,8]{1,0} custom-call(%x, %w), custom_call_target="mystery", metadata={op_name="f"}
}
"""
CUBLAS = (
    CALL.replace('target="mystery"', 'target="__cublas$lt$matmul"')
    .replace("ROOT %c = f32[4,8]{1,0}", "ROOT %c = (f32[4,8]{1,0}, s8[4194304]{0})")
    .replace(
        'op_name="f"}',
        'op_name="f"}, backend_config={"gemm_backend_config":{"alpha_real":1,'
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":'
        '["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
    )
)


def test_an_unknown_call_is_warned_of_and_moves_its_arrays():
    with pytest.warns(UserWarning, match="custom call mystery is not known"):
        [one] = records(CALL)
    assert one.kind == "custom" and one.flops == 0 and one.nbytes == 4 * (64 + 128 + 32)


def test_a_product_of_cublas_is_a_product_without_its_workspace():
    [one] = records(CUBLAS, platform="gpu")
    assert one.kind == "product" and one.flops == 2 * 4 * 8 * 16
    assert one.nbytes == 4 * (64 + 128 + 32) and one.dtype == "tfloat32"


CONVOLUTION = """HloModule f

ENTRY main {
  x = f32[2,8,8,4]{3,2,1,0} parameter(0)
  w = f32[16,3,3,4]{3,2,1,0} parameter(1)
  ROOT y = (f32[2,6,6,16]{3,2,1,0}, u8[0]{0}) custom-call(x, w), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
}
"""  # noqa: E501


def test_a_float32_convolution_of_cudnn_uses_the_tensor_cores_unless_told_otherwise():
    exact = CONVOLUTION.replace(", window", ", operand_precision={highest,highest}, window")
    for text, dtype in ((CONVOLUTION, "tfloat32"), (exact, "float32")):
        [one] = records(text, platform="gpu")
        assert one.kind == "convolution" and one.dtype == dtype
        assert one.flops == 2 * 2 * 36 * 16 * 9 * 4 and one["itemsize"] == 4


FMHA = """HloModule f

ENTRY main {
  q = bf16[2,128,4,64]{3,2,1,0} parameter(0)
  k = bf16[2,128,2,64]{3,2,1,0} parameter(1)
  v = bf16[2,128,2,64]{3,2,1,0} parameter(2)
  s = s32[2,5]{1,0} parameter(3)
  ROOT a = (bf16[2,4,128,64]{3,1,2,0}, f32[8,4,128]{2,1,0}, u8[99]{0}) custom-call(q, k, v, s), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 0.125, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "128", "128"], "tuple_shapes": []}, "mask_type": "PADDING_CAUSAL", "sliding_window_length": 0}}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "opcode, name",
    {
        "sine": "trigonometric",
        "cosine": "trigonometric",
        "tan": "trigonometric",
        "tanh": "exponential",
        "log-plus-one": "exponential",
        "rsqrt": "power",
    }.items(),
)
def test_functions_that_take_much_longer_have_a_class_of_their_own(opcode, name):
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (x: f32[8,16]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  ROOT %y = f32[8,16]{{1,0}} {opcode}(%x)
}}
"""
    [one] = records(text, platform="cpu")
    assert one["transcendentals"] == 8 * 16 and one.flops == 0
    assert one.tree.leaves[:, OPCODES.index(name)].sum() == 1


def test_cudnns_attention_counts_the_pairs_of_its_mask():
    """As jax lowers it (there is no cuDNN here to compile it); its workspace is not written."""
    pairs = 128 * 129 // 2
    for text, products in ((FMHA, 2), (FMHA.replace("Softmax", "SoftmaxBackward"), 5)):
        [one] = records(text, platform="gpu")
        assert one.kind == "attention" and one.flops == 2 * products * 2 * 4 * pairs * 64
        assert one["transcendentals"] == 2 * 4 * pairs
        assert one["bytes_read"] == 2 * 2 * 128 * 64 * (4 + 2 + 2) + 4 * 10
        assert one["bytes_written"] == 2 * 2 * 128 * 64 * 4 + 4 * 8 * 4 * 128
    [full] = records(FMHA.replace("PADDING_CAUSAL", "PADDING"), platform="gpu")
    assert full.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64


FUSIONS = """HloModule f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%sliced (p: f32[64,32], q: f32[64,32]) -> f32[4,32] {
  %p = f32[64,32]{1,0} parameter(0)
  %q = f32[64,32]{1,0} parameter(1)
  %s = f32[64,32]{1,0} multiply(%p, %q)
  ROOT %t = f32[4,32]{1,0} slice(%s), slice={[8:12], [0:32]}
}

%selected (x: f32[64,32], n: f32[5]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %n = f32[5]{0} parameter(1)
  %zero = f32[] constant(0)
  %sum = f32[] reduce(%n, %zero), dimensions={0}, to_apply=%add
  %wide = f32[64,32]{1,0} broadcast(%sum), dimensions={}
  ROOT %m = f32[64,32]{1,0} maximum(%x, %wide)
}

ENTRY %main (x: f32[64,32], y: f32[64,32], n: f32[5]) -> f32[4,32] {
  %x.1 = f32[64,32]{1,0} parameter(0)
  %y.1 = f32[64,32]{1,0} parameter(1)
  %n.1 = f32[5]{0} parameter(2)
  %f = f32[64,32]{1,0} fusion(%x.1, %n.1), kind=kLoop, calls=%selected
  ROOT %g = f32[4,32]{1,0} fusion(%f, %y.1), kind=kLoop, calls=%sliced
}
"""


def test_of_what_is_sliced_later_only_the_slice_is_computed():
    sliced = records(FUSIONS)[1]
    assert sliced.flops == 4 * 32 and sliced.nbytes == 3 * 4 * 4 * 32


def test_a_small_sum_beside_many_values_makes_no_reduction():
    selected = records(FUSIONS)[0]
    assert selected.kind == "fusion" and selected["reduced"] == 5
    assert selected.flops == 64 * 32 + 4
    large = FUSIONS.replace("[5]", "[5000]")
    assert records(large)[0].kind == "reduction"


def test_what_a_sort_compares_with_is_a_region_of_its_tree():
    [one] = [r for r in records(text_of(lambda x: jnp.sort(x), (8, 32))) if r.kind == "sort"]
    depth = one.tree.leaves[:, -1].tolist()
    assert depth[0] == 1 and set(depth[1:]) == {2} and len(depth) > 4
    assert one.tree.positions[:2].tolist() == [1, 4]  # a leaf, back, the region, its first leaf


def test_collectives_in_the_branches_of_an_index_are_found():
    """They were overlooked: only those of a boolean were visited."""
    text = CHOICE.replace("CONSTANT", "s32[] copy(%i)").replace("BRANCHES", INDEXED)
    line = "f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    gather = "f32[8,8]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%few"
    [one] = collectives(text.replace(line, gather), {"x": 2})
    assert one.kind == "all-reduce" and one.nbytes == 4 * 64


def test_an_operation_without_a_count_is_warned_of():
    with pytest.warns(UserWarning, match="operation fft"):
        records(text_of(lambda x: jnp.fft.rfft(x).real, (4, 16)))


def test_ten_thousand_instructions_take_less_than_five_seconds():
    text = text_of(jax.grad(lambda w, x: attention(x, w)[0].sum()), (3, 32, 32), (16, 32))
    head, entry = text.split("\nENTRY ")
    computations, lines = head.split("\n\n\n")[-1], entry.split("\n")
    body = [line.replace("ROOT ", "") for line in lines[1:] if parse(line)]
    each = len(body) + sum(parse(line) is not None for line in computations.split("\n"))
    launched, copies = len(records(text)), 10_000 // each + 1

    def copy(text, i):  # with its own names and its own computations
        return re.sub(r"%([\w.\-]+)", rf"%\1.c{i}", text)

    before = [copy(computations, i) for i in range(copies)]
    many = [copy(line, i) for i in range(copies) for line in body]
    text = "\n".join([*before, "ENTRY " + lines[0], *many, "}"])
    assert sum(parse(line) is not None for line in text.split("\n")) >= 10_000
    start = time.process_time()
    listed = records(text)
    seconds = time.process_time() - start
    assert len(listed) == copies * launched
    assert seconds < 5
    assert len({r.hash for r in listed}) <= launched


def test_records_are_silent_about_what_they_know():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for program in SMALL[:5]:
            assert np.isfinite([r.features for r in records(compiled(program))]).all()
