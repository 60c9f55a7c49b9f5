"""One answer while it grows: its tokens, when it ends, and what its user has not seen yet."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from megajax.serving.constraint import Matcher
from megajax.serving.draw import NO_TOKEN, Drawn, Rules
from megajax.serving.params import SamplingParams
from megajax.serving.scheduler import Sequence


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer. ends: ids that end an answer."""

    ends: tuple[int, ...]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids."""
        ...


@dataclasses.dataclass(frozen=True)
class Output:
    """What is new of one answer since its last output.

    index: of the request's n. tokens: a stop token is one of them. logprobs: of the unmodified
    logits, whatever the sampling. versions: of the weights that drew each token. finish_reason:
    None while it runs, then once 'stop', 'length', 'cancelled', 'constraint' (which has become too
    complex to follow) or 'error' (logits that are no numbers, or a failure of this answer alone).
    top_logprobs: for each token {id: log-probability} of the likeliest and of itself, where
    SamplingParams.logprobs asks for them. prompt_logprobs: the same for the tokens of the prompt,
    None for the first of them; with the first output of an answer.
    """

    request_id: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class Answer:
    """What the engine keeps of a sequence beside its pages."""

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        words: np.ndarray,
        tokenizer: Tokenizer | None,
        matcher: Matcher | None = None,
        scores: list[dict[int, float] | None] | None = None,
    ):
        """words: of its PRNG key, uint32 (2,). matcher: of its constraint, for it alone. scores:
        log-probabilities of the prompt's tokens, which all answers to it share; None: nobody asks.
        """
        self.sequence, self.params, self.tokens = sequence, params, []  # type: ignore[var-annotated]
        # The list of pages that its row of the table shows, and how many of them: the scheduler
        # makes a new list when the sequence starts again.
        self.pages: list[int] | None = None
        self.listed = 0
        self._words, self._tokenizer, self.matcher = words, tokenizer, matcher
        self.scores, self._shown = scores, False
        self._stops = set(params.stop_token_ids)
        if tokenizer is not None and not params.ignore_eos:
            self._stops.update(tokenizer.ends)
        # A token stands for a byte at least, unless it is special and stands for none.
        self._window = max((len(s.encode()) for s in params.stop), default=0) + 8
        self._new: list[tuple[int, float, int, dict[int, float] | None]] = []

    # ---- tokens

    def take(self, drawn: Drawn, at: tuple[int, int], version: int) -> str | None:
        """Takes one drawn token; returns why the answer ends with it, or None.

        drawn: in NumPy, (steps, rows). at: which of them.
        """
        token, logprob = drawn.token[at].item(), drawn.logprob[at].item()
        self.tokens.append(token)
        top = None
        if self.params.logprobs is not None:
            top = _tops(drawn, at, self.params.logprobs)
        self._new.append((token, logprob, version, top))
        if logprob != logprob:
            return "error"
        ended = token in self._stops or (self.params.stop and self._is_stopped())
        if ended or (self.matcher is not None and self.matcher.take(token)):
            broken = self.matcher is not None and self.matcher.problem
            return "constraint" if broken else "stop"
        return "length" if len(self.tokens) >= self.params.max_tokens else None

    def _is_stopped(self) -> bool:
        assert self._tokenizer is not None
        # What comes before the least length ends nothing.
        first = max(self.params.min_tokens, len(self.tokens) - self._window)
        text = self._tokenizer.decode(self.tokens[first:])
        return any(stop in text for stop in self.params.stop)

    def output(self, reason: str | None) -> Output:
        """Returns what was not yet given out."""
        new, self._new = self._new, []
        tops = [t or {} for *_, t in new] if self.params.logprobs is not None else None
        scores = None if self._shown else self.scores
        self._shown = True
        return Output(
            self.sequence.request,  # type: ignore[arg-type]
            self.sequence.index,
            [token for token, *_ in new],
            [logprob for _, logprob, *_ in new],
            [version for _, _, version, _ in new],
            reason,
            tops,
            scores,
        )

    def unscored(self, start: int, count: int) -> list[int]:
        """Returns the tokens of the prompt that follow those at `start` and on, if the
        log-probability of one of them is asked for and not known."""
        following = self.sequence.prompt[start + 1 : start + count + 1]
        if self.scores is None or None not in self.scores[start + 1 : start + count + 1]:
            return []
        return list(following)

    def take_scores(self, scores: Drawn, first: int, start: int, count: int) -> None:
        """Takes the log-probabilities of tokens of the prompt.

        scores: in NumPy. first: row of the token at place `start` of the prompt, whose follower is
        scored; there are `count` rows.
        """
        assert self.scores is not None and self.params.prompt_logprobs is not None
        for row, place in enumerate(range(start + 1, start + count + 1), first):
            if place < len(self.scores) and self.scores[place] is None:
                self.scores[place] = _tops(scores, (row,), self.params.prompt_logprobs)

    # ---- how it draws

    @property
    def changes(self) -> bool:
        """Whether penalties, a bias or a constraint change its logits."""
        p = self.params
        neutral = p.repetition_penalty == 1 and p.presence_penalty == p.frequency_penalty == 0
        return not neutral or bool(p.logit_bias or p.min_tokens) or self.matcher is not None

    def write_rules(self, rules: Rules, slot: int) -> None:
        """Sets a slot's rules, which are NumPy arrays."""
        p = self.params
        for name, value in (
            ("temperature", p.temperature),
            ("top_k", max(p.top_k, 0)),
            ("top_p", p.top_p),
            ("min_p", p.min_p),
            ("repetition", p.repetition_penalty),
            ("presence", p.presence_penalty),
            ("frequency", p.frequency_penalty),
            ("seed", self._words),
            ("changes", self.changes),
            ("masked", self.matcher is not None),
            ("tops", bool(p.logprobs)),
            ("least", p.min_tokens),
            ("ends", NO_TOKEN),
        ):
            getattr(rules, name)[slot] = value
        if p.min_tokens:
            rules.ends[slot, : len(self._stops)] = sorted(self._stops)

    def change_rows(self, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (counts of the answer's tokens, which tokens prompt and answer have, bias), (V,)
        each."""
        counts = np.bincount(self.tokens, minlength=vocab).astype(np.int32)
        seen = counts > 0
        seen[list(self.sequence.prompt)] = True
        bias = np.zeros(vocab, np.float32)
        for token, value in self.params.logit_bias.items():
            bias[token] = value
        return counts, seen, bias


def _tops(drawn: Drawn, at: tuple[int, ...], most: int) -> dict[int, float]:
    """Returns the log-probabilities of the likeliest tokens in one place, and of the one there."""
    ids, values = drawn.top_token[at].tolist(), drawn.top_logprob[at].tolist()
    found = dict(list(zip(ids, values, strict=True))[:most])
    found.setdefault(drawn.token[at].item(), drawn.logprob[at].item())
    return found
