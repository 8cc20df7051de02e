"""Two ranks and two models for all tests of this folder: one start of a second process."""

import pytest

from support.models import make
from support.rank_cases import joined


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    with joined(2, tmp_path_factory.mktemp("rendezvous")) as others:
        yield others


@pytest.fixture(scope="package")
def folders(tmp_path_factory):
    made = {}
    for name in ("qwen3_moe", "deepseek_v3"):
        made[name] = tmp_path_factory.mktemp(name)
        make(name).save_pretrained(made[name])
    return made
