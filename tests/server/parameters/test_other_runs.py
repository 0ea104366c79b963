"""Processes of an earlier run of a job cannot read or change the shards of the next run."""

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers, servers_fixture

from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_proto.errors import Fenced
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.etcd import keys

MODEL, DIM = OneTensor(4), 2
TABLE = TableSpec(
    name="t",
    dim=DIM,
    dtype="float32",
    initialiser=Initialiser(kind="constant"),
    optimizer=RowOptimizer(kind="sgd", lr=1.0),
    num_shards=1,
)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
WHERE = ("t", 0)
IDS = np.array([7], np.int64).tobytes()


servers = servers_fixture(1, "module")


class Member:
    """A member's process, with its clients for parameters and tables."""

    def __init__(self, servers: ParameterServers, member_id: str, job: str) -> None:
        token = servers.admit(member_id, job=job)
        self.dense = ParameterClient([servers.coordinator], lambda: token, timeout_s=10.0)
        self.tables = TableClient([servers.coordinator], lambda: token, timeout_s=10.0)

    def begin(self, value: float) -> None:
        self.dense.place(MODEL.schema, [TABLE])
        self.tables.fetch_map()
        self.dense.create(SGD, MODEL.filled(value))
        rows = self.tables.look_up({WHERE: IDS})[WHERE]
        self.gradients = Gradients(
            ids=IDS,
            births=rows.births,
            gradients=np.ones(DIM, np.float32).tobytes(),
            base_version=rows.version,
            base_epoch=rows.epoch,
        )

    def values(self) -> set[float]:
        into = MODEL.filled(9.0)
        self.dense.pull(into)
        return set(into["w"].cast("f"))

    def close(self) -> None:
        self.dense.close()
        self.tables.close()


CALLS: dict[str, Callable[[Member], object]] = {
    "push": lambda member: member.dense.push(MODEL.filled(1.0)),
    "pull": lambda member: member.dense.pull(MODEL.filled(9.0)),
    "create": lambda member: member.dense.create(SGD, MODEL.filled(5.0)),
    "look up": lambda member: member.tables.look_up({WHERE: IDS}),
    "push rows": lambda member: member.tables.push({WHERE: member.gradients}),
}


def begin_anew(servers: ParameterServers, job: str) -> None:
    """Delete the job's keys in etcd, without fencing a member."""

    async def wipe() -> None:
        await servers.store.delete(keys.assignments(job), prefix=True)
        await servers.store.delete(keys.job_prefix(job), prefix=True)

    servers.run(wipe())


@pytest.mark.sampled()
@pytest.mark.parametrize("call", CALLS)
def test_a_member_of_the_last_run_is_refused(servers: ParameterServers, call: str) -> None:
    """The refusal has the new run's id; the shards of both runs have the same numbers and epochs.
    The new run continues from the values of its own member."""
    job = call.replace(" ", "-")
    with (
        closing(Member(servers, "old", job)) as old,
        closing(Member(servers, "new", job)) as new,
    ):
        old.begin(0.0)
        begin_anew(servers, job)
        new.begin(2.0)
        with pytest.raises(Fenced, match="was replaced") as refused:
            CALLS[call](old)
        assert refused.value.details["run"] == new.dense.shard_map.run
        new.dense.push(MODEL.filled(1.0))
        assert new.values() == {1.0}
