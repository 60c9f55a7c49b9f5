"""Reward functions that a process can import, good ones and bad ones."""

import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np


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


class Odd(Exception):
    """Pickle cannot make it again: it passes one argument."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def odd(data_source, solution_str, ground_truth):
    raise Odd("odd", "error")


def leave(data_source, solution_str, ground_truth):
    sys.exit(3)


def large(data_source, solution_str, ground_truth):
    return 1e300


def arrays(data_source, solution_str, ground_truth):
    import jax.numpy as jnp  # slow: the other functions' processes do without

    return {"score": jnp.float32(0.5), "length": np.array(3), "text": np.str_("x")}


def arrays_of_all(prompts, completions):
    import jax.numpy as jnp

    return jnp.arange(len(completions))


def only_short(data_source, solution_str, ground_truth):
    return {"short": 1.0, "score": 1 / (solution_str != "c")}


def starts_another(data_source, solution_str, ground_truth):
    """Writes the numbers of its process and of one that it starts, and hangs in C code that keeps
    the interpreter's lock."""
    other = subprocess.Popen(["sleep", "100"])
    pathlib.Path(ground_truth).write_text(f"{os.getpid()} {other.pid}")
    re.match(r"(a+)+$", "a" * 60 + "b")


def loud(data_source, solution_str, ground_truth):
    """Prints much and leaves a process behind."""
    print("x" * 300_000)
    return float(subprocess.Popen(["sleep", "1000"]).pid)
