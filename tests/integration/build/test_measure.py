"""A measurement of a model that cannot be replayed ends before its weights are loaded."""

import pytest

from onepolicy.build.measure import build_measure_components, measure_config
from onepolicy.config import UsageError
from support.models import changed
from support.planted_engine import SETTINGS


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits=True"),
        ("qwen3_dense", {}, "replay.mode"),
    ],
)
def test_a_model_that_cannot_be_replayed(name, changes, words, tmp_path, monkeypatch):
    """The folder has no weights, so that whatever loads them fails first."""
    monkeypatch.setattr("onepolicy.build.measure.is_moe", lambda config: True)
    changed(name, **changes).save_pretrained(tmp_path)
    config = measure_config({}, [f"model.path={tmp_path}", *SETTINGS], None)
    with pytest.raises(UsageError, match=words):
        build_measure_components(config)
