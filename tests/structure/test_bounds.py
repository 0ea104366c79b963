"""Bounds on requests: each text, list and number that a request may hold has one, declared by
name."""

import importlib
import pkgutil
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

import shoal_proto.v1
from shoal_proto.v1.weights_pb2 import FetchSegmentRequest, PutSegmentRequest
from shoal_server.serving import bounds

WITHOUT = (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM)
"""Types that have few values, and need no bound."""
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
SENT_IN_BULK = (FetchSegmentRequest, PutSegmentRequest)
"""Messages that open calls of the bulk transport, which no gRPC service has."""
REALS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def requests() -> Iterator[Descriptor]:
    """Yield each message that a gRPC method or a bulk connection receives, and the messages nested
    in it."""
    seen: set[str] = set()

    def within(message: Descriptor) -> Iterator[Descriptor]:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        yield message
        for field in message.fields:
            if field.message_type is not None:
                yield from within(field.message_type)

    for message in SENT_IN_BULK:
        yield from within(message.DESCRIPTOR)
    for module in pkgutil.iter_modules(shoal_proto.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"shoal_proto.v1.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                for method in service.methods:
                    yield from within(method.input_type)


def test_every_field_of_every_request_has_a_bound() -> None:
    """The bound of a new field belongs in `serving/bounds.py`."""
    found = list(requests())
    assert len(found) > 100
    missing = []
    for message in found:
        for field in message.fields:
            bound = bounds.bound_of(message.name, field.name)
            one_message = field.message_type is not None and not field.is_repeated
            if bound is None and not one_message and field.type not in WITHOUT:
                missing.append(f"{message.name}.{field.name}")
    assert missing == []


def test_each_bound_fits_the_kind_of_its_field() -> None:
    """A bound of a text has a length; one of seconds belongs to a real number whose name ends in
    `_s`."""
    wrong = []
    for message in requests():
        for field in message.fields:
            bound = bounds.bound_of(message.name, field.name)
            if bound is None:
                continue
            if field.type in TEXTS and not bound.length:
                wrong.append(f"{message.name}.{field.name}: no length")
            if bound.seconds != (field.type in REALS and field.name.endswith("_s")):
                wrong.append(f"{message.name}.{field.name}: seconds?")
    assert wrong == []


def test_no_bound_names_a_missing_field() -> None:
    names = {(m.name, f.name) for m in requests() for f in m.fields}
    assert set(bounds.NAMED) <= {field for _, field in names}
    assert set(bounds.OF_MESSAGE) <= {f"{message}.{field}" for message, field in names}
