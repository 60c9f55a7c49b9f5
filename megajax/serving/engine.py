"""The serving engine: requests in, tokens out, many sequences at a time.

Each `step` reads what the device has drawn and starts what comes next (scheduler.py). While
sequences only decode, the device need not wait for the host: the next call is started before the
tokens of the running one are read, and takes them on the device. Trainer and engine share the
model's code: serving/forward.py runs the trainer's blocks over pages of keys and values.
Sources: continuous batching (Orca, OSDI 2022), PagedAttention (arXiv 2309.06180), prompts in chunks
beside decoding (Sarathi-Serve, arXiv 2403.02310). Names are vLLM's.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from megajax.core.errors import UserError
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.models.vlm import VlmConfig
from megajax.parallel.overlap import Overlap
from megajax.parallel.sharding import Zero
from megajax.serving import draw
from megajax.serving.adapters import Adapters
from megajax.serving.constraint import Constraints, Matcher
from megajax.serving.draw import NO_TOKEN, Drawn, Rules
from megajax.serving.images import ROOM, Images, Picture, Sight, pictures
from megajax.serving.params import ENDS, SamplingParams
from megajax.serving.programs import Backend, OneMesh, Segment
from megajax.serving.scheduler import PagePool, Plan, Pools, Scheduler, Schedulers
from megajax.serving.scheduler import Sequence as Running

# ---- what is refused before it runs


def check_tokens(prompt: Sequence[int], vocab: int, name: str = "prompt_tokens") -> list[int]:
    """Returns the ids as Python integers. JAX would silently clip an id without an embedding.

    Raises: UserError for what is empty or no list of ids of the vocabulary.
    """
    try:
        row = np.asarray(prompt)
    except ValueError as error:  # lists of several lengths
        raise UserError(f"{name} must be a list of token ids: {error}") from None
    if row.size == 0:
        raise UserError(f"{name} must have at least one token")
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise UserError(f"{name} must be a list of token ids, whole numbers")
    if row.min() < 0 or row.max() >= vocab:
        wrong = row[(row < 0) | (row >= vocab)][0]
        raise UserError(f"{name} has the token id {wrong}; the vocabulary has 0 to {vocab - 1}")
    return row.tolist()


def check_ends(params: SamplingParams, ends: Collection[int]) -> None:
    """Refuses a least length with too many end tokens. ends: of a tokenizer. Raises: UserError."""
    count = len({*params.stop_token_ids, *(() if params.ignore_eos else ends)})
    if params.min_tokens and count > ENDS:
        raise UserError(
            f"min_tokens={params.min_tokens} needs at most {ENDS} tokens that end an answer; these "
            f"are {count} (stop_token_ids)"
        )


def check_bias(params: SamplingParams, vocab: int) -> None:
    """Refuses biases and stop tokens outside the vocabulary. Raises: UserError."""
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(params, name):
            if token >= vocab:
                raise UserError(
                    f"{name} has the token id {token}; the vocabulary has 0 to {vocab - 1}"
                )


def check_options(numerics: str, page_size: int, **counts: int | None) -> None:
    """Refuses options of an engine. counts: at least 1, or None. Raises: UserError."""
    if numerics not in ("fast", "exact"):
        raise UserError(f"numerics={numerics!r} must be 'fast' or 'exact'")
    if not (1 <= page_size <= 128) or page_size & (page_size - 1):
        near = min(128, 1 << max(0, int(page_size) - 1).bit_length())
        raise UserError(
            f"page_size={page_size} must be a power of two from 1 to 128; nearest: {near}"
        )
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1; nearest: 1")


# ---- one answer while it grows


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
    """The state of a sequence's answer in the engine."""

    def __init__(
        self,
        sequence: Running,
        params: SamplingParams,
        words: np.ndarray,
        tokenizer: Tokenizer | None,
        matcher: Matcher | None = None,
        scores: list[dict[int, float] | None] | None = None,
        images: Images | None = None,
    ):
        """words: the PRNG key of its draws, uint32 (2,). matcher: the state of its constraint, not
        shared with other answers. scores: log-probabilities of the prompt's tokens, a list that all
        answers to the prompt share; None: they are not computed. images: of the prompt, shared too;
        None: the model sees none."""
        self.images = images
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
        """Returns the tokens since the last output."""
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
    logprobs = dict(list(zip(ids, values, strict=True))[:most])
    logprobs.setdefault(drawn.token[at].item(), drawn.logprob[at].item())
    return logprobs


