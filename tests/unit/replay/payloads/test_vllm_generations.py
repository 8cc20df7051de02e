"""Each reader of replay/payloads/vllm.py against payloads made with that generation's own
serialiser.

These are not live runs: support/make_vllm_fixtures.py lists the code of each wheel that made them.
Versions that no CPU can run are covered by these tests alone. 0.30 runs live in
tests/e2e/rollout/vllm/test_engine.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from onepolicy.config import UsageError
from onepolicy.replay.checks import RouteSpec, check_completion
from onepolicy.replay.payloads.vllm import PAYLOAD_FORMATS, payload_format_of, request_trace
from onepolicy.types import Completion, index_ids

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("vllm-*.json"))
CASES = [(path, request) for path in FIXTURES for request in ("first", "again")]


def load(path, request):
    made = json.loads(path.read_text())
    assert made["made_with"].startswith(f"the serialiser of vllm {made['version']}, not a live run")
    return made, made["requests"][request]


def array(found):
    return None if found is None else np.array(found["rows"], dtype=found["dtype"])


def trace(made, request, rows):
    rules = RouteSpec(tuple(made["layers"]), made["num_experts"], 2, "error")
    lengths = {
        "prompt": made["prompt"],
        "completion": made["completion"],
        "cached": request["cached"],
    }
    got = request_trace(
        rows,
        payload_format_of(made["version"]),
        **lengths,
        route_spec=rules,
        depth=made["depth"],
        version=2,
    )
    tokens = SimpleNamespace(tolist=lambda: [9] * made["completion"])
    check_completion(
        Completion(tokens, None, None, "length", got), [8] * made["prompt"], rules, "fixture"
    )
    return got


def check(made, request, got):
    """Check that every valid row is the routers' choice, and that the documented rows are
    missing."""
    chosen = np.array(made["chosen"])
    missing = (
        request["cached"] if made["version"] == "0.21.0" else 0
    )  # it records no row for a cached token
    assert got.valid.tolist() == [False] * missing + [True] * (len(chosen) - missing)
    assert index_ids(got.ids, got.valid).tolist() == chosen[missing:].tolist()
    assert (got.layers, got.num_experts) == (tuple(made["layers"]), made["num_experts"])
    sources = {
        "cache": request["cached"],
        "prefill": made["prompt"] - request["cached"],
        "decode": 3,
    }
    assert {s.source: s.length for s in got.spans} == {name: n for name, n in sources.items() if n}


def test_every_generation_has_a_fixture():
    covered = {
        payload_format_of(json.loads(path.read_text())["version"]).newest_version
        for path in FIXTURES
    }
    assert covered == {contract.newest_version for contract in PAYLOAD_FORMATS}


@pytest.mark.parametrize(
    ("path", "request_name"), CASES, ids=lambda value: getattr(value, "stem", value)
)
def test_in_process(path, request_name):
    made, request = load(path, request_name)
    output = SimpleNamespace(
        prompt_routed_experts=array(request["prompt_routed_experts"]),
        outputs=[SimpleNamespace(routed_experts=array(request["routed_experts"]))],
    )
    check(
        made, request, trace(made, request, payload_format_of(made["version"]).read_output(output))
    )


@pytest.mark.parametrize(
    ("path", "request_name"), CASES, ids=lambda value: getattr(value, "stem", value)
)
def test_over_http(path, request_name):
    made, request = load(path, request_name)
    read = payload_format_of(made["version"]).read_reply
    if request["reply"] is None:
        with pytest.raises(UsageError, match="no routes over HTTP"):
            read({"choices": [{}]}, 0)
        return
    check(made, request, trace(made, request, read(request["reply"], 0)))
