"""Build hook: the wheel is for Linux, although none of it is compiled. Shoal uses features that
only Linux has (memfd_create, PR_SET_PDEATHSIG, open file descriptor locks), so pip must refuse the
wheel elsewhere."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLATFORMS = "manylinux_2_17_aarch64.manylinux_2_17_x86_64"
"""Platforms for which Shoal's requirements have wheels, in the form that PyPI accepts."""


class LinuxWheel(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the wheel's tag."""
        build_data["tag"] = f"py3-none-{PLATFORMS}"
