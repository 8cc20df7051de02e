"""What a run folder from elsewhere cannot make a command read, publish, or fill the memory with."""

import io
import json
import os
import shutil

import numpy as np
import pytest
import safetensors.numpy

from onepolicy.audit.run import run_audit
from onepolicy.build.gpu_defaults import with_gpu_precision
from onepolicy.cli import main
from onepolicy.config import UsageError, resolve
from onepolicy.config.stored_config import read_stored_config
from onepolicy.console import Console
from onepolicy.launch.arms import Arm, play_arms
from onepolicy.launch.plan_arms import PlannedArm, runs_in
from onepolicy.record.read import read_dump
from onepolicy.report.run_page import write_report
from onepolicy.run.log import read_metrics
from onepolicy.train import checkpoint
from support.report_run import make_fixture_run, own_probe

STATE = {"step": 1, "updates": 1, "files": {}}
SAVED = "checkpoints/step_00001"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = make_fixture_run(tmp_path_factory.mktemp("stranger") / "run", steps=10, tokens=20)
    own_probe(run / "probes" / "step_00010.safetensors")
    (run / SAVED).mkdir(parents=True)
    (run / SAVED / checkpoint.STATE).write_text(json.dumps(STATE))
    (run / SAVED / "notes.txt").write_text("")
    return run


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


FILES = (
    *("metrics.jsonl", "samples.jsonl", "config.json", "run.json", "summary.json"),
    *("probes/step_00010.safetensors", f"{SAVED}/{checkpoint.STATE}", f"{SAVED}/notes.txt"),
)


def audit(run):
    run_audit([run], {}, None, Console(file=io.StringIO()))


def read(run, name):
    if name.startswith("checkpoints"):
        checkpoint.verify(checkpoint.latest_checkpoint(run))
    else:
        write_report(run)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_holes_is_not_read(run, name):
    """It is a terabyte long and takes no room: read whole, it fills the memory, or a copy the
    disk."""
    read(run, name)
    with (run / name).open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match=rf"{name}: is 1,024 GiB long, nearly all of it holes"):
        read(run, name)
    others = {"probes/step_00010.safetensors": [audit], "config.json": [audit, read_stored_config]}
    for more in others.get(name, []):
        with pytest.raises(UsageError, match="holes"):
            more(run)


@pytest.mark.parametrize("name", ["probes/step_00010.safetensors", "run.json", "probes"])
def test_an_audit_follows_no_link_out_of_a_run(run, tmp_path, name):
    assert len(list(read_dump(run, {}))) == 1
    (run / name).rename(tmp_path / "private")
    (run / name).symlink_to(tmp_path / "private")
    with pytest.raises(UsageError, match=rf"{name}: a link out of the run's folder"):
        list(read_dump(run, {}))


@pytest.mark.parametrize("linked", ["checkpoints", SAVED])
def test_another_runs_checkpoint_is_not_taken_for_a_strangers(run, tmp_path, capsys, linked):
    """`onepolicy export` would publish it."""
    (run / linked).rename(tmp_path / "private")
    (run / linked).symlink_to(tmp_path / "private")
    out = str(tmp_path / "out")
    for words in (
        ["export", str(run), "--out", out],
        ["eval", str(run)],
        ["eval", str(run), "--step", "1"],
        ["train", "--from", str(run), f"out={out}"],
        ["train", "--from", str(run / "1"), f"out={out}"],
    ):
        assert main(words) == 2
        assert f"{run / SAVED}: a link out of the run's folder" in capsys.readouterr().err
    assert not os.path.lexists(out)


def test_the_output_of_an_arm_follows_no_link(tmp_path):
    (tmp_path / "precious").write_text("mine\n")
    arm = Arm("off", 0, (), 1, tmp_path / "off-seed0")
    arm.console.symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"):
        play_arms(tmp_path / "recipe.toml", [arm], 1)
    assert (tmp_path / "precious").read_text() == "mine\n"


def test_the_runs_of_a_comparison_lead_nowhere_else(run, tmp_path):
    config = resolve({"out": "run", "steps": 1, "task": {"kind": "chain"}, "model": {"path": "m"}})
    folder = tmp_path / "arms" / "off-seed0"
    shutil.copytree(run, folder)
    (folder / "config.json").write_text(config.model_dump_json())
    arms = [PlannedArm("off", (), config)]
    assert runs_in(tmp_path / "arms", arms)[0].finished
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(run / "metrics.jsonl")
    with pytest.raises(UsageError, match=r"metrics\.jsonl: a link out of the run's folder"):
        runs_in(tmp_path / "arms", arms)


