"""Python's collector of objects that refer to one another in circles, which stops a trainer.

A full collection goes through all objects that it knows of: some 300,000 with torch imported, which
takes 0.2 s. It comes when many new ones have been made, and bringing a generation up makes many: so
it came while all members waited for one another. What lives before the first generation lives for
as long as the session does, and need not be gone through.
"""

import gc


class LongLivedObjects:
    """Those of one session's process that the collector leaves alone."""

    def __init__(self) -> None:
        self._is_frozen = False

    def freeze(self) -> None:
        """From here on all that lives now. Without effect where the script has done so, or other
        sessions of the process, or where the collector is off."""
        if gc.isenabled() and not gc.get_freeze_count():
            # What the script has just thrown away would stay until the session's end.
            gc.collect(1)
            gc.freeze()
            self._is_frozen = True

    def release(self) -> None:
        """The collector has all of it again. May be called twice."""
        if self._is_frozen:
            gc.unfreeze()
        self._is_frozen = False
