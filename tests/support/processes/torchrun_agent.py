"""A process that asks for rendezvous as torchrun's agent does, but has no workers.

Run with the endpoint and the run id; prints a line of JSON for each generation it enters.
"""

import json
import sys
import time

from torch.distributed.elastic.rendezvous import RendezvousParameters

from shoal.torchrun import create_handler

MONITOR_INTERVAL_S = 0.05


def main() -> None:
    endpoint, run_id = sys.argv[1:]
    handler = create_handler(
        RendezvousParameters("shoal", endpoint, run_id, 1, 2, last_call_timeout="20")
    )
    while True:
        info = handler.next_rendezvous()
        print(json.dumps({"rank": info.rank, "world": info.world_size}), flush=True)
        while handler.num_nodes_waiting() == 0:
            time.sleep(MONITOR_INTERVAL_S)  # the agent polls, too


if __name__ == "__main__":
    main()
