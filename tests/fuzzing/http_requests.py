"""Requests that the API's own schema describes, with unexpected values; and bytes that are not
HTTP."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from fuzzing.findings import Findings, Input
from fuzzing.json_values import VALUES, spoil_json
from fuzzing.messages import TEXTS, spoilt

ANSWER_S = 2.0
STREAM = "/api/v1/stream"
ANYWHERE = (400, 403, 408, 413, 414, 421, 431, 503)
"""Status codes that any request may get, documented or not: 403 if its `Origin` is another site,
before the request itself is checked."""

HEADERS = ("origin", "cookie", "authorization")
"""Headers that the server reads."""
URLS = (
    "http://[",
    "http://evil.example",
    "null",
    "http://127.0.0.1",
    "shoal_session=x",
    "Bearer x",
)


class HttpFuzzer:
    """Draws and sends requests. `document`: the API's OpenAPI. `known`: existing values of path
    parameters."""

    def __init__(
        self,
        draw: random.Random,
        document: Mapping[str, Any],
        known: Mapping[str, Sequence[str]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._draw = draw
        self._document = document
        self._known = known
        self._headers = headers or {}
        self._operations = [
            (path, method, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]

    def draw_input(self) -> Input:
        path, method, operation = self._draw.choice(self._operations)
        target = path
        for parameter in operation.get("parameters", ()):
            value = self._text(parameter["name"])
            if parameter["in"] == "path":
                target = target.replace("{" + parameter["name"] + "}", quote(value, safe=""))
            elif self._draw.random() < 0.7:
                mark = "&" if "?" in target else "?"
                target += f"{mark}{parameter['name']}={quote(value, safe='')}"
        if self._draw.random() < 0.1:
            method = self._draw.choice(("get", "post", "put", "delete", "head", "options", "patch"))
        body = self._body(operation) if method in ("post", "put", "patch") else b""
        headers = {"host": "127.0.0.1", "connection": "close", **self._headers}
        if body or method == "post":
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        for name in HEADERS:
            if self._draw.random() < 0.1:
                headers[name] = str(self._draw.choice((*TEXTS, *URLS)))[:3000]
        head = f"{method.upper()} {target} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        data = head.encode() + b"\r\n" + body
        documented = f"{method} {path}"
        if self._draw.random() < 0.15:
            data, documented = spoilt(self._draw, data), ""
        return Input(surface="http", to=documented, parts=[data])

    def _text(self, name: str) -> str:
        known = self._known.get(name, ())
        if known and self._draw.random() < 0.7:
            return self._draw.choice(known)
        return str(self._draw.choice((*TEXTS, *VALUES)))[:3000]

    def _body(self, operation: Mapping[str, Any]) -> bytes:
        schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        reference = schema.get("schema", {}).get("$ref", "")
        model = self._document["components"]["schemas"].get(reference.rpartition("/")[2], {})
        examples = model.get("examples", ())
        body = dict(examples[0]) if examples else {}
        body |= {name: values[0] for name, values in self._known.items() if name in body}
        for _ in range(self._draw.randrange(3)):
            spoil_json(self._draw, body)
        return json.dumps(body).encode()

    async def send(self, sent: Input, address: str, findings: Findings) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b""
        try:
            writer.write(sent.parts[0])
            # A spoilt input may not be a whole request, and a stream has no end.
            is_whole = bool(sent.to) and STREAM.encode() not in sent.parts[0]
            async with asyncio.timeout(ANSWER_S if is_whole else 0.05):
                data = await reader.read(4096)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        findings.note(sent, self._judged(sent, data, findings))

    def _judged(self, sent: Input, data: bytes, findings: Findings) -> str:
        if not data.startswith(b"HTTP/1.1 "):
            return "hung up" if not data else "no HTTP"
        status = int(data[9:12])
        if status == 500:
            findings.found(sent, f"http 500: {data[-300:]!r}")
        method, _, path = sent.to.partition(" ")
        operation = self._document["paths"].get(path, {}).get(method)
        known = {*ANYWHERE, *map(int, (operation or {}).get("responses", ()))}
        if operation is not None and status not in known:
            findings.found(sent, f"{sent.to} answers {status}, which is not documented")
        return str(status)
