"""Where a run's numbers go: metrics.jsonl, samples.jsonl and TensorBoard, and what every number is called.

A metric is `area/quantity`. METRICS is the whole vocabulary; writing a name outside it is an error, so a reader can
look up every column. How a metric reduces over micro-batches is its producer's business: one row is one training step.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from onepolicy.config import UsageError
from onepolicy.files import replace_atomically
from onepolicy.report.jsonl import METRICS as METRICS_FILE
from onepolicy.report.jsonl import SAMPLES, read_metrics, read_samples

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Row = dict[str, Any]

_ROUTING = {
    "routing/routers": "routers (token, MoE layer) whose set of experts differs between rollout and trainer [share]",
    "routing/tokens": "tokens with at least one such router [share]",
    "routing/sequence": "differing routers per token, averaged over each sequence, then over sequences [layers]",
}
# rho = pi_trainer / pi_rollout of the sampled token; all means are over the step's trainable slots
_MISMATCH = {
    "mismatch/k1": "mean -log rho: estimate of KL(rollout || trainer), unbiased, may be negative [nats]",
    "mismatch/k3": "mean rho - 1 - log rho: estimate of the same KL, never negative [nats]",
    "mismatch/f1.25": "tokens with max(rho, 1/rho) > 1.25 [share]",
    "mismatch/f2": "tokens with max(rho, 1/rho) > 2 [share]",
    "mismatch/f5": "tokens with max(rho, 1/rho) > 5 [share]",
    "mismatch/chi2": "mean rho^2 - 1: chi-square divergence [1]",
    "mismatch/ess": "(sum rho)^2 / (n sum rho^2): effective sample size [share]",
    "mismatch/differing": "tokens whose two log-probabilities are not the same number [tokens]",
    "mismatch/max_dp": "largest |p_trainer - p_rollout| [probability]",
    "mismatch/mean_dp": "mean |p_trainer - p_rollout| [probability]",
    "mismatch/max_dlogp": "largest |log rho| [nats]",
    "mismatch/mean_dlogp": "mean |log rho| [nats]",
    "mismatch/pearson": "correlation of p_trainer with p_rollout [1]",
    "mismatch/ppl_ratio": "perplexity under the trainer over that under the rollout engine, mean over samples [1]",
}
_PER_LAYER = {
    "routing/layer@k": "tokens whose set of experts differs between rollout and trainer in decoder layer k [share]",
}
# two scorings of the same samples with the same weights, packed in opposite orders (R3 paper, section 3.3)
_REPEAT = {
    "repeat/k3": "k3 of the second with the first [nats]",
    "repeat/max_dlogp": "largest |log ratio| of the two [nats]",
    "repeat/routers": "routers whose own set of experts differs between the two [share]",
}
_PER_TURN = {
    "mismatch/k3_turn@k": "k3 of the tokens of model turn k, from 0; from 8 on of turns k to 2k - 1 [nats]",
}
_PER_STALENESS = {
    "mismatch/k3_staleness@k": "k3 of the tokens sampled k updates ago; from 8 on, k to 2k - 1 updates [nats]",
}
METRICS: dict[str, str] = {
    "train/reward": "mean reward of the step's rollouts [reward]",
    "train/reward_min": "smallest reward of the step's rollouts [reward]",
    "train/reward_max": "largest reward of the step's rollouts [reward]",
    "train/response_length": "mean sampled tokens per episode [tokens]",
    "train/cut_by_length": "episodes that hit the length limit [share]",
    "train/turns": "mean model turns per episode, if there are several [turns]",
    "train/tokens_turn@k": "tokens that mismatch/k3_turn@k is the mean of [tokens]",
    "tools/TOOL": "calls of this tool per episode (TOOL_error: those it answered with an error) [calls]",
    "tools/unknown": "replies with characters the tokenizer feeds as its unknown token, per episode [replies]",
    "tools/malformed": "turns that named no tool and no answer, or a tool there is not, per episode [turns]",
    "train/groups_without_signal": "groups whose rewards are all equal but for rounding: every advantage is 0 [share]",
    "train/entropy": "mean entropy of the trainer's distribution on trainable slots [nats]",
    "train/loss": "value of the objective, mean of the mini-steps by their slots [1]",
    "train/grad_norm": "gradient norm before clipping, largest of the mini-steps [1]",
    "train/updates_skipped": "updates not made, because their gradients were not finite (optim.max_skipped) [1]",
    "train/lr": "learning rate of the last mini-step [1]",
    "train/ratio_dev": "mean |r - 1|, r the surrogate's ratio new / old (new / rollout if that is the anchor) [1]",
    "train/clip_high": "trainable slots whose ratio r was clipped from above [share]",
    "train/clip_low": "trainable slots whose ratio r was clipped from below [share]",
    "train/kl": "mean KL estimate to the reference in the loss [nats]",
    "train/value_loss": "loss of the critic, mean over trainable slots [reward^2]",
    "train/value_clipped": "trainable slots whose value was clipped [share]",
    "train/value_explained": "1 - Var(return - value) / Var(return) of the critic; absent if all returns are equal [1]",
    "train/head_mass": "rollout's probability of the recorded likeliest tokens (score centering), mean [share]",
    "train/soft_replaced": "replayed experts that soft replay replaced in the update, mean over micro-batches [share]",
    "train/tokens_per_second": "slots (prompts included) per second of the whole step [tokens/s]",
    **_MISMATCH,
    **_ROUTING,
    **_PER_LAYER,
    **_PER_TURN,
    **_PER_STALENESS,
    "replay/missing_samples": "samples without any route, routed by the trainer (replay.missing = native) [samples]",
    "replay/native_rows": "slots without a route, routed by the trainer [share]",
    "replay/gate_mass": "scores of the replayed experts over those of the trainer's own (modes.gate_mass) [share]",
    "replay/gate_mass@k": "the same in decoder layer k [share]",
    **_REPEAT,
    "correction/slots": "trainable slots before any rejection [slots]",
    "correction/kept": "of these, left in the loss [slots]",
    "correction/denominator": "what the loss is divided by, in effect [slots]",
    "correction/rejected": "trainable slots left out of the loss [share]",
    "correction/rejected/GATE": "trainable slots this gate (or the weight's bounds) rejects on its own [share]",
    "correction/nonfinite": "trainable slots whose rho is not finite, rejected [share]",
    "correction/weighted": "trainable slots kept with a weight other than 1 [share]",
    "correction/clipped": "trainable slots whose weight was moved to a bound [share]",
    "correction/scale": "factor on all weights from normalise = self or denominator = kept [1]",
    "correction/weight_mean": "mean weight, rejected slots as 0: what the correction multiplies the step by [1]",
    "correction/weight_min": "smallest weight of a kept slot [1]",
    "correction/weight_max": "largest weight [1]",
    "correction/weight_ess": "effective sample size of the weights [share]",
    "correction/ratio_mean": "mean rho before any bound [1]",
    "correction/ratio_max": "largest rho before any bound [1]",
    "correction/ratio_ess": "effective sample size of rho before any bound [share]",
    **{
        f"correction/{what}_q{q}": f"{q}% quantile of {text}, log rho within 1% [1]"
        for q in ("01", "50", "99")
        for what, text in (("ratio", "rho before any bound"), ("weight", "the kept slots' weights"))
    },
    "rollout/episodes_failed": "attempts at an episode that a tool or an environment failed [episodes]",
    "rollout/episodes_dropped": "episodes given up after their retries [episodes]",
    "rollout/groups_dropped": "groups left out because too few of their episodes survived [groups]",
    "rollout/grader_timeouts": "responses that the math grader did not read in time, reward 0 [responses]",
    "rollout/grader_skipped": "responses left unread after too many of those in the step, reward 0 [responses]",
    "rollout/groups_played": "groups sampled in the step, refills included (dynamic sampling) [groups]",
    "rollout/groups_kept": "of these, with a signal and trained on [groups]",
    "rollout/refills": "rounds of further problems after the first [rounds]",
    "rollout/requests": "requests to an engine in another process since the last row, syncs included [requests]",
    "rollout/requests_retried": "attempts after the first: lost connections, time-outs, bad replies [attempts]",
    "rollout/requests_dropped": "requests that ended without a usable reply [requests]",
    "rollout/requests_resumed": "completions that a pause interrupted and that went on afterwards [times]",
    "staleness/mean": "updates since the step's tokens were sampled, mean over tokens (asynchronous) [updates]",
    "staleness/max": "the same, of the oldest token [updates]",
    "staleness/tokens": "tokens sampled by older weights than the newest [share]",
    "staleness/tokens@k": "tokens that mismatch/k3_staleness@k is the mean of [tokens]",
    "staleness/spanning": "samples whose tokens were sampled by weights of more than one version [share]",
    "async/learner_busy": "of the step, time in which the learner scored or learned [share]",
    "async/sampler_busy": "of the step, time in which episodes were in play, of whatever step [share]",
    "rollout/replica_restarts": "processes of rollout replicas that died and were started anew [times]",
    "rollout/requests_repeated": "requests that a replica lost in a restart and was asked again [requests]",
    "quant/clipped": "activations beyond the calibrated scale of their layer (rollout.quant, static) [share]",
    "quant/drift_mean": "largest activation of the step over the calibrated one, mean over layers [1]",
    "quant/drift_max": "the same, largest of the layers [1]",
    "time/rollout": "sampling and grading [s]",
    "time/wait": "learner waiting for the step's last episodes (asynchronous) [s]",
    "time/sampler_idle": "of the step, time without an episode in play (asynchronous) [s]",
    "time/reprefill": "recording routes by a second forward over the finished samples [s]",
    "time/score": "scoring forwards of the trainer, and of reference and critic [s]",
    "time/score_saved": "forwards of the update, each of which a scoring forward would have doubled (bypass) [s]",
    "time/counterfactual": "scorings without replay and repeated, of log.counterfactual_every [s]",
    "time/update": "forward, backward and optimiser [s]",
    "time/sync": "trainer weights to the engine [s]",
    "time/step": "the whole step, without evaluation and checkpoint [s]",
    "eval/greedy": "accuracy of one greedy answer per held-out problem [share]",
    "eval/avg@k": "mean accuracy of k sampled answers per held-out problem [share]",
    "eval/pass@k": "held-out problems with at least one right answer among k [share]",
    "eval/response_length": "mean sampled tokens per evaluation episode [tokens]",
    **{
        f"counterfactual/{name}": f"{text}; same batch scored without replay"
        for name, text in _MISMATCH.items()
    },
    **{
        f"counterfactual/{name}": f"{text}; same batch scored without replay"
        for name, text in _ROUTING.items()
    },
    **{
        f"counterfactual/{name}": f"{text}; scored without replay"
        for name, text in (_PER_LAYER | _PER_TURN | _REPEAT).items()
    },
}


def is_known(name: str) -> bool:
    """Whether METRICS says what this is: `eval/avg@4` stands there as `eval/avg@k` (layers alike), a gate as GATE, a
    tool as TOOL."""
    name = re.sub(r"^correction/rejected/.+", "correction/rejected/GATE", name)
    name = re.sub(r"^tools/(?!(malformed|unknown)$).+", "tools/TOOL", name)
    return re.sub(r"@\d+$", "@k", name) in METRICS


class RunLog:
    """Sinks of one run: `with RunLog(folder, tensorboard=True) as log: log.write(step, metrics)`.

    A line reaches its file in one write call, so a killed process leaves at most one half-written last line. To go on
    after a checkpoint call `truncate_after` first; TensorBoard then forgets the recomputed steps as well.
    """

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        self._folder = folder
        self._tensorboard = _summary_writer_class() if tensorboard else None
        rows = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
        self._last_step = int(rows[-1]["step"]) if rows else -1
        self._open = ExitStack()
        self._metrics: FileIO | None = None
        self._samples: FileIO | None = None
        self._writer: SummaryWriter | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opening:  # closes what is open if a later one fails
            self._metrics = opening.enter_context(_open_lines(self._folder / "metrics.jsonl"))
            self._samples = opening.enter_context(_open_lines(self._folder / "samples.jsonl"))
            if self._tensorboard is not None:
                writer = self._tensorboard(
                    str(self._folder / "tensorboard"), purge_step=self._last_step + 1
                )
                self._writer = opening.enter_context(writer)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()
        self._metrics = self._samples = self._writer = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The row of one step; steps only grow. NaN and infinity become null (JSON has neither)."""
        assert self._metrics is not None, "RunLog is used outside its with block"
        assert step > self._last_step, f"step {step} after step {self._last_step}: one row per step"
        unknown = [name for name in metrics if not is_known(name)]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: not in loop.metrics.METRICS; add the name with meaning and unit"
            )
        _append(
            self._metrics, {"step": step} | {name: float(value) for name, value in metrics.items()}
        )
        self._last_step = step
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, float(value), step)

    def sync(self) -> None:
        """What was written is on the disk, also after a loss of power."""
        assert self._metrics is not None, "RunLog is used outside its with block"
        assert self._samples is not None
        for file in (self._metrics, self._samples):
            os.fsync(file.fileno())

    def sample(self, sample: Mapping[str, Any]) -> None:
        """One readable rollout; must carry its `step`, so that `truncate_after` can find it."""
        assert self._samples is not None, "RunLog is used outside its with block"
        assert "step" in sample, "a sample names its step"
        _append(self._samples, dict(sample))


