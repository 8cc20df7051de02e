"""A rollout engine for a whole run of verl on a CPU: a bf16 transformers model as a Ray actor.

VERL_USE_EXTERNAL_MODULES imports it in every process. It stands in for vLLM's server and keeps its
contract with verl 0.9: it samples, scores in bf16, returns the routes of all tokens but the last
with a column per decoder layer, and takes the trainer's weights after each step. It writes down
what it was asked and what it answered, so that a test can compute the log's numbers itself.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import ray
import torch
from safetensors.torch import save_file
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "bf16"
RECORD = "BF16_ROLLOUT_RECORD"
"""Environment variable: the folder for the requests and for the weights of each version."""
SPECIAL_TOKENS = 3  # the first ones, which are never sampled: every response has the full length


@dataclass(frozen=True)
class Answer:
    """One request, as the engine answered it."""

    version: int  # of the weights: the number of steps that they have trained
    prompt: list[int]
    response: list[int]
    logp: list[float]
    routes: list  # [prompt + response - 1, decoder layers, K]


def read_answers(folder: Path) -> list[Answer]:
    lines = (folder / "requests.jsonl").read_text().splitlines()
    return [Answer(**json.loads(line)) for line in lines]


class Server:
    """The engine. It decodes without a cache: prompts and responses are some tokens long."""

    def __init__(self, path: str, response_length: int, returns_routes: bool):
        from onepolicy.replay.routers import bind_routers

        torch.set_num_threads(1)
        self._path, self._bind = Path(path), bind_routers
        self._response_length, self._returns_routes = response_length, returns_routes
        self._record = Path(os.environ[RECORD])
        self._asked: Counter[str] = Counter()
        self._version = 0
        self._load(self._path)

    def _load(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not found["missing_keys"], found["missing_keys"]
        assert not found["unexpected_keys"], found["unexpected_keys"]
        self._routers = self._bind(self._model.eval())

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        with torch.no_grad():  # a decorator would hide from Ray that this is a coroutine
            return self._generate(list(prompt_ids))

    def _generate(self, prompt):
        path, random = torch.tensor([prompt]), self._random_of(prompt)
        for _ in range(self._response_length):
            logits = self._model(input_ids=path, use_cache=False).logits[:, -1].float()
            logits[:, :SPECIAL_TOKENS] = -torch.inf
            sampled = torch.multinomial(logits.softmax(-1), 1, generator=random)
            path = torch.cat([path, sampled], 1)
        with self._routers.record() as tape:
            logits = self._model(input_ids=path[:, :-1], use_cache=False).logits.float()
        logp = logits.log_softmax(-1).gather(-1, path[:, 1:, None])[0, len(prompt) - 1 :, 0]
        response, routes = path[0, len(prompt) :].tolist(), self._payload(tape.trace())
        self._note(Answer(self._version, prompt, response, logp.tolist(), routes.tolist()))
        payload = None
        if self._returns_routes:
            payload = routes.numpy()
        return TokenOutput(
            token_ids=response,
            log_probs=logp.tolist(),
            routed_experts=payload,
            stop_reason="completed",
            extra_fields={"global_steps": self._version},
        )

    def _random_of(self, prompt):
        """Return the random numbers of a request: the same in every run, in whatever order."""
        request = f"{self._version} {prompt}"
        self._asked[request] += 1
        return torch.Generator().manual_seed(crc32(f"{request} {self._asked[request]}".encode()))

    def _payload(self, trace):
        """Return the routes as vLLM does: a column per decoder layer, zeros for dense ones."""
        shape = len(trace), self._routers.depth, self._routers.top_k
        routes = torch.zeros(shape, dtype=torch.int32)
        routes[:, list(self._routers.layers)] = trace.ids.int()
        return routes

    def _note(self, answer):
        with (self._record / "requests.jsonl").open("a") as file:
            print(json.dumps(answer.__dict__), file=file)

    async def update_weights(self, weights, version):
        folder = self._record / f"weights_{version}"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(self._path / "config.json", folder)
        self._load(folder)
        self._version = version

    async def nothing(self, *args, **kwargs):
        return None

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class Replica(RolloutReplica):
    async def launch_servers(self):
        server = ray.remote(num_cpus=1)(Server).options(name=f"{NAME}_{self.replica_rank}")
        self._server_handle = server.remote(
            self.model_config.path,
            self.config.response_length,
            self.config.enable_rollout_routing_replay,
        )
        self._server_address = f"127.0.0.1:{self.replica_rank}"
        self.servers = [self._server_handle]


class Adapter(BaseRollout):
    """The side of the engine that lives in the trainer's worker."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        state = {name: value.detach().cpu().clone() for name, value in weights}
        await ray.get_actor(f"{NAME}_0").update_weights.remote(state, global_steps)


_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.Adapter"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
importlib.import_module("support.verl.platform")
