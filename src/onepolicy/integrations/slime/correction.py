"""The two hooks of slime that see log-probabilities. miles calls the second one too.

| hook | sees | corrections |
|---|---|---|
| `step`, --rollout-data-postprocess-path | this rank's samples, before the update | fixed ones |
| `tis`, --custom-tis-function-path | one micro-batch, in the loss | of a token or a sequence |

Both hand on the trainer's masks: a rejected token weighs 0, and the others do not become louder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.correct.reweight import reweight
from onepolicy.correct.weights import Average
from onepolicy.integrations.core.advantages import of_a_part, turns_of
from onepolicy.integrations.core.dump import dump_row, write_rows
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.core.metrics import COUNTS, LARGEST
from onepolicy.integrations.core.settings import Settings, read_settings
from onepolicy.integrations.core.step import (
    NONFINITE,
    PER_TOKEN,
    measure_and_correct,
    padded,
    token_metrics,
    unpadded,
)
from onepolicy.integrations.slime.preflight import check_lengths, check_step, check_tis


class Batch(NamedTuple):
    """The whole responses of a rank's samples, one tensor [T_i] each."""

    logp_old: list[Tensor]  # float32
    logp_rollout: list[Tensor]  # float32
    masks: list[Tensor]  # bool


FIRST = FirstStep("miles")
"""Of this process. Neither trainer hands its hooks an object that lives as long."""
TisResult = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def settings_of(args: Any) -> Settings:
    """Return the table `onepolicy` of the file of --custom-config-path."""
    return read_settings(getattr(args, "onepolicy", None), "onepolicy in --custom-config-path")


def step(args: Any, rollout_id: int = 0, rollout_data: Any = None, **_: Any) -> None:
    """Measure, correct and dump a rollout, in place. slime's --rollout-data-postprocess-path.

    The advantages get the correction's weights, and `rollout_data` the metrics that slime then
    logs as `rollout/mismatch/k3` and so on.

    Raises UsageError with every setting that does not fit.
    """
    if rollout_data is None:
        raise UsageError(
            "onepolicy.integrations.slime.step: this trainer hands its hook no data, as miles "
            "does; use --custom-tis-function-path onepolicy.integrations.miles.tis"
        )
    if not rollout_data.get("advantages"):
        return  # not the last pipeline stage
    settings = settings_of(args)
    report = check_step(args, settings, rollout_data)
    report.finish()
    whole = _gatherer(args, rollout_data)
    batch = Batch(
        whole("log_probs"),
        whole("rollout_log_probs"),
        [mask.bool() for mask in rollout_data["loss_masks"]],
    )
    check_lengths(*batch)
    old, rollout, mask = (padded(rows) for rows in batch)
    correction = settings.correction
    if correction is not None:
        correction = of_a_part(correction)
    average: Average = "slots"
    if not getattr(args, "calculate_per_token_loss", False):
        average = "sequences"
    sides = old, rollout, mask.to(old.device)
    found = measure_and_correct(padded(whole("advantages")), *sides, correction, average)
    entropy = None
    if rollout_data.get("entropy"):
        entropy = whole("entropy")  # all ranks of context parallelism give their slices
    if FIRST.due and is_first_rank():
        report.log_notes()
        known = None if entropy is None else padded(entropy)
        FIRST.look(*sides, entropy=known)
    metrics = over_ranks(found.metrics, int(mask.sum()), correction, data_parallel_group())
    if settings.correction is not None:
        _check_nonfinite(settings.correction, metrics)
        corrected = unpadded(found.advantages, batch.logp_old)
        rollout_data["advantages"] = _own_part(args, corrected, rollout_data)
    rollout_data.update(metrics)
    if settings.dump is not None and _writes_dump(args):
        _dump(settings, rollout_id, rollout_data, batch, entropy)


def tis(args: Any, **batch: Any) -> TisResult:
    """Apply the correction to a micro-batch's policy loss, in slime, as of `weighed`."""
    return weighed(args, **batch, top_p_replayed=True)


