"""A server in this process that keeps SGLang 0.5.23's contract and is stricter: it refuses unknown
fields.

Its model is a bigram, so that weights matter. Its routes follow from token and weights. It joins
broadcasts for real.
"""

import base64
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from support.fake_sglang_adapters import Adapters
from support.fake_sglang_updates import Refused, Updates, fields
from support.http_server import Reply, Server
from support.waiting import LIMIT_S

LAYERS, DENSE, EXPERTS, TOP_K, VOCAB = 3, 1, 8, 2, 32  # the first layer is dense
SERVER_INFO = {
    **{"device": "cpu", "version": "0.5.23", "dtype": "float32", "quantization": None},
    **{"max_req_input_len": 250, "tp_size": 1, "pp_size": 1, "dp_size": 1},
    **{"enable_return_routed_experts": True, "enable_deterministic_inference": False},
    **{"enable_hierarchical_cache": False, "disaggregation_mode": "null"},
    **{"speculative_algorithm": None, "sampling_mask_max_tokens": 4096, "enable_lora": None},
    **{"max_lora_rank": None, "lora_target_modules": None},
}
GENERATE = {
    *("input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("return_sampling_mask", "extra_key", "lora_path", "return_routed_experts"),
    "routed_experts_start_len",
}
SAMPLING = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos"),
    "sampling_seed",
}


