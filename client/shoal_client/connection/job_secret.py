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
        help="File with the secret of the job. A job that is started with a secret can only be"
        " joined, drained, stopped, retried or removed with it, or by operators with a"
        " certificate.",
    ),
]


def secret_in(path: Path | None) -> str:
    """Secret in the file; empty without a file. Raises InvalidSpec."""
    return "" if path is None else read_job_secret(path)
