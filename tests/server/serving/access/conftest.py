"""Fixtures of this package: a cluster with TLS, and a member that trains in it."""

from collections.abc import Iterator

import pytest
from support.clusters.tls_world import TlsWorld, tls_world
from support.members.scripted_member import Script, ScriptedMember

from shoal_proto.tls import identity
from shoal_proto.tls.names import CertificateRole


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsWorld]:
    with tls_world(tmp_path_factory.mktemp("outsiders")) as started:
        yield started


@pytest.fixture(scope="package")
def member(world: TlsWorld) -> Iterator[ScriptedMember]:
    """Start a member that trains in job j until the package's tests end."""
    with identity.using(world.files(CertificateRole.WORKER)):
        joined = ScriptedMember(
            [world.cluster.coordinator], Script(job="j", member_id="a", desired=1)
        )
        joined.start().await_training_with("a")
        yield joined
        joined.close()
