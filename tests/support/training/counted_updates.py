"""A script for `shoal run` whose weights count the updates that were applied."""


def counting_script(epochs: int, steps_per_epoch: int, rate: float) -> str:
    """Make a script in which each gradient is 1 everywhere, so that the weights count the updates.

    Its argument is the strategy. It reports every tenth step, and runs slowly until the file `done`
    exists. At its end it prints the number of its steps, and the numbers of updates by its smallest
    and by its largest weight.
    """
    return f"""
import pathlib, sys, time, shoal, torch
done, steps = pathlib.Path("done"), 0
model = torch.nn.Linear(8, 8, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
with shoal.join() as session:
    # Without a policy for staleness, so that the weights count the updates here too.
    strategy = shoal.AsyncSGD(staleness="none") if sys.argv[1] == "async-sgd" else sys.argv[1]
    model, optimizer = session.distribute(model, optimizer, strategy=strategy)
    data = torch.ones(32 * {steps_per_epoch}, 8)
    for batch in session.batches(data, global_batch_size=32, epochs={epochs}):
        with session.step():
            session.backward(model(batch.inputs).sum() / len(batch.inputs))
        steps += 1
        if steps % 10 == 0:
            print("stepped on", steps, flush=True)
        if not done.exists():
            time.sleep(0.04)
(weight,) = model.parameters()
print("did", steps, (-weight.min() / {rate}).item(), (-weight.max() / {rate}).item(), flush=True)
"""