def weighed(
    args: Any,
    *,
    pg_loss: Tensor,  # [N], concatenated samples
    train_log_probs: list[Tensor] | None,  # of each sample; None if nothing scored them
    rollout_log_probs: list[Tensor] | None,
    loss_masks: list[Tensor],
    top_p_replayed: bool,
    **_: Any,
) -> TisResult:
    """Apply the correction to one micro-batch's policy loss. The TIS hook of slime and miles.

    Without --use-tis (that is, with --get-mismatch-metrics alone) the loss stays as it is: both
    trainers take what a hook returns in either case.

    Args:
        args: the trainer's.
        pg_loss, train_log_probs, rollout_log_probs, loss_masks: of the micro-batch.
        top_p_replayed: the trainer scores over the tokens that top-p kept.

    Returns:
        The loss [N], the masks as they were, and metrics [N] of each token.

    Raises UsageError with every setting that does not fit.
    """
    settings = settings_of(args)
    sliced = getattr(args, "context_parallel_size", 1) > 1
    if sliced and not args.use_tis and getattr(args, "rollout_data_postprocess_path", None):
        return pg_loss, loss_masks, {}  # `step` measures the whole responses
    if train_log_probs is None or rollout_log_probs is None:
        raise UsageError(
            "onepolicy's TIS hook: one side's log-probabilities are missing; let the trainer score "
            "(without --use-rollout-logprobs) and the rollout function return its own"
        )
    old = [logp.detach().float() for logp in train_log_probs]
    rollout = [logp.detach().float() for logp in rollout_log_probs]
    masks = [mask.bool().to(logp.device) for mask, logp in zip(loss_masks, old, strict=True)]
    report = check_tis(args, settings, old, masks, top_p_replayed=top_p_replayed)
    report.finish()
    check_lengths(old, rollout, masks)
    if FIRST.due and is_first_rank():
        report.log_notes()
        FIRST.look(padded(old), padded(rollout), padded(masks))
    metrics = _token_metrics(old, rollout, masks)
    if settings.correction is None or not args.use_tis:
        return pg_loss, loss_masks, metrics
    weights, keep = [torch.zeros_like(logp) for logp in old], masks
    if any(mask.any() for mask in masks):
        turns = [turns_of(mask[None])[0] for mask in masks]
        applied = reweight(old, rollout, masks, of_a_part(settings.correction), turn=turns)
        weights, keep = applied.weight, applied.keep
    weight, kept = torch.cat(weights), torch.cat(keep)
    metrics["correction/weight_mean"] = weight
    metrics["correction/rejected"] = (~kept & torch.cat(masks)).float()
    return torch.where(kept, pg_loss * weight, 0.0), loss_masks, metrics


def _check_nonfinite(correction: CorrectionConfig, metrics: Mapping[str, Tensor]) -> None:
    """Raise UsageError, on all ranks, if too many tokens of the whole step are not finite."""
    share = float(metrics.get("mismatch/nonfinite", 0.0))
    if share > correction.max_nonfinite:
        raise UsageError(
            f"onepolicy's step hook: {share:.1%} of the step's tokens have a log-probability that "
            f"is not finite, more than the correction's max_nonfinite = {correction.max_nonfinite}"
            "; fix the engine that returned such log-probabilities"
        )


def _token_metrics(
    old: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return each token's metrics [N].

    slime and miles divide a sample's sum by all its tokens. So that a token without a value is left
    out of the mean, it gets that of the sample's others.
    """
    rows = [token_metrics(*pair) for pair in zip(old, rollout, strict=True)]
    return {
        name: torch.cat([_filled(row[name], mask) for row, mask in zip(rows, masks, strict=True)])
        for name in (*PER_TOKEN, NONFINITE)
    }


def _filled(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [T], those that are not finite replaced by the mean of the mask's others."""
    known = mask & values.isfinite()
    mean = torch.where(known, values, 0.0).sum() / known.sum().clamp(min=1)
    return torch.where(values.isfinite(), values, mean)


def _gatherer(args: Any, data: MutableMapping[str, Any]) -> Callable[[str], list[Tensor]]:
    """Return a function that gives a field's values of whole responses, float32 [T_i] each."""
    if getattr(args, "context_parallel_size", 1) == 1:
        return lambda name: [row.detach().float() for row in data[name]]
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))

    @torch.no_grad()
    def gather(name: str) -> list[Tensor]:
        rows = zip(data[name], lengths, strict=True)
        return [all_gather_with_cp(row, *length).float() for row, length in rows]

    return gather


