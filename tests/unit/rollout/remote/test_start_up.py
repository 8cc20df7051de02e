"""A run asks an engine whether its log-probabilities are those that it samples from."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.rollout.remote.start_up import check_processed_logprobs


def check(top_of, *, narrow=0.0, returned=5):
    """Check an engine. top_of: temperature -> log-probabilities of the likeliest tokens. narrow:
    log-probability of the only token that top_k = 1 leaves."""

    async def generate(prompt_ids, sampling, *, seed):
        top = top_of(sampling.temperature)[: sampling.top_logprobs]
        logp = narrow if sampling.top_k else -1.0
        return SimpleNamespace(logp=torch.tensor([logp]), top_logp=torch.tensor([top]))

    engine = SimpleNamespace(generate=generate, caps=SimpleNamespace(top_logprobs=returned))
    asyncio.run(check_processed_logprobs(engine))


def test_two_tokens_are_twice_as_far_apart_at_half_the_temperature():
    for apart in (0.06, 0.4, 3.0):
        check(lambda t, apart=apart: [-1.0, -1.0 - apart / t])
        with pytest.raises(UsageError, match=r"nats apart at temperature 1 and .* at 0\.5"):
            check(lambda t, apart=apart: [-1.0, -1.0 - apart])  # raw
    check(lambda t: [-1.0, -1.04])  # so near that rounding decides


def test_the_only_token_is_certain_and_two_are_needed():
    check(lambda t: [-1.0, -1.0 - 1 / t], narrow=-5e-5)
    with pytest.raises(UsageError, match=r"top_k = 1 the only token has log-probability -1.00e-3"):
        check(lambda t: [-1.0, -1.0 - 1 / t], narrow=-1e-3)
    check(lambda t: [-1.0, -1.0 - 1 / t], returned=2)
    with pytest.raises(UsageError, match="returns 1 of the most likely tokens, too few"):
        check(lambda t: [-1.0], returned=1)
