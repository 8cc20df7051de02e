"""A whole GRPO step beside TRL's, in one process: same policy, same prompts, same threads, one step
of each in turn.

    pip install trl==1.16.0
    python benchmarks/step.py --threads 1

64 sequences of about 75 new tokens (8 problems, 8 completions each), fp32 on both sides. Ours
records and replays routes (R3) and measures the mismatch; TRL does neither, and its load-balancing
loss is off. Prints medians, their ratio pair by pair, the same of CPU seconds (which other work on
the machine moves less), and where our time goes.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time


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
from onepolicy.config.model_path import resolve_model  # noqa: E402
from onepolicy.run.step import rl_step  # noqa: E402
from onepolicy.sync.push import push_weights  # noqa: E402

PROBLEMS, GROUP, NEW_TOKENS = 8, 8, 75
PARTS = ("rollout", "score", "update", "sync")


def now() -> tuple[float, float]:
    """Return the seconds of the clock, and of this process on all its cores."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = now()
    return wall - begun[0], cpu - begun[1]


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
    torch.set_num_threads(args.threads)
    config = resolve(
        {
            "out": "unused",
            "steps": args.steps + 1,
            "model": {"path": args.model},
            "task": {"kind": "chain", "ops": 12},
            "rollout": {
                "prompts_per_step": PROBLEMS,
                "group_size": GROUP,
                "sampling": {"max_tokens": NEW_TOKENS},
                "engine": {"dtype": args.dtype, "max_num_seqs": PROBLEMS * GROUP, "max_len": 128},
            },
            "optim": {"lr": 1e-5},
            "train": {"reuse_scoring_forward": True, "threads": args.threads},
            "log": {"counterfactual_every": 0},
        }
    )
    parts, tokenizer = build_components(config)
    asyncio.run(push_weights(parts.learner, parts.engine))
    problems = [parts.environment.train_problem(i) for i in range(PROBLEMS * (args.steps + 1))]
    answers = {problem.prompt: problem.answer for problem in problems}

    def reward(prompts, completions, **_):
        return [
            float(c.rsplit("#", 1)[-1] == answers[p])
            for p, c in zip(prompts, completions, strict=True)
        ]

    side = SideBySide(parts)
    with tempfile.TemporaryDirectory() as folder:
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
                max_steps=args.steps + 1,
                learning_rate=1e-5,
                beta=0.0,
                # here: the trainer reads it once, when it is made; ours has no such loss
                router_aux_loss_coef=0.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
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
    print(f"threads {args.threads}, our rollouts {args.dtype}, median of {args.steps} steps")
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
