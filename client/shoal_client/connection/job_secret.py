"""The file of a job's secret, as a user names it."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.secrets import JOB_VARIABLE, read_job_secret

JobSecretFile = Annotated[
    Path | None,
    Parameter(
        name="--job-secret",
        env_var=JOB_VARIABLE,
        metavar="FILE",
        help="File with the secret that the job was, or is to be, begun with. Nobody joins such a"
        " job, stops it or drains its members without it, but for operators with a certificate.",
    ),
]
"""The option --job-secret."""


def secret_in(path: Path | None) -> str:
    """What is in the file; empty without one. Raises InvalidSpec."""
    return "" if path is None else read_job_secret(path)
