"""The secret between a run and its server: it is found, and no error repeats it."""

import asyncio
import os
import traceback
from itertools import product

import pytest

from onepolicy.config import TrainingError, UsageError
from onepolicy.config.serve import ServeConfig
from onepolicy.launch.ray.connect import prepare_environment
from onepolicy.rollout.remote import token
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.remote.token import create_token_file, find_token, remove_token_file
from onepolicy.rollout.vllm import serve
from support.http_server import Reply, Server

SECRET = "hunter2-not-to-be-seen"
ENDS = ("\r", "\n", "\r\n", "\x01", " x", "é", "\u2028", "\x7f", "\t", "\udce9")
BAD = [*(SECRET + end for end in ENDS), f"\n{SECRET}", " "]


def served(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name)
    settings = {"max_len": 8, "vocab": 8, "return_routes": False, "cpu": True}
    serve.run_server(ServeConfig(), "model", **settings, token_env="ENGINE_TOKEN")


def asked(_):
    EngineClient("http://127.0.0.1:1", token_env="ENGINE_TOKEN", server="the server")


def clustered(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", os.environ["ENGINE_TOKEN"])
    prepare_environment(own=True)


def test_a_token_that_cannot_be_sent_is_refused_and_not_repeated(monkeypatch, subtests):
    names = {served: "ENGINE_TOKEN", asked: "ENGINE_TOKEN", clustered: "RAY_AUTH_TOKEN"}
    for bad, (reader, name) in product(BAD, names.items()):
        with subtests.test(bad=ascii(bad), reader=reader.__name__), monkeypatch.context() as patch:
            patch.setenv("ENGINE_TOKEN", bad)
            with pytest.raises(UsageError, match=rf"{name}.* no token may have; set") as caught:
                reader(patch)
            assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "given", [SECRET, "hunter2secret", "ghp_16C7e42F292c6912", "d41d8cd98f00b204", "A1B2C3D4E5F6"]
)
def test_a_token_given_in_place_of_its_variable_is_not_repeated(given):
    """Most of them could be names of variables, which are not set."""
    with pytest.raises(UsageError, match=r"name of an environment variable|put the token") as no:
        EngineClient("http://127.0.0.1:1", token_env=given, server="the server")
    assert given not in str(no.value)
    with pytest.raises(UsageError, match="the environment variable ENGINE_TOKEN_2 is not set"):
        EngineClient("http://127.0.0.1:1", token_env="ENGINE_TOKEN_2", server="the server")


def test_a_server_that_repeats_the_token_is_quoted_without_it(monkeypatch):
    monkeypatch.setenv("ENGINE_TOKEN", SECRET)
    told = {"POST /a": lambda r: Reply({"asked": "x" * 270 + r.headers["authorization"]}, 403)}
    told |= {"POST /b": lambda r: Reply({"asked": r.headers["authorization"]}, 500)}
    with Server(told) as server:
        client = EngineClient(server.url, token_env="ENGINE_TOKEN", retries=0, server="the server")
        for path in ("/a", "/b"):
            with pytest.raises(TrainingError, match="status") as caught:
                asyncio.run(client.post(path))
            assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.setattr(token.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"onepolicy-tokens-{os.getuid()}"


def test_each_start_makes_a_token_that_only_its_owner_can_read(here):
    with create_token_file("127.0.0.1", 8000) as (first, path):
        assert len(first) >= 32
        assert path.stat().st_mode & 0o777 == 0o600
        assert here.stat().st_mode & 0o777 == 0o700
        assert find_token("127.0.0.1", 8000) == find_token("localhost", 8000) == first
        others = ("127.0.0.1", 8001), ("127.0.0.2", 8000), ("::1", 8000)
        assert [find_token(*other) for other in others] == [None] * 3
        again = create_token_file("127.0.0.1", 8000)  # the server before was killed, say
        with again as (second, _):
            assert find_token("127.0.0.1", 8000) == second != first
        assert find_token("127.0.0.1", 8000) is None
    assert list(here.iterdir()) == []
    with create_token_file("localhost", 8000), create_token_file("::1", 8001) as (third, _):
        assert find_token("0:0:0:0:0:0:0:1", 8001) == find_token("localhost", 8001) == third
    with create_token_file("127.0.0.1", 8000):
        remove_token_file("localhost", 8000)
        assert find_token("127.0.0.1", 8000) is None


def refused_to_create(words):
    with pytest.raises(UsageError, match=words), create_token_file("127.0.0.1", 8001):
        pass


def test_a_folder_or_file_of_others_is_not_used(here, tmp_path):
    with create_token_file("127.0.0.1", 8000) as (_, path):
        path.chmod(0o644)
        assert find_token("127.0.0.1", 8000) is None
        path.chmod(0o600)
        here.chmod(0o755)
        assert find_token("127.0.0.1", 8000) is None
        refused_to_create(r"others may look into it; .*--token-env")
        here.chmod(0o700)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert find_token("127.0.0.1", 8000) is None
        path.unlink()
        path.write_text(f"{SECRET}\n")
        path.chmod(0o600)
        assert find_token("127.0.0.1", 8000) is None
    path.unlink()
    here.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    here.symlink_to(tmp_path / "theirs")
    refused_to_create("belongs to somebody else")


def test_a_run_finds_the_token_of_each_server_on_this_machine(here):
    told = []
    with Server({"GET /a": lambda r: told.append(r.headers.get("authorization"))}) as server:
        port = int(server.url.rpartition(":")[2])
        client = EngineClient(server.url, server="the server")
        asyncio.run(client.get("/a"))
        with create_token_file("127.0.0.1", port) as (first, _):
            asyncio.run(client.get("/a"))
        with create_token_file("127.0.0.1", port) as (second, _):
            asyncio.run(EngineClient(f"http://localhost:{port}", server="the server").get("/a"))
            asyncio.run(client.get("/a"))
    assert told == [None, f"Bearer {first}", f"Bearer {second}", f"Bearer {second}"]


def test_a_run_without_the_token_gets_the_setting_to_use():
    with Server({"GET /a": lambda _: Reply({"error": "Unauthorized"}, 401)}) as server:
        client = EngineClient(server.url, server="the server")
        with pytest.raises(TrainingError, match=r"status 401.*rollout\.engine\.token_env"):
            asyncio.run(client.get("/a"))
