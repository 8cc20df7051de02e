"""`onepolicy measure` on a small warmed-up policy: planted causes are named, a clean run is never accused."""

import asyncio
import dataclasses
import json

import pytest
import torch
from models import make

from onepolicy.cli import main
from onepolicy.loop.measure import measure_config, measure_parts, to_tree
from onepolicy.loop.setup import build_parts, resolve_model
from onepolicy.types import RoutingTrace

SETTINGS = [
    "task.kind=chain",
    "task.ops=2",
    "rollout.sampling.max_tokens=20",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.engine.slots=32",
    "train.threads=1",
]


class Planted:
    """An engine with a fault."""

    def __init__(self, engine, *, temperature=1.0, late=0):
        self.engine, self.temperature, self.late = engine, temperature, late
        self.caps = engine.caps

    @property
    def version(self):
        return self.engine.version

    async def generate(self, prompt_ids, sampling, *, seed):
        hot = dataclasses.replace(sampling, temperature=sampling.temperature * self.temperature)
        found = await self.engine.generate(prompt_ids, hot, seed=seed)
        if not self.late:
            return found
        rolled = found.routing.ids.roll(self.late, 0)
        return dataclasses.replace(
            found, routing=RoutingTrace(rolled, found.routing.valid, found.routing.layers, found.routing.num_experts)
        )

    async def load_weights(self, weights, version):
        await self.engine.load_weights(weights, version)

    async def reset_cache(self):
        await self.engine.reset_cache()


def measured(policy, *overrides, older=0.0, **fault):
    """older: how far the engine's weights are from the trainer's, in shares of each tensor's deviation."""
    config = measure_config({}, [f"model.path={policy}", *SETTINGS, *overrides], None)
    parts, tokenizer = build_parts(config)
    parts = dataclasses.replace(parts, engine=Planted(parts.engine, **fault))

    async def run():
        if older:
            generator = torch.Generator().manual_seed(0)
            other = {
                n: w + older * w.std() * torch.randn(w.shape, generator=generator) if w.dim() > 1 else w
                for n, w in parts.learner.named_weights()
            }
            await parts.engine.load_weights(other.items(), parts.engine.version)
        return await measure_parts(parts, tokenizer, resolve_model(config.model))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def clean(policy):
    return measured(policy)


def test_a_clean_run_is_not_accused(clean):
    assert clean.verdict.action != "bug", clean.verdict.text()
    assert clean.look.factor == 1
    assert clean.look.replayed is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_no_clean_run_is_accused(policy, seed, dtype):
    found = measured(policy, f"seed={seed}", f"rollout.engine.dtype={dtype}")
    assert found.verdict.action != "bug", found.verdict.text()


def test_bars_and_remainder_make_up_the_gap(clean):
    fall = clean.waterfall
    assert [bar.name for bar in fall.bars] == ["temperature", "routing", "engine precision"]
    assert fall.total.value == pytest.approx(clean.look.found.k3)
    assert sum(bar.removed.value for bar in fall.bars) + fall.remainder.value == pytest.approx(fall.total.value)
    assert fall.bars[0].removed.value == 0
    shape = next(a for a in clean.alone if a.name == "batch shape, trainer")
    assert 0 <= shape.nats.value < 1e-9  # fp32


def test_breakdowns_account_for_every_token(clean):
    for rows in clean.breakdowns.values():
        assert sum(row.tokens for row in rows) == clean.look.found.tokens
        assert sum(row.share for row in rows) == pytest.approx(1)
    gaps = [abs(w.p_rollout - w.p_trainer) / max(w.p_rollout, w.p_trainer) for w in clean.worst]
    assert gaps == sorted(gaps, reverse=True)
    json.dumps(to_tree(clean), allow_nan=False)


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        pytest.param({"temperature": 1.3}, ("temperature",), marks=pytest.mark.slow),
        ({"late": 1}, ("routes",)),
        pytest.param({"older": 0.1}, ("stale",), marks=pytest.mark.slow),
        ({"older": 0.1, "temperature": 1.3}, ("stale", "temperature")),
    ],
)
def test_planted_cause_is_named(policy, fault, causes):
    found = measured(policy, "rollout.engine.dtype=float32", **fault)
    assert (found.verdict.action, found.verdict.causes) == ("bug", causes), found.verdict.text()
    if causes == ("temperature",):
        assert found.look.factor == pytest.approx(1.3, abs=0.02)
        assert found.waterfall.bars[0].removed.value > 0.9 * found.waterfall.total.value


def test_command_writes_a_report_and_says_the_verdict(policy, tmp_path, capsys):
    assert main(["measure", str(policy), *SETTINGS, "--out", str(tmp_path / "m")]) == 0
    tree = json.loads((tmp_path / "m" / "measure.json").read_text())
    printed = " ".join(capsys.readouterr().out.split())
    assert tree["verdict"]["sentence"] in printed
    html = (tmp_path / "m" / "report.html").read_text()
    assert tree["verdict"]["sentence"] in html
    for figure in ("waterfall", "f_tau", "scatter", "scatter_native", "routers", "layers", "breakdown-3"):
        assert f'id="fig-{figure}"' in html
    assert main(["measure", str(policy), *SETTINGS, "--out", str(tmp_path / "m")]) == 2


def test_a_dense_model_has_no_routing_rows(policy, tmp_path, capsys):
    from transformers import AutoTokenizer

    make("qwen3_dense").save_pretrained(tmp_path / "dense")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "dense")
    few = ["rollout.prompts_per_step=2", "rollout.group_size=2"]
    assert main(["measure", str(tmp_path / "dense"), *SETTINGS, *few, "--out", str(tmp_path / "d")]) == 0
    tree = json.loads((tmp_path / "d" / "measure.json").read_text())
    assert [bar["name"] for bar in tree["waterfall"]["bars"]] == ["temperature", "engine precision"]
    assert "with_replay" not in tree["metrics"]
    assert not any(name.startswith("routing") for name in tree["metrics"]["without_replay"])
    assert 'id="fig-routers"' not in (tmp_path / "d" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a model"),
        (["somewhere", "--tiny"], "leave out somewhere"),
        (["--tiny", "replay.mode=off", "train.threads=1"], "with the rollout's routes and without"),
    ],
)
def test_usage(arguments, message, capsys):
    assert main(["measure", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_folder_for_the_engine(policy, capsys):
    few = ["rollout.prompts_per_step=1", "rollout.group_size=2"]
    assert main(["measure", "--engine-model", "/nowhere", str(policy), *SETTINGS, *few]) == 2
    assert "--engine-model: no folder /nowhere" in capsys.readouterr().err
