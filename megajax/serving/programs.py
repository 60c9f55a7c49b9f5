"""The compiled programs of an engine, and the state on its devices.

Fast numerics: one program a step, for a number of tokens that is rounded up to one of few sizes,
and one that decodes several tokens of every sequence without the host. Exact numerics: the step in
tiles (serving/tiles.py), then one program that draws. `bound` says how many there can be.

Legend: T tokens of a step, B segments, S slots (sequences that run), M pages of the longest
sequence, V vocabulary with its padding, K steps of one dispatch.
"""

import functools
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
from megajax.parallel.overlap import Overlap, compiler_options
from megajax.parallel.sharding import Zero
from megajax.serving import draw, tiles
from megajax.serving import forward as forward_
from megajax.serving.draw import Changes, Drawn, Rules
from megajax.serving.forward import Forward

Array = jax.Array
LEAST = 8  # tokens of the smallest program
COPIES = 16  # pages that one call copies
SCORED = 128  # (chosen) tokens whose logits are in memory at a time where prompts are scored
MASKS = 16  # sequences whose masks one call sets
DRAWN = Drawn(PS(), PS(), PS(), PS())  # type: ignore[arg-type]
SCORES = replace(DRAWN, scores=DRAWN)
# (chosen) bytes of the pages of a process on CPUs: as many as of the weights, within these bounds.
CPU_PAGES = 2**28, 2**30
GPU_SHARE = 0.9  # (vLLM's gpu_memory_utilization) of the free memory that becomes pages


