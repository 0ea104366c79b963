"""Shoal's description of etcd's API, checked against etcd for calls not used by the client."""

from pathlib import Path

import grpc
from support.clusters.etcd_fixture import running_etcd

from shoal_proto.etcd import etcd_pb2 as pb
from shoal_proto.etcd import etcd_pb2_grpc as stubs


def test_the_description_matches_the_answers_of_etcd(tmp_path: Path) -> None:
    """Fields hold what their names say, and etcd's answers have no unknown field."""
    with running_etcd(tmp_path) as endpoint, grpc.insecure_channel(endpoint) as channel:
        (member,) = stubs.ClusterStub(channel).MemberList(pb.MemberListRequest(), timeout=5).members
        assert member.ID
        assert list(member.clientURLs) == [f"http://{endpoint}"]
        assert member.peerURLs[0].startswith("http://")

        leases, store = stubs.LeaseStub(channel), stubs.KVStub(channel)
        lease = leases.LeaseGrant(pb.LeaseGrantRequest(TTL=60, ID=7), timeout=5)
        assert (lease.ID, lease.TTL, lease.error) == (7, 60, "")
        store.Put(pb.PutRequest(key=b"k", value=b"1", lease=7), timeout=5)

        changed = store.Put(pb.PutRequest(key=b"k", value=b"2", prev_kv=True), timeout=5)
        assert (changed.prev_kv.value, changed.prev_kv.lease) == (b"1", 7)
        keys = store.Range(pb.RangeRequest(key=b"\0", range_end=b"\0", keys_only=True), timeout=5)
        assert (keys.kvs[0].value, keys.kvs[0].version, keys.count, keys.more) == (b"", 2, 1, False)
        gone = store.DeleteRange(pb.DeleteRangeRequest(key=b"k", prev_kv=True), timeout=5)
        assert (gone.deleted, gone.prev_kvs[0].value) == (1, b"2")
        for message in (member, lease, changed, keys, gone):
            # Fields missing from the description are preserved as unknown fields.
            assert type(message).FromString(message.SerializeToString()) == message
