"""Every public function against arguments that it cannot take, and edges that it must.

A bad call ends in a ValueError that names the function, the argument and the rule, before anything
is compiled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from megajax.parallel import collective_matmul as megajax_products
from pallas_kernels import aot, arguments
from pallas_kernels.expert import api

X, Q, K = jnp.ones((6, 4)), jnp.ones((8, 4, 16)), jnp.ones((8, 2, 16))
PAGES = jnp.ones((2, 8, 2, 16))
CU, IDS = jnp.array([0, 3, 8], jnp.int32), jnp.zeros((1, 8), jnp.int32)
SCALE, ROWS = jnp.ones(4), jnp.ones((2, 3, 4))
LENGTHS = jnp.array([3, 2], jnp.int32)
CODES = jnp.ones((4, 3), jnp.int8)
LINE, BYTES = jnp.ones(128), jnp.zeros((2, 132), jnp.uint8)


def info():
    return pk.PackInfo(jnp.array([0, 3, 5], jnp.int32), 6, 3)


@functools.cache
def sparse():
    return pk.TileSparse.from_dense(jnp.ones((4, 8)), np.ones((4, 8), bool), tile=8, chunk=4)


# function -> the good arguments that each bad call changes one of
GOOD = {
    "varlen_attention": lambda: dict(q_THK=Q, k_SGK=K, v_SGK=K, cu_seqlens_q=CU),
    "packed_attention": lambda: dict(
        q_BSHK=Q[None], k_BSGK=K[None], v_BSGK=K[None], segment_ids=IDS
    ),
    "paged_attention": lambda: dict(
        q_THK=Q,
        k_PNGK=PAGES,
        v_PNGK=PAGES,
        table_BM=jnp.array([[1], [0]], jnp.int32),
        start_B=[0, 4],
        count_B=[4, 4],
        context_B=[4, 6],
    ),
    "pack": lambda: dict(x_BSx=ROWS, lengths_B=LENGTHS, capacity=6),
    "unpack": lambda: dict(x_Tx=X, info=info()),
    "bucket": lambda: dict(tokens=10),
    "grouped_matmul": lambda: dict(
        lhs_MK=X, rhs_GKN=jnp.ones((2, 4, 3)), group_sizes=jnp.array([2, 4], jnp.int32)
    ),
    "fused_gemm": lambda: dict(x_xK=X, w_KN=jnp.ones((4, 3))),
    "fused_layer_norm": lambda: dict(x_xD=X, scale=SCALE),
    "norm_unpack": lambda: dict(x_TD=X, info=info(), scale=SCALE),
    "tile_sparse_matmul": lambda: dict(x_MK=X, weight=sparse()),
    "pack_weight": lambda: dict(codes_KN=CODES, bits=4),
    "quant_matmul": lambda: dict(
        x_MK=X, packed=jnp.zeros((2, 3), jnp.uint8), scales_GN=jnp.ones((2, 3)), bits=4, group=2
    ),
    "hadamard_quantize": lambda: dict(x_N=LINE, rows=2),
    "reduce_requantize": lambda: dict(payload_RP=BYTES, n=128, rows=2),
    "reduce_hadamard": lambda: dict(payload_RP=BYTES, n=128, bits=8),
    "subtract_quantize": lambda: dict(main_N=LINE, copy_N=LINE),
    "dequantize_add": lambda: dict(payload_RP=BYTES, copy_N=jnp.ones(256), bits=8, group=128),
    "TileSparse.from_dense": lambda: dict(w_KN=X, mask_KN=np.ones((6, 4), bool)),
}
LIST, TWICE = [[1.0] * 4] * 6, jnp.concatenate([K[None]] * 2)
# Every array argument, by function: a list, another rank, another type and another shape are bad.
ARRAYS = {
    "varlen_attention": ("q_THK", "k_SGK", "v_SGK"),
    "packed_attention": ("q_BSHK", "k_BSGK", "v_BSGK"),
    "paged_attention": ("q_THK", "k_PNGK", "v_PNGK", "sinks_H"),
    "pack": ("x_BSx",),
    "unpack": ("x_Tx",),
    "grouped_matmul": ("lhs_MK", "rhs_GKN"),
    "fused_gemm": ("x_xK", "w_KN", "bias", "residual"),
    "fused_layer_norm": ("x_xD", "scale", "residual", "bias", "offset"),
    "norm_unpack": ("x_TD", "scale", "residual", "bias", "offset"),
    "tile_sparse_matmul": ("x_MK", "bias"),
    "quant_matmul": ("x_MK", "scales_GN", "zeros", "bias"),
    "hadamard_quantize": ("x_N",),
    "reduce_requantize": ("payload_RP",),
    "reduce_hadamard": ("payload_RP",),
    "subtract_quantize": ("main_N", "copy_N"),
    "dequantize_add": ("payload_RP", "copy_N"),
    "TileSparse.from_dense": ("w_KN",),
}
WRONG = {"a list": LIST, "rank": jnp.ones(()), "integers": None, "shape": jnp.ones((5, 3, 2, 7, 1))}
TYPELESS = {("pack", "x_BSx"), ("unpack", "x_Tx")}  # packing moves values of any type
ANY_SHAPE = {("fused_layer_norm", "x_xD"), ("pack", "x_BSx")}
OTHERS = [
    ("varlen_attention", {"cu_seqlens_q": [0.0, 3.0, 8.0]}, "cu_seqlens_q float64.*integers"),
    ("varlen_attention", {"cu_seqlens_q": CU.astype(jnp.int16)}, r"astype\(jnp.int32\)"),
    ("varlen_attention", {"cu_seqlens_q": CU[None]}, "1 dimension"),
    ("varlen_attention", {"cu_seqlens_q": CU[:0]}, r"at least \[0\]"),
    ("varlen_attention", {"cu_seqlens_q": [0, 2**40]}, "int32 cannot"),
    ("varlen_attention", {"cu_seqlens_k": CU[1:] - 3}, "equally long"),
    ("varlen_attention", {"window": 4}, r"window=\(4, 0\)"),
    ("varlen_attention", {"window": (4.5, 0)}, "integer of 0 or more"),
    ("varlen_attention", {"window": (4, 0, 1)}, "left, right"),
    ("varlen_attention", {"max_seqlen": "long"}, "max_seqlen='long' must be an integer"),
    ("varlen_attention", {"scale": float("inf")}, "scale=inf must be a finite number"),
    ("varlen_attention", {"scale": 1e39}, r"scale=1e\+39 must be a finite number"),
    ("varlen_attention", {"softcap": "x"}, "softcap='x'"),
    ("varlen_attention", {"softcap": 1e-40}, "softcap=1e-40 must be .*float32, at least 1.2e-38"),
    ("varlen_attention", {"alibi_slopes": "abcd"}, "alibi_slopes must be numbers"),
    ("varlen_attention", {"alibi_slopes": np.ones((1, 4))}, "one per query head"),
    ("packed_attention", {"segment_ids": IDS.astype(jnp.float32)}, "segment_ids float32"),
    ("packed_attention", {"segment_ids": IDS[0]}, "2 dimensions"),
    ("packed_attention", {"segment_ids": IDS[:, :4]}, "segment_ids"),
    ("packed_attention", {"v_BSGK": TWICE}, r"agree in \(B, S\)"),
    ("paged_attention", {"table_BM": jnp.array([[1.0], [0.0]])}, "table_BM float32.*integers"),
    ("paged_attention", {"table_BM": [[2], [0]]}, "pages 0 to 1"),
    ("paged_attention", {"start_B": [0, 3]}, "segment 1 has start 3"),
    ("paged_attention", {"context_B": [4, 9]}, "context 9"),
    ("paged_attention", {"count_B": [4]}, "one per row of table_BM"),
    ("paged_attention", {"k_scale_PNG": jnp.ones((2, 8, 2))}, "k_scale_PNG must be None"),
    ("paged_attention", {"softcap": "x"}, "softcap='x'"),
    ("pack", {"lengths_B": [1.5, 2]}, "lengths float64.*integers"),
    ("pack", {"lengths_B": LENGTHS[:1]}, "lengths"),
    ("pack", {"capacity": 8.0}, "capacity=8.0 must be an integer"),
    ("unpack", {"info": CU}, "PackInfo of pack"),
    ("norm_unpack", {"info": CU}, "PackInfo of pack"),
    ("norm_unpack", {"eps": 0}, "eps=0"),
    ("fused_layer_norm", {"eps": 1e-40}, "eps=1e-40 must be .*float32, at least 1.2e-38"),
    ("bucket", {"tokens": 10.5}, "tokens=10.5 must be an integer"),
    ("bucket", {"tokens": 10, "most": 9}, "must be from 0 to most"),
    ("bucket", {"steps": 0}, "steps=0"),
    ("grouped_matmul", {"group_sizes": [1.0, 2.0]}, "group_sizes float64"),
    ("grouped_matmul", {"group_sizes": [-1, 2]}, "the least is -1"),
    ("grouped_matmul", {"group_sizes": [1, 2, 3]}, "one for each group"),
    ("fused_gemm", {"out_dtype": "double-ish"}, "out_dtype='double-ish'"),
    ("fused_gemm", {"out_dtype": jnp.int32}, "out_dtype"),
    ("fused_gemm", {"activation": "relu"}, "activation='relu'"),
    ("fused_layer_norm", {"scale": None}, "scale=None"),
    ("fused_layer_norm", {"kind": "batch"}, "kind='batch'"),
    ("pack_weight", {"codes_KN": X}, "codes float32.* must be integers"),
    ("pack_weight", {"codes_KN": CODES[0]}, r"codes int8\(3,\) must be integers \(K, N\)"),
    ("pack_weight", {"codes_KN": CODES * 16}, "codes.*16"),
    ("pack_weight", {"bits": 5}, "bits=5"),
    ("pack_weight", {"codes_KN": None}, "codes must be a jax or NumPy array, got NoneType"),
    ("quant_matmul", {"x_MK": None}, "x must be a jax or NumPy array, got NoneType"),
    ("quant_matmul", {"packed": None}, "packed must be a jax or NumPy array, got NoneType"),
    ("quant_matmul", {"scales_GN": None}, "scales must be a jax or NumPy array, got NoneType"),
    ("quant_matmul", {"bits": 8}, "packed"),
    ("quant_matmul", {"group": 0}, "group=0 must be at least 1"),
    ("quant_matmul", {"group": 1}, "scales"),
    ("quant_matmul", {"zeros": jnp.ones((1, 3))}, "zeros"),
    ("quant_matmul", {"activation": "relu"}, "activation='relu'"),
    ("tile_sparse_matmul", {"weight": jnp.ones((4, 8))}, "from_dense.* makes one"),
    ("TileSparse.from_dense", {"mask_KN": np.ones((6, 4), int)}, "mask.* bool"),
    ("TileSparse.from_dense", {"tile": 2.0}, "tile=2.0 must be an integer"),
]


def bad_arrays():
    for op, names in ARRAYS.items():
        for name in names:
            for kind, value in WRONG.items():
                if (kind == "integers" and (op, name) in TYPELESS) or (
                    kind == "shape" and (op, name) in ANY_SHAPE
                ):
                    continue
                yield op, name, kind, value


def call(op, changes):
    *path, last = op.split(".")
    owner = functools.reduce(getattr, path, pk)
    return getattr(owner, last)(**(GOOD[op]() | changes))


@pytest.mark.parametrize(("op", "name", "kind", "value"), list(bad_arrays()))
def test_an_array_of_another_kind_is_refused(op, name, kind, value):
    if kind == "integers":
        good = GOOD[op]().get(name)
        value = jnp.ones((4,) if good is None else good.shape, jnp.int32)
    word = name.partition("_")[0]  # without its dimensions
    with pytest.raises(ValueError, match=rf"(?s){'weight|w' if word == 'w' else word}"):
        call(op, {name: value})


@pytest.mark.parametrize(("op", "changes", "message"), OTHERS)
def test_a_bad_argument_is_refused(op, changes, message):
    with pytest.raises(ValueError, match=message):
        call(op, changes)


def test_every_public_function_is_probed():
    functions = {n for n in pk.__all__ if callable(getattr(pk, n))}
    collectives = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}
    trees = {"values_of", "with_values"}  # of any tree
    assert functions - {"PackInfo", "PackedTokens", "TileSparse"} - trees == collectives | (
        GOOD.keys() - {"TileSparse.from_dense"}
    )


def test_traced_values_are_refused_where_they_must_be_known():
    def scaled(scale):
        return call("varlen_attention", {"scale": scale})

    def masked(mask):
        return call("TileSparse.from_dense", {"mask_KN": mask})

    for function, value in ((scaled, 0.5), (masked, np.ones((6, 4), bool))):
        with pytest.raises(ValueError, match="must be known when the function is traced"):
            jax.eval_shape(function, value)


@pytest.mark.parametrize(
    "op",
    [
        "fused_gemm",
        *(
            pytest.param(op, marks=pytest.mark.slow)
            for op in ("varlen_attention", "fused_layer_norm", "unpack")
        ),
    ],
)
def test_forward_mode_says_what_there_is(op):
    name, x = next(iter(GOOD[op]().items()))
    with pytest.raises(TypeError, match=f"{op} has gradients .*jax.vjp.* no forward mode"):
        jax.jvp(lambda x: call(op, {name: x}), (x,), (x,))


def test_another_type_error_stays_what_it_is():
    with pytest.raises(TypeError, match="^plain$"), arguments.reverse_only("op"):
        raise TypeError("plain")


def test_lists_and_numpy_integers_are_taken():
    jax.eval_shape(lambda: call("varlen_attention", {"cu_seqlens_q": [0, 3, 8]}))
    jax.eval_shape(lambda: call("varlen_attention", {"cu_seqlens_q": np.array([0, 3, 8])}))
    jax.eval_shape(lambda: call("packed_attention", {"segment_ids": [[0] * 8]}))
    jax.eval_shape(lambda: call("pack", {"lengths_B": [3, 2]}))
    jax.eval_shape(lambda: call("grouped_matmul", {"group_sizes": [2, 4]}))
    assert pk.bucket(np.int64(10)) == pk.bucket(10)
    with pytest.raises(ValueError, match="end at 8 tokens at most"):  # checked inside of jit too
        jax.eval_shape(lambda: call("varlen_attention", {"cu_seqlens_q": [0, 9]}))


def test_no_tokens_no_segments_no_keys():
    """Nothing to see: outputs 0 and lse -inf, and gradients of the inputs' shapes."""

    def attend(q, k, cu_q, cu_k):
        def one(q, k):
            return pk.varlen_attention(
                q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True
            )

        (out, lse), pull = jax.vjp(one, q, k)
        return out, lse, *pull((jnp.ones_like(out), jnp.ones_like(lse)))

    for q, k, cu_q, cu_k in (
        (Q[:0], K[:0], [0, 0], [0, 0]),
        (Q, K[:0], [0, 8], [0, 0]),
        (Q[:0], K, [0, 0], [0, 8]),
        (Q, K, [0], [0]),
    ):
        run = functools.partial(attend, cu_q=cu_q, cu_k=cu_k)
        shapes = [x.shape for x in jax.eval_shape(run, q, k)]
        assert shapes == [q.shape, (4, len(q)), q.shape, k.shape]
        if len(q):
            out, lse, *grads = jax.jit(run)(q, k)
            assert (np.asarray(lse) == -np.inf).all() and not out.any()
            assert not any(g.any() for g in grads)
    empty = {"q_BSHK": Q[None, :0], "k_BSGK": K[None, :0], "v_BSGK": K[None, :0]}
    empty["segment_ids"] = IDS[:, :0]
    shape = jax.eval_shape(lambda: call("packed_attention", empty)).shape
    assert shape == (1, 0, 4, 16)
    packed, where = jax.eval_shape(lambda: pk.pack(ROWS[:0], [], 6))
    assert packed.shape == (6, 4) and where.cu_seqlens.shape == (1,)


