"""`onepolicy measure` on a small warmed-up policy: planted causes are named, a clean run is never
accused."""

import asyncio
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file

from onepolicy.build.measure import build_measure_components, measure_config
from onepolicy.cli import main, parse_arguments
from onepolicy.cli.measure import is_first_look
from onepolicy.config.input_files import resolve_model
from onepolicy.config.policy import PolicyConfig
from onepolicy.measure import attribution, measure
from onepolicy.measure.attribution import trainer_precision
from onepolicy.measure.command import measure_and_show
from onepolicy.measure.measure import _score_with, measure_parts, score_rollouts
from onepolicy.measure.result import to_tree
from onepolicy.record.statistics import Statistics
from onepolicy.report.measure import waterfall_rows
from onepolicy.tiny.model import make_dense, make_model
from onepolicy.verdict.rules import HARMLESS_KL, QUIET_KL
from support.models import make
from support.planted_engine import SETTINGS, Planted

BAR_OF = {"shift": "misaligned tokens", "stale": "stale weights", "support": "sampling support"}
FEW = ["rollout.prompts_per_step=2", "rollout.group_size=2"]


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


def measured(policy, *overrides, older=0.0, **fault):
    """Measure the policy. older: distance of the engine's weights from the trainer's, in units of
    each tensor's deviation."""
    config = measure_config({}, [f"model.path={policy}", *SETTINGS, *overrides], None)
    parts, tokenizer = build_measure_components(config)
    parts = dataclasses.replace(parts, engine=Planted(parts.engine, **fault))

    async def run():
        if older:
            generator = torch.Generator().manual_seed(0)
            other = {
                n: w + older * w.std() * torch.randn(w.shape, generator=generator)
                if w.dim() > 1
                else w
                for n, w in parts.scorer.named_weights()
            }
            await parts.engine.load_weights(other.items(), parts.engine.version)
        return await measure_parts(parts, tokenizer, resolve_model(config.model))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def clean(policy):
    return measured(policy)


