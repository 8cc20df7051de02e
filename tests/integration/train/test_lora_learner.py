"""A learner's step with adapters, replay and a correction, against the same step by hand."""

import itertools

import pytest
import torch

from onepolicy.build.learner import build_update_parts
from onepolicy.config import resolve
from onepolicy.models import lora
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_advantages
from onepolicy.replay.routers import bind_routers
from onepolicy.run.step import apply_correction
from onepolicy.sync.adapters import add_adapter
from onepolicy.train.learner import LocalLearner
from onepolicy.train.lora import Adapter
from onepolicy.train.scorer import PolicyScorer
from support.learner_steps import BASE, batch_of
from support.models import make

RANK, SCALE, CAP = 4, 2.0, 2.0
TARGETS = '["attention","experts","routers"]'


def adapted_learner():
    """Return a learner whose adapters are not at their zero start."""
    lora_settings = [f"train.lora.rank={RANK}", f"train.lora.targets={TARGETS}"]
    # random routes agree with nothing
    more = ["correction.preset=tis", "replay.min_agreement=0", "rollout.prompts_per_step=4"]
    config = resolve(BASE, [*lora_settings, *more])
    model = make("qwen3_moe")
    prepare_for_training(model, torch.device("cpu"))
    add_adapter(model, config.train.lora, "base", 0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in lora.adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    scorer = PolicyScorer(model, config, routers=bind_routers(model))
    return LocalLearner(scorer, parts=build_update_parts(config), adapter=Adapter(model, "test"))


def replaying(gate, ids):
    """Return a router's forward that takes the experts `ids` of its tokens, [S, top_k]."""

    def forward(hidden):
        scores = (hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T).softmax(-1)
        kept = scores.gather(-1, ids)
        if gate.norm_topk_prob:
            kept = kept / kept.sum(-1, keepdim=True)
        return scores.log(), kept, ids

    return forward


def with_factors(plain, factors):
    """Return the weights W + B A alpha / rank, by autograd."""
    effective = {name: tensor.detach() for name, tensor in plain.state_dict().items()}
    for name, (a, b) in factors.items():
        weight = effective[name]
        added = b @ a
        if weight.dim() == 3:
            rows, columns = a.view(len(weight), RANK, -1), b.view(len(b), RANK, len(weight))
            added = torch.stack([columns[..., e] @ rows[e] for e in range(len(weight))])
        effective[name] = weight + SCALE * added
    return effective


def bounds_of(batch):
    return itertools.pairwise(batch.cu_seqlens.tolist())


def written_out(batch, factors):
    """Return log pi of every trainable slot, sample by sample on the stock model."""
    plain = make("qwen3_moe")
    gates = [layer.mlp.gate for layer in plain.model.layers]
    logp = torch.full((batch.num_slots,), torch.nan)
    for a, b in bounds_of(batch):
        for number, gate in enumerate(gates):
            gate.forward = replaying(gate, batch.routing.ids[a:b, number].long())
        inputs = {"input_ids": batch.input_ids[None, a:b], "use_cache": False}
        out = torch.func.functional_call(plain, with_factors(plain, factors), kwargs=inputs)
        taken = out.logits[0].log_softmax(-1).gather(-1, batch.target_ids[a:b, None])[:, 0]
        logp = torch.cat([logp[:a], taken, logp[b:]])
    return logp


def test_a_step_of_adapters_equals_the_written_out_one():
    """-sum(w A logp) / slots with w = min(pi / mu, 2), routes replayed, all by plain autograd."""
    learner, batch = adapted_learner(), batch_of()
    batch = batch.replace(logp_rollout=batch.logp_rollout - 1.5)  # some ratios above the cap
    layers = lora.adapted_layers(learner.model)
    factors = {
        name: tuple(t.detach().clone().requires_grad_() for t in lora.factors_of(layer))
        for name, layer in layers.items()
    }
    scored = compute_advantages(learner.score(batch), learner.config.objective)
    correction = learner.config.correction.fixed_part
    scored, _ = apply_correction(scored, correction, learner.config.objective.reduction)
    gradients = {}

    def keep(*_, **__):
        trained = ((n, p) for n, p in learner.model.named_parameters() if p.requires_grad)
        gradients.update((name, parameter.grad.clone()) for name, parameter in trained)

    learner.optimizer.register_step_pre_hook(keep)
    metrics, _ = learner.step(scored)

    logp, mask = written_out(batch, factors), batch.trainable
    torch.testing.assert_close(scored.logp_old[mask], logp[mask].detach(), rtol=1e-4, atol=1e-4)
    weight = (logp.detach() - batch.logp_rollout).exp().clamp(max=CAP)
    assert bool((weight[mask] == CAP).any())
    assert bool((weight[mask] < CAP).any())
    advantage = batch.outcome[batch.segment]
    (-(weight * advantage * logp)[mask].sum() / int(mask.sum())).backward()

    norm = sum(float(t.grad.square().sum()) for pair in factors.values() for t in pair) ** 0.5
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert len(gradients) == 2 * len(factors)
    assert {name.split(".")[3] for name in factors} == {"self_attn", "mlp"}
    names = {id(p): name for name, p in learner.model.named_parameters()}
    for name, layer in layers.items():
        for parameter, expected in zip(lora.factors_of(layer), factors[name], strict=True):
            found = gradients[names[id(parameter)]]
            largest = float(expected.grad.abs().max())
            assert largest > 0, name
            assert float((found - expected.grad).abs().max()) < 1e-3 * largest, name
