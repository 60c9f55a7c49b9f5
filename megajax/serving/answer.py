"""One answer while it grows: its tokens, when it ends, and what its user has not seen yet."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from megajax.serving.constraint import Matcher
from megajax.serving.draw import Drawn, Rules
from megajax.serving.params import SamplingParams
from megajax.serving.sequence import Sequence


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
    top_logprobs: for each token {id: log-probability} of the likeliest, where
    SamplingParams.logprobs asks for them.
    """

    request_id: int
    index: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None
    top_logprobs: list[dict[int, float]] | None = None


class Answer:
    """What the engine keeps of a sequence beside its pages."""

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        words: np.ndarray,
        tokenizer: Tokenizer | None,
        matcher: Matcher | None = None,
    ):
        """words: of its PRNG key, uint32 (2,). matcher: of its constraint, for it alone."""
        self.sequence, self.params, self.tokens = sequence, params, []  # type: ignore[var-annotated]
        # The list of pages that its row of the table shows, and how many of them: the scheduler
        # makes a new list when the sequence starts again.
        self.pages: list[int] | None = None
        self.listed = 0
        self._words, self._tokenizer, self.matcher = words, tokenizer, matcher
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
            ids, values = drawn.top_token[at].tolist(), drawn.top_logprob[at].tolist()
            top = dict(list(zip(ids, values, strict=True))[: self.params.logprobs])
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
        text = self._tokenizer.decode(self.tokens[-self._window :])
        return any(stop in text for stop in self.params.stop)

    def output(self, reason: str | None) -> Output:
        """Returns what was not yet given out."""
        new, self._new = self._new, []
        tops = [t or {} for *_, t in new] if self.params.logprobs is not None else None
        return Output(
            self.sequence.request,  # type: ignore[arg-type]
            self.sequence.index,
            [token for token, *_ in new],
            [logprob for _, logprob, *_ in new],
            [version for _, _, version, _ in new],
            reason,
            tops,
        )

    # ---- how it draws

    @property
    def changes(self) -> bool:
        """Whether penalties, a bias or a constraint change its logits."""
        p = self.params
        neutral = p.repetition_penalty == 1 and p.presence_penalty == p.frequency_penalty == 0
        return not neutral or bool(p.logit_bias) or self.matcher is not None

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
        ):
            getattr(rules, name)[slot] = value

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
