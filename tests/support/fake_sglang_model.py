"""The server of fake_sglang.py with the checkpoint's own model, computed by transformers in
float32, and with adapters added to its weights."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.replay.routers import bind_routers
from support.fake_sglang import FakeSGLang

PREFIX, SUFFIX = "base_model.model.", ".lora_A.weight"


class ModelSGLang(FakeSGLang):
    def __enter__(self):
        self.built, self.computed = None, {}
        return super().__enter__()

    def read_adapter(self, name, folder):
        super().read_adapter(name, folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        assert not config.get("use_rslora")  # SGLang does not read it
        scale = config["lora_alpha"] / config["r"]
        tensors = self.tensors[name]
        for key in tensors:
            if ".lora_B." in key:
                tensors[key] = scale * tensors[key]

    def logits(self, path, adapter=None):
        return self.forward(path, adapter)[0].clone()

    def rows(self, path, adapter=None):
        return list(self.forward(path, adapter)[1])  # the caller adds to it

    def forward(self, path, adapter):
        """Return the logits [V] after the path, and its routes, [D, K] for each token."""
        weights = (self.updates, id(adapter))
        if self.built is None or self.built[0] != weights:
            self.built, self.computed = (weights, self.build(adapter)), {}
        if tuple(path) not in self.computed:
            logits, rows = forward(self.built[1], path)
            self.computed[tuple(path)] = logits, rows
        return self.computed[tuple(path)]

    def build(self, adapter):
        tensors = dict(self.weights)
        for key, a in (adapter or {}).items():
            if key.endswith(SUFFIX):
                name = key.removeprefix(PREFIX).removesuffix(SUFFIX)
                b = adapter[key.replace(".lora_A.", ".lora_B.")]
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + b @ a
        return model_of(self.folder, tensors)


def model_of(config, tensors):
    """Return the model of a folder's config with these tensors of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(config) / "config.json", folder)
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return load_model(ModelConfig(path=folder), torch.float32, torch.device("cpu"))


@torch.no_grad()
def forward(model, path):
    """Return the logits [V] after the path, and its routes [len(path), D, K] int32.

    Those of dense layers are 0.
    """
    routers = bind_routers(model)
    with routers.record() as tape:
        logits = model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
    ids = tape.trace().ids.int()
    routes = ids.new_zeros(len(path), model.config.num_hidden_layers, routers.top_k)
    routes[:, list(routers.layers)] = ids
    return logits, routes.numpy()
