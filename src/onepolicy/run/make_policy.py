"""`onepolicy make-policy`: make, warm up, save and evaluate the tiny policy."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, TokenizersBackend

from onepolicy.build.engines import build_engine
from onepolicy.config import EvalConfig, HFEngineConfig, ModelConfig, UsageError
from onepolicy.config.policy import PolicyConfig, cached_policy_path
from onepolicy.console import SHOWN, Console, make_bars
from onepolicy.envs import make_environment
from onepolicy.envs.multiturn.prompt_checks import TooManyTokens
from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
from onepolicy.models.load import load_tokenizer
from onepolicy.notation import counted
from onepolicy.rollout.spec import EngineSpec
from onepolicy.run.evaluate import evaluate
from onepolicy.tiny.model import (
    Example,
    make_dense,
    make_model,
    make_tokenizer,
    save_policy,
    warm_up,
)

CHECK_PROBLEMS = 64
WIDER = 8.0
"""Factor on the weights of a random policy: their deviation is 0.16 then."""


def make_policy(config: PolicyConfig, out: Path | None) -> Path:
    """Make the tiny policy and return its folder.

    out: the folder; None: the user's cache, where an existing policy is kept. Raises UsageError.
    """
    console = Console()
    path = out or cached_policy_path(config)
    if os.path.lexists(path):
        if out is not None:
            raise UsageError(f"--out: {path} already exists; choose another folder")
        console.print_line(f"the policy of these settings is already there: {path}")
        return path
    start = time.perf_counter()
    tokenizer = make_tokenizer(task_alphabet(config.task))
    evaluation = _check_task(config, tokenizer)
    torch.set_num_threads(config.threads)
    model = make_model(config, len(tokenizer))
    millions = model.num_parameters() / 1e6
    threads = counted(config.threads, "thread")
    console.print_line(f"warming up {millions:.1f}M parameters on {threads}")
    _warm_up(model, tokenizer, config, console)
    save_policy(model, tokenizer, config, path)
    scores = _evaluate_saved(config, evaluation, path)
    console.print_line(
        f"greedy accuracy {scores['eval/greedy']:.2f}, "
        f"sampling accuracy {scores['eval/avg@4']:.2f} on {evaluation.problems} held-out problems; "
        f"{time.perf_counter() - start:.0f} s; saved to {path}"
    )
    return path


def _check_task(config: PolicyConfig, tokenizer: TokenizersBackend) -> EvalConfig:
    """Return the settings of the final evaluation. Raises UsageError if the task does not fit."""
    environment = make_environment(config.task, tokenizer, max_len=config.max_len)
    try:
        environment.check(max_tokens=config.max_len // 2, max_len=config.max_len)
    except TooManyTokens as error:
        raise UsageError(
            f"max_len: {config.max_len}, half of it for the response: {error.fact}; raise it"
        ) from None
    problems = min(CHECK_PROBLEMS, getattr(config.task, "held_out", CHECK_PROBLEMS))
    environment.held_out(problems)  # raises if there are fewer
    return EvalConfig(problems=problems, greedy=True, k=4)


def _warm_up(
    model: PreTrainedModel,
    tokenizer: TokenizersBackend,
    config: PolicyConfig,
    console: Console,
) -> None:
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), SHOWN)
    with make_bars(console, *columns) as bars:
        task = bars.add_task("warm-up", total=config.steps, shown="")

        def progress(step: int, loss: float, accuracy: float) -> None:
            shown = f"loss {loss:.3f}  next-token accuracy {accuracy:.3f}"
            bars.update(task, completed=step, shown=shown)
            if step % 100 == 0 and not console.is_terminal:
                console.print_line(f"step {step:>4}  {shown}")

        def examples(mistakes: float) -> Iterator[Example]:
            return warmup_examples(config.task, mistakes=mistakes, seed=config.seed)

        warm_up(model, tokenizer, examples, config, progress=progress)


def _evaluate_saved(config: PolicyConfig, evaluation: EvalConfig, path: Path) -> dict[str, float]:
    """Load the saved policy and evaluate it on held-out problems."""
    model = ModelConfig(path=str(path))
    tokenizer = load_tokenizer(model)
    engine_config = HFEngineConfig(dtype="float32", max_num_seqs=128)
    engine = build_engine(EngineSpec(model, engine_config, torch.device("cpu"), config.max_len))
    environment = make_environment(config.task, tokenizer, max_len=config.max_len)
    stop, max_tokens = (tokenizer.eos_token_id,), config.max_len // 2
    return asyncio.run(evaluate(engine, environment, evaluation, stop=stop, max_tokens=max_tokens))


@contextmanager
def tiny_policy() -> Iterator[str]:
    """Yield the folder of the cached tiny policy, or of a temporary random one of its shape."""
    config = PolicyConfig()
    path = cached_policy_path(config)
    if path.is_dir():
        yield str(path)
        return
    with _temporary_policy(config, make_model) as folder:
        yield folder


@contextmanager
def random_dense() -> Iterator[str]:
    """Yield the folder of a temporary random dense model as large as the tiny policy."""
    with _temporary_policy(PolicyConfig(), make_dense) as folder:
        yield folder


@contextmanager
def _temporary_policy(
    config: PolicyConfig, make: Callable[[PolicyConfig, int], PreTrainedModel]
) -> Iterator[str]:
    """Yield a temporary folder with a random model of these settings.

    Its weights are wide, as a trained model's, so that rounding to bfloat16 chooses other experts.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(task_alphabet(config.task))
        path = Path(folder) / "random-policy"
        model = make(config, len(tokenizer))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(WIDER)
        save_policy(model, tokenizer, config, path)
        yield str(path)
