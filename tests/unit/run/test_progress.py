"""What the bars of a run in a terminal show."""

from io import StringIO

from rich.progress import Progress

from onepolicy.console import Console
from onepolicy.run.train_command import TerminalProgress


def test_the_bars_follow_the_steps_and_the_phase():
    console = Console(file=StringIO(), force_terminal=True, color_system=None, width=80)
    bars = Progress(disable=True)
    progress = TerminalProgress(console, bars, 5, first=2)
    steps, phase = bars.tasks
    assert (steps.completed, steps.total, phase.visible) == (2, 5, False)
    advance = progress.phase("rollout", 8)
    advance()
    assert (phase.description, phase.completed, phase.total) == ("rollout", 1, 8)
    assert phase.visible
    progress.step(3, {"train/reward": 0.5, "mismatch/k3": 1e-4, "time/rollout": 2.0})
    assert (steps.completed, steps.fields["shown"]) == (3, "reward 0.50  k3 1e-4")
    assert not phase.visible
    assert console.file.getvalue() == ""
    progress.step(4, {"train/reward": 0.75, "eval/greedy": 0.25, "eval/length": 9.0})
    assert steps.completed == 4
    printed = " ".join(console.file.getvalue().split())
    assert printed == "step 4 reward 0.75 eval/greedy 0.25"
