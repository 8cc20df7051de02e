"""Weights and gates of whole turns in runs: the numbers of each step are recomputed from its
counterfactual scores."""

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
from safetensors.torch import load_file

from onepolicy.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
RUN = [
    "steps=2",
    "objective.num_minibatches=1",
    "replay.mode=off",
    "eval.every=0",
    "log.counterfactual_every=1",
]
RUN += ["log.report=false", "log.tensorboard=false"]
LOW, HIGH = (
    0.99,
    1.01,
)  # of the products: about half of the turns are inside, and so of the bounds below
BAND = [
    f"correction.weight.low={LOW}",
    f"correction.weight.high={HIGH}",
    "correction.weight.outside=zero",
]


def train(
    policy: Path, out: Path, *settings: str
) -> list[tuple[dict, list[list[tuple[float, float]]]]]:
    """Run the command and return, for every step, its row and its turns as (log p, log q) of their
    tokens."""
    paths = [f"model.path={policy}", f"out={out}"]
    assert main(["train", "recipes/agent_products.toml", *paths, *RUN, *settings]) == 0
    found = []
    for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        assert row["train/loss"] is not None
        probe = load_file(out / "probes" / f"step_{row['step']:05d}.safetensors")
        turns = defaultdict(list)
        names = ("segment", "turn", "logp_trainer", "logp_rollout")
        for segment, turn, p, q in zip(*(probe[name].tolist() for name in names), strict=True):
            turns[segment, turn].append((p, q))
        assert len(turns) > len({segment for segment, _ in turns})
        found.append((row, list(turns.values())))
    assert len(found) == 2
    return found


def product(turn: list[tuple[float, float]]) -> float:
    return math.exp(sum(p - q for p, q in turn))


WEIGHTS = {  # settings -> weight of a turn by its product, None: rejected
    "is": ([], lambda rho: rho),
    "tis": ([f"correction.weight.high={HIGH}"], lambda rho: min(rho, HIGH)),
    "mask": (BAND, lambda rho: rho if LOW <= rho <= HIGH else None),
    "live": (
        [
            f"correction.weight.high={HIGH}",
            "correction.ratio=new/rollout",
            "objective.preset=rloo",
        ],
        lambda rho: min(rho, HIGH),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_turns(name, products_policy, tmp_path):
    settings, weight = WEIGHTS[name]
    for row, turns in train(
        products_policy, tmp_path / "run", "correction.weight.level=turn", *settings
    ):
        slots = sum(map(len, turns))
        kept = [(w, len(turn)) for turn in turns if (w := weight(product(turn))) is not None]
        assert row["correction/rejected"] == pytest.approx(
            1 - sum(n for _, n in kept) / slots, abs=1e-6
        )
        assert row["correction/weight_mean"] == pytest.approx(
            sum(w * n for w, n in kept) / slots, rel=1e-5
        )
        assert row["correction/weight_max"] == pytest.approx(max(w for w, _ in kept), rel=1e-5)
        assert (name == "mask") == (row["correction/rejected"] > 0)


@pytest.mark.parametrize(
    ("setting", "mean"),
    [("correction.normalise=self", "1"), ("correction.denominator=kept", "kept")],
)
def test_scaled_weights_of_turns(setting, mean, products_policy, tmp_path):
    for row, turns in train(
        products_policy, tmp_path / "run", "correction.weight.level=turn", *BAND, setting
    ):
        kept = [(product(turn), len(turn)) for turn in turns if LOW <= product(turn) <= HIGH]
        count = sum(n for _, n in kept)
        expected = 1.0 if mean == "1" else sum(w * n for w, n in kept) / count
        assert row["correction/weight_mean"] == pytest.approx(expected, rel=1e-5)
        assert 0 < row["correction/kept"] == count < row["correction/slots"]


def binary_kl(p: float, q: float) -> float:
    """Return KL(Bernoulli(exp q) || Bernoulli(exp p)). A certain token has no other outcome."""
    own = math.exp(q) * (q - p)
    rest_p, rest_q = -math.expm1(p), -math.expm1(q)
    return own + (
        rest_q * (math.log(rest_q) - math.log(rest_p)) if min(rest_p, rest_q) > 0 else 0.0
    )


GATES = {  # statistic.aggregate -> (bounds, value of a turn)
    "ratio.sum": ({"low": LOW, "high": HIGH}, product),
    "ratio.mean": ({"low": 0.999, "high": 1.001}, lambda t: product(t) ** (1 / len(t))),
    "ratio.min": ({"low": LOW}, lambda t: min(math.exp(p - q) for p, q in t)),
    "k1.mean": ({"low": -1e-3, "high": 1e-3}, lambda t: sum(q - p for p, q in t) / len(t)),
    "k2.max": ({"high": 5e-5}, lambda t: max((p - q) ** 2 / 2 for p, q in t)),
    "k3.mean": ({"high": 5e-6}, lambda t: sum(math.expm1(p - q) - (p - q) for p, q in t) / len(t)),
    "exp_abs.max": ({"high": HIGH}, lambda t: max(math.exp(abs(p - q)) for p, q in t)),
    "tv.sum": ({"high": 5e-3}, lambda t: sum(abs(math.exp(p) - math.exp(q)) for p, q in t)),
    "binary_kl.mean": ({"high": 3e-6}, lambda t: sum(binary_kl(p, q) for p, q in t) / len(t)),
    "trainer_prob.min": ({"low": 0.3}, lambda t: min(math.exp(p) for p, _ in t)),
}


LIVE = ', ratio="new/rollout"'


def gate(name: str, bounds: dict[str, float], more: str = "") -> str:
    statistic, aggregate = name.split(".")
    ends = ", ".join(f"{side} = {value}" for side, value in bounds.items())
    return (
        f'correction.gates=[{{statistic="{statistic}", aggregate="{aggregate}", scope="turn", '
        f"{ends}{more}}}]"
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, "") for name in GATES), *((name, LIVE) for name in ("k3.mean", "ratio.sum"))],
)
def test_gates_of_turns(name, more, products_policy, tmp_path):
    """Turns at a bound, whose side is a matter of rounding, are not counted."""
    bounds, value = GATES[name]
    rejected = []
    for row, turns in train(products_policy, tmp_path / "run", gate(name, bounds, more)):
        slots, least, most = sum(map(len, turns)), 0, 0
        for turn in turns:
            near = [abs(value(turn) - bound) < 1e-5 * abs(bound) for bound in bounds.values()]
            outside = (
                not bounds.get("low", -math.inf) <= value(turn) <= bounds.get("high", math.inf)
            )
            least += len(turn) * (outside and not any(near))
            most += len(turn) * (outside or any(near))
        assert least / slots - 1e-6 <= row["correction/rejected"] <= most / slots + 1e-6
        rejected.append(row["correction/rejected"])
    assert 0 < sum(rejected) < len(rejected)


def test_a_gate_for_turns_of_bad_answers(products_policy, tmp_path):
    """With when = negative, the gate rejects only turns with a negative advantage."""
    every = train(products_policy, tmp_path / "every", gate("k2.max", {"high": 5e-5}))[0][0]
    some = train(
        products_policy, tmp_path / "some", gate("k2.max", {"high": 5e-5}, ', when="negative"')
    )[0][0]
    assert 0 < some["correction/rejected"] < every["correction/rejected"]