def test_the_engine_samples_alone_with_the_weights_that_it_was_given(policy, tmp_path, monkeypatch):
    """The trainer's weights, tried in it, have not closed the gap."""
    other = shutil.copytree(policy, tmp_path / "other")
    weights = load_torch(other / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        if tensor.dim() > 1:
            tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    config = measure_config({}, [f"model.path={policy}", *SETTINGS, *FEW], None)
    parts, tokenizer = build_measure_components(config)
    monkeypatch.setattr(measure, "_stale", lambda first, second: None)
    model = resolve_model(config.model)
    found = asyncio.run(measure_parts(parts, tokenizer, model, engine_model=str(other)))
    assert found.scored.found.k3 > HARMLESS_KL
    assert found.repeats["engine_alone/k3"] < 1e-6
    assert found.repeats["engine_alone/same"] > 0.9


SETTINGS_OF_BOTH_SIDES = ("misaligned tokens", "stale weights", "sampling support", "temperature")


def show(fault, found):
    """Print one row of the table in docs/audit.md; `pytest -rP` shows it."""
    bars = ", ".join(f"{name} {nats:.2g}" for name, nats in bars_of(found).items() if nats > 1e-5)
    total, left = found.waterfall.total.value, found.waterfall.bars[-1].left.value
    print(
        f"{fault}: {found.verdict.action} {found.verdict.causes}: {total:.2g}: {bars}: {left:.1g}"
    )


def bars_of(found):
    return {bar.name: bar.removed.value for bar in found.waterfall.bars}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_clean_run_is_accused(policy, seed, dtype):
    found = measured(policy, f"seed={seed}", f"rollout.engine.dtype={dtype}")
    assert found.verdict.action not in ("bug", "unclear"), found.verdict.text()
    assert [bars_of(found)[name] for name in SETTINGS_OF_BOTH_SIDES] == [0, 0, 0, 0]


@pytest.mark.full
def test_few_sequences_forbid_a_correction(policy):
    """Nine rows do not show whether a part of them is wrong; twelve or more are compared."""
    few = ["rollout.prompts_per_step=3", "rollout.group_size=3"]
    found = measured(policy, "rollout.engine.dtype=float32", *few, crowded=0.2)
    assert found.verdict.action == "unclear", found.verdict.text()
    assert "9 sequences, too few" in found.verdict.sentence


@pytest.mark.slow
@pytest.mark.parametrize("crowded", [0, 0.04])
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_gap_from_routing_gets_r3_or_tis(policy, seed, crowded):
    """One expert choice in ten differs, as between an engine and a trainer of a large MoE model.

    crowded adds noise that replay cannot remove.
    """
    found = measured(
        policy, f"seed={seed}", "rollout.engine.dtype=bfloat16", routers=0.4, crowded=crowded
    )
    gap, advice = found.waterfall.total.value, found.verdict
    print(f"seed {seed}, {crowded}: {gap:.2g} nats: {advice.action}: {advice.setting}")
    if gap < QUIET_KL:  # one seed of the twenty
        return
    assert advice.action in ("replay", "correct"), advice.text()
    assert "replay.mode=r3" in advice.setting or advice.setting == "correction.preset=tis"


@pytest.mark.full
def test_a_clean_run_is_not_accused_and_bars_and_remainder_make_up_the_gap(clean):
    assert clean.verdict.action != "bug", clean.verdict.text()
    assert clean.scored.explained.rescorer.factor == 1
    assert clean.scored.replayed is not None
    fall = clean.waterfall
    names = [*SETTINGS_OF_BOTH_SIDES, "routing", "precision", "batch shape"]
    assert [bar.name for bar in fall.bars] == names
    assert fall.total.value == pytest.approx(clean.scored.found.k3)
    whole = sum(bar.removed.value for bar in fall.bars) + fall.bars[-1].left.value
    assert whole == pytest.approx(fall.total.value)
    assert [bar.removed.value for bar in fall.bars[:4]] == [0, 0, 0, 0]
    assert clean.repeats["engine_all/same"] == 1  # the same requests with the same seeds
    assert clean.repeats["engine_all/k3"] == 0
    assert clean.repeats["engine_alone/same"] > 0.9


def test_breakdowns_account_for_every_token(policy):
    clean = measured(policy, *FEW)
    for rows in clean.breakdowns.values():
        assert sum(row.tokens for row in rows) == clean.scored.found.tokens
        assert sum(row.share for row in rows) == pytest.approx(1)
    gaps = [abs(w.p_rollout - w.p_trainer) / max(w.p_rollout, w.p_trainer) for w in clean.worst]
    assert gaps == sorted(gaps, reverse=True)
    json.dumps(to_tree(clean), allow_nan=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "causes", "bar"),
    [
        slow({"temperature": 1.3}, ("temperature",), "temperature"),
        slow({"top_p": 0.7}, ("support",), "sampling support"),
        slow({"top_k": 2, "temperature": 1.3}, ("support", "temperature"), None),
        ({"top_k": 2}, ("support",), "sampling support"),
        slow({"shift": 1}, ("shift",), "misaligned tokens"),
        slow({"shift": -1, "temperature": 1.3}, ("shift", "temperature"), None),
        ({"late": 1}, ("routes",), None),
        slow({"older": 0.1}, ("stale",), "stale weights"),
        ({"older": 0.1, "temperature": 1.3}, ("stale", "temperature"), None),
    ],
)
def test_planted_cause_is_named_and_its_bar_is_the_gap(policy, fault, causes, bar):
    found = measured(policy, "rollout.engine.dtype=float32", **fault)
    show(fault, found)
    assert (found.verdict.action, found.verdict.causes) == ("bug", causes), found.verdict.text()
    if "temperature" in causes and "stale" not in causes:  # a stale engine has one of its own
        assert found.scored.explained.rescorer.factor == pytest.approx(1.3, abs=0.02)
    if bar is not None:
        assert bars_of(found)[bar] > 0.95 * found.waterfall.total.value
    elif causes != ("routes",):
        large = {name for name, nats in bars_of(found).items() if nats > 1e-3}
        assert large == {BAR_OF[causes[0]], "temperature"}


