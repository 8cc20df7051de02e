"""On-policy numerics while the weights move: each token has the trainer's bits under the weights
that sampled it, and a run stops before the optimiser if one does not."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.audit.claims import describe_bit_equality
from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.config import load
from onepolicy.config.policy import PolicyConfig
from onepolicy.divergence.routing import router_differences
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.invariant.require_equal import differing_slots
from onepolicy.models.recurrent.layers import install_recurrent
from onepolicy.replay.checks import RoutingError
from onepolicy.run import hooks
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy
from onepolicy.train.own_weights import OwnWeights
from onepolicy.train.pack import pack
from onepolicy.types import Group
from support.metrics import rows
from support.small_policy import SMALL
from support.small_recipe import write_recipe

MOVING = ("numerics=on-policy", "rollout.max_staleness=2", "optim.lr=1e-4", "steps=5")
TURNS = 5


@pytest.fixture(scope="module")
def hybrid_recipe(tmp_path_factory):
    """Write a recipe on a small hybrid with random weights, sampled with top_p."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = PolicyConfig(**(SMALL.model_dump() | {"recurrent": 3, "layers": 4}))
    tokenizer = make_tokenizer(task_alphabet(config.task))
    model = make_model(config, len(tokenizer))
    save_policy(model.eval(), tokenizer, config, folder / "policy")
    settings = "train = { threads = 1 }", "eval = { every = 0 }", "steps = 2"
    return write_recipe(folder / "policy", *settings, folder=folder)


async def play_over_updates(components):
    """Play episodes of several turns while the weights change every few tokens.

    Return them as a batch, and `OwnWeights` that kept the versions.
    """
    engine, learner = components.engine, components.learner
    own = OwnWeights(learner.scorer, most=9)
    sampling = replace(components.sampling, max_tokens=6, temperature=1.0)

    async def episode(number):
        path = Trajectory([5 + number, 6, 7, 8 + number, 9, 4, 3, 7, 5, 11])
        for turn in range(TURNS):
            asked = replace(sampling, routes_from=path.first_missing_route)
            done = await engine.generate(path.tokens, asked, seed=100 * number + turn)
            path.append_completion(done)
            path.append_observation([3 + turn, 5, 7])
        return replace(path.to_sample(reward=0.0, temperature=1.0), outcome=0.0)

    tasks = [asyncio.create_task(episode(number)) for number in range(3)]
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 6):
        for _ in range(5):
            await asyncio.sleep(0)
        own.keep()
        with torch.no_grad():
            for weight in learner.model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
        learner.scorer.version = version
        await engine.load_weights(list(learner.named_weights(None)), version)
    samples = await asyncio.gather(*tasks)
    return pack([Group(0, tuple(samples), "")]), own


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_every_token_has_the_bits_of_its_own_weights(recipe, hybrid_recipe, kind, top_p):
    chosen = {"attention": recipe, "recurrent": hybrid_recipe}[kind]
    settings = [*MOVING, f"rollout.sampling.top_p={top_p}"]
    components, _ = build_components(load(str(chosen), settings))
    model = components.learner.model
    assert bool(install_recurrent(model)) == (kind == "recurrent")
    batch, own = asyncio.run(play_over_updates(components))
    assert (batch.support is not None) == (top_p < 1)
    now = {name: weight.clone() for name, weight in model.named_parameters()}
    scored = own.score(batch)
    assert len(batch.version[batch.trainable].unique()) > 3
    assert int(differing_slots(scored).sum()) == 0
    assert torch.equal(scored.routing_native.valid, batch.routing.valid)
    assert not router_differences(batch.routing, scored.routing_native).any()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, now[name]), name
    # Under the newest weights alone almost all older tokens differ.
    newest = components.learner.scorer.score_unchecked(batch, replay=False)
    older = batch.trainable & (batch.version < 5)
    assert differing_slots(newest)[older].float().mean() > 0.5


def test_routes_without_a_version_are_refused(recipe):
    components, _ = build_components(load(str(recipe), [*MOVING]))
    batch, own = asyncio.run(play_over_updates(components))
    batch = batch.replace(routing=replace(batch.routing, spans=()))
    with pytest.raises(RoutingError, match="slot 0 does not say which weights chose it"):
        own.score(batch)


def test_a_run_trains_on_older_tokens_and_compares_each_with_its_own_weights(train):
    run = train(None, *MOVING, "log.counterfactual_every=1", "eval.every=0")
    found = [row for row in rows(run) if "staleness/max" in row]
    assert [row["staleness/differing"] for row in found] == [0.0] * 5
    assert max(row["staleness/max"] for row in found) > 0
    assert max(row["mismatch/differing"] for row in found) > 0  # of age alone
    assert max(row["correction/weight_max"] for row in found) > 1  # TIS corrects it
    probe = load_file(run / "probes" / "step_00005.safetensors")
    assert torch.equal(probe["logp_own"], probe["logp_rollout"])
    assert describe_bit_equality(run).startswith("To the bit: 0 of ")
    assert "computed alike" in describe_bit_equality(run)
    assert json.loads((run / "config.json").read_text())["correction"]["preset"] == "tis"


def test_a_token_of_other_weights_than_it_says_stops_the_run(recipe, tmp_path, monkeypatch, capsys):
    """The kept weights are one bit off, in one weight of one router's layer."""
    keep = OwnWeights.keep

    def keep_wrong(self):
        keep(self)
        weight = self._kept[self._scorer.version][-1]
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], weight.new_tensor(9.0))
        weight.mul_(1.001)

    monkeypatch.setattr(hooks.OwnWeights, "keep", keep_wrong)
    out = tmp_path / "run"
    assert main(["train", str(recipe), f"out={out}", *MOVING, "eval.every=0"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "each token under the weights that sampled it" in said
    assert "log-probabilities differ, first problem" in said
    assert len([row for row in rows(out) if "staleness/max" in row]) >= 1
