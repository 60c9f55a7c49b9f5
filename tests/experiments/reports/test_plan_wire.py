"""The section of a plan on what data parallelism sends."""

import dataclasses
import json

import pytest

from experiments.reports import plan as plan_report
from megajax.core.hardware import parse_cluster
from megajax.systems import aot
from tests.tiny import run_config

HOSTS = parse_cluster("a100:2x4")


def planned(**values):
    return aot.outline(run_config(train__dtype="bfloat16", **values), HOSTS)


def test_a_plan_with_a_wire_lists_levels_bits_and_what_it_saves():
    plan = planned(wire="sdp4bit", mesh__node=2)
    text = plan_report.markdown(plan)
    section = text[text.index("## What data parallelism sends") :]
    for words in ("| gradients inside a node | all-to-all | data |", "without a codec the same"):
        assert words.lower() in section.lower()
    assert "| gradients between nodes | all-to-all | node |" in section
    assert "| weights | all-gather | node+data |" in section
    assert "| quantizing |" in text and plan.estimate.quantize_s > 0
    told = json.loads(plan_report.to_json(plan))["exchange"]
    assert told == plan_report.exchange_figures(plan.step, plan.cluster)
    # The estimate of a step has the same times in it.
    sent = {"node": 0.0, "data": 0.0, "node+data": 0.0}
    for row in told["rows"]:
        sent[row["axes"]] += row["estimate_s"]
    assert sent == pytest.approx(plan.estimate.exposed_s)
    assert told["estimate_quantize_s"] == plan.estimate.quantize_s
    assert plan_report.seconds(told) == pytest.approx(
        sum(plan.estimate.exposed_s.values()) + plan.estimate.quantize_s
    )


def test_a_copy_without_a_wire_has_no_codec_and_other_plans_no_section():
    text = plan_report.markdown(planned(shard__zero="optimizer"))
    assert "| weights | all-gather | data | 16.0000 |" in text
    assert "| gradients | reduce-scatter | data | 32.0000 |" in text and "Quantizing" not in text
    plain = planned()
    assert "What data parallelism sends" not in plan_report.markdown(plain)
    assert "exchange" not in json.loads(plan_report.to_json(plain))
    one = dataclasses.replace(HOSTS, hosts=1, gpus_per_host=1)
    alone = aot.outline(run_config(wire="sdp4bit"), one)
    assert "Nothing: one rank has all gradients." in plan_report.markdown(alone)
