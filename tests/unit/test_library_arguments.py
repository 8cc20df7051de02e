"""The library's functions: any layout, ids of any size, one kind of error."""

import ast
import contextlib
import math
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import onepolicy as op
import onepolicy.correct.slots as slots_module
from onepolicy.config.presets import correction_presets
from onepolicy.types import RoutingTrace
from support.paths import ROOT

LENGTHS = [40, 25, 33, 2]
DRAW = torch.Generator().manual_seed(0)
OLD = [-3 * torch.rand(n, generator=DRAW) - 1 for n in LENGTHS]
ROLLOUT = [old + 0.1 * torch.randn(len(old), generator=DRAW) for old in OLD]
MASK = [torch.rand(n, generator=DRAW) < 0.8 for n in LENGTHS]
ADVANTAGE = [torch.randn(n, generator=DRAW) for n in LENGTHS]
TURN = [torch.arange(n) // 10 for n in LENGTHS]
SEGMENT = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


FLAT = [torch.cat(values) for values in (OLD, ROLLOUT, MASK)]
PADDED = [pad_sequence(values, batch_first=True) for values in (OLD, ROLLOUT, MASK)]
UNITS = {"segment": SEGMENT, "turn": torch.cat(TURN), "advantage": torch.cat(ADVANTAGE)}


def _in_each_layout(function: Callable[..., Any]) -> list[Any]:
    ragged = {"turn": TURN, "advantage": ADVANTAGE}
    padded = {name: pad_sequence(values, batch_first=True) for name, values in ragged.items()}
    padded["turn"] = padded["turn"].reshape(-1)  # flat fields go with any layout
    return [
        function(*FLAT, **UNITS),
        function(*PADDED, **padded),
        function(OLD, ROLLOUT, MASK, **ragged),
    ]


@pytest.mark.parametrize("name", ["pg-tis", "opsm", "pg-seq-tis", "dppo-tv"])
def test_live_weights_takes_every_layout(name: str) -> None:
    part = op.preset(name).live_part
    found = _in_each_layout(lambda *fields, **more: op.live_weights(*fields, part, **more))
    for field in ("weight", "keep", "centred"):
        packed, padded, ragged = (getattr(live, field) for live in found)
        assert padded.shape == PADDED[0].shape
        rows = [row[:n] for row, n in zip(padded, LENGTHS, strict=True)]
        assert torch.equal(packed, torch.cat(rows))
        assert torch.equal(packed, torch.cat(list(ragged)))
        assert list(map(len, ragged)) == LENGTHS


def test_mismatch_and_diagnose_take_every_layout() -> None:
    packed, padded, ragged = _in_each_layout(
        lambda *f, turn, advantage, **more: op.mismatch(*f, **more)
    )
    assert packed.metrics() == padded.metrics() == ragged.metrics()
    assert packed.ppl_ratio == padded.ppl_ratio
    one = op.mismatch(OLD[0], ROLLOUT[0], MASK[0])  # [T] without segment is one sample
    assert one.ppl_ratio == op.mismatch(OLD[:1], ROLLOUT[:1], MASK[:1]).ppl_ratio
    found = _in_each_layout(lambda *f, turn, advantage, **more: op.diagnose(*f, **more))
    assert len({diagnosis.text() for diagnosis in found}) == 1
    assert op.diagnose(*PADDED, segment=torch.zeros_like(PADDED[0]).long()).gap > 0
    one = torch.zeros_like(A).long()
    assert op.diagnose(A, B, M) == op.diagnose(A, B, M, segment=one)  # [T] is one sample


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["seq-tis", "k3-rs", "turn", "opsm"])
def test_memory_depends_on_the_number_of_segments(name: str) -> None:
    """The weights are those with ids 0, 1, .., and no array is as long as the largest id."""
    from onepolicy.train.dry_run import PeakMemory

    config = op.preset("seq-tis", weight={"level": "turn"}) if name == "turn" else op.preset(name)
    weigh, part = op.reweight, config
    if config.live_part is not None:
        weigh, part = op.live_weights, config.live_part
    turn, found = UNITS["turn"], []
    ids = [(SEGMENT, turn)]
    spread = torch.tensor([2**40, 3, 0, 2**40 - 1])[SEGMENT]
    ids += [(SEGMENT, turn * 2**38), (spread, turn * 7919)]
    for segment, turns in ids:
        more = UNITS | {"segment": segment, "turn": turns}
        chunks = mock.patch.object(slots_module, "CHUNK", 32)
        with chunks, PeakMemory([*FLAT, *more.values()]) as peak:
            found.append(weigh(*FLAT, part, **more))
        assert peak.peak < 400_000  # histograms of fixed size, mostly
    assert all(torch.equal(made.weight, found[0].weight) for made in found)
    assert all(torch.equal(made.keep, found[0].keep) for made in found)


