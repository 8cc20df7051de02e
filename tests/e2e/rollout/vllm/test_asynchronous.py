"""A vLLM server samples while the learner learns. Every token was sampled by the weights of its
version."""

import asyncio
import contextvars
import itertools

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.remote.dialects.vllm import VLLMDialect
from onepolicy.rollout.remote.engine import RemoteEngine
from onepolicy.rollout.vllm.guard import GENERATE
from onepolicy.run import async_rollouts
from support.vllm_engines import picked, recipe, rows, stock
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(1200)]
STEPS, HELD = 6, 3


@pytest.fixture
def learned(monkeypatch):
    """Collect step -> (its initial weights, its groups) of a run that the test makes."""
    taken, original = {}, async_rollouts.train_on_rollouts

    def train_on_rollouts(parts, hooks, step, rollouts, timer):
        assert parts.learner.version == step
        weights = {name: tensor.clone() for name, tensor in parts.learner.named_weights()}
        taken[step] = (weights, rollouts.groups)
        return original(parts, hooks, step, rollouts, timer)

    monkeypatch.setattr(async_rollouts, "train_on_rollouts", train_on_rollouts)
    return taken


@pytest.fixture
def catch(monkeypatch):
    """Return catch(version): the update to it finds a request of step HELD in the middle, on a
    server of any speed.

    The episodes of that step begin when the update is due. Each of their requests is sent again
    while it only ends. The update comes once the server has given up one after some of its tokens.
    """
    updates, updating, due, flying, caught = [], [], asyncio.Event(), set(), []
    of_held = contextvars.ContextVar("of_held", default=False)  # copied to the episodes' tasks
    sample, post = async_rollouts.sample_rollouts, EngineClient.post
    load_weights, begin_update = RemoteEngine.load_weights, VLLMDialect.begin_update

    async def sample_when_due(components, step, *more):
        if step == HELD:
            await due.wait()
            of_held.set(True)
        return await sample(components, step, *more)

    async def noted_post(client, path, *body, **limits):
        if path != GENERATE or not of_held.get():
            return await post(client, path, *body, **limits)
        flying.add(call := object())
        try:
            while True:
                part = await post(client, path, *body, **limits)
                aborted = part.finish == "aborted"
                caught.extend([part] * (aborted and len(part.token_ids) > 0))
                if aborted or caught:
                    return part
        finally:
            flying.remove(call)

    async def load_when_due(engine, weights, version):
        updating.extend([engine] * (version in updates))
        if updating:
            due.set()
        await load_weights(engine, weights, version)
        updating.clear()

    async def begin_in_the_middle(dialect, gate):
        """Try again, with the old weights, until one of the requests has been caught."""
        if not updating:
            return await begin_update(dialect, gate)
        for attempt in itertools.count():
            gate.is_open.set()
            await until(lambda: flying)
            await asyncio.sleep(2**attempt / 1000)  # one of these is after its first token
            gate.is_open.clear()
            updating[0]._aborts += 1  # our own, not somebody else's
            await begin_update(dialect, gate)
            if caught:
                return
            await dialect.resume()

    monkeypatch.setattr(async_rollouts, "sample_rollouts", sample_when_due)
    monkeypatch.setattr(EngineClient, "post", noted_post)
    monkeypatch.setattr(RemoteEngine, "load_weights", load_when_due)
    monkeypatch.setattr(VLLMDialect, "begin_update", begin_in_the_middle)
    return updates.append


@pytest.mark.parametrize("sync", ["gloo", "disk"])
@pytest.mark.parametrize("most", [1, 2])
def test_every_token_has_its_version_and_none_is_too_old(
    server, folders, tmp_path, learned, catch, most, sync
):
    catch(HELD - most + 1)
    settings = [f"rollout.max_staleness={most}", f"rollout.engine.sync={sync}", f"steps={STEPS}"]
    settings += ["rollout.sampling.max_tokens=60", "rollout.engine.max_num_seqs=2", "eval.every=3"]
    settings += ["log.counterfactual_every=0"]
    # random weights earn nothing; this moves them
    settings += ["objective.entropy_coef=0.3", "optim.lr=5e-4"]
    assert main(["train", str(recipe(tmp_path, folders[0], server)), *settings]) == 0
    assert sorted(learned) == list(range(STEPS))
    weights = [learned[step][0] for step in range(STEPS)]
    model = load_model(ModelConfig(path=str(folders[0])), torch.float32, torch.device("cpu"))
    known = rows(tmp_path)
    spanning, oldest, agreeing = [], 0, []
    for step, (_, groups) in learned.items():
        assert [len(group.samples) for group in groups] == [4, 4]
        for sample in (sample for group in groups for sample in group.samples):
            versions = sample.version[sample.trainable]
            assert step - most <= int(versions.min()) <= int(versions.max()) <= step
            assert (versions.diff() >= 0).all()
            spanning += [step] * (len(versions.unique()) > 1)
            oldest = max(oldest, step - int(versions.min()))
            agreeing.append(check_sample(model, weights, sample))
        (row,) = (row for row in known if row["step"] == step + 1)
        assert row["staleness/max"] <= most
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
        assert row["rollout/requests_dropped"] == 0
    assert oldest == most
    assert HELD in spanning
    assert min(agreeing) > 0.9
    assert sum(agreeing) / len(agreeing) > 0.99
    ages = [name for row in known for name in row if name.startswith("mismatch/k3_staleness@")]
    assert len(set(ages)) == most + 1


def check_sample(model, weights, sample):
    """Compare tokens and routes with one forward of the whole path for each version of the weights
    in it. Return the share of rows with the same experts."""
    first, rest = sample.tokens[:1].tolist(), sample.tokens[1:]
    assert len(sample.routing) == len(rest)
    assert sample.routing.valid.all()
    rows_of = torch.cat([torch.full((span.length,), span.version) for span in sample.routing.spans])
    mine, same = sample.trainable, []
    # a row is of the weights that fed its token, which are those that sampled the next one
    assert torch.equal(rows_of[mine], sample.version[mine])
    for version in rows_of.unique().tolist():
        model.load_state_dict(weights[version])
        logits, routes = stock(model, first, rest)
        logp = picked(logits, rest)
        chosen = mine & (sample.version == version)
        torch.testing.assert_close(sample.logp_rollout[chosen], logp[chosen], atol=2e-4, rtol=0)
        others = (weights[other] for other in range(len(weights)) if abs(other - version) == 1)
        if chosen.sum() > 5:
            for other in others:  # or the comparison could not tell
                model.load_state_dict(other)
                wrong = picked(stock(model, first, rest)[0], rest)
                assert (wrong[chosen] - sample.logp_rollout[chosen]).abs().max() > 1e-3
        equal = sample.routing.ids.sort(-1).values == routes.sort(-1).values
        same.append(equal[rows_of == version].all(-1).all(-1))
    return float(torch.cat(same).float().mean())
