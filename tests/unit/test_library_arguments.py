"""The library's functions of log-probabilities: any layout, ids of any size, one kind of error for
wrong arguments."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import onepolicy as op
import onepolicy.correct.slots as slots_module
from onepolicy.config.correction import correction_presets
from onepolicy.types import RoutingTrace
from support.paths import ROOT

LENGTHS = [40, 25, 33, 2]
DRAW = torch.Generator().manual_seed(0)
OLD = [-3 * torch.rand(n, generator=DRAW) for n in LENGTHS]
ROLLOUT = [old + 0.1 * torch.randn(len(old), generator=DRAW) for old in OLD]
MASK = [torch.rand(n, generator=DRAW) < 0.8 for n in LENGTHS]
ADVANTAGE = [torch.randn(n, generator=DRAW) for n in LENGTHS]
TURN = [torch.arange(n) // 10 for n in LENGTHS]
SEGMENT = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def _padded(values: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def _in_each_layout(function: Callable[..., Any]) -> list[Any]:
    fields = {"turn": TURN, "advantage": ADVANTAGE}
    flat = {name: torch.cat(value) for name, value in fields.items()}
    padded = {name: _padded(value) for name, value in fields.items()}
    return [
        function(*map(torch.cat, (OLD, ROLLOUT, MASK)), segment=SEGMENT, **flat),
        function(*map(_padded, (OLD, ROLLOUT, MASK)), **padded),
        function(OLD, ROLLOUT, MASK, **fields),
    ]


def _as_list(value: Any) -> list[Tensor]:
    if not isinstance(value, Tensor):
        return list(value)
    return (
        list(value.split(LENGTHS))
        if value.dim() == 1
        else [row[:n] for row, n in zip(value, LENGTHS, strict=True)]
    )


@pytest.mark.parametrize("name", ["pg-tis", "opsm", "pg-seq-tis", "dppo-tv"])
def test_live_weights_takes_every_layout(name: str) -> None:
    part = op.preset(name).live_part
    found = _in_each_layout(lambda *fields, **more: op.live_weights(*fields, part, **more))
    for field in ("weight", "keep", "centred"):
        packed, padded, ragged = (_as_list(getattr(live, field)) for live in found)
        for one, two, three in zip(packed, padded, ragged, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)
    assert found[1].weight.shape == _padded(OLD).shape


def test_mismatch_and_diagnose_take_every_layout() -> None:
    packed, padded, ragged = _in_each_layout(
        lambda *f, turn, advantage, **more: op.mismatch(*f, **more)
    )
    assert packed.metrics() == padded.metrics() == ragged.metrics()
    assert math.isfinite(packed.ppl_ratio)
    bare = op.mismatch(*map(torch.cat, (OLD, ROLLOUT, MASK)))
    assert math.isnan(bare.ppl_ratio)
    found = _in_each_layout(lambda *f, turn, advantage, **more: op.diagnose(*f, **more))
    assert len({diagnosis.text() for diagnosis in found}) == 1
    rows = _padded(OLD)
    assert (
        op.diagnose(
            rows, _padded(ROLLOUT), _padded(MASK), segment=torch.zeros_like(rows).long()
        ).gap
        > 0
    )


def test_infinite_values_are_named_with_their_place() -> None:
    broken = _padded(ROLLOUT).masked_fill(_padded(MASK) & (torch.arange(40) == 24), math.nan)
    row = int(_padded(MASK)[:, 24].nonzero()[0])
    with pytest.raises(op.UsageError, match=rf"logp_rollout is not finite .* first \({row}, 24\)"):
        op.mismatch(_padded(OLD), broken, _padded(MASK))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [10**6, 2**40])
@pytest.mark.parametrize("name", ["seq-tis", "k3-rs", "turn", "opsm"])
def test_memory_depends_on_the_number_of_segments(name: str, largest: int) -> None:
    """The weights are those with ids 0, 1, .., and no array is as long as the largest id."""
    from onepolicy.plan.dry_run import PeakMemory

    config = op.preset("seq-tis", weight={"level": "turn"}) if name == "turn" else op.preset(name)
    live = config.live_part
    fields = [torch.cat(x) for x in (OLD, ROLLOUT, MASK)]
    spread = torch.tensor([largest, 3, 0, largest - 1])[SEGMENT]
    turn = torch.cat(TURN)
    found = []
    for segment, turns in (
        (SEGMENT, turn),
        (spread, turn),
        (SEGMENT, turn * (largest // 4)),
        (spread, turn * 7919),
    ):
        more = {"segment": segment, "turn": turns, "advantage": torch.cat(ADVANTAGE)}
        with (
            mock.patch.object(slots_module, "CHUNK", 32),
            PeakMemory([*fields, *more.values()]) as peak,
        ):
            made = (
                op.reweight(*fields, config, **more)
                if live is None
                else op.live_weights(*fields, live, **more)
            )
        found.append(made)
        assert peak.peak < 400_000  # histograms of fixed size, mostly
    assert all(
        torch.equal(made.weight, found[0].weight) and torch.equal(made.keep, found[0].keep)
        for made in found
    )


def test_parts_of_a_step_may_have_large_ids_too() -> None:
    config, ids = op.preset("seq-tis", normalise="self"), torch.tensor([7, 10**12, 5, 0])
    whole = op.reweight(*(torch.cat(x) for x in (OLD, ROLLOUT, MASK)), config, segment=SEGMENT)
    parts = [
        op.partials(
            config, op.slots(old, rollout, mask, segment=torch.full((len(old),), int(number)))
        )
        for old, rollout, mask, number in zip(OLD, ROLLOUT, MASK, ids, strict=True)
    ]
    total = op.combine(part.sums for part in parts)
    done = [op.finish(config, part, total) for part in parts]
    torch.testing.assert_close(torch.cat([weight for weight, _, _ in done]), whole.weight)
    assert torch.equal(torch.cat([keep for _, keep, _ in done]), whole.keep)
    assert done[0][2]["correction/kept"] == whole.report["correction/kept"]


# --- not finite -----------------------------------------------------------------------------------


def _sequence_gated() -> list[str]:
    gates = {
        name: op.preset(name).gates for name in correction_presets() if not op.preset(name).live
    }
    return [
        name for name, found in gates.items() if found and all(g.scope == "sequence" for g in found)
    ]


WIDE: dict[str, dict[str, float]] = {
    **{
        name: {"high": 1e9}
        for name in ("ratio", "k1", "k2", "k3", "exp_abs", "binary_kl", "binary_kl_sym")
    },
    "prob_diff": {"high": 0.999},
    "tv": {"high": 0.999},
    "trainer_prob": {"low": 1e-30},
}
"""Bounds that reject nothing finite."""


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("statistic", WIDE)
@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "min"])
def test_an_infinite_slot_takes_its_unit_with_it(
    statistic: str, aggregate: str, value: float
) -> None:
    if aggregate == "sum" and statistic in ("exp_abs", "trainer_prob", "prob_diff", "tv"):
        aggregate = "mean"  # sums of these are refused, or bounded by more than 0.999
    gate = {"statistic": statistic, "aggregate": aggregate, "scope": "sequence", **WIDE[statistic]}
    config = op.preset("recompute", gates=[gate], max_nonfinite=1.0)
    slot = int((torch.cat(MASK) & (SEGMENT == 1)).nonzero()[3])
    for side in (0, 1):
        sides = [torch.cat(OLD), torch.cat(ROLLOUT)]
        sides[side][slot] = value
        keep = op.reweight(*sides, torch.cat(MASK), config, segment=SEGMENT).keep
        assert not keep[SEGMENT == 1].any()
        assert torch.equal(keep[SEGMENT != 1], torch.cat(MASK)[SEGMENT != 1])


@pytest.mark.parametrize("name", _sequence_gated())
def test_every_preset_rejects_the_sequence_of_an_infinite_ratio(name: str) -> None:
    rollout = torch.cat(ROLLOUT)
    slot = int((torch.cat(MASK) & (SEGMENT == 0)).nonzero()[2])
    rollout[slot] = -math.inf
    config = op.preset(name, max_nonfinite=1.0)
    more = {"segment": SEGMENT, "turn": torch.cat(TURN), "advantage": torch.cat(ADVANTAGE)}
    assert (
        not op.reweight(torch.cat(OLD), rollout, torch.cat(MASK), config, **more)
        .keep[SEGMENT == 0]
        .any()
    )


def test_flash_reinforce_is_among_them() -> None:
    assert "flash-reinforce" in _sequence_gated()


# --- wrong arguments ------------------------------------------------------------------------------

A, B, M = torch.cat(OLD), torch.cat(ROLLOUT), torch.cat(MASK)
TIS, LIVE = op.preset("tis"), op.preset("pg-tis").live_part
SEQ = op.preset("seq-tis")
TURNS = op.preset("seq-tis", weight={"level": "turn"})
BAD = SEGMENT.clone()
BAD[int(M.nonzero()[3])] = -1
TRACE = RoutingTrace(
    torch.tensor([[[0, 1]]], dtype=torch.uint8), torch.ones(1, dtype=torch.bool), (0,), 4
)
PART = op.partials(TIS, op.slots(A, B, M, segment=SEGMENT))

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "config as text": (
        lambda: op.reweight(A, B, M, "tis"),
        r"config is the text 'tis'.*op\.preset\('tis'\)",
    ),
    "config as dict": (lambda: op.reweight(A, B, M, {"preset": "tis"}), "config is dict"),
    "live config as text": (
        lambda: op.live_weights(A, B, M, "pg-tis"),
        "live_weights: config is the text",
    ),
    "no live part": (
        lambda: op.live_weights(A, B, M, TIS.live_part),
        "live_weights: config is None.*live part",
    ),
    "predict of text": (
        lambda: op.predict("tis", kl=1e-3, length=9),
        "predict: config is the text 'tis'",
    ),
    "predict with text": (lambda: op.predict(TIS, kl="small", length=9), "predict: kl=small"),
    "preset of nothing": (lambda: op.preset(None), "no correction is called None"),
    "preset of a list": (lambda: op.preset(["tis"]), "no correction is called"),
    "segment -1": (
        lambda: op.reweight(A, B, M, SEQ, segment=BAD),
        r"segment is -1 at slot \d+.*count from 0",
    ),
    "turn -1": (
        lambda: op.reweight(A, B, M, TURNS, segment=SEGMENT, turn=BAD),
        r"turn is -1 at slot \d+",
    ),
    "live segment -1": (lambda: op.live_weights(A, B, M, LIVE, segment=BAD), "segment is -1"),
    "slots with segment -1": (lambda: op.slots(A, B, M, segment=BAD), "segment is -1"),
    "slots with too large a segment": (
        lambda: op.slots(A, B, M, segment=SEGMENT, sequences=2),
        "largest segment is 3",
    ),
    "diagnose segment -1": (lambda: op.diagnose(A, B, M, segment=BAD), "segment is -1"),
    "segment of floats": (
        lambda: op.reweight(A, B, M, SEQ, segment=SEGMENT.float()),
        "segment is float32",
    ),
    "segment of another length": (
        lambda: op.diagnose(A, B, M, segment=SEGMENT[1:]),
        r"segment has shape \[99\]",
    ),
    "diagnose without segment": (lambda: op.diagnose(A, B, M), "need `segment`"),
    "diagnose with short entropy": (
        lambda: op.diagnose(A, B, M, segment=SEGMENT, entropy=A[1:]),
        "entropy has shape",
    ),
    "nothing": (lambda: op.reweight([], [], [], TIS), "logp_old is an empty list"),
    "nothing to compare": (lambda: op.mismatch([], [], []), "logp_old is an empty list"),
    "nothing to diagnose": (lambda: op.diagnose([], [], []), "logp_trainer is an empty list"),
    "nothing live": (lambda: op.live_weights([], [], [], LIVE), "logp_new is an empty list"),
    "no slots": (lambda: op.reweight(A[:0], B[:0], M[:0], TIS), "selects none of 0 slots"),
    "arrays": (lambda: op.reweight(A.numpy(), B, M, TIS), "logp_old is ndarray"),
    "numbers": (lambda: op.mismatch(A.tolist(), B, M), "item 0 of logp_old is float"),
    "a list of arrays": (
        lambda: op.mismatch([np.zeros(3)], [A], [M]),
        "item 0 of logp_old is ndarray",
    ),
    "None": (lambda: op.live_weights(A, None, M, LIVE), "logp_rollout is NoneType"),
    "three axes": (
        lambda: op.reweight(*(x[None, None] for x in (A, B, M)), TIS),
        r"logp_old is float32 \[1, 1, 100\]",
    ),
    "two layouts": (lambda: op.reweight(OLD, B, M, TIS), "must have one shape"),
    "mask of numbers": (
        lambda: op.reweight(A, B, M.long(), TIS),
        r"mask \[100\] int64 .*mask\.bool\(\)",
    ),
    "diagnose by a mask of numbers": (
        lambda: op.diagnose(A, B, M.float(), segment=SEGMENT),
        "the mask bool",
    ),
    "two devices": (lambda: op.reweight(A, B.to("meta"), M, TIS), "logp_rollout on meta"),
    "another average": (
        lambda: op.reweight(A, B, M, TIS, average="tokens"),
        "average is 'tokens', expected 'slots'",
    ),
    "partials of a tensor": (lambda: op.partials(TIS, A), "slots is Tensor"),
    "partials by text": (
        lambda: op.partials("tis", op.slots(A, B, M)),
        "partials: config is the text",
    ),
    "combine of nothing": (lambda: op.combine([]), "got nothing"),
    "combine of parts": (lambda: op.combine([PART]), "got Partial"),
    "finish of sums": (lambda: op.finish(TIS, PART.sums, PART), "part is Sums and total Partial"),
    "concat of None": (lambda: RoutingTrace.concat([TRACE, None]), "item 1 is NoneType"),
    "concat of nothing": (lambda: RoutingTrace.concat([]), "no routing traces"),
    "a trace of a list": (
        lambda: RoutingTrace([[[0, 1]]], torch.ones(1, dtype=torch.bool), (0,), 4),
        "ids is list",
    ),
    "a trace of another dtype": (
        lambda: dataclasses.replace(TRACE, ids=TRACE.ids.long()),
        "ids is torch.int64",
    ),
    "padding nothing": (lambda: op.pad_routes([], torch.zeros(0, 4)), "attention_mask has no rows"),
    "padding by nothing": (lambda: op.pad_routes([], None), "attention_mask is NoneType"),
    "padding one trace": (lambda: op.pad_routes(TRACE, torch.ones(1, 1)), "traces is RoutingTrace"),
    "padding None": (lambda: op.pad_routes([None], torch.ones(1, 1)), "sample 0 has NoneType"),
    "unpadding None": (lambda: op.unpad_routes(None, torch.ones(1, 1)), "trace is NoneType"),
    "unpadding by a list": (lambda: op.unpad_routes(TRACE, [[1]]), "attention_mask is list"),
    "disagreement with None": (lambda: op.routing_disagreement(TRACE, None), "b is NoneType"),
    "disagreement by another segment": (
        lambda: op.routing_disagreement(TRACE, TRACE, segment=SEGMENT),
        r"segment is int64 \[100\], expected whole numbers \[1\]",
    ),
    "alignment of None": (lambda: op.check_alignment(TRACE, None), "native is NoneType"),
    "routes of no layer": (
        lambda: op.trace_from(TRACE.ids, layers=(), depth=1, num_experts=4),
        "layers is",
    ),
    "a model of text": (lambda: op.bind_routers("org/model"), "got str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_a_usage_error_with_its_name(case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(op.UsageError, match=words):
        call()


# --- names ----------------------------------------------------------------------------------------


def test_every_public_name_is_there_listed_and_typed() -> None:
    source = Path(op.__file__).read_text(encoding="utf-8")
    typed = [
        n
        for n in ast.parse(source).body
        if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    imported = {
        (alias.name, node.module)
        for node in ast.walk(typed[0])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(op._PUBLIC.items())
    assert set(op.__all__) == {*op._PUBLIC, "__version__"}
    assert set(op.__all__) <= set(dir(op))
    for name in op.__all__:
        assert getattr(op, name) is not None
    for name in (
        "RoutingError",
        "UsageError",
        "check_alignment",
        "trace_from",
        "partials",
        "combine",
        "finish",
    ):
        assert name in op.__all__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = op.no_such_name
    assert (Path(op.__file__).parent / "py.typed").is_file()


def test_every_public_name_is_in_a_docs_page() -> None:
    root = ROOT
    pages = "\n".join(
        path.read_text(encoding="utf-8") for path in [*root.glob("docs/*.md"), root / "README.md"]
    )
    missing = [
        name
        for name in op.__all__
        if name not in ("__version__", "Sample") and f"op.{name}" not in pages
    ]
    assert missing == []
