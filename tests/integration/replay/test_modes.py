"""Replay modes: closed forms on one MoE layer, numbers by hand, and each mode in the training
loop."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onepolicy import bind_routers
from onepolicy.build.engines import check_engine_capabilities
from onepolicy.cli import main
from onepolicy.config import HFEngineConfig, UsageError, resolve
from onepolicy.interfaces import EngineCaps
from onepolicy.replay import Routers, RoutingError
from onepolicy.replay.modes import soften
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import RoutingTrace
from support.engine_runs import prompts, ragged, run
from support.learner_steps import batch_of, learner_of, one_step
from support.metrics import rows
from support.models import make
from support.replay_models import build, experts_inputs, loss_and_grads, same_bits, tokens
from support.replay_steps import checkpointed, routes_of

E, K = 4, 2


class Gate(nn.Module):
    """A router with logits = x, and the selection and weights of four kinds of families."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.top_k, self.num_experts = kind, K, E
        self.weight = nn.Parameter(torch.eye(E))
        # The selection bias of the last kinds always takes expert 3.
        self.bias = torch.tensor([0.0, 0.0, 0.0, 9.0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        if self.kind == "logits":  # gpt-oss: top-k, then softmax
            values, ids = torch.topk(logits, K)
            return logits, values.softmax(-1), ids
        if self.kind == "softmax":  # Qwen3-MoE without renormalisation
            values, ids = torch.topk(logits.softmax(-1), K)
            return logits, values, ids
        scores = logits.sigmoid()  # DeepSeek-V3
        if self.kind == "sqrt-softplus":  # DeepSeek-V4
            scores = F.softplus(logits).sqrt()
        ids = torch.topk(scores + self.bias, K)[1]
        return logits, scores.gather(1, ids), ids


class Layer(nn.Module):
    """A layer with y = sum_k weight_k * 10 ** expert_k, so every digit of y is one expert's
    weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate = Gate(kind)

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.gate(x)
        return (weights * 10.0**ids).sum(-1)


class OneLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(kind)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def one_layer(kind: str) -> tuple[OneLayer, Routers]:
    model = OneLayer(kind)
    return model, bind_routers(model)  # type: ignore[arg-type]


def trace_of(*ids: list[int], weights: Tensor | None = None) -> RoutingTrace:
    rows = torch.tensor(ids, dtype=torch.uint8)[:, None]
    return RoutingTrace(rows, torch.ones(len(rows), dtype=torch.bool), (0,), E, weights=weights)


# softmax probabilities .4 .3 .2 .1, so the router's own experts are 0 and 1 and the weakest of them
# scores .3
X = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def test_r3_weighs_the_replayed_experts_by_the_live_scores() -> None:
    # Of logits by eq. 8: softmax over the replayed experts only, .1/.5 and .4/.5.
    for kind, third, first in (("softmax", 0.1, 0.4), ("logits", 0.2, 0.8)):
        model, routers = one_layer(kind)
        with routers.replay(trace_of([3, 0]), check=False):
            assert model(X).item() == pytest.approx(third * 1000 + first * 1)


SOFTENED = [  # ratio, replayed, taken, share of replaced ones
    (0.66, [2, 0], [2, 0], 0.0),  # .2 >= .66 * .3 = .198: stays
    (0.67, [2, 0], [1, 0], 0.5),  # .2 < .67 * .3 = .201: the best own expert takes its column
    (0.66, [3, 2], [0, 2], 0.5),  # .1 goes, .2 stays
    (1.0, [3, 2], [0, 1], 1.0),  # both go, best first
    (1.0, [1, 0], [1, 0], 0.0),  # the router's own are never replaced
    (0.33, [3, 2], [3, 2], 0.0),
]


def test_soft_replaces_experts_that_the_live_scores_find_unlikely(subtests) -> None:
    """Both kinds of router have one definition: by probability. A router that selects by logits
    uses their softmax."""
    for kind, (ratio, replayed, taken, replaced) in itertools.product(
        ("softmax", "logits"), SOFTENED
    ):
        with subtests.test(kind=kind, ratio=ratio, replayed=replayed):
            model, routers = one_layer(kind)
            with routers.replay(trace_of(replayed), soft=ratio, native=True, check=False) as soft:
                y = model(X)
            with routers.replay(trace_of(taken), check=False):
                assert torch.equal(y, model(X))
            assert soft.replaced_fraction().tolist() == [replaced]
            assert soft.native().ids.tolist() == [[[0, 1]]]


@pytest.mark.parametrize("kind", ["sigmoid", "sqrt-softplus"])
def test_soft_scores_of_a_router_exclude_its_bias(kind: str) -> None:
    """The scores are .8 .5 .25 .1. The bias makes 3 and 0 the router's own, so the weakest own
    score is .1."""
    model, routers = one_layer(kind)
    scores = torch.tensor([[0.8, 0.5, 0.25, 0.1]])
    x = {"sigmoid": scores.logit(), "sqrt-softplus": scores.square().expm1().log()}[kind]
    with routers.replay(trace_of([2, 1]), soft=1.0, native=True, check=False) as soft:
        y = model(x)
    assert soft.native().ids.tolist() == [[[3, 0]]]
    assert soft.replaced_fraction().item() == 0.0  # .25 and .5 are above .1
    assert y.item() == pytest.approx(0.25 * 100 + 0.5 * 10)


def test_soft_rows_without_a_route_are_native_and_not_counted() -> None:
    model, routers = one_layer("softmax")
    trace = dataclasses.replace(trace_of([3, 2], [3, 2]), valid=torch.tensor([True, False]))
    with routers.replay(trace, soft=0.5, check=False) as soft:
        y = model(X.repeat(2, 1))
    assert y.tolist() == pytest.approx([0.4 * 1 + 0.2 * 100, 0.4 * 1 + 0.3 * 10])
    assert soft.replaced_fraction().item() == 0.5


def test_soften_never_names_an_expert_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    for ratio in (0.2, 0.6, 1.0):
        scores = torch.rand(500, 8, generator=generator)
        own, route = scores.topk(4)[1], torch.rand(500, 8, generator=generator).topk(4)[1]
        ids, replaced = soften(route, own, scores, ratio=ratio)
        assert all(len(set(row)) == 4 for row in ids.tolist())
        assert torch.equal(ids[~replaced], route[~replaced])
        threshold = ratio * scores.gather(1, own).amin(1, keepdim=True)
        assert torch.equal(replaced, scores.gather(1, route) < threshold)
        assert (scores.gather(1, ids) >= threshold).all()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2_groups", "deepseek_v3"])
def test_soft_on_real_routers(family: str) -> None:
    """A vanishing ratio equals r3 to the bit. The router's own experts are never replaced, and no
    expert gets weight 0."""
    model, ids = build(family), tokens()
    routers = bind_routers(model)
    trace = routes_of(routers)
    with routers.record() as tape:
        plain = model(input_ids=ids).logits
    with routers.replay(trace, check=False):
        hard = model(input_ids=ids).logits
    with routers.replay(trace, soft=1e-30, check=False):
        assert torch.equal(model(input_ids=ids).logits, hard)
    with routers.replay(tape.trace(), soft=1.0, check=False) as soft:
        assert torch.equal(model(input_ids=ids).logits, plain)
    assert not soft.replaced_fraction().any()
    with experts_inputs(model) as seen, routers.replay(trace, soft=0.9, check=False) as soft:
        model(input_ids=ids)
    assert (soft.replaced_fraction() > 0.05).all()
    assert all((weights != 0).all() for _, weights in seen)


def test_soft_recompute_takes_the_forwards_experts(model, routers) -> None:
    trace, ids = routes_of(routers), tokens()
    with routers.replay(trace, soft=0.9, check=False) as plain:
        _, expected = loss_and_grads(model, ids)
    softened = routers.replay(trace, soft=0.9, check=False)
    with checkpointed(model, reentrant=False), softened as soft:
        _, grads = loss_and_grads(model, ids)
    assert same_bits(grads, expected)
    assert torch.equal(soft.replaced_fraction(), plain.replaced_fraction())


# --- weights --------------------------------------------------------------------------------------


def test_weights_forward_is_recorded_backward_is_live() -> None:
    """y = .25 * 1000 + .5 * 1 for any router. dy/dlogits = sum_k 10**e_k * dp_k/dlogits of the live
    p."""
    recorded = torch.tensor([[[0.25, 0.5]]])
    model, routers = one_layer("softmax")
    x = X.clone().requires_grad_()
    with routers.replay(trace_of([3, 0], weights=recorded), weights=True, check=False):
        y = model(x)
    assert y.item() == 0.25 * 1000 + 0.5 * 1
    y.sum().backward()
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    jacobian = torch.diag(p) - p[:, None] * p  # dp_i / dlogit_j
    torch.testing.assert_close(x.grad[0], 1000 * jacobian[3] + 1 * jacobian[0])
    other = X.clone().requires_grad_()
    with routers.replay(trace_of([3, 0]), check=False):
        model(other).sum().backward()
    assert torch.equal(x.grad, other.grad)  # the live gradient, bit for bit


def test_weights_of_rows_without_a_route_are_live() -> None:
    model, routers = one_layer("softmax")
    trace = trace_of([3, 0], [3, 0], weights=torch.full((2, 1, 2), 0.5))
    trace = dataclasses.replace(trace, valid=torch.tensor([True, False]))
    with routers.replay(trace, weights=True, check=False):
        y = model(X.repeat(2, 1))
    assert y.tolist() == pytest.approx([500.5, 0.4 * 1 + 0.3 * 10])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_weights_of_another_model_reach_the_experts_bit_for_bit(family: str) -> None:
    """bfloat16 weights recorded by other parameters are replayed in float32."""
    ids, sampler, trainer = tokens(), build(family, seed=1).bfloat16(), build(family)
    with bind_routers(sampler).record(weights=True) as tape, torch.no_grad():
        sampler(input_ids=ids)
    trace, routers = tape.trace(), bind_routers(trainer)
    assert trace.weights is not None
    with experts_inputs(trainer) as seen, routers.replay(trace, weights=True, check=False):
        _, grads = loss_and_grads(trainer, ids)
    for column, (experts, weights) in enumerate(seen):
        assert torch.equal(experts, trace.ids[:, column].long())
        assert torch.equal(weights, trace.weights[:, column].to(weights.dtype))
    gate = next(name for name in grads if name.endswith(("gate.weight", "router.weight")))
    assert grads[gate].any()
    for wrong, words in (
        (
            trace.weights.double(),
            r"weights are torch\.float64, but the router gives torch\.float32",
        ),
        (None, "no combine weights"),
    ):
        context = routers.replay(
            dataclasses.replace(trace, weights=wrong), weights=True, check=False
        )
        with pytest.raises(UsageError, match=words), context:
            trainer(input_ids=ids)


def test_weights_that_a_router_does_not_return_are_refused() -> None:
    model, routers = one_layer("softmax")
    gate, plain = model.layers[0].gate, model.layers[0].gate.forward

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        _, weights, ids = plain(x)
        return weights, weights, ids  # two candidates

    gate.forward = forward
    trace, words = (
        trace_of([3, 0], weights=torch.ones(1, 1, 2)),
        "layer 0.*2 floating tensors of 2 col",
    )
    with pytest.raises(RoutingError, match=words), routers.replay(trace, weights=True, check=False):
        model(X)


# --- in the learner and the loop ------------------------------------------------------------------


def test_r2_replays_the_routes_of_scoring_in_the_update() -> None:
    """The second minibatch runs on moved weights, where native routing would choose other experts
    than scoring did."""
    batch = batch_of()
    settings = ("optim.lr=0.3", "objective.num_minibatches=2")
    learner = learner_of("replay.mode=r2", *settings)
    taken: list[Tensor] = []
    for layer in learner.model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: taken.append(args[1].clone()))
    scored, _, replayed = one_step(learner, batch)
    layers = len(learner.routers.layers)
    updates, native = taken[layers:], scored.routing_native.ids.long()
    half = [batch.segment < 4, batch.segment >= 4]  # minibatches of two groups, two samples each
    for m in range(2):
        for column in range(layers):
            assert torch.equal(updates[m * layers + column], native[half[m], column])
    _, _, free = one_step(learner_of("replay.mode=off", *settings), batch)
    assert not same_bits(replayed, free)


def test_soft_reports_its_replace_rate() -> None:
    batch = batch_of()
    for option in ("train.reuse_scoring_forward=false", "train.reuse_scoring_forward=true"):
        _, metrics, _ = one_step(learner_of("replay.mode=soft", "replay.ratio=0.9", option), batch)
        assert 0.05 < metrics["train/soft_replaced"] < 1
    _, metrics, _ = one_step(learner_of("replay.mode=soft", "replay.ratio=1e-9"), batch)
    assert metrics["train/soft_replaced"] == 0.0
    assert "train/soft_replaced" not in one_step(learner_of(), batch)[1]


def test_the_share_that_soft_replay_replaces_is_of_all_rows_however_they_are_divided():
    """Also where the samples of a forward have no routes."""
    batch = batch_of()
    known = batch.routing.valid & (batch.segment >= 4)
    batch = batch.replace(routing=dataclasses.replace(batch.routing, valid=known))
    settings = ("replay.mode=soft", "replay.ratio=0.9", "replay.missing=native")
    found = []
    for budget in (10**6, 30):
        parts = f"train.tokens_per_micro_batch={budget}", "train.share_prompts=false"
        learner = learner_of(*settings, *parts)
        found.append(one_step(learner, batch)[1]["train/soft_replaced"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert 0.05 < found[0] < 1


MODES = {
    "r2": ["replay.mode=r2", "objective.num_minibatches=2"],
    "soft": ["replay.mode=soft", "replay.ratio=0.5"],
    "weights": ["replay.mode=weights"],
}


@pytest.mark.parametrize("mode", ["r2", pytest.param("soft", marks=pytest.mark.full), "weights"])
def test_every_mode_trains(train, mode: str) -> None:
    how = ["steps=1", "eval.every=0", "log.counterfactual_every=1", *MODES[mode]]
    (found,) = rows(train(None, *how))
    assert 0 < found["train/grad_norm"] < math.inf
    assert ("counterfactual/mismatch/k3" in found) == (mode != "r2")
    assert ("train/soft_replaced" in found) == (mode == "soft")


def test_an_engine_that_lacks_a_modes_data_is_refused() -> None:
    base = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
    neither, routes = (EngineCaps(returns_routes=it, max_len=8) for it in (False, True))
    with pytest.raises(UsageError, match=r"replay\.mode: r3 needs the rollout's routes"):
        check_engine_capabilities(resolve(base), neither, 0)
    with pytest.raises(UsageError, match="weights needs the combine weights"):
        check_engine_capabilities(resolve(base, ["replay.mode=weights"]), routes, 0)
    check_engine_capabilities(resolve(base), routes, 0)
    check_engine_capabilities(resolve(base, ["replay.mode=off"]), neither, 0)


def test_a_router_auxiliary_loss_is_refused(recipe, policy, tmp_path, capsys) -> None:
    other = tmp_path / "aux"
    shutil.copytree(policy, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}", f"model.path={other}"]) == 2
    assert "output_router_logits=True" in capsys.readouterr().err


@pytest.mark.parametrize("caching", [True, False])
def test_the_engine_returns_the_weights_of_its_routes(caching: bool) -> None:
    """Siblings share a prefilled prompt and rows are reused. In float32 one forward over the path
    agrees closely."""
    stock, options = make("qwen3_moe"), {"max_len": 64, "combine_weights": True}
    config = HFEngineConfig(dtype="float32", max_num_seqs=3, enable_prefix_caching=caching)
    engine = HFEngine(make("qwen3_moe"), config, return_routes=True, **options)
    assert engine.caps.returns_combine_weights
    paths = [path for path in prompts(3, 16, 20) for _ in range(2)]
    requests = ragged(paths, spread=8)
    for (prompt, _, _), done in zip(requests, run(engine, requests), strict=True):
        path = torch.tensor([[*prompt, *done.token_ids.tolist()]])[:, :-1]
        with torch.no_grad(), bind_routers(stock).record(weights=True) as tape:
            stock(input_ids=path, use_cache=False)
        expected = tape.trace()
        assert torch.equal(done.routing.ids, expected.ids)
        torch.testing.assert_close(done.routing.weights, expected.weights, atol=1e-5, rtol=0)
