"""Per router family: its own routes replayed are the same bits, and other routes are really the ones computed."""

from __future__ import annotations

import pytest
import torch
from replay_models import FAMILIES, build, experts_inputs, loss_and_grads, random_trace, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from onepolicy import bind_routers

ROWS = 21  # tokens() has 3 x 7
MOE_LAYERS = {
    "qwen3_moe_no_norm": (0, 2),  # mlp_only_layers = [1]
    **dict.fromkeys([name for name in FAMILIES if "deepseek" in name or "glm4" in name], (1, 2)),  # dense first
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_decoder_indices(family: str) -> None:
    routers = bind_routers(build(family))
    assert routers.layers == MOE_LAYERS.get(family, (0, 1, 2))
    assert (routers.num_experts, routers.top_k) == (8, routers._model.config.num_experts_per_tok)


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_routes_are_a_no_op(family: str, experts: str) -> None:
    model, ids = build(family, experts=experts), tokens()
    routers = bind_routers(model)
    plain, plain_grads = loss_and_grads(model, ids)
    with experts_inputs(model) as computed, routers.record() as tape:
        recorded, recorded_grads = loss_and_grads(model, ids)
    trace = tape.trace()
    with routers.replay(trace, native=True) as replayed:
        logits, grads = loss_and_grads(model, ids)

    assert torch.equal(recorded, plain)
    assert torch.equal(logits, plain)
    assert grads.keys() == recorded_grads.keys() == plain_grads.keys()
    for name, grad in plain_grads.items():
        assert torch.equal(recorded_grads[name], grad), name
        assert torch.equal(grads[name], grad), name
    assert len(trace) == ROWS
    assert trace.valid.all()
    for column, (ids_computed, _) in enumerate(computed):
        assert torch.equal(trace.ids[:, column].long(), ids_computed)
    assert torch.equal(replayed.native().ids, trace.ids)
    routers.self_test()


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_routes_are_the_ones_computed(family: str, experts: str) -> None:
    model, ids = build(family, experts=experts), tokens()
    routers = bind_routers(model)
    plain, _ = loss_and_grads(model, ids)
    trace = random_trace(ROWS, routers.layers, routers.num_experts, routers.top_k)
    with experts_inputs(model) as computed, routers.replay(trace) as replayed:
        logits, grads = loss_and_grads(model, ids)

    assert len(computed) == len(routers.layers)
    for column, (ids_computed, weights) in enumerate(computed):
        assert torch.equal(ids_computed, trace.ids[:, column].long())  # column order included
        assert (weights != 0).all()
    for router in routers._routers:
        assert (grads[f"{router.path}.weight"] != 0).any()
    assert not torch.equal(logits, plain)
    with pytest.raises(RuntimeError, match="native=True"):
        replayed.native()
    after, _ = loss_and_grads(model, ids)
    assert torch.equal(after, plain)


def test_native_is_the_choice_of_the_live_scores() -> None:
    """The first MoE layer sees the same hidden states whatever is replayed, so its own choice must not change."""
    for family in ("qwen3_moe", "deepseek_v2_groups", "deepseek_v3"):
        model, ids = build(family), tokens()
        routers = bind_routers(model)
        with routers.record() as tape:
            model(input_ids=ids)
        trace = random_trace(ROWS, routers.layers, routers.num_experts, routers.top_k)
        with routers.replay(trace, native=True) as replayed:
            model(input_ids=ids)
        native = replayed.native()
        assert torch.equal(native.ids[:, 0], tape.trace().ids[:, 0]), family
        assert not torch.equal(native.ids[:, 0], trace.ids[:, 0]), family


@pytest.mark.parametrize("norm", [True, False])
def test_qwen3_block_is_equations_8_and_9_of_the_paper(norm: bool) -> None:
    """R3 (arXiv:2510.11370): g_i = I_i exp(s_i) / sum_j I_j exp(s_j), y = sum_i g_i E_i(x).

    s = x W are the trainer's scores, I marks the rollout's experts. Without `norm_topk_prob` the family divides by
    the sum over all experts instead.
    """
    model = build("qwen3_moe", num_hidden_layers=1, norm_topk_prob=norm, hidden_size=32)
    block = model.model.layers[0].mlp
    assert isinstance(block, Qwen3MoeSparseMoeBlock)
    hidden = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(4), requires_grad=True)
    probe = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(5))
    routers = bind_routers(model)
    trace = random_trace(ROWS, routers.layers, routers.num_experts, routers.top_k)
    with routers.replay(trace):
        out = block(hidden)
        grads = torch.autograd.grad((out * probe).sum(), [hidden, block.gate.weight])

    expected = _reference_block(block, hidden.reshape(ROWS, 32), trace.ids[:, 0].long(), norm).view_as(out)
    reference = torch.autograd.grad((expected * probe).sum(), [hidden, block.gate.weight])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for grad, want in zip(grads, reference, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def _reference_block(block: nn.Module, x: Tensor, ids: Tensor, norm: bool) -> Tensor:
    scores = x @ block.gate.weight.T
    indicator = torch.zeros_like(scores).scatter(1, ids, 1.0)
    total = (indicator * scores.exp()).sum(1, keepdim=True) if norm else scores.exp().sum(1, keepdim=True)
    gates = indicator * scores.exp() / total
    out = torch.zeros_like(x)
    for expert in range(8):
        gate, up = (x @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
        out = out + gates[:, expert, None] * ((F.silu(gate) * up) @ block.experts.down_proj[expert].T)
    return out


def test_group_limit_follows_the_replayed_experts() -> None:
    """DeepSeek-V2 weighs scores masked to the best groups: experts of other groups must not be weighed 0."""
    model = build("deepseek_v2_groups")
    routers = bind_routers(model)
    with routers.record() as tape:
        model(input_ids=tokens())
    own_groups = tape.trace().ids // 2  # 8 experts in 4 groups, 2 groups allowed
    trace = random_trace(ROWS, routers.layers, routers.num_experts, routers.top_k)
    replayed_groups = trace.ids // 2
    outside = ~(replayed_groups[..., :, None] == own_groups[..., None, :]).any(-1)
    assert outside.float().mean() > 0.3  # the case is really there
    with experts_inputs(model) as computed, routers.replay(trace):
        model(input_ids=tokens())
    for _, weights in computed:
        assert (weights > 0).all()
