"""Weight updates of the server of fake_sglang.py: from a folder, or in a session by broadcast."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from support.waiting import LIMIT_S


class Refused(Exception):
    """An error with status 400."""


def fields(body, known, required=()):
    unknown, missing = set(body) - set(known), set(required) - set(body)
    if unknown or missing:
        raise Refused(f"unknown fields {sorted(unknown)}, missing {sorted(missing)}")


class Updates:
    """Updates of a server with weights, version, running, mode, session, groups, updates, cache and
    change."""

    def took(self, weights, body):
        """Take new weights as /update_weights_* do."""
        if set(weights) - set(self.weights):
            raise Refused(f"unknown parameters {set(weights) - set(self.weights)}")
        if body["flush_cache"] and self.running and self.mode != "retract":
            raise Refused(
                "Weights were updated, but the cache was not flushed because requests are "
                "still running"
            )
        with self.change:
            loaded = {name: tensor + self.wrong for name, tensor in weights.items()}
            self.weights = self.weights | loaded
            self.version = body["weight_version"] or self.version
            self.updates += 1
            if body["flush_cache"]:
                self.cache.clear()
            self.change.notify_all()
        return {"success": True}

    def from_disk(self, body, _):
        known = {"model_path", "weight_version", "flush_cache", "abort_all_requests"}
        fields(body, known, {"model_path"})
        if self.running and self.mode is None:
            raise Refused("not paused")
        self.aborted += body.get("abort_all_requests", True)
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
        mine, theirs = ({n: t.shape for n, t in held.items()} for held in (self.weights, loaded))
        if mine != theirs:
            raise Refused(f"{body['model_path']} is another model")
        return self.took(loaded, body)

    def join(self, body, _):
        known = {"master_address", "master_port", "rank_offset", "world_size"}
        known |= {"group_name", "backend"}
        fields(body, known, known)
        if body["backend"] != "gloo" or body["group_name"] in self.groups:
            raise Refused("backend or group_name")
        name, limit = body["group_name"], timedelta(seconds=LIMIT_S)
        store = dist.TCPStore(body["master_address"], body["master_port"], None, False, limit)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        rank, ranks = body["rank_offset"], body["world_size"]
        self.groups[name] = dist.ProcessGroupGloo(store, rank, ranks, limit)
        return {"success": True}

    def begin(self, body, _):
        fields(body, {"selector"})
        if self.session:
            raise Refused("a weight-update session is already open")
        self.session = True
        return {"success": True}

    def from_broadcast(self, body, _):
        known = {"names", "dtypes", "shapes", "group_name", "load_format", "flush_cache"}
        known |= {"weight_version"}
        fields(body, known | {"abort_all_requests"}, known)
        known_group = body["group_name"] in self.groups
        if not (self.session and known_group and body["load_format"] == "flattened_bucket"):
            raise Refused("must run between begin_weight_update() and end_weight_update()")
        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
        ]
        flat = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.groups[body["group_name"]].broadcast([flat], options).wait()
        parts = flat.split([tensor.nbytes for tensor in empty])
        pairs = zip(parts, empty, strict=True)
        values = [part.view(tensor.dtype).view(tensor.shape) for part, tensor in pairs]
        return self.took(dict(zip(body["names"], values, strict=True)), body)

    def end(self, body, _):
        if not self.session:
            raise Refused("no weight-update session is open")
        self.session = False
        return {"success": True}

    def leave(self, body, _):
        fields(body, {"group_name"})
        del self.groups[body["group_name"]]
        return {"success": True}