# ---- a step's segments laid side by side, as the arrays that its program reads


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of one sequence that a step feeds.

    ids: of the tokens. first: position of the first one. draws: whether a token is drawn behind the
    last one. following: the ids behind each of them, if their log-probabilities are asked for.
    """

    slot: int
    ids: Sequence[int]
    first: int
    draws: bool
    following: Sequence[int] = ()


class Laid(NamedTuple):
    """The arrays that a step reads in addition to weights and state.

    rows_B: index of each segment's last token. slot_B: its slot, or S if it draws nothing. rules_B:
    how it draws.
    """

    tokens: forward_.Tokens
    rows_B: Any
    slot_B: Any
    rules_B: Rules


class Laying:
    """Writes segments into arrays of few shapes. sizes: all values of T."""

    def __init__(self, slots: int, budget: int, width: int):
        """slots: S. budget: most tokens of a step. width: M."""
        self._slots, self._width = slots, width
        # Powers of two from LEAST on, the last of which holds the budget.
        sizes = [LEAST]
        while sizes[-1] < budget:
            sizes.append(2 * sizes[-1])
        self.sizes = tuple(sizes)

    def size(self, tokens: int) -> int:
        """Returns the smallest T that holds so many tokens."""
        return next(size for size in self.sizes if size >= tokens)

    def step(
        self, segments: Sequence[Segment], table_SM: np.ndarray, rules: Rules, T: int | None = None
    ) -> Laid:
        """Returns what a step of these segments reads, in NumPy; a row for each, in their order.

        table_SM, rules: by slot. T: one of `sizes` that holds the segments; None: the smallest.
        """
        T = T or self.size(sum(len(s.ids) for s in segments))
        B = min(T, self._slots)
        tokens, at = self.tokens(segments, table_SM, T, B)
        slot_B, rows_B = np.full(B, self._slots, np.int32), np.zeros(B, np.int32)
        rules_B = draw.plain_rules(B)
        used = [s.slot for s in segments]
        for target, source in zip(fields(rules_B), fields(rules), strict=True):
            target[: len(used)] = source[used]
        for b, segment in enumerate(segments):
            rows_B[b] = at[b] + len(segment.ids) - 1
            if segment.draws:
                slot_B[b] = segment.slot
        return Laid(tokens, rows_B, slot_B, rules_B)

    def tokens(
        self, segments: Sequence[Segment], table_SM: np.ndarray, T: int, B: int
    ) -> tuple[forward_.Tokens, list[int]]:
        """Returns (the segments' tokens side by side, where each begins)."""
        tokens, at, where = forward_.tokens_like(T, B, self._width), 0, []
        tokens.table_BM[: len(segments)] = table_SM[[s.slot for s in segments]]
        for b, segment in enumerate(segments):
            count = len(segment.ids)
            tokens.ids_T[at : at + count] = segment.ids
            tokens.positions_T[at : at + count] = range(segment.first, segment.first + count)
            tokens.start_B[b], tokens.count_B[b] = at, count
            tokens.context_B[b] = segment.first + count
            where.append(at)
            at += count
        return tokens, where


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
    """Runs steps. All arguments that vary are arrays of few shapes.

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
    ):
        """slots: S. budget: most tokens of a step. pool: pages of a layer, tokens of a page, M.
        steps: K."""
        self._forward, self._exact, self._slots, self.steps = forward, exact, slots, steps
        self._pool, self._page, self._width = pool
        self._laying = Laying(slots, budget, self._width)
        self.sizes = self._laying.sizes
        self._options = compiler_options(forward.overlap, forward.mesh)
        pages = forward_.Pages(forward.page_spec, forward.page_spec)
        scores = PS() if exact else None
        self._specs = State(pages, Changes(*[PS()] * 4), scores, scores)
        self._state: Any = None  # State, while there is memory for it
        self.hold()
        self._step = self._program(self._local_step)
        self._several = self._program(self._local_several)
        self._scored = self._program(self._local_scored, SCORES)
        self._ids = forward.layout.named(PS(None))
        # A function of its own: engines would count each other's programs.
        self._follow: Any = jax.jit(functools.partial(_follow), out_shardings=self._ids)
        self._tile = self._program(self._local_tile, None)
        self._scored_tile = self._program(self._local_scored_tile, DRAWN)
        self._draw = self._on_state(self._local_draw, (DRAWN, self._specs))
        self._copy = self._on_state(functools.partial(_copy, self._pool), self._specs)
        self._set = self._on_state(_set, self._specs)
        self._allow = self._on_state(_allow, self._specs)
        # Steps that `prepare` compiles, by (function, T).
        self._ahead: dict[tuple[str, int], Future] = {}

    def hold(self) -> None:
        """Takes the memory of pages, if it has none."""
        if self._state is None:
            slots, V = (self._slots, self._forward.cfg.padded_vocab) if self.draws else (1, 1)
            with jax.set_mesh(self._forward.mesh):
                self._state = State(
                    self._forward.pages(self._pool, self._page),
                    self._everyone(draw.no_changes(slots, V)),
                    self._everyone(jnp.zeros((slots, V))) if self._exact else None,
                    self._everyone(jnp.zeros(slots)) if self._exact else None,
                )

    def free(self) -> None:
        """Gives the memory of the pages back; what they held is lost."""
        self._state = None

    @property
    def state(self) -> State | None:
        """What the last call left, perhaps while it still runs."""
        return self._state

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

    @property
    def _most_rows(self) -> int:
        return next(size for size in self.sizes if size >= min(self._slots, self.sizes[-1]))

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
        outline = jax.tree.map(_outline, (params, self._state))
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
        table_SM = np.zeros((1, self._width), np.int32)
        if name == "draw":
            return self._draw.lower(state, np.zeros(T, np.int32), draw.plain_rules(T))
        if name == "tile":
            tokens, _ = self._laying.tokens([], table_SM, T, T)
            return self._tile.lower(params, state, tokens, np.zeros(T, np.int32))
        laid = self._laying.step([], table_SM, draw.plain_rules(1), T)
        if name == "step":
            return self._step.lower(params, state, *laid)
        ids_T = jax.ShapeDtypeStruct((T,), np.int32, sharding=self._ids)
        laid = laid._replace(tokens=replace(laid.tokens, ids_T=ids_T))
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
        """Feeds the segments and draws.

        table_SM, rules: by slot. steps: 1, or K when every segment is one token that draws. after:
          what a call of K steps returned that perhaps still runs, and of each segment the row whose
          last token it feeds, in the place of the segment's own; None: its own.
        Returns: (arrays (rows,) of Drawn, or (K, rows); the row of each segment). If a segment has
          `following`, the arrays of scores have a row for each token, in the segments' order.
        """
        with jax.set_mesh(self._forward.mesh):
            if self._exact:
                return self._exact_step(params, segments, table_SM, rules)
            is_scored = any(s.following for s in segments)
            name = "several" if steps > 1 else "scored" if is_scored else "step"
            run, T = self._ready(name, self._laying.size(sum(len(s.ids) for s in segments)))
            laid = self._laying.step(segments, table_SM, rules, T)
            if steps > 1:  # the ids as a call before leaves them, or this would be two programs
                tokens = laid.tokens
                if after is None:
                    ids_T = self._placed(tokens.ids_T)
                else:
                    drawn, sources = after
                    source_T = np.zeros_like(tokens.ids_T)
                    source_T[: len(sources)] = sources
                    ids_T = self._follow(drawn.token, source_T)
                laid = laid._replace(tokens=replace(tokens, ids_T=ids_T))
            following = (_side_by_side(segments, T),) if is_scored else ()
            drawn, self._state = run(params, self._state, *laid, *following)
            for part in jax.tree.leaves(drawn):
                part.copy_to_host_async()
            return drawn, list(range(len(segments)))

    def read(self, drawn: Drawn) -> Drawn:
        """Waits for what `step` returned; returns it in NumPy."""
        drawn = jax.tree.map(np.asarray, drawn)
        if isinstance(drawn.scores, list):  # of each tile, and how many rows it has
            parts = [jax.tree.map(lambda x, n=n: x[:n], tile) for tile, n in drawn.scores]
            scores = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
            drawn = replace(drawn, scores=scores)
        return drawn

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages in all layers, (source, target) each."""
        for start in range(0, len(copies), COPIES):
            pairs = np.zeros((COPIES, 2), np.int32)
            part = copies[start : start + COPIES]
            pairs[: len(part)] = part
            with jax.set_mesh(self._forward.mesh):
                self._state = self._copy(self._state, pairs[:, 0], pairs[:, 1])

    def set_changes(self, slot: int, counts: np.ndarray, seen: np.ndarray, bias: np.ndarray):
        """What penalties and biases know of the sequence in a slot, (V,) each."""
        with jax.set_mesh(self._forward.mesh):
            self._state = self._set(self._state, np.int32(slot), counts, seen, bias)

    def set_masks(self, slots: Sequence[int], allowed_NW: np.ndarray) -> None:
        """Says which tokens the sequences in some slots may draw next, a bit a token (uint32)."""
        for start in range(0, len(slots), MASKS):
            part = slots[start : start + MASKS]
            slot_N = np.full(MASKS, self._slots, np.int32)
            rows_NW = np.zeros((MASKS, allowed_NW.shape[1]), np.uint32)
            slot_N[: len(part)], rows_NW[: len(part)] = part, allowed_NW[start : start + MASKS]
            with jax.set_mesh(self._forward.mesh):
                self._state = self._allow(self._state, slot_N, rows_NW)

    def _exact_step(
        self, params: Tree, segments: Sequence[Segment], table_SM: np.ndarray, rules: Rules
    ) -> tuple[Drawn, list[int]]:
        is_scored = any(s.following for s in segments)
        scores: list[tuple[Drawn, int]] | None = [] if is_scored else None
        tile, T = self._ready("scored_tile" if is_scored else "tile", tiles.TILE)
        for part in _tiles(segments):
            tokens, at = self._laying.tokens(part, table_SM, T, T)
            slot_T = np.full(T, self._slots, np.int32)
            for first, segment in zip(at, part, strict=True):
                if segment.draws:
                    slot_T[first + len(segment.ids) - 1] = segment.slot
            if scores is None:
                self._state = tile(params, self._state, tokens, slot_T)
                continue
            next_T = _side_by_side(part, T)
            scored, self._state = tile(params, self._state, tokens, slot_T, next_T)
            scores.append((scored, sum(len(s.ids) for s in part)))
        slot_S = np.full(self._slots, self._slots, np.int32)
        drawing = [s.slot for s in segments if s.draws]
        slot_S[drawing] = drawing
        if not drawing:
            nothing = Drawn(*(np.zeros(self._slots),) * 4, scores)  # type: ignore[arg-type]
            return nothing, [s.slot for s in segments]
        drawn, self._state = self._ready("draw", self._slots)[0](self._state, slot_S, rules)
        return replace(drawn, scores=scores), [s.slot for s in segments]

    # ---- what is compiled

    def _placed(self, ids_T: np.ndarray) -> Array:
        """Returns ids on all devices. With several processes device_put would compare what each
        of them gives, which waits for all."""
        if not self._forward.mesh.is_multi_process:
            return jax.device_put(ids_T, self._ids)
        return jax.make_array_from_callback(ids_T.shape, self._ids, lambda index: ids_T[index])

    def _everyone(self, tree: Any) -> Any:
        # Spelled as the programs' results are, or a first call would count as another program.
        named = jax.tree.map(lambda x: self._forward.layout.named(PS(*[None] * x.ndim)), tree)
        return jax.device_put(tree, named)

    def _program(self, local: Any, drawn: Any = DRAWN) -> Any:
        """A jitted function of (params, state, *arrays) that every device runs alike.

        drawn: how what it returns beside the state lies; None: nothing.
        """
        donated: Any = self._specs if drawn is None else (drawn, self._specs)

        def call(params: Tree, state: State, *others: Any) -> Any:
            replicated = jax.tree.map(lambda _: PS(), others)
            specs = (self._specs, *replicated)
            return self._forward.everywhere(local, params, specs, donated)(params, state, *others)

        return jax.jit(call, donate_argnums=1, compiler_options=self._options)

    def _on_state(self, local: Any, out_specs: Any) -> Any:
        """The same without parameters."""

        def call(state: State, *others: Any) -> Any:
            specs = (self._specs, *jax.tree.map(lambda _: PS(), others))
            mesh = self._forward.mesh
            return jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
            )(state, *others)

        return jax.jit(call, donate_argnums=0, compiler_options=self._options)

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
        drawn, changes = draw.draw_tokens(logits_BV, log_z_B, rules, state.changes, slot_B)
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
                context_B=tokens.context_B + real_B,
            )
            return (state, tokens, drawn_B + 1), drawn

        carry = (state, tokens, rules.drawn)
        (state, _, _), drawn = jax.lax.scan(one, carry, None, length=self.steps)
        return drawn, state

    def _local_tile(
        self, params: Tree, state: State, tokens: forward_.Tokens, slot_T: Array
    ) -> State:
        return self._local_scored_tile(params, state, tokens, slot_T, slot_T * 0)[1]

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
        drawn, changes = draw.draw_tokens(
            state.logits_SV, state.log_z_S, rules, state.changes, slot_S
        )
        return drawn, replace(state, changes=changes)


