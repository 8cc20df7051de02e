"""Routes of a recorded generate() are in the order of its steps: routes_of_generate arranges them
for one forward, and replay refuses them otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.trl.own_model import own_rollouts
from onepolicy.replay import Routers, RoutingError
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.types import RoutingTrace
from support.replay_models import build, tokens
from support.replay_steps import checkpointed

PROMPTS = tokens()  # [3, 7]
NEW = 6


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param).eval()


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return op.bind_routers(model)


def _generate(model, routers, prompts: Tensor, **how) -> tuple[RouteRecorder, Tensor]:
    with torch.no_grad(), routers.record() as tape:
        out = model.generate(prompts, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **how)
    return tape, out


def _native(model, routers, trace: RoutingTrace, **inputs: Tensor) -> RoutingTrace:
    with torch.no_grad(), routers.replay(trace, native=True) as replayed:
        model(**inputs, use_cache=False)
    replayed.check_alignment()
    return replayed.native()


def _check_in_order(model, routers, trace: RoutingTrace, ids: Tensor) -> None:
    assert torch.equal(_native(model, routers, trace, input_ids=ids).ids, trace.ids)


def _check_laid_out(model, routers, traces: list[RoutingTrace], out: Tensor, mask: Tensor) -> None:
    """Check that every sample's rows are its routes in a padded forward and in a forward of its
    own."""
    padded, positions = op.pad_routes(traces, mask), (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": out, "attention_mask": mask, "position_ids": positions}
    native = _native(model, routers, padded, **inputs)
    assert torch.equal(native.ids[padded.valid], padded.ids[padded.valid])
    for row, keep, trace in zip(out, mask.bool(), traces, strict=True):
        assert len(trace) == int(keep.sum()) - 1
        _check_in_order(model, routers, trace, row[keep][None, :-1])


def test_as_it_comes_it_is_refused(model, routers) -> None:
    tape, out = _generate(model, routers, PROMPTS)
    trace = tape.trace()
    assert len(trace) == out[:, :-1].numel()
    words = r"6 forwards of 3 samples .*op\.pad_routes\(op\.routes_of_generate"
    for wrong in (trace, trace.to("cpu"), RoutingTrace.concat([trace])):
        for check in (True, False):
            with pytest.raises(RoutingError, match=words), routers.replay(wrong, check=check):
                pytest.fail("entered")


def test_it_is_laid_out(model, routers) -> None:
    tape, out = _generate(model, routers, PROMPTS)
    mask = torch.ones_like(out)
    traces = op.routes_of_generate(tape, out, torch.ones_like(PROMPTS))
    assert traces == op.routes_of_generate(tape, out, mask)
    _check_laid_out(model, routers, traces, out, mask)


def test_left_padding_and_early_ends(model, routers) -> None:
    """The second sample ends after its first token. By the prompts' mask its filler counts too."""
    prompts, asked = PROMPTS.clone(), torch.ones_like(PROMPTS)
    for sample, pads in ((0, 3), (1, 1)):
        asked[sample, :pads] = 0
        prompts[sample, :pads] = 0
    _, free = _generate(model, routers, prompts, attention_mask=asked)
    ends = int(free[1, 7])
    assert ends not in free[[0, 2], 7:-1]  # the case is really there
    tape, out = _generate(model, routers, prompts, attention_mask=asked, eos_token_id=ends)
    assert (out[1, 8:] == 0).all()
    assert out.shape == free.shape
    mask = torch.cat([asked, torch.ones(3, NEW, dtype=asked.dtype)], 1)
    _check_laid_out(model, routers, op.routes_of_generate(tape, out, asked), out, mask)
    mask[1, 8:] = 0
    _check_laid_out(model, routers, op.routes_of_generate(tape, out, mask), out, mask)


def test_prompts_fed_in_chunks(model, routers) -> None:
    """Chunks of several samples are ordered by step, chunks of one sample by position."""
    for prompts in (PROMPTS, PROMPTS[:1]):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), routers.record() as tape:
            for chunk in prompts.split([3, 2, 2], 1):
                model(input_ids=chunk, past_key_values=cache, use_cache=True)
        assert len(tape.forward_rows()) == 3
        if len(prompts) == 1:
            _check_in_order(model, routers, tape.trace(), prompts)
            continue
        words = "3 forwards of 3 samples"
        with pytest.raises(RoutingError, match=words), routers.replay(tape.trace()):
            pytest.fail("entered")
        traces = op.routes_of_generate(tape, prompts, torch.ones_like(prompts))
        _check_laid_out(model, routers, traces, prompts, torch.ones_like(prompts))


