"""What `onepolicy plan` advises where nothing fits: typing it ends in a plan that fits."""

import json
import shlex

import pytest

from onepolicy.cli import main
from support.models import changed
from support.paths import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.toml"


def to_type(lines):
    """Return the arguments of the line that says what to type."""
    (line,) = (line for line in lines if line.startswith("type: "))
    return shlex.split(line.removeprefix("type: "))


def planned(folder, tmp_path, *settings, cluster="1xRTX4090", recipe=QUICKSTART):
    """Return the plan of the quickstart with a model of this folder on a cluster, as JSON."""
    path = tmp_path / "plan.json"
    command = ["plan", str(recipe), f"model.path={folder}"]
    main([*command, *settings, "--cluster", cluster, "--json", str(path)])
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A dense model of one wide layer, as a config alone."""
    folder = tmp_path_factory.mktemp("larger")
    changed(
        "qwen3_dense",
        hidden_size=4096,
        intermediate_size=24_576,
        num_hidden_layers=1,
        vocab_size=50_000,
        max_position_embeddings=4096,
    ).save_pretrained(folder)
    return folder


@pytest.mark.full
def test_a_gpu_is_planned_with_the_precision_that_a_run_takes(larger, tmp_path, capsys):
    dense = ["replay.mode=off", "train.reuse_scoring_forward=false"]
    bf16 = planned(larger, tmp_path, *dense)["chosen"]["learner_bytes"]
    printed = capsys.readouterr()
    assert "on a GPU: model.dtype = bfloat16" in printed.err
    assert "no experts to replay" not in printed.out
    fp32 = planned(larger, tmp_path, *dense, "model.dtype=float32")["chosen"]["learner_bytes"]
    assert bf16["parameters"] == fp32["parameters"] / 2
    assert bf16["masters"] == fp32["parameters"]
    assert fp32["masters"] == 0
    assert "on a GPU" not in capsys.readouterr().err
    sent = [
        planned(larger, tmp_path, *dense, *typed, cluster="8xH100")["traffic"]
        for typed in ([], ["train.fsdp_param_dtype=bfloat16"], ["train.fsdp_param_dtype=same"])
    ]
    assert sent[0] == sent[1] != sent[2]


def test_a_line_to_copy_is_whole_and_a_dense_model_has_nothing_to_replay(
    larger, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "30")
    found = planned(larger, tmp_path, "rollout.engine.max_len=4096")
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in found["suggestions"] if line.startswith("type: "))
    assert len(line) > 30
    assert f"  {line}" in lines
    assert "replay.mode=off: this model has no experts" in " ".join(lines)


@pytest.mark.full
def test_a_copied_quickstart_is_led_to_what_fits(larger, tmp_path, capsys):
    """It keeps the graphs of a whole step and samples 96 sequences at once. Following the advice
    line by line ends in a plan that fits."""
    asked = ["replay.mode=off", "rollout.engine.max_len=4096", "rollout.sampling.max_tokens=3000"]
    found = planned(larger, tmp_path, *asked)
    assert not found["chosen"]["fits"]
    assert found["suggestions"][0].startswith("train.reuse_scoring_forward=false: ")
    assert all(each >= 0 for each in found["chosen"]["learner_bytes"].values())
    followed = planned(larger, tmp_path, *asked, *to_type(found["suggestions"]))
    assert followed["chosen"]["fits"], found["suggestions"]
    assert "in the total" in capsys.readouterr().out


def test_the_graphs_of_a_step_are_freed_before_what_needs_it(larger, tmp_path):
    """The graphs are freed first, although that saves nothing by itself: checkpoints need it."""
    asked = ["replay.mode=off", "train.reuse_scoring_forward=true", "--constant", "memory=4e9"]
    lines = planned(larger, tmp_path, *asked)["suggestions"]
    assert lines[0].startswith("train.reuse_scoring_forward=false: ")
    adapters = next(line for line in lines if "train.lora.rank=16" in line)
    assert adapters.endswith(", fits"), lines


def test_an_engine_that_sleeps_has_the_room_of_a_micro_batch(larger, tmp_path):
    """vLLM's beside the learner, which works on gradients and activations while it sleeps."""
    found = []
    for sleeps in ("true", "false"):
        settings = ["replay.mode=off", "rollout.engine.kind=vllm", "rollout.engine.max_len=2048"]
        settings.append(f"rollout.engine.enable_sleep_mode={sleeps}")
        plan = planned(larger, tmp_path, *settings, cluster="1xH100")
        found.append((plan["chosen"]["learner_bytes"], plan["chosen"]["engine"]["cache"]))
        share = plan["constants"]["engine_share"]["value"]
    (asleep, cache), (awake, less) = found
    working = ("gradients", "gathered", "activations", "logits", "routes")
    freed = sum(awake[name] for name in working)
    assert cache - less == pytest.approx(share * freed)
    assert asleep["total"] <= asleep["room"]


