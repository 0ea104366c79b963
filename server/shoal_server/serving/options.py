"""Options that every serving process has, and what marks a field that is no option."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

INTERNAL = Parameter(parse=False)
"""On a field of a config: it is set in code, and is no option of the command line."""

FLAT = Parameter(name="*")
"""On a field that is a config itself: its fields are options beside those of the outer one."""

BindAddress = Annotated[
    str,
    Parameter(
        name="--bind",
        metavar="ADDRESS",
        help="Serve every port at this address; 0.0.0.0: at all of this machine's. There is no TLS"
        " and no password: whoever reaches the ports can read parameters and end jobs.",
    ),
]
ListenAddress = Annotated[
    str,
    Parameter(name="--listen", metavar="[HOST:]PORT", help="gRPC. A port alone is at --bind."),
]
AdvertisedAddress = Annotated[
    str,
    Parameter(
        name="--advertise",
        metavar="HOST[:PORT]",
        help="Address that others connect to. By default what is listened on; where that is every"
        " address, this machine's name.",
    ),
]
ReadyFile = Annotated[
    Path | None,
    Parameter(
        name="--ready-file", metavar="FILE", help="Written once it serves: JSON with its addresses."
    ),
]
