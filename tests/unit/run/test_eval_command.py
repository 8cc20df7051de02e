"""An evaluation ends with the weights that it began with, or says so."""

import pytest

from onepolicy.config import EvalConfig, TrainingError, resolve
from onepolicy.run import eval_command

MINIMAL = {"out": "o", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}


class Engine:
    def __init__(self, error=None):
        self.error = error

    async def reset_cache(self):
        if self.error is not None:
            raise self.error


def test_a_server_that_got_other_weights_meanwhile_has_no_accuracy(monkeypatch):
    async def evaluate(*asked, **options):
        return {"eval/greedy": 0.5}

    monkeypatch.setattr(eval_command, "evaluate", evaluate)
    config = resolve(MINIMAL)
    assert isinstance(config.eval, EvalConfig)
    assert eval_command._evaluate_with_bar(config, Engine(), None, ()) == {"eval/greedy": 0.5}
    with pytest.raises(TrainingError, match="other weights"):
        eval_command._evaluate_with_bar(config, Engine(TrainingError("other weights")), None, ())