def _outline(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


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
            )
            parts[-1].append(piece)
            done, room = done + len(part), room - len(part)
    return parts


def _side_by_side(segments: Sequence[Segment], T: int) -> np.ndarray:
    """Returns the ids that follow the tokens of segments, int32 (T,); 0 where nobody asks."""
    next_T, at = np.zeros(T, np.int32), 0
    for segment in segments:
        next_T[at : at + len(segment.following)] = segment.following
        at += len(segment.ids)
    return next_T


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
            was.counts_SV.at[slot].set(counts),
            was.seen_SV.at[slot].set(seen),
            was.bias_SV.at[slot].set(bias),
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
    an engine's defaults."""

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
        """Returns how many pages of all layers there is room for, `most` at most, at least 2."""
        ...

    def programs(
        self, *, slots: int, budget: int, pool: tuple[int, int, int], exact: bool, steps: int
    ) -> Any:
        """Returns a Programs, or an object with its methods. Arguments: as Programs has them."""
        ...


class OneMesh:
    """All layers on one mesh."""

    def __init__(
        self,
        cfg: DecoderConfig,
        mesh: Mesh | None,
        zero: Zero | None,
        dtype: Any,
        overlap: Overlap,
        exact: bool = False,
    ):
        """mesh: None: one device. zero: None: the weights are copies in the compute type. exact:
        the programs have the loop over layers that training has. Raises: UserError when the mesh
        cannot cut the model."""
        mesh = MeshSpec(data=1).build(jax.devices()[:1]) if mesh is None else mesh
        self._forward, self._cast = Forward(cfg, mesh, zero or "none", dtype, overlap), zero is None
        self._exact = exact

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
        """Returns for how many pages the devices of all processes have room."""
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
