"""Which tokens of which sequences the next step feeds, and who holds which page of the cache.

The engine asks for a `Plan`, does what it says on the device, and commits the tokens that were
drawn. Prompts are fed in pieces beside the sequences that decode (Sarathi-Serve section 4.2), each
sequence has pages for all of its tokens before it runs, and where pages run out while sequences
grow, the last in order gives its pages back and is computed again later (vLLM, PagedAttention
section 4.5). No wall clock and no chance: equal calls give equal plans.

Order: a request of priority p counts as if it had come p * AGING plans earlier. So the order of two
requests never changes while they wait, a heap keeps it, and nobody waits for ever: what comes late
enough is behind, whatever its priority. The first in order is never preempted.

Work a plan: constant for each running sequence, logarithmic for each that starts, none for those
that wait; for pages, constant for each. Not here: the arrays on the device (programs.py), sampling,
stop strings.
"""

import array
import collections.abc as abc
import hashlib
import heapq
import itertools
import operator
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megajax.core.errors import UserError

NOBODY = 0  # the page to which tokens that pad a step are written; no sequence holds it
AGING = 100  # (chosen) plans of waiting that weigh as much as one unit of priority


# ---- pages
#
# A page has room for the keys and values of `page_size` consecutive tokens of one sequence, in
# every layer. Sequences hold pages by reference counts (vLLM, PagedAttention section 4.3). A full
# page may be published under a key that names its content: the chain of hashes over its tokens and
# all tokens before them. A later sequence that begins with the same tokens then shares the page. A
# published page that nobody holds stays reusable until its room is needed; the least recently used
# one goes first. All placeholders of images have one id, so the key names the images too: ids alone
# would answer with the image of another request.


class Shown(NamedTuple):
    """Tokens start to stop of a prompt, which show an image. digest: 32 bytes, which name the
    image: its shape and its pixels."""

    start: int
    stop: int
    digest: bytes


def chain(before: bytes, tokens: abc.Sequence[int], images: bytes = b"") -> bytes:
    """Returns the key of a page, 32 bytes.

    BLAKE2b, because a prompt that collides with another one's key would read its keys and values;
    nobody knows how to make such a prompt for a cryptographic hash of 256 bits.
    Args: before: key of the page before it, b"" for a first page. tokens: a page of ids. images:
      what the placeholders among them show; its length is a multiple of 48, so that no two pages
      with different arguments hash the same bytes.
    """
    content = before + array.array("q", tokens).tobytes() + images
    return hashlib.blake2b(content, digest_size=32).digest()


class PagePool:
    """Hands out pages 1 .. pages - 1; page 0 (NOBODY) is never handed out.

    A page is free, held (its count is above 0), or idle: published, and held by nobody.
    """

    def __init__(self, pages: int, page_size: int, prefix_cache: bool = True):
        """pages: in all, with page 0. page_size: tokens. prefix_cache: False publishes nothing.

        Raises: UserError for fewer than 2 pages or a page without room.
        """
        if pages < 2:
            raise UserError(f"pages={pages} must be at least 2 (page 0 is not used); nearest: 2")
        if page_size < 1:
            raise UserError(f"page_size={page_size} must be at least 1 token; nearest: 1")
        self.pages, self.page_size, self.prefix_cache = pages, page_size, prefix_cache
        self.evictions = 0  # published pages whose room was needed
        self._free = list(range(pages - 1, 0, -1))
        self._held = [0] * pages
        self._keys: list[bytes | None] = [None] * pages
        self._published: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def capacity(self) -> int:
        """Returns the number of pages that can be held at a time."""
        return self.pages - 1

    @property
    def available(self) -> int:
        """Returns how many pages `take` can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def in_use(self) -> int:
        """Returns how many pages are held."""
        return self.capacity - self.available

    @property
    def reusable(self) -> int:
        """Returns how many pages are published, held or not."""
        return len(self._published)

    def holders(self, page: int) -> int:
        """Returns how often a page is held."""
        return self._held[page]

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Returns pages that nobody holds, each now held once; idle ones lose their content.

        Raises: AssertionError where fewer are available: callers ask first.
        """
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                key, self._keys[page] = self._keys[page], None
                assert key is not None
                del self._published[key]
                self.evictions += 1
            self._held[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: abc.Iterable[int]) -> None:
        """Holds pages once more; each is held or idle."""
        for page in pages:
            if not self._held[page]:
                del self._idle[page]
            self._held[page] += 1

    def release(self, pages: abc.Sequence[int]) -> None:
        """Holds pages of a sequence once less, its last page first: an end is evicted before what
        it continues, without which it could not be found."""
        for page in reversed(pages):
            self._held[page] -= 1
            if self._held[page] > 0:
                continue
            assert not self._held[page], f"page {page} was released more often than it was held"
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, key: bytes) -> bool:
        """Makes a held, full page findable. False: another page has this content, or no prefix is
        to be reused; then the page stays private. It must not be written any more."""
        if not self.prefix_cache or key in self._published:
            return False
        assert self._held[page] and self._keys[page] is None
        self._published[key], self._keys[page] = page, key
        return True

    def find(self, key: bytes) -> int | None:
        """Returns the page that was published under a key, or None."""
        return self._published.get(key)

    def forget(self) -> None:
        """Unpublishes every page; those that are held stay held."""
        for page in self._published.values():
            self._keys[page] = None
        self._published.clear()
        self._free.extend(self._idle)
        self._idle.clear()


