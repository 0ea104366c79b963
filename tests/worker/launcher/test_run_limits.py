"""Options of `shoal run` for a cluster that it starts: refused for any other."""

from pathlib import Path

import pytest

from shoal_client.cli import main


@pytest.mark.parametrize(
    "option", ["--join-s", "--collective-s", "--heartbeat-s", "--wait-for-members-s", "--ps"]
)
def test_options_of_a_coordinator_that_runs_already_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """The refusal comes at once, with exit code 2, before any call to the coordinator."""
    script = tmp_path / "train.py"
    script.touch()
    stands = ["--coordinator", "127.0.0.1:9"]
    assert main(["run", *stands, option, "60", str(script)]) == 2
    errors = capsys.readouterr().err
    shown = "--ps 60" if option == "--ps" else option
    assert f"{shown} with the coordinator 127.0.0.1:9" in errors
    assert "`shoal up`" in errors
