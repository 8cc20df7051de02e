"""TRL with top_p, top_k and min_p: scoring, training and the dump are over the supports."""

from __future__ import annotations

import copy

import pyarrow.parquet as pq
import pytest
import torch

import onepolicy as op
import onepolicy.integrations.trl as op_trl
from onepolicy.audit.run import audit
from onepolicy.support.checks import SupportError
from support.trl.tiny import (
    ONE_STEP,
    CopySampler,
    gradient_by_hand,
    make_trainer,
    model_with,
    sgd_gradient,
    train,
    watched,
)

pytestmark = pytest.mark.trl
CUT = {"top_p": 0.8, "top_k": 20, "min_p": 0.01, "temperature": 0.9}


class CutSampler(CopySampler):
    """A rollout_func that samples from the likeliest 12 tokens, and returns which they were."""

    spoil = staticmethod(lambda sets: sets)
    keep = 12

    def __call__(self, prompts, trainer):
        made = super().__call__(prompts, trainer)
        pairs = zip(made["prompt_ids"], made["completion_ids"], strict=True)
        made["supports"] = [self.spoil(self._sets(*pair)) for pair in pairs]
        return made

    @torch.no_grad()
    def _sets(self, prompt, completion):
        logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        likely = logits.float().topk(self.keep).indices.tolist()
        return [sorted({*ids, token}) for ids, token in zip(likely, completion, strict=True)]


def over_sets(model, inputs, sets, temperature=1.0):
    """Return log-probabilities [B, R] by a table with a dense mask."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1] / temperature
    kept = torch.ones_like(logits, dtype=torch.bool)
    for row, support in enumerate(sets):
        kept[row, : len(support)] = False
        kept[row, support.slot_of, support.ids.long()] = True
    table = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return table.gather(-1, inputs["completion_ids"][..., None])[..., 0]


def test_the_trainers_own_model(tmp_path):
    """Values of sampling and of scoring are one, and the dump has the sets for the audit."""
    trainer = make_trainer(tmp_path / "out", **CUT)
    report = op_trl.attach(trainer, correction="tis", dump=tmp_path / "dump")
    assert "TRL's softmax is over the tokens that they left" in str(report)
    for row in train(trainer):
        assert row["mismatch/k3"] < 1e-9
    found = audit(tmp_path / "dump", {})
    assert found.verdict.action == "nothing"
    (rows,) = [pq.read_table(file).to_pylist() for file in sorted((tmp_path / "dump").iterdir())][
        :1
    ]
    sizes = [count for row in rows for count in row["support_counts"]]
    assert 1 <= min(sizes) < max(sizes) <= 20
    assert all(len(row["support_ids"]) == sum(row["support_counts"]) for row in rows)
    lower = [
        a - b
        for row in rows
        for a, b in zip(row["logp_vocabulary"], row["logp_trainer"], strict=True)
    ]
    assert max(lower) <= 1e-5
    assert sum(lower) / len(lower) < -0.05


def test_the_gradient_is_that_of_a_dense_mask(tmp_path):
    trainer = make_trainer(tmp_path, **CUT | ONE_STEP)
    op_trl.attach(trainer)
    seen = []
    loss = trainer._compute_loss

    def compute_loss(model, inputs):
        seen.append(dict(inputs))
        return loss(model, inputs)

    trainer._compute_loss = compute_loss
    gradient, before = sgd_gradient(trainer)
    (inputs,) = seen
    model = model_with(before)
    with op.bind_routers(model).replay(whole_trace(inputs, model), check=False):
        logp = over_sets(model, inputs, inputs["supports"], CUT["temperature"])
    expected = gradient_by_hand(
        -inputs["advantages"][:, None] * (logp - logp.detach()).exp(), inputs, model
    )
    assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max()


def whole_trace(inputs, model):
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return op.pad_routes(inputs["routed_experts"], mask)


def test_a_rollout_func_returns_sets(tmp_path):
    sampler = CutSampler()
    trainer = make_trainer(tmp_path / "out", sampler=sampler, top_k=12)
    op_trl.attach(trainer, dump=tmp_path / "dump")
    seen = watched(trainer)
    train(trainer)
    assert all(len(inputs["completion_ids"]) == 8 for inputs in seen)
    row = pq.read_table(sorted((tmp_path / "dump").iterdir())[0]).to_pylist()[0]
    assert set(row["support_counts"]) <= {12, 13}


def late(sets):
    return [sets[-1], *sets[:-1]]


def without_first(sets):
    return [[], *sets[1:]]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (late, "not in their own support"),
        (without_first, "1 of .* sampled tokens have no support, the first in slot 0"),
        (lambda sets: None, "sampled tokens have no support"),
    ],
    ids=["shifted", "one missing", "missing"],
)
def test_planted_sets_stop_before_the_first_update(tmp_path, spoil, words):
    class Spoiled(CutSampler):
        pass

    Spoiled.spoil, Spoiled.keep = staticmethod(spoil), 1
    trainer = make_trainer(tmp_path, sampler=Spoiled(), top_k=12)
    op_trl.attach(trainer)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(SupportError, match=words):
        train(trainer)
    after = trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_correction_needs_the_sets_of_a_rollout_func(tmp_path):
    trainer = make_trainer(tmp_path, sampler=CopySampler(), top_k=12)
    op_trl.attach(trainer, correction="tis")
    with pytest.raises(op.UsageError, match=r'rollout_func returns no supports, .* key "supports"'):
        train(trainer)
