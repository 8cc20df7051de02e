"""One RL step on the emulated device, which must be imported before onepolicy.

python -c "import support.emulated_device, support.emulated_run as run; run.main('qwen3_moe')"
"""

import asyncio
import json

import torch

from onepolicy.config import HFEngineConfig, resolve
from onepolicy.correct.weights import reweight
from onepolicy.invariant import fingerprint
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_advantages, compute_outcomes
from onepolicy.replay.checks import RouteSpec, check_completion, is_moe
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.sync.push import push_weights
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Completion, Group, Sample, Sampling

from support.emulated_device import DEVICE, READS, move_model  # isort: skip - it changes torch


from support.engine_runs import prompts, run
from support.learner_steps import BASE
from support.models import make

MAX_TOKENS = 12


def sample_of(prompt: list[int], done: Completion, reward: float) -> Sample:
    """Return the episode of one prompt and its completion."""
    tokens = torch.tensor([*prompt, *done.token_ids.tolist()], dtype=torch.int32)
    slots = len(tokens) - 1
    trainable = torch.arange(slots) >= len(prompt) - 1
    logp = torch.full((slots,), torch.nan)
    version, turn = (torch.full((slots,), -1, dtype=torch.int32) for _ in range(2))
    logp[trainable], version[trainable], turn[trainable] = done.logp, done.version, 0
    return Sample(
        tokens=tokens,
        trainable=trainable,
        logp_rollout=logp,
        version=version,
        turn=turn,
        temperature=1.0,
        reward=reward,
        finish=done.finish,
        routing=done.routing,
    )


def build_engine(family: str) -> HFEngine:
    config = HFEngineConfig(dtype="float32", max_num_seqs=4)
    model = move_model(make(family))
    return HFEngine(model, config, return_routes=is_moe(model.config), max_len=64)


def build_learner(family: str) -> LocalLearner:
    model = move_model(make(family))
    prepare_for_training(model, DEVICE)
    routers, mode = None, "off"
    if is_moe(model.config):
        routers, mode = bind_routers(model), "r3"
    config = resolve(BASE, [f"replay.mode={mode}"])
    return LocalLearner(PolicyScorer(model, config, routers=routers))


def sample(engine: HFEngine) -> tuple[list[Group], dict[str, int]]:
    """Play four requests. Return them as groups, and the engine's host reads."""
    paths = prompts(2, 5, 9) * 2
    sampling = Sampling(1.0, MAX_TOKENS, stop=(1,))
    requests = [(path, sampling, seed) for seed, path in enumerate(paths)]
    READS.pop_all()
    done = run(engine, requests)
    reads = READS.pop_all()
    routers = engine.batch.forward.routers
    if routers is not None:
        spec = RouteSpec(routers.layers, routers.num_experts, routers.top_k, "error")
        for path, completion in zip(paths, done, strict=True):
            check_completion(completion, path, spec, "emulated")
    samples = [
        sample_of(p, d, float(i // 2)) for i, (p, d) in enumerate(zip(paths, done, strict=True))
    ]
    return [Group(0, tuple(samples[::2])), Group(1, tuple(samples[1::2]))], reads


def train(learner: LocalLearner, groups: list[Group]) -> tuple[float, float, dict[str, int]]:
    """Train on the groups. Return the largest mismatch, the gradient's norm, and host reads."""
    config = learner.config
    batch = pack(compute_outcomes(groups, config.objective, max_tokens=MAX_TOKENS))
    READS.pop_all()
    scored = learner.score(batch)
    gap = (scored.logp_old - batch.logp_rollout)[batch.trainable].abs().max()
    scored = compute_advantages(scored, config.objective)
    corrected = reweight(
        scored.logp_old,
        scored.logp_rollout,
        scored.trainable,
        config.correction.fixed_part,
        segment=scored.segment,
        turn=scored.turn,
        advantage=scored.advantage,
    )
    metrics, _ = learner.step(scored.replace(weight=corrected.weight, keep=corrected.keep))
    return float(gap), metrics["train/grad_norm"], READS.pop_all()


def main(family: str) -> None:
    """Sample, score, train and push once, and print what was measured as JSON."""
    torch.set_num_threads(1)
    fingerprint._gpu = lambda device: {"device": str(device)}
    engine, learner = build_engine(family), build_learner(family)
    groups, engine_reads = sample(engine)
    gap, norm, learner_reads = train(learner, groups)
    asyncio.run(push_weights(learner, engine))
    again, _ = sample(engine)
    before, after = (float(each[0].samples[0].logp_rollout.nansum()) for each in (groups, again))
    found = {
        "gap": gap,
        "grad_norm": norm,
        "version": engine.version,
        "engine_reads": engine_reads,
        "learner_reads": learner_reads,
        "moved": before != after,
    }
    print(json.dumps(found))
