"""A sample keeps its routes in any batch: left padded, right padded, packed."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay import bind_routers
from onepolicy.replay.layers import find_routers
from onepolicy.replay.padding import pad_routes, unpad_routes
from onepolicy.types import RouteSpan, RoutingTrace
from support.models import VOCAB, make
from support.replay_models import random_trace

LAYOUTS = ("left", "right", "packed")
lengths_of_samples = st.lists(st.integers(1, 13), min_size=1, max_size=4)


@cache
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Make the same weights with stock attention, and with packed attention."""
    stock, packed = make(family), make(family)
    stock.set_attn_implementation("eager")  # also where a whole row is a pad
    prepare_for_training(packed, torch.device("cpu"))
    return stock, packed


def batch(samples: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask [B, S]. Pads are a token that the samples use too."""
    width = max(map(len, samples)) + 1
    ids = torch.full((len(samples), width), 5)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        at = slice(width - len(sample), width) if side == "left" else slice(0, len(sample))
        ids[row, at], mask[row, at] = sample, 1
    return ids, mask


def run(
    family: str, samples: list[Tensor], layout: str, routes: list[RoutingTrace] | None = None
) -> tuple:
    """Return each sample's logits and its trace, recorded or replayed, from one forward in this
    layout."""
    stock, packed = models(family)
    model, lengths = (packed if layout == "packed" else stock), [len(s) for s in samples]
    if layout == "packed":
        arguments = {
            "input_ids": torch.cat(samples)[None],
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
            "packing": BucketedPacking.of(
                torch.tensor([0, *lengths]).cumsum(0), torch.device("cpu")
            ),
        }
    else:
        ids, mask = batch(samples, layout)
        arguments = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
    routers = bind_routers(model)
    if routes is None:
        with torch.no_grad(), routers.record() as tape:
            logits = model(**arguments, use_cache=False).logits
        trace = tape.trace()
    else:
        trace = RoutingTrace.concat(routes) if layout == "packed" else pad_routes(routes, mask)
        with torch.no_grad(), routers.replay(trace, check=False):
            logits = model(**arguments, use_cache=False).logits
    if layout == "packed":
        bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
        traces = [trace.rows(a, b) for a, b in itertools.pairwise(bounds)]
        return list(logits[0].split(lengths)), traces
    parts = [row[used.bool()] for row, used in zip(logits, mask, strict=True)]
    return parts, unpad_routes(trace, mask)


def margin(model: PreTrainedModel, samples: list[Tensor]) -> float:
    """Return the smallest gap between the K + 1 best router logits of any token. Below it an ulp
    may choose other experts."""
    gaps: list[float] = []

    def look(module, _, out):
        best = out[0].topk(module.top_k + 1).values
        gaps.append((best[:, :-1] - best[:, 1:]).min().item())

    handles = [router.module.register_forward_hook(look) for router in find_routers(model)]
    with torch.no_grad():
        for sample in samples:
            model(input_ids=sample[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return min(gaps)


def draw(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def alone(family: str, samples: list[Tensor], routes: list[RoutingTrace] | None = None):
    given = [None] * len(samples) if routes is None else [[trace] for trace in routes]
    runs = [run(family, [s], "right", trace) for s, trace in zip(samples, given, strict=True)]
    return [(logits[0], traces[0]) for logits, traces in runs]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@settings(max_examples=3)
@given(lengths=lengths_of_samples, seed=st.integers(0, 10_000))
def test_recorded_routes_are_those_of_the_sample_alone(family, lengths, seed) -> None:
    samples = draw(lengths, seed)
    assume(margin(models(family)[0], samples) > 1e-4)
    expected = alone(family, samples)
    for layout in LAYOUTS:
        for (_, trace), own in zip(expected, run(family, samples, layout)[1], strict=True):
            assert torch.equal(own.ids, trace.ids), layout


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@settings(max_examples=3)
@given(lengths=lengths_of_samples, seed=st.integers(0, 10_000))
def test_replayed_routes_act_on_their_own_tokens(family, lengths, seed) -> None:
    """No router would choose these routes, and every token has another set, so a row out of place
    would move the logits."""
    samples = draw(lengths, seed)
    routers = bind_routers(models(family)[0])
    shape = (routers.layers, routers.num_experts, routers.top_k)
    routes = [random_trace(n, *shape, seed=seed + i) for i, n in enumerate(lengths)]
    expected = alone(family, samples, routes)
    for layout in LAYOUTS:
        logits, traces = run(family, samples, layout, routes)
        for i, (own, _) in enumerate(expected):
            assert torch.allclose(logits[i], own, atol=2e-5, rtol=1e-4), layout
            assert torch.equal(traces[i].ids, routes[i].ids)


def trace_of(rows: int, **fields) -> RoutingTrace:
    return dataclasses.replace(random_trace(rows, (0, 2), 8, 2, seed=rows), **fields)


def test_pads_and_the_last_sampled_token_route_natively() -> None:
    """[2, 4] holds 3 tokens with an engine's trace of 2 rows, and 2 with a recorded one of 2. Spans
    move along."""
    first, second = trace_of(2, spans=(RouteSpan(0, 2, "decode", 7),)), trace_of(2)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    padded = pad_routes([first, second], mask)
    assert padded.valid.tolist() == [False, True, True, False, True, True, False, False]
    assert torch.equal(padded.ids[1:3], first.ids)
    assert torch.equal(padded.ids[4:6], second.ids)
    assert padded.spans == (RouteSpan(1, 2, "decode", 7),)
    back = unpad_routes(padded, mask)
    assert [t.valid.tolist() for t in back] == [[True, True, False], [True, True]]
    assert torch.equal(back[1].ids, second.ids)


def test_combine_weights_are_padded_too() -> None:
    trace = trace_of(2, weights=torch.rand(2, 2, 2))
    padded = pad_routes([trace], torch.tensor([[0, 1, 1]]))
    assert torch.equal(padded.weights[1:], trace.weights)


REFUSED = [
    ([3, 1], [1, 1, 1], "sample 1 has 3 tokens but 1 routing rows"),
    ([3, 4], [1, 1, 1], "sample 1 has 3 tokens but 4"),
    ([3], [1, 1, 1], "1 traces for a batch of 2"),
    ([3, 2], [1, 0, 1], "sample 1 is not one run"),
    ([3, 0], [0, 0, 0], "sample 1 is not one run"),
    ([3, None], [1, 1, 1], "sample 1 has NoneType in place of a RoutingTrace"),
]


def test_routes_that_do_not_fit_are_refused(subtests) -> None:
    for lengths, second, words in REFUSED:
        traces = [None if n is None else trace_of(n) for n in lengths]
        with subtests.test(words), pytest.raises(UsageError, match=words):
            pad_routes(traces, torch.tensor([[1, 1, 1], second]))
    with pytest.raises(UsageError, match=r"5 rows, attention_mask is \[2, 3\]"):
        unpad_routes(trace_of(5), torch.ones(2, 3))
