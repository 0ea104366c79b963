"""Members of a real job that are threads of this process, and lone members of jobs of their own."""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from support.network import http
from support.processes.served_process import awaited
from support.training.elastic_bodies import build, numbers
from torch import Tensor

import shoal
from shoal.session.session import Session
from shoal_client.local.cluster import LocalCluster

T = TypeVar("T")
WAIT_S = 60.0
Body = Callable[[Session, Any, Any, shoal.Batch], object]
"""A script's code for one batch, of (session, model, optimizer, batch)."""


class Killed(Exception):
    """Ends a member as a signal would."""


@dataclass(frozen=True, kw_only=True)
class ThreadJob:
    """A job whose members are threads of this process."""

    cluster: LocalCluster
    num_members: int
    name: str = field(default_factory=lambda: f"threads-{secrets.token_hex(4)}")

    def join(self, **options: Any) -> AbstractContextManager[Session]:
        """Join as one of the members; enter and leave the session in the member's thread."""
        return shoal.join(
            self.name,
            coordinator=self.cluster.coordinator,
            backend="in-memory",
            desired_members=self.num_members,
            **options,
        )

    def outcomes(self, member: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[Any]:
        """Return the result or the error of each member: of `member()`, or one for each tuple of
        arguments."""
        calls = [partial(member, *each) for each in arguments or [()] * self.num_members]
        with ThreadPoolExecutor(len(calls)) as threads:
            ends = [threads.submit(call) for call in calls]
            return [end.exception(WAIT_S) or end.result() for end in ends]

    def results(self, member: Callable[..., Any], *arguments: tuple[Any, ...]) -> list[Any]:
        """Return the results as `outcomes` does; raise the first error."""
        found = self.outcomes(member, *arguments)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    def await_proposal(self, member_id: str) -> None:
        """Wait until the coordinator has the member's proposal: it is ready to train."""
        url = f"{self.cluster.http_url}/api/v1/jobs/{self.name}/events?limit=1000"

        def is_ready() -> bool:
            events = http.get(url).json()["events"]
            return ("member_proposed", member_id) in [(e["kind"], e["member_id"]) for e in events]

        awaited(lambda: is_ready() or None, WAIT_S, f"{member_id} is ready to train")


def lone(cluster: LocalCluster, **options: Any) -> AbstractContextManager[Session]:
    """Join a new job as its only member."""
    return shoal.join(f"lone-{secrets.token_hex(4)}", coordinator=cluster.coordinator, **options)


def train_alone(
    cluster: LocalCluster, strategy: Any, body: Body, *, num_steps: int = 3
) -> dict[str, Tensor]:
    """Run the body on a lone member's first batches; return its model's state. Refusals do not
    depend on other members."""
    model, optimizer = build("sgd", "layers")
    with lone(cluster) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(numbers(), global_batch_size=24):
            body(session, model, optimizer, batch)
            if batch.step == num_steps - 1:
                break
        return {name: tensor.clone() for name, tensor in session.state_dict().items()}
