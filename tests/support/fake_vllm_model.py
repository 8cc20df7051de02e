"""The server of fake_vllm.py with the checkpoint's own model, computed by transformers."""

import threading

import numpy as np
from safetensors.torch import load_file

from support.fake_sglang_model import forward, model_of
from support.fake_vllm import FakeVLLM


class ModelVLLM(FakeVLLM):
    one_at_a_time = threading.Lock()  # a router is recorded once at a time

    def _load(self, folder):
        self._take(load_file(f"{folder}/model.safetensors").items())

    def _take(self, weights):
        self.built = model_of(self.model, {name: tensor.clone() for name, tensor in weights})
        self.known = {}

    def logits(self, path):
        return self._forward(path)[0].numpy()

    def rows(self, path):
        return self._forward(path)[1].astype(np.uint8)

    def _forward(self, path):
        with self.one_at_a_time:
            if tuple(path) not in self.known:
                self.known[tuple(path)] = forward(self.built, path)
            return self.known[tuple(path)]