PRODUCTS = {
    "all_gather_matmul": ((P("x"), P(None, "x")), P(None, "x")),
    "matmul_reduce_scatter": ((P(None, "x"), P("x")), P("x")),
    "matmul_all_reduce": ((P(None, "x"), P("x")), P()),
}
OWNERS = {"pallas_kernels": pk, "megajax": megajax_products}


def lowered(owner, op, ranks, rows, gradients=False, devices=None, check=True, **options):
    """The program of a product, on an emulated mesh, not compiled. check: by shard_map."""
    in_specs, out_specs = PRODUCTS[op]

    def run(x, w):
        product = functools.partial(getattr(OWNERS[owner], op), **({"axis": "x"} | options))
        if not gradients:
            return product(x, w)
        y, pull = jax.vjp(product, x, w)
        return pull(y)

    mesh = Mesh(np.array((devices or jax.devices())[:ranks]), "x")
    outs = in_specs if gradients else out_specs
    cut = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=outs, check_vma=check)
    shapes = ((rows, 8), (8, 12))
    inputs = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, in_specs, strict=True)
    )
    return jax.jit(cut).lower(*inputs)


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("owner", OWNERS)
def test_one_rank_has_no_collective_and_no_rows_are_no_fault(owner, op):
    options = (
        [{}] if owner == "pallas_kernels" or "reduce" in op else [{}, {"implementation": "ring"}]
    )
    for option in options:
        for gradients in (False, True):
            if gradients and owner == "pallas_kernels":
                continue
            text = lowered(owner, op, 1, 8, gradients, **option).as_text()
            collectives = {w for w in ("all_gather", "reduce_scatter", "permute") if w in text}
            assert not collectives and text.count("dot_general") == (3 if gradients else 1)
            lowered(owner, op, 4, 0, gradients, **option)


