"""Pages that a browser shows: the chat at /, the endpoints at /docs, their document.

A page is one response without anything that is loaded from elsewhere. Its Content-Security-Policy
allows the script and the style that are in it, by their digests, and requests to this server alone:
what a model wrote can neither run nor load anything, even if it were shown as markup. Pages need no
key, since they say nothing that the source code does not say; the endpoints behind them need one.
"""

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from starlette.responses import Response

PAGES = ("/", "/docs", "/openapi.json")
# A row of the table of members: its name, its schema, and whether a request must have it.
type Row = tuple[str, dict[str, Any], bool]


class Page:
    """What is answered to everybody at a path."""

    def __init__(self, body: bytes, kind: str):
        """kind: the content type, whose scripts and styles are allowed if it is HTML."""
        self.body, self.kind = body, kind
        self.headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": policy(body.decode() if kind == "text/html" else ""),
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def response(self) -> Response:
        """Returns the page."""
        return Response(self.body, media_type=self.kind, headers=self.headers)


def policy(text: str) -> str:
    """Returns the Content-Security-Policy under which a page runs its scripts and no others."""

    def digests(tag: str) -> str:
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        sums = (hashlib.sha256(part.encode()).digest() for part in inner)
        return " ".join(f"'sha256-{base64.b64encode(s).decode()}'" for s in sums) or "'none'"

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def pages(document: dict[str, Any]) -> dict[str, Page]:
    """Returns {path: page} of a server. document: of its endpoints (openapi.py)."""
    chat = resources.files("megajax.systems.server").joinpath("page.html").read_bytes()
    made = (
        Page(chat, "text/html"),
        Page(reference(document).encode(), "text/html"),
        Page(json.dumps(document).encode(), "application/json"),
    )
    return dict(zip(PAGES, made, strict=True))


# ---- the reference

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 16px; }
h2 { font: 1.1rem ui-monospace, monospace; border-top: 1px solid #8888; padding-top: 16px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 3px 10px 3px 0; }
code { font: .9em ui-monospace, monospace; }
"""


def reference(document: dict[str, Any]) -> str:
    """Returns a page with the endpoints of an OpenAPI document."""
    info, parts = document["info"], []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            rows = _rows(document, operation)
            if rows:
                head = "<tr><th>member</th><th>value</th><th>meaning</th></tr>"
                parts.append(f"<table>{head}{''.join(map(_row, rows))}</table>")
    title = html.escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f"<p>{html.escape(info['description'])} The same as a document: "
        f'<a href="openapi.json">openapi.json</a>. <a href="./">Try the model.</a></p>'
        f"{''.join(parts)}</body></html>\n"
    )


def _rows(document: dict[str, Any], operation: dict[str, Any]) -> list[Row]:
    """Returns the members of an operation's body, those that it must have first."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    name = schema.get("$ref", "").rpartition("/")[2]
    schema = document["components"]["schemas"].get(name, schema)
    needed = schema.get("required", [])
    rows = [(name, inner, name in needed) for name, inner in schema.get("properties", {}).items()]
    return sorted(rows, key=lambda row: not row[2])


def _row(row: Row) -> str:
    name, schema, needed = row
    about = schema.get("description", "") + (" (required)" if needed else "")
    shown = f"<code>{html.escape(name)}</code>", _values(schema), html.escape(about)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>"


def _values(schema: dict[str, Any]) -> str:
    """Returns the values that a schema allows, in words."""
    if "$ref" in schema:
        return html.escape(schema["$ref"].rpartition("/")[2])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(map(_values, schema[several]))
    if "enum" in schema:
        return html.escape(", ".join(json.dumps(v) for v in schema["enum"] if v is not None))
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    words = " or ".join(kind for kind in kinds if kind != "null")
    if "items" in schema:
        words += f" of {_values(schema['items'])}"
    limits = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "minLength": "length at least",
        "maxLength": "length at most",
        "minItems": "at least",
        "maxItems": "at most",
    }
    said = [f"{text} {schema[key]:g}" for key, text in limits.items() if key in schema]
    return html.escape(", ".join([words, *said]))
