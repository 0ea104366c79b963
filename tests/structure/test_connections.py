"""Connections between parts of Shoal are made in one place, so that none goes through a proxy."""

import ast
from collections.abc import Iterator

from structure.reading_radius import ROOT, modules

GRPC_PLACE = "shoal_proto.tls.channels"
HTTP_PLACE = "shoal_client.connection.http"
CHANNELS = {"insecure_channel", "secure_channel"}
HTTP_PACKAGES = {"httpx", "requests", "urllib3", "aiohttp", "http.client", "urllib.request"}
"""Packages that read http_proxy unless this is turned off; httpcore does not read it."""
ERRORS = {"HTTPError", "InvalidURL", "ReadTimeout", "TransportError", "WriteTimeout"}
TYPES = {"Client", "Response"}
"""Names of httpx that open no connection: errors, and types in annotations."""
TO_STRANGERS = {"credentials.py", "shoal.integrations.trl"}
"""Clients of services outside Shoal, where a proxy is honoured: Kubernetes, and vLLM, which is
called as TRL itself calls it."""


def sources(words: set[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and syntax tree of each module whose text contains one of these words."""
    found = dict(modules())
    for folder in ("deploy", "examples"):
        found |= {path.name: path for path in sorted((ROOT / folder).rglob("*.py"))}
    for name, path in found.items():
        text = path.read_text()
        if any(word in text for word in words):
            yield name, ast.parse(text)


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def test_one_module_makes_every_grpc_channel() -> None:
    """The module turns the proxy off, whatever options a caller gives."""
    found = {
        name
        for name, tree in sources(CHANNELS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.alias)
        and (node.attr if isinstance(node, ast.Attribute) else node.name) in CHANNELS
    }
    assert found == {GRPC_PLACE, "plain_grpc_worker.py"}
    # This example of a worker in any language shows the option itself.
    assert "grpc.enable_http_proxy" in (ROOT / "examples/plain_grpc_worker.py").read_text()


def test_one_module_makes_every_http_client() -> None:
    """Other modules use only the errors and the types of such a package."""
    found = []
    for name, tree in sources({"http", "requests", "urllib"}):
        if name in {HTTP_PLACE, *TO_STRANGERS}:
            continue
        annotations = {
            id(each)
            for node in ast.walk(tree)
            for field in ("annotation", "returns")
            for each in ast.walk(getattr(node, field, None) or ast.Pass())
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                parts = {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
                found += [f"{name}: from {node.module}" for _ in parts & HTTP_PACKAGES]
            elif isinstance(node, ast.Import):
                named = {each.name for each in node.names} & HTTP_PACKAGES - {"httpx"}
                found += [f"{name}: {each}" for each in named]
            elif isinstance(node, ast.Attribute) and dotted(node.value) == "httpx":
                is_type = node.attr in TYPES and id(node) in annotations
                if node.attr not in ERRORS and not is_type:
                    found.append(f"{name}: httpx.{node.attr}")
    assert found == ["probe.py: urllib.request"]
    # A file that is copied into images without any package: it turns the proxy off itself.
    assert "ProxyHandler({})" in (ROOT / "deploy/probe.py").read_text()