def test_a_temperature_does_not_take_the_place_of_another_cause(policy):
    found = measured(policy, "rollout.engine.dtype=float32", *FEW, shift=-1, temperature=1.3)
    assert found.verdict.causes == ("shift", "temperature"), found.verdict.text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "bar"), [({"crowded": 0.2}, "batch shape"), slow({"routers": 0.3}, "routing")]
)
def test_planted_noise_is_the_largest_bar_and_no_bug(policy, fault, bar):
    found = measured(policy, "rollout.engine.dtype=float32", **fault)
    show(fault, found)
    assert found.verdict.action != "bug", found.verdict.text()
    bars = bars_of(found)
    assert max(bars, key=bars.get) == bar, bars
    assert bars[bar] > 0.8 * found.waterfall.total.value


@pytest.mark.full
@pytest.mark.parametrize("below", [0.1, slow(0.6)])
def test_an_unexplained_signature_forbids_a_correction(policy, below):
    """Log-probabilities that are too low at every token are no mismatch, and no cause that we
    know."""
    found = measured(policy, "rollout.engine.dtype=float32", below=below)
    assert (found.verdict.action, found.verdict.setting) == ("unclear", ""), found.verdict.text()


@pytest.mark.slow
def test_precision_compares_the_dtypes_of_both_sides(policy):
    """With a trainer under bf16 autocast and an fp32 engine, autocast is the whole gap that replay
    leaves."""
    found = measured(policy, "rollout.engine.dtype=float32", "train.autocast=bfloat16")
    precision = next(bar for bar in found.waterfall.bars if bar.name == "precision")
    assert precision.left.value < 1e-9 < 1e-6 < precision.removed.value
    trainer = next(each for each in found.ablations if each.name == "trainer in bfloat16")
    assert trainer.nats.value == pytest.approx(precision.removed.value, rel=1e-3)


def test_the_command_writes_a_report_and_prints_the_verdict(policy, tmp_path, capsys):
    command = ["measure", str(policy), *SETTINGS, *FEW, "--out", str(tmp_path / "m")]
    assert main([*command, "--top", "4"]) == 0
    tree = json.loads((tmp_path / "m" / "measure.json").read_text())
    out, told = capsys.readouterr()
    printed = " ".join(out.split())
    assert tree["verdict"]["sentence"] in printed
    assert "k1 = mean -log rho" in printed
    lines = told.splitlines()
    assert lines[0] == "onepolicy: reading the settings"
    sampled = [line for line in lines if line.startswith("onepolicy: measure: sampled ")]
    done, total = sampled[-1].split()[3], sampled[-1].split()[5]
    assert done == total
    assert any(line.startswith("onepolicy: measure: k3 so far ") for line in lines)
    html = (tmp_path / "m" / "report.html").read_text()
    assert tree["verdict"]["sentence"] in html
    figures = "waterfall distribution f_tau scatter-with_replay layers gate-mass"
    assert [name for name in figures.split() if f'id="fig-{name}"' not in html] == []
    assert main(command) == 2
    check_distribution(tree["distribution"], printed, html)
    check_records(tmp_path / "m", tree)


def test_without_a_folder_the_last_line_says_what_a_page_would_have(clean, monkeypatch, capsys):
    monkeypatch.setattr("onepolicy.measure.measure.measure_model", lambda *_, **__: clean)
    assert measure_and_show({}, [], loaded="m", out=None, png=False, short=False) == 0
    assert "--out FOLDER writes a page with " in capsys.readouterr().out


