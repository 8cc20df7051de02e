"""`onepolicy eval`: held-out evaluation of a model folder or of a run's checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onepolicy.build import components, engines
from onepolicy.build.calibrate import calibrate
from onepolicy.build.learner import resolve_model, set_num_threads
from onepolicy.config import RunConfig
from onepolicy.models.load import parse_device
from onepolicy.rollout.spec import EngineSpec
from onepolicy.run.evaluate import evaluate, num_eval_episodes
from onepolicy.train import checkpoint


def evaluate_model(config: RunConfig, run: Path | None, step: int | None) -> dict[str, float]:
    """Evaluate model.path, or (with `run`) the run's checkpoint of `step` (None: the newest). Prints a table, and one
    JSON line for scripts."""
    model = config.model
    if run is not None:
        folder = (
            checkpoint.latest_checkpoint(run)
            if step is None
            else checkpoint.checkpoint_folder(run, step)
        )
        checkpoint.verify(folder)
        model = model.model_copy(update={"path": str(folder)})
    model = resolve_model(model)
    set_num_threads(config)
    environment, tokenizer, max_len = components.build_environment(config, model)
    device = parse_device(config.train.device)
    quant, own = config.rollout.quant, config.rollout.engine
    if quant is not None and not config.eval.quantised:
        engine = components.build_unquantised_engine(config, model, device, max_len)
    else:
        spec = EngineSpec(model, own, device, max_len, numerics=config.numerics, quant=quant)
        engine = engines.build_engine(spec)
    stop = (tokenizer.eos_token_id,)
    asyncio.run(calibrate(config, engine, environment, stop, run))
    with Progress(transient=True, console=Console(stderr=True)) as bars:
        task = bars.add_task("evaluation", total=num_eval_episodes(config.eval))
        metrics = asyncio.run(
            evaluate(
                engine,
                environment,
                config.eval,
                stop=stop,
                max_tokens=config.eval.max_tokens or config.rollout.sampling.max_tokens,
                solved_at=getattr(config.task, "threshold", 1.0),
                advance=lambda: bars.advance(task),
            )
        )
    console = Console()
    console.print(
        f"{config.eval.problems} held-out problems, {model.path}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print_json(json.dumps({"model": model.path, **metrics}), indent=None, ensure_ascii=True)
    return metrics
