"""The range of every number that a flag can set."""

import ast
import math
import pathlib

import numpy as np
import pytest

from megajax.core import config
from megajax.core.config import Limits
from megajax.core.errors import UserError
from megajax.layers.attention import RopeConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.training.config import Config, TrainConfig
from megajax.training.optim import OptimConfig

ROOT = pathlib.Path(__file__).parent.parent.parent
INF = math.inf
SEED = 2**32 - 1  # NumPy's generators and jax's 32-bit keys take no more
# (lowest, highest, whether a float may equal them) -> members of a run's configuration.
RANGES = {
    (1, INF, True): """
        train.steps train.global_batch train.seq_len train.accumulate
        model.layers model.width model.heads model.kv_heads model.head_width model.mlp model.vocab
        model.vocab_multiple model.max_positions model.window model.rope.original_positions
        model.moe.top_k model.moe.width model.moe.groups model.moe.top_groups
        model.latent.query_rank model.latent.value model.moe.dense_width
        model.rope.theta model.rope.local_theta model.rope.factor
        mesh.pipe mesh.node mesh.data mesh.expert mesh.context mesh.tensor
        pipeline.microbatches pipeline.chunks prune.stages prune.steps prune.tile prune.chunk
        emulate emulate_without_gpu minder.hang_s""",
    (0, INF, True): """
        train.loss_chunks train.segments train.z_loss
        optim.lr optim.warmup optim.weight_decay optim.clip
        model.moe.experts model.moe.shared model.moe.aux_loss model.moe.z_loss model.moe.bias_rate
        prune.start data.prefetch data.hash_gib eval.every eval.batches
        eval.sample_tokens eval.temperature
        checkpoint.every checkpoint.keep checkpoint.memory_every_steps log.every log.gc_every
        model.rope.mscale model.rope.mscale_all_dim model.latent.rank model.moe.dense_layers
        lora.rank
        exchange.start_step exchange.check_every minder.evictions_per_day minder.pulse_every""",
    (2, INF, True): "model.latent.rotary",
    (32, INF, True): "exchange.weight_group exchange.inside_group exchange.between_group",
    (10, 900, True): "minder.continuity_s",
    (0, SEED, True): "train.seed",
    (0, 255, True): "told_code",
    (0.001, 1, True): "model.rope.partial",
    (0, 1, True): "optim.final optim.decay",
    (0, 0.99999, True): "optim.beta1 optim.beta2 optim.ema",
    (0, INF, False): """
        minder.clear_s minder.strict
        model.rope.low_freq_factor model.rope.high_freq_factor model.moe.scale model.query_scale
        model.rope.attention_factor model.rope.beta_fast model.rope.beta_slow
        model.moe.capacity_factor lora.alpha""",
    (1e-30, INF, True): "optim.eps model.norm_eps",
}
# 0 may be, the upper bound may not.
FRACTIONS = {
    1: "data.holdout model.dropout prune.sparsity prune.remain prune.delta",
    0.5: "prune.apriori",
}
NUMBERS = {
    name: field
    for name, hint, field in config.leaves(Config)
    if {int, float} & {hint, *getattr(hint, "__args__", ())}
}


def cases():
    """Yields (name, values just outside of its range, values at its edges)."""
    for (low, high, closed), names in RANGES.items():
        wrong = [low - 1, *([high + 1] if high < INF else [])] if closed else [low, low - 1e-9]
        right = [low, *([high] if high < INF else [10**6])] if closed else [1e-30, 1e6]
        for name in names.split():
            yield name, wrong, right
    for high, names in FRACTIONS.items():
        for name in names.split():
            yield name, [-1e-9, high], [0, high - 1e-9]


def test_every_number_of_a_run_has_its_range():
    table = {name: (wrong, right) for name, wrong, right in cases()}
    assert table.keys() == NUMBERS.keys()
    flags = config.flag_names(Config)
    for name, (wrong, right) in table.items():
        real = float in {NUMBERS[name].type, type(NUMBERS[name].default)}
        for value in wrong + ([math.nan, INF, -INF] if real else []):
            with pytest.raises(UserError) as error:
                config.override(Config(), {name: float(value) if real else value})
            said = str(error.value)
            assert said.startswith(f"{flags[name]}=") and said.endswith(f"(--{flags[name]})")
            assert "nearest: " in said or "the default is " in said
        for value in right:
            assert NUMBERS[name].metadata["limits"].allows(value), (name, value)


