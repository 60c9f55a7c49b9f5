"""Folders and globs over symbolic links: every real folder once, every file once."""

import glob
import os
from pathlib import Path

import pytest

from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.source import open_source


def names(source):
    return [d.name for d in open_source(str(source), DataConfig()).documents()]


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "text"
    (home / "deep" / "deeper").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt", "deep/deeper/c.txt", "deep/.d.txt"):
        (home / name).write_text(name)
    return home


def loop(folder):
    """Two links that lead back: through both, `**` has 2^n paths of length n."""
    (folder / "aaa").symlink_to(folder, target_is_directory=True)
    (folder / "deep" / "back").symlink_to(folder, target_is_directory=True)
    (folder / "self").symlink_to(folder / "self")
    (folder / "nothing.txt").symlink_to(folder / "missing.txt")


def test_loops_of_links_end_and_add_nothing(folder):
    loop(folder)
    assert names(f"{folder}/**/*.txt") == ["a.txt", "deep/b.txt", "deep/deeper/c.txt"]
    assert names(f"{folder}/**/**/*.txt") == ["a.txt", "deep/b.txt", "deep/deeper/c.txt"]
    assert names(folder) == ["a.txt", "deep/.d.txt", "deep/b.txt", "deep/deeper/c.txt"]


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_file_that_several_names_reach_counts_once(folder, make):
    make(folder / "deep" / "b.txt", folder / "again.txt")
    name = "deep/b.txt" if make is os.symlink else "again.txt"
    assert sorted([name, "a.txt"]) == [n for n in names(f"{folder}/**/[ab]*.txt")]
    assert len(names(folder)) == 4


def test_links_to_folders_elsewhere_are_followed(folder, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "part").symlink_to(folder / "deep", target_is_directory=True)
    assert names(data) == ["part/.d.txt", "part/b.txt", "part/deeper/c.txt"]
    assert names(f"{data}/**/*.txt") == ["part/b.txt", "part/deeper/c.txt"]


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "**/*.txt", "*/*.txt", "**", "deep/**", "[ad]*/**/c.txt", "**/deeper/*", "**/.*.txt",
     "d*/../*.txt", "**/deep/**/*.txt", "x*/*.txt", "**.txt"],
)  # fmt: skip
def test_globs_match_what_glob_matches(folder, pattern):
    """Without links the standard library says what a pattern means."""
    matched = {Path(m) for m in glob.glob(f"{folder}/{pattern}", recursive=True)}
    files = {os.path.realpath(m) for m in matched if m.is_file()}
    if not files:
        with pytest.raises(UserError, match="has no .txt"):
            names(f"{folder}/{pattern}")
        return
    source = open_source(f"{folder}/{pattern}", DataConfig())
    assert {os.path.realpath(f) for f in source.files} == files


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(UserError, match=f"cannot list {folder}: Permission denied"):
        names(folder)


def test_a_folder_whose_files_may_not_be_asked_for_is_named(folder, monkeypatch):
    """It can be listed, and not searched: its texts must not be left out in silence."""
    real = os.stat

    def denied(path, *args, **options):
        if "deeper/" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(UserError, match="cannot read .*deeper/c.txt: Permission denied"):
        names(folder)
