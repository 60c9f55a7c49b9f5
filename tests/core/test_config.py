import dataclasses
import io
import json
import os
import subprocess
import sys
from typing import Literal

import pytest

from megajax.core import config
from megajax.core import script as script_
from megajax.core.config import equal, group, option
from megajax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = option(3, "how many", "pieces")
    kind: Literal["red", "green"] = option("red", "colour")
    limit: int | None = option(None, "a bound")
    rate: float = option(0.5, "a rate")

    def __post_init__(self):
        if self.size < 1:
            raise UserError("inner.size must be at least 1")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = group(Inner)
    mesh: Inner = group(Inner, resets=True)
    name: str = option("a", "a name")
    on: bool = option(False, "a switch")
    tail: int = option(1, "a tail", needs=equal("on", True), at_least=0)


@dataclasses.dataclass(frozen=True)
class Nested:
    outer: Outer = group(Outer)
    part: Outer = group(Outer, flag="short")


def test_leaves_are_dotted():
    assert [n for n, _, _ in config.leaves(Outer)] == [
        "inner.size",
        "inner.kind",
        "inner.limit",
        "inner.rate",
        "mesh.size",
        "mesh.kind",
        "mesh.limit",
        "mesh.rate",
        "name",
        "on",
        "tail",
    ]


def test_a_group_may_shorten_its_flags():
    names = config.flag_names(Nested)
    assert list(names) == [n for n, _, _ in config.leaves(Nested)]
    assert names["part.inner.size"] == "short.inner.size" and names["part.on"] == "short.on"
    assert names["outer.inner.size"] == "outer.inner.size"


def test_override_replaces_and_keeps_the_rest():
    cfg = config.override(Outer(), {"inner.size": 7, "inner.limit": 9, "name": "b"})
    assert (cfg.inner.size, cfg.inner.limit, cfg.inner.kind, cfg.name) == (7, 9, "red", "b")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"inner.sise": 1}, "Did you mean inner.size?"),
        ({"inner.size": "x"}, "inner.size='x' must be of type int"),
        ({"inner.size": True}, "must be of type int"),
        ({"inner.size": 0}, "at least 1"),
        ({"inner.kind": "gren"}, "Did you mean green?"),
        ({"inner.rate": "fast"}, "must be a number"),
        ({"name": None}, "must be of type str"),
    ],
)
def test_override_refuses(values, words):
    with pytest.raises(UserError) as error:
        config.override(Outer(), values)
    assert words in str(error.value)


def test_validation_sees_only_the_final_state():
    """Two fields that are legal only together may be changed together."""

    @dataclasses.dataclass(frozen=True)
    class Pair:
        low: int = option(0, "")
        high: int = option(1, "")

        def __post_init__(self):
            if self.low >= self.high:
                raise UserError("low must be below high")

    assert config.override(Pair(), {"low": 5, "high": 6}) == Pair(5, 6)


def test_json_round_trip():
    cfg = config.override(Outer(), {"inner.limit": 4, "inner.rate": 1e-7, "on": True})
    assert config.from_json(Outer, config.to_json(cfg)) == cfg
    assert json.loads(config.to_json(cfg))["inner"]["rate"] == 1e-7


def test_json_of_an_older_version_takes_defaults_and_of_a_newer_is_refused():
    assert config.from_json(Outer, '{"name": "z"}') == Outer(name="z")
    with pytest.raises(UserError, match="no field 'inner.colour'"):
        config.from_json(Outer, '{"inner": {"colour": 1}}')


def test_load_json_names_the_file(tmp_path):
    with pytest.raises(UserError, match="missing.json"):
        config.load_json(Outer, tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="broken.json is not a configuration"):
        config.load_json(Outer, tmp_path / "broken.json")


