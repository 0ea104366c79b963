"""Process that simulates thousands of members of one job; bench/membership.py starts it.

Each member attends by its own stream and makes its own calls; the members of a host share a
connection, as workers of one launcher could. The core of real workers decides what a member does;
only threads and back-off are left out.

Commands are lines on stdin, answers lines of JSON on stdout.
"""

import asyncio
import gc
import hashlib
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import grpc.aio
from light_member import Host

from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_client.membership.member_core import MemberCore
from shoal_proto import MAX_ANSWER_BYTES
from shoal_proto.deflated import unpack
from shoal_proto.incarnation import new_incarnation, public_id
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # Else all channels of a process share one connection.
    ("grpc.use_local_subchannel_pool", 1),
)
FIELDS = {
    "strategy": "ddp",
    "schema": "0" * 64,
    "optimizer": "1" * 64,
    "backend": "gloo",
    "torch": "2.9.0",
    "global_batch": "1024",
    "dataset": "2" * 64,
    "seed": "0",
}
MAX_ATTENDING = 64
"""Maximum number of members that wait for admission at a time."""
CALL_S = 60.0
MAX_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Share:
    """The members that one process simulates, as its command line names them."""

    coordinator: str
    job: str
    first: int
    """Number of the first member; the others follow."""
    num_members: int
    desired: int
    members_per_host: int = 8
    heartbeat_s: float = 1.0


@dataclass(kw_only=True)
class Played:
    """A simulated member."""

    core: MemberCore
    channel: grpc.aio.Channel
    stub: MembershipStub
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    record: bytes = b""
    """The committed record, roster included."""

    @property
    def member_id(self) -> str:
        return self.core.identity.member_id