@pytest.mark.parametrize("folder", ["megajax", "experiments", "scripts"])
def test_every_number_that_is_declared_has_a_bound(folder):
    """So that whoever adds a field says what it may be."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                kind, call = ast.unparse(node.annotation), node.value
                if ast.unparse(call.func) == "option" and kind.split(" |")[0] in ("int", "float"):
                    bounds = {k.arg for k in call.keywords} & set(Limits.__dataclass_fields__)
                    assert bounds, f"{path}:{node.lineno} says no range of {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OptimConfig(clip=math.nan), "optim.clip=nan must be a finite number, at least 0"),
        (lambda: OptimConfig(eps=-1.0), "optim.eps=-1.0 must be at least 1e-30; nearest: 1e-30"),
        (lambda: TrainConfig(steps=0), "train.steps=0 must be at least 1; nearest: 1"),
        (lambda: EncoderConfig(vocab_multiple=0), "model.vocab_multiple=0 must be at least 1"),
        (lambda: RopeConfig(factor=8.0, high_freq_factor=1.0), "must be above model.rope.low_freq"),
        (lambda: RopeConfig(theta=10**400), "must be a finite number, at least 1; the default is"),
        (
            lambda: RopeConfig(theta=0.0),
            "model.rope.theta=0.0 must be at least 1; nearest: 1 (--mo",
        ),
        (lambda: OptimConfig(eps=1e-40), "optim.eps=1e-40 must be at least 1e-30; nearest: 1e-30"),
        (lambda: EncoderConfig(norm_eps=0.0), "model.norm_eps=0.0 must be at least 1e-30"),
        (lambda: TrainConfig(steps="3"), "train.steps='3' must be of type int; nearest: 3 (--tra"),
        (lambda: TrainConfig(steps=3.0), "train.steps=3.0 must be of type int; nearest: 3 (--tra"),
        (lambda: TrainConfig(steps=True), "train.steps=True must be of type int; nearest: 1"),
        (lambda: TrainConfig(steps=None), "train.steps=None must be of type int (--train.steps)"),
        (lambda: TrainConfig(steps=np.int64(0)), "train.steps=0 must be at least 1; nearest: 1"),
        (lambda: TrainConfig(steps=np.float32(2)), "train.steps=2.0 must be of type int; nearest"),
        (lambda: OptimConfig(lr="1e-3"), "optim.lr='1e-3' must be a number (--optim.lr)"),
        (lambda: OptimConfig(lr=np.float32("inf")), "optim.lr=inf must be a finite number"),
        (lambda: OptimConfig(lr=False), "optim.lr=False must be a number (--optim.lr)"),
        (lambda: DecoderConfig(tied=1), "model.tied=1 must be of type bool (--model.tied)"),
        (
            lambda: DecoderConfig(norm="RMS"),
            "must be one of rms, layer, rms_plus_one. Did you mean rms? (--mod",
        ),
        (lambda: DecoderConfig(norm=["rms"]), "model.norm=['rms'] must be one of rms, layer"),
        (lambda: DecoderConfig(rope=None), "model.rope=None must be of type RopeConfig"),
        (lambda: DecoderConfig(moe={"experts": 8}), "must be of type MoeConfig (--model.moe)"),
    ],
)
def test_a_config_made_in_python_is_checked_too(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)


def test_numbers_of_numpy_become_pythons_and_a_float_may_be_whole():
    cfg = OptimConfig(lr=np.float32(0.5), warmup=np.int64(3), clip=1)
    assert (cfg.lr, cfg.warmup, cfg.clip) == (0.5, 3, 1)
    assert config.from_json(OptimConfig, config.to_json(cfg)) == cfg
    assert DecoderConfig(tied=np.bool_(False), window=np.array(7)).window == 7