def test_parts_of_a_step_may_have_large_ids_too() -> None:
    config, ids = op.preset("seq-tis", normalise="self"), torch.tensor([7, 10**12, 5, 0])
    whole = op.reweight(*FLAT, config, segment=SEGMENT)
    parts = [
        op.partials(config, op.slots(*fields, segment=number.expand(len(fields[0]))))
        for *fields, number in zip(OLD, ROLLOUT, MASK, ids, strict=True)
    ]
    total = op.combine(part.sums for part in parts)
    done = [op.finish(config, part, total) for part in parts]
    torch.testing.assert_close(torch.cat([weight for weight, _, _ in done]), whole.weight)
    assert torch.equal(torch.cat([keep for _, keep, _ in done]), whole.keep)
    assert done[0][2]["correction/kept"] == whole.report["correction/kept"]


# --- not finite -----------------------------------------------------------------------------------


WIDE = {  # bounds that reject nothing finite
    **dict.fromkeys(("ratio", "k1", "k2", "k3", "exp_abs"), ("high", 1e9)),
    **dict.fromkeys(("binary_kl", "binary_kl_sym"), ("high", 1e9)),
    **dict.fromkeys(("prob_diff", "tv"), ("high", 0.999)),
    "trainer_prob": ("low", 1e-30),
}
BOUNDED = ("exp_abs", "trainer_prob", "prob_diff", "tv")
"""Statistics whose sums are refused, or bounded by more than 0.999."""
NOT_FINITE = (-math.inf, math.inf, math.nan)


@pytest.mark.few(2)
@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "min"])
def test_an_infinite_slot_takes_its_unit_with_it(aggregate: str, subtests) -> None:
    second = SEGMENT == 1
    slot = int((FLAT[2] & second).nonzero()[3])
    for (statistic, (side, bound)), value in product(WIDE.items(), NOT_FINITE):
        if aggregate == "sum" and statistic in BOUNDED:
            continue
        gate = {"statistic": statistic, "aggregate": aggregate, "scope": "sequence", side: bound}
        config = op.preset("recompute", gates=[gate], max_nonfinite=1.0)
        for spoilt in (0, 1):
            with subtests.test(statistic, value=value, spoilt=spoilt):
                fields = [field.clone() for field in FLAT]
                fields[spoilt][slot] = value
                keep = op.reweight(*fields, config, segment=SEGMENT).keep
                assert not keep[second].any()
                assert torch.equal(keep[~second], FLAT[2][~second])


def test_every_preset_rejects_the_sequence_of_an_infinite_ratio() -> None:
    old, rollout, mask = FLAT
    rollout = rollout.clone()
    rollout[int((mask & (SEGMENT == 0)).nonzero()[2])] = -math.inf
    tried = set()
    for name in correction_presets():
        config = op.preset(name, max_nonfinite=1.0)
        if config.gates and not config.live and {g.scope for g in config.gates} == {"sequence"}:
            keep = op.reweight(old, rollout, mask, config, **UNITS).keep
            assert not keep[SEGMENT == 0].any(), name
            tried.add(name)
    assert "flash-reinforce" in tried


# --- wrong arguments ------------------------------------------------------------------------------

A, B, M = FLAT
TIS, LIVE = op.preset("tis"), op.preset("pg-tis").live_part
SEQ, TURNS = op.preset("seq-tis"), op.preset("seq-tis", weight={"level": "turn"})
BAD = SEGMENT.clone()
BAD[int(M.nonzero()[3])] = -1
VALID = torch.ones(1, dtype=torch.bool)
TRACE = RoutingTrace(torch.tensor([[[0, 1]]], dtype=torch.uint8), VALID, (0,), 4)
SLOTS = op.slots(A, B, M, segment=SEGMENT)
PART = op.partials(TIS, SLOTS)
ONE = torch.ones(1, 1)


