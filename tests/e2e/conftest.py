"""Commands started as a user starts them, as a fixture of the tests of this folder."""

from support.processes.commands import shoal_command

__all__ = ["shoal_command"]
