"""Record of a job's runs before its last reset.

Generation numbers rise over all runs of a name, so a token's number shows its run. Processes
without a generation are recognised by their incarnations.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from shoal_proto.errors import InternalError, JobInUse
from shoal_proto.short_lists import short_list
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.core.generations.roster import NO_GENERATION, Generation
from shoal_server.core.job.job import Job
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import Refusal
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.serving.unix_clock import unix_s

MAX_EXPELLED = 1000
"""Maximum number of incarnations, 40 bytes each."""
MAX_SHOWN = 8
_SEEN = "a process of an earlier run"


@dataclass(frozen=True, kw_only=True)
class EarlierRuns:
    """All earlier runs of one name."""

    job: str
    last_generation: Generation = NO_GENERATION
    expelled: tuple[str, ...] = ()
    """Expelled incarnations, oldest first."""
    ended_unix_s: float = 0.0
    """Time of the last reset; earlier snapshots are of another run."""

    def with_run(self, last_generation: int, expelled: Iterable[str]) -> "EarlierRuns":
        """Return a copy that includes the run that ends now."""
        expelled = dict.fromkeys([*self.expelled, *expelled])
        return EarlierRuns(
            job=self.job,
            last_generation=Generation(max(self.last_generation, last_generation)),
            expelled=tuple(expelled)[-MAX_EXPELLED:],
            ended_unix_s=unix_s(),
        )

    def prepare_run(self, job: Job) -> None:
        """Make the new run continue the numbers, and refuse processes of these runs."""
        job.last_generation = max(job.last_generation, self.last_generation)
        for incarnation in self.expelled:
            over = refusals.of_an_earlier_run(self.job, _SEEN)
            job.table.expelled.setdefault(incarnation, over)

    def refusal(self, token: Token) -> Refusal | None:
        """Refusal for a token of an earlier run; None for any other token."""
        if 0 < token.generation <= self.last_generation:
            seen = f"generation {token.generation}; this run begins at {self.last_generation + 1}"
            return refusals.of_an_earlier_run(self.job, seen)
        if token.incarnation in self.expelled:
            return refusals.of_an_earlier_run(self.job, _SEEN)
        return None

    def to_json(self) -> bytes:
        """Encode for etcd."""
        value = {
            "last_generation": self.last_generation,
            "expelled": list(self.expelled),
            "ended_unix_s": self.ended_unix_s,
        }
        return json.dumps(value).encode()


def from_json(job: str, value: bytes) -> EarlierRuns:
    """Decode the value of `to_json`. Raises InternalError."""
    try:
        fields = Fields.parsed(value)
        return EarlierRuns(
            job=job,
            last_generation=Generation(fields.count("last_generation")),
            expelled=fields.texts("expelled"),
            ended_unix_s=fields.seconds("ended_unix_s"),
        )
    except UnreadableRecord as error:
        raise InternalError(
            f"the record of earlier runs of job {job} cannot be read", seen=str(error)
        ) from error


def check_unused(job: str, member_ids: Iterable[str], *, is_quarantined: bool = False) -> None:
    """Raise JobInUse if the job has members, or had some when it was quarantined."""
    names = sorted(member_ids)
    if not names:
        return
    what = f"job {job} has {len(names)} live member{'s' if len(names) > 1 else ''}"
    fix = "Stop them first. To join them, use `shoal run` without --fresh."
    if is_quarantined:
        what = f"job {job} is quarantined, and its members may still run"
        fix = (
            f"`shoal repair {job} --apply` lets the job go on (a record of a later release needs a"
            " coordinator of that release). Members that have ended are removed within seconds;"
            " then repeat this command."
        )
    raise JobInUse(
        what,
        seen=short_list(names, MAX_SHOWN),
        expected="none: a job that is removed or started over has no members",
        fix=fix,
    )
