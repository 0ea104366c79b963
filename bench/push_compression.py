"""Duration of a step of `async-sgd` on a network of 100 Mb/s, by compression of its gradients.

    make bench NAME=push_compression
    sudo .venv/bin/python bench/push_compression.py int8     # one compression, beside none

One worker trains an MLP of 4.5 MB on scikit-learn's digits under `shoal run`, with its parameter
server. All processes are in a separate network namespace, whose loopback carries 100 Mb/s in all,
for pushes and for the returned values, which are not compressed. Needs root, `ip`, `tc` and
`unshare`.

`push_step_{name}`: median seconds of a step. `push_wire_{name}`: bytes a step on that network, as
the kernel counts them. `push_sent_{name}`: bytes a step of gradients as they were pushed. The
peer of each figure: the same without compression.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from rows import Row, publish

from shoal.compression import COMPRESSIONS

MEGABITS = 100
NUM_STEPS = 20
LIMIT_S = 600.0
NONE = "none"
SCRIPT = Path(__file__).parent / "training" / "on_slow_push.py"
SHAPE = (
    "ip link set lo mtu 1500 up && "
    f"tc qdisc add dev lo root tbf rate {MEGABITS}mbit burst 64kb latency 400ms && "
    'exec "$@"'
)


def measure(name: str) -> dict[str, float]:
    """Figures of one training."""
    train = [sys.executable, "-m", "shoal_client", "run", "-n", "1", str(SCRIPT), name]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", SHAPE, "sh", *train, str(NUM_STEPS)],
        env={**os.environ, "SHOAL_TRANSPORT": "tcp"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not found:
        raise SystemExit(f"{name} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(found[-1][found[-1].index("{") :])
    print(f"{name}: {figures}", flush=True)
    return figures


def main() -> None:
    if os.geteuid() != 0:
        raise SystemExit(f"Shaping a network needs root:\n    sudo {sys.executable} {__file__}")
    plain = measure(NONE)
    rows = []
    for name in sys.argv[1:] or COMPRESSIONS:
        found = measure(name)
        rows += [
            Row(
                metric=f"push_{what}_{name}",
                value=found[what],
                unit="s" if what == "step" else "bytes",
                runs=NUM_STEPS,
                peer=NONE,
                peer_value=plain[what],
            )
            for what in ("step", "wire", "sent")
        ]
    publish("push_compression", rows)


if __name__ == "__main__":
    main()