def test_forwards_that_wait_for_other_ranks_are_left_out(model, routers, monkeypatch) -> None:
    """generate(synced_gpus=True) goes on feeding until the slowest rank has ended."""
    tape, out = _generate(model, routers, PROMPTS)
    mask = torch.ones_like(PROMPTS)
    traces = op.routes_of_generate(tape, out, mask)
    assert op.routes_of_generate(tape, out, mask, other_ranks=True) == traces
    waits = iter([True, True, True, False] * 2)
    monkeypatch.setattr(
        model, "_has_unfinished_sequences", lambda ended, *args, **how: not ended or next(waits)
    )
    tape, again = _generate(model, routers, PROMPTS, synced_gpus=True)
    assert torch.equal(again, out)
    assert tape.forward_rows() == [PROMPTS.numel()] + [len(PROMPTS)] * (NEW - 1 + 3)
    assert op.routes_of_generate(tape, out, mask, other_ranks=True) == traces
    with pytest.raises(UsageError, match="other_ranks=True"):
        op.routes_of_generate(tape, out, mask)
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "synced_gpus": True}
    with own_rollouts(model, routers, 1.0) as own:
        model.generate(input_ids=PROMPTS, attention_mask=mask, **how)
    assert own.traces == traces


def test_recordings_in_order_are_replayed(model, routers) -> None:
    """They are one sample's generate(), and batches of their own, one after the other."""
    tape, out = _generate(model, routers, PROMPTS[:1])
    _check_in_order(model, routers, tape.trace(), out[:, :-1])
    with torch.no_grad(), routers.record() as tape:
        for half in PROMPTS.repeat(2, 1).split(3):
            model(input_ids=half)
    _check_in_order(model, routers, tape.trace(), PROMPTS.repeat(2, 1))


def test_a_taken_forward_is_forgotten(model, routers) -> None:
    with torch.no_grad(), routers.record() as tape:
        model(input_ids=PROMPTS[:, :4])
        tape.pop_ids()
        with pytest.raises(RoutingError):  # there is no forward to take
            tape.pop_ids()
        model(input_ids=PROMPTS)
    _check_in_order(model, routers, tape.trace(), PROMPTS)
    with torch.no_grad(), routers.record() as alone:
        model(input_ids=PROMPTS)
    assert tape.trace().origin == alone.trace().origin


def test_recomputes_and_hooks_leave_nothing_behind() -> None:
    trained = build("qwen3_moe").train()
    routers, hooks = op.bind_routers(trained), [m._forward_pre_hooks for m in trained.modules()]
    before = list(map(len, hooks))
    with checkpointed(trained, reentrant=False), routers.record() as tape:
        trained(input_ids=PROMPTS, use_cache=False).logits.sum().backward()
    assert tape.forward_rows() == [PROMPTS.numel()]
    assert tape.trace().origin.steps == ()
    assert list(map(len, hooks)) == before


def test_recordings_of_other_sequences_are_refused(model, routers) -> None:
    tape, out = _generate(model, routers, PROMPTS)
    asked = torch.ones_like(PROMPTS)
    for given, words in (
        ((tape.trace(), out, asked), "tape is RoutingTrace"),
        ((tape, out.tolist(), asked), "sequences is list"),
        ((tape, out, None), "attention_mask is NoneType"),
        ((tape, out, asked[:2]), r"attention_mask is int64 \[2, 7\]"),
        ((tape, out[:, :-2], asked), r"6 forwards of 21, 3, 3, .. rows"),
        ((tape, out[:2], asked[:2]), "feeds 2 x 12 tokens"),
        ((tape, out, torch.cat([asked, asked], 1)), "at most its columns"),
        ((tape, out, asked.flip(1) * torch.tensor([1, 1, 0, 1, 1, 1, 1])), "not one run of tokens"),
    ):
        with pytest.raises(op.UsageError, match=words):
            op.routes_of_generate(*given)