def weigh(*args: Any, **more: Any) -> Callable[[], Any]:
    return lambda: op.reweight(*args, **more)


def look(**more: Any) -> Callable[[], Any]:
    return lambda: op.diagnose(A, B, M, **more)


def live(*args: Any, **more: Any) -> Callable[[], Any]:
    return lambda: op.live_weights(*args, **more)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (weigh(A, B, M, "tis"), r"config is the text 'tis'.*op\.preset\('tis'\)"),
    (weigh(A, B, M, {"preset": "tis"}), "config is dict"),
    (live(A, B, M, "pg-tis"), "live_weights: config is the text"),
    (live(A, B, M, TIS.live_part), "live_weights: config is None.*live part"),
    (lambda: op.predict("tis", kl=1e-3, length=9), "predict: config is the text 'tis'"),
    (lambda: op.predict(TIS, kl="small", length=9), "predict: kl=small"),
    (lambda: op.preset(None), "no correction is called None"),
    (lambda: op.preset(["tis"]), "no correction is called"),
    (lambda: op.preset("tiss"), r"there are recompute, .*, off, bypass; did you mean tis\?"),
    (lambda: op.preset("of"), r"did you mean off\?"),
    # segments and turns
    (weigh(A, B, M, SEQ, segment=BAD), r"segment is -1 at slot \d+.*count from 0"),
    (weigh(A, B, M, TURNS, segment=SEGMENT, turn=BAD), r"turn is -1 at slot \d+"),
    (live(A, B, M, LIVE, segment=BAD), "segment is -1"),
    (lambda: op.slots(A, B, M, segment=BAD), "segment is -1"),
    (lambda: op.slots(A, B, M, segment=SEGMENT, sequences=2), "largest segment is 3"),
    (look(segment=BAD), "segment is -1"),
    (weigh(A, B, M, SEQ, segment=SEGMENT.float()), "segment is float32"),
    (look(segment=SEGMENT[1:]), r"segment has shape \[99\]"),
    (look(segment=SEGMENT, entropy=A[1:]), "entropy has shape"),
    # fields
    (weigh([], [], [], TIS), "logp_old is an empty list"),
    (lambda: op.mismatch([], [], []), "logp_old is an empty list"),
    (lambda: op.diagnose([], [], []), "logp_trainer is an empty list"),
    (live([], [], [], LIVE), "logp_new is an empty list"),
    (weigh(A[:0], B[:0], M[:0], TIS), "selects none of 0 slots"),
    (weigh(A.numpy(), B, M, TIS), "logp_old is ndarray"),
    (lambda: op.mismatch(A.tolist(), B, M), "item 0 of logp_old is float"),
    (lambda: op.mismatch([np.zeros(3)], [A], [M]), "item 0 of logp_old is ndarray"),
    (live(A, None, M, LIVE), "logp_rollout is NoneType"),
    (weigh(*(x[None, None] for x in FLAT), TIS), r"logp_old is float32 \[1, 1, 100\]"),
    (weigh(OLD, B, M, TIS), "must have one shape"),
    (weigh(A, B[1:], M, TIS), r"logp_rollout \[99\] .* must have one shape"),
    (weigh(A, B, M.long(), TIS), r"mask \[100\] int64 .*mask\.bool\(\)"),
    (lambda: op.diagnose(A, B, M.float(), segment=SEGMENT), "the mask bool"),
    (weigh(A, B.to("meta"), M, TIS), "logp_rollout on meta"),
    (weigh(A, B, M, TIS, average="tokens"), "average is 'tokens', expected 'slots'"),
    # a step in parts
    (lambda: op.partials(TIS, A), "slots is Tensor"),
    (lambda: op.partials("tis", SLOTS), "partials: config is the text"),
    (lambda: op.combine([]), "got nothing"),
    (lambda: op.combine([PART]), "got Partial"),
    (lambda: op.finish(TIS, PART.sums, PART), "part is Sums and total Partial"),
    # routes
    (lambda: RoutingTrace.concat([TRACE, None]), "item 1 is NoneType"),
    (lambda: RoutingTrace.concat([]), "no routing traces"),
    (lambda: RoutingTrace([[[0, 1]]], VALID, (0,), 4), "ids is list"),
    (lambda: op.pad_routes([], torch.zeros(0, 4)), "attention_mask has no rows"),
    (lambda: op.pad_routes([], None), "attention_mask is NoneType"),
    (lambda: op.pad_routes(TRACE, ONE), "traces is RoutingTrace"),
    (lambda: op.pad_routes([None], ONE), "sample 0 has NoneType"),
    (lambda: op.unpad_routes(None, ONE), "trace is NoneType"),
    (lambda: op.unpad_routes(TRACE, [[1]]), "attention_mask is list"),
    (lambda: op.routing_disagreement(TRACE, None), "b is NoneType"),
    (
        lambda: op.routing_disagreement(TRACE, TRACE, segment=SEGMENT),
        r"segment is int64 \[100\], expected whole numbers \[1\]",
    ),
    (lambda: op.check_alignment(TRACE, None), "native is NoneType"),
    (lambda: op.trace_from(TRACE.ids, layers=(), depth=1, num_experts=4), "layers is"),
    (
        lambda: op.trace_from([[[0, 1]]], layers=(0,), depth=1, num_experts=4),
        r"routes are list.*onepolicy\.integrations\.core\.payload\.to_trace reads",
    ),
    (lambda: op.bind_routers("org/model"), "got str"),
]


