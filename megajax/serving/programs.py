"""The compiled programs of an engine, and the state on its devices.

Fast numerics: one program a step, for a number of tokens that is rounded up to one of few sizes,
and one that decodes several tokens of every sequence without the host. Exact numerics: the step in
tiles (serving/tiles.py), then one program that draws. `bound` says how many there can be.

One program has the steps of all replicas (forward.replica_axes). The first dimension of its arrays
has the rows of all replicas, one replica after the other, and each device gets the rows of its
replica, in which numbers of slots, tokens and pages begin at 0.

Legend: T tokens of a step, B segments, S slots (sequences that run), M pages of the longest
sequence, P pages of a layer, each of one replica; R replicas, V vocabulary with its padding, K
steps of one dispatch.
"""

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from megajax.core.mesh import MeshSpec, free_bytes
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import check_params
from megajax.models.vlm import VlmConfig
from megajax.parallel.overlap import Overlap, compiler_options
from megajax.parallel.sharding import Zero
from megajax.serving import draw, tiles
from megajax.serving import forward as forward_
from megajax.serving.draw import Changes, Drawn, Rules
from megajax.serving.forward import Forward
from megajax.serving.images import Sight, Tower, write

Array = jax.Array
LEAST = 8  # tokens of the smallest program
COPIES = 16  # pages that one call copies
SCORED = 128  # (chosen) tokens whose logits are in memory at a time where prompts are scored
MASKS = 16  # sequences whose masks one call sets
DRAWN = Drawn(PS(), PS(), PS(), PS())  # type: ignore[arg-type]
# (chosen) bytes of the pages of a process on CPUs: as many as of the weights, within these bounds.
CPU_PAGES = 2**28, 2**30
GPU_SHARE = 0.9  # (vLLM's gpu_memory_utilization) of the free memory that becomes pages


