"""What `make test` runs of the suite: each property once. `make test-all` runs everything.

`pytest --gate` leaves out, and counts as deselected,
- tests marked `full`;
- families of models beyond one for each way of scoring;
- combinations of parameters: each value of each parameter runs once, the rest are combinations;
- of a test marked `few(n)` all but n cases, first and last among them: each case is dear, and one
  shows what the others show;
- tests of a component that is not ours (vLLM, TRL, a browser, ..), except those marked `smoke`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

import pytest

FAMILIES = {
    "qwen3_moe": "softmax, top-k",
    "gpt_oss": "top-k, softmax",
    "deepseek_v3": "sigmoid + bias, groups",
    "deepseek_v2": "softmax, groups, top-k",
    "minimax_m2": "sigmoid + bias",
    "ernie4_5_moe": "softmax + bias",
    "llama4_text": "top-k, sigmoid",
    "deepseek_v4": "sqrt-softplus + bias",
}
"""Family -> its way of scoring, as in families.toml."""

COMPONENTS = (
    *("vllm", "sglang", "ray", "trl", "verl", "megatron"),
    *("gateway", "envs", "oracle", "release"),
)
"""Markers of tests that need one; those that drive a system program have `needs`."""


def selected(items: list[pytest.Item], families: Iterable[str]) -> list[pytest.Item]:
    """Return the tests that `make test` runs, in their order.

    families: all that a parameter `family` may name; other values of it are left alone.
    """
    kept = [item for item in items if _belongs(item, set(families))]
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in kept:
        functions[item.nodeid.partition("[")[0]].append(item)
    covering = {item for cases in functions.values() for item in _few(_each_value_once(cases))}
    return [item for item in kept if item in covering]


def _few(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Choose as many as the mark `few` allows, at equal distances."""
    count = next((mark.args[0] for mark in cases[0].iter_markers("few")), len(cases))
    if len(cases) <= count:
        return cases
    return [cases[i * (len(cases) - 1) // max(1, count - 1)] for i in range(count)]


def _belongs(item: pytest.Item, families: set[str]) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    if marks & {"full", "slow", "gpu"}:
        return False
    if "smoke" not in marks and marks & {*COMPONENTS, "needs"}:
        return False
    family = _parameters(item).get("family")
    return family not in families or family in FAMILIES


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _values(item: pytest.Item) -> set[tuple[object, ...]]:
    """Return (arguments, values) of each decorator that parametrises the test, and of fixtures."""
    parameters = _parameters(item)
    rows = [_names(mark.args[0]) for mark in item.iter_markers("parametrize")]
    named = {name for row in rows for name in row}
    rows += [[name] for name in parameters if name not in named]
    return {(*row, *(id(parameters.get(name)) for name in row)) for row in rows}


def _names(arguments: str | Iterable[str]) -> list[str]:
    if isinstance(arguments, str):
        return [name.strip() for name in arguments.split(",")]
    return list(arguments)


def _each_value_once(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Choose cases of one test until every value of every parameter is in one, most new first."""
    if len(cases) == 1:
        return cases
    values = [_values(case) for case in cases]
    chosen: list[pytest.Item] = []
    missing = set().union(*values)
    left = [(-len(of_case), place) for place, of_case in enumerate(values)]
    heapq.heapify(left)
    while missing:
        counted, place = heapq.heappop(left)
        new = len(values[place] & missing)
        if new < -counted:  # others were chosen since; no case gains by that, so the rest may wait
            heapq.heappush(left, (-new, place))
            continue
        chosen.append(cases[place])
        missing -= values[place]
    return chosen
