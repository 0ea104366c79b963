"""Base of the data that the HTTP API shows."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True, kw_only=True)
class View:
    """Base of all views: the descriptions of fields are their docstrings, and NaN and infinity are
    sent as text.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )
