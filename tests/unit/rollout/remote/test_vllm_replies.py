"""Any text in place of a vLLM server's reply gives one kind of error, or a consistent
completion."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.replay.checks import check_completion
from onepolicy.replay.payloads.vllm import payload_format_of
from onepolicy.rollout.remote.bodies import MalformedReply
from onepolicy.rollout.remote.dialect import ModelShape, Request
from onepolicy.rollout.remote.dialects.vllm_replies import (
    parse_reply,
    resumed_seed,
    sampling_params,
)
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.types import Sampling
from support.fake_vllm import LAYERS, RULES, VOCAB, npy, routes_of

PROMPT, TOKENS, SAMPLING = [3, 4, 5], [7, 8, 9, 1], Sampling(1.0, 4, stop=(1,), top_logprobs=2)
SERVED = ModelShape(VOCAB, LAYERS, RULES), payload_format_of("0.30.0")


def entry(token, logp, others=()):
    name = {"token": f"token_id:{token}", "logprob": logp}
    return name | {"top_logprobs": [name, *others]}


def good(tokens=TOKENS, finish="stop", first=0, path=PROMPT):
    content = [
        entry(t, -0.5 * i, [entry(20, -2.0), entry(21, -9999.0)]) for i, t in enumerate(tokens, 1)
    ]
    choice = {
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "finish_reason": finish,
        "routed_experts": npy(routes_of([*path, *tokens])[first:-1]),
    }
    usage = {"prompt_tokens": len(path), "completion_tokens": len(tokens)}
    cached = {"prompt_tokens_details": {"cached_tokens": 2}}
    return {"choices": [choice], "usage": usage | cached}


def read(reply, path=PROMPT, sampling=SAMPLING, first=0, version=3):
    return parse_reply(reply, Request(path, sampling, 0, first, version), *SERVED)


def spans(done):
    return [(s.start, s.length, s.source, s.version) for s in done.routing.spans]


def test_a_reply_becomes_a_completion():
    done = read(good())
    check_completion(done, PROMPT, RULES, "sample")
    assert (done.token_ids.tolist(), done.finish) == (TOKENS, "stop")
    assert done.logp.tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert done.top_ids.tolist() == [[7, 20], [8, 20], [9, 20], [1, 20]]
    assert done.top_logp[:, 0].tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert spans(done) == [(0, 2, "cache", 3), (2, 1, "prefill", 3), (3, 3, "decode", 3)]
    narrowed = good()
    for each in narrowed["choices"][0]["logprobs"]["content"]:
        each["top_logprobs"].pop(1)
    assert read(narrowed).top_logp[0].tolist() == [-0.5, -math.inf]


def test_parts_follow_each_other_without_a_gap():
    """Prompt 3 and two tokens: 4 rows. The rest is asked for from slot 4 on: the last token's row,
    and its own."""
    halves = [read(good(TOKENS[:2], "abort"), sampling=SAMPLING)]
    assert (halves[0].finish, len(halves[0].routing)) == ("aborted", 4)
    path, left = [*PROMPT, *TOKENS[:2]], Sampling(1.0, 2, stop=(1,), top_logprobs=2)
    halves.append(read(good(TOKENS[2:], first=4, path=path), path, left, first=4, version=5))
    done = join_partial_completions(halves, "stop", 0)
    check_completion(done, PROMPT, RULES, "sample")
    assert torch.equal(done.routing.ids, torch.from_numpy(routes_of([*PROMPT, *TOKENS])[:-1]))
    assert done.version.tolist() == [3, 3, 5, 5]
    first = [(0, 2, "cache", 3), (2, 1, "prefill", 3), (3, 1, "decode", 3)]
    assert spans(done) == [*first, (4, 1, "prefill", 5), (5, 1, "decode", 5)]


ENDS = [
    ([7, 8, 9, 9], "length"),
    ([7, 8, 9, 9], "abort"),  # the abort came after the last token
    ([7, 1], "abort"),
    ([7, 8], "abort"),
]
NO_ENDS = [([7, 8], "length"), ([7, 8, 9, 9], "stop"), ([1, 7, 8, 9], "length")]
NO_ENDS += [([7] * 5, "length"), ([7, 1], "error")]


def test_the_end_of_a_reply_fits_its_tokens_or_is_refused(subtests):
    for tokens, reason in ENDS:
        with subtests.test(tokens=tokens, reason=reason):
            assert read(good(tokens, reason)).finish == {"abort": "aborted"}.get(reason, reason)
    words = r"finish_reason: .* is none of|do not end where they should"
    for tokens, reason in NO_ENDS:
        case = subtests.test(tokens=tokens, reason=reason)
        with case, pytest.raises(MalformedReply, match=words):
            read(good(tokens, reason))


def places(tree, path=()):
    yield path
    items = tree if isinstance(tree, dict) else {}
    if isinstance(tree, list):
        items = dict(enumerate(tree))
    for name, value in items.items():
        yield from places(value, (*path, name))


GOOD = good()
PLACES = list(places(GOOD))[1:]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda kid: st.lists(kid, max_size=3) | st.dictionaries(st.text(max_size=4), kid, max_size=3),
    max_leaves=4,
)


@settings(deadline=None, max_examples=100)
@given(where=st.sampled_from(PLACES), value=JSON, gone=st.booleans())
def test_one_wrong_field_is_malformed_or_harmless(where, value, gone):
    reply = copy.deepcopy(GOOD)
    *path, last = where
    parent = reply
    for name in path:
        parent = parent[name]
    if gone:
        del parent[last]
    else:
        # as it comes off the wire: NaN and infinity too
        parent[last] = json.loads(json.dumps(value))
    try:
        done = read(reply)
    except MalformedReply:
        return
    check_completion(done, PROMPT, RULES, "sample")
    assert torch.isfinite(done.logp).all()
    assert len(done.token_ids) == len(done.logp) == len(done.top_ids) == len(done.version)


def test_seeds_of_a_rest_are_other_seeds():
    seeds = {resumed_seed(seed, done) for seed in (0, 1, 2**63 - 1) for done in (1, 2, 500)}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_one_more_likeliest_token_is_asked_for_up_to_the_vocabulary():
    for k, asked in {0: 0, 1: 2, 5: 6, 32: 32}.items():
        sampling = Sampling(1.0, 4, top_logprobs=k)
        assert sampling_params(sampling, 0, first=0, vocab=VOCAB)["logprobs"] == asked
