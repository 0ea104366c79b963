"""Two builds of Shoal that meet in one cluster: the source as it is, and the release after it.

The next release is a copy of the packages. It speaks one more version of the protocol, each of its
messages has one more field, and it sets that field, and one in each JSON record, in all that it
sends and stores.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACKAGES = ("proto/shoal_proto", "client/shoal_client", "server/shoal_server", "worker/shoal")
NEW_FIELD = "string of_the_next_release = 8000;"


def environment(release: str, directory: Path) -> dict[str, str]:
    """Return the variables with which Python imports release `now` or `next`.

    `next` is built below the directory unless it exists.
    """
    if release == "now":
        return {}
    assert release == "next"
    built = directory / release
    if not built.exists():
        _build_next(built)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(built), os.environ.get("PYTHONPATH")]))}


def _build_next(target: Path) -> None:
    for package in PACKAGES:
        source = ROOT / package
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target / source.name, ignore=ignored)
    protocol = target / "shoal_proto" / "protocol.py"
    raised = re.compile(r"(?<=newest=)\d+")
    text, count = raised.subn(lambda found: str(int(found[0]) + 1), protocol.read_text())
    assert count == 1, "one range of versions is expected in protocol.py"
    protocol.write_text(text)
    protos = sorted((target / "shoal_proto" / "v1").glob("*.proto"))
    for proto in protos:
        opened = re.compile(r"^(\s*message \w+ \{)", re.MULTILINE)
        proto.write_text(opened.sub(rf"\1\n  {NEW_FIELD}\n", proto.read_text()))
    names = [str(proto.relative_to(target)) for proto in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", "--python_out=.", *names]
    subprocess.run(command, cwd=target, check=True, timeout=60)
    shutil.copy(HERE / "next_release" / "sitecustomize.py", target)
