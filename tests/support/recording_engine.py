"""A scripted engine with log-probabilities, routes, supports and versions that a mistake would mix
up: all of them random, and other ones in every call."""

import torch

from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.interfaces import EngineCaps
from onepolicy.support.trace import SupportTrace
from onepolicy.types import Completion, RoutingTrace, route_spans

LAYERS, EXPERTS, TOP_K = (1, 3), 8, 2


class RecordingEngine:
    """Answers every request with the next text. after: what is called with each request."""

    def __init__(self, tokenizer, texts, *, max_len=4000, routes=True, after=None):
        self.caps = EngineCaps(returns_routes=routes, max_len=max_len)
        self.tokenizer, self.texts, self.after = tokenizer, list(texts), after
        self.version, self.requests = 3, []

    async def generate(self, prompt_ids, sampling, *, seed):
        number = len(self.requests)
        self.requests.append((list(prompt_ids), sampling, seed))
        text = self.texts[number % len(self.texts)]
        ids = [*encode_text(self.tokenizer, text, untrusted=True), self.tokenizer.eos_token_id]
        finish = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        random = torch.Generator().manual_seed(seed % 2**40 + number)
        completion = Completion(
            torch.tensor(ids, dtype=torch.int32),
            -torch.rand(len(ids), generator=random),
            torch.full((len(ids),), self.version, dtype=torch.int32),
            finish,
            self.routing(len(prompt_ids), len(ids), sampling.routes_from, random),
            sampling.routes_from,
            support=SupportTrace.from_sets([sorted({i, i % 7}) for i in ids]),
        )
        if self.after is not None:
            completion = self.after(number, completion)
        return completion

    def routing(self, prompt, new, first, random):
        if not self.caps.returns_routes:
            return None
        rows = prompt + new - 1 - first
        shape = (rows, len(LAYERS), TOP_K)
        ids = torch.randint(EXPERTS, shape, generator=random, dtype=torch.uint8)
        spans = route_spans(first, prompt, prompt + new - 1, self.version, start=first)
        return RoutingTrace(ids, torch.ones(rows, dtype=torch.bool), LAYERS, EXPERTS, spans)


def assert_equal_samples(one, other):
    """Compare two samples to the bit."""
    for name in ("tokens", "trainable", "version", "turn"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    pair = [sample.logp_rollout.view(torch.int32) for sample in (one, other)]
    assert torch.equal(*pair)
    assert one.routing == other.routing
    if one.routing is not None:
        assert one.routing.spans == other.routing.spans
    assert one.support == other.support
    assert one.finish == other.finish
