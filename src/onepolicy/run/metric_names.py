"""The metrics of a run: the name, meaning and unit of every column of metrics.jsonl.

A metric is `area/quantity`. `RunLog.write` refuses a name that is not in METRICS, so a reader can
look up every column. One row is one training step: its producer has reduced it over micro-batches.
"""

from __future__ import annotations

import re

# rho = pi_trainer / pi_rollout of the sampled token; means are over the step's trainable slots.
_MISMATCH = {
    "mismatch/k1": (
        "mean of -log rho: unbiased estimate of KL(rollout || trainer), may be negative [nats]"
    ),
    "mismatch/k3": "mean of rho - 1 - log rho: estimate of the same KL, never negative [nats]",
    "mismatch/f1.25": "tokens with max(rho, 1/rho) > 1.25 [share]",
    "mismatch/f2": "tokens with max(rho, 1/rho) > 2 [share]",
    "mismatch/f5": "tokens with max(rho, 1/rho) > 5 [share]",
    "mismatch/chi2": "mean of rho^2 - 1: chi-square divergence [1]",
    "mismatch/ess": "(sum rho)^2 / (n sum rho^2): effective sample size [share]",
    "mismatch/differing": "tokens whose two log-probabilities are not the same number [tokens]",
    "mismatch/max_dp": "largest |p_trainer - p_rollout| [probability]",
    "mismatch/mean_dp": "mean |p_trainer - p_rollout| [probability]",
    "mismatch/max_dlogp": "largest |log rho| [nats]",
    "mismatch/mean_dlogp": "mean |log rho| [nats]",
    "mismatch/pearson": "correlation of p_trainer with p_rollout [1]",
    "mismatch/ppl_ratio": (
        "perplexity of the trainer divided by that of the rollout engine, mean over samples [1]"
    ),
}
_ROUTING = {
    "routing/routers": (
        "routers (token, MoE layer) whose experts differ between rollout and trainer [share]"
    ),
    "routing/tokens": "tokens with at least one such router [share]",
    "routing/sequence": (
        "differing routers per token, mean over each sequence, then over sequences [layers]"
    ),
}
_PER_LAYER = {
    "routing/layer@k": (
        "tokens whose experts in decoder layer k differ between rollout and trainer [share]"
    ),
}
# Two scorings of the same samples with the same weights, packed in opposite orders (R3 paper,
# section 3.3).
_REPEAT = {
    "repeat/k3": "k3 between the two scorings [nats]",
    "repeat/max_dlogp": "largest |log ratio| of the two scorings [nats]",
    "repeat/routers": "routers whose own choice differs between the two scorings [share]",
}
_PER_TURN = {
    "mismatch/k3_turn@k": (
        "k3 of the tokens of model turn k, from 0; from k = 8 on, of turns k to 2k - 1 [nats]"
    ),
}
_PER_STALENESS = {
    "mismatch/k3_staleness@k": (
        "k3 of the tokens sampled k updates ago; from k = 8 on, k to 2k - 1 updates ago [nats]"
    ),
}
_TRAIN = {
    "train/reward": "mean reward of the step's rollouts [reward]",
    "train/reward_min": "smallest reward of the step's rollouts [reward]",
    "train/reward_max": "largest reward of the step's rollouts [reward]",
    "train/response_length": "mean number of sampled tokens per episode [tokens]",
    "train/cut_by_length": "episodes that reached the length limit [share]",
    "train/turns": "mean number of model turns per episode, if there are several [turns]",
    "train/tokens_turn@k": "number of tokens in mismatch/k3_turn@k [tokens]",
    "tools/TOOL": "calls of this tool per episode; TOOL_error: calls with an error reply [calls]",
    "tools/unknown": (
        "tool replies with characters that became the unknown token, per episode [replies]"
    ),
    "tools/malformed": (
        "turns without a tool call and an answer, or with an unknown tool, per episode [turns]"
    ),
    "train/groups_without_signal": (
        "groups with equal rewards, up to rounding: every advantage is 0 [share]"
    ),
    "train/entropy": "mean entropy of the trainer's distribution on trainable slots [nats]",
    "train/loss": "value of the objective, mean over minibatches, weighted by their slots [1]",
    "train/grad_norm": "gradient norm before clipping, largest of the minibatches [1]",
    "train/halved_gradient": (
        "part of the tokens with p_trainer < p_rollout / 2 in the gradient, the sum of |advantage| "
        "(1 - p_trainer) weight over kept tokens [share]"
    ),
    "train/updates_skipped": (
        "updates skipped because their gradients were not finite (optim.max_skipped) [1]"
    ),
    "train/lr": "learning rate of the last minibatch [1]",
    "train/ratio_dev": (
        "mean |r - 1| of the surrogate's ratio r = new / behaviour policy (old, or rollout) [1]"
    ),
    "train/clip_high": "trainable slots whose ratio r was clipped from above [share]",
    "train/clip_low": "trainable slots whose ratio r was clipped from below [share]",
    "train/kl": "mean KL estimate to the reference in the loss [nats]",
    "train/value_loss": "loss of the critic, mean over trainable slots [reward^2]",
    "train/value_clipped": "trainable slots whose value was clipped [share]",
    "train/value_explained": (
        "1 - Var(return - value) / Var(return) of the critic; absent if all returns are equal [1]"
    ),
    "train/head_mass": (
        "mean rollout probability of the recorded likeliest tokens (score centering) [share]"
    ),
    "train/soft_replaced": (
        "replayed experts that soft replay replaced in the update, mean over micro-batches [share]"
    ),
    "train/tokens_per_second": "slots, prompts included, per second of the whole step [tokens/s]",
}
_REPLAY = {
    "replay/missing_samples": (
        "samples without any route, routed by the trainer (replay.missing = native) [samples]"
    ),
    "replay/native_rows": "slots without a route, routed by the trainer [share]",
    "replay/gate_mass": (
        "scores of the replayed experts divided by those of the trainer's own choice [share]"
    ),
    "replay/gate_mass@k": "the same in decoder layer k [share]",
}
_CORRECTION = {
    "correction/slots": "trainable slots before any rejection [slots]",
    "correction/kept": "trainable slots left in the loss [slots]",
    "correction/denominator": "effective denominator of the loss [slots]",
    "correction/rejected": "trainable slots left out of the loss [share]",
    "correction/rejected/GATE": (
        "trainable slots that this gate, or the weight's bounds, rejects on its own [share]"
    ),
    "correction/nonfinite": "trainable slots that are rejected because rho is not finite [share]",
    "correction/weighted": "trainable slots kept with a weight other than 1 [share]",
    "correction/clipped": "trainable slots whose weight was clipped to a bound [share]",
    "correction/scale": ("factor on all weights because of normalise or denominator = kept [1]"),
    "correction/weight_mean": "mean weight, with 0 for rejected slots [1]",
    "correction/weight_min": "smallest weight of a kept slot [1]",
    "correction/weight_max": "largest weight [1]",
    "correction/weight_ess": "effective sample size of the weights [share]",
    "correction/ratio_mean": "mean rho before any bound [1]",
    "correction/ratio_max": "largest rho before any bound [1]",
    "correction/ratio_ess": "effective sample size of rho before any bound [share]",
    "correction/ratio_q01": "1% quantile of rho before any bound, log rho within 1% [1]",
    "correction/weight_q01": "1% quantile of the kept slots' weights, log rho within 1% [1]",
    "correction/ratio_q50": "median of rho before any bound, log rho within 1% [1]",
    "correction/weight_q50": "median of the kept slots' weights, log rho within 1% [1]",
    "correction/ratio_q99": "99% quantile of rho before any bound, log rho within 1% [1]",
    "correction/weight_q99": "99% quantile of the kept slots' weights, log rho within 1% [1]",
}
_ROLLOUT = {
    "rollout/episodes_failed": (
        "attempts at an episode that failed in a tool or environment [episodes]"
    ),
    "rollout/episodes_dropped": "episodes dropped after their retries [episodes]",
    "rollout/groups_dropped": "groups dropped because too few of their episodes are left [groups]",
    "rollout/grader_timeouts": (
        "responses that the math grader did not read in time, with reward 0 [responses]"
    ),
    "rollout/grader_skipped": (
        "responses not read after too many time-outs in the step, with reward 0 [responses]"
    ),
    "rollout/groups_played": "groups sampled in the step, with refills (dynamic sampling) [groups]",
    "rollout/groups_kept": "groups with a signal, which are trained on [groups]",
    "rollout/refills": "rounds of further problems after the first round [rounds]",
    "rollout/requests": (
        "requests to an engine in another process since the last row, with syncs [requests]"
    ),
    "rollout/requests_retried": (
        "attempts after the first: lost connections, time-outs, bad replies [attempts]"
    ),
    "rollout/requests_dropped": "requests that ended without a usable reply [requests]",
    "rollout/servers": "servers that sample, of those in rollout.engine.url [servers]",
    "rollout/requests_resumed": "completions that continued after a pause [times]",
    "rollout/replica_restarts": "restarts of rollout replicas whose process died [times]",
    "rollout/requests_repeated": "requests of a lost replica or server, repeated [requests]",
    "quant/clipped": (
        "activations beyond the calibrated scale of their layer (rollout.quant, static) [share]"
    ),
    "quant/drift_mean": (
        "largest activation of the step divided by the calibrated one, mean over layers [1]"
    ),
    "quant/drift_max": "the same, largest of the layers [1]",
}
_ADAPTER = {  # of the fixed batch after every sync (train.lora)
    "adapter/delivered": "part of the adapter's effect that the engine has; 1 is right [share]",
    "adapter/effect": "how far the adapter moves the trainer's log-probabilities, rms [nats]",
    "adapter/gap": "how far the engine's have moved otherwise, rms [nats]",
    "adapter/merge_loss": "what a merge into the engine's dtype changes of that effect [nats]",
}
_ASYNCHRONOUS = {
    "staleness/mean": (
        "updates since the step's tokens were sampled, mean over tokens (asynchronous) [updates]"
    ),
    "staleness/max": "the same of the oldest token [updates]",
    "staleness/tokens": "tokens sampled by older weights than the newest [share]",
    "staleness/tokens@k": "number of tokens in mismatch/k3_staleness@k [tokens]",
    "staleness/spanning": "samples with tokens from weights of more than one version [share]",
    "async/learner_busy": "time of the step in which the learner scored or trained [share]",
    "async/sampler_busy": "time of the step in which episodes of any step were played [share]",
}
_TIME = {
    "time/rollout": "sampling and grading [s]",
    "time/wait": "learner waiting for the step's last episodes (asynchronous) [s]",
    "time/sampler_idle": "time of the step without an episode being played (asynchronous) [s]",
    "time/reprefill": "recording of routes by a second forward over the finished samples [s]",
    "time/score": "scoring forwards of the trainer, the reference and the critic [s]",
    "time/score_saved": "forwards of the update that replace a scoring forward (bypass) [s]",
    "time/counterfactual": (
        "scorings without replay and repeated scorings (log.counterfactual_every) [s]"
    ),
    "time/update": "forward, backward and optimiser [s]",
    "time/sync": "push of the trainer's weights to the engine [s]",
    "sync/gib": "tensors that one engine was given, in the dtype that it takes [GiB]",
    "time/step": "the whole step, without evaluation and checkpoint [s]",
}
_EVAL = {
    "eval/greedy": "accuracy of one greedy answer per held-out problem [share]",
    "eval/avg@k": "mean accuracy of k sampled answers per held-out problem [share]",
    "eval/pass@k": "held-out problems with at least one right answer among k [share]",
    "eval/response_length": "mean number of sampled tokens per evaluation episode [tokens]",
}
_COUNTERFACTUAL = {
    f"counterfactual/{name}": f"{text}; same batch scored without replay"
    for name, text in (_MISMATCH | _ROUTING | _PER_LAYER | _PER_TURN | _REPEAT).items()
}
METRICS: dict[str, str] = {
    **_TRAIN,
    **_MISMATCH,
    **_ROUTING,
    **_PER_LAYER,
    **_PER_TURN,
    **_PER_STALENESS,
    **_REPLAY,
    **_REPEAT,
    **_CORRECTION,
    **_ROLLOUT,
    **_ADAPTER,
    **_ASYNCHRONOUS,
    **_TIME,
    **_EVAL,
    **_COUNTERFACTUAL,
}
"""Name -> meaning and [unit]."""


def is_known(name: str) -> bool:
    """Return whether METRICS has this name.

    METRICS lists `eval/avg@4` as `eval/avg@k` (layers and turns alike), a gate as GATE, and a tool
    as TOOL.
    """
    name = re.sub(r"^correction/rejected/.+", "correction/rejected/GATE", name)
    name = re.sub(r"^tools/(?!(malformed|unknown)$).+", "tools/TOOL", name)
    return re.sub(r"@\d+$", "@k", name) in METRICS
