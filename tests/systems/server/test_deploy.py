"""What surrounds a server: keys, the default model, other processes, the Kubernetes manifest."""

import os
from pathlib import Path

import pytest
import yaml

from megajax.core import config
from megajax.core.errors import UserError
from megajax.serving import SamplingParams, StructuredOutputsParams
from megajax.systems.server import launch, peers
from megajax.systems.server.options import Config

MANIFEST = Path(__file__).parents[3] / "scripts" / "serve_k8s.yaml"


def test_the_manifest_names_real_flags_and_fits_together():
    service, deployment = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (serve,) = pod["spec"]["containers"]
    given = dict(arg.removeprefix("--").split("=") for arg in serve["args"])
    known = config.flag_names(Config).values()
    assert set(given) <= set(known)
    assert serve["ports"][0]["containerPort"] == int(given["port"])
    pause = int(serve["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > pause + int(given["stop_timeout_s"])
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
    assert peers.decode(peers.encode(told)) == told
    assert peers.decode(peers.encode([])) == [] and peers.decode(peers.encode(None)) is None
