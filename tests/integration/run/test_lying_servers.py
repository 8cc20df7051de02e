"""Whole runs and measurements on servers that answer as they should until the run samples, and then
lie: each ends in one error that names the server and what is wrong with its reply, or the run asks
again and goes on."""

import base64
import contextlib
import gzip
import io
import json
import re

import numpy as np
import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.models.load import read_config
from onepolicy.rollout.remote import client as http
from onepolicy.rollout.vllm.worker import model_shape
from support.fake_sglang_model import ModelSGLang
from support.fake_vllm import EXPERTS, GENERATE, VOCAB, npy
from support.fake_vllm_model import ModelVLLM
from support.http_server import Reply
from support.small_recipe import write_recipe
from support.waiting import LIMIT_S

pytestmark = pytest.mark.full
TOKENS = 16
BIG = b'{"a": [' + b"0, " * 33_000_000 + b"0]}"  # 99 MB
BOMB = gzip.compress(bytes(2**26), 1)


class VLLM:
    """How a reply of a vLLM server is read and changed."""

    kind, name, path = "vllm-server", "the vLLM server", GENERATE

    weights = "weights"

    def __init__(self, folder):
        shape = model_shape(read_config(ModelConfig(path=folder)))
        self.fake = ModelVLLM(folder, shape, told={"max_len": 128, "max_logprobs": VOCAB})

    @contextlib.contextmanager
    def serving(self):
        with self.fake.server:
            self.url = self.fake.server.url
            yield self

    def lie(self, change):
        self.fake.spoil = {GENERATE: lambda reply, number: change(reply)}
        if change is None:
            self.fake.spoil = {}

    def size(self, reply):
        return len(reply["choices"][0]["token_ids"])

    def tokens(self, reply, change):
        self._choice(reply)["token_ids"] = change(self._choice(reply)["token_ids"])

    def logp(self, reply, value):
        for entry in self._choice(reply)["logprobs"]["content"]:
            entry["logprob"] = value

    def routes(self, reply, change):
        data = base64.b64decode(self._choice(reply)["routed_experts"])
        self._choice(reply)["routed_experts"] = npy(change(np.load(io.BytesIO(data))))

    def _choice(self, reply):
        return reply["choices"][0]


class SGLang:
    kind, name, path = "sglang", "the SGLang server", "/generate"

    weights = "version"

    def __init__(self, folder):
        info = {"max_req_input_len": 128, "enable_return_routed_experts": True}
        self.fake = ModelSGLang(folder, info=info)

    @contextlib.contextmanager
    def serving(self):
        with self.fake as fake:
            self.url = fake.url
            yield self

    def lie(self, change):
        self.fake.damage = change

    def size(self, reply):
        return len(reply["output_ids"])

    def tokens(self, reply, change):
        reply["output_ids"] = change(reply["output_ids"])

    def logp(self, reply, value):
        for entry in reply["meta_info"]["output_token_logprobs"]:
            entry[0] = value

    def routes(self, reply, change):
        meta = reply["meta_info"]
        found = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, 3, 4)
        data = np.ascontiguousarray(change(found)).astype("<i4")
        meta["routed_experts"] = base64.b64encode(data.tobytes()).decode()


def changed(change):
    """Return a lie that changes a good reply in place. change: takes the server and the reply."""

    def lie(server, reply):
        copy = json.loads(json.dumps(reply))
        return change(server, copy) or copy

    return lie


def always(*args, **more):
    return lambda server, reply: Reply(*args, **more)


def of_a_neighbour(rows):
    return np.roll(rows, 1, 0)


