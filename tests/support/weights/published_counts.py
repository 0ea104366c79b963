"""Scripts of a job whose published weights count its updates, and of readers that check them."""

RATE = 2.0**-10


def publishing_script(epochs: int, steps_per_epoch: int) -> str:
    """Make a script in which each gradient is 1 everywhere. Its argument is the strategy.

    Every weight of the version of step n is -n * RATE, so that a mixture of two versions shows.
    The script publishes after each step, runs slowly until the file `done` exists, and marks its
    last version.
    """
    return f"""
import pathlib, sys, time, shoal, torch
from torch import nn

done = pathlib.Path("done")

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 1031), nn.Linear(8, 5, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs):
        return self.wide(inputs).sum(1) + self.narrow(inputs).sum(1)

model = Counts()
optimizer = torch.optim.SGD(model.parameters(), lr={RATE})
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy=sys.argv[1])
    series = session.series("policy", keep=3)
    data = torch.ones(16 * {steps_per_epoch}, 8)
    for batch in session.batches(data, global_batch_size=16, epochs={epochs}):
        with session.step() as step:
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        if not step.committed:
            continue
        ticket = series.publish(metadata={{"by": session.rank}})
        if done.exists():
            session.stop("the file exists")
        time.sleep(0.1)
    version = series.publish(metadata={{"last": "yes"}}).wait("committed", timeout=60)
    print("ended at version", version.number, "of step", version.step, flush=True)
"""


def reading_script() -> str:
    """Make a reader's script, whose arguments are the series and the reader's name.

    For each version that it installs, the script prints number, step and digest, and if the values
    are those of that step. It ends with the version that is marked as the last.
    """
    return f"""
import sys, shoal
from shoal_proto.errors import VersionGone

with shoal.subscribe(sys.argv[1], reader=sys.argv[2]) as series:
    while True:
        version = series.wait(timeout=120)
        try:
            weights = series.fetch(version)
        except VersionGone:
            print("passed by", version.number, flush=True)
            continue
        values = {{value.item() for each in weights.values() for value in (each.min(), each.max())}}
        is_whole = values == {{-version.step * {RATE}}}
        series.installed(weights)
        print("installed", version.number, version.step, version.digest, is_whole, flush=True)
        if "last" in version.metadata:
            break
"""
