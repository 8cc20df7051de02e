"""`--engine` and `--prompts` of `onepolicy measure`, and prompts without answers."""

import pytest

from onepolicy.config import PromptsTask, UsageError, resolve
from onepolicy.config.engine import EngineConfig
from onepolicy.config.measure import (
    classes_by_kind,
    engine_overrides,
    measure_settings,
    task_settings,
)
from onepolicy.config.presets import correction_presets, objective_presets
from onepolicy.envs import make_environment
from onepolicy.envs.tasks.jsonl import read_prompts
from onepolicy.envs.warmup.examples import warmup_examples
from support.scripted_engine import make_tokenizer


def test_an_engine_of_this_process():
    assert engine_overrides("hf") == ["rollout.engine.kind=hf"]
    with pytest.raises(UsageError, match="hf runs in this process and takes no address"):
        engine_overrides("hf:http://x")
    with pytest.raises(UsageError, match=r"'trt' is none of hf, vllm"):
        engine_overrides("trt:8000")


def test_a_server_and_its_address():
    """Every kind of server with an address accepts one."""
    for kind, config in classes_by_kind(EngineConfig).items():
        if "url" in config.model_fields:
            wanted = [f"rollout.engine.kind={kind}", "rollout.engine.url=http://h:1/v1"]
            assert engine_overrides(f"{kind}:http://h:1/v1") == wanted


def test_prompts_of_a_file_a_recipe_and_a_task(tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n")
    assert task_settings(str(lines)) == {"kind": "prompts", "path": str(lines)}
    recipe = tmp_path / "r.toml"
    recipe.write_text('[task]\nkind = "gym"\nname = "chain_sum"\n')
    assert task_settings(str(recipe)) == {"kind": "gym", "name": "chain_sum"}
    assert task_settings("chain") == {"kind": "chain"}
    assert task_settings("spell_backward") == {"kind": "gym", "name": "spell_backward"}
    for text in (str(tmp_path / "none.jsonl"), "a/b"):
        with pytest.raises(UsageError, match="is not a file"):
            task_settings(text)
    recipe.write_text("steps = 1\n")
    with pytest.raises(UsageError, match="no section task"):
        task_settings(str(recipe))


def test_lines_of_text_or_json(tmp_path):
    for text, wanted in (
        (b"1+1=\r\n\n2 {x}\n\n", ["1+1=", "2 {x}"]),
        (b'{"prompt": [{"role": "user", "content": "1+1="}], "data_source": "x"}', ["1+1="]),
        (b'\xef\xbb\xbf{"prompt": "1+1="}\n\n{"prompt": "2", "answer": 3}\n', ["1+1=", "2"]),
    ):
        (tmp_path / "p").write_bytes(text)
        assert read_prompts(str(tmp_path / "p")) == wanted


def test_bad_prompts(tmp_path):
    for text, message in (
        (b"", "is empty"),
        (b"PAR1\x15", r"is Parquet; .*to_json"),
        (b'{"prompt": [{"role": "system"}, {"role": "user"}]}', "chat of the roles system, user"),
        (b'{"prompt": [1]}', "is list"),
        (b'{"prompt": []}', "is list"),
        (b"ok\n\xff\n", "p:2: not UTF-8"),
        (b'{"prompt": "a"}\n{"question": "b"}\n', "p:2: field 'prompt' is missing"),
        (b'{"prompt": ["a"]}\n', "p:1: field 'prompt' is list"),
        (b'{"prompt": "a"}\nplain\n', "p:2: not JSON"),
    ):
        (tmp_path / "p").write_bytes(text)
        with pytest.raises(UsageError, match=message):
            read_prompts(str(tmp_path / "p"))


def test_prompts_have_no_answers(tmp_path):
    (tmp_path / "p").write_text("12\n34\n")
    config = PromptsTask(path=str(tmp_path / "p"))
    task = make_environment(config, make_tokenizer("1234"), max_len=64)
    assert [task.train_problem(i).prompt for i in range(3)] == ["12", "34", "12"]
    assert len({task.train_problem(i).id for i in range(3)}) == 3
    with pytest.raises(UsageError, match="no answers to evaluate"):
        task.held_out(1)
    with pytest.raises(UsageError, match="no answers to learn"):
        warmup_examples(config, mistakes=0.0, seed=0)


def test_a_recipe_that_trains_can_be_measured(subtests):
    """Every pair of an objective and a correction that a run takes."""
    base = {"out": "o", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
    taken = 0
    for objective in objective_presets():
        for correction in correction_presets():
            tree = base | {
                "objective": {"preset": objective},
                "correction": {"preset": correction},
                "replay": {"mode": "off"},
                "rollout": {"min_group_size": 4},
            }
            try:
                resolve(tree)
            except UsageError:
                continue
            taken += 1
            with subtests.test(objective=objective, correction=correction):
                assert measure_settings(tree, [], None)[1].correction.preset == correction
    assert taken > 100
    typed = ["objective.preset=rloo", "correction.preset=pg-tis"]
    tree = base | {"objective": {"preset": "cispo"}, "replay": {"mode": "off"}}
    assert measure_settings(tree, typed, None)[1].objective.surrogate == "pg"
    for name in ("model", "rollout"):
        with pytest.raises(UsageError, match=rf"{name}: 5 is a value, but this is a section"):
            measure_settings(base | {name: 5}, [], "m")
    for unused in (5, "gspo", {"preset": ["gspo"]}):
        assert measure_settings(base | {"objective": unused}, [], None)


def test_each_prompt_of_a_file_is_sampled_once_whatever_a_recipe_says(tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    tree = {"rollout": {"prompts_per_step": 12, "group_size": 8}, "model": {"path": "m"}}
    tree["task"] = task_settings(str(tmp_path / "p.txt"))
    rollout = measure_settings(tree, [], None)[1].rollout
    assert (rollout.prompts_per_step, rollout.group_size) == (3, 1)
    typed = measure_settings(tree, ["rollout.group_size=2"], None)[1].rollout
    assert (typed.prompts_per_step, typed.group_size) == (3, 2)