def test_a_wrong_argument_is_a_usage_error_with_its_name(subtests) -> None:
    for call, words in WRONG:
        with subtests.test(words), pytest.raises(op.UsageError, match=words):
            call()


# --- names ----------------------------------------------------------------------------------------


def test_every_public_name_is_there_listed_and_typed() -> None:
    tree = ast.parse(Path(op.__file__).read_text(encoding="utf-8"))
    ifs = [node for node in tree.body if isinstance(node, ast.If)]
    (typed,) = [node for node in ifs if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in ast.walk(typed) if isinstance(node, ast.ImportFrom)]
    imported = {alias.name: node.module for node in imports for alias in node.names}
    assert set(op.__all__) == {*imported, "__version__"}
    assert set(op.__all__) <= set(dir(op))
    for name, module in imported.items():
        assert getattr(op, name) is getattr(import_module(module), name)
    library = "RoutingError UsageError check_alignment trace_from partials combine finish"
    assert set(library.split()) <= set(op.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = op.no_such_name
    assert (Path(op.__file__).parent / "py.typed").is_file()


def test_every_public_name_is_in_a_docs_page() -> None:
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = [name for name in op.__all__ if f"op.{name}" in text]
    assert set(op.__all__) - set(named) <= {"__version__", "Sample"}


def test_a_mistyped_name_of_the_library_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match=r"'reweigth'; did you mean reweight\?"):
        _ = op.reweigth
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        _ = op.zzz
    assert not hasattr(op, "reweigth")


