"""The snapshot from which a job's shards were last restored."""

import json
from dataclasses import asdict, dataclass

from shoal_proto.errors import InternalError
from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace, Put
from shoal_server.etcd.json_fields import Fields, UnreadableRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredFrom:
    url: str
    number: int
    cut_id: str


def written(job: str, source: RestoredFrom) -> Put:
    """Operation for the restoring transaction."""
    return Put(keys.restored_from(job), json.dumps(asdict(source)).encode())


async def read(store: Keyspace, job: str) -> RestoredFrom | None:
    """The record; None if there is none. Raises InternalError if it does not parse."""
    found = await store.get(keys.restored_from(job))
    if found is None:
        return None
    try:
        fields = Fields.parsed(found.value)
        return RestoredFrom(
            url=fields.text("url"), number=fields.count("number"), cut_id=fields.text("cut_id")
        )
    except UnreadableRecord as error:
        raise InternalError(
            f"the record of what job {job} was restored from does not parse",
            seen=f"{found.value[:80]!r}, {error}",
            expected='{"url": ..., "number": ..., "cut_id": ...}',
        ) from error
