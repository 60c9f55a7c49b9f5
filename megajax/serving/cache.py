"""Pages of the key-value cache: who holds which, and which may be reused by content.

A page has room for the keys and values of `page_size` consecutive tokens of one sequence, in every
layer. Sequences hold pages by reference counts (vLLM, PagedAttention section 4.3). A full page may
be published under a key that names its content: the chain of hashes over its own tokens and all
tokens before them. A later sequence that begins with the same tokens then shares the page. A
published page that nobody holds stays reusable until its room is needed; the least recently used
one goes first. Every operation takes constant time a page.

Not here: the arrays on the device (the engine has them), and who gets pages when (scheduler.py).
"""

import array
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from megajax.core.errors import UserError

NOBODY = 0  # the page to which the device writes what belongs to no sequence


def chain(before: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the key of a page, 32 bytes.

    BLAKE2b, because a prompt that collides with another one's key would read its keys and values;
    nobody knows how to make such a prompt for a cryptographic hash of 256 bits.
    Args: before: key of the page before it, b"" for a first page. tokens: a page of ids.
    """
    return hashlib.blake2b(before + array.array("q", tokens).tobytes(), digest_size=32).digest()


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
                self._unpublish(page)
                self.evictions += 1
            self._held[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Holds pages once more; each is held or idle."""
        for page in pages:
            if not self._held[page]:
                del self._idle[page]
            self._held[page] += 1

    def release(self, pages: Sequence[int]) -> None:
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

    def _unpublish(self, page: int) -> None:
        key, self._keys[page] = self._keys[page], None
        assert key is not None
        del self._published[key]
