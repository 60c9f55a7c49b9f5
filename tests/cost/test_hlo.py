"""The reader of compiled modules on lines as XLA writes them."""

import pytest

from megajax.cost.hlo import Module, attributed, collectives

MESH = {"pipe": 1, "node": 2, "data": 2, "tensor": 2}
MODULE = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %ag = ((bf16[2]{0}), bf16[4]{0}) all-gather-start(%x), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, metadata={op_name="jit(f)/transpose(jvp(blocks))/while/body/reshard"}, backend_config={"is_sync":false}
  %gemm = bf16[6,5]{1,0} fusion(%x), kind=kCustom, calls=%gemm_computation
  %agd = bf16[4]{0} all-gather-done(%ag)
  %late = bf16[6,5]{1,0} fusion(%x), kind=kCustom, calls=%gemm_computation
}

%gemm_computation (a: bf16[6,7], b: bf16[7,5]) -> bf16[6,5] {
  %a = bf16[6,7]{1,0} parameter(0)
  %b = bf16[7,5]{1,0} parameter(1)
  ROOT %dot.1 = bf16[6,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%outer (p: (s32[])) -> (s32[]) {
  %w2 = (s32[], bf16[4]) while(%t), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%wrapped (p: f32[8]) -> f32[8] {
  %rs = (f32[8]{0}, f32[16]{0}) reduce-scatter(%y, %z), replica_groups=[4,2]<=[2,2,2]T(0,2,1), to_apply=%add, metadata={op_name="jit(f)/jvp(head)/while/body/dot"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w1 = (s32[]) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %call = (f32[8], f32[16]) call(%p), to_apply=%wrapped
  %ar = f32[10]{0} all-reduce(%q), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add, metadata={op_name="jit(f)/reduce_sum"}
  %sync = ((f32[6]{0}), f32[6]{0}) all-reduce-start(%q), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add, backend_config={"is_sync":true}
  %perm = f32[6]{0} collective-permute(%q), source_target_pairs={{0,0},{4,2},{2,4}}
  %copy = f32[6]{0} collective-permute(%q), source_target_pairs={{0,0},{1,1}}
  %a2a = ((f32[8]{0}), f32[8]{0}) ragged-all-to-all-start(%call), replica_groups=mesh['x'=8] {'x':(2)2}
  %a2ad = f32[8]{0} ragged-all-to-all-done(%a2a)
  %every = f32[6]{0} all-gather(%call), replica_groups={}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def by_kind():
    return sent_by_kind()


def sent_by_kind():
    return {(c.kind, c.axes): c for c in collectives(MODULE, MESH)}


def test_loops_multiply(by_kind):
    gather = by_kind["all-gather", ("tensor",)]
    assert gather.loops == (5, 3) and gather.executions == 15
    assert gather.is_async and gather.is_backward and gather.within("blocks")
    assert gather.nbytes == 8 and gather.arrays == 1


def test_scatters_count_their_input(by_kind):
    scatter = by_kind["reduce-scatter", ("data",)]
    assert scatter.nbytes == 4 * (8 + 16) * 2 and scatter.arrays == 2
    assert not scatter.is_backward and scatter.within("head") and not scatter.within("blocks")
    assert scatter.loops == ()


def test_groups_in_all_spellings(by_kind):
    assert ("all-reduce", ("node",)) in by_kind
    assert ("all-reduce", ("node", "data", "tensor")) in by_kind
    assert ("collective-permute", ("node", "data")) in by_kind
    assert ("ragged-all-to-all", ("data",)) in by_kind  # x:(2)2 is the middle factor of 2 x 2 x 2
    assert ("all-gather", ("node", "data", "tensor")) in by_kind


def test_what_runs_beside_a_transfer():
    """Matmuls between its start and its done count, those after it do not."""
    gather = sent_by_kind()["all-gather", ("tensor",)]
    assert gather.flops_beside == 2 * 6 * 5 * 7 and gather.is_hidden
    scattered = sent_by_kind()["ragged-all-to-all", ("data",)]
    assert scattered.is_async and not scattered.is_hidden
    module = Module(MODULE)
    assert module.flops_of(module.entry) == 5 * 3 * 2 * 2 * 6 * 5 * 7


def test_attribution_counts_bytes():
    """Named: 15 x 8 bytes gathered, 192 scattered, 40 reduced."""
    named = 15 * 8 + 192 + 40
    unnamed = 24 + 24 + 32 + 24
    assert attributed(collectives(MODULE, MESH)) == pytest.approx(named / (named + unnamed))


def test_sync_is_told_from_async(by_kind):
    assert not by_kind["all-reduce", ("node",)].is_async
    assert not by_kind["all-reduce", ("node", "data", "tensor")].is_async


def test_done_halves_are_not_counted():
    assert len(collectives(MODULE, MESH)) == 7  # nor is the permute that copies


GROUPED = """
ENTRY %main (p: bf16[48,7]) -> bf16[48,5] {
  %y = bf16[48,5]{1,0} custom-call(%t, %n, %x, %w), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={s32[6,4]{1,0}, s32[2]{0}, bf16[48,7]{1,0}, bf16[3,7,5]{2,1,0}}, api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(f)/jvp()/cond/branch_0_fun/grouped_matmul/mpmd_map" id=1}, backend_config={x}
  %dw = bf16[3,7,5]{2,1,0} custom-call(%t, %x, %y), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={s32[4,3]{1,0}, bf16[48,7]{1,0}, bf16[48,5]{1,0}}, api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(f)/cond/branch_0_fun/grouped_weights/mpmd_map" id=2}, backend_config={x}
  %other = bf16[48,5]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", operand_layout_constraints={bf16[48,7]{1,0}}, api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(f)/fused_norm/mpmd_map" id=3}
}
"""  # noqa: E501


def test_grouped_kernels_are_matmuls_of_the_rows_in_groups():
    """Half of the rows: y and dw, 48 / 2 rows of 7 by 5 each; no other kernel."""
    for live, times in ((1.0, 2), (0.5, 1)):
        module = Module(GROUPED, live)
        assert module.flops_of(module.entry) == times * 2 * 48 * 7 * 5


STEPS = """
%step (p: (bf16[512,7])) -> (bf16[512,7]) {
  %a = bf16[512,7]{1,0} parameter(0)
  %dot.1 = bf16[512,5]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: bf16[2000,7]) -> bf16[2000,5] {
  %loop = (bf16[512,7]) while(%t), condition=%c, body=%step, metadata={op_name="jit(f)/cond/branch_0_fun/grouped_steps_4/while" id=1}
}
"""  # noqa: E501


def test_the_loop_of_a_grouped_product_runs_for_the_rows_in_groups():
    """XLA knows no trip count: it depends on the groups' sizes."""
    for live, times in ((1.0, 4), (0.5, 2), (0.01, 1)):
        module = Module(STEPS, live)
        assert module.flops_of(module.entry) == times * 2 * 512 * 7 * 5


def test_other_open_loops_say_how_often_they_turn_at_most():
    """Packed attention on a CPU: rows in groups say nothing of its tiles."""
    text = STEPS.replace("grouped_steps_4", "transpose(at_most_3_turns)")
    for live in (1.0, 0.5):
        module = Module(text, live)
        assert module.flops_of(module.entry) == 3 * 2 * 512 * 7 * 5


SWITCH = """
%none (p: bf16[6,7]) -> bf16[6,5] {
  %z = bf16[6,5]{1,0} broadcast(%c), dimensions={}
}

%first (p: bf16[6,7]) -> bf16[6,5] {
  %a = bf16[6,7]{1,0} parameter(0)
  %dot.1 = bf16[6,5]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%second (p: bf16[6,7]) -> bf16[6,5] {
  %b = bf16[6,3]{1,0} parameter(0)
  %dot.2 = bf16[6,5]{1,0} dot(%b, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%both (p: bf16[6,7]) -> bf16[6,5] {
  %a = bf16[6,7]{1,0} parameter(0)
  %b = bf16[6,3]{1,0} parameter(1)
  %dot.3 = bf16[6,5]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %dot.4 = bf16[6,5]{1,0} dot(%b, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: bf16[6,7]) -> bf16[6,5] {
  %y = bf16[6,5]{1,0} conditional(%i, %p, %p, %p, %p), branch_computations={BRANCHES}
}
"""


def test_of_many_branches_the_fullest_counts():
    """A pipeline's tick: nothing, the decoder's work, the encoder's, or both. Of two, both do."""
    for branches, flops in (
        ("%none, %first, %second, %both", 2 * 6 * 5 * (7 + 3)),
        ("%none, %first", 2 * 6 * 5 * 7),
        ("%first, %second", 2 * 6 * 5 * (7 + 3)),
    ):
        module = Module(SWITCH.replace("BRANCHES", branches))
        assert module.flops_of(module.entry) == flops
        dots = [place.line for place in module.places() if " dot(" in place.line]
        assert len(dots) == branches.count("first") + branches.count("second")
