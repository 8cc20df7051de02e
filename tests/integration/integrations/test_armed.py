"""Replay of forwards deep inside another function: every layout, chunks, recomputes, refusals."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.core.armed import ArmedReplay
from onepolicy.types import RoutingTrace
from support.paths import ROOT
from support.planted_routes import one_row_late
from support.replay_models import build, random_trace, tokens

LENGTHS = [5, 8, 3, 6]


def samples() -> list[Tensor]:
    return [tokens(1, length, seed=length)[0] for length in LENGTHS]


def padded(side: str) -> dict[str, Tensor]:
    """Return input_ids and attention_mask, padded on the left, on the right or on both sides."""
    width = max(LENGTHS) + 3
    batch = {name: torch.zeros(len(LENGTHS), width, dtype=torch.long) for name in "im"}
    for row, sample in enumerate(samples()):
        start = {"left": width - len(sample), "right": 0, "both": 1}[side]
        batch["i"][row, start : start + len(sample)] = sample
        batch["m"][row, start : start + len(sample)] = 1
    return {"input_ids": batch["i"], "attention_mask": batch["m"]}


def other_routes(model: PreTrainedModel) -> list[RoutingTrace]:
    """Return routes that are not the model's own, without those of the last tokens."""
    bound = op.bind_routers(model)
    return [
        random_trace(length - 1, bound.layers, bound.num_experts, bound.top_k, seed=length)
        for length in LENGTHS
    ]


def own_routes(model: PreTrainedModel) -> list[RoutingTrace]:
    """Return the model's own routes, without those of the last tokens."""
    found = []
    for sample in samples():
        with torch.no_grad(), op.bind_routers(model).record() as tape:
            model(input_ids=sample[None])
        found.append(tape.trace().rows(0, len(sample) - 1))
    return found


