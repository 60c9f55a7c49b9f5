"""From logits to the next token of each sequence of an engine, on the device.

The rules of the sequences are arrays, so that one program serves all of them. They change logits in
vLLM's order: bias, penalties, temperature, min-p, top-k, top-p. What no sequence of a step asks for
is not computed (`lax.cond`). The noise of a token depends only on the seed of its request and the
token's place in the answer, so a sample does not depend on the batch in which it is drawn.

Legend: B sequences of a step, S slots (sequences that run), V vocabulary with its padding, W
32-bit words of a mask of the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.layers.losses import NEGATIVE
from megajax.serving.params import ENDS

Array = jax.Array
NO_TOKEN = 2**31 - 1  # no vocabulary has it
GREEDY = 1e-30  # (chosen) temperature below which logits over it would not be finite in float32
TOP = 20  # most likeliest tokens that an answer may list (OpenAI's limit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """How each sequence of a step draws. Names and meanings are vLLM's.

    top_k: 0 is all. seed: uint32 words of a PRNG key, (B, 2). drawn: tokens of the answer so far.
    changes: whether the sequence has penalties, a bias or a constraint. masked: whether it has a
    constraint. tops: whether it lists likeliest tokens. least: tokens of the answer before which
    none of `ends` is drawn, (B, ENDS) ids, filled up with NO_TOKEN.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    seed: Any
    drawn: Any
    changes: Any
    masked: Any
    tops: Any
    least: Any
    ends: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Changes:
    """The state that penalties, biases and constraints read, by slot.

    counts_SV: how often the answer has each token, int32. seen_SV: whether prompt or answer have
    it. bias_SV: added to its logit. allowed_SW: a bit for each token that may come next, uint32.
    """

    counts_SV: Any
    seen_SV: Any
    bias_SV: Any
    allowed_SW: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a step drew: token ids, log-probabilities of the unmodified logits, and the TOP
    likeliest tokens with theirs, which are zeros if no sequence of the step lists them.

    scores: the same arrays for every token that was fed, with the token that follows it in the
    prompt as `token`; None if no sequence asks for scores.
    """

    token: Any
    logprob: Any
    top_token: Any
    top_logprob: Any
    scores: Any = None


def plain_rules(B: int) -> Rules:
    """Returns the rules of B greedy sequences, in NumPy, to be filled in."""
    ones, zeros = np.ones(B, np.float32), np.zeros(B, np.float32)
    none, no = np.zeros(B, np.int32), np.zeros(B, bool)
    return Rules(  # type: ignore[arg-type]
        zeros, none, ones, zeros.copy(), ones.copy(), zeros.copy(), zeros.copy(),
        np.zeros((B, 2), np.uint32), none.copy(), no, no.copy(), no.copy(), none.copy(),
        np.full((B, ENDS), NO_TOKEN, np.int32),
    )  # fmt: skip


def no_changes(slots: int, vocab: int) -> Changes:
    """Returns Changes that change nothing."""
    shape = (slots, vocab)
    allowed = jnp.zeros((slots, words(vocab)), jnp.uint32)
    return Changes(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape), allowed)


def words(vocab: int) -> int:
    """Returns W, the 32-bit words of a mask of the vocabulary."""
    return -(-vocab // 32)


def draw_tokens(
    logits_BV: Array,
    log_z_B: Array,
    rules: Rules,
    changes: Changes,
    slot_B: Array,
    never: int | None = None,
) -> tuple[Drawn, Changes]:
    """Returns what each sequence draws, and the changes after it.

    logits: float32. log_z: their log-sum-exp. slot_B: of each sequence; S: its draw is not counted.
    never: a token that no sequence draws; None: there is none.
    """
    modified_BV = lax.cond(
        jnp.any(rules.changes),
        lambda: _change(logits_BV, rules, changes, slot_B),
        lambda: logits_BV,
    )
    if never is not None:
        modified_BV = jnp.where(jnp.arange(logits_BV.shape[-1]) == never, -jnp.inf, modified_BV)
    hot_B = rules.temperature >= GREEDY
    token_B = lax.cond(
        jnp.any(hot_B),
        lambda: jnp.where(hot_B, _sample(modified_BV, rules), jnp.argmax(modified_BV, -1)),
        lambda: jnp.argmax(modified_BV, -1),
    ).astype(jnp.int32)
    logprob_B = jnp.take_along_axis(logits_BV, token_B[:, None], 1)[:, 0] - log_z_B
    top = lax.cond(jnp.any(rules.tops), _likeliest, _nothing, logits_BV)
    after = Changes(
        changes.counts_SV.at[slot_B, token_B].add(1, mode="drop"),
        changes.seen_SV.at[slot_B, token_B].set(True, mode="drop"),
        changes.bias_SV,
        changes.allowed_SW,
    )
    return Drawn(token_B, logprob_B, top[0], top[1] - log_z_B[:, None]), after


def score(logits_TV: Array, log_z_T: Array, next_T: Array) -> Drawn:
    """Returns the log-probabilities of the tokens that follow, and the likeliest in their places.

    logits: float32. log_z: their log-sum-exp.
    """
    logprob_T = jnp.take_along_axis(logits_TV, next_T[:, None], 1)[:, 0] - log_z_T
    values_TK, ids_TK = _likeliest(logits_TV)[::-1]
    return Drawn(next_T, logprob_T, ids_TK, values_TK - log_z_T[:, None])


def _likeliest(logits_BV: Array) -> tuple[Array, Array]:
    """The TOP largest logits and their tokens, of equal ones the first tokens first."""
    k = min(TOP, logits_BV.shape[-1])
    values_Bk, ids_Bk = lax.platform_dependent(
        logits_BV, cuda=functools.partial(_tops, k), default=lambda x: tuple(lax.top_k(x, k))
    )
    pad = ((0, 0), (0, TOP - k))
    return jnp.pad(ids_Bk, pad), jnp.pad(values_Bk, pad, constant_values=NEGATIVE)


def _tops(k: int, logits_BV: Array) -> tuple[Array, Array]:
    """lax.top_k of finite logits in k passes, without a sort (see `_bound`)."""
    index_BV = lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    left_BV, ids, values = logits_BV, [], []
    for _ in range(k):
        token_B1 = jnp.argmax(left_BV, -1, keepdims=True).astype(jnp.int32)
        value_B1 = jnp.take_along_axis(logits_BV, token_B1, 1)
        ids, values = [*ids, token_B1], [*values, value_B1]
        # From the logits again, so that nothing has to be written between two passes.
        after_BV = (logits_BV < value_B1) | ((logits_BV == value_B1) & (index_BV > token_B1))
        left_BV = jnp.where(after_BV, logits_BV, -jnp.inf)
    return jnp.concatenate(values, 1), jnp.concatenate(ids, 1)


def _nothing(logits_BV: Array) -> tuple[Array, Array]:
    shape = (logits_BV.shape[0], TOP)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits_BV.dtype)


def _change(logits_BV: Array, rules: Rules, changes: Changes, slot_B: Array) -> Array:
    """Bias, repetition, frequency, presence, constraint and least length; only for sequences that
    have any."""
    rows = jnp.minimum(slot_B, changes.counts_SV.shape[0] - 1)
    counts_BV, seen_BV, bias_BV = (
        x[rows] for x in (changes.counts_SV, changes.seen_SV, changes.bias_SV)
    )
    x_BV = logits_BV + bias_BV
    repetition_B1 = rules.repetition[:, None]
    repeated_BV = jnp.where(x_BV > 0, x_BV / repetition_B1, x_BV * repetition_B1)
    x_BV = jnp.where(seen_BV, repeated_BV, x_BV)
    x_BV -= rules.frequency[:, None] * counts_BV.astype(jnp.float32)
    x_BV -= jnp.where(counts_BV > 0, rules.presence[:, None], 0.0)
    allowed_BV, vocab = ~rules.masked[:, None], x_BV.shape[-1]
    words_BV = jnp.repeat(changes.allowed_SW[rows], 32, axis=1)[:, :vocab]
    place_V = jnp.arange(vocab, dtype=jnp.uint32) % jnp.uint32(32)
    allowed_BV |= (words_BV >> place_V[None] & jnp.uint32(1)).astype(bool)
    # Not NEGATIVE: a high temperature, which divides the logits, would bring that within reach.
    x_BV = jnp.where(allowed_BV, x_BV, -jnp.inf)
    early_B1 = (rules.drawn < rules.least)[:, None]
    row_B1 = jnp.arange(x_BV.shape[0])[:, None]
    ends_BE = jnp.where(early_B1, rules.ends, NO_TOKEN)
    x_BV = x_BV.at[row_B1, ends_BE].set(-jnp.inf, mode="drop")
    return jnp.where(rules.changes[:, None], x_BV, logits_BV)


def _sample(logits_BV: Array, rules: Rules) -> Array:
    """Draws by Gumbel noise from what the filters leave."""
    x_BV = logits_BV / jnp.maximum(rules.temperature, GREEDY)[:, None]
    filtered = (rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)
    x_BV = lax.cond(jnp.any(filtered), lambda: _filter(x_BV, rules), lambda: x_BV)

    def noise(words: Array, drawn: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, drawn), x_BV.shape[1:], jnp.float32)

    return jnp.argmax(x_BV + jax.vmap(noise)(rules.seed, rules.drawn), -1)


def _filter(x_BV: Array, rules: Rules) -> Array:
    """Masks what min-p, top-k and top-p leave out, each of what the one before left.

    Nothing is sorted. What top-k keeps are the values of which fewer than k are larger, and what
    top-p keeps those whose larger ones have less than p together; either is all above a bound,
    which `_bound` finds. Equal values stay or go together. The likeliest token always stays.
    """
    least_B1 = x_BV.max(-1, keepdims=True) + jnp.log(rules.min_p)[:, None]
    x_BV = jnp.where(x_BV < least_B1, NEGATIVE, x_BV)
    order_BV = _order(x_BV)
    k_B1 = jnp.where(rules.top_k > 0, rules.top_k, x_BV.shape[-1])[:, None]
    counts = functools.partial(jnp.sum, axis=-1, keepdims=True, dtype=jnp.int32)
    bound_B1 = _bound(lambda t_B1: counts(order_BV > t_B1) >= k_B1, order_BV)
    x_BV = jnp.where(order_BV > bound_B1, x_BV, NEGATIVE)
    p_BV, order_BV = jax.nn.softmax(x_BV, -1), _order(x_BV)
    # At least a normal number, or the likeliest token would go too.
    p_B1 = jnp.maximum(rules.top_p, jnp.finfo(jnp.float32).tiny)[:, None]

    def enough(t_B1: Array) -> Array:
        return jnp.where(order_BV > t_B1, p_BV, 0.0).sum(-1, keepdims=True) >= p_B1

    bound_B1 = _bound(enough, order_BV)
    return jnp.where((order_BV > bound_B1) | (p_B1 >= 1), x_BV, NEGATIVE)


def _order(x: Array) -> Array:
    """Returns uint32 numbers in the order of float32 numbers; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _bound(holds: Callable[[Array], Array], order_BV: Array) -> Array:
    """Returns the largest uint32 number for which `holds`, (B, 1); 0 where there is none.

    holds: of (B, 1); what holds for a number holds for smaller ones. Two bits are found in a pass
    over the values. For a GPU the passes are written out: a loop, like a sort of XLA's, would keep
    it from launching a whole decoding step as one graph. A CPU has a loop, which compiles sooner.
    """

    def more(i: int | Array, bound_B1: Array) -> Array:
        place = jnp.uint32(30) - jnp.uint32(2) * jnp.uint32(i)
        tried = [bound_B1 | (jnp.uint32(digit) << place) for digit in (1, 2, 3)]
        return bound_B1 | sum(holds(t_B1).astype(jnp.uint32) for t_B1 in tried) << place

    def written_out(bound_B1: Array) -> Array:
        return functools.reduce(lambda bound, i: more(i, bound), range(16), bound_B1)

    def looped(bound_B1: Array) -> Array:
        return lax.fori_loop(0, 16, more, bound_B1)

    none_B1 = jnp.zeros((order_BV.shape[0], 1), jnp.uint32)
    return lax.platform_dependent(none_B1, cuda=written_out, default=looped)
