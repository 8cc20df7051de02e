"""Heads for multi-token prediction, whose layers are numbered from 1 again, route themselves."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

import onepolicy.integrations.megatron as op_megatron
from support.megatron.models import gradients, make_model, tokens_of
from support.replay_models import random_trace

pytestmark = pytest.mark.megatron

TOKENS = tokens_of()


@pytest.fixture(scope="module")
def model():
    return make_model(mtp_num_layers=2, mtp_loss_scaling_factor=0.5, parallel_output=True)


def loss_of_heads(model):
    """Return the loss [B, S] of a forward with labels, which runs the heads too."""
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    causal = torch.ones(TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool).triu(1)
    mask = torch.ones(TOKENS.shape, dtype=torch.float32)
    labels = TOKENS.roll(-1, 1)
    return model(TOKENS, positions, causal[None, None], labels=labels, loss_mask=mask)


def chosen_by_heads(model):
    """Return the routing maps of the heads in one forward."""
    maps, hooks = [], []
    for module in model.mtp.modules():
        if isinstance(module, TopKRouter):
            hooks.append(module.register_forward_hook(lambda m, a, out: maps.append(out[1])))
    loss = loss_of_heads(model)
    for hook in hooks:
        hook.remove()
    return maps, loss


def test_their_routers_are_no_layers_of_the_trace(model):
    assert op_megatron.routers_of(model).layers == (0, 1, 2, 3)
    everywhere = [module for module in model.modules() if isinstance(module, TopKRouter)]
    assert len(everywhere) == 6


def test_record_and_replay_keep_every_bit(model):
    with op_megatron.record(model) as tape:
        loss = loss_of_heads(model)
    loss.mean().backward()
    expected = gradients(model)
    with op_megatron.replay(model, tape.trace(), batch=3):
        again = loss_of_heads(model)
    again.mean().backward()
    found = gradients(model)
    assert torch.equal(loss, again)
    assert [name for name in found if name.startswith("mtp.") and "router" in name]
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def test_heads_choose_for_themselves_what_the_decoder_is_forced_to(model):
    trace = random_trace(TOKENS.numel(), (0, 1, 2, 3), 8, 2)
    with op_megatron.replay(model, trace, batch=3, check=False):
        maps, _ = chosen_by_heads(model)
    forced = torch.zeros(36, 8, dtype=torch.bool).scatter(1, trace.ids[:, 0].long(), True)
    forced = forced.view(3, 12, 8).transpose(0, 1).flatten(0, 1)
    assert len(maps) == 2
    for chosen in maps:
        assert not torch.equal(chosen, forced)
        assert (chosen.sum(1) == 2).all()
