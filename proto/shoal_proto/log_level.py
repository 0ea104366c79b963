"""Level of the log, from SHOAL_LOG_LEVEL, and structlog's configuration in a user's script."""

import logging
from collections.abc import Mapping

import structlog

from shoal_proto.errors import InvalidSpec
from shoal_proto.terminal import printable_event


def log_level(environment: Mapping[str, str]) -> int:
    """Number of the level in SHOAL_LOG_LEVEL, by default info. Raises InvalidSpec for an unknown
    one."""
    name = environment.get("SHOAL_LOG_LEVEL") or "INFO"
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise InvalidSpec(
            "SHOAL_LOG_LEVEL is not a level", seen=name, expected="debug, info, warning or error"
        )
    return level


def configure_script_log(environment: Mapping[str, str]) -> None:
    """Set the log level, unless the script has configured structlog. Raises InvalidSpec for an
    unknown level."""
    level = log_level(environment)
    if not structlog.is_configured():
        # Log lines contain text from other members, which a terminal would interpret.
        *processors, renderer = structlog.get_config()["processors"]
        structlog.configure(
            processors=[*processors, printable_event, renderer],
            wrapper_class=structlog.make_filtering_bound_logger(level),
        )
