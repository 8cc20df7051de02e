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
from onepolicy.replay.alignment import check_captured
from onepolicy.replay.checks import (
    MisalignedRoutesError,
    RouteSpec,
    check_completion,
    check_trace,
    constant_layers,
    fill_missing_routes,
)
from onepolicy.replay.topk_hook import gate_mass
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


def arrive(
    ids: Tensor, valid: Tensor | None = None, tokens: list[int] = RESPONSE, first: int = 0
) -> None:
    n = len(tokens)
    completion = Completion(
        torch.tensor(tokens, dtype=torch.int32),
        torch.zeros(n),
        torch.zeros(n),
        "stop",
        trace(ids, valid),
        first,
    )
    check_completion(completion, PROMPT, RULES, "problem 7, sample 2")


def test_good_routes_arrive() -> None:
    arrive(routes())
    arrive(routes()[5:], first=5)


ZERO = torch.zeros_like(routes())
PITFALLS = {
    "1: nothing captured": (
        ZERO,
        "layer 1, row 0: [0, 0, 0, 0]",
        "all rows of all layers are zero",
    ),
    "2: one layer not captured": (
        torch.cat([routes()[:, :2], ZERO[:, :1], routes()[:, 3:]], 1),
        "layer 4, row 0: [0, 0, 0, 0]",
        "all rows of this layer are zero",
    ),
    "3: another rank's share": (
        torch.cat([routes()[:22], ZERO[22:]]),
        "layer 1, row 22: [0, 0, 0, 0]",
        "22 of 44 rows are all zero",
    ),
    "10: a row too many": (routes(SLOTS + 1), "45 routing rows", "must return 44 rows"),
    "10: a row too few": (routes(SLOTS - 1), "43 routing rows", "must return 44 rows"),
    "12: a stale route in padded rows": (
        torch.cat([routes()[:30], routes()[29:30].expand(14, -1, -1)]),
        "rows 29 to 43 repeat",
        "padding",
    ),
    "all layers filler": (
        torch.arange(K, dtype=torch.uint8).expand(SLOTS, 4, K).contiguous(),
        "every layer has the same experts [0, 1, 2, 3] in all 44 rows",
        "filler",
    ),
    "another model": (routes() + 3, "outside 0..31", "another model"),
}


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_pitfalls_are_refused_by_name(pitfall: str) -> None:
    ids, where, why = PITFALLS[pitfall]
    with pytest.raises(UsageError) as caught:
        arrive(ids)
    for words in ("problem 7, sample 2", where, why):
        assert words in str(caught.value)


@pytest.mark.parametrize("pitfall", [name for name in PITFALLS if not name.startswith("10")])
def test_rows_not_valid_are_never_read(pitfall: str) -> None:
    ids, _, _ = PITFALLS[pitfall]
    arrive(ids, torch.zeros(SLOTS, dtype=torch.bool))
    if pitfall.startswith(("3", "12")):
        arrive(ids, torch.arange(SLOTS) < 22)


def test_repeated_tokens_may_repeat_their_routes() -> None:
    """A run of one token converges to one hidden state. A few equal rows in a small model are
    chance."""
    ids = torch.cat([routes()[:30], routes()[29:30].expand(14, -1, -1)])
    arrive(ids, tokens=RESPONSE[:25] + [7] * 15)
    arrive(torch.cat([routes()[:30], routes()[29:30].expand(2, -1, -1), routes()[32:]]))
    same = routes()[:1].expand(SLOTS, -1, -1)
    check_trace(
        trace(same), layers=LAYERS, num_experts=E, top_k=K
    )  # all layers constant: all tokens may be equal
    arrive(same.contiguous())  # or all routers may have collapsed: the trainer's own choice tells


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
    assert constant_layers(trace(half)).tolist() == [[False] * 4]
    assert constant_layers(trace(half), bounds).tolist() == [
        [False] * 4,
        [False, True, False, False],
    ]
    valid = torch.ones(SLOTS, dtype=torch.bool)
    valid[20:36] = False  # 8 rows are too few to tell
    assert not constant_layers(trace(half, valid), bounds).any()
    valid[20:36], valid[20:24] = True, False
    assert constant_layers(trace(half, valid), bounds).tolist() == [
        [False] * 4,
        [False, True, False, False],
    ]
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
    with pytest.raises(
        MisalignedRoutesError, match=r"layer 5 has the same experts .* in all 20 rows of sample 0"
    ) as caught:
        check_captured(mine, trace(routes()), bounds)
    assert "the engine did not capture this layer" in str(caught.value)
    assert caught.value.layers_wrong
    assert (
        check_captured(mine, trace(routes()), bounds, least=0.0) == {}
    )  # neither a collapse nor an error


