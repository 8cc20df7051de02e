"""Prompt + completion -> Sample: which slot gets what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.types import Completion, RoutingTrace, Sample


def sample_from_completion(
    prompt_ids: Sequence[int], completion: Completion, reward: float, temperature: float
) -> Sample:
    """A prompt of P tokens and a response of n give N = P + n tokens and T = N - 1 slots; the response's tokens are
    predicted by the last n slots, P - 1 on. The P - 1 slots before them predict prompt tokens and are not trained."""
    assert prompt_ids, "a response needs at least one prompt token to be predicted from"
    assert len(completion.token_ids) > 0, "a completion has at least one token"
    before, after = len(prompt_ids) - 1, len(completion.token_ids)
    prompt = torch.tensor(list(prompt_ids), dtype=torch.int32)
    return Sample(
        tokens=torch.cat([prompt, completion.token_ids.cpu().int()]),
        trainable=torch.arange(before + after) >= before,
        logp_rollout=torch.cat([torch.full((before,), float("nan")), completion.logp.cpu().float()]),
        version=torch.cat([torch.full((before,), -1, dtype=torch.int32), completion.version.cpu().int()]),
        turn=torch.cat([torch.full((before,), -1, dtype=torch.int32), torch.zeros(after, dtype=torch.int32)]),
        temperature=temperature,
        reward=reward,
        finish=completion.finish,
        routing=_whole_path(completion, before + after),
        top_ids=_after(before, completion.top_ids, 0),
        top_logp_rollout=_after(before, completion.top_logp, float("nan")),
    )


def _after(before: int, rows: Tensor | None, value: float) -> Tensor | None:
    """[before + n, k]: `rows` [n, k] on the slots that predict the response, `value` on those before."""
    if rows is None:
        return None
    return torch.cat([torch.full((before, rows.shape[1]), value, dtype=rows.dtype), rows.cpu()])


def _whole_path(completion: Completion, slots: int) -> RoutingTrace | None:
    """The engine's rows on all `slots` slots; those before `first_slot` were not captured and say so (valid=False)."""
    trace, first = completion.routing, completion.first_slot
    if trace is None:
        return None
    if first + len(trace) != slots:
        raise ValueError(
            f"the engine returned {len(trace)} routing rows from slot {first} on for a path of {slots} slots; "
            f"it must return rows {first} to {slots - 1}, one per slot"
        )
    if first == 0:
        return trace.to("cpu")
    _, layers, top_k = trace.ids.shape
    missing = torch.zeros((first, layers, top_k), dtype=trace.ids.dtype)
    return dataclasses.replace(
        trace,
        ids=torch.cat([missing, trace.ids.cpu()]),
        valid=torch.cat([torch.zeros(first, dtype=torch.bool), trace.valid.cpu()]),
        spans=tuple(dataclasses.replace(span, start=span.start + first) for span in trace.spans),
    )