def test_a_first_look_shows_a_gap_that_replay_removes_in_eight_lines(tmp_path, monkeypatch, capsys):
    """Of real rounding to bfloat16, in a random policy of wide weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no tiny policy was made
    monkeypatch.setenv("COLUMNS", "80")
    told = {"loaded": "tiny", "out": None, "png": False, "short": True}
    assert measure_and_show({}, ["train.threads=1"], **told, tiny=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 8
    assert lines[0] == "REPLAY THE ROUTES"
    without, replayed, last = lines[-3:]
    assert without.startswith("  without replay: k3 ")
    assert without.endswith(" of the routes differ")
    assert float(without.split()[3]) > QUIET_KL > 4 * float(replayed.split()[3])
    assert last.startswith("Of a random tiny policy. Yours: `onepolicy measure MODEL`")


def test_what_asks_for_more_is_told_all(subtests):
    for typed, first in {
        "--tiny": True,
        "--tiny --out m": True,
        "--tiny --top 4": False,
        "--tiny --quant int8": False,
        "--tiny seed=1": False,
        "some/model": False,
    }.items():
        with subtests.test(typed):
            assert is_first_look(parse_arguments(["measure", *typed.split()])) == first


def check_records(out, tree):
    """Check that the record of each scoring has the statistics that measure.json says, to the
    bit."""
    tensors = load_file(out / "tensors.safetensors")
    for scoring in ("without_replay", "with_replay"):
        trainer, rollout = (
            tensors[f"{scoring}.{name}"].astype(np.float64)
            for name in ("logp_trainer", "logp_rollout")
        )
        numbers = Statistics.of(trainer, rollout, tensors[f"{scoring}.segment"]).statistics()
        told = tree["metrics"][scoring]
        assert {name: told[f"mismatch/{name}"] for name in ("k3", "ess", "f2", "pearson")} == {
            name: numbers[name] for name in ("k3", "ess", "f2", "pearson")
        }


def check_distribution(found, printed, html):
    """Check the 4 likeliest tokens: bounds are in order, replay is no farther away, and the text
    has the worst position's tokens."""
    plain, replayed = found["metrics"]["without_replay"], found["metrics"]["with_replay"]
    assert found["top"] == 4
    for each in (plain, replayed):
        assert 0 < each["tv_low"] < each["tv_high"] < 1
        mass = 1 - (each["tv_high"] - each["tv_low"])
        assert each["mass_rollout"] == pytest.approx(mass, abs=0.01)
    assert replayed["tv_low"] < plain["tv_low"] < 0.1
    lows = [w["tv_low"] for w in found["worst"]]
    assert lows == sorted(lows, reverse=True)
    assert all(len(w["candidates"]) >= 4 for w in found["worst"])
    assert "from the rollout's 4 likeliest tokens" in printed
    assert "Worst positions" in html


@pytest.fixture(scope="module")
def dense(policy, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("dense")
    make("qwen3_dense").save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return str(folder)


@pytest.mark.full
def test_a_dense_model_has_no_routing_rows(dense, tmp_path):
    out = tmp_path / "out"
    assert main(["measure", dense, *SETTINGS, *FEW, "--out", str(out)]) == 0
    tree = json.loads((out / "measure.json").read_text())
    names = [*SETTINGS_OF_BOTH_SIDES, "precision", "batch shape"]
    fall = tree["waterfall"]
    assert [bar["name"] for bar in fall["bars"]] == names
    assert fall["total"]["value"] < HARMLESS_KL
    assert "not tried: what is left is not above 1e-4" in fall["bars"][2]["how"]
    assert "with_replay" not in tree["metrics"]
    assert not any(name.startswith("routing") for name in tree["metrics"]["without_replay"])
    assert 'id="fig-routers"' not in (out / "report.html").read_text()


@pytest.mark.full
def test_beside_a_dense_model(policy, dense, tmp_path):
    out = tmp_path / "out"
    command = ["measure", "--dense", dense, "--out", str(out), str(policy)]
    assert main([*command, *SETTINGS, *FEW]) == 0
    tree = json.loads((out / "measure.json").read_text())
    assert tree["dense"] == dense
    assert set(tree["metrics"]) == {"without_replay", "with_replay", "dense", "repeated_forward"}
    assert 'id="fig-scatter-dense"' in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_trainer_in_bfloat16(policy):
    """A bfloat16 trainer's own precision is measured against a float32 forward of its weights."""
    found = measured(policy, "model.dtype=bfloat16", "rollout.engine.dtype=bfloat16")
    assert found.verdict.action != "bug", found.verdict.text()
    assert "precision" not in bars_of(found)  # both sides have it
    (trainer,) = (each for each in found.ablations if each.name == "trainer in bfloat16")
    assert "bfloat16 weights" in trainer.how


def test_weights_of_a_bfloat16_trainer_are_rounded_wherever_they_are_scored(policy, monkeypatch):
    """The trainer's own folder as the engine's changes no bit: dtype and head are the trainer's.
    The float32 forward that bfloat16 is measured against is one of bfloat16 weights."""
    overrides = ["model.dtype=bfloat16", "model.lm_head=float32", "rollout.engine.dtype=bfloat16"]
    config = measure_config({}, [f"model.path={policy}", *SETTINGS, *FEW, *overrides], None)
    parts, _ = build_measure_components(config)
    first, model = asyncio.run(score_rollouts(parts)), resolve_model(config.model)
    again = _score_with(first, parts.scorer, model)
    assert torch.equal(again.explained.native.logp_old, first.native.logp_old)
    prepared, prepare = [], attribution.prepare_for_training

    def remember(exact, device):
        prepared.append(exact)
        prepare(exact, device)

    monkeypatch.setattr(attribution, "prepare_for_training", remember)
    trainer_precision(again.explained.rescorer, model, first.native, replay=False)
    for weight in prepared[0].parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weight.bfloat16().float())