NOT_ITS = "the reply is str, expected an object"
LIES = {
    "NaN": (changed(lambda s, r: s.logp(r, float("nan"))), "nan is no log-probability"),
    "positive": (changed(lambda s, r: s.logp(r, 0.5)), "0.5 is no log-probability"),
    "short": (changed(lambda s, r: s.tokens(r, lambda t: t[:-1])), "logprobs|do not end where"),
    "long": (changed(lambda s, r: s.tokens(r, lambda t: t * 2)), "logprobs|do not end where"),
    "no token": (changed(lambda s, r: s.tokens(r, lambda t: [VOCAB, *t[1:]])), "no token id in"),
    "no expert": (changed(lambda s, r: s.routes(r, lambda x: x + EXPERTS)), "outside 0..15"),
    "shape": (changed(lambda s, r: s.routes(r, lambda x: x[:, :2])), "routes have 2 |has .* bytes"),
    "neighbour": (changed(lambda s, r: s.routes(r, of_a_neighbour)), "routes"),
    "100 MB": (always(BIG), "more than .* bytes, the limit of this request"),
    "drip": (always(b" " * 2**20, pause=0.3), r"no answer within .*rollout\.engine\.timeout_s"),
    "reset": (lambda s, r: Reply(r, cut=40), "RemoteProtocolError"),
    "HTML": (always(b"<html><script>x</script>", content_type="text/html"), NOT_ITS),
    "redirect": (always(b"", 302, headers={"Location": "http://127.0.0.1:9/"}), "status 302"),
    "gzip bomb": (always(BOMB, encoding="gzip"), "more than .* bytes, the limit of this request"),
    "deep": (always(b'{"a":' * 10**6), "not JSON|lists and objects, more than"),
}
ASKED_AGAIN = [name for name in LIES if name not in ("neighbour", "drip", "redirect")]
"""Lies after which the same request is sent again, but for the one that takes its time."""


@pytest.fixture(scope="module", params=[VLLM, SGLang])
def server(request, policy):
    torch.set_num_threads(1)
    with request.param(str(policy)).serving() as serving:
        yield serving


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.02)


@pytest.fixture
def play(server, policy, tmp_path, capsys):
    """Return play(command, lie, retries): its exit status and what it prints."""
    recipe = write_recipe(policy, "steps = 1", "train = { threads = 1 }", folder=tmp_path)
    engine = {
        "kind": server.kind,
        "url": server.url,
        "dtype": "float32",
    }
    words = [f"rollout.engine.{name}={value}" for name, value in engine.items()]
    words += ["rollout.prompts_per_step=2", "rollout.group_size=2", "replay.mode=r3"]
    words += [f"rollout.sampling.max_tokens={TOKENS}", "rollout.engine.max_len=60"]
    train = ["train", str(recipe), "log.tensorboard=false", "log.report=false"]
    train += ["eval.every=0", "rollout.engine.recovery_timeout_s=0", f"out={tmp_path / 'run'}"]
    measure = ["measure", "--recipe", str(recipe), str(policy)]

    def run(command, lie, retries, times=10**9, timeout_s=LIMIT_S):
        left = [times]

        def change(reply):
            if server.size(reply) < 2 or not left[0]:  # of a check at the start
                return reply
            left[0] -= 1
            return lie(server, reply)

        server.lie(change)
        command = {"train": train, "measure": measure}[command]
        try:
            more = [f"rollout.engine.retries={retries}", f"rollout.engine.timeout_s={timeout_s}"]
            status = main([*command, *words, *more])
        finally:
            server.lie(None)
        return status, capsys.readouterr()

    return run


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("command", ["train", "measure"])
def test_a_server_that_lies_on_is_named_with_its_lie(play, server, command, name):
    lie, words = LIES[name]
    slow = {"timeout_s": 8.0} if name == "drip" else {}
    status, shown = play(command, lie, 0, **slow)
    told = shown.err
    assert "Traceback" not in told
    if (command, name) == ("measure", "neighbour"):  # its verdict
        assert status == 0, told
        assert "the rollout's routes are not those of these tokens" in " ".join(shown.out.split())
        return
    assert status in (1, 2), told
    last = told.strip().split("\n")[-1]
    assert last.startswith("onepolicy: "), told
    assert re.search(words, last), told
    if name != "neighbour":  # which the trainer's own routes show
        assert f"asked {server.name}: POST {server.url}{server.path}" in last


@pytest.mark.parametrize("command", ["train", "measure"])
def test_lies_that_pass_are_asked_about_again(play, command):
    left = [LIES[name][0] for name in ASKED_AGAIN]
    status, shown = play(command, lambda server, reply: left.pop()(server, reply), 20, len(left))
    assert (status, left) == (0, []), shown.err


def test_weights_of_the_future_are_not_sampled_on(play, server):
    before = getattr(server.fake, server.weights)
    future = before.replace("default", "onepolicy") + "-99"

    def lie(server, reply):
        setattr(server.fake, server.weights, future)
        return reply

    status, shown = play("train", lie, 0)
    setattr(server.fake, server.weights, before)
    assert status == 1
    assert re.search(f"{server.name} at {server.url} holds weights '{future}'", shown.err)
