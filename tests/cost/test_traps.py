"""The faults that a compiler slips in, planted in hand-made modules; compiled ones are in
tests/systems/test_cluster.py."""

import pytest

from megajax.cost.hlo import collectives, find

MESH = {"pipe": 2, "node": 1, "data": 2, "expert": 1, "context": 1, "tensor": 2}
EXPERT_MESH = MESH | {"data": 1, "expert": 2}

MODULE = """HloModule jit_step

%tick (p: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %send = bf16[1024,1024]{1,0} collective-permute(%x), source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}, metadata={op_name="jit(f)/ppermute"}
  EXTRA
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w1 = (s32[]) while(%t), condition=%c, body=%tick, backend_config={"known_trip_count":{"n":"5"}}
  ENTRY_EXTRA
}
"""  # noqa: E501
DATA = "replica_groups=[4,2]<=[2,2,2]T(0,2,1)"


def planted(inside="", entry="", mesh=MESH):
    text = MODULE.replace("ENTRY_EXTRA", entry).replace("EXTRA", inside)
    return find(collectives(text, mesh), ("data", "expert"))


def test_a_clean_program_has_no_warning():
    gather = f'%g = bf16[1024,1024] all-gather(%w), {DATA}, metadata={{op_name="jit(f)/reshard"}}'
    small = f'%r = f32[16] all-reduce(%w), {DATA}, metadata={{op_name="jit(f)/norm"}}'
    assert planted(entry=f"{gather}\n{small}") == []


def test_an_all_reduce_of_gradients():
    (warning,) = planted(
        entry=f'%r = f32[1024,1024] all-reduce(%w), {DATA}, metadata={{op_name="jit(f)/dot"}}'
    )
    assert "reduce-scatter belongs" in warning and "4.00 MiB a step over data" in warning


def test_vectors_stay_small_when_they_are_sent_together():
    """Norms of 12 layers of width 12288: 0.56 MiB each, which the compiler joins."""
    joined = "%r = (f32[12,12288], f32[12,12288]) all-reduce(%v, %w)"
    name = 'metadata={op_name="jit(f)/psum"}'
    assert planted(entry=f"{joined}, {DATA}, {name}") == []
    matrices = joined.replace("12,12288", "1024,12288")
    assert len(planted(entry=f"{matrices}, {DATA}, {name}")) == 1


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_data_collectives_in_the_tick_loop(kind):
    (warning,) = planted(
        f'%g = bf16[1024,1024] {kind}(%w), {DATA}, metadata={{op_name="jit(f)/x"}}'
    )
    assert f"{kind} inside the pipeline's tick loop" in warning and "5 x" in warning


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        ("body/jvp(experts)/all_gather", 0),
        ("body/(jvp(experts)/all_gather:jvp(experts)/all_gather)", 0),
        ("body/jvp(attention)/all_gather", 1),
        ("body/(jvp(experts)/all_gather:jvp(attention)/all_gather)", 1),
    ],
)
def test_tokens_may_go_to_their_experts_in_the_tick_loop(name, warnings):
    line = f'%g = bf16[1024,1024] all-gather(%w), {DATA}, metadata={{op_name="jit(f)/{name}"}}'
    assert len(planted(line, mesh=EXPERT_MESH)) == warnings


def test_updates_of_the_embedding_gathered():
    line = f'%g = bf16[1024,1024] all-gather(%w), {DATA}, metadata={{op_name="jit(f)/scatter-add"}}'
    (warning,) = planted(entry=line)
    assert "updates of a scatter" in warning


def test_a_fault_of_many_places_is_one_sentence_without_scopes_of_jit():
    """Bytes and executions are added up, and the places that send most are named."""
    scopes = "jit(_step)/shard_map/while/body/eval_jaxpr"
    lines = [
        f"%g{i} = bf16[{1024 * rows},1024] all-gather(%w), {DATA}, "
        f'metadata={{op_name="{scopes}/{place}/cond/branch_1_fun/all_gather"}}'
        for i, (place, rows) in enumerate(
            (("mlp", 3), ("attention", 2), ("mlp", 3), ("head", 4), ("norm", 1))
        )
    ]
    (warning,) = planted("\n".join(lines))
    gib = 5 * 2 * (3 + 2 + 3 + 4 + 1) / 1024  # five ticks of bf16
    assert warning == (
        f"all-gather inside the pipeline's tick loop: {gib:.2f} GiB a step over data, 25 x "
        "(mlp/all_gather, head/all_gather, attention/all_gather and 1 more)"
    )
    assert "jit" not in warning and "body" not in warning
    names = ("jit(f)/jvp(blocks)/while/body/dot", "(jit(_step)/a/psum:jit(_step)/b/psum)")
    text = [
        f'%r{i} = f32[1024,1024] all-reduce(%w), {DATA}, metadata={{op_name="{name}"}}'
        for i, name in enumerate(names)
    ]
    (warning,) = planted(entry="\n".join(text))
    assert warning.endswith("2 x (jvp(blocks)/dot, a/psum + b/psum)")


def test_neighbours_across_pods():
    sent = collectives(MODULE, MESH)
    assert find(sent, ("data",), gpus_per_pod=8) == []
    (warning,) = find(sent, ("data",), gpus_per_pod=4)
    assert "8 of 8 pairs" in warning
