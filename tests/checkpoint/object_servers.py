"""S3 and Google Cloud Storage on loopback, as far as tensorstore speaks with them, and broken.

One server speaks both: S3's XML under /BUCKET/KEY (path style), Google's JSON under /storage/v1 and
/upload/storage/v1. It checks what S3 would: that a request is signed by the right key (the whole of
signature version 4, worked out here from the standard), and that the body is the one signed.
"""

import hashlib
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET, KEY, SECRET, TOKEN = "bucket", "AKIATESTS", "secret", "token"
PAGE = 7  # keys a listing gives at once


class ObjectServer(ThreadingHTTPServer):
    """objects: {key: bytes} of the one bucket. fail: answer 503 to one request in so many."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.fail, self.silent, self.requests = 0, False, 0
        self.refuse_writes_after: int | None = None
        self.loses = lambda key: False  # tells a PUT that is answered with 200 and forgotten
        self.ghosts: set[str] = set()  # keys that are listed and are not there
        self.hidden = lambda key: False  # tells a key that is there and is not listed
        self.last_generation = 1
        self.generations: dict[str, int] = {}  # Google's: of each object, greater with each write
        # What is done about conditions of writes: as the stores do, nothing, or an error.
        self.conditions: Literal["kept", "ignored", "refused"] = "kept"
        self.guard = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that gave up is no error of ours."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: of two, the second waits for an answer
    disable_nagle_algorithm = True
    server: ObjectServer

    def log_message(self, format, *args):
        pass

    def answer(self, status: int, body: bytes = b"", headers: dict | None = None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server = self.server
        with server.guard:
            server.requests += 1
            broken = server.fail and server.requests % server.fail == 0
        if server.silent:
            time.sleep(3)
            return self.close()
        if broken:
            return self.answer(503, b"<Error><Code>SlowDown</Code></Error>")
        if self.command in ("PUT", "POST") and server.refuse_writes_after is not None:
            if server.refuse_writes_after == 0:
                return self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            server.refuse_writes_after -= 1
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        google = url.path.startswith(("/storage/v1/b/", "/upload/storage/v1/b/"))
        return (self.google if google else self.s3)(url.path, query, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def close(self):
        self.close_connection = True

    def send_object(self, key: str, headers: dict):
        content = self.server.objects.get(key)
        if content is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        span = self.headers.get("Range")
        if span is None:
            return self.answer(200, content, headers)
        first, _, last = span.removeprefix("bytes=").partition("-")
        begin, size = int(first), len(content)
        end = min(int(last) + 1, size) if last else size
        if begin >= size:
            return self.answer(416, headers={"Content-Range": f"bytes */{size}"})
        where = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        return self.answer(206, content[begin:end], headers | where)

    def listed(self, prefix: str, after: str, begin="", end="") -> tuple[list[str], str | None]:
        there = {k for k in list(self.server.objects) if not self.server.hidden(k)}
        listed = there | self.server.ghosts
        known = (k for k in listed if k.startswith(prefix) and k > after)
        keys = sorted(k for k in known if begin <= k and (not end or k < end))
        return keys[:PAGE], keys[PAGE - 1] if len(keys) > PAGE else None

    def refused(self, conditional: bool, holds: bool) -> bool:
        """Answers a write whose condition does not hold, or that may have none."""
        if not conditional or self.server.conditions == "ignored":
            return False
        if self.server.conditions == "refused":
            self.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
            return True
        if not holds:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return not holds

    def s3(self, path: str, query: dict, body: bytes):
        if problem := self.unsigned(body):
            text = f"<Error><Code>{problem}</Code><Message>{problem}</Message></Error>"
            return self.answer(403, text.encode())
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if self.command == "HEAD" and not key:
            return self.answer(200, headers={"x-amz-bucket-region": "us-east-1"})
        if not key:
            after = query.get("continuation-token") or query.get("start-after") or ""
            keys, more = self.listed(query.get("prefix", ""), after)
            items = "".join(f"<Contents><Key>{escape(k)}</Key></Contents>" for k in keys)
            if more is not None:
                token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>"
                items += f"<IsTruncated>true</IsTruncated>{token}"
            else:
                items += "<IsTruncated>false</IsTruncated>"
            text = f'<?xml version="1.0"?><ListBucketResult><KeyCount>{len(keys)}</KeyCount>'
            return self.answer(200, f"{text}{items}</ListBucketResult>".encode())
        if self.command == "PUT":
            now = self.server.objects.get(key)
            match, none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
            fits = match == f'"{hash(now)}"' if match else none != "*" or now is None
            if self.refused(bool(match or none), fits):
                return None
            if not self.server.loses(key):
                self.server.objects[key] = body
            return self.answer(200, headers={"ETag": f'"{hash(body)}"'})
        if self.command == "DELETE":
            self.server.objects.pop(key, None)
            return self.answer(204)
        return self.send_object(key, {"ETag": f'"{hash(self.server.objects.get(key))}"'})

    def unsigned(self, body: bytes) -> str | None:
        """Says what is wrong with a request's signature (AWS Signature Version 4), or None."""
        words = self.headers.get("Authorization", "")
        if not words.startswith("AWS4-HMAC-SHA256 "):
            return "AccessDenied"
        parts = dict(p.strip().split("=", 1) for p in words.partition(" ")[2].split(","))
        key, *scope = parts["Credential"].split("/")
        stated = self.headers["x-amz-content-sha256"]
        if key != KEY:
            return "InvalidAccessKeyId"
        if stated != hashlib.sha256(body).hexdigest():
            return "XAmzContentSHA256Mismatch"
        url = urlsplit(self.path)
        pairs = sorted(parse_qsl(url.query, keep_blank_values=True))
        query = "&".join(f"{quote(a, safe='')}={quote(b, safe='')}" for a, b in pairs)
        names = parts["SignedHeaders"].split(";")
        headers = "".join(f"{n}:{self.headers[n].strip()}\n" for n in names)
        where = quote(unquote(url.path), safe="/-_.~")
        lines = (self.command, where, query, headers, ";".join(names), stated)
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        text = "\n".join(("AWS4-HMAC-SHA256", self.headers["x-amz-date"], "/".join(scope), digest))
        secret = f"AWS4{SECRET}".encode()
        for word in (*scope, text):
            secret = hmac.new(secret, word.encode(), "sha256").digest()
        return None if secret.hex() == parts["Signature"] else "SignatureDoesNotMatch"

    def google(self, path: str, query: dict, body: bytes):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}")
        _, _, bucket_path = path.partition("/v1/b/")
        bucket, _, name = bucket_path.partition("/o")
        key = unquote(name.removeprefix("/"))
        if bucket != BUCKET:
            return self.answer(404, b'{"error": {"message": "The bucket does not exist."}}')
        now = self.generation(key or query.get("name", ""))
        generation = query.get("ifGenerationMatch")
        if self.command in ("POST", "DELETE") and self.refused(
            generation is not None, generation == now
        ):
            return None
        if self.command == "POST":
            with self.server.guard:
                self.server.last_generation += 1
                self.server.generations[query["name"]] = self.server.last_generation
            self.server.objects[query["name"]] = body
            return self.answer(200, json.dumps(self.about(query["name"])).encode())
        if not key:
            offsets = (query.get(n, "") for n in ("pageToken", "startOffset", "endOffset"))
            keys, more = self.listed(query.get("prefix", ""), *offsets)
            listing: dict = {"items": [self.about(k) for k in keys]}
            listing |= {"nextPageToken": more} if more is not None else {}
            return self.answer(200, json.dumps(listing).encode())
        if self.command == "DELETE":
            gone = self.server.objects.pop(key, None) is None
            return self.answer(404 if gone else 204)
        if query.get("alt") != "media":
            known = key in self.server.objects
            about = json.dumps(self.about(key)).encode() if known else b"{}"
            return self.answer(200 if known else 404, about)
        return self.send_object(key, {"x-goog-generation": now})

    def generation(self, key: str) -> str:
        """What a condition of a write names: 0 for no object; tests may put one there at once."""
        there = key in self.server.objects
        return str(self.server.generations.get(key, 1)) if there else "0"

    def about(self, key: str) -> dict:
        size = str(len(self.server.objects[key]))
        stamp = "2026-01-01T00:00:00.000Z"
        times = {"timeCreated": stamp, "updated": stamp, "timeStorageClassUpdated": stamp}
        return {
            "name": key,
            "bucket": BUCKET,
            "generation": self.generation(key),
            "size": size,
            **times,
        }
