"""The whole idea in one file: sample, replay the sampler's experts, measure what is left, weight
it, update, sync.

    python examples/loop.py [steps] [model folder]

The sampler runs in bfloat16 and the trainer in float32, so the same weights choose different
experts and give the same tokens different probabilities. Every line prints that gap without replay
and with it. Without a model folder the policy is random, and the reward is the share of the
response that is one wanted letter: RL finds it in a few steps.
"""

import asyncio
import sys

import torch

import onepolicy as op
from onepolicy.config import HFEngineConfig, ModelConfig, ObjectiveConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.models.load import load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_advantages, compute_outcomes
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.tiny.model import make_model
from onepolicy.train.forward import forward
from onepolicy.train.pack import pack
from onepolicy.types import Completion, Group, Sample, Sampling

WANTED, PROMPTS, SIBLINGS, LENGTH = 7, 4, 8, 16


def two_copies(folder: str | None) -> tuple[torch.nn.Module, torch.nn.Module]:
    if folder:
        config, cpu = ModelConfig(path=folder), torch.device("cpu")
        return load_model(config, torch.float32, cpu), load_model(config, torch.bfloat16, cpu)
    trainer = make_model(PolicyConfig(layers=4), 32).eval()
    sampler = make_model(PolicyConfig(layers=4), 32).eval().to(torch.bfloat16)
    return trainer, sampler


def sample_of(prompt: list[int], completion: Completion) -> Sample:
    """Slot t feeds tokens[t] and predicts tokens[t + 1]; the sampler's routes have exactly that
    many rows."""
    response = completion.token_ids
    before, nothing = len(prompt) - 1, torch.full((len(prompt) - 1,), -1, dtype=torch.int32)
    return Sample(
        tokens=torch.cat([torch.tensor(prompt, dtype=torch.int32), response]),
        trainable=torch.cat(
            [torch.zeros(before, dtype=torch.bool), torch.ones(len(response), dtype=torch.bool)]
        ),
        logp_rollout=torch.cat([torch.full((before,), torch.nan), completion.logp]),
        version=torch.cat([nothing, completion.version]),
        turn=torch.cat([nothing, torch.zeros_like(response)]),
        temperature=1.0,
        reward=float((response == WANTED).float().mean()),
        finish=completion.finish,
        routing=completion.routing,
    )


async def rollout(engine: HFEngine, step: int) -> list[Group]:
    prompts = [[3 + p, 4 + step % 8, 5, 6] for p in range(PROMPTS)]
    seeds = range(1000 * step, 1000 * step + SIBLINGS)
    calls = [
        engine.generate(p, Sampling(1.0, LENGTH), seed=100 * s + i)
        for i, p in enumerate(prompts)
        for s in seeds
    ]
    done = await asyncio.gather(*calls)
    samples = [sample_of(prompts[i // SIBLINGS], completion) for i, completion in enumerate(done)]
    return [Group(p, tuple(samples[p * SIBLINGS : (p + 1) * SIBLINGS])) for p in range(PROMPTS)]


async def main(steps: int = 8, folder: str | None = None) -> list[dict[str, float]]:
    trainer, sampler = two_copies(folder)
    prepare_for_training(trainer, torch.device("cpu"))
    routers = op.bind_routers(trainer)  # every MoE router of the trainer's model
    engine = HFEngine(
        sampler, HFEngineConfig(max_num_seqs=PROMPTS * SIBLINGS), return_routes=True, max_len=64
    )
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3, weight_decay=0.0)
    objective, log = ObjectiveConfig(), []
    for step in range(steps):
        await engine.load_weights(trainer.state_dict().items(), version=step)
        batch = pack(compute_outcomes(await rollout(engine, step), objective))
        batch = compute_advantages(batch, objective)

        with torch.no_grad(), routers.record() as tape:  # what the trainer would do by itself
            alone = forward(trainer, batch).logp
        apart = routing_disagreement(tape.trace(), batch.routing)
        off = op.mismatch(alone, batch.logp_rollout, batch.trainable)

        with routers.replay(
            batch.routing
        ):  # R3: the sampler's experts, the trainer's router weights
            logp = forward(trainer, batch).logp
            r3 = op.mismatch(logp.detach(), batch.logp_rollout, batch.trainable)
            applied = op.reweight(
                logp.detach(), batch.logp_rollout, batch.trainable, op.preset("tis")
            )
            loss_weight = loss_weights(batch, objective, max_tokens=LENGTH)
            batch = batch.replace(
                logp_old=logp.detach(),
                weight=applied.weight,
                keep=applied.keep,
                loss_weight=loss_weight,
            )
            loss, _ = policy_loss(logp, batch, config=objective)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        reward = float((batch.target_ids[batch.trainable] == WANTED).float().mean())
        log.append(
            {"reward": reward, "k3": off.k3, "k3 with R3": r3.k3, "routers apart": apart.routers}
        )
        print(
            f"step {step}  " + "  ".join(f"{name} {value:.2g}" for name, value in log[-1].items())
        )
    return log


if __name__ == "__main__":
    asyncio.run(main(*(int(a) if a.isdigit() else a for a in sys.argv[1:])))
