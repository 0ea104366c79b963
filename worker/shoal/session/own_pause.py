"""Whether a member does something of its own at the moment, for which the others wait."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shoal.backends.process_group.interface import LONGEST_S
from shoal.session.elastic_controller import ElasticController
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_number

PAUSE_S = 1800.0
"""What a pause may take that states no limit."""


class ScriptPause:
    """Of one session; one at a time."""

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.is_on = False

    def also(self, reason: str, limit_s: float) -> AbstractContextManager[None]:
        """The same for what may be within a pause of the script's."""
        return nullcontext() if self.is_on else self.hold(reason, limit_s)

    @contextmanager
    def hold(self, reason: str, limit_s: float) -> Iterator[None]:
        """See `Session.pause`."""
        if not reason.strip():
            raise InvalidSpec("a pause needs a reason", expected='session.pause("validation")')
        limit_s = as_number("limit_s", limit_s)
        if not 0 < limit_s <= LONGEST_S:
            raise InvalidSpec(
                "limit_s is out of range", seen=f"{limit_s:g}", expected=f"up to {LONGEST_S:g} s"
            )
        if self.is_on:
            raise InvalidSpec("pauses do not nest", seen=f"pause({reason!r}) within a pause")
        self.is_on = True
        self._controller.pause(reason, limit_s)
        try:
            yield
        finally:
            self.is_on = False
            self._controller.resume()
