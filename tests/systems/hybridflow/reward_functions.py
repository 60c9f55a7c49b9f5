"""Reward functions that a process can import, good ones and bad ones."""

import os
import time


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}


def trl(prompts, completions, ground_truth, **columns):
    assert len(columns["uid"]) == len(prompts)
    return [float(len(c)) for c in completions]


def hang(data_source, solution_str, ground_truth):
    if solution_str == "b":
        time.sleep(100)
    return 1.0


def spin(data_source, solution_str, ground_truth):
    while solution_str == "b":
        pass
    return 1.0


def die(data_source, solution_str, ground_truth):
    os._exit(3)


def fail(data_source, solution_str, ground_truth):
    return {}["key"]


def nan(data_source, solution_str, ground_truth):
    return float("nan")


def text(data_source, solution_str, ground_truth):
    return "1"


def short(prompts, completions):
    return [1.0]


def no_score(data_source, solution_str, ground_truth):
    return {"reward": 1.0}