def _own_part(args: Any, rows: list[Tensor], data: MutableMapping[str, Any]) -> list[Tensor]:
    """Return the slices of whole responses that this rank of context parallelism holds."""
    if getattr(args, "context_parallel_size", 1) == 1:
        return rows
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    lengths = zip(data["total_lengths"], data["response_lengths"], strict=True)
    return [slice_log_prob_with_cp(row, *size) for row, size in zip(rows, lengths, strict=True)]


def _writes_dump(args: Any) -> bool:
    """Return whether this rank's copy of the samples is the one to write."""
    if not torch.distributed.is_initialized():
        return True
    from megatron.core import mpu

    return not (mpu.get_tensor_model_parallel_rank() or mpu.get_context_parallel_rank())


def _dump(
    settings: Settings,
    rollout_id: int,
    data: Mapping[str, Any],
    batch: Batch,
    entropy: Sequence[Tensor] | None,
) -> None:
    """Write this rank's samples for `onepolicy audit`."""
    assert settings.dump is not None
    rewards = data.get("local_raw_reward", data.get("rewards"))  # of others: less the group's mean
    rows = []
    for i, mask in enumerate(batch.masks):
        if not len(mask):
            continue  # the response is empty
        tokens = torch.as_tensor(data["tokens"][i])[-len(mask) :]
        sides = batch.logp_rollout[i], batch.logp_old[i]
        known = None if entropy is None else entropy[i]
        row = dump_row(tokens, mask, *sides, step=rollout_id, entropy=known)
        if rewards is not None:
            row["reward"] = float(rewards[i])
        rows.append(row)
    rank, ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    write_rows(settings.dump, rollout_id, rows, framework="miles", rank=rank, ranks=ranks)


def data_parallel_group() -> Any:
    """Return slime's group of ranks with other samples, None in a single process."""
    if not dist.is_initialized():
        return None
    from megatron.core import mpu

    return mpu.get_data_parallel_group_gloo(with_context_parallel=False)


def is_first_rank() -> bool:
    """Return whether this process speaks for all that have the loss: those of the last stage."""
    if not dist.is_initialized():
        return True
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is None or not mpu.model_parallel_is_initialized():  # miles with FSDP
        return dist.get_rank() == 0
    data = mpu.get_data_parallel_rank(with_context_parallel=True)
    return mpu.get_tensor_model_parallel_rank() == data == 0


def over_ranks(
    metrics: dict[str, float], tokens: int, correction: CorrectionConfig | None, group: Any
) -> dict[str, Tensor]:
    """Return the metrics of all ranks together: means by their tokens, sums, or the largest.

    A rank whose value is missing or not finite does not count. A metric that no rank has is left
    out, on all of them. Means over tokens are exact. Ratios of sums (`ess`, `chi2`, `pearson`) are
    means of the ranks'. All ranks of the group must call it.

    Args:
        metrics: of this rank's samples; any of the names that `measure_and_correct` gives.
        tokens: their number.
        correction: the one that reported them. The same on all ranks.
        group: of the data-parallel ranks, None for one process.
    """
    names = _names(correction)
    values = torch.tensor([metrics.get(name, torch.nan) for name in names], dtype=torch.float64)
    known = values.isfinite()
    weight = known * float(tokens)
    plain, largest = torch.where(known, values, 0.0), torch.where(known, values, -torch.inf)
    sums = torch.stack([weight, plain * weight, plain])
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    weight, weighted, counted = sums
    found = {}
    for i, name in enumerate(names):
        last = name.rpartition("/")[2]
        if weight[i] == 0:
            continue
        found[name] = weighted[i] / weight[i]
        if last in LARGEST:
            found[name] = largest[i]
        elif last in COUNTS:
            found[name] = counted[i]
    return found


def _names(correction: CorrectionConfig | None) -> list[str]:
    """Return the names of the metrics of a step."""
    one = torch.zeros(1, 1)
    return list(measure_and_correct(one, one, one, one == 0, correction).metrics)
