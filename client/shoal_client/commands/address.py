"""Address of a cluster's gRPC service, or of its status page."""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from shoal_client.connection.addresses import USUAL_PAGE, CoordinatorAddresses, usual_cluster
from shoal_client.connection.coordinators import Coordinators
from shoal_client.host.reports import check_reachable
from shoal_proto.tls.options import TlsOptions
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

DEFAULT_URL = f"http://{USUAL_PAGE}"
ASK_WITHIN_S = 10.0
"""Time limit of a call. If the leader hangs, no answer comes until it has a successor."""

HttpUrl = Annotated[
    str,
    Parameter(
        env_var="SHOAL_HTTP",
        metavar="URL,...",
        help="Base URL of the coordinator's status page; with several coordinators, one for each."
        " By default the coordinator is asked for it if --coordinator is given; otherwise it is the"
        " page of your cluster on this machine: the only one, or the one at a usual port; without a"
        f" cluster {DEFAULT_URL}.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class StatusAddress(TlsOptions):
    """Address of the status page, and the certificate for it."""

    http: HttpUrl = ""
    coordinators: CoordinatorAddresses = ()

    def __post_init__(self) -> None:
        """Drop the address of a variable if an option names the cluster by its other address."""
        variable = os.environ.get("SHOAL_COORDINATOR", "")
        page_is_given = self.http != os.environ.get("SHOAL_HTTP", "")
        coordinators_are_given = ",".join(self.coordinators) != "".join(variable.split())
        if page_is_given and not coordinators_are_given:
            object.__setattr__(self, "coordinators", ())
        elif coordinators_are_given and not page_is_given:
            object.__setattr__(self, "http", "")

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of page and coordinators."""
        if self.http or self.coordinators:
            pages = self.http.split(",") if self.http else ()
            return (*pages, *self.coordinators)
        return tuple(_usual_urls().split(","))

    def urls(self) -> str:
        """URLs of the page, separated by commas; asks the coordinators if no page is given. Raises
        the errors of that call, and InvalidSpec if no address is given and the user has several
        clusters."""
        return self.http or http_url_of(self.coordinators) or _usual_urls()


def _usual_urls() -> str:
    """URLs of the page of `usual_cluster`; DEFAULT_URL without one. Raises InvalidSpec."""
    found = usual_cluster("--http URL or $SHOAL_HTTP")
    return DEFAULT_URL if found is None else ",".join(f"http://{page}" for page in found.pages)


def http_url_of(coordinators: Sequence[str]) -> str:
    """Ask for the URL of the leader's page; empty without coordinators. Raises the errors of the
    call."""
    if not coordinators:
        return ""
    check_reachable(coordinators, ASK_WITHIN_S)
    with closing(Coordinators(coordinators)) as connection:
        found = connection.call(
            lambda channel: MembershipStub(channel).GetCluster,
            pb.GetClusterRequest(),
            timeout_s=ASK_WITHIN_S,
        )
    return found.http_url
