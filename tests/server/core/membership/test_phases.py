"""The diagram in the documentation equals the table in the code."""

from pathlib import Path

from shoal_server.core.membership.phases import TRANSITIONS

ARCHITECTURE = Path(__file__).parents[4] / "docs" / "architecture.md"


def test_the_documented_diagram_is_the_table() -> None:
    """docs/architecture.md shows exactly the transitions of the table."""
    lines = [
        f"    {before.name} --> {after.name}: {trigger.value}"
        for (before, trigger), after in TRANSITIONS.items()
    ]
    picture = "\n".join(["stateDiagram-v2", "    [*] --> COLLECT", *lines])
    assert f"```mermaid\n{picture}\n```" in ARCHITECTURE.read_text()
