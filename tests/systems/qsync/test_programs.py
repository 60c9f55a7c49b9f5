"""Programs of unlike kinds of devices: equal sequences of collectives pass, all others do not."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.systems.qsync import check_programs, check_sequences, sequence
from pallas_kernels import aot

HEAD = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%largest (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %m = f32[] maximum(%a, %b)
}
"""
SUM = "%s = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%add"
GATHER = "%g = f32[4,8]{1,0} all-gather(%p), replica_groups={}, dimensions={0}"
SCATTER = "%r = f32[2]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add"
SUMS = "all-reduce(add) of f32[8] among {{0,2},{1,3}}"
GATHERS = "all-gather along 0 of f32[4,8] among {{0,1,2,3}}"
SCATTERS = "reduce-scatter(add) along 0 of f32[2] among {{0,1,2,3}}"


def computation(name, *lines):
    """Every line gets a name that is unique in its computation, as in XLA's text."""
    body = "".join(f"  {x.replace(' =', f'.{i} =', 1)}\n" for i, x in enumerate(lines))
    return f"\n{name} (p: f32[8]) -> f32[8] {{\n{body}}}\n"


def module(*lines, more=""):
    return HEAD + more + computation("ENTRY %main", *lines)


def loop(body, trips, condition="%c"):
    count = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return f"%w = f32[8] while(%t), condition={condition}, body={body}{count}"


def refused(one, other):
    with pytest.raises(UserError) as error:
        check_programs({"H100": one, "L4": other})
    return str(error.value)


def test_names_and_channels_do_not_count():
    other = SUM.replace("%s =", "%all-reduce.7 =").replace("channel_id=1", "channel_id=9")
    check_programs(
        {"H100": module(SUM, GATHER), "L4": module(other, GATHER), "T4": module(SUM, GATHER)}
    )
    assert sequence(module(SUM, GATHER)) == [SUMS, GATHERS]


def test_order_and_missing_ones():
    swapped = refused(module(SUM, SUM, GATHER), module(SUM, GATHER, SUM))
    assert f"collective 2 on (the same ones follow in unlike orders): H100: {SUMS}" in swapped
    assert f"L4: {GATHERS};" in swapped and "(--precisions, --shares)" in swapped
    missing = refused(module(SUM, GATHER), module(SUM))
    assert f"collective 2 on: H100: {GATHERS}; L4: no more;" in missing


@pytest.mark.parametrize(
    "before, after, says",
    [
        ("f32[8]{0}", "bf16[8]{0}", "bf16[8]"),
        ("f32[8]{0}", "f32[16]{0}", "f32[16]"),
        ("f32[8]{0}", "(f32[4]{0}, f32[4]{0})", "f32[4], f32[4]"),
        ("{{0,2},{1,3}}", "{{0,1},{2,3}}", "{{0,1},{2,3}}"),
        ("%add", "%largest", "all-reduce(maximum)"),
        ("all-reduce(", "all-to-all(", "all-to-all"),
    ],
)
def test_what_makes_a_collective_another(before, after, says):
    message = refused(module(GATHER, SUM), module(GATHER, SUM.replace(before, after)))
    assert f"collective 2 on: H100: {SUMS}; L4: " in message
    assert says in message.partition("L4: ")[2]


def test_a_layout_counts_if_it_moves_elements():
    assert "f32[4,8]{0,1}" in refused(module(GATHER), module(GATHER.replace("{1,0}", "{0,1}")))
    flat = GATHER.replace("f32[4,8]", "f32[4,1]")
    check_programs({"H100": module(flat), "L4": module(flat.replace("{1,0}", "{0,1}"))})


def test_groups_have_several_spellings():
    texts = ("[2,2]<=[2,2]T(1,0)", "mesh['a'=2,'b'=2] {'a'}", "{{1,3},{0,2}}")
    for text in texts:
        assert sequence(module(SUM.replace("{{0,2},{1,3}}", text))) == [SUMS]
    split = SUM.replace("{{0,2},{1,3}}", "mesh['a'=8] {'a':(2)2}")
    assert sequence(module(split))[0].endswith("among {{0,2},{1,3},{4,6},{5,7}}")
    turned = SUM.replace("{{0,2},{1,3}}", "mesh['a'=2,'b'=2] {'b','a'}")
    assert sequence(module(turned))[0].endswith("among {{0,2,1,3}}")


