"""verl's V1 trainers with onepolicy's measures, corrections and dumps.

A mixin goes in front of verl's synchronous and asynchronous trainers. It changes what they do at
four places: it checks the configuration and the workers before the first step, measures after
scoring, replaces verl's rollout correction while advantages are computed, and finishes the
workers' metrics after the update.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import ray
import transfer_queue
from omegaconf import OmegaConf, open_dict
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import (
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
    trainer_base,
)

from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.core.metrics import mismatch_metrics
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.verl import preflight
from onepolicy.integrations.verl.correction import correct_batch
from onepolicy.integrations.verl.dump import FIELDS, write_batch
from onepolicy.integrations.verl.metrics import finish_update_metrics
from onepolicy.integrations.verl.settings import Settings, read_settings
from onepolicy.integrations.verl.workers import ModelRouters, WorkerSettings, set_up

log = logging.getLogger(__name__)
VERLS_CORRECTION = "compute_rollout_correction_and_add_to_batch"
MEASURED = ["response_mask", "old_log_probs", "rollout_log_probs"]
JUDGED = {"responses", "entropy"}
"""Fields that tell more of the first step."""


class OnePolicyMixin:
    """The part of a V1 trainer of verl that is onepolicy's."""

    base_mode: ClassVar[str]
    """The mode of verl's trainer that this one extends."""

    config: Any
    global_steps: int
    local_trigger_step: int
    actor_rollout_wg: Any

    def __init__(self, config: Any) -> None:
        """Check the configuration, then build verl's trainer.

        Raises UsageError with every setting that does not fit.
        """
        section = config.trainer.get("onepolicy")
        if section is not None:
            section = OmegaConf.to_container(section, resolve=True)
        self.onepolicy: Settings = read_settings(section)
        self._first = FirstStep("verl")
        self._preflight: Preflight = preflight.check_config(config, self.onepolicy, os.environ)
        self._preflight.finish()
        with open_dict(config):  # verl takes every mode but its own "sync" for asynchronous
            config.trainer.v1.trainer_mode = self.base_mode
        super().__init__(config)  # type: ignore[call-arg]

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        routes = preflight.replays(self.config)
        settings = WorkerSettings(
            routes=routes,
            native_routes=self.onepolicy.dump is not None,
            correction=self.onepolicy.live,
        )
        answers = ray.get(
            [
                worker.__ray_call__.remote(set_up, settings)
                for worker in self.actor_rollout_wg.workers
            ]
        )
        preflight.check_workers(self._preflight, answers, routes=routes)
        self._routers: ModelRouters | None = answers[0].routers
        self._preflight.finish()
        log.warning("%s", self._preflight)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        section = self.config.algorithm.get("rollout_correction")
        if section is not None and section.get("bypass_mode", False):
            return batch  # the old log-probabilities are the rollout's; the loss measures
        fields = MEASURED
        if self._first.due:
            fields = [*MEASURED, *JUDGED]
        if self.onepolicy.dump is not None:
            fields = FIELDS
        data = _fetch(batch, fields)
        padded = DataProto(batch=data.select(*MEASURED).to_padded_tensor()).batch
        if self._first.due:
            judged = {name: data[name].to_padded_tensor(0) for name in JUDGED & set(data.keys())}
            self._first.look(
                padded["old_log_probs"],
                padded["rollout_log_probs"],
                padded["response_mask"],
                tokens=judged.get("responses"),
                entropy=judged.get("entropy"),
            )
        metrics.update(
            mismatch_metrics(
                padded["old_log_probs"], padded["rollout_log_probs"], padded["response_mask"]
            )
        )
        folder, step = self.onepolicy.dump, self.global_steps
        if folder is not None:
            part = self.local_trigger_step
            write_batch(data, batch.tags, self._routers, folder, step, part=part)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.onepolicy.fixed is None:
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        with _replaced(trainer_base, VERLS_CORRECTION, self._correct):
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]

    def _correct(self, data: Any, _: Any) -> tuple[Any, dict[str, float]]:
        """Stand in for verl's function of the same arguments."""
        assert self.onepolicy.fixed is not None
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        return data, correct_batch(data, self.onepolicy.fixed, loss_agg_mode=mode)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._update_actor(batch, metrics)  # type: ignore[misc]
        finish_update_metrics(metrics)
        return batch


@register_trainer("onepolicy_sync")
class OnePolicyTrainerSync(OnePolicyMixin, PPOTrainerSync):
    """Trainer and rollout in turns on the same GPUs."""

    base_mode = "sync"


@register_trainer("onepolicy_colocate_async")
class OnePolicyTrainerColocateAsync(OnePolicyMixin, PPOTrainerColocateAsync):
    """Trainer and rollout on the same GPUs, with partial rollouts."""

    base_mode = "colocate_async"


@register_trainer("onepolicy_separate_async")
class OnePolicyTrainerSeparateAsync(OnePolicyMixin, PPOTrainerSeparateAsync):
    """Trainer and rollout on GPUs of their own, with partial rollouts."""

    base_mode = "separate_async"


def _fetch(batch: Any, fields: list[str]) -> Any:
    """Return the fields of a batch that exist, as nested tensors."""
    return transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
    )


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module in this context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
