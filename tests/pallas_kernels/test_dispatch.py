"""Choosing an implementation: nothing falls back silently."""

import logging
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch


def test_reasons_are_all_in_the_error():
    for choice in ("hopper", "interpret"):
        with pytest.raises(NotImplementedError, match=r"op: .*needs bf16; needs 64.*'reference'"):
            dispatch.choose("op", choice, ["needs bf16", "needs 64"])


def test_a_default_falls_back_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert dispatch.choose("this test", None, ["needs bf16"]) == "reference"
    assert [r.getMessage() for r in caplog.records].count(
        "this test runs its reference implementation: needs bf16"
    ) == 1


def test_one_program_takes_what_its_platform_has():
    assert dispatch.choose("op", None, []) == "auto"

    def kernel(x, interpret):
        return x + (2 if interpret else 1)

    def reference(x):
        return x - 1

    x = jnp.zeros(())
    for choice, want in (("auto", -1), ("reference", -1), ("interpret", 2)):
        assert jax.jit(lambda x, c=choice: dispatch.run(c, kernel, reference, x))(x) == want


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


def test_another_gpu_is_a_reason(monkeypatch):
    class Device:
        compute_capability = "8.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(NotImplementedError, match=r"capability 9.0 \(Hopper\), found 8.0"):
        dispatch.choose("op", "hopper", [])
    Device.compute_capability = "9.0"
    assert dispatch.choose("op", None, []) == "auto"


def test_the_mesh_says_which_gpus_a_program_is_for(monkeypatch):
    """No GPU is here; that of the mesh is another one, so plain JAX is lowered for it."""
    device = mock.Mock(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")
    mesh = mock.Mock(abstract_device=device)
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert dispatch.choose("op", None, []) == "reference"
    with pytest.raises(NotImplementedError, match=r"9.0 \(Hopper\), found NVIDIA A100"):
        dispatch.choose("op", "hopper", [])
    device.device_kind = "NVIDIA H200"
    assert dispatch.choose("op", None, []) == "auto"
    device.platform = "cpu"
    assert dispatch.choose("op", None, []) == "auto"
