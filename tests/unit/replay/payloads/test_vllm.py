"""The reader of each vLLM generation's routes, with payloads written by hand: no vllm needed.

test_vllm_generations.py reads payloads made by the wheels' own code.
"""

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest

from onepolicy.config import UsageError, resolve
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.vllm import payload_format_of, request_trace

RULES = RouteSpec((1, 3), num_experts=8, top_k=2, missing="error")  # layers 0 and 2 of 4 are dense


def rows(prompt, completion):
    """Return [prompt + completion - 1, 4, 2] rows as 0.30 returns them: every decoder layer, zeros
    for dense ones."""
    found = np.zeros((prompt + completion - 1, 4, 2), dtype=np.uint8)
    found[:, 1] = [[i % 8, (i + 1) % 8] for i in range(len(found))]
    found[:, 3] = [[(i + 3) % 8, i % 8] for i in range(len(found))]
    return found


def trace(found, version="0.30.0", **settings):
    known = {"prompt": 5, "completion": 4, "cached": 3, "route_spec": RULES, "depth": 4}
    return request_trace(found, payload_format_of(version), **known | {"version": 6} | settings)


def output(completion_rows, **others):
    return SimpleNamespace(outputs=[SimpleNamespace(routed_experts=completion_rows)], **others)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def spans(got):
    return [(s.source, s.start, s.length, s.version) for s in got.spans]


def test_moe_layers_are_kept_with_the_origin_of_every_row(subtests):
    found = rows(5, 4)
    for version in ("0.14.1", "0.20.2", "0.22.0", "0.30.0", "0.31.0", "0.33.0"):
        with subtests.test(version):
            got = trace(payload_format_of(version).read_output(output(found)), version)
            assert got.ids.tolist() == found[:, [1, 3]].tolist()
            assert got.layers == (1, 3)
            assert got.valid.all()
            assert spans(got) == [("cache", 0, 3, 6), ("prefill", 3, 2, 6), ("decode", 5, 3, 6)]
            assert [s.source for s in trace(rows(5, 1), version, cached=0).spans] == ["prefill"]


def test_0_21_joins_prompt_and_completion_of_moe_layers():
    found = rows(5, 4)[:, [1, 3]].astype(np.int16)
    read = payload_format_of("0.21.0").read_output
    got = trace(read(output(found[5:], prompt_routed_experts=found[:5])), "0.21.0")
    assert got.ids.tolist() == found.tolist()
    assert spans(got)[-1] == ("decode", 5, 3, 6)
    one = trace(read(output(None, prompt_routed_experts=found[:5])), "0.21.0", completion=1)
    assert one.ids.tolist() == found[:5].tolist()
    # preempted: dropped without a sign
    assert trace(read(output(None, prompt_routed_experts=None)), "0.21.0") is None
    choice = {"routed_experts": found[5:].tolist()}
    body = {"prompt_routed_experts": found[:5].tolist(), "choices": [choice]}
    got = trace(payload_format_of("0.21.0").read_reply(body, 0), "0.21.0")
    assert got.ids.tolist() == found.tolist()


def test_replies_hold_npy_bytes_per_choice_and_wide_ids_keep_their_value():
    found, wide = rows(5, 4), rows(5, 4).astype(np.uint16)
    wide[:, 1, 0] += 290
    rules = RouteSpec((1, 3), num_experts=300, top_k=2, missing="error")
    for version in ("0.22.1", "0.30.0", "0.33.0"):
        read = payload_format_of(version).read_reply
        for ids, settings in ((found, {}), (wide, {"route_spec": rules})):
            body = {"choices": [{}, {"routed_experts": npy(ids)}]}
            got = trace(read(body, 1), version, **settings)
            assert got.ids.tolist() == ids[:, [1, 3]].tolist()
            assert read(body, 0) is None


def test_rows_no_forward_wrote_are_not_valid():
    found = rows(5, 4)
    found[2] = 0
    assert trace(found).valid.tolist() == [True, True, False, *[True] * 5]
    assert trace(found, "0.20.2").valid.tolist() == [True, True, False, *[True] * 5]
    # its rows do not start as zeros; check_trace refuses expert 0 twice
    assert trace(found, "0.31.0").valid.all()
    with pytest.raises(UsageError, match=r"zeros for all routes .*issues/54730"):
        trace(np.zeros_like(found))


