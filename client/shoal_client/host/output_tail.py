"""The newest output of a worker, in its launcher's memory."""

import threading

from shoal_proto.v1 import outputs_pb2 as pb

TAIL_BYTES = 1 << 20
SLACK_BYTES = 1 << 17
"""Excess at which old lines are dropped: not at each line, because a drop moves all newer lines."""


class OutputTail:
    """The newest lines of one worker. `add` is for the reading thread, `part` for any thread."""

    def __init__(self, max_bytes: int = TAIL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._data = bytearray()
        self._oldest = 0

    def add(self, line: str) -> None:
        """Append a line."""
        data = f"{line}\n".encode(errors="replace")
        with self._lock:
            self._data += data
            if len(self._data) > self._max_bytes + SLACK_BYTES:
                self._drop(len(self._data) - self._max_bytes)

    def _drop(self, at_least: int) -> None:
        end = self._data.find(b"\n", at_least - 1)
        num_bytes = end + 1 if end >= 0 else at_least
        del self._data[:num_bytes]
        self._oldest += num_bytes

    def part(
        self, max_bytes: int, *, after: int | None = None, before: int | None = None
    ) -> pb.OutputPart:
        """Whole lines of at most `max_bytes`: the next after position `after`, the last before
        position `before`, or the newest. A longer line is cut."""
        with self._lock:
            oldest, stop = self._oldest, self._oldest + len(self._data)
            if after is not None:
                start, stop = self._following(min(max(after, oldest), stop), stop, max_bytes)
            else:
                stop = stop if before is None else min(max(before, oldest), stop)
                start = self._preceding(max(stop - max_bytes, oldest), stop)
            data = bytes(self._data[start - oldest : stop - oldest])
        return pb.OutputPart(data=data, start=start, stop=stop, oldest=oldest)

    def _following(self, start: int, stop: int, max_bytes: int) -> tuple[int, int]:
        if stop - start <= max_bytes:
            return start, stop
        first = start - self._oldest
        end = self._data.rfind(b"\n", first, first + max_bytes)
        return start, (end + 1 + self._oldest if end >= 0 else start + max_bytes)

    def _preceding(self, start: int, stop: int) -> int:
        first = start - self._oldest
        if first == 0 or self._data[first - 1] == 0x0A:
            return start
        end = self._data.find(b"\n", first, stop - self._oldest - 1)
        return end + 1 + self._oldest if end >= 0 else start