@pytest.mark.full
def test_float32_combine_weights_beside_a_bfloat16_ablation(policy):
    """A router in bfloat16 cannot hold the engine's float32 combine weights; its experts it can."""
    found = measured(policy, "rollout.engine.dtype=float32", "replay.mode=weights")
    (trainer,) = (each for each in found.ablations if each.name == "trainer in bfloat16")
    assert trainer.nats.value > 0


def test_a_random_dense_model_has_as_many_parameters():
    config = PolicyConfig()
    dense, moe = make_dense(config, 20), make_model(config, 20)
    # but for the routers
    assert dense.num_parameters() == pytest.approx(moe.num_parameters(), rel=0.02)
    for model, make_again in ((dense, make_dense), (moe, make_model)):
        assert torch.equal(model.lm_head.weight, make_again(config, 20).lm_head.weight)


REFUSED = [
    ("", "give a model"),
    ("somewhere --tiny", "leave out somewhere"),
    ("--top 0 --tiny train.threads=1", "--top: log-probabilities of the 0 likeliest tokens"),
    ("--tiny replay.mode=off train.threads=1", "with the rollout's routes and without"),
    ("--tiny --out TMP/file/m", "m cannot be made: "),
    ("recipes/quickstart.toml steps=1", "give --recipe recipes/quickstart.toml"),
    ("--engine-model TMP/nowhere POLICY", "--engine-model: no folder"),
    ("--dense POLICY POLICY", "give a dense model"),
    ("--dense TMP/nowhere POLICY", "--dense: no folder"),
]


def test_usage(policy, tmp_path, capsys, subtests):
    (tmp_path / "file").write_text("")
    for words, message in REFUSED:
        arguments = words.replace("POLICY", str(policy)).replace("TMP", str(tmp_path)).split()
        settings = [each for each in (*SETTINGS, *FEW) if "POLICY" in words]
        with subtests.test(words):
            assert main(["measure", *arguments, *settings]) == 2
            assert message in capsys.readouterr().err


def test_top_p_has_a_bar_of_what_its_support_is_worth(policy) -> None:
    """The gap that a trainer over the whole vocabulary has, and that a run has not."""
    found = measured(policy, "rollout.sampling.top_p=0.8")
    bar = found.waterfall.bars[0]
    batch = found.scored.native
    mask = batch.trainable
    log_rho = (batch.logp_vocabulary - batch.logp_rollout)[mask].double()
    assert (bar.name, "sampling support" in bars_of(found)) == ("support", False)
    assert found.waterfall.total.value == pytest.approx(float((log_rho.expm1() - log_rho).mean()))
    assert bar.left.value == pytest.approx(found.scored.found.k3, rel=1e-6)
    assert bar.removed.value > 0.9 * found.waterfall.total.value > 1e-3
    assert found.verdict.action in ("nothing", "replay"), found.verdict.text()
    assert "support" in waterfall_rows(to_tree(found))[1]