def test_many_devices_take_little_room_and_still_count():
    many = [SUM.replace("{{0,2},{1,3}}", f"[{a},{4096 // a}]<=[4096]") for a in (8, 16)]
    assert len(json.dumps(sequence(module(many[0])))) < 150
    assert "8 groups like {0,1,2,3,4,5,6,7,...}" in refused(*map(module, many))
    first = "{{0,1," + ",".join(f"{i}" for i in range(2, 60)) + "},{%s}}"
    some = [", ".join(f"{i}" for i in ids) for ids in (range(60, 120), [*range(61, 120), 60])]
    refused(*(module(SUM.replace("{{0,2},{1,3}}", first % x.replace(" ", ""))) for x in some))


def test_loops_are_compared_by_what_runs():
    """Five times as a loop, in a row, peeled, two in an iteration, and behind a call."""
    body = computation("%body", SUM) + computation("%double", SUM, SUM)
    outer = computation("%outer", loop("%double", 2)) + computation("%called", loop("%body", 5))
    forms = {
        "loop": module(loop("%body", 5), GATHER, more=body),
        "row": module(*[SUM] * 5, GATHER),
        "peeled": module(SUM, loop("%body", 3), SUM, GATHER, more=body),
        "double": module(loop("%double", 2), SUM, GATHER, more=body),
        "nested": module(loop("%outer", 1), SUM, GATHER, more=body + outer),
        "call": module("%x = f32[8] call(%p), to_apply=%called", GATHER, more=body + outer),
    }
    check_programs(forms)
    assert sequence(forms["loop"]) == sequence(forms["row"]) == [[5, [SUMS]], GATHERS]
    message = refused(forms["loop"], module(loop("%body", 4), GATHER, more=body))
    assert f"collective 5 on: H100: {SUMS}; L4: {GATHERS}" in message


def test_an_interleaved_loop_is_not_two_loops():
    both = computation("%both", SUM, GATHER)
    each = computation("%first", SUM) + computation("%second", GATHER)
    apart = module(loop("%first", 3), loop("%second", 3), more=each)
    message = refused(module(loop("%both", 3), more=both), apart)
    assert "collective 2 on (the same ones follow in unlike orders)" in message


def test_a_condition_runs_once_more_than_its_body():
    more = computation("%body", SUM) + computation("%asks", GATHER)
    text = module(loop("%body", 2, "%asks"), more=more)
    check_programs({"H100": text, "L4": module(GATHER, SUM, GATHER, SUM, GATHER)})


def test_loops_of_unknown_length():
    more = computation("%body", SUM) + computation("%local", "%x = f32[8]{0} copy(%p)")
    assert sequence(module(loop("%local", None), SUM, more=more)) == [SUMS]
    unknown = loop("%body", None) + ', metadata={op_name="jit(f)/at_most_3_turns/while"}'
    message = refused(module(loop("%body", 3), more=more), module(unknown, more=more))
    assert message.startswith("the program of L4: the loop jit(f)/at_most_3_turns/while runs ")


def test_branches_must_run_the_same():
    more = computation("%one", SUM, SUM) + computation("%two", GATHER)
    more += computation("%half", SUM) + computation("%three", loop("%half", 2))
    for ends in (
        "branch_computations={%one, %three}",
        "true_computation=%three, false_computation=%one",
    ):
        text = module(f"%y = f32[8] conditional(%i, %p, %p), {ends}", more=more)
        check_programs({"H100": text, "L4": module(SUM, SUM)})
    text = module("%y = f32[8] conditional(%i, %p), branch_computations={%one, %two}", more=more)
    message = refused(module(SUM), text)
    assert message.startswith("the program of L4: the branches of the conditional y.0 differ from ")
    assert f"one: {SUMS}; two: {GATHERS}" in message


