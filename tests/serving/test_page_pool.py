"""Pages: counts, keys by content, and which page goes first."""

import hashlib
import struct

import pytest

from megajax.core.errors import UserError
from megajax.serving.scheduler import NOBODY, PagePool, Scheduler, Shown, chain


def published(pool: PagePool, *keys: bytes) -> list[int]:
    pages = pool.take(len(keys))
    assert all(pool.publish(page, key) for page, key in zip(pages, keys, strict=True))
    return pages


def test_pages_are_handed_out_once_and_page_0_never():
    pool = PagePool(5, 4)
    pages = pool.take(4)
    assert sorted(pages) == [1, 2, 3, 4] and NOBODY not in pages
    assert (pool.available, pool.in_use, pool.capacity) == (0, 4, 4)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 available"):
        pool.take(1)
    pool.release(pages[:1])
    assert pool.take(1) == pages[:1]


def test_a_page_is_free_when_its_last_holder_releases_it():
    pool = PagePool(3, 4)
    pages = pool.take(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.holders(pages[0]) == 1 and pool.in_use == 1
    pool.release(pages)
    assert pool.in_use == 0
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


def test_a_published_page_stays_until_its_room_is_needed():
    pool = PagePool(3, 4)
    (page,) = published(pool, b"a")
    pool.release([page])
    assert pool.available == 2 and pool.find(b"a") == page
    pool.share([page])
    assert pool.available == 1 and pool.holders(page) == 1
    pool.release([page])
    assert page not in pool.take(1), "a page without content is handed out first"
    assert pool.take(1) == [page] and pool.find(b"a") is None and pool.evictions == 1


def test_the_least_recently_used_page_goes_first_and_an_end_before_its_beginning():
    pool = PagePool(6, 4)
    a, b = published(pool, b"a0", b"a1", b"a2"), published(pool, b"b0", b"b1")
    pool.release(a)
    pool.release(b)
    pool.share(a[:1])
    pool.release(a[:1])  # a's beginning was used last of all
    assert pool.take(5) == [a[2], a[1], b[1], b[0], a[0]]


def test_a_page_that_a_running_sequence_holds_is_not_evicted():
    pool = PagePool(3, 4)
    held, idle = published(pool, b"a", b"b")
    pool.release([idle])
    assert pool.take(1) == [idle] and pool.find(b"a") == held and pool.available == 0


def test_a_second_page_of_the_same_content_stays_private():
    pool = PagePool(3, 4)
    first, second = pool.take(2)
    assert pool.publish(first, b"a") and not pool.publish(second, b"a")
    pool.release([second])
    assert pool.find(b"a") == first and pool.reusable == 1 and pool.take(1) == [second]


def test_without_prefix_cache_nothing_is_published():
    pool = PagePool(3, 4, prefix_cache=False)
    (page,) = pool.take(1)
    assert not pool.publish(page, b"a") and pool.find(b"a") is None


def test_forgotten_pages_are_held_but_not_found():
    pool = PagePool(4, 4)
    held, idle = published(pool, b"a", b"b")
    pool.release([idle])
    pool.forget()
    assert pool.find(b"a") is pool.find(b"b") is None and pool.holders(held) == 1
    assert pool.publish(held, b"c")  # with new content
    pool.release([held])
    assert pool.available == 3 and sorted(pool.take(3)) == [1, 2, 3] and pool.evictions == 1


def test_a_key_is_the_hash_of_all_tokens_so_far():
    first = hashlib.blake2b(struct.pack("=2q", 7, -1), digest_size=32).digest()
    assert chain(b"", [7, -1]) == first
    second = hashlib.blake2b(first + struct.pack("=2q", 8, 9), digest_size=32).digest()
    assert chain(first, (8, 9)) == second != chain(b"", [8, 9])


@pytest.mark.parametrize(
    "pages, page_size, message",
    [(1, 4, "pages=1 must be at least 2 .*; nearest: 2"), (9, 0, "page_size=0 .*; nearest: 1")],
)
def test_a_pool_without_room_is_refused(pages, page_size, message):
    with pytest.raises(UserError, match=message):
        PagePool(pages, page_size)


def reused(first, second):
    """Tokens of a prompt that are not computed since another one's pages have them. Each prompt is
    (ids, images)."""
    pool = PagePool(20, 4)
    scheduler = Scheduler(pool, max_batch=2, budget=32, chunk=32, context=40)
    for number, (ids, images) in enumerate((first, second)):
        (sequence,) = scheduler.add(number, ids, max_tokens=1, images=images)
        scheduler.commit(scheduler.plan(), {sequence: [1]})
        scheduler.finish(sequence)
    return scheduler.prefix_hits


def test_a_page_is_reused_with_the_same_image_and_never_with_another():
    text, image, other = [5, 6, 7], [9] * 8, b"o" * 32
    ids = [*text, *image, *text, *text]  # pages 0 to 2 show the image; page 3 is text
    shown = lambda digest, start=3: [Shown(start, start + 8, digest)]  # noqa: E731
    first = ids, shown(b"a" * 32)
    assert reused(first, first) == 16
    assert reused(first, (ids, shown(other))) == 0
    assert reused(first, (ids, ())) == 0, "the same ids, drawn or written as text"
    assert reused((ids, ()), (ids, ())) == 16
    assert reused(first, ([*text, 8, *image, *text, 1], shown(b"a" * 32, 4))) == 0
    # Two images of four tokens each, and one of eight, have the same ids.
    halves = [Shown(3, 7, b"a" * 32), Shown(7, 11, b"a" * 32)]
    assert reused(first, (ids, halves)) == 4, "the first token of an image that goes on differently"
    # What follows an image depends on it, whatever its own page shows.
    assert reused((ids, [Shown(3, 7, b"a" * 32), Shown(7, 11, b"b" * 32)]), (ids, halves)) == 4
