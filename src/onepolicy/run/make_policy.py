"""`onepolicy make-policy`: build, warm up, check and store the tiny policy."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import PreTrainedModel

from onepolicy.build.engines import build_engine
from onepolicy.config import EvalConfig, HFEngineConfig, ModelConfig, UsageError
from onepolicy.config.policy import PolicyConfig, cached_policy_path
from onepolicy.envs import make_environment
from onepolicy.envs.multiturn.tokenization import TooManyTokens
from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
from onepolicy.models.load import load_tokenizer
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


def make_policy(config: PolicyConfig, out: Path | None) -> Path:
    """The policy's folder. With `out` unset it is the user's cache, where an existing policy is kept as it is."""
    console = Console()
    path = out or cached_policy_path(config)
    if os.path.lexists(path):
        if out is not None:
            raise UsageError(f"--out: {path} already exists; choose another folder")
        console.print(
            f"the policy of these settings is already there: {path}",
            soft_wrap=True,
            highlight=False,
        )
        return path
    start = time.perf_counter()
    tokenizer = make_tokenizer(task_alphabet(config.task))
    environment = make_environment(config.task, tokenizer, max_len=config.max_len)
    try:
        environment.check(max_tokens=config.max_len // 2, max_len=config.max_len)
    except TooManyTokens as error:
        raise UsageError(
            f"max_len: {config.max_len}, half of it for the response: {error.fact}; raise it"
        ) from None
    problems = min(CHECK_PROBLEMS, getattr(config.task, "held_out", CHECK_PROBLEMS))
    check = EvalConfig(problems=problems, greedy=True, k=4)
    environment.held_out(check.problems)  # are there that many?
    torch.set_num_threads(config.threads)
    model = make_model(config, len(tokenizer))
    console.print(
        f"warming up {model.num_parameters() / 1e6:.1f}M parameters on {config.threads} thread(s)",
        highlight=False,
    )
    with _bars(console) as bars:
        task = bars.add_task("warm-up", total=config.steps, shown="")

        def progress(step: int, loss: float, accuracy: float) -> None:
            bars.update(
                task, completed=step, shown=f"loss {loss:.3f}  next-token accuracy {accuracy:.3f}"
            )
            if step % 100 == 0 and not console.is_terminal:
                console.print(
                    f"step {step:>4}  loss {loss:.3f}  next-token accuracy {accuracy:.3f}",
                    highlight=False,
                )

        def examples(mistakes: float) -> Iterator[Example]:
            return warmup_examples(config.task, mistakes=mistakes, seed=config.seed)

        warm_up(model, tokenizer, examples, config, progress=progress)
    save_policy(model, tokenizer, config, path)
    scores = _check(config, check, path)
    console.print(
        f"greedy accuracy {scores['eval/greedy']:.2f}, sampling accuracy {scores['eval/avg@4']:.2f} on "
        f"{check.problems} held-out problems; {time.perf_counter() - start:.0f} s; saved to {path}",
        soft_wrap=True,
        highlight=False,
    )
    return path


def _check(config: PolicyConfig, check: EvalConfig, path: Path) -> dict[str, float]:
    """The saved policy, read back, on held-out problems."""
    model = ModelConfig(path=str(path))
    tokenizer = load_tokenizer(model)
    own = HFEngineConfig(dtype="float32", max_num_seqs=128)
    engine = build_engine(EngineSpec(model, own, torch.device("cpu"), config.max_len))
    environment, stop = (
        make_environment(config.task, tokenizer, max_len=config.max_len),
        (tokenizer.eos_token_id,),
    )
    return asyncio.run(
        evaluate(engine, environment, check, stop=stop, max_tokens=config.max_len // 2)
    )


def _bars(console: Console) -> Progress:
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        TextColumn("{task.description}"),
        *columns,
        TextColumn("{task.fields[shown]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def tiny_policy() -> Iterator[str]:
    """Folder of the cached tiny policy, or of a random one of its shape that goes away again."""
    config = PolicyConfig()
    path = cached_policy_path(config)
    if path.is_dir():
        yield str(path)
        return
    with _saved(config, make_model) as made:
        yield made


@contextmanager
def random_dense() -> Iterator[str]:
    """Folder of a random dense model as large as the tiny policy, which goes away again."""
    with _saved(PolicyConfig(), make_dense) as made:
        yield made


@contextmanager
def _saved(
    config: PolicyConfig, make: Callable[[PolicyConfig, int], PreTrainedModel]
) -> Iterator[str]:
    """A random model of these settings in a folder that goes away again."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(task_alphabet(config.task))
        path = Path(folder) / "random-policy"
        save_policy(make(config, len(tokenizer)), tokenizer, config, path)
        yield str(path)
