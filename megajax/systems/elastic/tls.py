"""TLS under the messages of wire.py, for networks where commands and logs must not be read.

Who is who is decided by the job's secret: its proofs cover the certificate of the called end, so a
self-signed one, made at the start, is enough. A certificate of an authority is checked on top where
its file is given. The channel works on bytes in memory, so that a stranger who stops in the middle
of a TLS handshake can never block the driver.
"""

import dataclasses
import functools
import hashlib
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path

from megajax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Tls:
    """certificate, key: PEM files of the end that is called. authority: whom callers trust."""

    certificate: str | None = None
    key: str | None = None
    authority: str | None = None

    def channel(self, calls: bool) -> "Channel":
        """Returns one end of a connection. Raises: UserError when a file does not fit.

        The files are read once: what is removed later, or a lack of descriptors, ends nobody.
        """
        context, bound = _context(self, calls)
        return Channel(context, calls, bound)

    def context(self, calls: bool) -> tuple[ssl.SSLContext, bytes | None]:
        """Returns what connections of one end share, and the digest of the own certificate."""
        kind = ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            if calls:
                context.check_hostname = False  # the secret says who it is, a name would not
                context.verify_mode = ssl.CERT_NONE
                if self.authority is not None:
                    context.load_verify_locations(self.authority)
                    context.verify_mode = ssl.CERT_REQUIRED
            else:
                context.load_cert_chain(self.certificate or "", self.key)
        except OSError as error:  # an SSLError is one
            raise UserError(f"TLS cannot use {self}: {error} (--tls_cert, --tls_ca)") from None
        if calls:
            return context, None
        return context, _digest(ssl.PEM_cert_to_DER_cert(_first(self.certificate or "")))


@functools.cache
def _context(tls: Tls, calls: bool) -> tuple[ssl.SSLContext, bytes | None]:
    return tls.context(calls)


class Channel:
    """Bytes of a connection, sealed and opened. open: whether the TLS handshake has ended."""

    def __init__(self, context: ssl.SSLContext, calls: bool, bound: bytes | None):
        """bound: the digest of the own certificate; None: of what the other end shows."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=not calls)
        self._bound = bound
        self.open = False

    def begin(self) -> bytes:
        """Returns what the caller sends first."""
        return self.take(b"")[1]

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns (what was in the bytes that came, what must be sent back).

        Raises: ConnectionAbortedError for what is not TLS, or a certificate that is not trusted.
        """
        self._in.write(data)
        found = bytearray()
        try:
            if not self.open:
                self._tls.do_handshake()
                self.open = True
            while chunk := self._tls.read(1 << 16):
                found += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ConnectionAbortedError(f"TLS: {error.reason or error}") from None
        return bytes(found), self._out.read()

    def seal(self, data: bytes) -> bytes:
        """Returns the bytes to send."""
        self._tls.write(data)
        return self._out.read()

    def certificate(self) -> bytes:
        """Returns the digest of the called end's certificate, the same at both ends."""
        if self._bound is not None:
            return self._bound
        return _digest(self._tls.getpeercert(binary_form=True) or b"")


def _digest(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


def _first(path: str) -> str:
    """Returns the first certificate of a PEM file: the called end's own."""
    end = "-----END CERTIFICATE-----"
    text = Path(path).read_text()
    begin = text.index("-----BEGIN CERTIFICATE-----")
    return text[begin : text.index(end) + len(end)] + "\n"


def self_signed(folder: Path) -> Tls:
    """Returns what a new self-signed certificate in a folder of this user gives.

    Raises: UserError where there is no openssl to make one.
    """
    if shutil.which("openssl") is None:
        raise UserError("--tls makes its certificate with openssl, which is not here (--tls_cert)")
    place = Path(tempfile.mkdtemp(prefix="tls-", dir=folder))  # mode 0700
    certificate, key = place / "certificate.pem", place / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650"
    subprocess.run(
        [*command.split(), "-subj", "/CN=megajax", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return Tls(str(certificate), str(key))
