"""experiments/minder.py: what its flags refuse, where metrics come from, what a stop leaves."""

import itertools
import os
import runpy
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.reports import minder_watch
from megajax.core import config
from megajax.core.errors import UserError
from megajax.monitor.samples import Samples
from megajax.systems.minder import Settings
from tests import machines


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "define_flags", lambda *_, **__: None)
        return runpy.run_path(str(machines.ROOT / "experiments/minder.py"), run_name="imported")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"which server\? .*--prometheus"),
        ({"prometheus": "http://x", "user": "me"}, r"a user needs a password.*--password_file"),
        ({"prometheus": "http://x", "password_file": "p"}, "a user needs a password"),
        (
            {"prometheus": "http://x", "user": "me", "password_file": "p", "token_file": "t"},
            "a user or a token",
        ),
        ({"prometheus": "http://x", "token_file": "none"}, r"token_file=none cannot be read"),
        ({"prometheus": "x"}, r"prometheus=x must be an address"),
        ({"prometheus": "http://x", "queries": "none.json"}, r"none.json: .*\(--queries\)"),
    ],
)
def test_what_cannot_be_of_a_server_is_named(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text("secret")
    with pytest.raises(UserError, match=message):
        minder_watch.source(minder_watch.Server(**flags), ("cpu_usage",))


def test_secrets_and_expressions_come_from_files(tmp_path):
    secret, queries = tmp_path / "secret", tmp_path / "queries.json"
    server = minder_watch.Server("http://me.invalid", queries=str(queries), token_file=str(secret))
    secret.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        minder_watch.source(server, ("queue",))
    secret.write_text("abc\nwhatever\n")
    queries.write_text('{"queue": "x"}')
    assert minder_watch.source(server, ("queue", "cpu_usage"))._queries == {"queue": "x"}
    with pytest.raises(UserError, match="has none of the model's metrics: cpu_usage"):
        minder_watch.source(server, ("cpu_usage",))
    queries.write_text('{"queue": 3}')
    with pytest.raises(UserError, match=r"must be \{metric: expression\}"):
        minder_watch.source(server, ("queue",))
    with pytest.raises(UserError, match=r"are none that exporters show.*--queries"):
        minder_watch.source(minder_watch.Server("http://me.invalid"), ("queue",))


def test_the_start_prints_no_password(script, monkeypatch, capsys):
    cfg = replace(script["full"](), server=minder_watch.Server("https://me:s3cret@x:9090"))
    monkeypatch.setattr(config, "from_flags", lambda *_: (cfg, script["full"]()))
    monkeypatch.setattr(minder_watch, "watch", lambda *_: 0)
    for name in ("start", "cache_programs"):  # of this process they are what the tests need
        monkeypatch.setattr(script["mesh"], name, lambda *_, **__: None)
    assert script["main"]("watch") == 0
    assert "server.prometheus: None -> https://***@x:9090" in capsys.readouterr().out


def test_a_missing_model_says_how_to_make_one(script, tmp_path):
    cfg = script["Config"](out=str(tmp_path))
    with pytest.raises(UserError, match=r"model=.*model.npz is not there; .*minder.py train"):
        minder_watch.watch(cfg.watch, cfg.server, cfg.model_path, cfg.settings, 800, str(tmp_path))


def test_flags_change_the_settings_of_a_model(script):
    learnt = Settings(continuity_s=96.0, strict=1.5)
    assert script["Config"]().settings(learnt) == learnt
    assert script["Config"](strict=2.0).settings(learnt) == Settings(continuity_s=96, strict=2)
    assert "were learnt for a continuity of 96 s" in minder_watch.mismatch(Settings(), learnt)
    assert minder_watch.mismatch(Settings(continuity_s=95), learnt) == ""  # as many ticks


def test_train_and_watch_start_from_what_is_worth_something(script, monkeypatch):
    tiny, full = script["tiny"](), script["full"]()
    assert tiny.train.steps < full.train.steps and full.train.machines == 64
    monkeypatch.setattr(config, "start_given", lambda: False)
    for words, preset in ((["train"], full), (["watch"], full), (["evaluate"], tiny), ([], tiny)):
        monkeypatch.setattr("sys.argv", ["minder.py", *words])
        assert script["adapt"](tiny, {}, {}) == preset


def test_what_a_server_gave_is_kept_until_the_training_is_done(tmp_path, monkeypatch):
    """The server is younger than what is asked for, and has machines of other jobs."""
    now, asked, said = 1_700_003_605, [], []
    monkeypatch.setattr(minder_watch.time, "time", lambda: now)

    class Server:
        def read(self, start, end):
            asked.append((start, end))
            rows = [
                (float(t), m, "cpu_usage", float(t % 7))
                for t, m in itertools.product(range(start, end, 1), ("a1", "a2", "b1"))
                if t >= now - 1805
            ]
            return Samples.of(rows, start, end)

    recording = tmp_path / "training" / "recorded.npz"
    recording.parent.mkdir()
    (grid,) = minder_watch.recorded(Server(), 1.0, "a.*", recording, said.append)
    assert [b - a for a, b in asked] == [240] * 15 and said[-1] == "read 60 of 60 minutes"
    assert grid.machines == ("a1", "a2") and (grid.start, grid.end) == (now - 1805, now - 5)
    assert (grid.values_CNT[0, 0] == np.arange(grid.start, grid.end) % 7).all()
    (again,) = minder_watch.recorded(Server(), 1.0, "a.*", recording, said.append)
    assert len(asked) == 15 and again.start == grid.start and again.machines == grid.machines
    assert np.array_equal(again.values_CNT, grid.values_CNT)
    minder_watch.forget(recording.parent)
    assert not recording.exists()


def test_files_that_are_not_there_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("")
    assert minder_watch.paths(f"{tmp_path}/a.csv") == [tmp_path / "a.csv"]
    with pytest.raises(UserError, match=r"b.csv is no file \(--source\)"):
        minder_watch.paths(f"{tmp_path}/a.csv,{tmp_path}/b.csv")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_daemon_and_are_given_back(number):
    before = signal.getsignal(number)

    class Daemon:
        def run(self, stop):
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            assert stop.wait(10)

    assert minder_watch.until_told(Daemon()) == number
    assert signal.getsignal(number) == before


def test_a_port_and_a_picture_that_cannot_be_name_their_flags(tmp_path):
    with pytest.raises(UserError, match=r"metrics_port=.*\(--metrics_host, --metrics_port\)"):
        with minder_watch.metrics_server("256.0.0.1", 0, SimpleNamespace(rows=list)):
            pass
    with pytest.raises(UserError, match=r"heatmap=x.gif must end in .html, .png or .svg"):
        minder_watch.heatmap_path("x.gif")
    assert minder_watch.heatmap_path(f"{tmp_path}/heat.png") == tmp_path / "heat.png"
