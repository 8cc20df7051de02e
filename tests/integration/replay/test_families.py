"""Every MoE family of transformers: replay of its own routes gives the same bits, and replay of
other routes computes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DogeConfig, DogeForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import RoutingError
from onepolicy.replay.layers import find_routers
from support.families import (
    BASE,
    NEWEST,
    NO_CAUSAL_LM,
    NO_EXPERTS,
    REFUSED,
    TABLE,
    VISION,
    borrowing,
    discover,
    folder,
    there,
    vision_model,
)
from support.family_lists import LISTS
from support.family_results import examine, listed, page, row, section
from support.replay_models import build, experts_inputs, tokens
from support.replay_steps import ROWS, routes_of

WRITE = "run: PYTHONPATH=tests python -m support.family_results"


@pytest.mark.full
def test_every_moe_family_of_transformers_is_in_a_table() -> None:
    """An upgrade that adds a family, or a family that loses its causal LM, fails this test."""
    with_lm, without = discover()
    known = {folder(name) for name in TABLE} | set(REFUSED) | set(NO_EXPERTS)
    assert with_lm == set(filter(there, known))
    assert without == set(filter(there, NO_CAUSAL_LM))
    assert borrowing() <= set(TABLE)


def test_the_families_of_the_newest_transformers_are_in_a_table() -> None:
    """Also where an older one is installed: its wheel was read (support/family_lists.py)."""
    found = json.loads(LISTS.read_text(encoding="utf-8"))[NEWEST]
    with_lm, without, borrowed = (set(names) for names in found.values())
    known = {folder(name) for name in TABLE} | set(REFUSED) | set(NO_EXPERTS)
    assert borrowed <= set(TABLE)
    assert with_lm | borrowed == known
    assert without == set(NO_CAUSAL_LM)
    assert f"transformers {NEWEST} " in section()


@pytest.mark.few(9)
@pytest.mark.parametrize(("family", "run"), list(itertools.product(TABLE, [0, 1])))
def test_own_routes_change_nothing_and_others_reach_the_experts(family: str, run: int) -> None:
    """run 0: fp32, stock experts; run 1: bf16, the eager loop over experts, the family's second
    setting."""
    result = examine(family, run)
    assert result.layers == TABLE[family].layers
    assert result.varied
    assert result.logits
    assert result.changed == ()
    assert result.recomputed == (None if family == "jetmoe" else ())
    assert result.decoded
    assert result.filled
    assert result.moved
    assert result.reached
    assert result.weighed
    assert result.router_grad


@pytest.mark.full
@pytest.mark.parametrize("family", TABLE)
def test_the_page_in_docs_has_the_measured_values(family: str) -> None:
    written = listed(section())
    assert row(TABLE[family]) == written[family], WRITE


def test_the_page_in_docs_has_a_row_for_each_family() -> None:
    written = section()
    assert list(listed(written)) == sorted(TABLE)
    assert written == page(listed(written)), WRITE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "qwen3_vl_moe" else pytest.mark.full)
        for name in VISION
        if name in CONFIG_MAPPING
    ],
)
def test_a_model_of_images_and_text_replays_text_to_the_bit(name: str) -> None:
    model, ids = vision_model(name), tokens()
    routers = bind_routers(model)
    assert routers.layers == TABLE[VISION[name]].layers
    with torch.no_grad():
        with routers.record() as tape:
            plain = model(input_ids=ids, use_cache=False).logits
        with routers.replay(tape.trace(), check=False):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
        with routers.replay(routes_of(routers), check=False):
            assert not torch.equal(model(input_ids=ids, use_cache=False).logits, plain)


if "inkling2_loop_text" in CONFIG_MAPPING:  # of transformers 5.24; a skip would be red here

    def test_a_model_that_runs_a_layer_several_times_is_refused() -> None:
        model = TABLE["inkling2_loop_text"].model(loop_num_passes=2)
        with pytest.raises(UsageError, match=r"replay\.mode=off.*looped layers 2 times"):
            bind_routers(model)


@pytest.mark.parametrize("family", TABLE)
def test_configs_exercise_the_special_parts_of_their_family(family: str) -> None:
    """They have group limits that bind, scales that are not 1, windows shorter than the sequence,
    fewer keys than tokens."""
    config = TABLE[family].config()
    for name in ("routed", "router", "moe_routed"):
        assert getattr(config, f"{name}_scaling_factor", 1.7) == 1.7
    assert getattr(config, "route_scale", 1.7) == 1.7
    groups = getattr(config, "n_group", None)
    assert groups is None or config.topk_group < groups
    for name in ("sliding_window", "attention_chunk_size", "index_topk"):
        assert (getattr(config, name, None) or 0) <= 4
    model = TABLE[family].model()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "correction_bias" in name or name.endswith(("expert_bias", "balancing_biases")):
            assert (tensor != 0).all()


def test_doge_is_refused_with_its_reason() -> None:
    experts = {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}
    config = DogeConfig(**{**BASE, **experts, "num_hidden_layers": 1})
    words = r"DogeForCausalLM.*DogeCDMoE at 'model\.layers\.0\.mlp'.*mixes the tokens"
    with pytest.raises(UsageError, match=words):
        bind_routers(DogeForCausalLM(config))


def test_phimoe_is_refused_in_train_mode() -> None:
    model = TABLE["phimoe"].model().train()
    routers = bind_routers(model)
    for context in (routers.record(), routers.replay(routes_of(routers), check=False)):
        with (
            pytest.raises(RoutingError, match=r"layer 0: .*PhimoeTopKRouter.* draws.*eval"),
            context,
        ):
            model(input_ids=tokens())


def test_native_routes_are_those_of_the_live_scores() -> None:
    """The first MoE layer sees the same hidden states in every replay, so its own choice must not
    change."""
    for family in ("qwen3_moe", "deepseek_v2_groups", "deepseek_v3"):
        model, ids = build(family), tokens()
        routers = bind_routers(model)
        with routers.record() as tape:
            model(input_ids=ids)
        trace = routes_of(routers)
        with routers.replay(trace, native=True, check=False) as replayed:
            model(input_ids=ids)
        native = replayed.native()
        assert torch.equal(native.ids[:, 0], tape.trace().ids[:, 0]), family
        assert not torch.equal(native.ids[:, 0], trace.ids[:, 0]), family


@pytest.mark.parametrize("norm", [True, False])
def test_qwen3_block_is_equations_8_and_9_of_the_paper(norm: bool) -> None:
    """R3 (arXiv:2510.11370): g_i = I_i exp(s_i) / sum_j I_j exp(s_j), y = sum_i g_i E_i(x).

    s = x W are the trainer's scores, I marks the rollout's experts. Without `norm_topk_prob` the
    family divides by the sum over all experts instead.
    """
    model = build("qwen3_moe", num_hidden_layers=1, norm_topk_prob=norm, hidden_size=32)
    block = model.model.layers[0].mlp
    assert isinstance(block, Qwen3MoeSparseMoeBlock)
    hidden = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(4), requires_grad=True)
    probe = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(5))
    routers = bind_routers(model)
    trace = routes_of(routers)
    with routers.replay(trace, check=False):
        out = block(hidden)
        grads = torch.autograd.grad((out * probe).sum(), [hidden, block.gate.weight])

    ids = trace.ids[:, 0].long()
    expected = _reference_block(block, hidden.reshape(ROWS, 32), ids, norm).view_as(out)
    reference = torch.autograd.grad((expected * probe).sum(), [hidden, block.gate.weight])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for grad, want in zip(grads, reference, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def _reference_block(block: nn.Module, x: Tensor, ids: Tensor, norm: bool) -> Tensor:
    scores = x @ block.gate.weight.T
    indicator = torch.zeros_like(scores).scatter(1, ids, 1.0)
    total = indicator * scores.exp() if norm else scores.exp()
    gates = indicator * scores.exp() / total.sum(1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(8):
        gate, up = (x @ block.experts.gate_up_proj[expert].T).chunk(2, -1)
        down = (F.silu(gate) * up) @ block.experts.down_proj[expert].T
        out = out + gates[:, expert, None] * down
    return out


def _normalised(z: Tensor, own: Tensor, c: Tensor) -> Tensor:
    """Return w = softmax over the replayed logits."""
    w = z.masked_fill(~own, -torch.inf).softmax(-1)
    return w * (c - (w * c).sum(-1, keepdim=True))


def _all_experts(z: Tensor, own: Tensor, c: Tensor) -> Tensor:
    """Return w = softmax over all logits, not renormalised: experts that were not replayed get a
    gradient too."""
    p = z.softmax(-1)
    return p * (own * c - (p * own * c).sum(-1, keepdim=True))


def _sigmoid(z: Tensor, own: Tensor, c: Tensor) -> Tensor:
    """Return w = 1.7 sigmoid / sum of the replayed sigmoids."""
    s = z.sigmoid() * own
    total = s.sum(-1, keepdim=True)
    return 1.7 / total * (c - (s / total * c).sum(-1, keepdim=True)) * s * (1 - s)


@pytest.mark.parametrize(
    ("family", "changes", "derivative"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}, _normalised),
        ("qwen3_moe", {"norm_topk_prob": False}, _all_experts),
        ("gpt_oss", {}, _normalised),
        ("deepseek_v3", {"norm_topk_prob": True}, _sigmoid),
    ],
)
def test_router_gradient_is_the_one_derived_by_hand(
    family: str, changes: dict, derivative: Callable
) -> None:
    """L = sum_t probe_t y_t and y = sum_i w_i E_i(x), so dL/dw_i = c_i = probe E_i(x), and dL/dW =
    (dL/dz)^T x."""
    model = TABLE[family].model(experts="eager", **changes)
    routers = bind_routers(model)
    draw = torch.Generator().manual_seed(4)
    hidden, probe = torch.randn(2, 3, 7, 32, generator=draw)
    trace = routes_of(routers)
    blocks = [model.model.layers[layer].mlp for layer in routers.layers]
    with routers.replay(trace, check=False):
        outs = [block(hidden) for block in blocks]
    for column, (block, out, router) in enumerate(
        zip(blocks, outs, find_routers(model), strict=True)
    ):
        ((out[0] if isinstance(out, tuple) else out) * probe).sum().backward()
        x, ids = hidden.reshape(ROWS, 32), trace.ids[:, column].long()
        z = x @ router.module.weight.T + (router.module.bias if family == "gpt_oss" else 0)
        c = torch.zeros(ROWS, 8)
        for j in range(ids.shape[1]):
            outputs = block.experts(x, ids[:, j : j + 1], torch.ones(ROWS, 1))
            value = (outputs * probe.reshape(ROWS, 32)).sum(-1, keepdim=True).detach()
            c.scatter_(1, ids[:, j : j + 1], value)
        own = torch.zeros(ROWS, 8, dtype=torch.bool).scatter_(1, ids, True)
        dz = derivative(z, own, c)
        torch.testing.assert_close(router.module.weight.grad, dz.T @ x, rtol=1e-4, atol=1e-4)
        if family == "gpt_oss":
            torch.testing.assert_close(router.module.bias.grad, dz.sum(0), rtol=1e-4, atol=1e-4)


def test_group_limit_follows_the_replayed_experts() -> None:
    """DeepSeek-V2 weighs scores masked to the best groups. Replayed experts of other groups must
    not get weight 0."""
    model = build("deepseek_v2_groups")
    routers = bind_routers(model)
    with routers.record() as tape:
        model(input_ids=tokens())
    own_groups = tape.trace().ids // 2  # 8 experts in 4 groups, 2 groups allowed
    trace = routes_of(routers)
    outside = ~((trace.ids // 2)[..., :, None] == own_groups[..., None, :]).any(-1)
    assert outside.float().mean() > 0.3  # the case is really there
    with experts_inputs(model) as computed, routers.replay(trace, check=False):
        model(input_ids=tokens())
    for _, weights in computed:
        assert (weights > 0).all()