def test_a_length_that_nobody_set_is_the_longest_that_fits(larger, tmp_path, capsys):
    """A run chooses it. One that cuts off the planned sequences of 592 tokens is not chosen."""
    recipe = tmp_path / "unset.toml"
    recipe.write_text(QUICKSTART.read_text().replace(", max_len = 128", ""))
    asked = ["replay.mode=off", "train.reuse_scoring_forward=false"]
    asked.append("rollout.engine.max_num_seqs=4")

    def at(*words):
        return planned(larger, tmp_path, *asked, *words, cluster="1xH200", recipe=recipe)

    whole = at()
    chosen, reserve = whole["chosen"], whole["constants"]["learner_reserve"]["value"]
    assert chosen["fits"]
    assert "rollout.engine.max_len: " not in capsys.readouterr().err
    for rows, fitting in ((1024 + 32, 1024), (576, None)):
        used = chosen["learner_bytes"]["total"] - chosen["engine"]["cache"] * (1 - rows / 4096)
        found = at("--constant", f"memory={used / (1 - reserve)}")
        said = capsys.readouterr().err
        assert found["chosen"]["fits"] is (fitting is not None)
        assert (f"rollout.engine.max_len: {fitting}, about the longest" in said) is bool(fitting)
        assert found["chosen"]["engine"]["tokens"] == 4 * (fitting or 4096)


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory):
    """A MoE model of 100M parameters, most of them in experts, as a config alone."""
    folder = tmp_path_factory.mktemp("experts")
    changed(
        "qwen3_moe",
        hidden_size=1024,
        moe_intermediate_size=2048,
        num_hidden_layers=1,
        max_position_embeddings=4096,
    ).save_pretrained(folder)
    return folder


SMALL_BATCH = [
    "rollout.prompts_per_step=4",
    "rollout.group_size=2",
    "train.reuse_scoring_forward=false",
    "train.tokens_per_micro_batch=128",  # of a sample
]


@pytest.mark.full
def test_shards_of_frozen_weights_are_bfloat16(many_experts, tmp_path):
    """Two ranks: adapters beside float32 shards would take the memory that is not there."""
    asked = [*SMALL_BATCH, "--learners", "2", "--constant", "memory=0.6e9"]
    found = planned(many_experts, tmp_path, *asked, cluster="2xH100")
    assert not found["chosen"]["fits"]
    typed = to_type(found["suggestions"])
    assert {"train.ranks=2", "model.dtype=bfloat16", "train.lora.rank=16"} <= set(typed)
    assert planned(many_experts, tmp_path, *asked, *typed, cluster="2xH100")["chosen"]["fits"]


def test_an_engine_that_no_device_holds_becomes_a_server(many_experts, tmp_path):
    """The first plan goes on with what makes the recipe fit beside the server."""
    asked = [*SMALL_BATCH, "rollout.engine.max_len=256", "--constant", "memory=0.04e9"]
    first, *rest = planned(many_experts, tmp_path, *asked, cluster="4xH100")["suggestions"]
    assert first.startswith("rollout.engine.kind=vllm-server rollout.engine.url=")
    assert "rollout.engine.max_len=256 " in first  # another kind drops what the recipe sets
    assert rest
    assert not any("vllm-server" in line for line in rest)


QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
DENSE = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
DENSE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
COPIED = ["train.reuse_scoring_forward=false", "rollout.sampling.max_tokens=1024"]
COPIED += ["rollout.engine.max_len=2048", "rollout.engine.max_num_seqs=16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "more"),
    [
        ("Qwen3-4B", "1xRTX4090", ["replay.mode=off"]),
        ("Qwen3-30B-A3B", "1xH100", []),
        ("Qwen3-30B-A3B", "8xH200", []),
        ("Qwen3-235B-A22B", "16xH100", []),
    ],
)
def test_advice_of_the_page_ends_in_what_fits(tmp_path, model, cluster, more):
    """The line of the page's table is that of the command, and it fits."""
    if model == "Qwen3-4B":
        changed("qwen3_dense", **QWEN3, **DENSE).save_pretrained(tmp_path / model)
        model = tmp_path / model
    asked = [*COPIED, *more]
    found = planned(model, tmp_path, *asked, cluster=cluster)
    assert not found["chosen"]["fits"]
    (line,) = (line for line in found["suggestions"] if line.startswith("type: "))
    assert f"`{line.removeprefix('type: ')}`" in (ROOT / "docs" / "gpus.md").read_text()
    typed = to_type(found["suggestions"])
    assert planned(model, tmp_path, *asked, *typed, cluster=cluster)["chosen"]["fits"]
