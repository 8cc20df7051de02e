"""A vLLM 0.30 server in miniature: its endpoints, its replies, and its habits (a request that
reaches it while it is paused waits). It is strict about its requests. The policy is a table of
logits, read from the given safetensors."""

import asyncio
import base64
import io
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import ModelConfig, TrainingError, VLLMServerConfig
from onepolicy.models.checksum import ChecksumAccumulator, describe_difference
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.remote.engine import RemoteEngine
from onepolicy.rollout.vllm.worker import model_shape
from onepolicy.sync.broadcast import Receiver
from onepolicy.sync.weight_files import read_weights
from onepolicy.types import Sampling
from support.http_server import Reply, Request, Server
from support.waiting import LIMIT_S, until

LAYERS, EXPERTS, TOP_K, VOCAB = 3, 16, 4, 32
SENT = {
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop_token_ids", "ignore_eos"),
    "seed",
    *("logprobs", "detokenize", "routed_experts_prompt_start"),
}
HF = Qwen3MoeConfig(
    **{"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": LAYERS},
    **{"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"max_position_embeddings": 96, "initializer_range": 0.7},
)
RULES = RouteSpec(tuple(range(LAYERS)), EXPERTS, TOP_K, "error")
TABLE = "model.embed_tokens.weight"
GENERATE = "/inference/v1/generate"
ANSWERED = {
    **{"onepolicy_load_files": "_take_files", "onepolicy_receive": "_receive"},
    **{"onepolicy_receive_adapter": "_receive_adapter", "onepolicy_read_adapter": "_read_adapter"},
}
"""Calls of the workers -> method whose result they return."""


def make_checkpoints(base):
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(HF)
        model.save_pretrained(base / str(seed))
        made.append((str(base / str(seed)), model))
    return made


@contextmanager
def serving(checkpoints):
    fake = FakeVLLM(checkpoints[0][0], model_shape(HF))
    with fake.server:
        yield fake


def engine_of(fake, quant=None, lora=None, **settings):
    usual = {"url": fake.server.url, "dtype": "float32", "retries": 2, "timeout_s": LIMIT_S}
    model, config = ModelConfig(path=fake.model), VLLMServerConfig(**usual | settings)
    more = {"route_spec": RULES, "max_len": 96, "quant": quant, "lora": lora}
    return RemoteEngine(model, HF, config, **more)


def connected(fake, **settings):
    engine = engine_of(fake, **settings)
    with engine.client.startup_errors():
        asyncio.run(engine.connect())
    engine.take_metrics()
    return engine


def one(engine, prompt=(3, 4, 5), **sampling):
    """Return the completion of one request."""
    sampling = Sampling(**{"temperature": 1.0, "max_tokens": 6} | sampling)
    return asyncio.run(engine.generate(list(prompt), sampling, seed=7))


def embedding(path: str) -> np.ndarray:
    for file in Path(path).glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name == TABLE:
                return tensor
    raise FileNotFoundError(path)


@dataclass
class FakeVLLM:
    model: str  # folder
    shape: dict
    told: dict = field(default_factory=dict)  # of onepolicy_describe, instead of the truth
    hold: int | None = None  # with so many tokens a request waits for the next abort or pause
    spoil: dict = field(default_factory=dict)  # path -> (reply, number of the request) -> reply
    cut_off: bool = False  # it cannot connect to the trainer
    raw: bool = False  # log-probabilities before temperature and top_k
    masks: bool = False  # it was started with --enable-return-sampling-mask

    def __post_init__(self):
        self.weights, self.probe = "default", None
        self._load(self.model)
        self.paused, self.aborts, self.sampled = threading.Event(), 0, 0
        self._numbers = {}
        self.folders, self.adapters, self.full_syncs = {}, {}, 0
        handlers = {
            "GET /version": lambda r: {"version": "0.30.0"},
            "GET /weight_info": lambda r: {"weight_version": self.weights},
            "GET /v1/models": self._models,
            "POST /reset_prefix_cache": lambda r: {"success": True},
            **{"POST /update_weight_version": self._stamp, "POST /collective_rpc": self._rpc},
            **{"POST /pause": self._pause, "POST /resume": self._resume},
            **{"POST /abort_requests": self._abort, f"POST {GENERATE}": self._generate},
            "POST /v1/load_lora_adapter": self._load_adapter,
            "POST /v1/unload_lora_adapter": self._unload_adapter,
        }
        self.server = Server({path: self._spoiled(path, of) for path, of in handlers.items()})

    async def sampling(self, count):
        """Wait until `count` tokens were sampled."""
        await until(lambda: self.sampled >= count)

    def _spoiled(self, path, handler):
        def answer(request):
            number = self._numbers[path] = self._numbers.get(path, -1) + 1
            spoil = self.spoil.get(path.split()[1])
            reply = handler(request)
            return reply if spoil is None else spoil(reply, number)

        return answer

    def _stamp(self, request: Request):
        self.weights = request.body["new_version"]
        return {"success": True, "new_version": self.weights}

    def _pause(self, request: Request):
        if request.params != {"mode": "abort"}:
            return Reply({"error": "mode"}, 400)
        self.aborts += 1
        self.hold = None
        self.paused.set()
        return {"status": "paused"}

    def _resume(self, request: Request):
        self.paused.clear()
        return {"status": "resumed"}

    def _abort(self, request: Request):
        self.aborts += 1
        return {"status": "aborted", "aborted": 0}

    def _rpc(self, request: Request):
        name, args = request.body["method"], request.body.get("args", [])
        if name == "onepolicy_describe":
            truth = {
                **{"shape": self.shape, "model": self.model, "device": "cpu", "max_len": 96},
                **{"dtype": "float32", "head_dtypes": ["torch.float32"], "quantization": None},
                **{"max_logprobs": VOCAB, "logprobs_mode": "processed_logprobs", "routes": True},
                **{"held": [], "adapters": None, "initial_canary": self.probe},
                "deployment": {"version": [0, 30], "platform": "cpu"},
            }
            return {"results": [truth | self.told]}
        if name == "onepolicy_remember":
            (self.probe,) = args
        elif name == "onepolicy_load":
            self._load(args[0] if args else self.model)
        elif name in ANSWERED:
            return {"results": [getattr(self, ANSWERED[name])(*args)]}
        else:
            return Reply({"error": {"message": f"no attribute {name!r}"}}, 500)
        return {"results": [None]}

    def _take_files(self, folder, sent):
        checksums = ChecksumAccumulator()
        self._take(checksums.add_each(read_weights(folder)))
        return {"difference": describe_difference(sent, checksums.pop_all())}

    def _receive(self, invitation, version):
        if self.cut_off:
            return {"problem": "weight sync: cannot join the sender of the weights at 10.0.0.1:2"}
        try:
            with Receiver(invitation, 1, version=version) as weights:
                self._take(weights)
        except TrainingError as error:
            return {"problem": str(error)}
        return {"problem": None}

    def _receive_adapter(self, invitation, version, settings):
        try:
            with Receiver(invitation, 1, version=version) as tensors:
                return {"problem": None, "folder": self._write_adapter(dict(tensors), settings)}
        except TrainingError as error:
            return {"problem": str(error), "folder": None}

    def _read_adapter(self, folder, sent, settings):
        checksums = ChecksumAccumulator()
        read = dict(checksums.add_each(read_weights(folder)))
        difference = describe_difference(sent, checksums.pop_all())
        return {"difference": difference, "folder": self._write_adapter(read, settings)}

    def _write_adapter(self, tensors, settings):
        folder = f"/adapters/{len(self.folders)}"
        self.folders[folder] = tensors, json.loads(settings)
        return folder

    def _models(self, request: Request):
        adapters = [{"id": name, "parent": self.model} for name in self.adapters]
        return {"data": [{"id": self.model, "parent": None}, *adapters]}

    def _load_adapter(self, request: Request):
        name, folder = request.body["lora_name"], request.body["lora_path"]
        if name in self.adapters:
            return Reply({"error": {"message": f"{name!r} has already been loaded"}}, 400)
        self.adapters[name] = sum(float(t.sum()) for t in self.folders[folder][0].values())
        return "Success"

    def _unload_adapter(self, request: Request):
        if self.adapters.pop(request.body["lora_name"], None) is None:
            return Reply({"error": {"message": "cannot be found"}}, 404)
        return "Success"

    def _load(self, folder):
        self.table = embedding(folder)

    def logits(self, path):
        """Return the logits [VOCAB] after a path."""
        return self.table[path[-1]] @ self.table.T

    def rows(self, path):
        return routes_of(path)

    def _take(self, weights):
        self.full_syncs += 1
        for name, tensor in weights:
            if name == TABLE:
                self.table = tensor.numpy()

    def _generate(self, request: Request):
        prompt, sampling = request.body["token_ids"], request.body["sampling_params"]
        known = set(request.body) - {"model"} == {"token_ids", "sampling_params"}
        if not known or set(sampling) != SENT:
            return Reply({"error": f"unknown fields {sorted(set(sampling) ^ SENT)}"}, 400)
        model = request.body.get("model", self.model)
        if model not in (self.model, *self.adapters):
            return Reply({"error": {"message": f"The model {model} does not exist."}}, 404)
        bias = self.adapters.get(model, 0.0)
        aborts = self.aborts
        while self.paused.is_set() and aborts == self.aborts:  # held back
            time.sleep(0.001)
        random = np.random.default_rng(sampling["seed"])
        tokens, content, finish = [], [], None
        while finish is None:
            while len(tokens) == self.hold and aborts == self.aborts and not request.gone():
                time.sleep(0.001)
            if aborts != self.aborts or request.gone():
                finish = "abort"
                break
            token, entry = self._sample([*prompt, *tokens], sampling, random, bias)
            self.sampled += 1
            tokens.append(token)
            content.append(entry)
            if token in sampling["stop_token_ids"]:
                finish = "stop"
            elif len(tokens) == sampling["max_tokens"]:
                finish = "length"
        first = sampling["routed_experts_prompt_start"]
        rows = self.rows([*prompt, *tokens])[first:-1]
        choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": finish}
        choice |= {"token_ids": tokens, "routed_experts": npy(rows) if tokens else None}
        if self.masks and finish != "abort":
            sampled = enumerate(tokens)
            choice["sampling_mask"] = [
                self._kept([*prompt, *tokens[:i]], sampling, bias) for i, _ in sampled
            ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
        return {"model": model, "choices": [choice], "usage": usage}

    def _kept(self, path, sampling, bias):
        """Return the ids that are left, ascending."""
        _, tempered = self._distributions(path, sampling, bias)
        return np.flatnonzero(np.isfinite(tempered)).tolist()

    def _distributions(self, path, sampling, bias):
        """Return the model's log-probabilities, and logits after temperature, min_p and top_k."""
        logits = self.logits(path).astype(np.float64)
        logits[0] += bias
        raw = logits - np.log(np.exp(logits).sum())
        tempered = logits / (sampling["temperature"] or 1.0)
        if sampling["min_p"]:
            tempered[tempered < tempered.max() + np.log(sampling["min_p"])] = -np.inf
        if sampling["top_k"]:
            tempered[tempered < np.sort(tempered)[-sampling["top_k"]]] = -np.inf
        return raw, tempered

    def _sample(self, path, sampling, random, bias=0.0):
        """Sample one token. bias: of token 0, which is all that an adapter changes."""
        raw, tempered = self._distributions(path, sampling, bias)
        logp = tempered - np.log(np.exp(tempered).sum())
        token = int(logp.argmax())
        if sampling["temperature"]:
            token = int(random.choice(VOCAB, p=np.exp(logp)))
        told = raw if self.raw else logp
        order = [token, *(int(i) for i in np.argsort(-told, kind="stable") if i != token)]
        entries = [
            {"token": f"token_id:{i}", "logprob": max(float(np.float32(told[i])), -9999.0)}
            for i in order[: max(sampling["logprobs"], 1)]
        ]
        return token, entries[0] | {"top_logprobs": entries}


def routes_of(tokens):
    """Return [N, LAYERS, TOP_K] uint8: distinct experts that follow from a token and the layer."""
    base = np.array(tokens)[:, None, None] * 3 + np.arange(LAYERS)[:, None] + 1
    return ((base + np.arange(TOP_K) * 5) % EXPERTS).astype(np.uint8)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=array.dtype == object)
    return base64.b64encode(buffer.getvalue()).decode()


def aborted_at_once(reply, number=0):
    """Return the reply of a server that shuts down before it has sampled a token."""
    empty = {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "abort"}
    usage = reply["usage"] | {"completion_tokens": 0}
    return edited(reply, **empty, routed_experts=None) | {"usage": usage}


def edited(reply, **fields):
    """Return the reply with these fields of its choice replaced (None: left out)."""
    reply = json.loads(json.dumps(reply))
    choice = reply["choices"][0] | fields
    reply["choices"][0] = {name: value for name, value in choice.items() if value is not None}
    return reply
