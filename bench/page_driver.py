"""Process that simulates members for bench/page.py: as for bench/membership.py, but the members
also become ready and report their health."""

import asyncio
import json
import math
import sys

import httpx
from member_driver import Driver, Played, Share, serve

from shoal_client.membership import member_events as ev
from shoal_proto.v1 import membership_pb2 as pb

AT_ONCE = 16


class ReportingDriver(Driver):
    async def ready(self) -> dict[str, float]:
        """Report all members of this process as ready."""
        width = asyncio.Semaphore(AT_ONCE)

        async def one(player: Played) -> None:
            async with width:
                record = pb.GenerationRecord.FromString(player.record)
                await self._do(player, ev.GenerationBroughtUp(record=record))

        await asyncio.gather(*(one(player) for player in self.players))
        return {"ready": float(len(self.players))}

    async def report(self, url: str, num_rounds: str) -> dict[str, float]:
        """Send `num_rounds` health reports of each member, with a falling loss; some members are
        slow."""
        width = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as http:
            for step in range(1, int(num_rounds) + 1):
                await asyncio.gather(*(self._one(http, width, p, step) for p in self.players))
        return {"rounds": float(num_rounds)}

    async def _one(
        self, http: httpx.AsyncClient, width: asyncio.Semaphore, player: object, step: int
    ) -> None:
        identity = player.core.identity  # type: ignore[attr-defined]
        number = int(identity.member_id.rpartition("-")[2])
        body = {
            "incarnation": identity.incarnation,
            "step": step * 10,
            "loss": math.exp(-step / 5) + number / 1e5,
            "step_time_s": 0.03 if number % 200 == 7 else 0.01,
            "samples_per_s": 640.0,
            "memory_bytes": 3 << 30,
            "device": "cuda:0",
            "course": {"num_steps": 1000},
        }
        async with width:
            path = f"/api/v1/jobs/{identity.spec.job}/members/{identity.member_id}/health"
            (await http.post(path, json=body)).raise_for_status()


if __name__ == "__main__":
    asyncio.run(serve(ReportingDriver, Share(**json.loads(sys.argv[1]))))
