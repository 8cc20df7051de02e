"""`onepolicy eval`: held-out evaluation of a model folder or of a run's checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

from rich.progress import TaskProgressColumn, TimeRemainingColumn

from onepolicy.build import components, engines
from onepolicy.build.calibrate import calibrate
from onepolicy.build.engines import build_clean_engine
from onepolicy.build.learner import set_num_threads
from onepolicy.config import ModelConfig, RunConfig
from onepolicy.config.input_files import resolve_model
from onepolicy.console import Console, make_bars, make_table
from onepolicy.interfaces import Environment, RolloutEngine
from onepolicy.models.load import parse_device
from onepolicy.rollout.spec import EngineSpec
from onepolicy.run.evaluate import evaluate, num_eval_episodes
from onepolicy.train import checkpoint


def evaluate_model(config: RunConfig, run: Path | None, step: int | None) -> dict[str, float]:
    """Evaluate model.path and print a table, and one line of JSON for scripts.

    run: evaluate a checkpoint of this run instead. step: of the checkpoint; None: the newest.
    """
    model = config.model
    if run is not None:
        folder = _checkpoint_of(run, step)
        model = model.model_copy(update={"path": str(folder)})
    model = resolve_model(model)
    set_num_threads(config)
    environment, tokenizer, max_len = components.build_environment(config, model)
    stop = components.stop_ids(environment, model, tokenizer)
    engine = _build_engine(config, model, max_len)
    asyncio.run(calibrate(config, engine, environment, stop, run))
    metrics = _evaluate_with_bar(config, engine, environment, stop)
    _print_metrics(config, model, metrics)
    return metrics


def _checkpoint_of(run: Path, step: int | None) -> Path:
    if step is None:
        folder = checkpoint.latest_checkpoint(run)
    else:
        folder = checkpoint.checkpoint_folder(run, step)
        checkpoint.refuse_elsewhere(run, folder)
    checkpoint.verify(folder)
    return folder


def _build_engine(config: RunConfig, model: ModelConfig, max_len: int) -> RolloutEngine:
    device = parse_device(config.train.device)
    quant = config.rollout.quant
    if quant is not None and not config.eval.quantised:
        return build_clean_engine(config, model, device, max_len)
    spec = EngineSpec(
        model, config.rollout.engine, device, max_len, numerics=config.numerics, quant=quant
    )
    return engines.build_engine(spec)


def _evaluate_with_bar(
    config: RunConfig, engine: RolloutEngine, environment: Environment, stop: tuple[int, ...]
) -> dict[str, float]:
    columns = (TaskProgressColumn(), TimeRemainingColumn())
    with make_bars(Console(stderr=True), *columns) as bars:
        task = bars.add_task("evaluation", total=num_eval_episodes(config.eval))
        evaluation = evaluate(
            engine,
            environment,
            config.eval,
            stop=stop,
            max_tokens=config.eval.max_tokens or config.rollout.sampling.max_tokens,
            solved_at=getattr(config.task, "threshold", 1.0),
            advance=lambda: bars.advance(task),
        )
        return asyncio.run(_confirmed(engine, evaluation))


async def _confirmed(
    engine: RolloutEngine, evaluation: Awaitable[dict[str, float]]
) -> dict[str, float]:
    metrics = await evaluation
    await engine.reset_cache()  # raises if a run has given a server other weights meanwhile
    return metrics


def _print_metrics(config: RunConfig, model: ModelConfig, metrics: dict[str, float]) -> None:
    console = Console()
    console.print_line(f"{config.eval.problems} held-out problems, {model.path}")
    table = make_table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print_json(json.dumps({"model": model.path, **metrics}), indent=None, ensure_ascii=True)
