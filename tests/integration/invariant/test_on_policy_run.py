"""Training runs with numerics = on-policy: every step exactly on-policy, faults found and
located."""

import asyncio
import dataclasses
import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onepolicy.audit.claims import describe_bit_equality
from onepolicy.build.components import SamplingComponents, build_components
from onepolicy.build.measure import MeasureComponents, measure_config
from onepolicy.cli import main
from onepolicy.config import TrainingError, UsageError, load
from onepolicy.invariant.fingerprint import short_digest
from onepolicy.invariant.numerics_contract import require_same_contract
from onepolicy.measure.bitwise import measure_bitwise
from onepolicy.models import experts as fast_experts
from onepolicy.report.bitwise import HELD, first_difference, summary
from onepolicy.run import resume
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepRunner
from support.metrics import rows

ON = ("numerics=on-policy", "eval.every=0", "steps=2")


def exact(run):
    """Check that every row of a run is exactly on-policy."""
    found = [row for row in rows(run) if "mismatch/k3" in row]
    for row in found:
        for name in ("mismatch/k3", "mismatch/differing", "mismatch/max_dlogp"):
            assert row[name] == 0.0, name
        for name in ("routing/routers", "counterfactual/mismatch/differing", "repeat/k3"):
            assert row.get(name, 0.0) == 0.0, name
        assert row.get("counterfactual/repeat/routers", 0.0) == 0.0
    return found


def weights(run, step=2):
    return load_file(run / "checkpoints" / f"step_{step:05d}" / "model.safetensors")


def parts_of(recipe, *overrides):
    config = load(str(recipe), ["numerics=on-policy", *overrides])
    return build_components(config)[0]


@pytest.fixture(scope="module")
def parts(recipe):
    return parts_of(recipe)


def measured(parts):
    """Return what `onepolicy measure` finds in the engine and scorer of these parts."""
    fields = [field.name for field in dataclasses.fields(SamplingComponents)]
    shared = {name: getattr(parts, name) for name in fields}
    built = MeasureComponents(**shared, scorer=parts.learner.scorer)
    return asyncio.run(measure_bitwise(built, "small"))


def test_every_step_is_exactly_on_policy(train):
    run = train(None, *ON, "objective.num_minibatches=2", "log.counterfactual_every=1")
    found = exact(run)
    assert len(found) == 2
    assert "counterfactual/mismatch/k3" in found[0]
    about = json.loads((run / "run.json").read_text())
    assert about["fingerprint"]["numerics"] == "on-policy"
    with safe_open(run / "probes" / "step_00001.safetensors", "pt") as probe:
        both = probe.metadata()
        assert json.loads(both["rollout"]) == [both["fingerprint"]]
        assert json.loads(both["fingerprint"]) == about["fingerprint"]
    other = json.dumps(about["fingerprint"] | {"cuda": "x"})
    assert resume.build_difference(run, json.dumps(about["fingerprint"])) is None
    assert resume.build_difference(run, other) == "cuda: x, unset"
    assert "To the bit: 0 of" in describe_bit_equality(run)
    assert describe_bit_equality(run).endswith("computed alike")
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["fingerprint"] == short_digest(json.dumps(about["fingerprint"], sort_keys=True))
    assert sample["mean_logp_rollout"] == sample["mean_logp_trainer"]


def test_the_reference_is_computed_as_the_policy_is(recipe):
    parts = parts_of(recipe, "objective.kl.coef=0.1")
    runner = StepRunner(parts, build_hooks(parts))
    assert asyncio.run(runner.rl_step(0)).metrics["train/kl"] == 0.0


def test_an_audit_reports_missing_evidence(tmp_path):
    logp, exact = torch.tensor([-1.0, -2.0]), {"numerics": "on-policy"}
    probe = tmp_path / "probes" / "step_00001.safetensors"
    probe.parent.mkdir()
    for ours, theirs, why in (
        (exact | {"capability": "AVX2"}, [exact], "capability: AVX2, unset"),
        ({"numerics": "fast"}, [{"numerics": "fast"}], "numerics were not on-policy"),
        (exact, [], "no fingerprint"),
    ):
        rollout = json.dumps([json.dumps(each) for each in theirs])
        tensors = {"logp_rollout": logp, "logp_trainer": logp.clone()}
        save_file(tensors, probe, metadata={"fingerprint": json.dumps(ours), "rollout": rollout})
        found = describe_bit_equality(tmp_path)
        assert found.startswith("To the bit: 0 of 2 log-probabilities of the probes differ; cannot")
        assert why in found


@pytest.mark.full
def test_bfloat16_with_the_rollout_as_anchor(train):
    """The batch is not scored before the update, and the update sees the same bits."""
    run = train(None, *ON, "model.dtype=bfloat16", "replay.mode=off", "correction.preset=ppo-is")
    assert len(exact(run)) == 2


