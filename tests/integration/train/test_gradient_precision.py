"""Gradients of a step with everything that saves work, against float64 and against stock float32.

    pytest -rP tests/integration/train/test_gradient_precision.py

prints both errors of every family. The references are plain forwards of transformers, a sample at a
time, on the family's own attention, experts and norms; only the experts' ids are given to them.
"""

import itertools

import pytest
import torch

from onepolicy.models.few_passes import FewPasses
from onepolicy.replay.routers import bind_routers
from onepolicy.train.shared_prompts import share_prompts
from support.learner_steps import learner_of
from support.models import CONFIGS, MOE, make
from support.siblings import distance, scored_and_gradients, siblings, with_routes_of

SAVING = (
    "train.share_prompts=true",
    "train.reuse_scoring_forward=true",
    "train.skip_zero_advantage=true",
    "objective.normalise=none",
)
PROMPTS = (40, 26, 12, 30)
SILENT = 1  # group without advantages
AIM = 2.0  # times the error of stock float32
DTYPES = torch.float32, torch.float64


@pytest.mark.few(2)
@pytest.mark.parametrize("family", CONFIGS)
def test_saved_work_costs_no_precision(family, subtests):
    """In one micro-batch, and in several."""
    name, settings = family, SAVING
    if name not in MOE:
        settings = (*SAVING, "replay.mode=off")
    weight, references = None, []
    for budget in (10_000, 150):
        size = f"train.tokens_per_micro_batch={budget}"
        learner = learner_of(*settings, size, name=name, routed=name in MOE)
        batch, forwards = batch_for(learner), []
        updated = samples_of_updates(learner)
        learner.model.register_forward_hook(lambda *_, calls=forwards: calls.append(1))
        scored, ours = scored_and_gradients(learner, batch)
        if weight is None:
            weight = next(learner.minibatches(scored)).loss_weight * scored.advantage
            references = [reference(name, dtype, scored, weight) for dtype in DTYPES]
        with subtests.test(budget=budget):
            assert SILENT not in batch.group[updated].tolist()
            assert len(forwards) == len(learner.scorer.micro_batches(batch))  # all are reused
            assert len(share_prompts(batch).shared.slots) < 0.8 * batch.num_slots
            norms = [type(m) for m in learner.model.modules() if isinstance(m, FewPasses)]
            assert norms or name == "gpt_oss"
            again = next(learner.minibatches(scored)).loss_weight * scored.advantage
            assert torch.equal(again, weight)
            stock, exact = references
            error, error_of_stock = distance(ours, exact), distance(stock, exact)
            print(f"{name}, {budget} slots: ours {error:.1e}, stock float32 {error_of_stock:.1e}")
            assert 0 < error_of_stock < 1e-4
            assert error <= AIM * error_of_stock


def batch_for(learner):
    """Return groups that share prompts, one of them without advantages, with routes."""
    batch = siblings(PROMPTS, members=3).replace(routing=None)
    batch = batch.replace(outcome=torch.where(batch.group == SILENT, 0.0, batch.outcome))
    if learner.routers is None:
        return batch
    return with_routes_of(batch, learner.routers)


def samples_of_updates(learner) -> list[int]:
    """Return a list that gets the samples of every backward."""
    forward, found = learner.scoring.update_forward, []

    def recorded(samples, *rest):
        found.extend(samples)
        return forward(samples, *rest)

    learner.scoring.update_forward = recorded
    return found


def reference(name, dtype, batch, weight):
    """Return the gradients of -sum(weight * logp), {name: tensor}, of plain forwards.

    weight: [T], of every slot. The ratio of a first update is 1, so this is its loss's gradient.
    """
    model = make(name, dtype=dtype)
    model.set_experts_implementation("eager")
    routers = bind_routers(model) if name in MOE else None
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        ids, target = (field[start:end] for field in (batch.input_ids, batch.target_ids))
        if routers is None:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        else:
            with routers.replay(batch.routing.at(slice(start, end)), check=False):
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logp = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
        (-(weight[start:end].to(dtype) * logp).sum()).backward()
    return {n: p.grad for n, p in model.named_parameters()}
