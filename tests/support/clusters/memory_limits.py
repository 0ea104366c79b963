"""Jobs that fill parameter servers: a model of 2 MiB, and a table with rows of 512 bytes."""

from array import array
from collections.abc import Sequence

from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients, TablePushResult, route
from shoal_client.parameters.tables import TableClient
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import DescribeReply
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.etcd import keys

MIB = 2**20
MODEL = OneTensor(512 * 1024)
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
ADAM = OptimizerSpec(kind="adam", groups=[HyperParameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)])
DIM = 128


def connect(
    servers: ParameterServers, job: str = "job", timeout_s: float = 20.0
) -> ParameterClient:
    token = servers.admit("w0", job=job)
    return ParameterClient([servers.coordinator], lambda: token, timeout_s=timeout_s)


def created(servers: ParameterServers, optimizer: OptimizerSpec, job: str) -> ParameterClient:
    client = connect(servers, job)
    client.place(MODEL.schema)
    client.create(optimizer, MODEL.filled(0.0))
    return client


def drop(servers: ParameterServers, job: str) -> None:
    """End the job, so that all servers drop it."""
    servers.run(servers.store.delete(keys.assignments(job), prefix=True))


def describe(servers: ParameterServers, server_id: str = "ps-0") -> DescribeReply:
    return servers.describe(server_id)


def users(**changes: object) -> TableSpec:
    fields: dict[str, object] = {
        "name": "users",
        "dim": DIM,
        "dtype": "float32",
        "seed": 3,
        "initialiser": Initialiser(kind="constant", center=1.0),
        "optimizer": RowOptimizer(kind="sgd", lr=0.5),
        "num_shards": 1,
    }
    return TableSpec(**(fields | changes))  # type: ignore[arg-type]


class Embedder:
    """A member that looks up rows and pushes to them, with a short timeout."""

    def __init__(self, servers: ParameterServers, table: TableSpec, timeout_s: float = 0.5) -> None:
        token = servers.admit("w0", job="tables")
        self._placing = ParameterClient([servers.coordinator], lambda: token)
        self._placing.place([], [table])
        self._client = TableClient([servers.coordinator], lambda: token, timeout_s=timeout_s)
        self._client.fetch_map()

    def push(self, ids: Sequence[int]) -> TablePushResult:
        rows = {("users", i): found for i, found in route(ids, 1).items()}
        found = self._client.look_up({where: each.tobytes() for where, each in rows.items()})
        return self._client.push(
            {
                where: Gradients(
                    ids=each.tobytes(),
                    births=found[where].births,
                    gradients=array("f", [1.0] * (DIM * len(each))).tobytes(),
                    base_version=found[where].version,
                    base_epoch=found[where].epoch,
                )
                for where, each in rows.items()
            }
        )

    def look_up(self, ids: Sequence[int]) -> int:
        rows = {("users", i): found for i, found in route(ids, 1).items()}
        found = self._client.look_up({where: each.tobytes() for where, each in rows.items()})
        return sum(len(each.values) for each in found.values())

    def close(self) -> None:
        self._placing.close()
        self._client.close()
