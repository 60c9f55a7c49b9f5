"""Where tools may write."""

import pytest

from megajax.checkpoint import offline
from megajax.checkpoint.steps import open_steps
from megajax.core.errors import UserError


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("run", "run", "is"),
        ("run", "run/../run/", "is"),
        ("run", "link", "is"),
        ("run", "run/checkpoints", "lies in"),
        ("run", "run/checkpoints/new", "lies in"),
        ("run", ".", "holds"),
        ("run", "../new", None),
        ("run", "run-new", None),
        ("run", "s3://bucket/run", None),
        ("s3://bucket/run", "s3://bucket/run/", "is"),
        ("s3://bucket/run", "s3://bucket/run/new", "lies in"),
        ("s3://bucket/run", "s3://bucket", "holds"),
        ("s3://bucket/run", "s3://bucket/run2", None),
        ("s3://bucket/run", "gs://bucket/run", None),
        ("s3://bucket/run", "run", None),
    ],
)
def test_what_is_written_is_apart_from_what_is_read(source, target, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    steps = open_steps(f"{source}/checkpoints")
    if words is None:
        offline.keep_apart(steps, target)
        return
    with pytest.raises(UserError, match=rf" {words} .*; nearest: .*run-new$"):
        offline.keep_apart(steps, target)
