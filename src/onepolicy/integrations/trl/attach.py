"""`attach(trainer)`: replay, corrections, metrics and dumps in a TRL trainer.

Five methods of the instance are wrapped, nothing global. In the order in which a step calls them:

| method | added |
|---|---|
| `_generate_and_score_completions` | mismatch, correction and dump of a finished generation |
| `_generate`, `_generate_single_turn` | routes, by the tokens that they belong to |
| `_get_per_token_logps_and_entropies` | replay in scoring and in training forwards |
| `_compute_loss` | the routes of the micro-batch; weights that need the policy being trained |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onepolicy.config import CorrectionConfig
from onepolicy.console import print_text
from onepolicy.integrations.core.advantages import named_correction
from onepolicy.integrations.core.armed import ArmedReplay
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.settings import dump_folder
from onepolicy.integrations.trl.adapter import TrlAdapter
from onepolicy.integrations.trl.preflight import MARK, check_trainer
from onepolicy.integrations.trl.settings import Replay, Scoring, TrlSettings
from onepolicy.replay.sample_checks import OnMismatch


def attach(
    trainer: Any,
    *,
    replay: Replay = "r3",
    correction: str | CorrectionConfig | None = None,
    dump: Path | str | None = None,
    scoring: Scoring = "always",
    native_every: int = 0,
    form: str = "vllm",
    check: bool = True,
    on_mismatch: OnMismatch = "stop",
) -> Preflight:
    """Attach onepolicy to a GRPOTrainer or RLOOTrainer. Call it before `trainer.train()`.

    The report of the checks goes to stderr.

    Args:
        trainer: of TRL 1.16, as it was built.
        replay: "r3" replays the sampler's experts in scoring and training forwards, "off" does not.
        correction: a preset's name or a configured one (docs/corrections.md), which replaces TRL's
            default one. None leaves TRL's as it is.
        dump: folder for `onepolicy audit`: a file per step that samples, with the routes of both
            sides.
        scoring: "always" adds a forward without gradient where TRL does not score before the
            update. "training-forward" measures and corrects in the training forward instead, each
            micro-batch on its own.
        native_every: score every so many generations without replay too, for `mismatch_native/...`.
            Each time costs a scoring forward. 0: never.
        form: payload form of the routes that a `rollout_func` returns as `routed_experts`, or that
            vLLM does (`integrations.core.payload`).
        check: compare every sample's routes with the routers' own choice in every forward
            (docs/replay.md).
        on_mismatch: "stop" raises at the first sample whose routes are wrong. "drop" lets the
            trainer route such a sample itself, and counts it (`replay/dropped_samples`).

    Returns:
        The report. `str()` gives it as text.

    Raises:
        UsageError: the trainer's settings do not go with these. Each is named, with its fix.
        RoutingError: the model's experts cannot be replayed.
    """
    settings = TrlSettings(
        replay=replay,
        correction=named_correction(correction),
        dump=dump_folder(dump, "attach"),
        scoring=scoring,
        native_every=native_every,
        form=form,
        check=check,
        on_mismatch=on_mismatch,
    )
    report = check_trainer(trainer, settings)
    armed = None
    if replay == "r3":
        armed = ArmedReplay(trainer.model)
        layers, experts = len(armed.routers.layers), armed.routers.num_experts
        report.note(f"replay: {layers} routers of {experts} experts, top {armed.routers.top_k}")
    TrlAdapter(trainer, settings, armed).install()
    setattr(trainer, MARK, True)
    if trainer.accelerator.is_main_process:
        print_text(report, stderr=True)
    return report
