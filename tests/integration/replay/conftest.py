"""A tiny model and its routers."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers
from support.replay_models import build


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return bind_routers(model)
