"""Our side of `benchmarks/step.py`: builds the run of a workload, and measures its steps.

As a script it is the child of `OtherTree`: it answers each line of stdin with a step as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUP = 8
PARTS = ("rollout", "score", "update", "sync")


@dataclass(frozen=True)
class Options:
    """What both sides sample, and how ours is set."""

    model: str
    workload: str  # tokens of a prompt + of a completion
    steps: int  # with those of the warm-up
    threads: int
    dtype: str  # of our rollout engine
    settings: list[str] = field(default_factory=list)
    problems: int = 0  # of a step; 0: the workload's own number

    @property
    def lengths(self) -> tuple[int, int]:
        prompt, completion = map(int, self.workload.split("+"))
        return prompt, completion

    @property
    def forced(self) -> bool:
        """True if prompts and completions have exactly these lengths."""
        return self.workload != "26+75"

    @property
    def num_problems(self) -> int:
        return self.problems or (4 if self.forced else 8)

    @property
    def max_len(self) -> int:
        return max(128, sum(self.lengths))


@dataclass(frozen=True)
class Step:
    """A measured step."""

    wall: float  # seconds
    cpu: float  # seconds of this process on all its cores
    prompt: int  # tokens of all samples' prompts
    completion: int  # tokens of all samples' completions
    parts: dict[str, float] = field(default_factory=dict)  # seconds


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = now()
    return wall - begun[0], cpu - begun[1]


def parity(tokens: list[int]) -> float:
    return float(sum(tokens) % 2)


class FixedLengths:
    """The run's environment with prompts of one length and a reward that differs in a group."""

    def __init__(self, environment: Any, length: int) -> None:
        self.environment, self.length = environment, length

    def train_problem(self, index: int) -> Any:
        problem = self.environment.train_problem(index)
        text = problem.prompt * (self.length // len(problem.prompt) + 1)  # a character is a token
        return dataclasses.replace(problem, prompt=text[-self.length :])

    async def episode(self, problem: Any, sample: Any, temperature: float) -> Any:
        (played,) = await self.environment.episode(problem, sample, temperature)
        reward = parity(played.tokens[self.length :].tolist())
        return (dataclasses.replace(played, reward=reward),)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)


def longer_policy(source: str, folder: str, length: int) -> str:
    """Copy the policy with room for longer contexts. Its rotary positions have no table."""
    target = Path(folder) / "policy"
    if not target.is_dir():
        shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config["max_position_embeddings"] = length
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


class Ours:
    """A run of this process's onepolicy."""

    def __init__(self, options: Options, folder: str) -> None:
        import torch

        from onepolicy.build.components import build_components
        from onepolicy.config import resolve
        from onepolicy.config.input_files import resolve_model
        from onepolicy.config.model import ModelConfig
        from onepolicy.run.hooks import build_hooks
        from onepolicy.run.step import StepRunner
        from onepolicy.sync.push import push_weights

        torch.set_num_threads(options.threads)
        prompt = options.lengths[0]
        self.path = resolve_model(ModelConfig(path=options.model)).path
        if options.forced:
            self.path = longer_policy(self.path, folder, options.max_len)
        tree = settings_of(options, self.path)
        self.parts, self.tokenizer = build_components(resolve(tree, options.settings))
        if options.forced:
            environment = FixedLengths(self.parts.environment, prompt)
            sampling = dataclasses.replace(self.parts.sampling, stop=())
            self.parts = dataclasses.replace(self.parts, sampling=sampling, environment=environment)
        asyncio.run(push_weights(self.parts.learner, self.parts.engine))
        self.runner = StepRunner(self.parts, build_hooks(self.parts))
        self.done = 0

    def result(self) -> Any:
        """Make the next step and return its StepResult."""
        result = asyncio.run(self.runner.rl_step(self.done))
        self.done += 1
        return result

    def step(self) -> Step:
        begun = now()
        result = self.result()
        wall, cpu = since(begun)
        batch = result.batch
        sampled, tokens = int(batch.trainable.sum()), batch.num_slots + batch.num_samples
        parts = {part: result.metrics[f"time/{part}"] for part in PARTS}
        return Step(wall, cpu, tokens - sampled, sampled, parts)


def settings_of(options: Options, path: str) -> dict[str, Any]:
    """Return the settings of our run."""
    samples = options.num_problems * GROUP
    return {
        "out": "unused",
        "steps": options.steps,
        "model": {"path": path},
        "task": {"kind": "chain", "ops": 12},
        "rollout": {
            "prompts_per_step": options.num_problems,
            "group_size": GROUP,
            "sampling": {"max_tokens": options.lengths[1]},
            "engine": {
                "dtype": options.dtype,
                "max_num_seqs": samples,
                "max_len": options.max_len,
            },
        },
        "optim": {"lr": 1e-5},
        "train": {"reuse_scoring_forward": True, "threads": options.threads},
        "log": {"counterfactual_every": 0},
    }


class OtherTree:
    """A run of another source tree's onepolicy, in a process of its own. It computes in turn."""

    def __init__(self, tree: Path, options: Options) -> None:
        source = tree / "src"
        if not (source / "onepolicy").is_dir():
            raise SystemExit(f"--source {tree}: it has no src/onepolicy")
        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(options))]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(source.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.place = self._ask()  # waits until it is built

    def step(self) -> Step:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return Step(**self._ask())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the process of --source ended; its error is above")
        return json.loads(line)


def main() -> None:
    """Answer every line with a step. What others print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Options(**json.loads(sys.argv[1])), folder)
        import onepolicy

        answer(str(onepolicy.__file__))
        for _ in sys.stdin:
            answer(dataclasses.asdict(ours.step()))


if __name__ == "__main__":
    main()