@pytest.mark.parametrize("owner", OWNERS)
def test_the_sum_of_one_rank_is_no_collective(owner):
    """Where shard_map checks only the compiler may know: the next test."""
    assert "all_reduce" not in lowered(owner, "matmul_all_reduce", 1, 8, check=False).as_text()


@pytest.mark.aot
@pytest.mark.slow
def test_the_sum_of_one_gpu_is_taken_out_when_compiled():
    program = lowered("megajax", "matmul_all_reduce", 1, 8, devices=aot.devices(1, 1))
    assert "all-reduce" not in aot.compile(program).as_text()


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("all_gather_matmul", {"axis": "y"}, "axis='y' must be an axis of the jax.shard_map.*'x'"),
        ("all_gather_matmul", {"bias": [1.0, 2.0, 3.0]}, "bias must be a jax or NumPy array|3 bia"),
        ("all_gather_matmul", {"bias": jnp.ones(3, jnp.int32)}, "bias int32.*floating"),
        ("all_gather_matmul", {"activation": "relu"}, "activation='relu'"),
        ("matmul_reduce_scatter", {"acc_dtype": "int8"}, "acc_dtype='?int8'? must be one of"),
        ("matmul_reduce_scatter", {"residual": jnp.ones((3, 3))}, "residual.*like the result"),
        ("matmul_all_reduce", {"residual": [1.0]}, "residual must be a jax or NumPy array"),
        ("matmul_all_reduce", {"bias": jnp.ones(5)}, "bias"),
    ],
)
def test_a_product_refuses(owner, op, options, message):
    with pytest.raises(ValueError, match=message):
        lowered(owner, op, 4, 8, **options)


