"""Images in the messages of a chat: parts of the type image_url, whose URL has the file in it.

The server opens no address and no file that a request names. A client sends the bytes, as a data:
URL in base64. What it sends is limited in number, bytes and pixels, and is decoded by a few threads
beside the event loop, where the header of a file says how many pixels there are before any is
decoded (data/images.py).
"""

import base64
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.data.images import decode
from megajax.serving.images import Picture
from megajax.systems.server.base import ApiError
from megajax.systems.server.options import HttpOptions

THREADS = 2  # (chosen) images that are decoded at a time; each takes some bytes a pixel
LARGE_BODIES = 4  # (chosen) requests with a body over max_body that are read at a time
LONGER = 4  # (chosen) times max_image_bytes that a body may have, so that the answer says the limit
SHOWN = 60  # (chosen) characters of a URL in a message


@dataclasses.dataclass(frozen=True)
class ImagePart:
    """A file in a message. where: its place, for messages."""

    where: str
    file: str  # in base64


def part_of(part: Any, where: str) -> ImagePart | None:
    """Returns a part of a message's content that is an image, or None. Raises: ApiError."""
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    inner = part.get("image_url")
    url = inner.get("url") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(url, str):
        raise _error(where, " must be {'url': 'data:image/...;base64,...'}")
    unknown = next((name for name in inner if name not in ("url", "detail")), None)
    if unknown is not None:
        raise _error(where, f" has the member {unknown!s:.80}; there are url and detail")
    if inner.get("detail") not in (None, "auto", "low", "high"):
        raise _error(where, f".detail={inner['detail']!r:.80} must be auto, low or high")
    head, comma, file = url.partition(",")
    if not url.startswith("data:"):
        raise _error(
            where,
            f".url={url[:SHOWN]!r} must be a data: URL, data:image/png;base64,...; this server "
            "opens no address and no file: send the bytes of the image",
        )
    if not comma or not head.endswith(";base64"):
        raise _error(where, f".url={url[:SHOWN]!r} must be in base64: data:image/png;base64,...")
    return ImagePart(where, file)


class ImageReader:
    """Decodes the images of requests. see: cuts them into patches; None: the model sees none."""

    def __init__(
        self,
        see: Callable[[Sequence[np.ndarray]], list[Picture]] | None,
        limits: HttpOptions,
        several: bool = False,
    ):
        """see: Engine.see. several: whether the engine runs on several processes."""
        self._see, self._limits, self._several = see, limits, several
        self.sees = see is not None
        self._lock, self._live = threading.Lock(), weakref.WeakSet[Picture]()

    def check(self, parts: Sequence[ImagePart]) -> None:
        """Refuses images by their number and bytes; nothing is decoded. Raises: ApiError."""
        if not parts:
            return
        where, limits = parts[0].where, self._limits
        if self._several:
            raise _error(where, ": a server of several processes takes text alone")
        if len(parts) > limits.max_images:
            first = parts[limits.max_images].where
            rule = f": the request has {len(parts)} images; at most {limits.max_images}"
            raise _error(first, f"{rule} (--max_images)")
        size = sum(len(part.file) for part in parts) * 3 // 4
        if size > limits.max_image_bytes:
            raise _error(
                where,
                f": the images of the request have {size:,} bytes; at most "
                f"{limits.max_image_bytes:,} (--max_image_bytes)",
            )

    def read(self, parts: Sequence[ImagePart]) -> list[Picture]:
        """Returns the images of a request, cut into patches. Raises: ApiError."""
        self.check(parts)
        made = []
        for part in parts:
            assert self._see is not None, "parts of other models are refused"
            try:
                data = base64.b64decode(part.file, validate=True)
            except ValueError as error:  # of a character outside ASCII, it is no binascii.Error
                raise _error(part.where, f".url is no base64: {error}") from None
            try:
                pixels = decode(data, max_pixels=self._limits.max_image_pixels)
                made += self._see([pixels])
            except UserError as error:
                said = str(error).removeprefix("images[0]: ")
                flag = " (--max_image_pixels)" if "pixels; it may have" in said else ""
                raise _error(part.where, f": {said}{flag}") from None
            alone = sum(each.patches.nbytes for each in made)
            if alone > self._limits.max_image_memory:
                raise _error(
                    part.where,
                    f": the images of the request, resized, have {alone:,} bytes; at most "
                    f"{self._limits.max_image_memory:,} (--max_image_memory)",
                )
            with self._lock:
                size = sum(each.patches.nbytes for each in [*self._live, made[-1]])
                if size <= self._limits.max_image_memory:
                    self._live.add(made[-1])
            if size > self._limits.max_image_memory:
                raise ApiError(
                    429,
                    f"the images of the requests that run or wait have {size:,} bytes; at most "
                    f"{self._limits.max_image_memory:,} (--max_image_memory)",
                    code="too_many_images",
                    headers={"Retry-After": "1"},
                )
        return made


def has_images(body: dict[str, Any]) -> bool:
    """Tells whether a body has images, which take time to decode."""
    return bool(_image_parts(body))


def url_characters(body: dict[str, Any]) -> int:
    """Returns the characters of the URLs of all images of a body, which have their files."""
    inner = [part.get("image_url") for part in _image_parts(body)]
    urls = [each.get("url") for each in inner if isinstance(each, dict)]
    return sum(len(url) for url in urls if isinstance(url, str))


def _image_parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    listed = messages if isinstance(messages, list) else ()
    contents = [message.get("content") for message in listed if isinstance(message, dict)]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part for part in parts if isinstance(part, dict) and part.get("type") == "image_url"]


def _error(where: str, rule: str) -> ApiError:
    return ApiError(
        400, f"{where}.image_url{rule}", param=f"{where}.image_url", code="invalid_image"
    )