def alone(model: PreTrainedModel, traces: list[RoutingTrace]) -> list[Tensor]:
    """Return each sample's logits, replayed by itself."""
    bound, found = op.bind_routers(model), []
    for sample, trace in zip(samples(), traces, strict=True):
        whole = op.pad_routes([trace], torch.ones(1, len(sample)))
        with torch.no_grad(), bound.replay(whole, check=False):
            found.append(model(input_ids=sample[None]).logits[0])
    return found


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe").eval()


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("chunk", [4, 3, 1])
def test_padded_batches_in_chunks_replay_each_sample(model, side: str, chunk: int):
    traces, batch = other_routes(model), padded(side)
    armed, found = ArmedReplay(model), []
    with torch.no_grad(), armed.batch(traces, native=True, check=False) as opened:
        for start in range(0, len(LENGTHS), chunk):
            part = {name: value[start : start + chunk] for name, value in batch.items()}
            found.append(model(**part).logits)
    assert opened.forwards == -(-len(LENGTHS) // chunk)
    logits = torch.cat(found)
    for row, expected in enumerate(alone(model, traces)):
        torch.testing.assert_close(
            logits[row][batch["attention_mask"][row] == 1], expected, rtol=1e-4, atol=1e-4
        )
    assert [len(own) for own in opened.native] == LENGTHS


def test_a_packed_row_replays_each_sample():
    model = build("qwen3_moe").eval()
    model.set_attn_implementation("sdpa")
    traces, armed = other_routes(model), ArmedReplay(model)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    whole = torch.cat(samples())[None]
    with torch.no_grad(), armed.batch(traces, native=True, check=False) as opened:
        model(input_ids=whole, position_ids=positions)
    bound = armed.routers
    layout = op.RoutingTrace.concat(
        [op.pad_routes([t], torch.ones(1, n)) for t, n in zip(traces, LENGTHS, strict=True)]
    )
    with torch.no_grad(), bound.replay(layout, native=True, check=False) as handle:
        model(input_ids=whole, position_ids=positions)
    assert op.RoutingTrace.concat(opened.native) == handle.native()


def test_gradients_with_checkpointing_are_those_without(model):
    traces, batch = other_routes(model), padded("right")

    def gradients(prepare: Callable[[], None]) -> dict[str, Tensor]:
        prepare()
        model.train().zero_grad(set_to_none=True)
        armed = ArmedReplay(model)
        with armed.batch(traces, check=False):
            loss = model(**batch, use_cache=False).logits.logsumexp(-1).mean()
        loss.backward()
        armed.remove()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients(lambda: None)
    recomputed = gradients(model.gradient_checkpointing_enable)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    model.zero_grad(set_to_none=True)
    model(**batch, use_cache=False).logits.logsumexp(-1).mean().backward()
    native = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not all(torch.equal(plain[name], native[name]) for name in plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_whole_model_is_refused(model, reentrant):
    armed, ids = ArmedReplay(model.train()), padded("right")["input_ids"]
    with (
        pytest.raises(UsageError, match="checkpoint its layers instead"),
        armed.batch(other_routes(model), check=False),
    ):
        checkpoint(lambda given: model(given, use_cache=False).logits, ids, use_reentrant=reentrant)
    armed.remove()


def test_outside_a_batch_the_model_routes_itself(model):
    batch = padded("left")
    with torch.no_grad():
        expected = model(**batch).logits
        armed = ArmedReplay(model)
        assert torch.equal(model(**batch).logits, expected)
        with armed.batch(other_routes(model), check=False):
            replayed = model(**batch).logits
        assert not torch.equal(replayed, expected)
        assert torch.equal(model(**batch).logits, expected)


def test_the_page_s_lines_run_as_they_stand(model):
    """The block that arms a model in docs/other_trainers.md, then the one that logs."""
    page = (ROOT / "docs" / "other_trainers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    given, mask = padded("left"), torch.ones(1, 4)
    known = {"model": model, "traces": own_routes(model), "batch": given, "lengths": LENGTHS}
    known |= {"logp_old": -mask, "logp_rollout": -mask, "mask": mask}
    known["trainer"] = SimpleNamespace(
        compute_loss=lambda model, batch: model(**batch).logits.float().logsumexp(-1).mean()
    )
    for name in ("ArmedReplay", "replay_metrics"):
        (block,) = [block for block in blocks if f"import {name}" in block or f", {name}" in block]
        exec(block, known)
    assert known["log"]["replay/native_rows"] == known["log"]["replay/missing_samples"] == 0
    assert known["log"]["routing/agreement"] == 1


def test_a_sample_without_routes_is_native(model):
    traces: list[RoutingTrace | None] = list(other_routes(model))
    traces[1] = None
    batch = padded("right")
    armed = ArmedReplay(model)
    with torch.no_grad(), armed.batch(traces, native=True, check=False) as opened:
        found = model(**batch).logits
    with torch.no_grad():
        native = model(**batch).logits
    length = LENGTHS[1]
    torch.testing.assert_close(found[1, :length], native[1, :length], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0, : LENGTHS[0]], native[0, : LENGTHS[0]])
    assert [own is None for own in opened.native] == [False, True, False, False]
    with torch.no_grad(), armed.batch([None] * 4, native=True) as opened:
        assert torch.equal(model(**batch).logits, native)
    assert opened.native == [None] * 4


@pytest.mark.parametrize("empty", [[1], [0, 1, 2, 3]])
def test_a_trace_without_a_valid_row_is_as_none(model, empty):
    """Samples that only fill a batch up have such traces."""
    traces, batch = other_routes(model), padded("right")
    for sample in empty:
        nothing = torch.zeros(len(traces[sample]), dtype=torch.bool)
        traces[sample] = dataclasses.replace(traces[sample], valid=nothing)
    none = [trace if trace.valid.any() else None for trace in traces]
    armed, found = ArmedReplay(model), []
    for given in (traces, none):
        with torch.no_grad(), armed.batch(given, native=True, check=len(empty) == 4) as opened:
            found.append((model(**batch).logits, opened))
    (logits, opened), (expected, reference) = found
    assert torch.equal(logits, expected)
    assert opened.native == reference.native
    assert [own is None for own in opened.native] == [sample in empty for sample in range(4)]


def test_a_longer_trace_is_cut_to_its_sample(model):
    """A trainer that masks a truncated response feeds the prompt alone."""
    traces = other_routes(model)
    batch = padded("right")
    batch["attention_mask"][1, 4:] = 0
    armed = ArmedReplay(model)
    with torch.no_grad(), armed.batch(traces, check=False):
        found = model(**batch).logits
    bound = armed.routers
    with torch.no_grad(), bound.replay(traces[1].rows(0, 4), check=False):
        expected = model(input_ids=batch["input_ids"][1:2, :4]).logits[0]
    torch.testing.assert_close(found[1, :4], expected, rtol=1e-4, atol=1e-4)


def test_wrong_routes_stop_at_the_first_forward(model):
    bound = op.bind_routers(model)
    batch = {"input_ids": tokens(4, 30), "attention_mask": torch.ones(4, 30)}
    with torch.no_grad(), bound.record() as tape:
        model(**batch)
    own = op.unpad_routes(tape.trace(), batch["attention_mask"])
    armed = ArmedReplay(model)
    with torch.no_grad(), armed.batch(own):
        model(**batch)
    late = [one_row_late(trace) for trace in own]
    stopped = pytest.raises(op.RoutingError, match="not those of this forward")
    with stopped, torch.no_grad(), armed.batch(late):
        model(**batch)
    with stopped, torch.no_grad(), armed.batch(late):
        try:  # as a trainer that tries a forward again
            raise MemoryError
        except MemoryError:
            model(**batch)
    with torch.no_grad():
        model(**batch)  # the hooks left no replay behind


def test_a_wrong_sample_is_dropped_and_counted(model):
    tokens_of = {"input_ids": tokens(6, 30), "attention_mask": torch.ones(6, 30)}
    bound = op.bind_routers(model)
    with torch.no_grad(), bound.record() as tape:
        model(**tokens_of)
    traces = op.unpad_routes(tape.trace(), tokens_of["attention_mask"])
    traces[4] = random_trace(30, bound.layers, bound.num_experts, bound.top_k)
    armed = ArmedReplay(model)
    with torch.no_grad(), armed.batch(traces, on_mismatch="drop") as opened:
        for start in (0, 3):
            model(**{name: value[start : start + 3] for name, value in tokens_of.items()})
    assert opened.dropped == [4]
    stopped = pytest.raises(op.RoutingError, match="sample 4 of the batch")
    with stopped, torch.no_grad(), armed.batch(traces):
        model(**tokens_of)


def test_a_mask_without_its_name_is_refused(model):
    """Routes would be laid over the padding."""
    batch = padded("left")
    with (
        pytest.raises(UsageError, match=r"2 arguments without a name; .* pass attention_mask="),
        ArmedReplay(model).batch(other_routes(model), check=False),
    ):
        model(batch["input_ids"], batch["attention_mask"])


def test_more_and_fewer_samples_than_traces(model):
    traces, batch = other_routes(model), padded("left")
    armed = ArmedReplay(model)
    fewer = pytest.raises(op.RoutingError, match="has 4 samples, but only 3 of 3 traces")
    with fewer, armed.batch(traces[:3], check=False):
        model(**batch)
    part = {name: value[:3] for name, value in batch.items()}
    more = pytest.raises(op.RoutingError, match="1 of 4 traces were not used: the trainer's 1")
    with more, armed.batch(traces, check=False):
        model(**part)
    with torch.no_grad(), armed.batch(traces, check=False):
        model(**batch)


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, Interrupt])
def test_an_interrupted_forward_leaves_the_model_as_it_was(model, error):
    batch = padded("left")
    with torch.no_grad():
        expected = model(**batch).logits
    armed, layer = ArmedReplay(model), model.model.layers[-1]

    def fail(*_: object) -> None:
        raise error

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(error), armed.batch(other_routes(model), check=False):
        model(**batch)
    hook.remove()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, expected)
        with armed.batch(other_routes(model), check=False):
            assert not torch.equal(model(**batch).logits, expected)


def test_what_cannot_be_right_is_refused(model):
    traces, batch = other_routes(model), padded("left")
    armed = ArmedReplay(model)
    with pytest.raises(UsageError, match="output_router_logits=True"), armed.batch(traces):
        model(**batch, output_router_logits=True)
    refused = pytest.raises(UsageError, match="another batch of this model is open")
    with refused, armed.batch(traces), armed.batch(traces):
        pass
    with pytest.raises(UsageError, match="input_ids NoneType"), armed.batch(traces):
        model(inputs_embeds=torch.zeros(4, 11, model.config.hidden_size))
    with pytest.raises(UsageError, match="the model is compiled"):
        ArmedReplay(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="the model is compiled"), armed.batch(traces):
        model(**batch)


def test_removed_hooks_replay_nothing(model):
    batch = padded("left")
    armed = ArmedReplay(model)
    armed.remove()
    unused = pytest.raises(op.RoutingError, match="4 of 4 traces were not used")
    with unused, armed.batch(other_routes(model), check=False):
        model(**batch)
