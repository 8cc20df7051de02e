"""Settings under their old names: recipes, overrides, run folders, and the line about them."""

import json
import shutil
from pathlib import Path

import pytest

from onepolicy.config import RunConfig, UsageError, load, resolve
from onepolicy.config import renamed as module
from onepolicy.config.load import resolve_as
from onepolicy.config.renamed import RUN_KEYS, SERVE_KEYS
from onepolicy.config.serve import ServeConfig
from onepolicy.config.spelling import paths_of
from onepolicy.config.stored_config import read_stored_config
from support.paths import ROOT

OLD_SETTINGS = Path(__file__).parent / "old_settings"
"""config.json of run folders from before the renames, one for each kind of engine and cluster."""
MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
VALUES = {
    "rollout.engine.slots": 3,
    "rollout.engine.prefix_reuse": False,
    "rollout.engine.cache_gib": 0.5,
    "rollout.engine.patience_s": 7.0,
    "rollout.quant.also": ("lm_head",),
    "rollout.min_survivors": 2,
    "replay.rows": "newest",
    "objective.mini_steps": 2,
    "optim.decay": "linear",
    "train.compute": "bfloat16",
    "cluster.weights": "disk",
    "cluster.shared_dir": "/tmp/x",
}
BESIDE = {
    "rollout.engine.cache_gib": ("rollout.engine.kind", "vllm"),
    "rollout.engine.patience_s": ("rollout.engine.kind", "vllm-server"),
    "rollout.quant.also": ("rollout.quant.format", "int8"),
    "replay.rows": ("rollout.engine.kind", "vllm-server"),
    "train.compute": ("train.ranks", 2),
    "cluster.weights": ("cluster.kind", "ray"),
    "cluster.shared_dir": ("cluster.kind", "ray"),
}
"""The setting that an old name needs beside it, to be one of a valid recipe."""


@pytest.fixture(autouse=True)
def _no_line_was_written_before():
    module._warn.cache_clear()


def value_at(config: RunConfig, path: str) -> object:
    node: object = config
    for name in path.split("."):
        node = getattr(node, name)
    return node


def merged(tree: dict, path: str, value: object) -> dict:
    first, _, rest = path.partition(".")
    return tree | {first: merged(tree.get(first, {}), rest, value) if rest else value}


def overrides(old: str, *names: str) -> list[str]:
    """Return overrides that set `names` to the value of this old name, after what it needs."""
    beside = ["=".join(map(str, BESIDE[old]))] if old in BESIDE else []
    return beside + [f"{name}={json.dumps(VALUES[old])}" for name in names]


def recipe(old: str, *names: str) -> dict:
    """Return a recipe that does."""
    tree = MINIMAL
    if old in BESIDE:
        tree = merged(tree, *BESIDE[old])
    for name in names:
        tree = merged(tree, name, VALUES[old])
    return tree


def test_every_old_name_is_tested_and_every_new_one_is_a_setting():
    assert VALUES.keys() == RUN_KEYS.keys()
    assert set(RUN_KEYS.values()) <= set(paths_of(RunConfig))
    assert not set(RUN_KEYS) & set(paths_of(RunConfig))
    assert set(SERVE_KEYS.values()) <= set(paths_of(ServeConfig))


def test_an_old_name_is_the_new_setting(caplog, subtests):
    for old, new in RUN_KEYS.items():
        for tree, typed in ((MINIMAL, overrides(old, old)), (recipe(old, old), [])):
            module._warn.cache_clear()
            caplog.clear()
            with subtests.test(old, typed=typed):
                config = resolve(tree, typed)
                assert config == resolve(MINIMAL, overrides(old, new))
                assert value_at(config, new) == VALUES[old]
                assert caplog.messages == [f"{old} is now {new}; the old name still works"]


def test_a_new_name_in_an_override_wins_over_the_recipes_old_one():
    tree = MINIMAL | {"rollout": {"engine": {"slots": 8}}}
    assert resolve(tree, ["rollout.engine.max_num_seqs=4"]).rollout.engine.max_num_seqs == 4
    assert tree["rollout"] == {"engine": {"slots": 8}}  # the recipe itself is not touched
    assert resolve(tree, ["rollout.engine.slots=5"]).rollout.engine.max_num_seqs == 5


def test_an_old_name_inside_a_section_that_is_overridden_whole(caplog):
    config = resolve(MINIMAL, ['rollout.engine={kind="hf", slots=5}'])
    assert config.rollout.engine.max_num_seqs == 5
    assert len(caplog.messages) == 1


def test_both_names_at_once_are_an_error(subtests):
    for old, new in RUN_KEYS.items():
        for tree, typed in ((MINIMAL, overrides(old, old, new)), (recipe(old, old, new), [])):
            with subtests.test(old, typed=typed):
                with pytest.raises(UsageError) as error:
                    resolve(tree, typed)
                words = f"{old}: is the old name of {new}, and both are set; leave {old} out"
                assert str(error.value) == words


def test_the_line_is_written_once(caplog):
    for _ in range(3):
        resolve(MINIMAL, ["rollout.engine.slots=5"])
    assert len(caplog.messages) == 1


def test_settings_of_a_server_under_their_old_names():
    config = resolve_as(ServeConfig, {}, ["slots=7", "cache_gib=0.5", "prefix_reuse=false"])
    assert (config.max_num_seqs, config.kv_cache_gib) == (7, 0.5)
    assert not config.enable_prefix_caching


SAME_NOW = {
    "embedded": """rollout.quant={format="int8",extra_modules=["lm_head"]}
        rollout.engine.enable_prefix_caching=false rollout.min_group_size=3
        objective.num_minibatches=2 train.ranks=2 train.fsdp_param_dtype=bfloat16
        train.reuse_scoring_forward=false""",
    "server": """rollout.engine.kind=vllm-server rollout.engine.max_num_seqs=12
        rollout.engine.recovery_timeout_s=7 replay.duplicate_routes=newest""",
    "ray": """cluster.kind=ray cluster.sync=disk cluster.sync_dir=/tmp/weights
        rollout.engine.kind=vllm rollout.engine.max_num_seqs=24 rollout.engine.kv_cache_gib=0.5
        rollout.engine.enable_prefix_caching=false""",
}
"""Overrides of the quickstart that the old run folders were begun with, under their new names."""


@pytest.mark.parametrize("name", SAME_NOW)
def test_a_run_folder_from_before_has_the_settings_it_had(name, tmp_path, caplog):
    shutil.copy(OLD_SETTINGS / f"{name}.json", tmp_path / "config.json")
    now = load(ROOT / "recipes" / "quickstart.toml", [*SAME_NOW[name].split(), "eval.every=0"])
    assert read_stored_config(tmp_path) == now
    assert caplog.messages == []


def test_a_stored_setting_under_both_names_is_damage(tmp_path):
    tree = json.loads((OLD_SETTINGS / "embedded.json").read_text())
    tree["objective"]["num_minibatches"] = 4
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=r"config\.json: .*objective\.mini_steps: is the old name"):
        read_stored_config(tmp_path)