def test_asynchronous_ones_count_where_they_start():
    """On H100s: starts with operands and results, wrapped ones, and one that became synchronous."""
    start = SUM.replace(
        "%s = f32[8]{0} all-reduce", "%s = ((f32[8]{0}), f32[8]{0}) all-reduce-start"
    )
    done = "%d = f32[8]{0} all-reduce-done(%s)"
    wrap = computation("%wrapped", SCATTER)
    begin = "%a = ((f32[8]), f32[2], s32[]) async-start(%p), calls=%wrapped"
    end = "%b = f32[2] async-done(%a)"
    copy = "%c = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}"
    text = module(start, copy, begin, done, GATHER, end, more=wrap)
    assert sequence(text) == [SUMS, SCATTERS, GATHERS]
    check_programs({"H100": text, "L4": module(SUM, SCATTER, GATHER)})
    assert "collective 1 on" in refused(text, module(begin, start, done, GATHER, end, more=wrap))


def test_rows_travel_as_text():
    body = computation("%body", SUM, GATHER)
    texts = [module(loop("%body", n), more=body) for n in (3, 3, 2)]
    rows = [json.loads(json.dumps(sequence(text))) for text in texts]
    check_sequences({"H100": rows[0], "L4": rows[1]})
    check_sequences({"H100": rows[2]})
    with pytest.raises(UserError, match="collective 5 on: H100, L4: all-reduce.*; T4: no more"):
        check_sequences(dict(zip(("H100", "L4", "T4"), rows, strict=True)))


# ---- what jax compiles


def compiled(product, reduced=jnp.float32, length=3, mesh=None):
    """A scan of products in some precision, summed over 'data', with a gather after it."""
    mesh = mesh or jax.make_mesh((4, 2), ("data", "tensor"))

    def step(x_BD, w_DD):
        def layer(x_BD, _):
            y_BD = (x_BD.astype(product) @ w_DD.astype(product)).astype(reduced)
            return jax.lax.psum(y_BD, "data").astype(jnp.float32), None

        x_BD, _ = jax.lax.scan(layer, x_BD, None, length=length)
        return jax.lax.all_gather(x_BD, "tensor")

    shapes = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return aot.compile(jax.jit(mapped).lower(*shapes))


def test_compiled_programs_of_unlike_precisions():
    full, half = compiled(jnp.float32), compiled(jnp.bfloat16)
    assert full.as_text() != half.as_text()
    check_programs({"H100": full, "L4": half})
    groups = "{{0,2,4,6},{1,3,5,7}}"
    assert sequence(full) == [
        [3, [f"all-reduce(add) of f32[4,8] among {groups}"]],
        "all-gather along 0 of f32[2,4,8] among {{0,1},{2,3},{4,5},{6,7}}",
    ]
    assert "collective 4 on" in refused(full, compiled(jnp.float32, length=4))
    message = refused(full, compiled(jnp.bfloat16, jnp.int32))
    assert re.search(r"collective 1 on: H100: .*f32\[4,8\].*; L4: .*s32\[4,8\]", message)


@pytest.mark.aot
def test_programs_for_h100s():
    """Two nodes of four: starts and dones, the names of kernels and the schedules differ."""
    devices = np.array(aot.devices(2, 4)).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    full, half = (compiled(product, mesh=mesh) for product in (jnp.float32, jnp.bfloat16))
    assert "-start(" in full.as_text() and full.as_text() != half.as_text()
    check_programs({"H100": full, "L4": half})
    rows = sequence(full)
    assert rows == sequence(compiled(jnp.float32))  # as on the CPU
    low = compiled(jnp.bfloat16, jnp.bfloat16, mesh=mesh)
    message = refused(full, low)
    assert re.search(r"collective 1 on: H100: .*f32\[4,8\].*; L4: .*bf16\[4,8\]", message)


def test_what_stays_within_a_kind_need_not_be_equal():
    """Devices 0, 1 and 2, 3 are of one kind each: pairs (0, 1), (2, 3) never meet the others."""
    within = SUM.replace("{{0,2},{1,3}}", "{{0,1},{2,3}}")
    kinds = ("strong", "strong", "weak", "weak")
    assert sequence(module(within, SUM, within, GATHER), kinds) == [SUMS, GATHERS]
    mixed = within.replace("{2,3}", "{3,2}"), within.replace("{{0,1},{2,3}}", "{{0,3},{1,2}}")
    assert len(sequence(module(*mixed), kinds)) == 1
    assert len(sequence(module(within), ("strong", "weak", "weak", "weak"))) == 1
    moves = "%c = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{2,3}}"
    assert sequence(module(moves), kinds) == [] != sequence(module(moves))
