"""A whole GRPO step beside TRL's, in one process: same policy, same prompts, same threads, one step
of each in turn.

    pip install trl==1.16.0
    python benchmarks/step.py --threads 1

fp32 on both sides. Ours records and replays routes (R3) and measures the mismatch; TRL does
neither, and its load-balancing loss is off. Workloads: 26+75 is 8 problems with 8 completions each
that end by themselves after about 75 tokens. 512+128 and 128+1000 are 4 problems with 8 completions
each; every prompt and every completion has that many tokens, and rewards differ within a group.
Prints medians, their ratio pair by pair, the same of CPU seconds (which other work on the machine
moves less), and where our time goes.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny", help="policy folder (default: the one make-policy made)"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="counted steps of each, after one warm-up"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--trl-continuous-batching",
        action="store_true",
        help="TRL samples by transformers' paged attention with continuous batching",
    )
    parser.add_argument(
        "--workload",
        default="26+75",
        choices=["26+75", "512+128", "128+1000"],
        help="tokens of a prompt and of a completion",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="PATH=VALUE",
        help="settings of ours on top, such as train.reuse_scoring_forward=false",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of our rollout engine"
    )
    return parser.parse_args()


args = arguments()
os.environ.update(
    OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false"
)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from onepolicy.build.components import build_components  # noqa: E402
from onepolicy.config import resolve  # noqa: E402
from onepolicy.config.model import ModelConfig  # noqa: E402
from onepolicy.config.model_path import resolve_model  # noqa: E402
from onepolicy.run.step import rl_step  # noqa: E402
from onepolicy.sync.push import push_weights  # noqa: E402

GROUP = 8
PROMPT, NEW_TOKENS = map(int, args.workload.split("+"))
FORCED = args.workload != "26+75"  # prompts and completions have exactly these lengths
PROBLEMS = 8
if FORCED:
    PROBLEMS = 4
MAX_LEN = max(128, PROMPT + NEW_TOKENS)
PARTS = ("rollout", "score", "update", "sync")


def now() -> tuple[float, float]:
    """Return the seconds of the clock, and of this process on all its cores."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = now()
    return wall - begun[0], cpu - begun[1]


class FixedLengths:
    """The run's environment with prompts of PROMPT tokens and a reward that differs in a group."""

    def __init__(self, environment) -> None:
        self.environment = environment

    def train_problem(self, index: int):
        problem = self.environment.train_problem(index)
        text = problem.prompt * (PROMPT // len(problem.prompt) + 1)  # a character is a token
        return dataclasses.replace(problem, prompt=text[-PROMPT:])

    async def episode(self, problem, sample, temperature):
        (played,) = await self.environment.episode(problem, sample, temperature)
        return (dataclasses.replace(played, reward=parity(played.tokens[PROMPT:].tolist())),)

    def __getattr__(self, name: str):
        return getattr(self.environment, name)


def parity(tokens: list[int]) -> float:
    return float(sum(tokens) % 2)


def longer_policy(source: str, folder: str) -> str:
    """Copy the policy with room for longer contexts. Its rotary positions have no table."""
    target = Path(folder) / "policy"
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["max_position_embeddings"] = PROMPT + NEW_TOKENS
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


class SideBySide(TrainerCallback):
    """A callback that runs one of our steps after every TRL step."""

    def __init__(self, parts) -> None:
        self.parts, self.trl, self.ours, self.split = parts, [], [], []

    def on_step_begin(self, *_, **__) -> None:
        self.begun = now()

    def on_step_end(self, *_, **__) -> None:
        self.trl.append(since(self.begun))
        begun = now()
        result = asyncio.run(rl_step(self.parts, len(self.ours)))
        self.ours.append(since(begun))
        self.split.append({part: result.metrics[f"time/{part}"] for part in PARTS})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare(folder)


def compare(folder: str) -> None:
    torch.set_num_threads(args.threads)
    path = args.model
    if FORCED:
        path = longer_policy(resolve_model(ModelConfig(path=path)).path, folder)
    config = resolve(
        {
            "out": "unused",
            "steps": args.steps + 1,
            "model": {"path": path},
            "task": {"kind": "chain", "ops": 12},
            "rollout": {
                "prompts_per_step": PROBLEMS,
                "group_size": GROUP,
                "sampling": {"max_tokens": NEW_TOKENS},
                "engine": {
                    "dtype": args.dtype,
                    "max_num_seqs": PROBLEMS * GROUP,
                    "max_len": MAX_LEN,
                },
            },
            "optim": {"lr": 1e-5},
            "train": {"reuse_scoring_forward": True, "threads": args.threads},
            "log": {"counterfactual_every": 0},
        },
        args.set,
    )
    parts, tokenizer = build_components(config)
    generation = {}
    if FORCED:
        parts = dataclasses.replace(parts, stop=(), environment=FixedLengths(parts.environment))
        generation = {"min_new_tokens": NEW_TOKENS}
    asyncio.run(push_weights(parts.learner, parts.engine))
    problems = [parts.environment.train_problem(i) for i in range(PROBLEMS * (args.steps + 1))]
    answers = {problem.prompt: problem.answer for problem in problems}

    def reward(prompts, completions, completion_ids, **_):
        if FORCED:
            return [parity(ids) for ids in completion_ids]
        return [
            float(c.rsplit("#", 1)[-1] == answers[p])
            for p, c in zip(prompts, completions, strict=True)
        ]

    side = SideBySide(parts)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            resolve_model(config.model).path, dtype=torch.float32
        ),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROBLEMS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            generation_kwargs=generation,
            max_steps=args.steps + 1,
            learning_rate=1e-5,
            beta=0.0,
            # here: the trainer reads it once, when it is made; ours has no such loss
            router_aux_loss_coef=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            use_transformers_continuous_batching=args.trl_continuous_batching,
            model_init_kwargs=None,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
        processing_class=tokenizer,
        callbacks=[side],
    )
    assert not trainer.aux_loss_enabled, (
        "TRL would also train the router's load balancing, which is more work"
    )
    trainer.train()
    assert not trainer._metrics["train"].get("aux_loss"), "TRL has logged a load-balancing loss"
    trl, ours = (
        statistics.median(wall for wall, _ in times[1:]) for times in (side.trl, side.ours)
    )
    pairs, of_cpu = (
        statistics.median(
            o[which] / t[which] for o, t in zip(side.ours[1:], side.trl[1:], strict=True)
        )
        for which in (0, 1)
    )
    print(
        f"{args.workload} tokens, threads {args.threads}, our rollouts {args.dtype}, "
        f"median of {args.steps} steps"
    )
    print(f"TRL        {trl:.2f} s per step")
    print(
        f"onepolicy  {ours:.2f} s per step, {pairs:.2f} of TRL's (pair by pair; "
        f"CPU seconds: {of_cpu:.2f})"
    )
    print(f"load average {os.getloadavg()[0]:.1f}")
    for part in PARTS:
        seconds = statistics.median(split[part] for split in side.split[1:])
        print(f"  {part:<8} {seconds:.2f} s  {seconds / ours:.0%}")


if __name__ == "__main__":
    main()
