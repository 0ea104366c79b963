"""The two parts of a job's shard map: dense parameters, and tables."""

from shoal_proto.v1.shards_pb2 import Shard, ShardMap


def without_tables(shard_map: ShardMap) -> ShardMap:
    """The map with the shards of parameters only."""
    if not shard_map.tables:
        return shard_map
    dense = ShardMap()
    dense.CopyFrom(shard_map)
    del dense.shards[:]
    dense.shards.extend(shard for shard in shard_map.shards if not shard.table)
    return dense


def keep_addresses(shard_map: ShardMap, last: ShardMap | None) -> None:
    """Add the last map's addresses to shards without an address: a server whose registration in
    etcd has expired may still be their primary.
    """
    if last is None:
        return
    known = {(shard.shard_id, shard.epoch, shard.server_id): shard.address for shard in last.shards}
    for shard in shard_map.shards:
        if not shard.address:
            key = (shard.shard_id, shard.epoch, shard.server_id)
            shard.address = known.get(key, "")


def of_tables(shard_map: ShardMap) -> dict[tuple[str, int], Shard]:
    """The shards of tables, by table and index in it."""
    return {(shard.table, shard.table_index): shard for shard in shard_map.shards if shard.table}
