"""The scripts of the tutorials, run on one cluster as a reader runs them; they print what the pages
say."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.docs.pages import DOCS, blocks
from support.docs.scripts import work
from support.processes.forking import forked

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

TITLE = re.compile(r"# (\w+\.py)\n")
RUN = re.compile(r"^shoal run -n (\d) (\w+\.py)(.*)$", re.MULTILINE)
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Tutorial:
    """A page: its script, the calls of the script, and the lines that they print."""

    name: str
    script: str
    calls: Sequence[tuple[int, list[str]]]
    """Number of workers, and arguments."""
    printed: Sequence[str]


def tutorials() -> Iterator[Tutorial]:
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        for block in blocks(page, "python"):
            if title := TITLE.match(block):
                name = title.group(1)
                typed = "".join(blocks(page, "sh"))
                calls = [
                    (int(n), rest.split())
                    for n, called, rest in RUN.findall(typed)
                    if called == name
                ]
                printed = "".join(blocks(page, "text")).splitlines()
                yield Tutorial(name, block, calls, printed)


TUTORIALS = list(tutorials())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(LocalClusterConfig(directory=directory)) as running:
        yield running


def shape(line: str) -> str:
    """A line without its figures, which the last bits of a sum may change."""
    return re.sub(r"[\d.]+", "0", line)


def steps(text: str) -> set[str]:
    """The numbers of steps in the text, which are exact."""
    return set(re.findall(r"\d+(?= steps)|(?<=step )\d+|(?<= to )\d+", text))


def test_each_tutorial_has_a_script_that_is_run() -> None:
    names = [tutorial.name for tutorial in TUTORIALS]
    assert len(names) == len(set(names)) >= 6
    assert [each.name for each in TUTORIALS if not each.calls or not each.printed] == []


@pytest.mark.nightly
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda each: each.name)
def test_a_tutorial_prints_what_its_page_says(
    cluster: LocalCluster, tmp_path: Path, tutorial: Tutorial
) -> None:
    """The calls run in turn, with the number of workers that each gives. Numbers of steps must be
    equal, other lines equal except for their figures."""
    script, output = tmp_path / tutorial.name, tmp_path / "output"
    script.write_text(tutorial.script)
    for number, (num_workers, arguments) in enumerate(tutorial.calls):
        name = f"{script.stem}-{number}"
        workers = []
        for index in range(num_workers):
            environment = {
                "SHOAL_COORDINATOR": cluster.coordinator,
                "SHOAL_JOB": name,
                "SHOAL_MEMBER_ID": f"{name}-{index}",
                "SHOAL_DESIRED_MEMBERS": str(num_workers),
                "SHOAL_LOCAL_RANK": str(index),
                "SHOAL_LOCAL_WORLD_SIZE": str(num_workers),
                "OMP_NUM_THREADS": "1",
            }
            workers.append(
                forked.Process(target=work, args=(str(script), arguments, environment, str(output)))
            )
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(DEADLINE_S)
            assert worker.exitcode == 0
    lines = [line for line in output.read_text().splitlines() if "[" not in line]
    assert {shape(line) for line in lines} == {shape(line) for line in tutorial.printed}
    assert steps("\n".join(tutorial.printed)) == steps("\n".join(lines))


@pytest.mark.nightly
def test_the_first_tutorial_runs_by_itself(tmp_path: Path) -> None:
    """`python train_ddp.py` without a cluster trains the same number of steps, and logs that it
    trains alone."""
    script = tmp_path / "train_ddp.py"
    tutorial = next(each for each in TUTORIALS if each.name == script.name)
    script.write_text(tutorial.script)
    own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    run = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=own,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    last = run.stdout.splitlines()[-1]
    assert shape(last) in {shape(line) for line in tutorial.printed}
    assert steps(last) == steps("\n".join(tutorial.printed))
    assert (run.stdout + run.stderr).count("training_alone") == 1
    assert (tmp_path / "digits.pt").exists()
