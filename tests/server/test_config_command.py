"""`shoal config`: the limits of a coordinator, as JSON and as a table."""

import dataclasses
import json

import pytest

from shoal_client.cli import main
from shoal_server.core.limits import Limits


def test_the_json_has_every_limit_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON also has the order that the limits must keep."""
    assert main(["config", "--heartbeat-s", "0.25", "--join-s", "60", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    limits = Limits(heartbeat_s=0.25, join_s=60)
    names = {field.name for field in dataclasses.fields(Limits)}
    names |= {name for name, each in vars(Limits).items() if isinstance(each, property)}
    assert {name: each["seconds"] for name, each in shown["limits"].items()} == {
        name: getattr(limits, name) for name in names
    }
    assert all(each["meaning"].endswith(".") for each in shown["limits"].values())
    pairs = [(pair["smaller"]["name"], pair["larger"]["name"]) for pair in shown["hierarchy"]]
    assert pairs == [(smaller[0], larger[0]) for smaller, larger in limits.hierarchy()]


def test_the_table_has_the_defaults_of_a_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of the limits is one line with their values."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    limits = Limits()
    assert f"lease_s ({limits.lease_s:g}) < " in shown
    assert f"watchdog_s ({limits.watchdog_s:g}) < join_s ({limits.join_s:g})" in shown
    assert "halt_s" in shown


def test_limits_out_of_order_are_refused_as_by_shoal_coordinator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both commands have the same error, and exit code 2."""
    numbers = ["--heartbeat-s", "10", "--join-s", "60"]
    refusals = []
    for command in ("config", "coordinator"):
        assert main([command, *numbers]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        refusals.append(captured.err.removeprefix(f"shoal {command}: "))
    assert refusals[0] == refusals[1]
    assert "must stay below" in refusals[0]