# ---- sequences
#
# What the scheduler hands to the engine. The scheduler alone writes to a sequence.


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt. Equal only to itself; all members are to be read only.

    request: the id that `Scheduler.add` was called with. index: from 0 to the request's n - 1.
    tokens: of the prompt, and the drawn ones. computed: how many tokens have keys and values in
    `pages`. slot: row of the batch while the sequence runs, else None. replica: number of the
    replica that runs it.
    """

    request: abc.Hashable
    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    tokens: list[int]
    family: "Family" = field(repr=False)
    order: tuple[int, int] = (0, 0)  # the smaller, the earlier served
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    keys: list[bytes] = field(default_factory=list, repr=False)  # of its full pages, as far as used
    published: int = 0  # pages that were offered for reuse
    anew: bool = False  # no page of another request is reused for it
    weights: int = 0  # number of the weights with which its pages were begun
    replica: int = 0
    images: tuple[Shown, ...] = ()  # of its prompt, in order
    adapter: int = 0  # number of it, which its keys and values depend on; 0: none

    def key(self, i: int, size: int) -> bytes:
        """Returns the key of its full page i. size: tokens a page. Each is computed once."""
        keys = self.keys
        while len(keys) <= i:
            start = len(keys) * size
            before, tokens = keys[-1] if keys else b"", self.tokens[start : start + size]
            more = self._images_of(start, start + size)
            if self.adapter:
                more += struct.pack("<q", self.adapter)
            keys.append(chain(before, tokens, more))
        return keys[i]

    def _images_of(self, start: int, stop: int) -> bytes:
        """Returns what the tokens start to stop show: for each image its digest, which of its
        tokens is the first one there, and where that lies."""
        parts = (
            image.digest + struct.pack("<qq", max(start - image.start, 0), image.start - start)
            for image in self.images
            if image.start < stop and start < image.stop
        )
        return b"".join(parts)


@dataclass(eq=False, slots=True)
class Family:
    """The sequences of a request that have not ended.

    alive: all of them. held: those that wait until another one has computed the prompt. ready:
    those that run and have computed it.
    """

    alive: dict[Sequence, None] = field(default_factory=dict)
    held: dict[Sequence, None] = field(default_factory=dict)
    ready: dict[Sequence, None] = field(default_factory=dict)


class Piece(NamedTuple):
    """Feed tokens[start : start + count]; draws: then the sequence's next token is drawn."""

    sequence: Sequence
    start: int
    count: int
    draws: bool


class Plan(NamedTuple):
    """One call of the device.

    pieces: by slot, at most one a sequence. copies: (source page, target page), all to be done
    before anything is fed; no page is both. steps: tokens that each piece draws; above 1, every
    piece is one token, and the pages have room for what the steps feed.
    """

    pieces: tuple[Piece, ...]
    copies: tuple[tuple[int, int], ...]
    steps: int


