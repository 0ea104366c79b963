"""Placement requests of the largest jobs."""

from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import ParameterSpec, PlaceRequest
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec

LAYERS, WIDTH, VOCABULARY = 160, 11_400, 50_257


def transformer_of_a_terabyte(job: str) -> PlaceRequest:
    """Make a request with 1.002e12 bytes of float32 parameters.

    Biases and norms are in a separate group, as in optimizers that do not decay them.
    """
    shapes = {"transformer.word_embeddings.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        name = f"transformer.encoder.layers.{layer}"
        shapes |= {
            f"{name}.self_attention.query_key_value.weight": (3 * WIDTH, WIDTH),
            f"{name}.self_attention.dense.weight": (WIDTH, WIDTH),
            f"{name}.mlp.dense_h_to_4h.weight": (4 * WIDTH, WIDTH),
            f"{name}.mlp.dense_4h_to_h.weight": (WIDTH, 4 * WIDTH),
            f"{name}.input_layernorm.weight": (WIDTH,),
            f"{name}.input_layernorm.bias": (WIDTH,),
        }
    specs = [
        ParameterSpec(name=name, shape=shape, dtype="float32", group=int(len(shape) == 1))
        for name, shape in shapes.items()
    ]
    return PlaceRequest(token=Token(job=job), parameters=specs)


def hundred_tables(job: str) -> PlaceRequest:
    """Make a request with 100 tables of 64 shards."""
    tables = [
        TableSpec(
            name=f"table-{i:03d}",
            dim=64,
            dtype="float32",
            num_shards=64,
            optimizer=RowOptimizer(kind="adagrad", lr=0.1),
            initialiser=Initialiser(kind="normal", spread=0.1),
        )
        for i in range(100)
    ]
    return PlaceRequest(token=Token(job=job), tables=tables)


def num_bytes(request: PlaceRequest) -> int:
    """Count the bytes of all parameters."""
    total = 0
    for spec in request.parameters:
        elements = 1
        for size in spec.shape:
            elements *= size
        total += elements * DTYPE_BYTES[spec.dtype]
    return total
