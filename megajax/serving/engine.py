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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from megajax.core.errors import UserError
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel.overlap import Overlap
from megajax.parallel.sharding import Zero
from megajax.serving import draw
from megajax.serving.answer import Answer, Output, Tokenizer
from megajax.serving.backend import Backend, OneMesh
from megajax.serving.cache import PagePool
from megajax.serving.constraint import Constraints, Matcher
from megajax.serving.params import SamplingParams
from megajax.serving.programs import Segment
from megajax.serving.requests import check_bias, check_ends, check_options, check_tokens
from megajax.serving.scheduler import Plan, Scheduler
from megajax.serving.scheduler import Sequence as Running


@dataclasses.dataclass(frozen=True)
class _Launched:
    """A step that runs on the device."""

    plan: Plan
    drawn: Any
    rows: list[int]
    version: int


class Engine:
    """Answers requests with one decoder on one mesh. Not thread-safe: one thread steps it.

    The mesh axes tensor and expert cut the work of a step. The devices along the other axes, such
    as data, all compute the same tokens; parameters that rest cut over these axes (zero='full') are
    gathered layer by layer. On a mesh of several processes, all of them make the same calls.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
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
    ):
        """Places the weights and the pages.

        Args: params: or, on a CPU, ShapeDtypeStructs: the engine sleeps until `load` brings the
          weights, and `compile` need not wait for them. mesh: None: one device. pages: of
          `page_size` tokens, a power of two up to 128, for all layers; None: room for max_batch
          whole contexts, or what fits in the free memory.
          max_batch: sequences that run at a time. dtype: of compute, weights and pages. numerics:
          'exact': log-probabilities are the same bits in every batch, page size, chunking, and in
          training.logprobs (serving/tiles.py). prefix_cache: prompts that begin alike share pages.
          prefill_chunk: most tokens of a prompt in one step; None: 256 on a CPU, else 2048.
          tokenizer: for stop strings, and its `end` stops an answer. zero: how the weights rest:
          None: in copies of the compute type; otherwise as training has them, uncopied. overlap:
          how tensor ranks add up; exact: 'xla'. decode_steps: tokens that a dispatch decodes where
          nobody waits; None: 1 on a CPU, else 4; exact: 1. context: most tokens of a sequence;
          None: the model's positions. backend: what runs the steps, in the place of mesh, dtype,
          zero and overlap; `params` are then what its `place` takes.
        Raises: UserError for values that cannot be, or a mesh that cannot cut the model.
        """
        check_options(
            numerics, page_size, max_batch=max_batch, prefill_chunk=prefill_chunk, context=context
        )
        exact = numerics == "exact"
        backend = backend or OneMesh(cfg, mesh, zero, dtype, "xla" if exact else overlap, exact)
        self.cfg, self.version, self.tokenizer, self._backend = cfg, 0, tokenizer, backend
        asleep = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
        if asleep and not backend.cpu:
            raise UserError("on a GPU the room for pages is what the weights leave: give weights")
        self._params: Tree | None = None if asleep else backend.place(params)
        self._outline = backend.outline(params) if asleep else None
        self._shapes = _shapes(params)
        context = min(context or cfg.max_positions, cfg.max_positions)
        width = -(-context // page_size)
        pages = backend.default_pages(width * max_batch + 1, page_size) if pages is None else pages
        self.pool = PagePool(pages, page_size, prefix_cache)
        width = min(width, self.pool.capacity)
        self.context = min(context, width * page_size + 1)  # prompt and answer of a sequence
        chunk = prefill_chunk or (256 if backend.cpu else 2048)
        self.scheduler = Scheduler(
            self.pool,
            max_batch=max_batch,
            budget=max(chunk, max_batch),
            chunk=chunk,
            context=context,
        )
        steps = 1 if exact else decode_steps or (1 if backend.cpu else 4)
        self.programs = backend.programs(
            slots=max_batch,
            budget=max(chunk, max_batch),
            pool=(pages, page_size, width),
            exact=exact,
            steps=steps,
        )
        self._seed, self._ids = seed, itertools.count()
        self._answers: dict[Running, Answer] = {}
        self._rules = draw.plain_rules(max_batch)
        self._tables = np.zeros((max_batch, width), np.int32)
        self._owners: list[Running | None] = [None] * max_batch
        # What runs on the device; the second, if any, begins with the tokens that the first draws.
        self._launched: collections.deque[_Launched] = collections.deque()
        self._late: list[Output] = []
        self._constraints, self._constrained = Constraints(tokenizer), 0  # 0 live answers have one

    def compile(self, tokens: Sequence[int] = (), others: bool = True) -> list[Future]:
        """Compiles steps beside what the caller does next (Programs.prepare): first those of the
        smallest and of the largest number of tokens, with which any request can begin.

        tokens: numbers of tokens in the place of these two. others: whether the steps of all other
        sizes follow.
        Returns: what is done when the first ones are ready.
        """
        outline = self._params if self._params is not None else self._outline
        sizes = self.programs.sizes
        return self.programs.prepare(outline, tokens or (sizes[0], sizes[-1]), others)

    # ---- requests

    @property
    def busy(self) -> bool:
        """Whether a step can bring anything."""
        return bool(self._answers or self._late)

    def submit(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams = SamplingParams(),
        *,
        id: int | None = None,
    ) -> int:
        """Takes a request, which waits until a step has room for it.

        id: None: the next of 0, 1, ... Without a seed of its own, a request's draws follow from the
          engine's seed and this number.
        Returns: its id, which its outputs carry.
        Raises: UserError, with the reason, for what can never run.
        """
        prompt = check_tokens(prompt_tokens, self.cfg.vocab)
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
        matcher = self._matcher(params)
        request = next(self._ids) if id is None else id
        sequences = self.scheduler.add(
            request,
            prompt,
            max_tokens=params.max_tokens,
            n=params.n,
            priority=params.priority,
            anew=scored,
        )
        scores: list | None = [None] * len(prompt) if scored else None
        try:
            for sequence in sequences:
                words = self._seed_words(params, request, sequence.index)
                own = matcher.copy() if matcher is not None else None
                self._answers[sequence] = Answer(
                    sequence, params, words, self.tokenizer, own, scores
                )
                self._constrained += own is not None
        except BaseException:  # all of a request or nothing of it
            for sequence in self.scheduler.cancel(request):
                self._drop(sequence)
            raise
        return request

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
        """A key of its own for each answer, which a request's own seed alone decides."""
        own = [self._seed & (2**64 - 1), request] if params.seed is None else [params.seed % 2**64]
        entropy = [len(own), *own, index]
        return np.random.SeedSequence(entropy).generate_state(2)

    def cancel(self, id: int) -> None:
        """Ends a request; its answers end with 'cancelled' in the next step. An ended or unknown
        one is none of its business."""
        for sequence in self.scheduler.cancel(id):
            self._end(sequence, "cancelled")

    def load(self, params: Tree, version: int) -> None:
        """Takes new weights, from the next step on. Running requests go on with the keys and values
        that they have; none of these is reused by later ones.

        version: of the tokens drawn from now on.
        Raises: UserError for another model's parameters.
        """
        if _shapes(params) != self._shapes:
            raise UserError("load: these parameters are not of the engine's model (params)")
        self._params = self._backend.place(params)
        self.version = version
        self.scheduler.drop_prefixes()
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
        """Starts the next step of the device, if there is one and none runs; waits for nothing."""
        if not self._launched:
            self._launch()

    def step(self) -> list[Output]:
        """Advances every sequence that has room by one step of the device, or by decode_steps.

        Returns: what is new of each answer; none while prompts are computed.
        """
        self.launch()
        self._launch_after()
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
        if drawn.scores is not None:
            self._take_scores(launched.plan, drawn.scores)
            drawn = dataclasses.replace(drawn, scores=None)
        if drawn.token.ndim == 1:
            drawn = jax.tree.map(lambda x: x[None], drawn)
        kept: dict[Running, list[int]] = {}
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
            kept[piece.sequence] = answer.tokens[len(answer.tokens) - k - 1 :]
            grown.append((answer, reason))
        self.scheduler.commit(launched.plan, kept)
        for answer, reason in grown:
            if reason is not None:
                self.scheduler.finish(answer.sequence)
                self._drop(answer.sequence)
        return grown

    def _launch(self) -> None:
        """Starts the next step, if there is one."""
        # A mask is known only when the token before it is.
        plan = self.scheduler.plan(1 if self._constrained else self.programs.steps)
        if plan is not None:
            self._start(plan)

    def _launch_after(self) -> None:
        """Starts what follows the step that runs, if that does not depend on what it draws."""
        # A mask is known only when the token before it is.
        if len(self._launched) != 1 or self._constrained:
            return
        before = self._launched[0]
        plan = self.scheduler.plan_after(before.plan)
        if plan is not None:
            self._start(plan, before)

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
                mask = self._mask(sequence) if draws else None
            except Exception as error:  # nothing of it is on the device yet; others go on
                self._fail(sequence, error)
                continue
            if changes is not None:
                self.programs.set_changes(slot, *changes)
            if mask is not None:
                masks[slot] = mask
            ids = sequence.tokens[start : start + count] if before is None else [0]
            following = self._answers[sequence].unscored(start, count)
            segments.append(Segment(slot, ids, start, draws, following))
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

    def _take_scores(self, plan: Plan, scores: draw.Drawn) -> None:
        """Records the log-probabilities of prompts. scores: in NumPy, of all tokens of a plan."""
        first = 0
        for sequence, start, count, _ in plan.pieces:
            answer = self._answers.get(sequence)
            if answer is not None and answer.scores is not None:
                answer.take_scores(scores, first, start, count)
            first += count

    def _mask(self, sequence: Running) -> np.ndarray | None:
        """Returns the bits of the tokens that a constrained sequence may draw, else None."""
        if (matcher := self._answers[sequence].matcher) is None:
            return None
        mask = np.zeros(draw.words(self.cfg.padded_vocab), np.uint32)
        matcher.write_mask(mask)
        return mask

    def _fail(self, sequence: Running, error: Exception) -> None:
        """Ends one sequence that cannot be laid out; the others know nothing of it."""
        reason = _failed(self._answers[sequence], error)
        self.scheduler.finish(sequence)
        self._end(sequence, reason)

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