# ---- scheduler


class Scheduler:
    """Decides for requests that come and go what each step feeds, and who holds which page."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_batch: int,
        budget: int,
        chunk: int,
        context: int,
        replica: int = 0,
    ):
        """max_batch: sequences that run at a time. budget: tokens that a step feeds. chunk: tokens
        that a step feeds of one sequence. context: tokens of a sequence, drawn ones included.
        replica: number of the replica that runs the sequences; its slots begin at replica *
        max_batch.

        Raises: UserError for numbers that let nothing run.
        """
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("budget", budget, max_batch),  # each that runs gets a token
            ("chunk", chunk, 1),
            ("context", context, 2),
        ):
            if value < least:
                why = " (max_batch)" if name == "budget" else ""
                raise UserError(f"{name}={value} must be at least {least}{why}; nearest: {least}")
        self._pool, self._budget, self._chunk, self._context = pool, budget, chunk, context
        self._replica = replica
        slots = range(replica * max_batch, (replica + 1) * max_batch)
        self._unused = list(slots)  # a heap
        self._running: dict[Sequence, None] = {}
        self._waiting: dict[Sequence, None] = {}
        self._queue: list[tuple[tuple[int, int], Sequence]] = []  # a heap; may hold cancelled ones
        self._requests: dict[abc.Hashable, Family] = {}
        self._copies: dict[Sequence, tuple[int, int]] = {}  # by target; the sources are held
        self._clock = self._added = self._weights = 0
        self.preemptions = 0  # sequences that gave their pages back
        self.prefix_hits = 0  # tokens that were not computed since a published page had them
        self.forked = 0  # tokens that were not computed since another one of the request had them

    @property
    def waiting(self) -> abc.KeysView[Sequence]:
        """Returns the sequences without a slot."""
        return self._waiting.keys()

    @property
    def running(self) -> abc.KeysView[Sequence]:
        """Returns the sequences with a slot."""
        return self._running.keys()

    def add(
        self,
        id: abc.Hashable,
        prompt: abc.Iterable[int],
        *,
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        anew: bool = False,
        images: abc.Sequence[Shown] = (),
        adapter: int = 0,
    ) -> list[Sequence]:
        """Returns the n sequences of a request, which wait from now on.

        anew: the prompt is computed even where other requests have computed its beginning. images:
          that the prompt's placeholders show. adapter: its number; requests of another one reuse
          none of its pages.
        Raises: UserError for a request that can never run, or whose id another one has.
        """
        if id in self._requests:
            raise UserError(f"request {id!r} has not ended; give another id")
        try:
            tokens = tuple(operator.index(token) for token in prompt)
        except TypeError:
            raise UserError(f"the prompt of request {id!r} must be a list of token ids") from None
        pages, size = self._pool.capacity, self._pool.page_size
        check_room(len(tokens), max_tokens, n, context=self._context, pages=pages, page_size=size)
        family = Family()
        self._requests[id] = family
        made = []
        for index in range(n):
            sequence = Sequence(
                id, index, tokens, max_tokens, priority, list(tokens), family, anew=anew
            )
            sequence.replica, sequence.images = self._replica, tuple(images)
            sequence.adapter = adapter
            sequence.order = (self._clock - priority * AGING, self._added)
            self._added += 1
            family.alive[sequence] = self._waiting[sequence] = None
            made.append(sequence)
        family.held.update(dict.fromkeys(made[1:]))
        heapq.heappush(self._queue, (made[0].order, made[0]))
        return made

    def plan(self, steps: int = 1) -> Plan | None:
        """Returns what to do next, or None. A plan that is not committed changes nothing that the
        next one could not do again.

        Args: steps: wanted; the plan has this number or 1.
        """
        self._clock += 1
        preempted = self._preemptions_to_grow()
        pieces, prefilling, budget = [], [], self._budget
        for sequence in self._running:
            left = len(sequence.tokens) - sequence.computed
            if left == 1:
                pieces.append(Piece(sequence, sequence.computed, 1, True))
                self._reserve(sequence, len(sequence.tokens))
                budget -= 1
            else:
                prefilling.append(sequence)
        for sequence in sorted(prefilling, key=operator.attrgetter("order")):
            if not budget:
                break
            pieces.append(self._prefill(sequence, budget))
            budget -= pieces[-1].count
        # What was just preempted would come back at once, to be preempted again.
        while not preempted and budget and self._unused and (head := self._head()) is not None:
            if not self._start(head):
                break
            heapq.heappop(self._queue)
            pieces.append(self._prefill(head, budget))
            budget -= pieces[-1].count
        if not pieces:
            assert not self._waiting, "with no sequence running, the first in order fits"
            return None
        pieces.sort(key=operator.attrgetter("sequence.slot"))
        all_feed = len(pieces) == len(self._running)
        steps = steps if steps > 1 and all_feed and self._reserve_steps(pieces, steps) else 1
        return Plan(tuple(pieces), tuple(self._copies.values()), steps)

    def plan_after(self, plan: Plan) -> Plan | None:
        """Returns what follows the last plan, which still runs, if that does not depend on what it
        draws: all that do not reach their max_tokens decode as many more; if one ends otherwise,
        that is in vain. None: it has one step, nobody goes on, pages or context lack, or others
        could start.
        """
        pieces = [piece for piece in plan.pieces if piece.sequence.slot is not None]
        starting = len(pieces) < len(self._running) or (self._waiting and self._unused)
        if plan.steps == 1 or starting:
            return None
        self._clock += 1
        following = []
        for sequence, start, *_ in pieces:
            first = start + plan.steps
            if first + 1 - len(sequence.prompt) < sequence.max_tokens:
                following.append(Piece(sequence, first, 1, True))
        if not following or not self._reserve_steps(following, plan.steps):
            return None
        return Plan(tuple(following), (), plan.steps)

    def commit(self, plan: Plan, drawn: abc.Mapping[Sequence, abc.Sequence[int]]) -> None:
        """Records that a plan was done, the first one that was not committed.

        Args: drawn: for each sequence with a piece that draws 1 to plan.steps tokens; fewer where
            it ended. Those that ended since the plan was made are passed over.
        Raises: ValueError for tokens that do not belong to the plan.
        """
        for piece in plan.pieces:
            sequence = piece.sequence
            if sequence.slot is None:
                continue
            new = drawn.get(sequence, ())
            if piece.start != sequence.computed:
                raise ValueError(f"this plan of request {sequence.request!r} is not its next one")
            if not piece.draws <= len(new) <= piece.draws * plan.steps:
                raise ValueError(f"{len(new)} tokens of request {sequence.request!r} were drawn")
            self._drop_copy(sequence)
            sequence.tokens.extend(new)
            # The last one that was drawn has not been fed.
            sequence.computed = piece.start + piece.count + max(len(new) - 1, 0)
            if sequence.weights == self._weights:
                self._publish(sequence)
        for piece in plan.pieces:
            sequence, family = piece.sequence, piece.sequence.family
            prompt = len(sequence.prompt)
            if piece.start < prompt <= sequence.computed and sequence.slot is not None:
                self._share_prompt(sequence, family)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, whether it runs or waits; its published pages stay reusable."""
        family = sequence.family
        if sequence not in family.alive:
            return
        if sequence.slot is not None:
            self._stop(sequence)
        else:
            del self._waiting[sequence]
        held = sequence in family.held
        del family.alive[sequence]
        family.held.pop(sequence, None)
        if not family.alive:
            del self._requests[sequence.request]
        elif not held and len(family.held) == len(family.alive):
            self._enqueue_held(family, 1)  # nobody is left to compute the prompt
        if len(self._queue) > 2 * len(self._waiting) + 64:  # mostly cancelled ones
            self._queue = [entry for entry in self._queue if entry[1] in self._waiting]
            heapq.heapify(self._queue)

    def cancel(self, id: abc.Hashable) -> list[Sequence]:
        """Ends all sequences of a request and returns them: none, if the request is unknown or has
        ended."""
        family = self._requests.get(id)
        ended = list(family.alive) if family else []
        for sequence in reversed(ended):
            self.finish(sequence)
        return ended

    def drop_prefixes(self) -> None:
        """Lets sequences that start from now on reuse no pages that were computed before, as the
        weights are new. Running sequences go on with their pages."""
        self._weights += 1
        self._pool.forget()
        for sequence in self._running:
            sequence.family.ready.clear()

    def _enqueue_held(self, family: Family, count: int) -> None:
        """Lets sequences that waited for another's prompt wait for a slot."""
        for sequence in list(family.held)[:count]:
            del family.held[sequence]
            heapq.heappush(self._queue, (sequence.order, sequence))

    def _head(self) -> Sequence | None:
        """Returns the first in order of those that wait."""
        while self._queue and self._queue[0][1] not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _prefill(self, sequence: Sequence, budget: int) -> Piece:
        left = len(sequence.tokens) - sequence.computed
        count = min(left, self._chunk, budget)
        return Piece(sequence, sequence.computed, count, count == left)

    def _lacking(self, sequence: Sequence, tokens: int) -> int:
        """Returns how many more pages a sequence needs to hold its first `tokens` tokens."""
        return max(self._pool.pages_for(tokens) - len(sequence.pages), 0)

    def _reserve(self, sequence: Sequence, tokens: int) -> None:
        if lacking := self._lacking(sequence, tokens):
            sequence.pages += self._pool.take(lacking)

    def _reserve_steps(self, pieces: list[Piece], steps: int) -> bool:
        """Reserves the pages of several steps; False: the next step is not only decoding, or there
        are too few pages, and nothing was reserved."""
        lacking = 0
        for sequence, start, count, draws in pieces:
            # A prompt may end with an image: its last token has a feature, which several steps do
            # not read, and the rotary position behind it is not the next one.
            shown = sequence.images and start < sequence.images[-1].stop
            if count > 1 or not draws or shown or start + steps > self._context:
                return False
            lacking += self._lacking(sequence, start + steps)
        if lacking > self._pool.available:
            return False
        for piece in pieces:
            self._reserve(piece.sequence, piece.start + steps)
        return True

    def _preemptions_to_grow(self) -> int:
        """Preempts sequences until all others have room for their next token; returns how many
        were preempted."""
        lacking = sum(self._lacking(s, len(s.tokens)) for s in self._running)
        if lacking <= self._pool.available:
            return 0
        last, before = sorted(self._running, key=operator.attrgetter("order")), self.preemptions
        while lacking > self._pool.available:
            assert len(last) > 1, "the pool has room for every request that was accepted"
            lacking -= self._lacking(last[-1], len(last[-1].tokens))
            # It waits in its old place, before later ones of its priority, and is computed again.
            sequence = last.pop()
            self._stop(sequence)
            sequence.computed = sequence.published = 0
            self._waiting[sequence] = None
            heapq.heappush(self._queue, (sequence.order, sequence))
            self.preemptions += 1
        return self.preemptions - before

    def _stop(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        assert sequence.slot is not None
        self._drop_copy(sequence)
        self._pool.release(sequence.pages)
        sequence.pages = []
        heapq.heappush(self._unused, sequence.slot)
        sequence.slot = None
        del self._running[sequence]
        sequence.family.ready.pop(sequence, None)

    def _drop_copy(self, sequence: Sequence) -> None:
        if pair := self._copies.pop(sequence, None):
            self._pool.release(pair[:1])

    def _start(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot and pages for all its tokens; False: too few pages.

        A page for each running sequence is left, or starting one would soon preempt one.
        """
        spare = self._pool.available - len(self._running)
        if spare < 1:
            return False
        donor = next(iter(sequence.family.ready), None)
        pages = self._find(sequence)
        before = len(sequence.prompt) - 1
        if donor is not None and len(pages) * self._pool.page_size < before:
            if self._pool.pages_for(len(sequence.tokens)) - before // self._pool.page_size > spare:
                return False
            self._fork(donor, sequence)
            return True
        need = self._pool.pages_for(len(sequence.tokens)) - len(pages)
        need += sum(not self._pool.holders(page) for page in pages)
        if need > spare:
            return False
        self.prefix_hits += len(pages) * self._pool.page_size
        self._run(sequence, pages, len(pages) * self._pool.page_size)
        return True

    def _find(self, sequence: Sequence) -> list[int]:
        """Returns the published pages that hold the sequence's first tokens. The last token is fed
        in any case, since a draw needs its logits."""
        pages, size = [], self._pool.page_size
        reusable = self._pool.reusable and not sequence.anew
        for i in range((len(sequence.tokens) - 1) // size if reusable else 0):
            page = self._pool.find(sequence.key(i, size))
            if page is None:
                break
            pages.append(page)
        return pages

    def _fork(self, donor: Sequence, sequence: Sequence) -> None:
        """Starts a sequence behind the prompt that another one of its request computed.

        It feeds the prompt's last token again, for logits of its own, so the page where this token
        lies is copied as far as it is filled; the pages before are shared.
        """
        before = len(sequence.prompt) - 1
        full, partial = divmod(before, self._pool.page_size)
        self.forked += before
        sequence.keys = donor.keys[:full]
        self._run(sequence, donor.pages[:full], before)
        if partial:
            self._pool.share(donor.pages[full : full + 1])
            self._copies[sequence] = donor.pages[full], sequence.pages[full]

    def _run(self, sequence: Sequence, shared: list[int], computed: int) -> None:
        """Gives a waiting sequence a slot, shared pages with its first tokens, and new ones."""
        self._pool.share(shared)
        sequence.pages = list(shared)
        self._reserve(sequence, len(sequence.tokens))
        sequence.computed, sequence.weights = computed, self._weights
        sequence.published = len(shared)
        sequence.slot = heapq.heappop(self._unused)
        del self._waiting[sequence]
        self._running[sequence] = None

    def _publish(self, sequence: Sequence) -> None:
        """Offers the pages that have become full for reuse."""
        size = self._pool.page_size
        full = sequence.computed // size
        if self._pool.prefix_cache:
            for i in range(sequence.published, full):
                self._pool.publish(sequence.pages[i], sequence.key(i, size))
        sequence.published = max(full, sequence.published)

    def _share_prompt(self, sequence: Sequence, family: Family) -> None:
        """Starts the sequences that waited for a prompt that has just been computed. Without a slot
        or a page for them, or if old weights computed the prompt, they wait like others."""
        if sequence.weights != self._weights:
            self._enqueue_held(family, 1)
            return
        family.ready[sequence] = None
        for sibling in list(family.held):
            if not self._unused or not self._pool.available:  # it needs one page of its own
                break
            del family.held[sibling]
            self._fork(sequence, sibling)
        self._enqueue_held(family, len(family.held))


# ---- replicas
#
# A replica is a device, or a group of devices, with the weights and a pool of pages. All replicas
# run in the same program, so their steps start together. All answers of a request run on one
# replica, where they share the pages of the prompt.


class Pools:
    """The pages of all replicas together, as an engine's users see them (PagePool)."""

    def __init__(self, pools: abc.Sequence[PagePool]):
        """pools: one a replica, all alike."""
        self._pools, self.page_size = pools, pools[0].page_size
        self.pages = sum(pool.pages for pool in pools)
        self.capacity = sum(pool.capacity for pool in pools)

    @property
    def in_use(self) -> int:
        """Returns how many pages are held."""
        return sum(pool.in_use for pool in self._pools)


class Schedulers:
    """The schedulers of all replicas, with the interface of one (Scheduler).

    A plan has the pieces of all replicas, by slot; its copies are of pages of the replicas laid one
    after the other: page p of replica r is r P + p, where P is the number of pages of a replica.
    """

    def __init__(self, schedulers: abc.Sequence[Scheduler], pages: int):
        """schedulers: by number of their replica. pages: P."""
        self._schedulers, self._pages = schedulers, pages

    @property
    def waiting(self) -> list[Sequence]:
        """Returns the sequences without a slot."""
        return [sequence for each in self._schedulers for sequence in each.waiting]

    @property
    def running(self) -> list[Sequence]:
        """Returns the sequences with a slot."""
        return [sequence for each in self._schedulers for sequence in each.running]

    @property
    def preemptions(self) -> int:
        """Returns how many sequences gave their pages back."""
        return sum(each.preemptions for each in self._schedulers)

    @property
    def prefix_hits(self) -> int:
        """Returns how many tokens were not computed since a published page had them."""
        return sum(each.prefix_hits for each in self._schedulers)

    def add(self, id: abc.Hashable, prompt: abc.Iterable[int], **options: Any) -> list[Sequence]:
        """See Scheduler.add. The replica with the fewest sequences gets the request; of several
        such replicas, the first."""
        owner = next((each for each in self._schedulers if id in each._requests), None)
        if owner is None:
            owner = min(self._schedulers, key=lambda each: len(each.waiting) + len(each.running))
        return owner.add(id, prompt, **options)

    def plan(self, steps: int = 1) -> Plan | None:
        """See Scheduler.plan. All replicas make the same number of steps."""
        plans = [each.plan(steps) for each in self._schedulers]
        if not any(plans):
            return None
        copies = [
            (r * self._pages + source, r * self._pages + target)
            for r, plan in enumerate(plans)
            for source, target in (plan.copies if plan else ())
        ]
        pieces = itertools.chain.from_iterable(plan.pieces for plan in plans if plan)
        return Plan(tuple(pieces), tuple(copies), min(plan.steps for plan in plans if plan))

    def plan_after(self, plan: Plan) -> Plan | None:
        """See Scheduler.plan_after. None also if one replica that has sequences cannot follow."""
        pieces: list[Piece] = []
        for r, each in enumerate(self._schedulers):
            if not each.running and not each.waiting:
                continue
            part = tuple(piece for piece in plan.pieces if piece.sequence.replica == r)
            following = each.plan_after(Plan(part, (), plan.steps))
            if following is None:
                return None
            pieces += following.pieces
        return Plan(tuple(pieces), (), plan.steps) if pieces else None

    def commit(self, plan: Plan, drawn: abc.Mapping[Sequence, abc.Sequence[int]]) -> None:
        """See Scheduler.commit."""
        for r, each in enumerate(self._schedulers):
            part = tuple(piece for piece in plan.pieces if piece.sequence.replica == r)
            each.commit(Plan(part, (), plan.steps), drawn)

    def finish(self, sequence: Sequence) -> None:
        """See Scheduler.finish."""
        self._schedulers[sequence.replica].finish(sequence)

    def cancel(self, id: abc.Hashable) -> list[Sequence]:
        """See Scheduler.cancel."""
        return [sequence for each in self._schedulers for sequence in each.cancel(id)]

    def drop_prefixes(self) -> None:
        """See Scheduler.drop_prefixes."""
        for each in self._schedulers:
            each.drop_prefixes()


def check_room(prompt: int, new: int, n: int, *, context: int, pages: int, page_size: int) -> None:
    """Refuses what can never run. prompt, new: its tokens, and those to draw. n: its answers.
    context: tokens of a sequence. pages: that one sequence can have. Raises: UserError."""
    for name, value in (("tokens in the prompt", prompt), ("max_tokens", new)):
        if value < 1:
            raise UserError(f"{value} {name}: there must be at least 1; nearest: 1")
    if n < 1:
        raise UserError(f"n={n} must be at least 1; nearest: 1")
    # The last token that is drawn is never fed, so it needs no room in a page.
    room = pages * page_size
    for most, what in (
        (context, f"the context has {context}"),
        (room + 1, f"the {pages} pages hold {room} of {room + 1}"),
    ):
        if prompt + new <= most:
            continue
        near = f"max_tokens={most - prompt}"
        if prompt >= most:
            near = f"a prompt of {most - 1} tokens with max_tokens=1"
        raise UserError(
            f"a prompt of {prompt} tokens and max_tokens={new} are {prompt + new} tokens; {what}; "
            f"nearest: {near}"
        )