# ---- a step's segments laid side by side, as the arrays that its program reads


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of one sequence that a step feeds.

    slot: of the sequence; slot s of replica r is r S + s. ids: of the tokens. first: position of
    the first one. draws: whether a token is drawn behind the last one. following: the ids behind
    each of them, if their log-probabilities are asked for. sight: of a model that sees images.
    adapter: number of the request's, 0: none.
    """

    slot: int
    ids: Sequence[int]
    first: int
    draws: bool
    following: Sequence[int] = ()
    sight: Sight | None = None
    adapter: int = 0


class Laid(NamedTuple):
    """The arrays that a step reads in addition to weights and state.

    rows_B: index of each segment's last token. slot_B: its slot, or S if it draws nothing. rules_B:
    how it draws. The dimensions are R T and R B; the numbers are those of one replica.
    """

    tokens: forward_.Tokens
    rows_B: Any
    slot_B: Any
    rules_B: Rules


class Laying:
    """Writes segments into arrays of few shapes. sizes: all values of T."""

    def __init__(
        self,
        slots: int,
        budget: int,
        width: int,
        replicas: int = 1,
        features: jax.ShapeDtypeStruct | None = None,
        adapters: int = 0,
    ):
        """slots: S. budget: most tokens of a step of one replica. width: M. replicas: R. features:
        of Forward."""
        self._slots, self._width, self._replicas = slots, width, replicas
        self._features, self._adapters = features, adapters
        # Powers of two from LEAST on, the last of which holds the budget.
        sizes = [LEAST]
        while sizes[-1] < budget:
            sizes.append(2 * sizes[-1])
        self.sizes = tuple(sizes)

    def size(self, tokens: int) -> int:
        """Returns the smallest T that holds so many tokens."""
        return next(size for size in self.sizes if size >= tokens)

    def places(self, segments: Sequence[Segment], T: int, B: int) -> tuple[list[int], list[int]]:
        """Returns (the row of each segment in arrays (R B,), the place of its first token in arrays
        (R T,)). The segments of a replica follow each other."""
        rows, firsts = [], []
        next_row = list(range(0, self._replicas * B, B))
        next_token = list(range(0, self._replicas * T, T))
        for segment in segments:
            replica = segment.slot // self._slots
            rows.append(next_row[replica])
            firsts.append(next_token[replica])
            next_row[replica] += 1
            next_token[replica] += len(segment.ids)
        return rows, firsts

    def step(
        self, segments: Sequence[Segment], table_SM: np.ndarray, rules: Rules, T: int | None = None
    ) -> Laid:
        """Returns what a step of these segments reads, in NumPy; their rows are those of `places`.

        table_SM, rules: by slot, R S. T: one of `sizes` that holds the segments; None: the
          smallest.
        """
        T = T or self.size(max(self.fed(segments)))
        B = min(T, self._slots)
        tokens, rows, firsts = self.tokens(segments, table_SM, T, B)
        slot_B = np.full(self._replicas * B, self._slots, np.int32)
        rows_B = np.zeros(self._replicas * B, np.int32)
        rules_B = draw.plain_rules(self._replicas * B)
        filled, used = np.array(rows, np.intp), np.array([s.slot for s in segments], np.intp)
        for target, source in zip(fields(rules_B), fields(rules), strict=True):
            target[filled] = source[used]
        for row, first, segment in zip(rows, firsts, segments, strict=True):
            rows_B[row] = first % T + len(segment.ids) - 1
            if segment.draws:
                slot_B[row] = segment.slot % self._slots
        return Laid(tokens, rows_B, slot_B, rules_B)

    def tokens(
        self, segments: Sequence[Segment], table_SM: np.ndarray, T: int, B: int
    ) -> tuple[forward_.Tokens, list[int], list[int]]:
        """Returns (the segments' tokens at their places, and these: what `places` returns)."""
        rows, firsts = self.places(segments, T, B)
        R, sees = self._replicas, self._features is not None
        tokens = forward_.tokens_like(R * T, R * B, self._width, sees, self._adapters)
        tokens.table_BM[rows] = table_SM[[s.slot for s in segments]]
        for row, first, segment in zip(rows, firsts, segments, strict=True):
            count = len(segment.ids)
            tokens.ids_T[first : first + count] = segment.ids
            tokens.positions_T[first : first + count] = range(segment.first, segment.first + count)
            tokens.start_B[row], tokens.count_B[row] = first % T, count
            tokens.context_B[row] = segment.first + count
            if self._adapters:
                tokens.adapter_T[first : first + count] = segment.adapter
        if sees:
            sights = zip(firsts, (s.sight for s in segments), strict=True)
            features_TD = write(tokens, sights, self._features)
            tokens = replace(tokens, features_TD=features_TD)
        return tokens, rows, firsts

    def following(self, segments: Sequence[Segment], firsts: Sequence[int], T: int) -> np.ndarray:
        """Returns the ids that follow the segments' tokens, int32 (R T,); 0 where nobody asks.

        firsts: as `places` returns them."""
        next_T = np.zeros(self._replicas * T, np.int32)
        for first, segment in zip(firsts, segments, strict=True):
            next_T[first : first + len(segment.following)] = segment.following
        return next_T

    def fed(self, segments: Sequence[Segment]) -> list[int]:
        """Returns how many tokens each replica feeds."""
        counts = [0] * self._replicas
        for segment in segments:
            counts[segment.slot // self._slots] += len(segment.ids)
        return counts


def fields(rules: Rules) -> list[np.ndarray]:
    """Returns the arrays of rules."""
    return [getattr(rules, name) for name in rules.__dataclass_fields__]


# ---- programs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The arrays on the devices, which every call takes over and returns.

    logits_SV, log_z_S: of the token to draw next; exact numerics only.
    """

    pages: forward_.Pages
    changes: Changes
    logits_SV: Any
    log_z_S: Any


class Programs:
    """Runs steps of all replicas. All arguments that vary are arrays of few shapes.

    draws: whether steps end with drawn tokens; if not, no memory is taken for `Changes`. scores:
    whether they can return the log-probabilities of prompts.
    """

    draws = scores = True

    def __init__(
        self,
        forward: Forward,
        *,
        slots: int,
        budget: int,
        pool: tuple[int, int, int],
        exact: bool,
        steps: int,
        adapters: int = 0,
    ):
        """slots: S. budget: most tokens of a step of one replica. pool: P, tokens of a page, M.
        steps: K. adapters: that requests may name."""
        self._forward, self._exact, self._slots, self.steps = forward, exact, slots, steps
        # An answer with a placeholder would be a row that has more placeholders than images.
        never = forward.vlm.image_token if forward.vlm else None
        self._draw_tokens = functools.partial(draw.draw_tokens, never=never)
        self._replicas = forward.replicas
        self._pool, self._page, self._width = pool
        self._laying = Laying(
            slots, budget, self._width, self._replicas, forward.features, adapters
        )
        self.sizes = self._laying.sizes
        self._most_rows = self._laying.size(min(slots, self.sizes[-1]))
        self._options = compiler_options(forward.overlap, forward.mesh)
        self._everywhere = functools.partial(jax.shard_map, mesh=forward.mesh, check_vma=False)
        pages, rows = forward_.Pages(forward.page_spec, forward.page_spec), forward.row_spec
        scores, drawn = rows if exact else None, Drawn(*[rows] * 4)  # type: ignore[arg-type]
        self._specs = State(pages, Changes(*[rows] * 4), scores, scores)
        # What the last call left, perhaps while it still runs; None: there is no memory for it.
        self.state: State | None = None
        self.hold()
        self._by_step = PS(None, *rows) if rows else rows
        self._step = self._program(self._local_step, drawn)
        self._several = self._program(self._local_several, Drawn(*[self._by_step] * 4))
        self._scored = self._program(self._local_scored, replace(drawn, scores=drawn))
        self._ids = forward.layout.named(rows or PS(None))
        self._blank: dict[int, Array] = {}  # features of steps that show no image, by T
        # A function of its own: engines would count each other's programs.
        follow = self._follow_each if rows else functools.partial(_follow)
        self._follow: Any = jax.jit(follow, out_shardings=self._ids)
        # The last argument of a scored tile is unused: the ids whose log-probabilities it returns.
        self._tile = self._program(
            lambda params, state, tokens, slot_T: self._local_scored_tile(
                params, state, tokens, slot_T, slot_T * 0
            )[1]
        )
        self._scored_tile = self._program(self._local_scored_tile, drawn)
        self._draw = self._program(self._local_draw, drawn, fixed=1)
        self._copy = self._program(functools.partial(_copy, self._pool), fixed=1)
        self._set = self._program(_set, fixed=1, shared=3)
        self._allow = self._program(_allow, fixed=1)
        # Steps that `prepare` compiles, by (function, T).
        self._ahead: dict[tuple[str, int], Future] = {}

    def hold(self) -> None:
        """Takes the memory of pages, if it has none."""
        if self.state is None:
            slots, V = (self._slots, self._forward.cfg.padded_vocab) if self.draws else (1, 1)
            slots *= self._replicas
            with jax.set_mesh(self._forward.mesh):
                self.state = State(
                    self._forward.pages(self._pool, self._page),
                    self._everyone(draw.no_changes(slots, V)),
                    self._everyone(jnp.zeros((slots, V))) if self._exact else None,
                    self._everyone(jnp.zeros(slots)) if self._exact else None,
                )

    def free(self) -> None:
        """Gives the memory of the pages back; what they held is lost."""
        self.state = None
        self._blank.clear()

    @property
    def bound(self) -> int:
        """The most programs that any traffic compiles."""
        steps = 3 if self._exact else 2 * len(self.sizes)
        several = [size for size in self.sizes if self.steps > 1 and size <= self._most_rows]
        n = 0 if self._exact else len(several)
        return steps + n + n * (n + 1) // 2 + 3

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        jits = (
            self._step,
            self._several,
            self._scored,
            self._scored_tile,
            self._follow,
            self._tile,
            self._draw,
            self._copy,
            self._set,
            self._allow,
        )
        ahead = sum(program.done() for program in self._ahead.values())
        return ahead + sum(f._cache_size() for f in jits)

    # ---- compiled before they are called

    def prepare(self, params: Tree, tokens: Sequence[int], others: bool) -> list[Future]:
        """Starts a thread that compiles programs: those for steps of so many tokens first.

        A step whose program is not ready takes that of the next larger size that is, or else waits.
        params: as `step` will get them; ShapeDtypeStructs with their shardings are enough. others:
        whether all other steps' programs follow.
        Returns: what is done when the first ones are ready, and has the exception of one that could
        not be compiled. Nothing on several processes, which would not choose the same programs.
        """
        if self._forward.mesh.is_multi_process:
            return []
        if self._exact:
            jobs = begin = [("tile", tiles.TILE), ("draw", self._slots)]
        else:
            most = self._most_rows if self.steps > 1 else 0
            jobs = [("step", T) for T in self.sizes]
            jobs += [("several", T) for T in self.sizes if T <= most]
            sizes = {self._laying.size(min(n, self.sizes[-1])) for n in tokens}
            begin = [job for job in jobs if job[1] in sizes]
            jobs = begin + [job for job in jobs if others and job not in begin]
        self._ahead = {job: Future() for job in jobs}
        outline = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            (params, self.state),
        )
        threading.Thread(target=self._compile, args=outline, name="compiler").start()
        return [self._ahead[job] for job in begin]

    def _compile(self, params: Tree, state: State) -> None:
        main = threading.main_thread()
        for (name, T), program in self._ahead.items():
            if not main.is_alive():  # the process ends, and waits for this thread
                program.cancel()
                continue
            try:
                with jax.set_mesh(self._forward.mesh):
                    program.set_result(self._lower(name, T, params, state).compile())
            except Exception as error:
                program.set_exception(error)

    def _lower(self, name: str, T: int, params: Tree, state: State) -> Any:
        """Returns the lowered program of a step, in which nothing is fed."""
        table_SM, rows = np.zeros((1, self._width), np.int32), self._replicas * T
        if name == "draw":
            return self._draw.lower(state, np.zeros(rows, np.int32), draw.plain_rules(rows))
        if name == "tile":
            tokens, _, _ = self._laying.tokens([], table_SM, T, T)
            slot_T = np.zeros(rows, np.int32)
            return self._tile.lower(params, state, self._seen(tokens), slot_T)
        laid = self._laying.step([], table_SM, draw.plain_rules(1), T)
        if name == "step":
            laid = laid._replace(tokens=self._seen(laid.tokens))
            return self._step.lower(params, state, *laid)
        ids_T = jax.ShapeDtypeStruct((rows,), np.int32, sharding=self._ids)
        laid = laid._replace(tokens=replace(laid.tokens, ids_T=ids_T, shows_T=None))
        return self._several.lower(params, state, *laid)

    def _ready(self, name: str, T: int) -> tuple[Any, int]:
        """Returns what runs a step of T tokens, and for how many it is: more than T where that
        program is not ready and a larger one is."""
        program = self._ahead.get((name, T))
        if program is None or not program.done():
            larger = [job for job in self._ahead if job[0] == name and job[1] > T]
            for job in sorted(job for job in larger if self._ahead[job].done()):
                return self._ahead[job].result(), job[1]
        if program is not None:
            return program.result(), T
        jits = {"step": self._step, "several": self._several, "scored": self._scored}
        jits |= {"tile": self._tile, "scored_tile": self._scored_tile, "draw": self._draw}
        return jits[name], T

    # ---- calls

    def _put(self, x: np.ndarray) -> Array:
        """Returns an array on the devices, cut by rows as the ids that a call leaves there."""
        if self._forward.mesh.is_multi_process:
            # device_put would compare the arrays of all processes, and wait for them.
            return jax.make_array_from_callback(x.shape, self._ids, x.__getitem__)
        return jax.device_put(x, self._ids)

    def _seen(self, tokens: forward_.Tokens) -> forward_.Tokens:
        """Returns tokens with their features on the devices: zeros where none shows an image, so
        that this is no program of its own."""
        like = self._forward.features
        if like is None:
            return tokens
        T, features_TD = len(tokens.ids_T), tokens.features_TD
        if features_TD is not None:
            return replace(tokens, features_TD=self._put(features_TD))
        if T not in self._blank:
            self._blank[T] = self._put(np.zeros((T, *like.shape), like.dtype))
        return replace(tokens, features_TD=self._blank[T])

    def step(
        self,
        params: Tree,
        segments: Sequence[Segment],
        table_SM: np.ndarray,
        rules: Rules,
        steps: int = 1,
        *,
        after: tuple[Drawn, list[int]] | None = None,
    ) -> tuple[Drawn, list[int]]:
        """Feeds the segments, which are in the order of their slots, and draws.

        table_SM, rules: by slot, R S; page 1 is the first page of a replica. steps: 1, or K when
          every segment is one token that draws. after: what a call of K steps returned that perhaps
          still runs, and of each segment the row whose last token it feeds, in the place of the
          segment's own; None: its own.
        Returns: (arrays (rows,) of Drawn, or (K, rows); the row of each segment), for `read`. If a
          segment has `following`, the arrays of scores that `read` returns have a row for each
          token, in the segments' order.
        """
        with jax.set_mesh(self._forward.mesh):
            if self._exact:
                return self._exact_step(params, segments, table_SM, rules)
            is_scored = any(s.following for s in segments)
            name = "several" if steps > 1 else "scored" if is_scored else "step"
            run, T = self._ready(name, self._laying.size(max(self._laying.fed(segments))))
            laid, B = self._laying.step(segments, table_SM, rules, T), min(T, self._slots)
            rows, firsts = self._laying.places(segments, T, B)
            if steps > 1:  # the ids as a call before leaves them, or this would be two programs
                tokens = laid.tokens
                if after is None:
                    ids_T = self._put(tokens.ids_T)
                else:
                    drawn, sources = after
                    source_T = np.zeros_like(tokens.ids_T)
                    source_T[firsts] = np.mod(sources, drawn.token.shape[1] // self._replicas)
                    ids_T = self._follow(drawn.token, source_T)
                laid = laid._replace(tokens=replace(tokens, ids_T=ids_T, shows_T=None))
            else:
                laid = laid._replace(tokens=self._seen(laid.tokens))
            following = (self._laying.following(segments, firsts, T),) if is_scored else ()
            drawn, self.state = run(params, self.state, *laid, *following)
            for part in jax.tree.leaves(drawn):
                part.copy_to_host_async()
            if is_scored:
                drawn = replace(drawn, scores=[(drawn.scores, self._laying.fed(segments))])
            return drawn, rows

    def read(self, drawn: Drawn) -> Drawn:
        """Waits for what `step` returned; returns it in NumPy."""
        scores, drawn = drawn.scores, jax.tree.map(np.asarray, replace(drawn, scores=None))
        scores = jax.tree.map(np.asarray, scores)
        if scores is not None:  # of each part of the step, with how many tokens each replica fed
            parts = [
                jax.tree.map(lambda x, r=r, n=counts[r]: np.split(x, self._replicas)[r][:n], part)
                for r in range(self._replicas)
                for part, counts in scores
            ]
            drawn = replace(drawn, scores=jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
        return drawn

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages in all layers, (source, target) each; page p of replica r is r P + p."""
        parts: list[list[tuple[int, int]]] = [[] for _ in range(self._replicas)]
        for source, target in copies:
            parts[source // self._pool].append((source % self._pool, target % self._pool))
        for start in range(0, max(map(len, parts)), COPIES):
            pairs = np.zeros((2, self._replicas, COPIES), np.int32)
            for r, part in enumerate(parts):
                some = part[start : start + COPIES]
                pairs[:, r, : len(some)] = np.reshape(some, (-1, 2)).T
            with jax.set_mesh(self._forward.mesh):
                self.state = self._copy(self.state, *pairs.reshape(2, -1))

    def set_changes(self, slot: int, counts: np.ndarray, seen: np.ndarray, bias: np.ndarray):
        """What penalties and biases know of the sequence in a slot, (V,) each."""
        slot_R = np.full(self._replicas, self._slots, np.int32)
        slot_R[slot // self._slots] = slot % self._slots
        at = slot_R if self._replicas > 1 else slot_R[0]
        with jax.set_mesh(self._forward.mesh):
            self.state = self._set(self.state, at, counts, seen, bias)

    def set_masks(self, slots: Sequence[int], allowed_NW: np.ndarray) -> None:
        """Says which tokens the sequences in some slots may draw next, a bit a token (uint32)."""
        parts: list[list[int]] = [[] for _ in range(self._replicas)]
        for n, slot in enumerate(slots):
            parts[slot // self._slots].append(n)
        for start in range(0, max(map(len, parts)), MASKS):
            slot_N = np.full(self._replicas * MASKS, self._slots, np.int32)
            rows_NW = np.zeros((self._replicas * MASKS, allowed_NW.shape[1]), np.uint32)
            for r, part in enumerate(parts):
                for row, n in enumerate(part[start : start + MASKS], r * MASKS):
                    slot_N[row], rows_NW[row] = slots[n] % self._slots, allowed_NW[n]
            with jax.set_mesh(self._forward.mesh):
                self.state = self._allow(self.state, slot_N, rows_NW)

    def _exact_step(
        self, params: Tree, segments: Sequence[Segment], table_SM: np.ndarray, rules: Rules
    ) -> tuple[Drawn, list[int]]:
        is_scored = any(s.following for s in segments)
        scores: list[tuple[Drawn, list[int]]] | None = [] if is_scored else None
        tile, T = self._ready("scored_tile" if is_scored else "tile", tiles.TILE)
        by_replica: list[list[Segment]] = [[] for _ in range(self._replicas)]
        for segment in segments:
            by_replica[segment.slot // self._slots].append(segment)
        # Tile i has the i-th part of every replica; some have fewer parts than others.
        for parts in itertools.zip_longest(*map(_tiles, by_replica), fillvalue=[]):
            part = [segment for each in parts for segment in each]
            tokens, _, firsts = self._laying.tokens(part, table_SM, T, T)
            tokens = self._seen(tokens)
            slot_T = np.full(self._replicas * T, self._slots, np.int32)
            for first, segment in zip(firsts, part, strict=True):
                if segment.draws:
                    slot_T[first + len(segment.ids) - 1] = segment.slot % self._slots
            if scores is None:
                self.state = tile(params, self.state, tokens, slot_T)
                continue
            next_T = self._laying.following(part, firsts, T)
            scored, self.state = tile(params, self.state, tokens, slot_T, next_T)
            scores.append((scored, self._laying.fed(part)))
        slot_S = np.full(self._replicas * self._slots, self._slots, np.int32)
        drawing = [s.slot for s in segments if s.draws]
        slot_S[drawing] = np.mod(drawing, self._slots)
        if not drawing:
            nothing = Drawn(*(np.zeros(len(slot_S)),) * 4, scores)  # type: ignore[arg-type]
            return nothing, [s.slot for s in segments]
        drawn, self.state = self._ready("draw", self._slots)[0](self.state, slot_S, rules)
        return replace(drawn, scores=scores), [s.slot for s in segments]

    # ---- what is compiled

    def _everyone(self, tree: Any) -> Any:
        """Returns arrays on the devices: each has the rows of its replica."""
        # Spelled as the programs' results are, or a first call would count as another program.
        named, first = self._forward.layout.named, self._forward.row_spec or (None,)
        specs = jax.tree.map(lambda x: named(PS(*first, *[None] * (x.ndim - 1))), tree)
        return jax.device_put(tree, specs)

    def _program(self, local: Any, drawn: Any = None, fixed: int = 2, shared: int = 0) -> Any:
        """A jitted function of (params, state, *arrays) that all devices of a replica run alike.

        drawn: how what it returns beside the state lies; None: nothing. fixed: 1: it has no
        parameters. shared: how many of the last arrays are the same for all replicas.
        """
        rows = self._forward.row_spec
        out_specs: Any = self._specs if drawn is None else (drawn, self._specs)

        def call(*args: Any) -> Any:
            stop = len(args) - shared
            arrays, specs = args[fixed:stop], (*map(self._forward.specs, args[: fixed - 1]),)
            specs = *specs, self._specs, *jax.tree.map(lambda _: rows, arrays), *[PS()] * shared
            if rows:  # on an Explicit mesh, shard_map refuses to cut what all devices have
                arrays = jax.tree.map(
                    lambda x: jax.sharding.reshard(x, PS(*rows, *[None] * (x.ndim - 1))), arrays
                )
            run = self._everywhere(local, in_specs=specs, out_specs=out_specs)
            out = run(*args[:fixed], *arrays, *args[stop:])
            if drawn is not None and rows and self._forward.mesh.is_multi_process:
                # Every process reads what was drawn on all replicas.
                out = jax.tree.map(lambda x: jax.sharding.reshard(x, PS()), out[0]), out[1]
            return out

        return jax.jit(call, donate_argnums=fixed - 1, compiler_options=self._options)

    def _follow_each(self, token_KB: Array, source_T: Array) -> Array:
        """`_follow` on each device, with the rows of its replica."""
        specs = self._by_step, self._forward.row_spec
        token_KB, source_T = map(jax.sharding.reshard, (token_KB, source_T), specs)
        run = self._everywhere(_follow, in_specs=specs, out_specs=specs[1])
        return run(token_KB, source_T)

    def _local_step(
        self,
        params: Tree,
        state: State,
        tokens: forward_.Tokens,
        rows_B: Array,
        slot_B: Array,
        rules: Rules,
    ) -> tuple[Drawn, State]:
        logits_BV, pages = self._forward.run(params, state.pages, tokens, rows_B)
        return self._local_drawn(replace(state, pages=pages), logits_BV, slot_B, rules)

    def _local_scored(
        self,
        params: Tree,
        state: State,
        tokens: forward_.Tokens,
        rows_B: Array,
        slot_B: Array,
        rules: Rules,
        next_T: Array,
    ) -> tuple[Drawn, State]:
        """The step, with the log-probability of each token that follows one that is fed."""
        forward, T = self._forward, len(next_T)
        x = forward.enter(params, tokens)
        x, pages = forward.through(params, state.pages, tokens, x)
        state, logits_BV = replace(state, pages=pages), forward.leave(params, x, rows_B)
        drawn, state = self._local_drawn(state, logits_BV, slot_B, rules)

        def some(at_N: Array) -> Drawn:
            logits_NV = forward.leave(params, x, at_N)
            return draw.score(logits_NV, jax.nn.logsumexp(logits_NV, -1), next_T[at_N])

        parts = jax.lax.map(some, jnp.arange(T).reshape(-1, min(T, SCORED)))
        scores = jax.tree.map(lambda a: a.reshape(T, *a.shape[2:]), parts)
        return replace(drawn, scores=scores), state

    def _local_drawn(
        self, state: State, logits_BV: Array, slot_B: Array, rules: Rules
    ) -> tuple[Drawn, State]:
        log_z_B = jax.nn.logsumexp(logits_BV, -1)
        drawn, changes = self._draw_tokens(logits_BV, log_z_B, rules, state.changes, slot_B)
        return drawn, replace(state, changes=changes)

    def _local_several(
        self,
        params: Tree,
        state: State,
        tokens: forward_.Tokens,
        rows_B: Array,
        slot_B: Array,
        rules: Rules,
    ) -> tuple[Drawn, State]:
        """K times: each sequence's drawn token is the next one that it feeds."""
        B = rows_B.shape[0]

        def one(carry: tuple, _: None) -> tuple:
            state, tokens, drawn_B = carry
            now = replace(rules, drawn=drawn_B)
            drawn, state = self._local_step(params, state, tokens, rows_B, slot_B, now)
            real_B = (tokens.count_B > 0).astype(jnp.int32)
            tokens = replace(
                tokens,
                # Not `.at[:B].set`: where B is T, XLA (jaxlib 0.11.2) crashes while it compiles
                # this loop for several devices.
                ids_T=jnp.concatenate([drawn.token, tokens.ids_T[B:]]),
                positions_T=tokens.positions_T + 1,
                rotary_T3=None if tokens.rotary_T3 is None else tokens.rotary_T3 + 1,
                context_B=tokens.context_B + real_B,
            )
            return (state, tokens, drawn_B + 1), drawn

        carry = (state, tokens, rules.drawn)
        (state, _, _), drawn = jax.lax.scan(one, carry, None, length=self.steps)
        return drawn, state

    def _local_scored_tile(
        self, params: Tree, state: State, tokens: forward_.Tokens, slot_T: Array, next_T: Array
    ) -> tuple[Drawn, State]:
        logits_TV, log_z_T, pages = tiles.tile(self._forward, params, state.pages, tokens)
        return draw.score(logits_TV, log_z_T, next_T), replace(
            state,
            pages=pages,
            logits_SV=state.logits_SV.at[slot_T].set(logits_TV, mode="drop"),
            log_z_S=state.log_z_S.at[slot_T].set(log_z_T, mode="drop"),
        )

    def _local_draw(self, state: State, slot_S: Array, rules: Rules) -> tuple[Drawn, State]:
        assert state.logits_SV is not None and state.log_z_S is not None
        drawn, changes = self._draw_tokens(
            state.logits_SV, state.log_z_S, rules, state.changes, slot_S
        )
        return drawn, replace(state, changes=changes)


def _tiles(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Cuts segments so that each list has at most TILE tokens."""
    parts: list[list[Segment]] = [[]]
    room = tiles.TILE
    for segment in segments:
        done = 0
        while done < len(segment.ids):
            if room == 0:
                parts.append([])
                room = tiles.TILE
            part = segment.ids[done : done + room]
            last = done + len(part) == len(segment.ids)
            piece = Segment(
                segment.slot,
                part,
                segment.first + done,
                segment.draws and last,
                segment.following[done : done + room],
                segment.sight and segment.sight.part(done, done + len(part)),
                segment.adapter,
            )
            parts[-1].append(piece)
            done, room = done + len(part), room - len(part)
    return parts


def _follow(token_KB: Array, source_T: Array) -> Array:
    """Returns the tokens that a call feeds behind one of K steps."""
    return token_KB[-1][source_T]


def _copy(pool: int, state: State, source_N: Array, target_N: Array) -> State:
    return replace(state, pages=forward_.copy(state.pages, pool, source_N, target_N))


def _set(state: State, slot: Array, counts: Array, seen: Array, bias: Array) -> State:
    was = state.changes
    return replace(
        state,
        changes=Changes(
            was.counts_SV.at[slot].set(counts, mode="drop"),
            was.seen_SV.at[slot].set(seen, mode="drop"),
            was.bias_SV.at[slot].set(bias, mode="drop"),
            was.allowed_SW,
        ),
    )


def _allow(state: State, slot_N: Array, allowed_NW: Array) -> State:
    was = state.changes
    allowed_SW = was.allowed_SW.at[slot_N].set(allowed_NW, mode="drop")
    return replace(state, changes=replace(was, allowed_SW=allowed_SW))


# ---- what an engine runs on: where the weights rest, and the programs that draw tokens with them


class Backend(Protocol):
    """Devices, weights and programs of an engine. cpu: whether the devices are CPUs, which decides
    an engine's defaults. replicas: how many groups of devices run different sequences."""

    replicas: int

    @property
    def cpu(self) -> bool: ...  # noqa: D102

    def place(self, params: Tree) -> Any:
        """Returns the weights on the devices, as `Programs.step` takes them. Weights that it has
        returned before come back unchanged."""
        ...

    def outline(self, params: Tree) -> Any:
        """Returns what `place` would, as ShapeDtypeStructs with their shardings."""
        ...

    def default_pages(self, most: int, page_size: int) -> int:
        """Returns how many pages of all layers each replica has room for, `most` at most, at least
        2."""
        ...

    def programs(
        self, *, slots: int, budget: int, pool: tuple[int, int, int], exact: bool, steps: int
    ) -> Any:
        """Returns a Programs, or an object with its methods. Arguments: as Programs has them, of
        one replica."""
        ...


class OneMesh:
    """All layers on one mesh."""

    def __init__(
        self,
        cfg: DecoderConfig | VlmConfig,
        mesh: Mesh | None,
        zero: Zero | None,
        dtype: Any,
        overlap: Overlap,
        exact: bool = False,
        sequences: int = 1,
    ):
        """mesh: None: one device. zero: None: the weights are copies in the compute type. exact:
        the programs have the loop over layers that training has. sequences: that run at a time.
        Raises: UserError when the mesh cannot cut the model."""
        mesh = MeshSpec(data=1).build(jax.devices()[:1]) if mesh is None else mesh
        axes = forward_.replica_axes(mesh, sequences)
        self._forward = Forward(cfg, mesh, zero or "none", dtype, overlap, axes)
        self._cast, self._exact, self.replicas = zero is None, exact, self._forward.replicas

    @property
    def cpu(self) -> bool:
        """Whether the mesh is of CPUs."""
        return self._forward.mesh.devices.flat[0].platform == "cpu"

    @property
    def alone(self) -> bool:
        """Whether each layer's weights are separate arrays: on a GPU, if they are copies anyway. On
        a CPU, a loop over layers compiles sooner."""
        return self._cast and not self._exact and not self.cpu

    def place(self, params: Tree) -> Tree:
        """See Backend. Raises: UserError for parameters of another model."""
        check_params(params, self._forward.parts, "params")
        return self._forward.place(
            params, self._cast, free_bytes(self._forward.mesh) if self.alone else 0
        )

    def outline(self, params: Tree) -> Tree:
        """See Backend. Not for separate layers, which depend on the memory that is free."""
        assert not self.alone
        check_params(params, self._forward.parts, "params")
        return self._forward.outline(params, self._cast)

    def default_pages(self, most: int, page_size: int) -> int:
        """Returns for how many pages every device of all processes has room."""
        mesh = self._forward.mesh
        weights = sum(x.size for x in jax.tree.leaves(self._forward.parts.abstract))
        least, most_bytes = CPU_PAGES
        room = max(least, min(most_bytes, weights * self._forward.dtype.itemsize))
        room //= len(mesh.local_devices)
        if not self.cpu and (free := free_bytes(mesh)) < math.inf:
            room = int(GPU_SHARE * free)
        pages = min(most, room // self._forward.page_bytes(page_size))
        if mesh.is_multi_process:
            pages = int(multihost_utils.process_allgather(np.int32(pages)).min())
        return max(2, pages)

    def programs(self, **shapes: Any) -> Programs:
        """See Backend."""
        return Programs(self._forward, **shapes)

    @property
    def axes(self) -> Tree:
        """The words of the model's parameters."""
        return self._forward.parts.axes

    def tower(self, room: int) -> Tower | None:
        """Returns what computes features of images; None: the model sees none. room: of Tower."""
        return Tower(self._forward, room) if self._forward.vlm else None
