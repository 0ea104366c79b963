"""The row fates of remembered pushes, so that a retry gets the answer of the first try."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_proto.v1.replication_pb2 import SessionImage
from shoal_server.parameters.shard.sessions import MAX_OUTCOMES


class RememberedFates:
    """Fates by session and sequence, for at least the pushes that the session table keeps."""

    def __init__(self) -> None:
        self._fates: dict[str, Mapping[int, bytes]] = {}
        """Inner mappings are never changed, but replaced."""
        self._num_bytes = 0

    def recall(self, session: str, sequence: int) -> bytes:
        return self._fates.get(session, {}).get(sequence, b"")

    def remember(self, session: str, sequence: int, fates: bytes) -> None:
        known = {**self._fates.get(session, {}), sequence: fates}
        self._num_bytes += len(fates)
        while len(known) > MAX_OUTCOMES:
            self._num_bytes -= len(known.pop(min(known)))
        self._fates[session] = known

    def forget(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._num_bytes -= sum(map(len, self._fates.pop(session, {}).values()))

    def ended_sessions(self, is_live: Callable[[str], bool]) -> Sequence[str]:
        """Return the sessions with fates that are not live."""
        return [name for name in self._fates if not is_live(name)]

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def freeze(self) -> "RememberedFates":
        """Return a read-only copy."""
        frozen = RememberedFates()
        frozen._fates, frozen._num_bytes = dict(self._fates), self._num_bytes
        return frozen

    def tensors(self, sessions: Sequence[SessionImage]) -> dict[str, Tensor]:
        """Encode the fates of remembered pushes, in the session table's order."""
        remembered = [
            self.recall(s.session, sequence) for s in sessions for sequence in s.sequences
        ]
        return {
            "answer_lengths": torch.tensor([len(fates) for fates in remembered], dtype=torch.int64),
            "answers": torch.from_numpy(np.frombuffer(b"".join(remembered), np.uint8).copy()),
        }

    def load(self, sessions: Sequence[SessionImage], lengths: Tensor, answers: Tensor) -> None:
        """Remember what `tensors` encoded. Raises InternalError if the sessions do not match."""
        pushes = [(s.session, sequence) for s in sessions for sequence in s.sequences]
        if len(lengths) != len(pushes) or int(lengths.sum()) != len(answers):
            raise InternalError(
                "the row fates of remembered pushes do not match the sessions",
                seen=f"fates of {len(lengths)} pushes in {len(answers)} bytes",
                expected=f"fates of {len(pushes)} pushes in {int(lengths.sum())} bytes",
            )
        data, start = answers.numpy().tobytes(), 0
        for (session, sequence), length in zip(pushes, lengths.tolist(), strict=True):
            self.remember(session, sequence, data[start : start + length])
            start += length
