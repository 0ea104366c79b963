"""Process that simulates many members of a job of thousands; bench/generation.py starts it.

Each member attends by its own stream and makes its own calls, over its host's connection; a roster
is fetched once per host. See `light_member`.
"""

import asyncio
import json
import os
import struct
import sys
import time

from light_member import LightMember, Rosters
from member_driver import CALL_S, Driver, Played, Share, serve

from shoal.backends.network.compact_addresses import compact
from shoal_client.membership import member_events as ev
from shoal_proto.deflated import unpack
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1 import rendezvous_pb2
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub

ADDRESS_BYTES = 154
"""Bytes that a rank of Gloo (torch 2.13) sets, besides eight bytes for each rank."""
WIDTH = 64
"""Maximum number of calls of one kind in progress at a time."""


class LargeDriver(Driver):
    def __init__(self, share: Share) -> None:
        self._seen = Rosters()
        self._holding: dict[int, set[str]] = {}
        self._held: dict[int, asyncio.Event] = {}
        self.held_s: dict[int, float] = {}
        """Time at which the last of these members received the record, by generation."""
        super().__init__(share)

    def _player(self, number: int) -> Played:
        player = super()._player(number)
        player.core = LightMember(player.core.identity)  # type: ignore[assignment]
        return player

    # --- commands ---

    async def hold(self, generation: str) -> dict[str, object]:
        """Wait until all these members have the generation's record. Return the time at which the
        last of them received it, and the distinct records."""
        number = int(generation)
        await self._held.setdefault(number, asyncio.Event()).wait()
        records = {player.record.hex() for player in self.players}
        return {"held_s": self.held_s[number], "records": sorted(records)}

    async def ready(self) -> dict[str, float]:
        """Report all members of this process as ready, and return how long that took."""
        started_s = time.monotonic()
        width = asyncio.Semaphore(WIDTH)

        async def one(player: Played) -> None:
            async with width:
                record = player.core.record  # type: ignore[attr-defined]
                await self._do(player, ev.GenerationBroughtUp(record=record))

        await asyncio.gather(*(one(player) for player in self.players))
        return {"ready_s": time.monotonic() - started_s}

    async def lose(self) -> dict[str, float]:
        """Report, as a launcher, that the last member's process has exited."""
        player = self.players[-1]
        self.lost.add(player.member_id)
        # The host's heartbeats leave this member out.
        for players in self._hosts.values():
            if player in players:
                players.remove(player)
        info = player.core.identity.info
        started_s = time.monotonic()
        await player.stub.ReportExit(
            pb.ReportExitRequest(
                job=self._share.job,
                member_id=player.member_id,
                pid=info.pid,
                host=info.host,
                exit_code=-9,
            ),
            timeout=CALL_S,
        )
        return {"started_s": started_s}

    async def rendezvous(self, form: str, world_size: str) -> dict[str, float]:
        """Set the addresses that Gloo's ranks set, and read the addresses of all ranks. Returns the
        bytes set and answered, and the time at which the last rank had all addresses. `form`:
        "compact", read once per host; "plain", not compacted, read by each rank."""
        size, num_bytes, set_bytes = int(world_size), 0, 0
        readers = {players[0].member_id for players in self._hosts.values()}
        unpacked: set[bytes] = set()
        numbers = struct.pack(f"<{size}q", *range(size))
        keys = [f"{form}/{rank}" for rank in range(size)]

        async def one(rank: int, player: Played) -> None:
            nonlocal num_bytes, set_bytes
            stub = RendezvousStub(player.channel)
            value = os.urandom(ADDRESS_BYTES // 8).ljust(ADDRESS_BYTES, b"\0") + numbers
            value = compact(value) if form == "compact" else value
            set_bytes += len(value)
            pair = rendezvous_pb2.StorePair(key=keys[rank], value=value)
            token = player.core.token
            await stub.Set(rendezvous_pb2.StoreSetRequest(token=token, pairs=[pair]))
            if form == "compact" and player.member_id not in readers:
                return
            asks = rendezvous_pb2.StoreGetRequest(token=token, keys=keys, timeout_s=CALL_S)
            reply = await stub.Get(asks)
            num_bytes += reply.ByteSize()
            # This process unpacks a reply once for all its ranks.
            if reply.deflated not in unpacked:
                whole = reply
                if reply.deflated:  # a small reply is sent as it is
                    whole = unpack(rendezvous_pb2.StoreReply, reply.deflated)
                if len(whole.values) != size:
                    raise RuntimeError("not all values were received")
                unpacked.add(reply.deflated)

        first = self._share.first
        await asyncio.gather(*(one(first + n, player) for n, player in enumerate(self.players)))
        return {"num_bytes": num_bytes, "set_bytes": set_bytes, "ended_s": time.monotonic()}

    async def fetched(self) -> dict[str, int]:
        """Bytes of rosters that all hosts fetched since the last call."""
        num_bytes = sum(host.num_bytes for host in self.fetched_by.values())
        for host in self.fetched_by.values():
            host.num_bytes = 0
        return {"num_bytes": num_bytes}

    # --- one member ---

    async def _attend(self, player: Played) -> None:
        try:
            await super()._attend(player)
        except RuntimeError:
            if player.member_id not in self.lost:
                raise

    async def _take(self, player: Played, notice: pb.Notice) -> None:
        kind = notice.WhichOneof("kind")
        member: LightMember = player.core  # type: ignore[assignment]
        if not player.admitted.is_set():
            player.admitted.set()
            self._attended.append(player)
            self._attending.release()
        if kind == "refused":
            raise RuntimeError(f"refused: {notice.reason}")
        if kind == "prepare":
            digest, host = notice.prepare.digest, self.host_of(player)
            if not notice.prepare.roster.entries:
                await host.get(self._share.job, digest, player.stub)
            names = self._seen.members(notice.prepare, host)
            if names.get(player.member_id) != member.identity.public_id:
                raise RuntimeError("a member got a roster without itself")
            number = notice.prepare.roster.generation
            await self._do(player, ev.RosterValidated(generation=number, digest=digest))
        elif kind == "outcome" and notice.outcome.verdict == pb.VERDICT_COMMITTED:
            self._hold(player, member, notice.outcome)
        elif kind == "break":
            await self._do(player, ev.TrainerStopped(step=5, has_state=True))

    def _hold(self, player: Played, member: LightMember, record: pb.GenerationRecord) -> None:
        if record.digest != member.accepted:
            raise RuntimeError("the committed record is not of the roster that a member accepted")
        number = record.roster.generation
        member.record, member.track.generation = record, number
        player.record = record.SerializeToString(deterministic=True)
        holding = self._holding.setdefault(number, set())
        holding.add(player.member_id)
        if len(holding) == len(self.players):
            self.held_s[number] = time.monotonic()
            self._held.setdefault(number, asyncio.Event()).set()


def main() -> None:
    asyncio.run(serve(LargeDriver, Share(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