def test_diff_and_fingerprint():
    cfg = config.override(Outer(), {"inner.size": 8})
    assert config.diff(cfg, Outer()) == [("inner.size", 3, 8)]
    assert config.fingerprint(cfg) != config.fingerprint(Outer())
    assert config.fingerprint(cfg, ("inner",)) == config.fingerprint(Outer(), ("inner",))


SCRIPT = '''"""A script that does {nothing}."""
import dataclasses, sys
sys.path.insert(0, {tests!r})
from test_config import Outer, Inner
from megajax.core import config
from megajax.core import script as script_
BIG = Outer(inner=Inner(size=100), mesh=Inner(size=5, limit=2))
PRESETS = {{"small": Outer, "big": lambda: BIG}}
config.define_flags(PRESETS, "small")
def main():
    print(config.to_json(config.from_flags(PRESETS)[0]))
config.run(main)
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import pathlib

    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT.format(nothing="nothing", tests=str(pathlib.Path(__file__).parent)))

    def call(*flags, stdout=subprocess.PIPE):
        return subprocess.run(
            [sys.executable, path, *flags], stdout=stdout, stderr=subprocess.PIPE, text=True
        )

    return call


def test_flags_change_a_preset(script):
    done = script("--preset=big", "--inner.kind=green", "--inner.limit=4", "--on", "--name=none")
    assert done.returncode == 0, done.stderr
    cfg = json.loads(done.stdout)
    assert cfg["inner"] == {"size": 100, "kind": "green", "limit": 4, "rate": 0.5}
    assert cfg["on"] is True and cfg["name"] == "none"
    assert cfg["mesh"]["size"] == 5


@pytest.mark.parametrize("words", [["--help"], [f"--name={10**4 * 'long'}"]])
def test_a_reader_that_leaves_ends_a_script_quietly(script, words):
    """As `| head` does: at the flush of the exit, or within a print."""
    reader, writer = os.pipe()
    os.close(reader)
    done = script(*words, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            "OSError(28, 'No space left on device', '/runs/x')",
            75,
            "error: cannot write /runs/x: No space left on device; make room, and start the "
            "command again (exit code 75: a later start may work)\n",
        ),
        (
            "errors.TemporaryError('too late')",
            75,
            "error: too late (exit code 75: a later start may work)\n",
        ),
        ("errors.UserError('too early')", 2, "error: too early\n"),
    ],
)
def test_a_command_says_whether_a_later_start_may_work(error, code, said):
    program = (
        f"from megajax.core import config, errors\ndef main():\n  raise {error}\nconfig.run(main)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)


def test_another_broken_pipe_is_an_error():
    with pytest.raises(BrokenPipeError), script_.output_may_close():
        raise BrokenPipeError


def test_a_flag_of_a_whole_group_drops_the_presets_group(script):
    cfg = json.loads(script("--preset=big", "--mesh.rate=2").stdout)
    assert cfg["mesh"] == {"size": 3, "kind": "red", "limit": None, "rate": 2.0}
    assert cfg["inner"]["size"] == 100


@pytest.mark.parametrize(
    "changes",
    [
        {"inner.limit": None, "on": True, "name": "a b", "inner.kind": "green"},
        {"mesh.limit": None},  # the preset has 2
        {"mesh.size": 3, "mesh.limit": None},  # the group as it is without a preset
        {"mesh.size": 5, "mesh.rate": 0.25},
    ],
)
def test_a_configuration_is_spelled_in_flags(script, changes):
    big = Outer(inner=Inner(size=100), mesh=Inner(size=5, limit=2))
    cfg = config.override(big, changes)
    done = script("--preset=big", *config.spell(cfg, big))
    assert done.stdout == config.to_json(cfg) + "\n", done.stderr
    assert config.spell(big, big) == []


def test_help_lists_typed_leaves(script):
    done = script("--help")
    assert done.returncode == 0 and "A script that does nothing." in done.stdout
    assert "--inner.size: how many [pieces]; small: 3 (an integer)" in done.stdout
    assert "(an integer, or none)" in done.stdout and "(red|green)" in done.stdout
    full = script("--preset=big", "--helpfull")
    assert full.returncode == 0 and "--inner.size: how many [pieces]; big: 100" in full.stdout
    assert "--verbosity" in full.stdout and "--verbosity" not in done.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--iner.size=3", "error: there is no flag --iner.size. Did you mean --inner.size?"),
        ("--preset=bgi", "Did you mean big?"),
        ("--inner.size=many", "must be an integer"),
        ("--inner.kind=blue", "must be one of red, green"),
        ("--inner.size=0", "error: inner.size must be at least 1"),
        ("--config=nowhere.json", "error: cannot read nowhere.json"),
        (
            "--config=~nobody-here/a",
            "error: config=~nobody-here/a: Could not determine home directory. (--config)\n",
        ),
        ("stray", "error: unexpected argument 'stray': settings are --FLAG=VALUE"),
    ],
)
def test_wrong_flags_get_one_clear_message(script, flag, words):
    done = script(flag)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flag_without_effect_is_warned_of(script):
    done = script("--tail=2", "--inner.size=4")
    assert done.returncode == 0 and json.loads(done.stdout)["tail"] == 2
    assert "tail=2 has no effect: it needs on true, found false (--on)" in done.stderr
    assert "has no effect" not in script("--tail=2", "--on").stderr


def test_a_saved_configuration_starts_a_run(script, tmp_path):
    (tmp_path / "saved.json").write_text(config.to_json(Outer(name="saved")))
    cfg = json.loads(script(f"--config={tmp_path}/saved.json", "--inner.size=2").stdout)
    assert cfg["name"] == "saved" and cfg["inner"]["size"] == 2


def bomb(twice: str) -> str:
    """Returns 15 members, each made of the one before twice."""
    return "m0: &x0 {k: 1}\n" + "".join(
        f"m{i + 1}: &x{i + 1} {twice.replace('*x', f'*x{i}')}\n" for i in range(15)
    )


BAD_FILES = [
    ("run.json", "[1]", "must hold named members, like train and model, and is a list"),
    ("run.json", "null", "and is a null"),
    ("run.json", '"text"', "and is a str"),
    ("run.json", "[" * 100_000, "nested too deep"),
    ("run.json", '{"inner": {"size": "3"}}', "inner.size='3' must be of type int; nearest: 3 (--"),
    ("run.json", '{"inner": {"rate": "0.5"}}', "inner.rate='0.5' must be a number"),
    ("run.json", '{"inner": {"rate": NaN}}', "inner.rate=nan must be a finite number"),
    ("run.json", '{"inner": {"kind": ["red"]}}', "must be one of red, green"),
    ("run.json", '{"inner": 3}', "inner=3 must hold members, like inner.size=3"),
    ("run.json", '{"inner": {"size": 3, "size": 4}}', "the member 'size' comes twice"),
    ("run.yaml", "- 1", "and is a list"),
    ("run.yaml", "inner: {size: 1\n", "while parsing a flow mapping"),
    ("run.yaml", "name: a\nname: b\n", "name stands twice"),
    ("run.yaml", "inner:\n  sise: 1\n", "Did you mean inner.size?"),
    ("run.toml", "name = ", "is not a configuration"),
    ("run.json", '{"name": "a", "inner": {}, "name": "b"}', "the member 'name' comes twice"),
    ("run.json", " " * (2**20 + 1), "it has over 1,048,576 bytes"),
    ("run.yaml", "name: !!bool maybe", "does not fit its tag"),
    ("run.yaml", "name: !!timestamp now", "does not fit its tag"),
    ("run.yaml", "name: !!int ''", "does not fit its tag"),
    ("run.yaml", "[a, " * 5_000, "nested too deep"),
    ("run.yaml", "x: [" + "1, " * 10_001 + "]", "it has over 10,000 values"),
    ("run.yaml", "a: &a {b: *a}", "nested too deeply, or too many"),
    ("run.yaml", bomb("{a: *x, b: *x}"), "nested too deeply, or too many"),
    ("run.yaml", bomb("{<<: [*x, *x]}"), "it has over 10,000 values"),
    ("run.toml", "[inner]\nlimit = 'few'\n", "inner.limit='few' must be of type int"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD_FILES)
def test_a_file_that_is_no_configuration_gets_a_sentence(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        config.load_json(Outer, tmp_path / name, "run_dir")
    assert words in str(error.value) and str(error.value).endswith("(--run_dir)")
    assert str(error.value).startswith(f"{tmp_path / name} is not a configuration")


YAML = """# What is tried today.
name: tried        # a comment
inner:
  rate: 1e-3       # YAML 1.1 would call it text
  limit: none
mesh:
  # size: 4
part:
"""
TOML = '# Today.\nname = "tried"\n[inner]\nrate = 1e-3\nlimit = "none"\n'


@pytest.mark.parametrize(
    ("name", "text"), [("try.yaml", YAML), ("try.yml", YAML), ("try.toml", TOML)]
)
def test_a_file_by_hand_may_be_partial_and_has_comments(tmp_path, name, text):
    (tmp_path / name).write_text(text.replace("part:\n", ""))
    base = Outer(Inner(7, "green", 2), Inner(size=5))
    cfg = config.load(base, tmp_path / name)
    assert cfg == Outer(Inner(7, "green", None, 1e-3), Inner(size=5), "tried")
    assert config.load_json(Outer, tmp_path / name) == Outer(Inner(rate=1e-3), name="tried")


def test_a_member_of_a_whole_group_in_a_file_drops_the_presets_group():
    assert config.overlay(Outer(mesh=Inner(5, "green")), {"mesh": {"rate": 2}}).mesh == Inner(
        rate=2
    )


def test_a_file_may_name_members_by_their_flags():
    cfg = config.overlay(Nested(), {"short": {"inner": {"size": 4}}, "outer": {"on": True}})
    assert cfg == Nested(outer=Outer(on=True), part=Outer(inner=Inner(size=4)))


def test_every_preset_comes_back_from_its_file():
    from megajax.training.presets import PRESETS

    for name, make in PRESETS.items():
        assert config.from_json(type(make()), config.to_json(make())) == make(), name


def test_a_partial_file_goes_over_the_preset_only_if_that_is_given(script, tmp_path):
    (tmp_path / "try.yaml").write_text("inner: {kind: green}  # only this\n")
    flags = (f"--config={tmp_path}/try.yaml", "--name=b")
    cfg = json.loads(script("--preset=big", *flags).stdout)
    assert cfg["inner"] == {"size": 100, "kind": "green", "limit": None, "rate": 0.5}
    assert cfg["mesh"]["size"] == 5 and cfg["name"] == "b"
    assert json.loads(script(*flags).stdout)["inner"]["size"] == 3


def test_the_example_of_a_file_is_a_legal_run():
    import pathlib

    from megajax.training.presets import PRESETS

    example = pathlib.Path(__file__).parent.parent.parent / "experiments" / "example.yaml"
    cfg = config.load(PRESETS["nano"](), example)
    cfg.check(cfg.mesh.sizes(8))
    assert (cfg.model.block, cfg.mesh.tensor, cfg.optim.lr) == ("parallel", 4, 3e-3)
    assert cfg.optim.warmup == PRESETS["nano"]().optim.warmup


def test_characters_that_the_output_has_not_do_not_end_a_script(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(script_, "answer", lambda: None)
    monkeypatch.setattr(script_.app, "run", lambda main, flags_parser: main([]))
    script_.start(lambda argv: print("naïve \u04c2 \udce9"))
    assert raw.getvalue() == b"na\\xefve \\u04c2 \\udce9\n"
