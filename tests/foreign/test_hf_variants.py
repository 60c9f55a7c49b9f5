"""Thousands of variants of config.json against transformers: the same logits, or refused by name.

tests/golden/make_hf_members.py made the variants and transformers' logits. A model is its
configuration and its tensors, so variants whose folders give an equal pair must have equal logits
there, and the reverse (every variant, without a network); one of each pair is computed (the slow
test; a few here). What transformers refuses counts as refused.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.foreign import hf
from megajax.layers.ops import Ops
from megajax.models import decoder, encoder, encoder_names, hf_members, names
from megajax.models.encoder_config import EncoderConfig
from tests.golden import make_hf_members as made

TOLERANCE = 2e-4
FAMILIES = (*made.DECODERS, *made.ENCODERS)


@functools.cache
def frozen():
    """Returns (rows, each set of tensors' shapes, transformers' logits)."""
    return made.frozen()


def config_of(row):
    return made.changed(made.base(row["family"]), row["changes"])


def read(row):
    """Returns the configuration of a row. Raises: UserError."""
    maps = names if row["family"] in made.DECODERS else encoder_names
    return maps.from_hf_config(config_of(row))


@functools.cache
def outcomes():
    """Returns [(row, configuration or UserError)] of all rows."""
    values = []
    for row in frozen()[0]:
        try:
            values.append((row, read(row)))
        except UserError as error:
            values.append((row, error))
    return values


def models():
    """Returns {(configuration, place of the tensors' shapes): rows that transformers computes}."""
    values = {}
    for row, cfg in outcomes():
        if not isinstance(cfg, UserError) and "logits" in row:
            values.setdefault((cfg, row["shapes"]), []).append(row)
    return values


def visible(cfg):
    """Returns a configuration without what these short rows cannot show."""
    if isinstance(cfg, EncoderConfig):
        return dataclasses.replace(cfg, dropout=0.0, labels=2)
    cfg = cfg.at(max(made.LENGTHS))
    window = cfg.window if cfg.window and cfg.window < max(made.LENGTHS) else None
    return dataclasses.replace(
        cfg,
        window=window,
        pattern=cfg.pattern if window else None,
        max_positions=cfg.max_positions if cfg.position == "learned" else 1,
        mlp=1 if cfg.moe.experts else cfg.mlp,
    )


def write(row, folder):
    tensors = made.weights(frozen()[1][row["shapes"]])
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(row)))


def logits_of(cfg, params):
    """Returns our logits, or last states, at the places that are frozen."""
    family = names.family(cfg) if not isinstance(cfg, EncoderConfig) else encoder_names.family(cfg)
    inputs = made.inputs(family)
    if not isinstance(cfg, EncoderConfig):
        tokens = inputs["tokens"]
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        batch = {"tokens": tokens, "positions": positions}
        logits = np.asarray(jax.jit(decoder.parts(cfg).logits)(params, batch))[..., : cfg.vocab]
        return logits[:, made.PLACES]
    parts = encoder.parts(cfg, ops=Ops())
    types = np.minimum(inputs["types"], max(cfg.types - 1, 0))
    run = encoder.classify if cfg.head == "classify" else encoder.logits
    batch = {"tokens": inputs["tokens"], "types": types}
    logits = np.asarray(jax.jit(functools.partial(run, parts))(params, batch, inputs["lengths"]))
    if cfg.head == "classify":
        return logits
    return logits[..., : cfg.vocab if cfg.head == "mlm" else None][:, made.PLACES]


def test_every_variant_is_read_as_transformers_reads_it_or_refused_by_name():
    rows, _, arrays = frozen()
    assert len(rows) > 2500 and {r["family"] for r in rows} == set(FAMILIES)
    for group in models().values():
        first = arrays[group[0]["logits"]]
        for row in group:
            other = arrays[row["logits"]]
            same = (
                first.shape == other.shape
                and made.error_of(first, other, row["family"]) < TOLERANCE
            )
            assert same, (group[0]["name"], row["family"], row["name"], row["changes"])
    seen = {}
    for (cfg, shapes), group in models().items():
        for row in group:
            key = row["family"], row["logits"], shapes
            assert seen.setdefault(key, visible(cfg)) == visible(cfg), (key[0], row["name"])
    refused = [(row, str(e)) for row, e in outcomes() if isinstance(e, UserError)]
    words = {"gpt2": "n_head"}
    for row, said in refused:
        inner = [n for v in row["changes"].values() if isinstance(v, dict) for n in v]
        known = (
            *row["changes"],
            *inner,
            words.get(row["family"], "kv_heads"),
            "model.",
            "moe.",
            "rope",
        )
        assert any(n in said for n in known), (row["family"], row["name"], said)


def test_a_base_of_each_family_is_never_refused():
    for family in FAMILIES:
        row = next(r for r in frozen()[0] if r["family"] == family and r["name"] == "base")
        assert read(row) in {cfg for cfg, _ in models()} and "logits" in row


QUICK = ("llama", "parameters llama3, theta"), ("qwen3_moe", "base"), ("albert", "groups 2 of 4")


def check_model(row, folder):
    """Compares logits; then the export's, whose configuration and bits must be the same."""
    write(row, folder)
    cfg, params = hf.load(folder)
    logits = logits_of(cfg, params)
    error = made.error_of(logits, frozen()[2][row["logits"]], row["family"])
    assert error < TOLERANCE, (row["family"], row["name"], error)
    hf.save(params, cfg, folder / "export")
    again, back = hf.load(folder / "export")
    assert again == cfg, (row["family"], row["name"])
    for (name, x), (_, y) in zip(named_leaves(params), named_leaves(back), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


@pytest.mark.parametrize(("family", "name"), QUICK)
def test_logits_of_some_variants(family, name, tmp_path):
    rows = frozen()[0]
    check_model(next(r for r in rows if (r["family"], r["name"]) == (family, name)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_variant(family, tmp_path):
    chosen = [group[0] for group in models().values() if group[0]["family"] == family]
    failures = []
    for i, row in enumerate(chosen):
        try:
            with jax.disable_jit():  # a fifth of the time: nearly every model is another program
                check_model(row, tmp_path / str(i))
        except UserError as error:  # of tensors: a head that config.json ties and that differs
            if not any(n in str(error) for n in (*row["changes"], "tensor", "shape")):
                failures.append((row["name"], str(error)))
        except AssertionError as error:
            failures.append((row["name"], str(error)))
    assert not failures, failures
    print(f"{family}: {len(chosen)} models")


def test_members_of_the_table_are_read_inert_or_fixed():
    """A member of transformers' classes that is neither read nor inert must have its default."""
    table = hf_members.table()
    assert set(table["families"]) == {*FAMILIES, *made.TABLED, *made.LATER, *made.PARTS}
    for family in FAMILIES:
        entry = table["families"][family]
        assert not hf_members.INERT & hf_members.READ
        fixed = [n for n in entry["members"] if n not in hf_members.INERT | hf_members.READ]
        for name in fixed:
            value = {"default": entry["members"][name]["default"]}["default"]
            if name == "use_cache" or name in table["generation"]:
                continue
            other = not value if isinstance(value, bool) else 2
            config = made.base(family) | {name: other}
            maps = names if family in made.DECODERS else encoder_names
            with pytest.raises(UserError, match=f"{name}="):
                maps.from_hf_config(config)
