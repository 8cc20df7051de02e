"""Damaged replies of engines' servers: refused as `Malformed`, or read as a completion that could
have been sampled."""

from __future__ import annotations

import base64
import dataclasses
import io

import numpy as np
import pytest
import torch

from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.vllm import payload_format_of
from onepolicy.rollout.remote.bodies import MalformedReply, parse_json
from onepolicy.rollout.remote.dialect import ModelShape, Request
from onepolicy.rollout.remote.dialects.sglang_replies import parse_reply
from onepolicy.rollout.remote.dialects.vllm_replies import parse_reply as parse_vllm
from onepolicy.types import Completion, RoutingTrace, Sampling
from support.fuzz import FAST, SLOW, Damage, survives

VOCAB, DEPTH, EXPERTS, K = 32, 2, 8, 2
PROMPT, TOKENS = [3, 4, 5], [7, 8, 1]
SAMPLING = Sampling(1.0, 4, stop=(1,), top_logprobs=2)
RULES = RouteSpec((0, 1), EXPERTS, K, "error")
VERSIONS = {"a": 3, "b": 4}
SHAPE = ModelShape(VOCAB, DEPTH, RULES)
ASKED = Request(PROMPT, SAMPLING, seed=1, first_row=0, version=3)
INPUTS = [pytest.param(FAST, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)]


def routes(rows: int) -> np.ndarray:
    found = np.zeros((rows, DEPTH, K), np.uint8)
    found[..., 0] = np.arange(rows)[:, None] % EXPERTS
    found[..., 1] = (found[..., 0] + 1 + np.arange(DEPTH)) % EXPERTS
    return found


ROWS = routes(len(PROMPT) + len(TOKENS) - 1)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def vllm_reply() -> dict:
    def entry(token: int, logp: float) -> dict:
        return {"token": f"token_id:{token}", "logprob": logp}

    tops = [[entry(token, -0.5), entry(20, -2.0), entry(21, -9999.0)] for token in TOKENS]
    choice = {
        "token_ids": TOKENS,
        "logprobs": {"content": [top[0] | {"top_logprobs": top} for top in tops]},
        "finish_reason": "stop",
        "routed_experts": text(npy(ROWS)),
    }
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(TOKENS)}
    usage |= {"prompt_tokens_details": {"cached_tokens": 2}}
    return {"choices": [choice], "usage": usage}


def sglang_reply() -> dict:
    parts = [("a", 0, 2), ("b", 2, 3)]
    meta = {
        "finish_reason": {"type": "stop"},
        **{"prompt_tokens": len(PROMPT), "completion_tokens": len(TOKENS)},
        **{"cached_tokens": 2, "num_retractions": 0},
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in parts],
        "output_token_logprobs": [[-0.5, token, None] for token in TOKENS],
        "output_top_logprobs": [[[-0.5, token, None], [-2.0, 20, None]] for token in TOKENS],
        "routed_experts": text(ROWS.astype("<i4").tobytes()),
    }
    return {"output_ids": TOKENS, "meta_info": meta}


def check(done: Completion) -> None:
    """Check the properties of every completion of this request, independently of the readers."""
    tokens = done.token_ids.tolist()
    n = len(tokens)
    assert n <= SAMPLING.max_tokens
    assert all(0 <= token < VOCAB for token in tokens)
    assert done.finish in ("stop", "length", "aborted")
    assert not (done.finish == "stop" and tokens[-1] != 1)
    assert 1 not in tokens[:-1]
    assert done.logp.shape == done.version.shape == (n,)
    assert all(-1e6 <= value <= 1e-3 for value in done.logp.tolist())
    assert set(done.version.tolist()) <= set(VERSIONS.values())
    assert done.top_ids.shape == done.top_logp.shape == (n, 2)
    for ids, values in zip(done.top_ids.tolist(), done.top_logp.tolist(), strict=True):
        assert len(set(ids)) == 2
        assert all(0 <= token < VOCAB for token in ids)
        assert values[1] <= values[0] <= 1e-3
    if n:
        assert done.routing is not None
        check_trace(done.routing, len(PROMPT) + n - 1)


