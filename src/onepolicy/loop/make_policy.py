"""`onepolicy make-policy`: build, warm up, check and store the tiny policy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onepolicy.config import EvalConfig, HFEngineConfig, ModelConfig, UsageError
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs import alphabet, build, warmup_examples
from onepolicy.loop.evaluate import evaluate
from onepolicy.loop.setup import build_engine
from onepolicy.train.policy import cached_path, fastest_threads, make_model, make_tokenizer, save_policy, warm_up

CHECK = EvalConfig(problems=128, greedy=True, k=4)


def make_policy(config: PolicyConfig, out: Path | None) -> Path:
    """The policy's folder. With `out` unset it is the user's cache, where an existing policy is kept as it is."""
    console = Console()
    path = out or cached_path(config)
    if path.exists():
        if out is not None:
            raise UsageError(f"--out: {path} already exists; choose another folder")
        console.print(f"the policy of these settings is already there: {path}", soft_wrap=True, highlight=False)
        return path
    start = time.perf_counter()
    tokenizer = make_tokenizer(alphabet(config.task))
    examples = warmup_examples(config.task, mistakes=config.mistakes, seed=config.seed)
    model = make_model(config, len(tokenizer))
    threads = config.threads or fastest_threads(model, tokenizer, next(examples))
    torch.set_num_threads(threads)
    console.print(f"warming up {model.num_parameters() / 1e6:.1f}M parameters on {threads} thread(s)", highlight=False)
    with _bars(console) as bars:
        task = bars.add_task("warm-up", total=config.steps, shown="")

        def progress(step: int, loss: float, accuracy: float) -> None:
            bars.update(task, completed=step, shown=f"loss {loss:.3f}  next-token accuracy {accuracy:.3f}")
            if step % 100 == 0 and not console.is_terminal:
                console.print(f"step {step:>4}  loss {loss:.3f}  next-token accuracy {accuracy:.3f}", highlight=False)

        warm_up(model, tokenizer, examples, config, progress=progress)
    save_policy(model, tokenizer, config, path)
    scores = _check(config, path)
    console.print(
        f"greedy accuracy {scores['eval/greedy']:.2f}, sampling accuracy {scores['eval/avg@4']:.2f} on "
        f"{CHECK.problems} held-out problems; {time.perf_counter() - start:.0f} s; saved to {path}",
        soft_wrap=True,
        highlight=False,
    )
    return path


def _check(config: PolicyConfig, path: Path) -> dict[str, float]:
    model = ModelConfig(path=str(path))
    tokenizer = make_tokenizer(alphabet(config.task))
    engine = build_engine(
        model, HFEngineConfig(dtype="float32", slots=128), torch.device("cpu"), record=False, max_len=config.max_len
    )
    environment = build(config.task, tokenizer)
    stop = (tokenizer.eos_token_id,)
    return asyncio.run(evaluate(engine, environment, CHECK, stop=stop, max_tokens=config.max_len // 2))


def _bars(console: Console) -> Progress:
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}"),
        *columns,
        TextColumn("{task.fields[shown]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