def test_public_names_resolve():
    for name in op.__all__:
        assert getattr(op, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = op.no_such_name


# --- kinds of values ------------------------------------------------------------------------------

SLOTS = 12
NUMBERS = -torch.rand(SLOTS, generator=DRAW)
ODD: dict[str, Any] = {
    "none": None,
    "number": 3,
    "text": "x",
    "array": NUMBERS.numpy(),
    "dict": {"a": 1},
    "float8": NUMBERS.to(torch.float8_e4m3fn),
    "complex": NUMBERS + 0j,
    "scalar": torch.tensor(-1.0),
    "no slots": torch.zeros(0),
    "no columns": torch.zeros(SLOTS, 0),
    "meta": torch.empty(SLOTS, device="meta"),
    "sparse": NUMBERS.to_sparse(),
    "nested": torch.nested.nested_tensor([NUMBERS, NUMBERS[:3]]),
    "quantised": torch.quantize_per_tensor(NUMBERS, 0.1, 0, torch.qint8),
    "nan": torch.full((SLOTS,), math.nan),
    "infinite": torch.full((SLOTS,), -math.inf),
    "below 0": torch.full((SLOTS,), -3),
    "huge": torch.full((SLOTS,), 2**62),
    "uint16": torch.arange(SLOTS).to(torch.uint16),
    "uint64": torch.arange(SLOTS).to(torch.uint64),
    "bool": torch.ones(SLOTS, dtype=torch.bool),
    "bfloat16": NUMBERS.bfloat16(),
    "parameter": torch.nn.Parameter(NUMBERS.clone()),
}
COUNTED = torch.arange(SLOTS)
GIVEN = {
    "mask": COUNTED % 4 != 0,
    "segment": COUNTED // 4,
    "turn": COUNTED * 0,
    "logits": torch.randn(SLOTS, 20, generator=DRAW),
} | dict.fromkeys(("tokens", "tokens_rollout", "version"), COUNTED)
SIDES = ("logp_rollout", "mask", "segment")
TIS, LIVE = op.preset("tis"), op.preset("pg-tis").live_part
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "mismatch": (op.mismatch, ("logp_old", *SIDES)),
    "reweight": (
        lambda logp_old, logp_rollout, mask, **more: op.reweight(
            logp_old, logp_rollout, mask, TIS, **more
        ),
        ("logp_old", *SIDES, "turn", "advantage"),
    ),
    "live_weights": (
        lambda logp_new, logp_rollout, mask, **more: op.live_weights(
            logp_new, logp_rollout, mask, LIVE, **more
        ),
        ("logp_new", *SIDES, "turn", "advantage"),
    ),
    "slots": (op.slots, ("logp_trainer", *SIDES, "turn", "advantage")),
    "diagnose": (
        op.diagnose,
        ("logp_trainer", *SIDES, "tokens", "tokens_rollout", "version", "logp_base", "entropy"),
    ),
    "log_probs": (op.log_probs, ("logits", "tokens", "mask", "temperature")),
    "trace_from": (
        lambda ids: op.trace_from(ids, layers=(0,), depth=1, num_experts=8),
        ("ids",),
    ),
    "pad_routes": (lambda attention_mask: op.pad_routes([], attention_mask), ("attention_mask",)),
    "combine": (op.combine, ("parts",)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_odd_values_never_reach_torch(subtests: Any, function: str) -> None:
    """Whatever stands in one argument, beside good ones: a result, or an error of ours."""
    call, names = FUNCTIONS[function]
    for name, (odd, value) in product(names, ODD.items()):
        given = {each: GIVEN.get(each, NUMBERS) for each in names}
        if function == "log_probs":
            given["temperature"] = 0.7
        with subtests.test(argument=name, value=odd), contextlib.suppress(op.UsageError):
            call(**(given | {name: value}))


def test_the_argument_is_named(subtests: Any) -> None:
    for odd, said in {
        "sparse": "segment is float32 [12], nested, sparse or quantised; expected a plain tensor",
        "meta": "segment is float32 [12], expected whole numbers; pass segment.long()",
        "uint16": "segment is uint16 [12], expected whole numbers; pass segment.long()",
        "nested": "segment is Tensor, nested, sparse or quantised",
        "text": "segment is str, expected a tensor of whole numbers",
    }.items():
        with subtests.test(value=odd), pytest.raises(op.UsageError) as error:
            op.slots(NUMBERS, NUMBERS, GIVEN["mask"], segment=ODD[odd])
        assert f"slots: {said}" in str(error.value)


def test_log_probs_takes_what_frameworks_hand_it(subtests: Any) -> None:
    """numpy's numbers, narrow ids, tensors without values, a graph that is being made."""
    logits, tokens = torch.randn(4, 9, generator=DRAW), torch.tensor([0, 8, 3, 1])
    expected = op.log_probs(logits, tokens, temperature=2.0)
    for name, found in {
        "numpy's number": op.log_probs(logits, tokens, temperature=np.float32(2)),
        "numpy's int": op.log_probs(logits, tokens, temperature=np.int64(2)),
        "tensor": op.log_probs(logits, tokens, temperature=torch.tensor(2.0)),
        "uint16": op.log_probs(logits, tokens.to(torch.uint16), temperature=2.0),
    }.items():
        with subtests.test(name):
            assert torch.equal(found, expected)
    empty = op.log_probs(logits.to("meta"), tokens.to("meta"))
    assert (empty.shape, empty.device.type) == ((4,), "meta")


def test_a_label_to_ignore_is_named() -> None:
    tokens = torch.tensor([3, -100, 5])
    with pytest.raises(op.UsageError, match=r"tokens is -100 at slot 1, expected ids below 20"):
        op.log_probs(torch.zeros(3, 20), tokens)
    assert op.log_probs(torch.zeros(3, 20), tokens, mask=tokens > 0)[1] == 0
