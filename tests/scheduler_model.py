"""A device without arithmetic: what lies in each page, written only through pieces and copies.

The keys and values of a token depend on all tokens before it, so a cell of a page holds a hash of
its whole prefix, and a page the number of the oldest weights that wrote to it. Ownership is counted
from the sequences themselves; the pool is asked for nothing but its totals.
"""

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from megajax.serving.scheduler import PagePool, Plan, Scheduler, Sequence


def prefixes(tokens: Iterable[int], before: int = 0) -> list[int]:
    """Returns a hash of the whole prefix for each token. before: hash of what comes before."""
    return list(itertools.accumulate(tokens, lambda *both: hash(both), initial=before))[1:]


@dataclass
class Follower:
    """What the test knows of a sequence: its tokens' hashes, and how many it may draw.

    since: the weights in use when it last started, or would start now; added: plans until then.
    """

    hashes: list[int]
    ends_at: int
    added: int
    since: int
    drawn: int = 0


class Device:
    """Executes plans and refuses what would be wrong."""

    def __init__(self, rng: random.Random, pool: PagePool, scheduler: Scheduler, **limits: int):
        self.rng, self.pool, self.scheduler, self.limits = rng, pool, scheduler, limits
        self.cells = [[0] * pool.page_size for _ in range(pool.pages)]
        self.live: dict[Sequence, Follower] = {}
        self.weights, self.oldest = 0, [0] * pool.pages
        self.queue: deque[tuple[Plan, dict[Sequence, list[int]]]] = deque()  # not yet committed
        self.plans = self.copied = self.multiple = self.ahead = self.vain = 0
        self.longest = 0  # plans from a request's arrival to its end

    def follow(self, sequences: list[Sequence], ends_at: int) -> None:
        for sequence in sequences:
            hashes = prefixes(sequence.tokens)
            self.live[sequence] = Follower(hashes, ends_at, self.plans, self.weights)

    def forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.longest = max(self.longest, self.plans - self.live.pop(sequence).added)
            assert sequence.slot is None and not sequence.pages

    def load(self) -> None:
        """New weights: who does not run yet must read nothing of the old ones."""
        self.weights += 1
        self.scheduler.drop_prefixes()
        for sequence in self.scheduler.waiting:
            self.live[sequence].since = self.weights

    def check_plan(self, plan: Plan, before: Plan | None) -> None:
        """Budget, slots, order, and who decodes. before: the plan that it was made after."""
        slots = [piece.sequence.slot for piece in plan.pieces]
        assert slots == sorted(set(slots)) and set(slots) <= set(range(self.limits["max_batch"]))
        assert sum(piece.count for piece in plan.pieces) <= self.limits["budget"]
        assert max(piece.count for piece in plan.pieces) <= self.limits["chunk"]
        fed = {piece.sequence for piece in plan.pieces}
        assert fed <= self.scheduler.running
        decoding = {s for s in self.scheduler.running if s.computed == len(s.tokens) - 1}
        if before is not None:
            decoding = {s for s in decoding if self.room(s) > before.steps}
            assert fed <= decoding
            assert plan.steps == before.steps > 1 and not plan.copies
        assert decoding <= fed
        assert plan.steps == 1 or all(p.count == 1 and p.draws for p in plan.pieces)

    def room(self, sequence: Sequence) -> int:
        """Returns how many tokens a sequence may draw beyond those that were committed."""
        return sequence.max_tokens - len(sequence.tokens) + len(sequence.prompt)

    def execute(self, plan: Plan, before: Plan | None = None) -> None:
        """Does what a plan says, and keeps what was drawn for its commit."""
        self.plans += 1
        self.check_plan(plan, before)
        owners = Counter(page for s in self.scheduler.running for page in s.pages)
        assert 0 not in owners
        copies = len((before or plan).copies)  # whose sources are held until the commit
        assert len(owners) <= self.pool.in_use <= len(owners) + copies
        sources, targets = ({pair[i] for pair in plan.copies} for i in (0, 1))
        assert not sources & targets and len(targets) == len(plan.copies)
        for source, target in plan.copies:
            assert owners[target] == 1
            self.cells[target] = list(self.cells[source])
            self.oldest[target] = self.oldest[source]
            self.copied += 1
        drawn = {p.sequence: self._feed(p, plan.steps, owners, before) for p in plan.pieces}
        self.queue.append((plan, {s: new for s, new in drawn.items() if new}))

    def _feed(self, piece, steps: int, owners: Counter, before: Plan | None) -> list[int]:
        sequence, size = piece.sequence, self.pool.page_size
        follower, start = self.live[sequence], piece.start
        hashes = follower.hashes
        assert len(set(sequence.pages)) == len(sequence.pages)
        if follower.drawn == follower.ends_at:  # it has ended, which the scheduler cannot know yet
            assert before is not None
            for i in range(start, start + steps):
                assert owners[sequence.pages[i // size]] == 1, "a shared page is written"
                self.cells[sequence.pages[i // size]][i % size] = self.rng.random()
            self.vain += 1
            return []
        assert piece.draws == (start + piece.count == len(hashes))
        assert before is not None or len(hashes) == len(sequence.tokens)
        # What attention reads; of sequences that decode, a sample.
        for i in range(-(-start // size) if piece.count > 1 or self.rng.random() < 0.3 else 0):
            end, page = min((i + 1) * size, start), sequence.pages[i]
            assert self.cells[page][: end - i * size] == hashes[i * size : end]
            assert self.oldest[page] >= follower.since
        drawn = [self.rng.randrange(3) for _ in range(steps)] if piece.draws else []
        written = start + piece.count + max(steps - 1, 0)
        known = hashes + prefixes(drawn, hashes[-1])
        for i in range(start // size, -(-written // size)):
            page, first, end = sequence.pages[i], max(start, i * size), min(written, (i + 1) * size)
            assert owners[page] == 1, "a shared page is written"
            self.cells[page][first - i * size : end - i * size] = known[first:end]
            if first == i * size:
                self.oldest[page] = self.weights
        self.multiple += steps > 1
        drawn = drawn[: follower.ends_at - follower.drawn]
        follower.drawn += len(drawn)
        follower.hashes = known[: len(hashes) + len(drawn)]
        return drawn

    def step(self, steps: int = 1) -> bool:
        """Plans, executes, perhaps one plan more before the commit of the first, and ends what has
        drawn all its tokens."""
        if not self.queue:
            before = set(self.scheduler.running)
            plan = self.scheduler.plan(steps)
            if plan is None:
                return False
            for preempted in before - self.scheduler.running:
                self.live[preempted].since = self.weights
            self.execute(plan)
        if len(self.queue) == 1 and self.rng.random() < 0.7:
            plan = self.scheduler.plan_after(self.queue[0][0])
            if plan is not None:
                self.ahead += 1
                self.execute(plan, self.queue[0][0])
        plan, drawn = self.queue.popleft()
        running = [p.sequence.request for p in plan.pieces if p.sequence in self.live]
        if self.rng.random() < 0.05 and running:  # may come while the device computes
            self.forget(self.scheduler.cancel(self.rng.choice(running)))
        if self.rng.random() < 0.01:
            self.load()
        self.scheduler.commit(plan, drawn)
        for sequence, new in drawn.items():
            if sequence not in self.live:
                continue
            follower, size = self.live[sequence], len(sequence.tokens)
            assert sequence.tokens[size - len(new) :] == new
            later = sum(len(more.get(sequence, ())) for _, more in self.queue)
            assert size - len(sequence.prompt) == follower.drawn - later
            if follower.drawn == follower.ends_at and not later:
                self.scheduler.finish(sequence)
                self.forget([sequence])
        return True
