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


def array(found):
    return None if found is None else np.array(found["rows"], dtype=found["dtype"])


def trace(made, request, rows):
    rules = RouteSpec(tuple(made["layers"]), made["num_experts"], 2, "error")
    known = {name: made[name] for name in ("prompt", "completion", "depth")}
    known |= {"cached": request["cached"], "route_spec": rules, "version": 2}
    got = request_trace(rows, payload_format_of(made["version"]), **known)
    tokens = SimpleNamespace(tolist=lambda: [9] * made["completion"])
    completion = Completion(tokens, None, None, "length", got)
    check_completion(completion, [8] * made["prompt"], rules, "fixture")
    return got


def check(made, request, got):
    """Check that every valid row is the routers' choice, and that the documented rows are
    missing."""
    chosen, cached = np.array(made["chosen"]), request["cached"]
    missing = cached if made["version"] == "0.21.0" else 0  # no row for a cached token
    assert got.valid.tolist() == [False] * missing + [True] * (len(chosen) - missing)
    assert index_ids(got.ids, got.valid).tolist() == chosen[missing:].tolist()
    assert (got.layers, got.num_experts) == (tuple(made["layers"]), made["num_experts"])
    sources = {"cache": cached, "prefill": made["prompt"] - cached, "decode": 3}
    assert {s.source: s.length for s in got.spans} == {name: n for name, n in sources.items() if n}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_routes_in_process_and_over_http(path, subtests):
    made = json.loads(path.read_text())
    assert made["made_with"].startswith(f"the serialiser of vllm {made['version']}, not a live run")
    contract = payload_format_of(made["version"])
    for name in ("first", "again"):
        request = made["requests"][name]
        with subtests.test("in process", request=name):
            rows = SimpleNamespace(routed_experts=array(request["routed_experts"]))
            prompt = array(request["prompt_routed_experts"])
            output = SimpleNamespace(prompt_routed_experts=prompt, outputs=[rows])
            check(made, request, trace(made, request, contract.read_output(output)))
        with subtests.test("over http", request=name):
            if request["reply"] is None:
                with pytest.raises(UsageError, match="no routes over HTTP"):
                    contract.read_reply({"choices": [{}]}, 0)
            else:
                read = contract.read_reply(request["reply"], 0)
                check(made, request, trace(made, request, read))


def test_every_generation_has_a_fixture():
    versions = {json.loads(path.read_text())["version"] for path in FIXTURES}
    covered = {payload_format_of(version).newest_version for version in versions}
    assert covered == {contract.newest_version for contract in PAYLOAD_FORMATS}