@pytest.mark.full
def test_the_engines_batches_do_not_move_the_weights(train):
    engine = ("rollout.engine.max_num_seqs=3", "rollout.engine.enable_prefix_caching=false")
    base = train(None, *ON, "log.counterfactual_every=0", "rollout.engine.max_num_seqs=8")
    other = train(None, *ON, "log.counterfactual_every=0", *engine)
    exact(base)
    before, after = weights(base), weights(other)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_fault_of_one_layer_stops_the_run_and_is_located(parts, monkeypatch):
    tree = {"model": {"path": parts.config.model.path}, "numerics": "on-policy"}
    assert measure_config(tree, [], None).rollout.engine.dtype == "float32"
    faulty = parts.engine.model.model.layers[1].mlp.experts
    fast = lambda *args: fast_experts.grouped_experts(faulty, *args)  # noqa: E731
    monkeypatch.setattr(faulty, "forward", fast)
    words = r"step 1: \d+ of \d+ log-probabilities differ, first problem 0, sample"
    with pytest.raises(TrainingError, match=words):
        asyncio.run(StepRunner(parts, build_hooks(parts)).rl_step(0))
    found, operator = measured(parts), "model.layers.1.mlp.experts (Qwen3MoeExperts)"
    assert not found.holds
    assert found.differing > 0
    assert (found.first.layer, found.first.operator) == (1, operator)
    assert 0 < found.first.largest < 1e-4
    shown = first_difference(asdict(found) | {"holds": found.holds})
    assert f"{operator}, off by up to" in shown


@pytest.mark.full
def test_faults_of_attention_and_of_a_router_are_located(parts, monkeypatch):
    attention = parts.engine.model.model.layers[2].self_attn
    scaling = torch.tensor(attention.scaling).nextafter(torch.tensor(1.0)).item()
    with monkeypatch.context() as patch:
        patch.setattr(attention, "scaling", scaling)
        found = measured(parts).first
    operator = "rotary embedding or attention function of model.layers.2.self_attn"
    assert (found.layer, found.operator) == (2, operator)

    router = parts.engine.model.model.layers[1].mlp.gate
    plain = router.forward

    def forward(hidden):
        """Return the right logits, and wrong weights made of them."""
        logits, scores, ids = plain(hidden)
        return logits, scores * (1 + 2**-20), ids

    monkeypatch.setattr(router, "forward", forward)
    found = measured(parts).first
    assert (found.layer, found.operator) == (1, "model.layers.1.mlp.gate (Qwen3MoeTopKRouter)")


@pytest.mark.full
def test_measure_finds_nothing_where_nothing_is_wrong(recipe, tmp_path, capsys):
    out = tmp_path / "measured"
    arguments = ["--numerics", "on-policy", "--recipe", str(recipe), "--out", str(out)]
    assert main(["measure", *arguments]) == 0
    tree = json.loads((out / "bitwise.json").read_text())
    assert tree["holds"]
    assert not any(tree[name] for name in ("differing", "trainer_again", "engine_alone", "k3"))
    assert tree["tokens"] == tree["alone"] > 50
    printed = " ".join(capsys.readouterr().out.split())
    assert HELD in printed
    assert printed.endswith("bitwise.json (bits have no charts, so there is no report.html)")
    assert len(summary(tree)) == 2


def test_options_that_bits_have_no_use_for(recipe, capsys):
    no_effect = "has no effect with numerics = on-policy"
    for option, words in (
        (("--top", "5"), no_effect),
        (("--dense", "x"), no_effect),
        (("--engine-model", "x"), no_effect),
        (("--png", "--out", "y"), "numerics = on-policy compares bits"),
    ):
        assert main(["measure", "--numerics", "on-policy", "--recipe", str(recipe), *option]) == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(f"onepolicy: {option[0]}: ")
        assert words in message


def test_engine_and_learner_with_different_arithmetic_are_refused(parts, recipe):
    engine, learner = parts.engine.caps.contract, parts.learner.scorer.contract
    require_same_contract(engine, learner)
    fast = parts_of(recipe, "numerics=fast", "rollout.engine.dtype=float32").engine.caps.contract
    refused = [(fast, "numerics", "fast and the trainer on-policy")]
    for field in ("dtype", "attention", "experts", "lm_head", "logp"):
        refused.append((replace(engine, **{field: "other"}), field, "other and the trainer"))
    for name in ("model.layers.0.mlp.gate", "model.rotary_emb"):
        changed = tuple((n, "float64" if n == name else how) for n, how in engine.modules)
        assert changed != engine.modules
        refused.append((replace(engine, modules=changed), f"module {name}", "float64 and the t"))
    for contract, what, values in refused:
        words = f"same {what} on both sides, but the engine has {values}"
        with pytest.raises(UsageError, match=words):
            require_same_contract(contract, learner)
