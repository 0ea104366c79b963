"""The edges of the replication core get everything that they need from its effects."""

import ast

from structure.reading_radius import imported, modules, walked

CORE, PROTOCOL = "shoal_server.core.replication.", "shoal_server.core.replication.protocol."
EDGES = "shoal_server.parameters.replication."
WIRING = {f"{EDGES}core_driver", f"{EDGES}shard_replicas"}
"""The driver, which steps the core, and the module that makes the edges and answers questions of
operators and of recovery about the core's state."""
OTHER_DECISIONS = {f"{EDGES}journal_recovery": f"{CORE}backing.missing_shards"}
"""An edge with a decision of its own, which the core does not make."""


def edges() -> list[str]:
    return [name for name in modules() if name.startswith(EDGES) and name not in WIRING]


def test_the_core_has_edges() -> None:
    assert len(edges()) > 10 and set(modules()) >= WIRING


def test_no_edge_reads_an_attribute_of_the_core() -> None:
    found = {
        f"{name}:{node.lineno}"
        for name in edges()
        for node in walked(modules()[name])
        if isinstance(node, ast.Attribute) and node.attr in ("core", "_core")
    }
    assert found == set()


def test_an_edge_imports_only_the_effects_and_inputs_of_the_core() -> None:
    found = {
        (name, each)
        for name in edges()
        for each in imported(modules()[name])
        if each.startswith(CORE) and not each.startswith(PROTOCOL)
    }
    assert found == set(OTHER_DECISIONS.items())
