"""Wait until the status stream shows a member on standby."""

import json

import httpx

DEADLINE_S = 60.0


def await_standby(http_url: str, job: str, member_id: str) -> None:
    """Return once the stream shows the member standing by."""
    params = {"job": job}
    with (
        httpx.Client(timeout=DEADLINE_S, trust_env=False) as client,
        client.stream("GET", f"{http_url}/api/v1/stream", params=params) as response,
    ):
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            if f'"{member_id}"' in line and "standing by" in json.dumps(json.loads(line[5:])):
                return
    raise AssertionError(f"{member_id} never stood by")


__all__ = ["await_standby"]
