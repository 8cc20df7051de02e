"""Weights and gates of whole turns in runs: the numbers of each step are recomputed from its
counterfactual scores."""

import functools
import json
import math
from collections import defaultdict

import pytest
from safetensors.torch import load_file

from onepolicy.cli import main
from support.metrics import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
RUN = ["steps=2", "objective.num_minibatches=1", "replay.mode=off", "eval.every=0"]
RUN += ["log.counterfactual_every=1", "log.report=false", "log.tensorboard=false"]
# of the products: about half of the turns are inside, and so of the bounds below
LOW, HIGH = 0.99, 1.01
BAND = [f"correction.weight.low={LOW}", f"correction.weight.high={HIGH}"]
BAND += ["correction.weight.outside=zero"]


@pytest.fixture(scope="module")
def train(products_policy, tmp_path_factory):
    """Return train(*settings), which makes each run once. Of every step it returns the row, and
    the turns as (log p, log q) of their tokens."""

    @functools.cache
    def run(*settings):
        out = tmp_path_factory.mktemp("turns") / "run"
        paths = [f"model.path={products_policy}", f"out={out}"]
        assert main(["train", "recipes/agent_products.toml", *paths, *RUN, *settings]) == 0
        found = [(row, turns_of(out, row["step"])) for row in rows(out)]
        assert len(found) == 2
        return found

    return run


def turns_of(out, step):
    probe = load_file(out / "probes" / f"step_{step:05d}.safetensors")
    turns = defaultdict(list)
    names = ("segment", "turn", "logp_trainer", "logp_rollout")
    for segment, turn, p, q in zip(*(probe[name].tolist() for name in names), strict=True):
        turns[segment, turn].append((p, q))
    assert len(turns) > len({segment for segment, _ in turns})
    return list(turns.values())


def product(turn):
    return math.exp(sum(p - q for p, q in turn))


@pytest.mark.parametrize("live", [False, True])
def test_weights_of_turns(live, train):
    """Outside the band: rejected, or clamped in the loss."""
    settings = BAND
    if live:
        settings = [BAND[1], "correction.ratio=new/rollout", "objective.preset=rloo"]
    for row, turns in train("correction.weight.level=turn", *settings):
        slots, rho = sum(map(len, turns)), [(product(turn), len(turn)) for turn in turns]
        kept = [(w, n) for w, n in rho if LOW <= w <= HIGH]
        if live:
            kept = [(min(w, HIGH), n) for w, n in rho]
        rejected, mean = 1 - sum(n for _, n in kept) / slots, sum(w * n for w, n in kept) / slots
        assert row["correction/rejected"] == pytest.approx(rejected, abs=1e-6)
        assert row["correction/weight_mean"] == pytest.approx(mean, rel=1e-5)
        assert row["correction/weight_max"] == pytest.approx(max(w for w, _ in kept), rel=1e-5)
        assert live == (row["correction/rejected"] == 0)


@pytest.mark.parametrize("setting", ["correction.normalise=self", "correction.denominator=kept"])
def test_scaled_weights_of_turns(setting, train):
    for row, turns in train("correction.weight.level=turn", *BAND, setting):
        kept = [(product(turn), len(turn)) for turn in turns if LOW <= product(turn) <= HIGH]
        count = sum(n for _, n in kept)
        expected = 1.0 if "self" in setting else sum(w * n for w, n in kept) / count
        assert row["correction/weight_mean"] == pytest.approx(expected, rel=1e-5)
        assert 0 < row["correction/kept"] == count < row["correction/slots"]


def binary_kl(p, q):
    """Return KL(Bernoulli(exp q) || Bernoulli(exp p)). A certain token has no other outcome."""
    own = math.exp(q) * (q - p)
    rest_p, rest_q = -math.expm1(p), -math.expm1(q)
    return own + (
        rest_q * (math.log(rest_q) - math.log(rest_p)) if min(rest_p, rest_q) > 0 else 0.0
    )


GATES = {  # statistic.aggregate -> (bounds, value of a turn); others: tests/unit/correct
    "ratio.sum": ({"low": LOW, "high": HIGH}, product),
    "k2.max": ({"high": 5e-5}, lambda t: max((p - q) ** 2 / 2 for p, q in t)),
    "k3.mean": ({"high": 5e-6}, lambda t: sum(math.expm1(p - q) - (p - q) for p, q in t) / len(t)),
    "tv.sum": ({"high": 5e-3}, lambda t: sum(abs(math.exp(p) - math.exp(q)) for p, q in t)),
    "binary_kl.mean": ({"high": 3e-6}, lambda t: sum(binary_kl(p, q) for p, q in t) / len(t)),
    "trainer_prob.min": ({"low": 0.3}, lambda t: min(math.exp(p) for p, _ in t)),
}


def gate(name, bounds, **more):
    statistic, aggregate = name.split(".")
    fields = {"statistic": statistic, "aggregate": aggregate, "scope": "turn", **bounds, **more}
    inside = ", ".join(f"{key} = {json.dumps(value)}" for key, value in fields.items())
    return f"correction.gates=[{{{inside}}}]"


@pytest.mark.parametrize("name", GATES)
def test_gates_of_turns(name, train):
    """Turns at a bound, whose side is a matter of rounding, are not counted."""
    bounds, value = GATES[name]
    more = {"ratio": "new/rollout"} if name == "k3.mean" else {}  # this one in the loss
    rejected = []
    for row, turns in train(gate(name, bounds, **more)):
        slots, least, most = sum(map(len, turns)), 0, 0
        for turn in turns:
            near = any(abs(value(turn) - bound) < 1e-5 * abs(bound) for bound in bounds.values())
            inside = bounds.get("low", -math.inf) <= value(turn) <= bounds.get("high", math.inf)
            least += len(turn) * (not inside and not near)
            most += len(turn) * (not inside or near)
        assert least / slots - 1e-6 <= row["correction/rejected"] <= most / slots + 1e-6
        rejected.append(row["correction/rejected"])
    assert 0 < sum(rejected) < len(rejected)


def test_a_gate_for_turns_of_bad_answers(train):
    """With when = negative, the gate rejects only turns with a negative advantage."""
    bounds, _ = GATES["k2.max"]
    every, some = (
        train(gate("k2.max", bounds, **more))[0][0]["correction/rejected"]
        for more in ({}, {"when": "negative"})
    )
    assert 0 < some < every
