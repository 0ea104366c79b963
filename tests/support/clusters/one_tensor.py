"""A model of one tensor `w` on parameter servers, whose elements all have one value."""

from array import array
from dataclasses import dataclass
from functools import cached_property

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec


@dataclass(frozen=True)
class OneTensor:
    num_elements: int

    @cached_property
    def schema(self) -> list[ParameterSpec]:
        return [ParameterSpec(name="w", shape=[self.num_elements], dtype="float32")]

    def filled(self, value: float) -> dict[str, memoryview]:
        """Return values, gradients or memory for them, all of which are `value`."""
        return {"w": memoryview(array("f", [value]) * self.num_elements).cast("B")}

    def create(self, client: ParameterClient, optimizer: OptimizerSpec) -> ParameterClient:
        """Place and create the tensor, all zero; return the client."""
        client.place(self.schema)
        client.create(optimizer, self.filled(0.0))
        client.pull(self.filled(9.0))
        return client