def truncate_after(folder: Path, step: int) -> None:
    """Drop rows and samples of later steps (resume recomputes them) and a half-written last line. Atomic per file."""
    for name, read in ((METRICS_FILE, read_metrics), (SAMPLES, read_samples)):
        path = folder / name
        if not path.exists():
            continue
        kept = [row for row in read(folder) if row["step"] <= step]
        with replace_atomically(path) as temporary:
            temporary.write_bytes(b"".join(_line(row) for row in kept))


def _line(row: Mapping[str, Any]) -> bytes:
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    # a lone surrogate in a decoded response becomes its own JSON escape
    return (
        json.dumps(clean, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
        + b"\n"
    )


def _append(file: FileIO, row: Mapping[str, Any]) -> None:
    line = _line(row)
    written = file.write(line)
    if written != len(line):
        raise OSError(f"{file.name!r}: wrote {written} of {len(line)} bytes; is the disk full?")


def _open_lines(path: Path) -> FileIO:
    file = FileIO(path, "ab+")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.close()
            raise UsageError(
                f"{path}: the last line is half-written; resume the run, which cuts it off"
            )
    return file


def _summary_writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "log.tensorboard: true, but tensorboard is not installed; pip install 'onepolicy[report]' "
            "or set log.tensorboard=false"
        ) from None
    return SummaryWriter