def test_a_comparison_goes_on_with_what_a_gpu_settled(run, tmp_path):
    """A run on a GPU stores a precision and a max_len that the recipe does not name."""
    tree = {"out": "run", "steps": 1, "task": {"kind": "chain"}, "model": {"path": "m"}}
    folder = tmp_path / "arms" / "off-seed0"
    shutil.copytree(run, folder)
    for typed in ([], ["train.ranks=2"]):
        arm = resolve(tree, typed)
        stored = with_gpu_precision(arm, lambda line: None, ranks=bool(typed))
        engine = stored.rollout.engine.model_copy(update={"max_len": 512})
        rollout = stored.rollout.model_copy(update={"engine": engine})
        stored = stored.model_copy(update={"rollout": rollout})
        (folder / "config.json").write_text(stored.model_dump_json())
        assert runs_in(tmp_path / "arms", [PlannedArm("off", (), arm)])
        for other in ("model.dtype=float32", "rollout.engine.max_len=256", "optim.lr=1e-5"):
            changed = PlannedArm("off", (), resolve(tree, [*typed, other]))
            with pytest.raises(UsageError, match="holds a run with other settings"):
                runs_in(tmp_path / "arms", [changed])


def test_a_metrics_name_makes_no_link_in_a_page(run):
    row = {"step": 11, 'eval/<a href="https://evil.example">see</a>': 0.5}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl:\d+: .* is no name of a metric"):
        read_metrics(run)


@pytest.mark.parametrize("kind", ["F8_E4M3", "BF16", "F4"])
def test_a_probe_of_numbers_that_numpy_lacks_is_refused(run, kind):
    size = {"F8_E4M3": 1, "BF16": 2, "F4": 0.5}[kind]
    about = {"dtype": kind, "shape": [4], "data_offsets": [0, int(4 * size)]}
    header = json.dumps({"logp_rollout": about}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(int(4 * size))
    (run / "probes" / "step_00010.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match=r"step_00010\.safetensors: "):
        write_report(run)


def checkpoint_of(folder, files):
    """Write a checkpoint with these files, whose sizes fit."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    sizes = {name: len(data) for name, data in files.items()}
    (folder / checkpoint.STATE).write_text(json.dumps(STATE | {"files": sizes}))
    return folder


ADAPTERS = [
    ({"r": 10**9}, "its rank is 1000000000, but no side of a stored matrix is above 1"),
    ({"r": "x"}, "cannot read the adapter"),
    ({"target_modules": ["none"]}, "cannot read the adapter"),
]


@pytest.mark.parametrize(("values", "said"), ADAPTERS)
def test_an_adapter_that_cannot_be_merged_is_named(policy, tmp_path, capsys, values, said):
    tree = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    tree |= {"base_model_name_or_path": str(policy)} | values
    weights = safetensors.numpy.save({"a": np.ones((1, 1), np.float32)})
    files = {"adapter_config.json": json.dumps(tree).encode(), "adapter_model.safetensors": weights}
    folder = checkpoint_of(tmp_path / "step_00001", files)
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--adapter"]])
def test_weights_that_cannot_be_exported_are_named(tmp_path, capsys, words):
    """The disk is not what is wrong."""
    index = json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
    files = {"model.safetensors": b"junk", "model.safetensors.index.json": index}
    if words:
        files = {"adapter_model.safetensors": b"junk", "adapter_config.json": b"{}"}
    folder = checkpoint_of(tmp_path / "step_00001", files)
    assert main(["export", str(folder), "--out", str(tmp_path / "out"), *words]) == 2
    told = capsys.readouterr().err
    assert "make room" not in told
    assert f"{folder}" in told.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-3], "is damaged and no JSON; copy the run folder again"),
        (lambda text: text.replace('"steps"', '"task_api_key": "sk-LEAKED", "steps"', 1), "hidden"),
        (lambda text: text.replace('"kind"', '"api_key": "sk-LEAKED", "kind"'), "hidden"),
        (lambda text: text.replace('"kind"', '"env": "api_key: sk-LEAKED", "kind"'), "hidden"),
        (lambda text: text.replace('"steps": ', '"steps": {"password": "sk-LEAKED"}, "x": '), ""),
        (lambda text: text.replace('"steps"', '"x": [["x"]], "steps"', 1), "unknown setting"),
    ],
)
def test_an_error_about_a_stored_config_shows_no_key(run, damage, said):
    """A copy that was cut off is an everyday damage, and its error goes to logs."""
    path = run / "config.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError) as error:
        read_stored_config(run)
    assert said in str(error.value)
    assert "sk-LEAKED" not in str(error.value)


def test_a_hundred_thousand_unknown_settings_are_counted(run):
    path = run / "config.json"
    tree = json.loads(path.read_text()) | {f"setting{i}": i for i in range(20_000)}
    path.write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=r"and 19,980 more problems$") as error:
        read_stored_config(run)
    assert len(str(error.value).splitlines()) == 21
