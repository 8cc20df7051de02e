"""Routes are checked where they enter: each known capture failure is refused, naming sample, layer
and row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import UsageError, resolve
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import (
    MisalignedRoutesError,
    RouteSpec,
    check_completion,
    check_trace,
    constant_layers,
    fill_missing_routes,
)
from onepolicy.replay.selection import gate_mass
from onepolicy.replay.windows import check_captured
from onepolicy.types import Completion, RoutingTrace, Sample, id_dtype

LAYERS, E, K = (1, 2, 4, 5), 32, 4
RULES = RouteSpec(LAYERS, E, K, "error")
PROMPT, RESPONSE = [3, 5, 3, 8, 9], list(range(10, 50))
SLOTS = len(PROMPT) + len(RESPONSE) - 1


def routes(
    rows: int = SLOTS, *, experts: int = E, top_k: int = K, layers: tuple[int, ...] = LAYERS
) -> Tensor:
    noise = torch.rand(rows, len(layers), experts, generator=torch.Generator().manual_seed(0))
    return noise.argsort(-1)[..., :top_k].to(id_dtype(experts))


def trace(ids: Tensor, valid: Tensor | None = None, experts: int = E) -> RoutingTrace:
    valid = torch.ones(len(ids), dtype=torch.bool) if valid is None else valid
    return RoutingTrace(ids, valid, LAYERS[: ids.shape[1]], experts)


def arrive(ids: Tensor, valid: Tensor | None = None, tokens=RESPONSE, first: int = 0) -> None:
    numbers = torch.zeros(len(tokens))
    ours = torch.tensor(tokens, dtype=torch.int32)
    completion = Completion(ours, numbers, numbers, "stop", trace(ids, valid), first)
    check_completion(completion, PROMPT, RULES, "problem 7, sample 2")


def test_good_routes_arrive() -> None:
    arrive(routes())
    arrive(routes()[5:], first=5)


ZERO = torch.zeros_like(routes())
ONE_LAYER_ZERO = torch.cat([routes()[:, :2], ZERO[:, :1], routes()[:, 3:]], 1)
REPEATED = torch.cat([routes()[:30], routes()[29:30].expand(14, -1, -1)])
FILLER = torch.arange(K, dtype=torch.uint8).expand(SLOTS, 4, K).contiguous()
SAME = "every layer has the same experts [0, 1, 2, 3] in all 44 rows"
PITFALLS = {
    "nothing captured": (ZERO, "layer 1, row 0: [0, 0, 0, 0]", "all rows of all layers are zero"),
    "a layer missing": (ONE_LAYER_ZERO, "layer 4, row 0: [0, 0, 0, 0]", "rows of this layer"),
    "another rank's share": (
        torch.cat([routes()[:22], ZERO[22:]]), "layer 1, row 22: [0, 0, 0, 0]", "22 of 44 rows"
    ),
    "a row too many": (routes(SLOTS + 1), "45 routing rows", "must return 44 rows"),
    "a row too few": (routes(SLOTS - 1), "43 routing rows", "must return 44 rows"),
    "a stale route in padded rows": (REPEATED, "rows 29 to 43 repeat", "padding"),
    "all layers filler": (FILLER, SAME, "filler"),
    "another model": (routes() + 3, "outside 0..31", "another model"),
}  # fmt: skip


def test_pitfalls_are_refused_by_name_and_rows_not_valid_are_never_read(subtests) -> None:
    for pitfall, (ids, where, why) in PITFALLS.items():
        with subtests.test(pitfall):
            with pytest.raises(UsageError) as caught:
                arrive(ids)
            for words in ("problem 7, sample 2", where, why):
                assert words in str(caught.value)
            if len(ids) == SLOTS:
                arrive(ids, torch.zeros(SLOTS, dtype=torch.bool))
            if pitfall.startswith(("another rank", "a stale")):
                arrive(ids, torch.arange(SLOTS) < 22)


def test_repeated_tokens_may_repeat_their_routes() -> None:
    """A run of one token converges to one hidden state. A few equal rows in a small model are
    chance."""
    arrive(REPEATED, tokens=RESPONSE[:25] + [7] * 15)
    arrive(torch.cat([routes()[:30], routes()[29:30].expand(2, -1, -1), routes()[32:]]))
    same = trace(routes()[:1].expand(SLOTS, -1, -1).contiguous())
    # all layers constant: all tokens may be equal
    check_trace(same, layers=LAYERS, num_experts=E, top_k=K)
    arrive(same.ids)  # or all routers may have collapsed: the trainer's own choice tells
    assert check_captured(same, same) == {}


def test_layers_that_often_stay_repeat_by_chance() -> None:
    """The routers of a collapsed policy change their experts every few tokens, not together."""
    table, rows = routes(), torch.arange(SLOTS)
    slow = [table[rows // period, layer] for layer, period in enumerate((6, 7, 8, 9))]
    arrive(torch.stack(slow, 1))
    stale = REPEATED.clone()
    stale[10:14, 0] = stale[10, 0]  # one layer stays now and then: the others still tell
    with pytest.raises(UsageError, match="rows 29 to 43 repeat"):
        arrive(stale)


def written_once(column: int = 3) -> Tensor:
    ids = routes().clone()
    ids[:, column] = ids[0, column]
    return ids


def test_constant_layers_by_hand() -> None:
    """One sample has 44 rows, and the same rows are samples of 20 and 24: a layer may be constant
    in one of them."""
    assert constant_layers(trace(routes())).tolist() == [[False] * 4]
    assert constant_layers(trace(written_once())).tolist() == [[False, False, False, True]]
    half = routes().clone()
    half[20:, 1] = half[20, 1]
    bounds = torch.tensor([0, 20, 44])
    second = [[False] * 4, [False, True, False, False]]
    assert constant_layers(trace(half)).tolist() == [[False] * 4]
    assert constant_layers(trace(half), bounds).tolist() == second
    valid = torch.ones(SLOTS, dtype=torch.bool)
    valid[20:36] = False  # 8 rows are too few to tell
    assert not constant_layers(trace(half, valid), bounds).any()
    valid[20:36], valid[20:24] = True, False
    assert constant_layers(trace(half, valid), bounds).tolist() == second
    assert not constant_layers(trace(routes()[:0])).any()


def test_a_collapsed_router_and_an_uncaptured_layer() -> None:
    arrive(written_once())  # on arrival nobody can tell
    filler = torch.cat([torch.arange(K, dtype=torch.uint8).expand(SLOTS, 1, K), routes()[:, 1:]], 1)
    arrive(filler)  # a router may have collapsed onto the first experts
    with pytest.raises(MisalignedRoutesError, match="layer 1 has the same experts"):
        check_captured(trace(filler), trace(routes()))
    mine, bounds = trace(written_once()), torch.tensor([0, 20, 44])
    assert check_captured(mine, mine, bounds) == {5: written_once()[0, 3].tolist()}
    assert check_captured(trace(routes()), mine) == {}
    with pytest.raises(MisalignedRoutesError, match=r"layer 5 .*20 rows of sample 0") as caught:
        check_captured(mine, trace(routes()), bounds)
    assert "the engine did not capture this layer" in str(caught.value)
    assert caught.value.layers_wrong
    # neither a collapse nor an error
    assert check_captured(mine, trace(routes()), bounds, least=0.0) == {}


@settings(max_examples=60, deadline=None)
@example(layers=2, k=4, experts=256, rows=20, seed=0)
@given(*(st.integers(*of) for of in [(1, 4), (1, 4), (2, 300), (1, 60), (0, 10**6)]))
def test_random_routes_pass_and_one_bad_row_is_found(layers, k, experts, rows, seed) -> None:
    k = min(k, experts)
    noise = torch.rand(rows, layers, experts, generator=torch.Generator().manual_seed(seed))
    ids = noise.argsort(-1)[..., :k].to(id_dtype(experts))
    rules = {"layers": LAYERS[:layers], "num_experts": experts, "top_k": k}
    check_trace(trace(ids, experts=experts), **rules)
    row, layer = seed % rows, seed % layers
    if experts == 256:
        return  # the id does not fit the dtype
    for bad in ([experts] * k, [1] * k):
        if bad != [1]:
            wide = ids.long()
            wide[row, layer] = torch.tensor(bad)
            with pytest.raises(UsageError, match=rf"layer {LAYERS[layer]}, row {row}: "):
                check_trace(trace(wide.to(ids.dtype), experts=experts), **rules)


def test_gate_mass_by_hand() -> None:
    inf = float("inf")
    scores = torch.tensor(
        [[0.5, 0.3, 0.15, 0.05], [2.0, -1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [-inf, 3.0, 1.0, 2.0]]
    )
    replayed = torch.tensor([[0.5, 0.15], [2.0, -1.0], [1.0, 1.0], [3.0, 1.0]])
    native = torch.tensor([[0.5, 0.3], [2.0, 1.0], [1.0, 1.0], [3.0, 2.0]])
    expected = torch.tensor([0.55 / 0.70, 3 / 5, 1.0, 2 / 3])
    torch.testing.assert_close(gate_mass(replayed, native, scores), expected)
    nowhere = torch.tensor([[3.0, -inf]])
    assert gate_mass(nowhere, native[3:], scores[3:]).item() == pytest.approx(1)


# --- samples without routes -----------------------------------------------------------------------


def test_a_sample_without_routes_is_an_error_by_default() -> None:
    tokens, zeros = torch.arange(6, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    mine = torch.ones(5, dtype=torch.bool)
    sample = Sample(tokens, mine, torch.zeros(5), zeros, zeros, 1.0, 0.0, "stop")

    def filled(rules: RouteSpec | None) -> RoutingTrace | None:
        return fill_missing_routes(sample, rules, "problem 7, sample 2").routing

    with pytest.raises(UsageError, match=r"problem 7, sample 2: .*replay\.missing=native"):
        filled(RULES)
    native = filled(dataclasses.replace(RULES, missing="native"))
    assert native is not None
    assert (len(native), native.layers, native.num_experts, native.top_k) == (5, LAYERS, E, K)
    assert not native.valid.any()  # the ids are filler and say so
    assert filled(dataclasses.replace(RULES, missing="fine")) is None
    assert filled(None) is None  # dense


def test_settings_without_effect_are_refused() -> None:
    recipe = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
    assert resolve(recipe, ["replay.missing=native"]).replay.missing == "native"
    for mode in ("off", "r2", "weights"):
        settings = ["replay.missing=native", "objective.num_minibatches=2"]
        with pytest.raises(UsageError, match="missing"):
            resolve(recipe, [f"replay.mode={mode}", *settings])
    with pytest.raises(UsageError, match="min_agreement"):
        resolve(recipe, ["replay.mode=off", "replay.min_agreement=0.5"])


@pytest.mark.parametrize(
    ("by", "known", "expected"),
    [
        (20, True, "samples were swapped: sample 0 holds the routes of sample 5 "),
        (7, True, "neither a shift by one row, nor another layer, nor another sample fits"),
        (20, False, "neither a shift by one row nor another layer fits"),
    ],
)
def test_other_samples_are_tried_where_samples_are_known(by, known, expected) -> None:
    """6 samples of 20 rows. Every sample holds the routes of the one before."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(120, 3, 16, generator=generator).argsort(-1)[..., :4].to(torch.uint8)
    native = RoutingTrace(ids, torch.ones(120, dtype=torch.bool), (0, 1, 2), 16)
    moved = dataclasses.replace(native, ids=ids.roll(by, 0))
    bounds = torch.arange(7) * 20 if known else None
    with pytest.raises(MisalignedRoutesError, match=expected):
        check_alignment(moved, native, bounds)
