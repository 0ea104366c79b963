"""Workers, each of which pushes to and pulls from every shard, repeating calls until answered."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from support.sim.replication.setting import Setting
from support.sim.replication.shard import Update

from shoal_server.core.replication.protocol.events import AckLevel
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardContent

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

TIMEOUT_S = 2.5
LOOKS_EACH_S = 0.5
RETRY_S = 0.25
FIRST_VALUES = -1
_LEVELS = (AckLevel.REPLICATED, AckLevel.REPLICATED, AckLevel.DURABLE, AckLevel.APPLIED)


@dataclass(eq=False)
class Call:
    """A push or pull, until its final answer."""

    key: Key
    placement_id: str
    """Run of the job in which the call was begun."""
    update: Update | None
    level: AckLevel
    attempt: int = 0
    """Number of the current attempt; negative answers to earlier attempts are ignored."""


class SimWorker:
    def __init__(self, setting: Setting, number: int, keys: list[Key], think_s: float) -> None:
        self.name = f"w{number}"
        self.pushes = True
        self.open: dict[Key, Call] = {}
        """Unanswered calls, by shard."""
        self.timeout_s = TIMEOUT_S
        self.num_answered = 0
        self._setting = setting
        self._number = number
        self._think_s = think_s
        self._sequence = count(1)
        self._tokens = count()
        self._fresh = count()
        for key in keys:
            self._next(key)

    def _next(self, key: Key) -> None:
        wait_s = self._think_s * self._setting.chance.expovariate(1.0)
        self._setting.clock.later(wait_s, lambda: self._begin(key))

    def _begin(self, key: Key) -> None:
        if not self.pushes:
            return
        chance = self._setting.chance
        is_pull = chance.random() < 0.2
        update = None if is_pull else (self._number, next(self._sequence))
        placement_id = self._setting.store.placement_id
        self.open[key] = Call(key, placement_id, update, chance.choice(_LEVELS))
        self._send(self.open[key])

    def _send(self, call: Call) -> None:
        """Send the call to the current primary according to etcd; if there is none, retry later."""
        setting, chance = self._setting, self._setting.chance
        call.attempt += 1
        attempt = call.attempt
        if call.placement_id != setting.store.placement_id:
            # The worker learns of the new placement, and joins it.
            del self.open[call.key]
            self._next(call.key)
            return
        record = setting.store.records[call.key]
        server = setting.servers.get(record.primary)
        timeout_s = self.timeout_s
        if record.content is ShardContent.NONE and server is not None:
            first = (FIRST_VALUES - self._number, next(self._fresh))
            self._carry(
                server.process.name,
                server.process.do,
                lambda: server.create(call.key, first, call.placement_id),
            )
        elif record.content is ShardContent.PRESENT and server is not None:
            token = (self._number, next(self._tokens))

            def arrive() -> None:
                server.pushed(
                    token,
                    call.key,
                    record.epoch,
                    placement_id=call.placement_id,
                    update=call.update,
                    level=call.level,
                    answer=back,
                )

            def back(outcome: str) -> None:
                self._carry(server.process.name, lambda act: act(), lambda: note_outcome(outcome))

            def note_outcome(outcome: str) -> None:
                self._answered(call, attempt, outcome)

            self._carry(server.process.name, server.process.do, arrive)
            if chance.random() < 0.02 and call.update is not None:
                late = (self._number, next(self._tokens))
                # Sent twice; the duplicate arrives much later.
                setting.clock.later(
                    chance.random() * 5.0,
                    lambda: server.process.do(
                        lambda: server.pushed(
                            late,
                            call.key,
                            record.epoch,
                            placement_id=call.placement_id,
                            update=call.update,
                            level=call.level,
                            answer=lambda _: None,
                        )
                    ),
                )
            self._wait(call, attempt, server, timeout_s)
            return
        self._later(call, attempt, RETRY_S)

    def _wait(self, call: Call, attempt: int, server: "SimServer", left_s: float) -> None:
        """Send again after `left_s` without an answer, or once the server's process has ended."""

        def look() -> None:
            if call.attempt != attempt:
                return
            if left_s <= LOOKS_EACH_S or not server.process.alive:
                self._send(call)
            else:
                self._wait(call, attempt, server, left_s - LOOKS_EACH_S)

        self._setting.clock.later(LOOKS_EACH_S, look)

    def _carry(
        self, name: str, do: Callable[[Callable[[], None]], None], what: Callable[[], None]
    ) -> None:
        network = self._setting.network

        def arrive() -> None:
            if not network.is_cut(self.name, name):
                do(what)

        self._setting.clock.later(network.delay_s(self.name, name), arrive)

    def _later(self, call: Call, attempt: int, wait_s: float) -> None:
        self._setting.clock.later(
            wait_s, lambda: self._send(call) if call.attempt == attempt else None
        )

    def _answered(self, call: Call, attempt: int, outcome: str) -> None:
        if self.open.get(call.key) is not call:
            return
        if outcome == "acknowledged":
            del self.open[call.key]
            call.attempt = -1
            self.num_answered += 1
            self._next(call.key)
        elif call.attempt == attempt:
            if outcome == "no disk":
                call.level = AckLevel.REPLICATED
            call.attempt += 1
            self._later(call, call.attempt, RETRY_S)