def test_equal_tokens_are_no_collapse() -> None:
    same = trace(routes()[:1].expand(SLOTS, -1, -1).contiguous())
    assert check_captured(same, same) == {}


@settings(max_examples=60, deadline=None)
@example(layers=2, k=4, experts=256, rows=20, seed=0)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(2, 300),
    st.integers(1, 60),
    st.integers(0, 10**6),
)
def test_random_routes_pass_and_one_bad_row_is_found(
    layers: int, k: int, experts: int, rows: int, seed: int
) -> None:
    k = min(k, experts)
    generator = torch.Generator().manual_seed(seed)
    ids = (
        torch.rand(rows, layers, experts, generator=generator)
        .argsort(-1)[..., :k]
        .to(id_dtype(experts))
    )
    given_trace = trace(ids, experts=experts)
    rules = {"layers": LAYERS[:layers], "num_experts": experts, "top_k": k}
    check_trace(given_trace, **rules)
    row, layer = seed % rows, seed % layers
    for bad in ([experts] * k, [1] * k):
        if bad != [1] or experts < 2:
            wide = ids.long()
            wide[row, layer] = torch.tensor(bad)
            if experts in (256,):
                continue  # the id does not fit the dtype
            wrong = dataclasses.replace(given_trace, ids=wide.to(ids.dtype))
            with pytest.raises(UsageError, match=rf"layer {LAYERS[layer]}, row {row}: "):
                check_trace(wrong, **rules)


def test_gate_mass_by_hand() -> None:
    inf = float("inf")
    scores = torch.tensor(
        [[0.5, 0.3, 0.15, 0.05], [2.0, -1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [-inf, 3.0, 1.0, 2.0]]
    )
    replayed = torch.tensor([[0.5, 0.15], [2.0, -1.0], [1.0, 1.0], [3.0, 1.0]])
    native = torch.tensor([[0.5, 0.3], [2.0, 1.0], [1.0, 1.0], [3.0, 2.0]])
    expected = torch.tensor([0.55 / 0.70, 3 / 5, 1.0, 2 / 3])
    torch.testing.assert_close(gate_mass(replayed, native, scores), expected)
    assert gate_mass(torch.tensor([[3.0, -inf]]), native[3:], scores[3:]).item() == pytest.approx(
        1 / 1
    )


# --- samples without routes -----------------------------------------------------------------------


def sample(routing: RoutingTrace | None) -> Sample:
    return Sample(
        tokens=torch.arange(6, dtype=torch.int32),
        trainable=torch.ones(5, dtype=torch.bool),
        logp_rollout=torch.zeros(5),
        version=torch.zeros(5, dtype=torch.int32),
        turn=torch.zeros(5, dtype=torch.int32),
        temperature=1.0,
        reward=0.0,
        finish="stop",
        routing=routing,
    )


def test_a_sample_without_routes_is_an_error_by_default() -> None:
    with pytest.raises(
        UsageError, match=r"problem 7, sample 2: has no routes.*replay\.missing=native"
    ):
        fill_missing_routes(sample(None), RULES, "problem 7, sample 2")
    native = fill_missing_routes(
        sample(None), dataclasses.replace(RULES, missing="native"), "x"
    ).routing
    assert native is not None
    assert (len(native), native.layers, native.num_experts, native.top_k) == (5, LAYERS, E, K)
    assert not native.valid.any()  # the ids are filler and say so
    assert (
        fill_missing_routes(sample(None), dataclasses.replace(RULES, missing="fine"), "x").routing
        is None
    )
    assert fill_missing_routes(sample(None), None, "x").routing is None  # dense


def test_settings_without_effect_are_refused() -> None:
    recipe = {
        "out": "x",
        "steps": 1,
        "model": {"path": "m"},
        "task": {"kind": "chain"},
        "optim": {"lr": 1e-3},
    }
    assert resolve(recipe, ["replay.missing=native"]).replay.missing == "native"
    for mode in ("off", "r2", "weights"):
        with pytest.raises(UsageError, match="missing"):
            resolve(
                recipe,
                [f"replay.mode={mode}", "replay.missing=native", "objective.num_minibatches=2"],
            )
    with pytest.raises(UsageError, match="min_agreement"):
        resolve(recipe, ["replay.mode=off", "replay.min_agreement=0.5"])