@dataclass
class FakeSGLang(Updates, Adapters):
    folder: str  # checkpoint it starts with
    eos: int = 1
    info: dict = field(default_factory=dict)  # replaces what /server_info says
    tempered: bool = True
    hold: int | None = None  # one request waits for a pause or new weights after this many tokens
    damage: object = None  # what is made of a good reply: (reply dict) -> reply

    def __enter__(self):
        loaded = load_file(f"{self.folder}/model.safetensors")
        # aligned: sums round alike
        self.weights = {name: tensor.clone() for name, tensor in loaded.items()}
        self.version, self.mode, self.session, self.groups = "default", None, False, {}
        self.aborted, self.running, self.updates, self.held = 0, 0, 0, False
        self.most, self.wrong = 0, 0.0  # requests at once; what is added to every tensor it loads
        self.cache: set = set()
        self.change = threading.Condition()
        self.start_adapters()
        posts = {
            **{"/generate": self.generate, "/flush_cache": self.flush},
            **{"/pause_generation": self.pause, "/continue_generation": self.resume},
            **{"/update_weight_version": self.rename, "/update_weights_from_disk": self.from_disk},
            **{"/init_weights_update_group": self.join, "/begin_weight_update": self.begin},
            "/update_weights_from_distributed": self.from_broadcast,
            **{"/end_weight_update": self.end, "/destroy_weights_update_group": self.leave},
            **{
                "/load_lora_adapter": self.load_adapter,
                "/unload_lora_adapter": self.unload_adapter,
            },
        }
        handlers = {f"POST {path}": self.guarded(handler) for path, handler in posts.items()}
        handlers["GET /v1/models"] = self.models
        given = SERVER_INFO | {"model_path": self.folder}
        handlers["GET /server_info"] = lambda _: given | self.info
        # it samples a token
        handlers["GET /health"] = lambda _: Reply({}, 200 if self.mode is None else 503)
        config = json.loads((Path(self.folder) / "config.json").read_text())
        self.vocab = config["vocab_size"]
        model = {name: config[name] for name in ("model_type", "architectures")}
        handlers["GET /model_info"] = lambda _: {**model, "weight_version": self.version}
        self.http = Server(handlers)
        self.http.__enter__()
        self.url = self.http.url
        return self

    def __exit__(self, *error):
        self.http.__exit__(*error)

    def guarded(self, handler):
        def handle(request):
            try:
                return handler(request.body or {}, request)
            except Refused as refused:
                return Reply({"success": False, "message": str(refused)}, 400)

        return handle

    # sampling

    def logits(self, path, adapter=None):
        """adapter: tensors by name; here their sum is added to the logit of token 0."""
        table = self.weights["model.embed_tokens.weight"]
        logits = self.weights["lm_head.weight"] @ table[path[-1]]
        if adapter is not None:
            logits[0] += sum(float(tensor.sum()) for tensor in adapter.values())
        return logits

    def rows(self, path, adapter=None):  # [len(path)][LAYERS, TOP_K]
        return [self.row(token) for token in path]

    def row(self, token):  # [LAYERS, TOP_K]
        shift = int(self.weights["lm_head.weight"].sum() * 1000)
        found = np.zeros((LAYERS, TOP_K), np.int32)
        for layer in range(DENSE, LAYERS):
            first = token + layer + shift
            found[layer] = [first % EXPERTS, (first + 3) % EXPERTS]
        return found

    def generate(self, body, request):
        fields(body, GENERATE, {"input_ids", "sampling_params", "return_logprob"})
        asked = body["sampling_params"]
        fields(asked, SAMPLING, SAMPLING)
        prompt, path = body["input_ids"], list(body["input_ids"])
        first = body.get("routed_experts_start_len", 0)
        name = body.get("lora_path")
        if not all(type(token) is int and 0 <= token < self.vocab for token in path):
            raise Refused("input_ids")  # the real one dies of it
        if not 0 <= first <= len(prompt) or len(prompt) + asked["max_new_tokens"] > 254:
            raise Refused("lengths")
        if body["return_sampling_mask"] and not 0 < asked["top_k"] <= 4096:
            raise Refused("return_sampling_mask requires top_k")
        stops = set() if asked["ignore_eos"] else {self.eos, *asked["stop_token_ids"]}
        generator = torch.Generator().manual_seed(asked["sampling_seed"])
        out = _Out()
        with self.change:
            self.change.wait_for(lambda: self.mode is None)
            aborted = self.aborted
            out.adapter = self.resolve_adapter(name)
            cached = self.cached((body["extra_key"], name), prompt)
            out.rows = self.rows(path, out.adapter)
            self.running += 1
            self.naming.append(name)
            self.most = max(self.most, self.running)
        finish = "length"
        try:
            while len(out.logp) < asked["max_new_tokens"]:
                with self.change:
                    self.wait(out, path, aborted)
                    if self.aborted != aborted:
                        finish = "abort"
                        break
                    token = self.token(path, asked, generator, body["top_logprobs_num"], out)
                    out.versions.append(self.version)
                    if len(out.logp) > 1:
                        out.rows.append(self.rows(path, out.adapter)[-1])
                    path.append(token)
                if token in stops:
                    finish = "stop"
                    break
        finally:
            with self.change:
                self.running -= 1
                self.naming.remove(name)
                self.change.notify_all()
        reply = self.reply(body, out, path, finish, cached, first)
        return reply if self.damage is None else self.damage(reply)

    def wait(self, out, path, aborted):
        """Wait for the end of a pause; or, if held, for its beginning. An abort ends both."""

        def over():
            return self.aborted != aborted

        if len(out.logp) == self.hold and not over():
            self.hold, updates = None, self.updates
            self.held = True
            self.change.wait_for(lambda: self.mode or over() or self.updates != updates, LIMIT_S)
        retracted = self.mode == "retract"
        self.change.wait_for(lambda: self.mode is None or over())
        if retracted:
            out.retractions += 1
            out.rows = self.rows(path[:-1], out.adapter) if out.logp else out.rows

    def token(self, path, asked, generator, top, out):
        logits = self.logits(path, out.adapter)
        logp = torch.log_softmax(logits / (asked["temperature"] or 1), -1)
        narrowed = logp.clone()
        if asked["top_k"] > 0:
            narrowed[logp < logp.topk(min(asked["top_k"], len(logp))).values[-1]] = float("-inf")
        if asked["top_p"] < 1:
            best = logp.argsort(descending=True)
            before = logp[best].exp().cumsum(0) - logp[best].exp()
            narrowed[best[before > asked["top_p"]]] = float("-inf")
        narrowed = torch.log_softmax(narrowed, -1)
        token = int(logits.argmax())
        if asked["temperature"]:
            token = int(torch.multinomial(narrowed.exp(), 1, generator=generator))
        shown = logp if self.tempered else torch.log_softmax(logits, -1)
        out.logp.append([float(shown[token]), token, None])
        out.narrowed.append(float(narrowed[token]))
        out.kept.append(narrowed.isfinite().nonzero()[:, 0].tolist())
        likeliest = zip(*shown.topk(top), strict=True)
        out.top.append([[float(value), int(i), None] for value, i in likeliest])
        return token

    def cached(self, key, prompt):
        known = [n for n in range(len(prompt)) if (key, *prompt[:n]) in self.cache]
        self.cache |= {(key, *prompt[:n]) for n in range(len(prompt) + 1)}
        return max(known, default=0)

    def reply(self, body, out, path, finish, cached, first):
        n = len(out.logp)
        spans = []
        for i, version in enumerate(out.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": i})
            spans[-1]["end"] = i + 1
        meta = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": n,
            "cached_tokens": cached,
            "num_retractions": out.retractions,
            "weight_versions": spans or [{"version": self.version, "start": 0, "end": 0}],
            "output_token_logprobs": out.logp,
            "output_top_logprobs": out.top if body["top_logprobs_num"] else None,
        }
        if body["return_sampling_mask"]:
            meta["output_token_sampling_logprobs"] = out.narrowed
            meta["output_token_sampling_mask"] = out.kept
        asked, info = body.get("return_routed_experts"), SERVER_INFO | self.info
        if asked and info["enable_return_routed_experts"]:
            rows = np.stack(out.rows)[first : len(path) - 1]
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return {"output_ids": [entry[1] for entry in out.logp], "meta_info": meta}

    # control

    def pause(self, body, _):
        fields(body, {"mode"}, {"mode"})
        with self.change:
            self.mode = body["mode"]
            self.aborted += self.mode == "abort"
            self.change.notify_all()
            self.change.wait_for(lambda: self.mode != "abort" or not self.running, LIMIT_S)
        return {"status": "ok"}

    def resume(self, body, _):
        with self.change:
            self.mode = None
            self.change.notify_all()
        return {"status": "ok"}

    def flush(self, _, request):
        fields(request.params, {"timeout"})
        if self.running:
            raise Refused("requests are running")
        self.cache.clear()
        return Reply(b"Cache flushed.", content_type="text/plain")

    def rename(self, body, _):
        fields(body, {"new_version", "abort_all_requests"}, {"new_version"})
        self.aborted += body.get("abort_all_requests", True)
        self.version = body["new_version"]
        return {"success": True}


class _Out:
    def __init__(self):
        self.adapter, self.retractions = None, 0
        self.logp, self.narrowed, self.kept, self.top = [], [], [], []
        self.versions, self.rows = [], []
