"""Choosing an implementation: nothing falls back silently."""

import logging
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, tuned
from tests import tables


def test_reasons_are_all_in_the_error():
    for choice in ("hopper", "interpret"):
        with pytest.raises(NotImplementedError, match=r"op: .*needs bf16; needs 64.*'reference'"):
            dispatch.choose("op", choice, ["needs bf16", "needs 64"], [])


def test_a_default_without_our_kernel_says_so_once(caplog):
    with caplog.at_level(logging.WARNING), tables.on(tables.H100):
        for _ in range(3):
            assert dispatch.choose("this test", None, ["needs bf16"], []) == "library"
        dispatch.choose("this test", None, [], [None])
    assert [r.getMessage() for r in caplog.records if "this test" in r.getMessage()] == [
        "this test runs without our kernel on NVIDIA H100 80GB HBM3: needs bf16",
        "this test runs without our kernel on NVIDIA H100 80GB HBM3: no measurement on this kind "
        "of GPU says that the kernel is right and faster",
    ]
    with caplog.at_level(logging.WARNING):
        assert dispatch.choose("on a CPU", None, [], [None]) == "reference"
    assert "on a CPU" not in caplog.text


def test_one_program_takes_what_its_platform_has():
    def kernel(x, interpret):
        return x + (2 if interpret else 1)

    def reference(x):
        return x - 1

    def library(x):
        return x * 3

    def lowered(choice, platform):
        call = lambda x: dispatch.run(choice, kernel, reference, x, library=library)  # noqa: E731
        text = jax.jit(call).trace(x).lower(lowering_platforms=(platform,)).as_text()
        words = "add", "subtract", "multiply"
        return [word for word in words if f"stablehlo.{word}" in text]

    x = jnp.zeros(())
    for choice, cuda in (("measured", "add"), ("library", "multiply"), ("reference", "subtract")):
        assert jax.jit(lambda x, c=choice: dispatch.run(c, kernel, reference, x))(x) == -1
        assert lowered(choice, "cuda") == [cuda] and lowered(choice, "cpu") == ["subtract"]
    assert dispatch.run("interpret", kernel, reference, x) == 2


def test_a_kernel_for_another_platform_names_it_and_what_to_use():
    def kernel(x, interpret):
        return x + 1

    def call(x):
        return dispatch.run("hopper", kernel, lambda x: x, x, op="my_op")

    message = r"my_op: implementation='hopper' .* is for cpu; use implementation='reference'"
    for run in (call, jax.jit(call), jax.vmap(call)):
        with pytest.raises(NotImplementedError, match=message):
            run(jnp.zeros(2))
    text = jax.jit(call).trace(jnp.zeros(2)).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.add" in text


WINNER = tables.row("op", {}) | {"octaves": 0.0}


def test_another_gpu_is_a_reason(monkeypatch):
    device = mock.Mock(device_kind=tables.A100)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(NotImplementedError, match=r"9.0 \(Hopper\), found NVIDIA A100"):
        dispatch.choose("op", "hopper", [], [WINNER])
    assert dispatch.choose("op", None, [], [WINNER]) == "library"
    device.device_kind = tables.H100
    assert dispatch.choose("op", "hopper", [], []) == "hopper"
    assert dispatch.choose("op", None, [], [WINNER]) == "measured"


def test_the_mesh_says_which_gpus_a_program_is_for(monkeypatch):
    """Whatever this process has: a GPU, as if, and programs for others."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [mock.Mock(device_kind="NVIDIA H200")])
    assert tuned.target() == "NVIDIA H200"
    with tables.on(tables.A100):
        assert tuned.target() == tables.A100
        assert dispatch.choose("op", None, [], [WINNER]) == "library"
    with tables.on(tables.CPU):
        assert tuned.target() is None
    with tables.on(tables.H100):
        assert dispatch.choose("op", None, [], [WINNER]) == "measured"
