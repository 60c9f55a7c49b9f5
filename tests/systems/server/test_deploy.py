"""What surrounds a server: keys, the default model, other processes, the Kubernetes manifest."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.serving import SamplingParams, StructuredOutputsParams
from megajax.systems.server import launch
from megajax.systems.server.options import Config
from megajax.systems.server.worker import decode, encode
from tests import gguf_writer as w
from tests.systems.server import asgi

MANIFEST = Path(__file__).parents[3] / "scripts" / "serve_k8s.yaml"


def test_the_manifest_names_real_flags_and_fits_together():
    service, deployment = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (serve,) = pod["spec"]["containers"]
    args = dict(arg.removeprefix("--").split("=") for arg in serve["args"])
    known = config.flag_names(Config).values()
    assert set(args) <= set(known)
    assert serve["ports"][0]["containerPort"] == int(args["port"])
    pause = int(serve["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > pause + int(args["stop_timeout_s"])
    alive = serve["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] > grace
    mounted = {mount["name"] for mount in serve["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_keys_are_read_one_a_line_and_kept_from_others(tmp_path):
    file = tmp_path / "keys"
    file.write_text("k" * 16 + "\n\n" + "l" * 20 + "\n")
    file.chmod(0o600)
    assert launch.read_keys(str(file)) == ["k" * 16, "l" * 20]
    assert launch.read_keys(None) == []
    file.chmod(0o644)
    with pytest.raises(UserError, match="can be read by others: chmod 600"):
        launch.read_keys(str(file))
    file.chmod(0o600)
    for text in ("", "short\n"):
        file.write_text(text)
        with pytest.raises(UserError, match="a key a line, of at least 16 characters"):
            launch.read_keys(str(file))
    with pytest.raises(UserError, match="cannot read"):
        launch.read_keys(str(tmp_path / "none"))


def test_the_default_is_the_newest_nano_run_that_has_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="uv run experiments/pretrain.py"):
        launch.newest_run(tmp_path)
    for name, steps in (("nano-a", 1), ("nano-b", 1), ("nano-c", 0), ("base-d", 1)):
        run = tmp_path / "runs" / "pretrain" / name
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.json").write_text("{}")
        if steps:
            (run / "checkpoints" / "3").mkdir()
    os.utime(tmp_path / "runs/pretrain/nano-a/checkpoints", (2e9, 2e9))
    assert launch.newest_run(tmp_path).endswith("nano-a")


def test_commands_come_back_as_they_were_told():
    form = StructuredOutputsParams(json={"type": "object"})
    params = SamplingParams(stop="x", logit_bias={3: 1.5}, n=2, structured_outputs=form, seed=5)
    told = [("submit", [1, 2], params), ("cancel", 7, None), ("submit", [3], SamplingParams())]
    assert decode(encode(told)) == told
    assert decode(encode([])) == [] and decode(encode(None)) is None


@pytest.mark.slow
def test_weights_in_the_bits_of_the_file_give_the_answers_of_dense_ones(
    tmp_path, monkeypatch, capsys
):
    """Over HTTP; also where memory is short and no flag says so."""
    tensors = w.in_four_bits(w.llama_tensors(np.random.default_rng(0)))
    (tmp_path / "x.gguf").write_bytes(w.gguf(w.llama() | w.vocabulary(), tensors))
    bodies = [
        {"prompt": p, "max_tokens": 12, "temperature": t, "seed": 1, "logprobs": 3}
        for p, t in (("hello", 0), ("w he", 1), ([1, 2, 3], 0))
    ]

    async def answers(server, worker):
        worker.start()
        async with asgi.client(server.app) as client:
            responses = [(await client.post("/v1/completions", json=b)).json() for b in bodies]
        worker.stop()
        assert await worker.join(60)
        return [f["choices"][0] for f in responses]

    def ask(**options):
        cfg = Config(
            gguf=str(tmp_path / "x.gguf"),
            dtype="float32",
            max_batch=2,
            pages=20,
            prefill_chunk=8,
            mesh=MeshSpec(tensor=1, data=1),
            cache_dir=str(tmp_path / "c"),
            **options,
        )
        worker, server = launch.open_server(cfg)
        return asyncio.run(answers(server, worker)), capsys.readouterr().out

    bits = "matrices in the file's bits"
    dense, said = ask(weights="dense")
    assert bits not in said and all(len(c["logprobs"]["tokens"]) == 12 for c in dense)
    packed, said = ask(weights="packed")
    assert bits in said and [c["text"] for c in packed] == [c["text"] for c in dense]
    choices, said = ask()
    assert choices == dense and bits not in said
    monkeypatch.setattr("megajax.systems.open_model.free_bytes", lambda _: 1000)
    choices, said = ask()
    assert choices == packed and bits in said and "--weights=packed: dense weights need" in said
    with pytest.raises(UserError, match="weights=packed keeps the bits"):
        ask(weights="packed", quantize="int4")
    assert "in int4" in ask(quantize="int4")[1]
