"""Models, and servers in miniature of the first (support/fake_sglang.py)."""

import pytest

from support.fake_sglang import FakeSGLang
from support.sglang_engines import make_models, open_engine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def fake(models):
    with FakeSGLang(models[0][1]) as server:
        yield server


@pytest.fixture(scope="module")
def steady(models):
    """Yield a server and its engine, for tests that change no weights."""
    with FakeSGLang(models[0][1]) as server:
        yield server, open_engine(server)
