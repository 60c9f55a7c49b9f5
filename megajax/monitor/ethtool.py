"""The counters that a network card's driver keeps, as `ethtool -S` shows them. No jax import.

Legend: the requests and layouts are those of linux/ethtool.h.
"""

import array
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_DRIVER, _STRINGS, _STATS = 0x3, 0x1B, 0x1D  # ETHTOOL_GDRVINFO, GSTRINGS, GSTATS
_OF_STATS = 1  # ETH_SS_STATS
_DRIVER_BYTES, _COUNT_AT = 192, 4 + 5 * 32 + 12 + 4  # where ethtool_drvinfo has n_stats
_NAME = 32  # bytes


def _ask(sock: socket.socket, interface: str, request: bytes) -> bytes:
    buffer = array.array("B", request)
    address, _ = buffer.buffer_info()
    fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), address))
    return buffer.tobytes()


def counters(interface: str) -> dict[str, int]:
    """Returns {name: count} of a network card. Raises: OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        driver = _ask(sock, interface, struct.pack("<I", _DRIVER) + bytes(_DRIVER_BYTES))
        (count,) = struct.unpack_from("<I", driver, _COUNT_AT)
        head = struct.pack("<III", _STRINGS, _OF_STATS, count)
        names = _ask(sock, interface, head + bytes(count * _NAME))[len(head) :]
        head = struct.pack("<II", _STATS, count)
        counts = _ask(sock, interface, head + bytes(count * 8))[len(head) :]
    words = [names[i * _NAME : (i + 1) * _NAME].split(b"\0")[0].decode() for i in range(count)]
    return dict(zip(words, struct.unpack(f"<{count}Q", counts), strict=True))
