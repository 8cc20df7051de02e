"""An engine with a planted fault, and the settings of short measurements."""

import dataclasses

import torch

SETTINGS = [
    "task.kind=chain",
    "task.ops=2",
    "rollout.sampling.max_tokens=20",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.engine.max_num_seqs=32",
    "train.threads=1",
]


class Planted:
    """An engine with a planted fault."""

    def __init__(self, engine, *, late=0, shift=0, crowded=0.0, below=0.0, routers=0.0, **sampling):
        """Plant the fault. late: rows by which its routes are late; shift: slots by which its
        log-probabilities are shifted; crowded: noise on them while it serves several requests;
        below: noise that only ever lowers them; routers: noise on the input of its routers;
        sampling: its sampling parameters."""
        self.engine, self.caps, self.running = engine, engine.caps, 0
        self.late, self.shift, self.crowded, self.below = late, shift, crowded, below
        self.sampling = sampling
        if routers:
            for name, module in engine.model.named_modules():
                if name.endswith("mlp.gate"):
                    module.register_forward_pre_hook(
                        lambda _, args: (args[0] + routers * args[0].roll(1, -1),)
                    )

    @property
    def version(self):
        return self.engine.version

    async def generate(self, prompt_ids, sampling, *, seed):
        self.running += 1
        crowd = self.running > 1
        sampling = dataclasses.replace(sampling, **self.sampling)
        found = await self.engine.generate(prompt_ids, sampling, seed=seed)
        self.running -= 1
        drawn = torch.randn(len(found.logp), generator=torch.Generator().manual_seed(seed % 2**40))
        noise = (self.crowded * drawn).exp() if crowd else 1
        logp = found.logp.roll(self.shift) * noise - self.below * drawn.abs()
        ids = found.routing.ids.roll(self.late, 0)
        routing = dataclasses.replace(found.routing, ids=ids, spans=())
        return dataclasses.replace(found, logp=logp, routing=routing)

    async def load_weights(self, weights, version):
        await self.engine.load_weights(weights, version)

    async def reset_cache(self):
        await self.engine.reset_cache()