def check_trace(trace: RoutingTrace, rows: int) -> None:
    assert trace.ids.shape == (rows, len(RULES.layers), K)
    assert trace.valid.shape == (rows,)
    assert trace.valid.any()
    for row, valid in zip(trace.ids.tolist(), trace.valid.tolist(), strict=True):
        for chosen in row if valid else ():
            assert len(set(chosen)) == K
            assert all(0 <= expert < EXPERTS for expert in chosen)
    reached = 0
    for span in trace.spans:
        assert span.start >= reached
        assert span.length > 0
        assert span.version in VERSIONS.values()
        reached = span.start + span.length
    assert reached <= rows


def loaded(given: object) -> object:
    return parse_json(given, len(given) * 8) if isinstance(given, bytes) else given


def part_of(version: str):
    how = payload_format_of(version)
    return lambda given: completed(parse_vllm(loaded(given), ASKED, SHAPE, how))


def completed(part: Completion) -> Completion:
    """Return the completion that ends with this part, or an interrupted one."""
    tokens, finish = part.token_ids.tolist(), "aborted"
    if tokens and tokens[-1] in SAMPLING.stop:
        finish = "stop"
    elif len(tokens) == SAMPLING.max_tokens:
        finish = "length"
    return dataclasses.replace(part, finish=finish)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_vllm_replies(inputs: int) -> None:
    make = lambda damage: damage.reply(vllm_reply())  # noqa: E731
    survives("vllm reply", inputs, make, part_of("0.30.0"), check, MalformedReply)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_vllm_arrays(inputs: int) -> None:
    """Half of them are read as older versions' routes, whose zeros may mean missing rows."""
    kinds = (np.uint8, np.uint16, np.int32, np.int64, np.uint64, np.float32, np.bool_, ">i4")
    fortran = np.asfortranarray(ROWS)
    shapes = (ROWS, ROWS, ROWS[0], ROWS[:, :1], ROWS[:0], fortran, ROWS[0, 0, 0])
    readers = {version: part_of(version) for version in ("0.30.0", "0.33.0")}

    def make(damage: Damage) -> tuple[str, dict]:
        kind, shaped = damage.random.choice(kinds), damage.random.choice(shapes)
        reply, data = vllm_reply(), npy(np.asarray(shaped).astype(kind))
        if damage.random.random() < 0.8:
            data = damage.data(data)
        reply["choices"][0]["routed_experts"] = text(data)
        return damage.random.choice(list(readers)), reply

    def read(given: tuple[str, dict]) -> Completion:
        version, reply = given
        return readers[version](reply)

    survives("vllm array", inputs, make, read, check, MalformedReply)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_vllm_nested_replies(inputs: int) -> None:
    good = vllm_reply()
    good["prompt_routed_experts"] = ROWS[: len(PROMPT)].tolist()
    good["choices"][0]["routed_experts"] = ROWS[len(PROMPT) :].tolist()
    make = lambda damage: damage.reply(good)  # noqa: E731
    survives("vllm nested", inputs, make, part_of("0.21.0"), check, MalformedReply)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_sglang_replies(inputs: int) -> None:
    def make(damage: Damage) -> object:
        reply = sglang_reply()
        if damage.random.random() < 0.2:
            rows = damage.data(ROWS.astype("<i4").tobytes())
            reply["meta_info"]["routed_experts"] = text(rows)
            return reply
        return damage.reply(reply)

    def version_of(name: str) -> int:
        if name not in VERSIONS:
            raise MalformedReply("another's weights")  # EngineLost, of a server
        return VERSIONS[name]

    def read(given: object) -> Completion:
        return completed(parse_reply(loaded(given), ASKED, SHAPE, version_of))

    survives("sglang reply", inputs, make, read, check, MalformedReply)


def test_the_check_sees_wrong_completions() -> None:
    """Otherwise a reader that accepts everything would pass."""
    good = part_of("0.30.0")(vllm_reply())
    check(good)
    assert good.routing is not None
    for wrong in (
        {"logp": good.logp + 1},
        {"version": good.version + 9},
        {"top_ids": torch.zeros_like(good.top_ids)},
        {"top_logp": good.top_logp * torch.nan},
        {"routing": good.routing.rows(0, 2)},
        {"routing": dataclasses.replace(good.routing, ids=good.routing.ids * 0)},
    ):
        with pytest.raises(AssertionError):
            check(dataclasses.replace(good, **wrong))
