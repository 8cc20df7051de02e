"""The decoding experts against transformers' own, for even and uneven routing, biases and
layouts."""

from itertools import product

import pytest
import torch
from torch import nn

from onepolicy.models import decode_experts
from onepolicy.models.decode_experts import ExpertLayout
from support.models import make


def experts_of(name):
    model = make(name)
    decode_experts.use_decode_experts(model, torch.device("cpu"))
    modules = model.modules()
    return model, next(
        m for m in modules if isinstance(getattr(m, "down_proj", None), nn.Parameter)
    )


COSTS = {"loops": (0, 0), "mixed": (0, 20_000), "padded": (0, 10**12), "by rows": (10**12, 0)}


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"])
def test_same_sums(family, monkeypatch, subtests):
    model, experts = experts_of(family)
    for tokens, skew in product([1, 5, 64], [0.0, 2.0, 50.0]):
        torch.manual_seed(1)
        hidden = torch.randn(tokens, 64)
        scores = torch.randn(tokens, experts.num_experts) + skew * torch.randn(experts.num_experts)
        weights, index = scores.softmax(-1).topk(2)
        model.set_experts_implementation("eager")
        theirs = experts(hidden, index, weights)
        model.set_experts_implementation(decode_experts.NAME)
        for how, (bags, call) in COSTS.items():
            with subtests.test(how, tokens=tokens, skew=skew):
                monkeypatch.setattr(decode_experts, "MAX_BY_ROWS_COST", bags)
                monkeypatch.setattr(decode_experts, "MATMUL_CALL_COST", call)
                ours = experts(hidden, index, weights)
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_bfloat16_is_close_to_exact(monkeypatch):
    _, experts = experts_of("qwen3_moe")
    torch.manual_seed(1)
    hidden, (weights, index) = torch.randn(32, 64), torch.randn(32, 8).softmax(-1).topk(2)
    with torch.no_grad():
        exact = experts(hidden, index, weights)
        experts.to(torch.bfloat16)
        for slow, bags in ((True, 0), (False, 0), (False, 10**12)):
            monkeypatch.setattr(decode_experts, "has_slow_bfloat16", lambda slow=slow: slow)
            monkeypatch.setattr(decode_experts, "MAX_BY_ROWS_COST", bags)
            rounded = experts(hidden.bfloat16(), index, weights.bfloat16())
            assert rounded.dtype == torch.bfloat16
            atol = 0.02 * float(exact.abs().max())
            torch.testing.assert_close(rounded.float(), exact, atol=atol, rtol=0.05)


def test_layout_gives_every_pair_one_place():
    index = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
    layout = ExpertLayout.of(index, 5, row_cost=10**9)  # padding is dear: only whole calls
    assert (layout.width, layout.rows) == (0, 8)
    layout = ExpertLayout.of(index, 4, row_cost=1)  # padding is free
    assert (layout.width, layout.rows, layout.beyond) == (4, 16, [])
    for token in range(4):
        for k in range(2):
            place = layout.back[token, k]
            assert layout.token[place] == token
            assert place // 4 == index[token, k]


def test_width_is_the_cheapest(monkeypatch):
    counts = [3, 0, 9, 4, 1]
    monkeypatch.setattr(decode_experts, "MATMUL_CALL_COST", 1000)
    monkeypatch.setattr(decode_experts, "READ_COST", 2)

    def cost(width):
        padding = sum(width - min(c, width) for c in counts) + (2 * len(counts) if width else 0)
        return padding * 70 + 1000 * sum(c > width for c in counts)

    best = min(range(10), key=cost)
    index = torch.arange(5).repeat_interleave(torch.tensor(counts))[:, None]
    assert cost(ExpertLayout.of(index, 5, row_cost=70).width) == cost(best)


def test_one_model_gets_another_layout_of_the_same_values():
    (prepared, _), plain = experts_of("qwen3_moe"), make("qwen3_moe")
    assert prepared.config._experts_implementation == decode_experts.NAME
    assert plain.config._experts_implementation != decode_experts.NAME
    for (name, ours), theirs in zip(prepared.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
