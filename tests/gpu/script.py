"""The training script that `shoal run` starts for a case: script.py DIRECTORY."""

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

# A script starts with its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    from gpu.member import train  # noqa: PLC0415 - found by the line above

    folder = Path(sys.argv[1])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    descriptor = os.open(folder / f"events-{os.getpid()}", flags, 0o644)

    def report(kind: str, /, **data: Any) -> None:
        line = json.dumps({"kind": kind, "told_s": time.monotonic(), **data})
        os.write(descriptor, (line + "\n").encode())

    train(report, pickle.loads((folder / "plan").read_bytes()))


if __name__ == "__main__":
    main()
