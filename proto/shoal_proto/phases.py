"""Names of a job's phases before training, as people see them."""

from collections.abc import Mapping

SHOWN_PHASES: Mapping[str, str] = {
    "collect": "waiting",
    "prepare": "starting",
    "committed": "starting",
    "aborted": "starting",
}