class Driver:
    def __init__(self, share: Share) -> None:
        self._share = share
        self._hosts: dict[str, list[Played]] = {}
        self._attended: list[Played] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._attending = asyncio.Semaphore(MAX_ATTENDING)
        self._failures: list[str] = []
        self.fetched_by: dict[str, Host] = {}
        self._rosters: dict[str, pb.Roster] = {}
        """Rosters by digest."""
        self.lost: set[str] = set()
        """Names of members that this bench reported as lost."""
        self.num_beats = self.num_late_beats = self.num_failed_beats = 0
        for number in range(share.first, share.first + share.num_members):
            self._hosts.setdefault(f"host-{number // share.members_per_host}", []).append(
                self._player(number)
            )

    def _player(self, number: int) -> Played:
        share = self._share
        host = number // share.members_per_host
        info = pb.MemberInfo(
            host=f"host-{host}",
            pid=1000 + number,
            address=f"10.{host // 250}.{host % 250}.1",
            device="cpu",
            torch_version="2.9.0",
            shoal_version="0",
        )
        if number % share.members_per_host == 0 or number == share.first:
            self._channel = grpc.aio.insecure_channel(share.coordinator, OPTIONS)
        incarnation = new_incarnation()
        spec = pb.JobSpec(
            job=share.job, min_members=1, max_members=share.desired, desired_members=share.desired
        )
        identity = Identity(
            spec=spec,
            member_id=f"member-{number:05d}",
            incarnation=incarnation,
            public_id=public_id(incarnation),
            info=info,
        )
        channel, stub = self._channel, MembershipStub(self._channel)
        return Played(core=MemberCore(identity), channel=channel, stub=stub)

    @property
    def players(self) -> list[Played]:
        return [player for players in self._hosts.values() for player in players]

    # --- commands ---

    async def attend(self) -> dict[str, float]:
        """Let all members attend. A host sends heartbeats once its first member is admitted."""
        start_s = time.monotonic()
        for number, (host, players) in enumerate(self._hosts.items()):
            self._start(self._beat(players, number / len(self._hosts)), f"beat-{host}")
            for player in players:
                await self._attending.acquire()
                self._start(self._attend(player), player.member_id)
        await asyncio.gather(*(player.admitted.wait() for player in self.players))
        return {"attend_s": time.monotonic() - start_s}

    async def propose(self, which: str) -> dict[str, float]:
        """Send the proposals of all but the last member of this process ("others"), of the last
        ("last"), or of all."""
        players = self.players
        chosen = {"others": players[:-1], "last": players[-1:], "all": players}[which]
        started_s = time.monotonic()
        width = asyncio.Semaphore(MAX_ATTENDING)

        async def one(player: Played) -> None:
            async with width:
                proposal = pb.Proposal(fields=FIELDS, synchronous=True)
                await self._do(player, ev.ProposalMade(proposal=proposal))

        await asyncio.gather(*(one(player) for player in chosen))
        return {"started_s": started_s}

    async def committed(self) -> dict[str, object]:
        """Wait until all these members have the committed record. Return the time at which the last
        of them received it, and the distinct hashes of their records."""
        await asyncio.gather(*(player.committed.wait() for player in self.players))
        held_s = time.monotonic()
        hashes = sorted({hashlib.sha256(player.record).hexdigest() for player in self.players})
        num_held = sum(1 for player in self.players if player.record)
        return {"held_s": held_s, "records": hashes, "num_held": num_held}

    async def state(self) -> dict[str, object]:
        """Return the first MAX_SHOWN errors, the numbers of heartbeats since the last call, and the
        CPU time of this process."""
        sent, late, failed = self.num_beats, self.num_late_beats, self.num_failed_beats
        self.num_beats = self.num_late_beats = self.num_failed_beats = 0
        shown = self._failures[:MAX_SHOWN]
        return {
            "failures": shown,
            "beats": sent,
            "late_beats": late,
            "failed_beats": failed,
            "cpu_s": time.process_time(),
        }

    # --- one member ---

    async def _attend(self, player: Played) -> None:
        try:
            await self._do(player, ev.JoinWanted())
            raise RuntimeError(f"the stream of {player.member_id} ended")
        finally:
            if not player.admitted.is_set():
                self._attending.release()

    async def _do(self, player: Played, event: ev.Event) -> None:
        """Handle an event, and carry out its effects."""
        due = deque(player.core.step(event, time.monotonic()))
        while due:
            effect = due.popleft()
            if isinstance(effect, ev.CallLeader):
                method = type(effect.request).__name__.removesuffix("Request")
                await getattr(player.stub, method)(effect.request, timeout=CALL_S)
                due.extend(player.core.step(ev.CallEnded(call=effect), time.monotonic()))
            elif isinstance(effect, ev.ValidateRoster):
                number, digest = effect.prepare.roster.generation, effect.digest
                if digest != effect.prepare.digest:
                    raise RuntimeError("a roster has another digest than its notice names")
                judged = ev.RosterValidated(generation=number, digest=digest)
                due.extend(player.core.step(judged, time.monotonic()))
            elif isinstance(effect, ev.OpenStream):
                async for notice in player.stub.Attend(effect.request):
                    await self._take(player, notice)
            elif isinstance(effect, ev.RaiseError | ev.BreakGeneration):
                raise RuntimeError(f"{player.member_id}: {effect}")

    async def _take(self, player: Played, notice: pb.Notice) -> None:
        kind = notice.WhichOneof("kind")
        if kind == "refused" or notice.outcome.verdict == pb.VERDICT_ABORTED:
            raise RuntimeError(f"{kind}: {notice.reason}")
        await self._complete(player, notice)
        await self._do(player, ev.NoticeReceived(notice=notice))
        if not player.admitted.is_set():
            player.admitted.set()
            self._attended.append(player)
            self._attending.release()
        now_s = time.monotonic()
        entered = player.core.next_generation(player.core.track.generation, now_s, now_s)
        if isinstance(entered, ev.BringUpGeneration):
            player.record = entered.record.SerializeToString(deterministic=True)
            player.committed.set()

    async def _complete(self, player: Played, notice: pb.Notice) -> None:
        """Add the roster if the notice leaves it out."""
        kind = notice.WhichOneof("kind")
        if kind not in ("prepare", "outcome"):
            return
        shown = getattr(notice, kind)
        if shown.roster.entries:
            self._rosters[shown.digest] = shown.roster
            return
        if shown.digest not in self._rosters:
            host = self.host_of(player)
            await host.get(self._share.job, shown.digest, player.stub)
            self._rosters[shown.digest] = unpack(pb.Roster, host.packed)
        shown.roster.CopyFrom(self._rosters[shown.digest])

    def host_of(self, player: Played) -> Host:
        """Return the state that the members of the player's host share."""
        return self.fetched_by.setdefault(player.core.identity.info.host, Host())

    async def _beat(self, players: list[Played], phase: float) -> None:
        """Send one heartbeat call for all admitted members of the host."""
        every_s = self._share.heartbeat_s
        await asyncio.gather(*(player.admitted.wait() for player in players[:1]))
        due_s = time.monotonic() + phase * every_s
        while True:
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            due_s += every_s
            beats = [
                pb.Beat(token=player.core.token, step=player.core.track.step)
                for player in players
                if player.admitted.is_set()
            ]
            try:
                reply = await players[0].stub.Heartbeat(
                    pb.HeartbeatRequest(beats=beats), timeout=CALL_S
                )
            except grpc.aio.AioRpcError:
                # Like a launcher: the next heartbeat has the same content.
                self.num_failed_beats += 1
                continue
            self.num_beats += len(beats)
            self.num_late_beats += time.monotonic() > due_s
            for beat, each in zip(beats, reply.replies, strict=True):
                if each.HasField("error") and beat.token.member_id not in self.lost:
                    raise RuntimeError(f"a beat was refused: {each.error}")

    def _start(self, work: "asyncio.coroutines.Coroutine[None, None, None]", name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(f"{task.get_name()}: {error!r}"[:500])
            if len(self._failures) <= MAX_SHOWN:
                print(self._failures[-1], file=sys.stderr, flush=True)


async def serve(kind: type[Driver], share: Share) -> None:
    # All members live as long as this process: a garbage collection would find nothing.
    gc.disable()
    driver = kind(share)
    stdin = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while line := await stdin.readline():
        command, *arguments = line.decode().split()
        answer = await getattr(driver, command)(*arguments)
        print(json.dumps(answer), flush=True)


def main() -> None:
    asyncio.run(serve(Driver, Share(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
