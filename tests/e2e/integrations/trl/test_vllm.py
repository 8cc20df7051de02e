"""vLLM's routes through TRL's own code. Contract tests: no engine runs here.

Written against TRL 1.16.0 and vLLM 0.30.0 (CPU build), whose classes are the real ones.
"""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace as Bag

import numpy as np
import pytest
import torch

import onepolicy as op
import onepolicy.integrations.trl as op_trl
from onepolicy.config import UsageError
from onepolicy.integrations.trl.route_book import RouteBook
from onepolicy.integrations.trl.vllm_routes import (
    returns_routes,
    watch_client,
    watch_colocated,
    watch_generation,
)
from support.trl.tiny import as_vllm, make_trainer, tiny_moe

pytestmark = pytest.mark.trl
PROMPT, COMPLETIONS = [5, 6, 7], [[8, 9], [10, 11, 12]]


@pytest.fixture(scope="module")
def routers():
    return op.bind_routers(tiny_moe())


def payload(routers, rows, seed):
    """Return uint8 rows over all decoder layers; the dense layer is zeros, as vLLM 0.30 has it."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, routers.depth, routers.num_experts, generator=g)
    ids = scores.topk(routers.top_k).indices.to(torch.uint8).numpy()
    ids[:, 0] = 0
    return ids


def payloads(routers):
    return [payload(routers, len(PROMPT) + len(c) - 1, seed) for seed, c in enumerate(COMPLETIONS)]


def check_traces(book, routers):
    traces = book.traces([PROMPT] * 2, COMPLETIONS)
    for trace, sent in zip(traces, payloads(routers), strict=True):
        assert trace.valid.all()
        assert np.array_equal(trace.ids.numpy(), sent[:, 1:])


def test_routed_vllm_swaps_the_name_and_puts_it_back(monkeypatch):
    from trl.generation import vllm_generation

    built = []
    monkeypatch.setattr(vllm_generation, "LLM", lambda **given: built.append(given), raising=False)
    before = vllm_generation.LLM
    with op_trl.routed_vllm():
        vllm_generation.LLM(model="m", tensor_parallel_size=1)
    given = {"model": "m", "tensor_parallel_size": 1}
    assert built == [given | {"enable_return_routed_experts": True, "max_logprobs": -1}]
    assert vllm_generation.LLM is before


def test_vllm_knows_the_argument():
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    assert arguments.EngineArgs(model="m").enable_return_routed_experts is False


def test_a_trainer_built_without_it_is_refused(tmp_path):
    trainer = as_vllm(make_trainer(tmp_path))
    engine = Bag(model_config=Bag(enable_return_routed_experts=False))
    trainer.vllm_generation.llm = Bag(llm_engine=engine)
    assert not returns_routes(trainer.vllm_generation.llm)
    with pytest.raises(UsageError, match=r"vLLM returns routes.*with op_trl\.routed_vllm"):
        op_trl.attach(trainer)


def test_colocated_outputs(routers):
    outputs = pytest.importorskip("vllm.outputs")
    usual, requests = {"index": 0, "text": "", "cumulative_logprob": None, "logprobs": None}, []
    for tokens, routes in zip(COMPLETIONS, payloads(routers), strict=True):
        made = outputs.CompletionOutput(token_ids=tokens, routed_experts=routes, **usual)
        requests.append(outputs.RequestOutput(f"{tokens}", None, PROMPT, None, [made], True))
    llm = Bag(generate=lambda *_, **__: requests)
    book = RouteBook(routers, "vllm")
    watch_colocated(llm, book)
    assert llm.generate(["ignored"]) is requests
    check_traces(book, routers)


def encoded(ids):
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


class Session:
    """A server's reply to /v1/completions with two completions of one prompt."""

    def __init__(self, routes):
        self.routes = routes

    def post(self, url, json):
        assert json["return_token_ids"]
        choices = []
        for tokens, routes in zip(COMPLETIONS, self.routes, strict=True):
            logp = {"tokens": [f"token_id:{token}" for token in tokens]}
            logp |= {"token_logprobs": [-1.0 - token for token in tokens]}
            logp |= {"top_logprobs": [None] * len(tokens)}
            found = {"prompt_token_ids": PROMPT, "token_ids": tokens, "routed_experts": routes}
            choices.append(found | {"logprobs": logp})
        return Bag(status_code=200, json=lambda: {"choices": choices})


def client_of(session):
    """Return TRL's own client without a server behind it."""
    from trl.generation.vllm_client import VLLMClient

    client = object.__new__(VLLMClient)
    client.session, client.base_url, client.model = session, "http://server", "m"
    return client


def test_server_replies(routers):
    book = RouteBook(routers, "vllm")
    client = client_of(Session([encoded(ids) for ids in payloads(routers)]))
    watch_client(client, book)
    made = client.generate([PROMPT], n=2, logprobs=0)
    assert made["completion_ids"] == COMPLETIONS
    check_traces(book, routers)


def test_log_probabilities_of_vllm(routers):
    """RLOO drops them; TRL's VLLMGeneration returns them."""
    book = RouteBook(routers, "vllm")
    made = ([PROMPT] * 2, COMPLETIONS, [[[-1.0], [-2.0]], [[-3.0], [None], [-5.0]]], None)
    generation = Bag(mode="colocate", generate=lambda *_: made)
    watch_generation(generation, book, supports=False)
    assert generation.generate("prompts") is made
    assert book.logps([PROMPT] * 2, COMPLETIONS) == [[-1.0, -2.0], [-3.0, None, -5.0]]


def test_a_server_without_the_flag_sends_no_routes(routers):
    book = RouteBook(routers, "vllm")
    client = client_of(Session([None, None]))
    watch_client(client, book)
    client.generate([PROMPT], n=2, logprobs=0)
    assert book.traces([PROMPT] * 2, COMPLETIONS) == [None, None]
