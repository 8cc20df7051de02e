"""Recipes for clusters: each fits on its cluster, and its code runs on a tiny model of the same
family."""

import re

import pytest
from transformers import AutoModelForCausalLM

from onepolicy.cli import main
from onepolicy.config import load
from onepolicy.config.serve import ServeConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.plan.hardware import parse_cluster
from onepolicy.plan.planner import Planner, best_option
from onepolicy.rollout.vllm.memory import GPU_SHARE, RESERVE, cache_bytes
from onepolicy.rollout.vllm.serve import command_line
from onepolicy.rollout.vllm.start import engine_args
from onepolicy.tiny.model import make_tokenizer
from support.metrics import rows
from support.models import CONFIGS
from support.paths import ROOT

FOLDER = ROOT / "recipes" / "cluster"
FAMILIES = {
    "qwen3_30b_a3b_8gpu.toml": "qwen3_moe",
    "qwen3_235b_a22b_64gpu.toml": "qwen3_moe",
    "deepseek_v3_264gpu.toml": "deepseek_v3",
}
SPLITS = {  # learners, engines, devices of each
    "qwen3_30b_a3b_8gpu.toml": (6, 1, 2),
    "qwen3_235b_a22b_64gpu.toml": (56, 1, 8),
    "deepseek_v3_264gpu.toml": (256, 1, 8),
}
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in list(SPLITS)[1:]]
SMALLER = """
    steps=2 train.ranks=2 train.device=cpu train.threads=1 train.tokens_per_micro_batch=512
    rollout.engine={kind="hf",max_num_seqs=4,max_len=250}
    rollout.prompts_per_step=2 rollout.group_size=2
    rollout.sampling.max_tokens=8 objective.entropy_coef=0.01 eval.every=0
    log.report=false log.tensorboard=false
"""


def planned(name):
    """Plan the recipe on the cluster that its first comment names."""
    head = (FOLDER / name).read_text()
    command = r"onepolicy plan \S+ --cluster (\S+)(?: --constant (\S+))?\n"
    cluster, *constants = filter(None, re.search(command, head).groups())
    config = load(FOLDER / name)
    return Planner(config, config.model, parse_cluster(cluster, constants))


def test_every_recipe_is_tested():
    assert set(FAMILIES) == {path.name for path in FOLDER.glob("*.toml")}


@pytest.mark.parametrize("name", ["qwen3_30b_a3b_8gpu.toml", *LARGE])
def test_the_planned_cache_is_that_of_the_server_that_the_recipe_starts(name):
    """The server is started by the command in the recipe's first comment."""
    head = (FOLDER / name).read_text()
    (command,) = re.search(r"engine serve (.*?tensor_parallel_size=\d+)", head, re.DOTALL).groups()
    served = ServeConfig.model_validate(dict(re.findall(r"(\w+)=(\w+)", command)))
    size = served.tensor_parallel_size
    arguments = engine_args(
        served,
        "MODEL",
        max_len=served.max_len,
        top_logprobs=8,
        return_routes=True,
        cpu=False,
        trust_remote_code=False,
    )
    made = planned(name)
    device = made.engine_device_memory(size)
    left = cache_bytes(
        arguments,
        memory=made.cluster["memory"],
        weights=made.weights.total / size,
        reserve=made.cluster["engine_reserve"],
    )
    assert device.cache == left
    assert left > 30e9
    words = command_line(arguments, "127.0.0.1", 8000)
    assert "--kv-cache-memory-bytes" not in words
    assert words[words.index("--tensor-parallel-size") + 1] == str(size)
    h200 = parse_cluster("8xH200")
    assert (h200["engine_share"], h200["engine_reserve"]) == (GPU_SHARE, RESERVE)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_30b_a3b_8gpu.toml", *LARGE])
def test_a_recipe_fits_its_cluster(name):
    made = planned(name)
    options = [made.evaluate_split(split) for split in made.possible_splits()]
    chosen = best_option(options)
    assert chosen.fits
    assert chosen.seconds == min(option.seconds for option in options if option.fits)
    assert chosen.learner_used < 0.92 * chosen.learner_room
    split = chosen.split
    assert (split.learners, split.engines, split.tensor_parallel) == SPLITS[name]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_runs_on_a_tiny_model_of_its_family(name, tmp_path):
    config = load(FOLDER / name)
    folder, out = tmp_path / "model", tmp_path / "run"
    tokenizer = make_tokenizer(task_alphabet(config.task))
    tiny = CONFIGS[FAMILIES[name]]
    changed = type(tiny)(**tiny.to_dict() | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(changed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    command = ["train", str(FOLDER / name), f"out={out}", f"model.path={folder}"]
    assert main([*command, *SMALLER.split()]) == 0
    (first, second) = rows(out)
    assert config.replay.mode == "r3"
    assert first["train/grad_norm"] > 0
    assert second["step"] == 2
