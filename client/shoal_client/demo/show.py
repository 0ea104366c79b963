"""The demo on a terminal: progress bars while it runs, a table at the end."""

from collections.abc import Sequence
from types import TracebackType

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shoal_client.demo.plan import MIN_ACCURACY, DemoPlan, Outcome
from shoal_client.demo.training import LiveProgress


class Bars:
    """A progress bar for each training; without a terminal, only lines for events."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[news]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._news = ""

    def __enter__(self) -> "Bars":
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False)

    def follow(self, plan: DemoPlan) -> "Bar":
        """Add the bar of one training."""
        task = self._progress.add_task(plan.strategy, total=plan.num_samples, news="starting")
        return Bar(self, self._progress, task, plan)


class Bar:
    def __init__(self, bars: Bars, progress: Progress, task: int, plan: DemoPlan) -> None:
        self._bars = bars
        self._progress = progress
        self._task = task
        self._plan = plan
        self._killed = ""

    def __call__(self, standing: LiveProgress) -> None:
        """Show the progress of the training."""
        if standing.killed and not self._killed:
            self._killed = standing.killed
            self._bars.print_line(
                f"[yellow]{self._plan.strategy}: SIGKILL to {standing.killed} "
                f"at step {standing.steps}[/yellow]; another worker is started instead"
            )
        news = f"{standing.steps} steps, {standing.workers} workers"
        # rich does not export the type of a task's id.
        self._progress.update(self._task, completed=standing.samples, news=news)  # type: ignore[arg-type]


def table(outcomes: Sequence[Outcome]) -> Table:
    """The figures of all trainings."""
    shown = Table(
        box=SIMPLE,
        padding=(0, 0, 0, 1),
        title="scikit-learn's digits, one of three workers killed during training",
        caption="accuracy: on the images held out\n"
        "recovery: seconds from the kill to the next step that a survivor completed\n"
        "lost, repeated: samples; newcomer's: steps by the replacement worker",
    )
    columns = ("strategy", "accuracy", "steps", "samples/s", "recovery", "lost", "repeated")
    for index, name in enumerate((*columns, "newcomer's")):
        shown.add_column(name, justify="right" if index else "left", no_wrap=True)
    for each in outcomes:
        mark = "green" if each.good else "red"
        shown.add_row(
            each.strategy,
            f"[{mark}]{each.test_accuracy:.3f}[/{mark}]",
            str(each.steps),
            f"{each.samples_per_s:,.0f}",
            f"{each.recovery_s:.3f}",
            str(each.samples_lost),
            str(each.samples_repeated),
            str(each.replacement_steps),
        )
    return shown


def summary(outcomes: Sequence[Outcome]) -> str:
    """A sentence for all trainings."""
    bad = [each for each in outcomes if not each.good]
    if not bad:
        return f"both at {MIN_ACCURACY:.0%} or better, and no process is left behind"
    names = ", ".join(f"{each.strategy} {each.test_accuracy:.3f}" for each in bad)
    return f"below {MIN_ACCURACY:.0%}: {names}"