def routed(route=None, dispatch=None, combine=None, experts=jnp.zeros((2, 1), jnp.int32)):
    """The shapes of a layer of experts on two ranks, its calls changed as given."""

    def run(experts):
        routes = api.route(**({"expert_TA": experts, "experts": 1, "axis": "x"} | (route or {})))
        good = {"x": jnp.ones((1, 4)), "w": jnp.ones((1, 4, 8)), "routes": routes, "axis": "x"}
        api.dispatch_grouped_matmul(**(good | (dispatch or {})))
        # Constants, the same on all ranks, as h and w: they vary with the routes.
        good = {"h": jnp.ones((2, 8)), "w": jnp.ones((1, 8, 4)), "routes": routes, "axis": "x"}
        good["weights"] = jnp.ones((1, 1))
        return api.grouped_matmul_combine(**(good | (combine or {})))

    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    return jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x")), experts)


EXPERTS = [
    ("route", {"expert_TA": [[0]]}, "expert_TA must be a jax or NumPy array"),
    ("route", {"expert_TA": jnp.zeros((1, 1))}, "expert_TA float32.* must be integers"),
    ("route", {"expert_TA": jnp.zeros((1, 1), bool)}, "expert_TA bool.* must be integers"),
    ("route", {"expert_TA": jnp.zeros(1, jnp.int32)}, "expert_TA int32.* must be integers"),
    ("route", {"experts": 0}, "experts=0 must be at least 1"),
    ("route", {"experts": 1.0}, "experts=1.0 must be an integer"),
    ("route", {"rows": -1}, "rows=-1 must be at least 0"),
    ("route", {"rows": 2.5}, "rows=2.5 must be an integer"),
    ("route", {"axis": "y"}, "axis='y' must be an axis of the jax.shard_map.*'x'"),
    ("dispatch", {"x": [[1.0] * 4]}, "x must be a jax or NumPy array"),
    ("dispatch", {"x": jnp.ones((1, 4), jnp.int32)}, "int32"),
    ("dispatch", {"w": [[1.0]]}, "w must be a jax or NumPy array"),
    ("dispatch", {"w": []}, "0 weights"),
    ("dispatch", {"routes": None}, "routes must be what route.. returned, got NoneType"),
    ("dispatch", {"axis": "y"}, "axis='y'"),
    ("combine", {"h": [[1.0] * 8]}, "h must be a jax or NumPy array"),
    ("combine", {"weights": [[1.0]]}, "weights must be a jax or NumPy array"),
    ("combine", {"weights": jnp.ones((1, 1), jnp.int32)}, "weights int32.* must be float32"),
    ("combine", {"acc_dtype": "int8"}, "acc_dtype='int8' must be one of"),
    ("combine", {"acc_dtype": "foo"}, "acc_dtype='foo' must be one of"),
    ("combine", {"routes": ()}, "routes must be"),
    ("combine", {"axis": "y"}, "axis='y'"),
]


@pytest.mark.parametrize(("call", "changes", "message"), EXPERTS)
def test_a_layer_of_experts_refuses(call, changes, message):
    with pytest.raises(ValueError, match=message):
        routed(**{call: changes})


def test_experts_take_any_integers_and_what_no_rank_changed():
    for dtype in (jnp.int8, jnp.uint8, jnp.int32):
        assert routed(experts=jnp.zeros((2, 1), dtype)).shape == (4 // 2, 4)
    # Parts of experts are counted in int32, whatever the choices came in.
    parts = api.cut(jnp.array([[200]], jnp.uint8), experts=100, parts=4)
    assert parts.tolist() == [[800, 900, 1000, 1100]]
    for wrong in ({"experts": 0}, {"parts": 0}, {"expert_TA": jnp.zeros((1, 1))}):
        options = {"expert_TA": jnp.zeros((1, 1), jnp.int32), "experts": 1, "parts": 1} | wrong
        with pytest.raises(ValueError, match="cut: "):
            api.cut(**options)