# ---- engine


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A step that runs on the device."""

    plan: Plan
    drawn: Any
    rows: list[int]
    version: int


class Engine:
    """Answers requests with one decoder on one mesh. Not thread-safe: one thread steps it.

    The mesh axes tensor and expert cut the work of a step. The axes node, data and context cut the
    sequences: each of their devices, or groups of devices, is a replica that runs other sequences
    than the others; all answers of a request run on one replica. If max_batch is smaller than the
    number of replicas, and along the axis pipe, all devices compute the same tokens. Parameters
    that rest cut over these axes (zero='full') are gathered layer by layer. On a mesh of several
    processes, all of them make the same calls.
    """

    def __init__(
        self,
        cfg: DecoderConfig | VlmConfig,
        params: Tree,
        *,
        mesh: Mesh | None = None,
        pages: int | None = None,
        page_size: int = 16,
        max_batch: int = 64,
        dtype: str = "bfloat16",
        seed: int = 0,
        numerics: Literal["fast", "exact"] = "fast",
        prefix_cache: bool = True,
        prefill_chunk: int | None = None,
        tokenizer: Tokenizer | None = None,
        zero: Zero | None = None,
        overlap: Overlap = "auto",
        decode_steps: int | None = None,
        context: int | None = None,
        backend: Backend | None = None,
        image_cache: int = ROOM,
        adapters: Mapping[str, Tree | str | Path] | None = None,
    ):
        """Places the weights and the pages.

        Args: params: or, on a CPU, ShapeDtypeStructs: the engine sleeps until `load` brings the
          weights, and `compile` need not wait for them. mesh: None: one device. pages: of
          `page_size` tokens, a power of two up to 128, for all layers, on each replica; None: room
          for its whole contexts, or what fits in the free memory. max_batch: sequences that run at
          a time, the same number on each replica. dtype: of compute, weights and pages. numerics:
          'exact': log-probabilities are the same bits in every batch, page size, chunking, and in
          training.logprobs (serving/tiles.py). prefix_cache: prompts that begin alike share pages.
          prefill_chunk: most tokens of a prompt in one step of a replica; None: 256 on a CPU, else
          2048. tokenizer: for stop strings, and its `end` stops an answer. zero: how the weights
          rest: None: in copies of the compute type; otherwise as training has them, uncopied.
          overlap: how tensor ranks add up; exact: 'xla'. decode_steps: tokens that a dispatch
          decodes where nobody waits; None: 1 on a CPU, else 4; exact: 1. context: most tokens of a
          sequence; None: the model's positions. backend: what runs the steps, in the place of mesh,
          dtype, zero and overlap; its `place` then takes `params`. image_cache: bytes of images'
          features, of a model that sees, that are held on the host for later requests.
          adapters: {name: parameters with adapters, or a PEFT folder}, of which a request may name
          one (`submit`); what lies under them is `params` for all.
        Raises: UserError for values that cannot be, or a mesh that cannot cut the model.
        """
        check_options(
            numerics, page_size, max_batch=max_batch, prefill_chunk=prefill_chunk, context=context
        )
        exact = numerics == "exact"
        asked = min(context or cfg.max_positions, cfg.max_positions)
        settled = cfg.at(asked) if isinstance(cfg, DecoderConfig) else cfg
        backend = backend or OneMesh(
            settled, mesh, zero, dtype, "xla" if exact else overlap, exact, max_batch
        )
        self.cfg, self.version, self.tokenizer, self._backend = cfg, 0, tokenizer, backend
        # What reads images; None: the model sees none.
        self.tower = backend.tower(image_cache) if isinstance(backend, OneMesh) else None
        axes = backend.axes if isinstance(backend, OneMesh) else {}
        if adapters and not axes:
            raise UserError("adapters need the default backend (adapters, backend)")
        self.adapters = Adapters(adapters or {}, params, axes)
        self.adapter: str | None = None  # that of requests which name none
        params = self.adapters.over(params)
        asleep = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
        if asleep and not backend.cpu:
            raise UserError("on a GPU the room for pages is what the weights leave: give weights")
        self._params: Tree | None = None if asleep else backend.place(params)
        self._outline = backend.outline(params) if asleep else None
        self._shapes = _shapes(params)
        context = asked
        width, replicas = -(-context // page_size), backend.replicas
        slots = -(-max_batch // replicas)  # of each replica
        pages = backend.default_pages(width * slots + 1, page_size) if pages is None else pages
        pools = [PagePool(pages, page_size, prefix_cache) for _ in range(replicas)]
        width = min(width, pools[0].capacity)
        self.context = min(context, width * page_size + 1)  # prompt and answer of a sequence
        chunk = prefill_chunk or (256 if backend.cpu else 2048)
        budget = max(chunk, slots)
        limits = {"max_batch": slots, "budget": budget, "chunk": chunk, "context": context}
        schedulers = [Scheduler(pool, **limits, replica=r) for r, pool in enumerate(pools)]
        self.pool: PagePool | Pools = Pools(pools) if replicas > 1 else pools[0]
        self.scheduler: Scheduler | Schedulers = schedulers[0]
        if replicas > 1:
            self.scheduler = Schedulers(schedulers, pages)
        steps = 1 if exact else decode_steps or (1 if backend.cpu else 4)
        self.programs = backend.programs(
            slots=slots,
            budget=budget,
            pool=(pages, page_size, width),
            exact=exact,
            steps=steps,
            **({"adapters": len(adapters)} if adapters else {}),
        )
        self._seed, self._ids = seed, itertools.count()
        self._answers: dict[Running, Answer] = {}
        # By slot; those of the replicas follow each other.
        self._rules = draw.plain_rules(replicas * slots)
        self._tables = np.zeros((replicas * slots, width), np.int32)
        self._owners: list[Running | None] = [None] * (replicas * slots)
        # What runs on the device; the second, if any, begins with the tokens that the first draws.
        self._launched: collections.deque[_Launched] = collections.deque()
        self._late: list[Output] = []
        self._constraints, self._constrained = Constraints(tokenizer), 0  # 0 live answers have one

    def compile(self, tokens: Sequence[int] = (), others: bool = True) -> list[Future]:
        """Compiles steps in a thread while the caller goes on (Programs.prepare): first those of
        the smallest and of the largest number of tokens, with which any request can begin.

        tokens: numbers of tokens in the place of these two. others: whether the steps of all other
        sizes follow, and the programs that read images.
        Returns: futures that are done when the first ones are ready.
        """
        outline = self._params if self._params is not None else self._outline
        sizes = self.programs.sizes
        ready = self.programs.prepare(outline, tokens or (sizes[0], sizes[-1]), others)
        if self.tower is not None and others:
            self.tower.prepare(outline, self.context, ready)
        return ready

    # ---- requests

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, or `step` has an output to return."""
        return bool(self._answers or self._late)

    def submit(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        id: int | None = None,
        images: Sequence[np.ndarray | Picture] | None = None,
        adapter: str | None = None,
    ) -> int:
        """Takes a request, which waits until a step has room for it.

        prompt_tokens: with one placeholder (VlmConfig.image_token) for each image.
        id: None: the next of 0, 1, ... Without a seed of its own, a request's draws follow from the
          engine's seed and this number.
        images: uint8 (H, W, 3) each, in the order of their placeholders, or what `see` returned;
          None: there are none. The answers have no placeholder, whatever its logit.
        adapter: name of one of the engine's; None: that of the member `adapter`, where None is the
          base.
        Returns: its id, which its outputs carry.
        Raises: UserError, with the reason, for what can never run.
        """
        prompt = check_tokens(prompt_tokens, self.cfg.vocab)
        shown = self._images(prompt, () if images is None else images, params)
        prompt = prompt if shown is None else shown.tokens
        check_bias(params, self.cfg.vocab)
        check_ends(params, self.tokenizer.ends if self.tokenizer is not None else ())
        scored = params.prompt_logprobs is not None
        if scored and not getattr(self.programs, "scores", False):
            raise UserError(
                f"prompt_logprobs={params.prompt_logprobs} needs an engine on one mesh; the "
                "default is None"
            )
        if params.stop and self.tokenizer is None:
            raise UserError(
                f"stop={list(params.stop)} needs a tokenizer: give the engine one, or "
                "stop_token_ids (tokenizer)"
            )
        number = self.adapters.number(self.adapter if adapter is None else adapter)
        matcher = self._matcher(params)
        request = next(self._ids) if id is None else id
        sequences = self.scheduler.add(
            request,
            prompt,
            max_tokens=params.max_tokens,
            n=params.n,
            priority=params.priority,
            anew=scored,
            images=() if shown is None else shown.shown,
            **({"adapter": number} if number else {}),
        )
        scores: list | None = [None] * len(prompt) if scored else None
        try:
            for sequence in sequences:
                words = self._seed_words(params, request, sequence.index)
                constraint = matcher.copy() if matcher is not None else None
                self._answers[sequence] = Answer(
                    sequence, params, words, self.tokenizer, constraint, scores, shown
                )
                self._constrained += constraint is not None
        except BaseException:  # all of a request or nothing of it
            for sequence in self.scheduler.cancel(request):
                self._drop(sequence)
            raise
        return request

    def see(self, images: Sequence[np.ndarray | Picture]) -> list[Picture]:
        """Resizes images and cuts them into patches, so that `submit` need not. Any thread may call
        this: running requests go on meanwhile.

        Raises: UserError, as `submit`.
        """
        if not isinstance(self.cfg, VlmConfig):
            raise UserError(
                f"images has {len(images)} images, and this model sees none: give a model with a "
                "vision tower (VlmConfig), or text alone (images)"
            )
        if self.tower is None and len(images):
            raise UserError(
                f"images has {len(images)} images, and this engine's backend computes no features "
                "of images: give an engine with the default backend, or text alone (backend)"
            )
        return pictures(images, self.cfg.tower)

    def _images(
        self, prompt: list[int], images: Sequence[np.ndarray | Picture], params: SamplingParams
    ) -> Images | None:
        """Returns a prompt with its images; None: of a model that sees none. Raises: UserError."""
        if not isinstance(self.cfg, VlmConfig) and not len(images):
            return None
        seen = self.see(images)
        assert isinstance(self.cfg, VlmConfig)
        made = Images(self.cfg, prompt, seen)
        if seen and len(made.tokens) + params.max_tokens > self.context:
            shows = sum(shown.stop - shown.start for shown in made.shown)
            raise UserError(
                f"the prompt has {len(made.tokens)} tokens, of which {shows} show the "
                f"{len(images)} images, and max_tokens={params.max_tokens}; the context has "
                f"{self.context}: give fewer or smaller images, or a smaller max_tokens (images)"
            )
        return made

    def prepare(self, params: SamplingParams) -> None:
        """Compiles a request's constraint, so that `submit` need not. Any thread may call this:
        running requests go on meanwhile.

        Raises: UserError, as `submit`.
        """
        self._matcher(params)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        form = params.structured_outputs
        return None if form is None else self._constraints.matcher(form)

    def _seed_words(self, params: SamplingParams, request: int, index: int) -> np.ndarray:
        """Returns the PRNG key of an answer. A seed of the request decides it alone."""
        source = (
            [self._seed & (2**64 - 1), request] if params.seed is None else [params.seed % 2**64]
        )
        entropy = [len(source), *source, index]
        return np.random.SeedSequence(entropy).generate_state(2)

    def cancel(self, id: int) -> None:
        """Ends a request; its answers end with 'cancelled' in the next step. Nothing is
        done for one that has ended, or that the engine never had."""
        for sequence in self.scheduler.cancel(id):
            self._end(sequence, "cancelled")

    def load(self, params: Tree, version: int) -> None:
        """Takes new weights, from the next step on. Running requests go on with the keys and values
        that they have; none of these is reused by later ones.

        version: of the tokens drawn from now on.
        Raises: UserError for another model's parameters.
        """
        params = self.adapters.over(params)
        if _shapes(params) != self._shapes:
            raise UserError("load: these parameters are not of the engine's model (params)")
        self._params = self._backend.place(params)
        self.version = version
        self.scheduler.drop_prefixes()
        if self.tower is not None:
            self.tower.forget()
            for answer in self._answers.values():
                if answer.images is not None:
                    answer.images.forget()
        self.programs.hold()

    def sleep(self) -> None:
        """Frees the devices' memory of weights and pages, for training between two samplings.
        `load` wakes the engine up.

        Raises: UserError while requests run or wait.
        """
        if self.busy:
            raise UserError("sleep: requests have not ended; run them to their end or cancel them")
        while self._launched:  # what was started ahead of an end that nobody foresaw
            self._read()
        self._params = None
        self.programs.free()
        self.scheduler.drop_prefixes()

    # ---- steps

    def launch(self) -> None:
        """Starts the next step of the device, if there is one and none runs; does not wait."""
        if self._launched:
            return
        # A mask is known only when the token before it is.
        plan = self.scheduler.plan(1 if self._constrained else self.programs.steps)
        if plan is not None:
            self._start(plan)

    def step(self) -> list[Output]:
        """Advances every running sequence by one step of the device, or by decode_steps.

        Returns: the outputs of the answers that grew or ended; none while prompts are computed.
        """
        self.launch()
        # The step after the running one starts before the tokens of the running one are read,
        # unless it depends on them, as masks do.
        if len(self._launched) == 1 and not self._constrained:
            before = self._launched[0]
            if (plan := self.scheduler.plan_after(before.plan)) is not None:
                self._start(plan, before)
        ended = self._read()
        self.launch()
        outputs, self._late = self._late, []
        return outputs + [answer.output(reason) for answer, reason in ended]

    def run(self) -> Iterator[Output]:
        """Steps until all requests have ended."""
        while self.busy:
            yield from self.step()

    def _read(self) -> list[tuple[Answer, str | None]]:
        """Waits for the step that runs, and records its tokens. Returns the answers that grew."""
        if not self._launched:
            return []
        launched = self._launched.popleft()
        drawn = self.programs.read(launched.drawn)
        scores, drawn = drawn.scores, dataclasses.replace(drawn, scores=None)
        if scores is not None:  # log-probabilities of prompts, of all tokens that were fed
            first = 0
            for sequence, start, count, _ in launched.plan.pieces:
                answer = self._answers.get(sequence)
                if answer is not None and answer.scores is not None:
                    answer.take_scores(scores, first, start, count)
                first += count
        if drawn.token.ndim == 1:
            drawn = jax.tree.map(lambda x: x[None], drawn)
        taken: dict[Running, list[int]] = {}
        grown: list[tuple[Answer, str | None]] = []
        for piece, row in zip(launched.plan.pieces, launched.rows, strict=True):
            answer = self._answers.get(piece.sequence)
            if not piece.draws or answer is None:
                continue
            reason = None
            for k in range(launched.plan.steps):
                try:
                    reason = answer.take(drawn, (k, row), launched.version)
                except Exception as error:  # of its text or its constraint; others go on
                    reason = _failed(answer, error)
                if reason is not None:
                    break
            taken[piece.sequence] = answer.tokens[len(answer.tokens) - k - 1 :]
            grown.append((answer, reason))
        self.scheduler.commit(launched.plan, taken)
        for answer, reason in grown:
            if reason is not None:
                self.scheduler.finish(answer.sequence)
                self._drop(answer.sequence)
        return grown

    def _start(self, plan: Plan, before: _Launched | None = None) -> None:
        """Starts a plan. before: the step that draws the tokens that it feeds."""
        if self._params is None:
            raise UserError("the engine sleeps; load parameters first (Engine.load)")
        if plan.copies:
            self.programs.copy_pages(plan.copies)
        segments, pieces, masks = [], [], {}
        for piece in plan.pieces:
            sequence, start, count, draws = piece
            slot = sequence.slot
            assert slot is not None
            try:
                changes = self._enter(sequence, slot, start + count - len(sequence.prompt))
                sight = self._sight(sequence, start, count)
                matcher = self._answers[sequence].matcher
                if draws and matcher is not None:  # the bits of the tokens that it may draw
                    masks[slot] = np.zeros(draw.words(self.cfg.padded_vocab), np.uint32)
                    matcher.write_mask(masks[slot])
            except Exception as error:  # nothing of it is on the device yet; others go on
                masks.pop(slot, None)
                reason = _failed(self._answers[sequence], error)
                self.scheduler.finish(sequence)
                self._end(sequence, reason)
                continue
            if changes is not None:
                self.programs.set_changes(slot, *changes)
            ids = sequence.tokens[start : start + count] if before is None else [0]
            following = self._answers[sequence].unscored(start, count)
            segments.append(Segment(slot, ids, start, draws, following, sight, sequence.adapter))
            pieces.append(piece)
        if len(pieces) < len(plan.pieces):
            plan = plan._replace(pieces=tuple(pieces))
        if not segments:
            return
        if masks:
            self.programs.set_masks(list(masks), np.stack(list(masks.values())))
        args = self._params, segments, self._tables, self._rules, plan.steps
        if before is None:
            drawn, rows = self.programs.step(*args)
        else:
            row_of = {p.sequence: r for p, r in zip(before.plan.pieces, before.rows, strict=True)}
            sources = [row_of[piece.sequence] for piece in plan.pieces]
            drawn, rows = self.programs.step(*args, after=(before.drawn, sources))
        self._launched.append(_Launched(plan, drawn, rows, self.version))

    def _enter(
        self, sequence: Running, slot: int, drawn: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Brings what a slot's sequence needs up to date: its pages, its rules. drawn: tokens of
        its answer, before this step. Returns what `Programs.set_changes` has to be told."""
        answer, table, changes = self._answers[sequence], self._tables[slot], None
        if self._owners[slot] is not sequence or answer.pages is not sequence.pages:
            self._owners[slot], answer.pages, answer.listed = sequence, sequence.pages, 0
            table[:] = 0
            answer.write_rules(self._rules, slot)
            if answer.changes:
                changes = answer.change_rows(self.cfg.padded_vocab)
        if answer.listed < len(sequence.pages):
            table[answer.listed : len(sequence.pages)] = sequence.pages[answer.listed :]
            answer.listed = len(sequence.pages)
        self._rules.drawn[slot] = drawn
        return changes

    def _sight(self, sequence: Running, start: int, count: int) -> Sight | None:
        """Returns what a model that sees reads of a sequence's tokens in addition to their ids."""
        images = self._answers[sequence].images
        if self.tower is None or images is None:
            return None
        return images.sight(start, count, self.tower, self._params)

    def _end(self, sequence: Running, reason: str) -> None:
        answer = self._drop(sequence)
        if answer is not None:
            self._late.append(answer.output(reason))

    def _drop(self, sequence: Running) -> Answer | None:
        answer = self._answers.pop(sequence, None)
        self._constrained -= answer is not None and answer.matcher is not None
        return answer


def _failed(answer: Answer, error: Exception) -> str:
    """Logs why one answer ends. Returns the reason that its output has."""
    sequence = answer.sequence
    logging.error("answer %d of request %s ends: %r", sequence.index, sequence.request, error)
    return "error"


def _shapes(params: Tree) -> Tree:
    return jax.tree.map(lambda x: tuple(x.shape), params)