def test_rows_an_aborted_request_lacks_are_not_valid():
    got = trace(rows(5, 4)[:6], aborted=True)
    assert got.valid.tolist() == [True] * 6 + [False] * 2
    assert spans(got)[-1] == ("decode", 5, 3, 6)
    assert trace(None, aborted=True) is None


def test_routes_from_a_later_slot_on():
    got = trace(rows(5, 4)[4:], first=4)
    assert got.ids.tolist() == rows(5, 4)[4:, [1, 3]].tolist()
    assert spans(got) == [("prefill", 0, 1, 6), ("decode", 1, 3, 6)]
    assert spans(trace(rows(5, 4)[2:], first=2))[0] == ("cache", 0, 1, 6)


def test_routes_of_moe_layers_only_or_none_are_refused():
    with pytest.raises(UsageError, match="routes have 2 layers and axis='all'"):
        trace(rows(5, 4)[:, [1, 3]])  # what 0.21 returns
    with pytest.raises(UsageError, match="routes have 4 layers and axis='moe'"):
        trace(rows(5, 4), "0.21.0")
    with pytest.raises(UsageError, match="dense layer 0 has routes"):
        trace(np.roll(rows(5, 4), 1, axis=1))
    with pytest.raises(UsageError, match="no routes"):
        trace(None)


MALFORMED = [
    ("0.30.0", "not base64!", "expected base64 of an .npy file"),
    ("0.30.0", npy(rows(5, 4))[:-40], "expected base64 of an .npy file"),
    ("0.30.0", base64.b64encode(b"no header").decode(), "expected base64 of an .npy file"),
    ("0.30.0", npy(np.zeros((8, 4, 2), np.float32)), "expected integers, got an .npy of float32"),
    ("0.30.0", npy(np.zeros((8, 4, 2), ">i4")), "got .*an .npy of >i4"),
    ("0.30.0", [[1]], "expected base64 of an .npy file"),  # what 0.21 sends
    ("0.21.0", "QUJD", r"nested lists \[rows\]\[layers\]\[K\] of integers"),  # what 0.22 sends
    ("0.21.0", [[[1, 2]], [[1]]], "expected nested lists"),
    ("0.21.0", [[[1, 2.5]]], "expected nested lists"),
    ("0.20.2", None, "no routes over HTTP"),
]


def test_malformed_payloads_are_refused(subtests):
    for version, payload, words in MALFORMED:
        with subtests.test(version=version, payload=payload):
            read = payload_format_of(version).read_reply
            with pytest.raises(UsageError, match=words):
                read({"choices": [{"routed_experts": payload}]}, 0)


def test_versions_outside_all_generations_are_refused():
    outside = {"0.13.2": "cannot return routes", "0.34.0": "newest that is known", "dev": "not a"}
    for version, words in outside.items():
        with pytest.raises(UsageError, match=words):
            payload_format_of(version)
    assert payload_format_of("0.30.1+cpu") is payload_format_of("0.22.0")


VLLM = {"kind": "vllm", "dtype": "float32"}
RUN = {"out": "x", "steps": 1, "model": {"path": "x"}, "task": {"kind": "chain"}}
CANNOT_HONOUR = [
    ({"replay": {"mode": "weights"}}, "kind = vllm does not return"),
    ({"model": {"path": "x", "dtype": "bfloat16"}}, "reads the checkpoint unrounded"),
    ({"rollout": {"engine": {"kind": "vllm", "prefix": True}}}, "prefix"),
]


def test_the_engine_is_hf_unless_named_and_vllm_refuses_what_it_cannot_honour(subtests):
    for engine, kind in (({"max_num_seqs": 3}, "hf"), (VLLM | {"max_num_seqs": 3}, "vllm")):
        assert resolve(RUN | {"rollout": {"engine": engine}}).rollout.engine.kind == kind
    for settings, words in CANNOT_HONOUR:
        with subtests.test(words), pytest.raises(ValueError, match=words):
            resolve(RUN | {"rollout": {"engine": VLLM}} | settings)
