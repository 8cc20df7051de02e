"""Record and replay of the best-known families, on any torch and transformers that the library
takes. `make test-versions` runs this on old and new ones, for docs/reference/versions.md.

Nothing in here depends on how a version stores its experts or where its blocks select them: which
experts computed a token is read from the gradients of a loss on that token.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy import RoutingError, UsageError, bind_routers, pad_routes, unpad_routes
from onepolicy.replay import Routers
from onepolicy.replay.layers import find_routers
from onepolicy.types import RoutingTrace
from support.families import TABLE
from support.replay_models import loss_and_grads, same_bits
from support.replay_steps import checkpointed, routes_of

FAMILIES = {
    "Qwen3-MoE": ("qwen3_moe", {}),
    "Qwen3-MoE, 300 experts": ("qwen3_moe", {"num_experts": 300}),
    "Qwen2-MoE": ("qwen2_moe", {"decoder_sparse_step": 1}),
    "Mixtral": ("mixtral", {}),
    "OLMoE": ("olmoe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "DeepSeek-V2, groups": ("deepseek_v2", {}),
    "DeepSeek-V2, greedy": ("deepseek_v2", {"topk_method": "greedy"}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "GLM-4.5": ("glm4_moe", {}),
}
GATE = ("Qwen3-MoE, 300 experts", "gpt-oss", "DeepSeek-V2, greedy")
"""test_families.py has the others' ways of scoring in `make test`."""
CASES = [
    pytest.param(name, marks=() if name in GATE else pytest.mark.full, id=name) for name in FAMILIES
]
ROWS = 60
TOKENS = 1 + torch.arange(ROWS).view(2, 30)  # all different


@cache
def bound(family: str) -> tuple[PreTrainedModel, Routers]:
    model_type, changes = FAMILIES[family]
    model = TABLE[model_type].model(**changes)
    try:
        model(input_ids=TOKENS)
    except AttributeError as error:  # before anything is bound
        pytest.skip(f"its own forward fails: {error}")
    return model, bind_routers(model)


def recorded(model, routers) -> tuple[RoutingTrace, Tensor, dict[str, Tensor]]:
    """Return the model's own routes, logits and gradients."""
    with routers.record() as tape:
        logits, grads = loss_and_grads(model, TOKENS)
    return tape.trace(), logits, grads


@pytest.mark.parametrize("family", CASES)
def test_own_routes_keep_every_bit(family: str) -> None:
    model, routers = bound(family)
    own, plain, plain_grads = recorded(model, routers)
    assert (own.ids.int() != own.ids[:1].int()).any()
    assert own.ids.dtype == (torch.uint16 if "300" in family else torch.uint8)
    with routers.replay(own):
        logits, grads = loss_and_grads(model, TOKENS)
    assert torch.equal(logits, plain)
    assert same_bits(grads, plain_grads)


@pytest.mark.parametrize("family", CASES)
def test_a_recompute_uses_the_routes_of_its_forward(family: str, subtests) -> None:
    model, routers = bound(family)
    other = routes_of(routers, ROWS)
    with routers.replay(other, check=False):
        logits, grads = loss_and_grads(model, TOKENS)
    for reentrant in (False, True):
        model.enable_input_require_grads()  # or a reentrant checkpoint has no gradient
        with subtests.test(reentrant=reentrant), checkpointed(model, reentrant=reentrant):
            with routers.replay(other, check=False):
                again, recomputed = loss_and_grads(model, TOKENS)
            assert torch.equal(again, logits)
            assert same_bits(recomputed, grads)
        model.disable_input_require_grads()


@pytest.mark.parametrize("family", CASES)
def test_forced_experts_and_only_they_get_gradients(family: str) -> None:
    """A loss on one token reaches the last MoE layer through that token alone."""
    model, routers = bound(family)
    forced = routes_of(routers, ROWS)
    for token in (0, 5, 13):
        model.zero_grad(set_to_none=True)
        with routers.replay(forced, check=False):
            logits = model(input_ids=TOKENS, use_cache=False).logits
        logits.flatten(0, 1)[token].square().sum().backward()
        assert experts_with_gradient(model) == set(forced.ids[token, -1].tolist())
        gate = gate_of(model)
        assert gate.weight.grad is not None
        assert (gate.weight.grad != 0).any()


@pytest.mark.parametrize("family", CASES)
def test_rows_without_routes_take_the_routers_own(family: str) -> None:
    model, routers = bound(family)
    own, plain, _ = recorded(model, routers)
    other = routes_of(routers, ROWS)
    missing = torch.arange(ROWS) % 3 == 0
    ids = torch.where(missing[:, None, None], other.ids.int(), own.ids.int()).to(own.ids.dtype)
    trace = RoutingTrace(ids, ~missing, own.layers, own.num_experts)
    with routers.replay(trace, native=True) as replayed:
        logits = model(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(logits, plain)
    assert torch.equal(replayed.native().ids, own.ids)
    routers.self_test()


@pytest.mark.parametrize("family", CASES)
def test_wrong_routes_are_found_and_samples_are_laid_out(family: str) -> None:
    """Rows are selected, padded and taken back, and rows that came one late are refused."""
    model, routers = bound(family)
    own, plain, _ = recorded(model, routers)
    mask = torch.ones_like(TOKENS)
    parts = unpad_routes(own, mask)
    padded = pad_routes(parts, mask)
    assert padded.at(torch.arange(ROWS)) == own.at(torch.arange(ROWS))
    rows = [trace.ids.tolist() for trace in parts]
    assert [row for part in rows for row in part] == own.ids.tolist()
    with routers.replay(padded):
        logits = model(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(logits, plain)
    late = own.at(torch.arange(ROWS).roll(1))
    with pytest.raises(RoutingError, match=r"late|early|agree"), routers.replay(late):
        model(input_ids=TOKENS, use_cache=False)


@pytest.mark.parametrize("family", CASES)
def test_combine_weights_are_replayed_or_refused_with_the_reason(family: str) -> None:
    model, routers = bound(family)
    if hasattr(find_routers(model)[0].module, "experts"):
        words = "selects experts in the block"
        with pytest.raises(UsageError, match=words), routers.record(weights=True):
            raise AssertionError("recorded")
        return
    if family == "gpt-oss" and transformers.__version__ < "5":
        words = "GptOssTopKRouter.*cannot be recorded"
        with pytest.raises(RoutingError, match=words), routers.record(weights=True):
            model(input_ids=TOKENS)
        return
    with routers.record(weights=True) as tape:
        plain = model(input_ids=TOKENS, use_cache=False).logits
    with routers.replay(tape.trace(), weights=True):
        logits = model(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(logits, plain)


def block_of(model: PreTrainedModel) -> nn.Module:
    """Return the last MoE block."""
    router = find_routers(model)[-1]
    if hasattr(router.module, "experts"):
        return router.module
    return model.get_submodule(router.path.rpartition(".")[0])


def gate_of(model: PreTrainedModel) -> nn.Module:
    block = block_of(model)
    return getattr(block, "gate", None) or block.router


def experts_with_gradient(model: PreTrainedModel) -> set[int]:
    """Return the experts of the last MoE layer with a gradient other than zero."""
    experts = block_of(model).experts
    if isinstance(experts, nn.ModuleList):
        last = [getattr(expert, "down_proj", None) or expert.w2 for expert in experts]
        weights = [linear.weight.grad for linear in last]
    else:
        weights = list(experts.down_proj.grad)
    return {e for e, grad in enumerate(weights) if grad is not None and (grad != 0).any()}
