"""The walks of docs/architecture.md: a real run passes the places that they name, in their
order."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from support.docs.pages import DOCS, ROOT
from support.docs.walks import Passage, Place, Stamp, Stamps, exists, named, walks
from support.processes.commands import Shoal, finish, shoal_command

__all__ = ["shoal_command"]

PAGE = DOCS / "architecture.md"
STEP, LOSS, PUSH = WALKS = ("Walk: a step of ddp", "Walk: a loss", "Walk: a push of async-sgd")
SESSION_STEP = Place("worker/shoal/session/session.py", "Session.step")
PAGES = (PAGE, DOCS / "extending.md", DOCS / "glossary.md", ROOT / "CONTRIBUTING.md")
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import torch

import shoal

strategy, stamps, waits = sys.argv[1], Path(sys.argv[2]), Path("waits")
torch.manual_seed(1)
data = (torch.randn(64, 8), torch.randint(0, 4, (64,)))
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy=strategy)
    for batch in session.batches(data, global_batch_size=8):
        with session.step():
            if strategy == "ddp" and batch.step == 4 and session.world_size == 2:
                if session.rank == 1:
                    while not waits.exists():
                        time.sleep(0.01)
                    with stamps.open("a") as file:
                        print(time.monotonic_ns(), os.getpid(), sys.argv[0], "killed", file=file)
                    os.kill(os.getpid(), signal.SIGKILL)
                waits.touch()
                # Else this member might notice the broken connection before the coordinator's
                # notice.
                while " GlooGroup.cut\\n" not in stamps.read_text():
                    time.sleep(0.01)
            loss = torch.nn.functional.cross_entropy(model(batch.inputs), batch.targets)
            session.backward(loss)
    print("steps", session.step_number)
"""


def trained(
    commands: Shoal, directory: Path, strategy: str, *options: str, places: Sequence[Place]
) -> tuple[Passage, int]:
    """The entries of these places in a run, and the time at which a worker killed itself, or 0."""
    # On one host, a record lies in the backup's memory and is acknowledged before the backup reads
    # it.
    stamps = Stamps(directory, places, is_apart=strategy == "async-sgd")
    (directory / "train.py").write_text(SCRIPT)
    run = commands.start(
        *("run", *options, "train.py", strategy, str(stamps.path)),
        environment={**stamps.environment, "OMP_NUM_THREADS": "1"},
    )
    code, output = finish(run)
    assert code == 0, output
    assert "steps 8" in output
    found = stamps.all()
    killed_ns = next((each.at_ns for each in found if each.place.name == "killed"), 0)
    return Passage([each for each in found if each.place.name != "killed"]), killed_ns


def step_of(passage: Passage, number: int, *, alone: bool = False) -> Passage:
    """The entries of all processes within one step of the first worker; `alone`: only that
    worker's."""
    begins = [each for each in passage.stamps if each.place == SESSION_STEP]
    pid = begins[0].pid
    own = [each.at_ns for each in begins if each.pid == pid]
    found = passage.between(own[number], own[number + 1])
    return Passage([each for each in found.stamps if each.pid == pid]) if alone else found


def check(passage: Passage, walk: Sequence[Place]) -> None:
    """Check that the run passes the walk, and would not if two neighbours were exchanged. A pair is
    exempt if its first place is entered more than once: it may be both before and after the second.
    """
    assert passage.missed(walk) == ""
    entered = Counter(each.place for each in passage.stamps)
    loose = [
        f"{first} and {second}"
        for i, (first, second) in enumerate(pairwise(walk))
        if entered[first] == 1 and not passage.missed([*walk[:i], second, first, *walk[i + 2 :]])
    ]
    assert loose == [], "the run passes these in either order, so their order says nothing"


def test_the_page_has_these_walks() -> None:
    found = walks(PAGE)
    assert tuple(found) == WALKS
    assert {heading: 20 <= len(lines) <= 35 for heading, lines in found.items()} == dict.fromkeys(
        WALKS, True
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_that_a_page_names_exists(page: Path) -> None:
    """Files and the functions, classes or constants that a page names in them."""
    assert [str(place) for place in named(page) if not exists(place)] == []


def test_a_walk_that_a_run_does_not_pass_is_noticed() -> None:
    """Report a line out of order, and one that nothing enters; a line may be passed repeatedly."""
    first, second, third = (Place("a.py", name) for name in "fgh")
    passage = Passage([Stamp(at, 1, place) for at, place in enumerate((first, second, first))])
    assert passage.missed([first, second, first]) == ""
    assert passage.missed([second, first]) == ""
    assert passage.missed([second, first, second]) == "line 3, a.py g, is not entered after line 2"
    assert passage.missed([third]) == "line 1, a.py h, is not entered"


@pytest.mark.long
def test_a_run_passes_the_walks_of_a_step_and_of_a_loss(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """A launcher, a coordinator and two workers run; one worker kills itself in step 4."""
    step, loss = walks(PAGE)[STEP], walks(PAGE)[LOSS]
    options = ("-n", "2", "--ps", "0", "--max-restarts", "0")
    passage, killed_ns = trained(
        shoal_command, tmp_path, "ddp", *options, places=[*step, *loss, SESSION_STEP]
    )
    check(step_of(passage, 2, alone=True), step)
    ends = (each.at_ns for each in passage.stamps if each.place == loss[-1])
    check(passage.between(killed_ns, next(at for at in ends if at > killed_ns) + 1), loss)


@pytest.mark.long
def test_a_run_passes_the_walk_of_a_push(shoal_command: Shoal, tmp_path: Path) -> None:
    """Primary and backup of the only shard reach each other as if they were on different hosts; one
    worker pushes."""
    push = walks(PAGE)[PUSH]
    options = ("-n", "1", "--ps", "2")
    passage, _ = trained(
        shoal_command, tmp_path, "async-sgd", *options, places=[*push, SESSION_STEP]
    )
    check(step_of(passage, 3), push)
