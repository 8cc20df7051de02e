"""A learner with an adapter of one layer, for the tests of what servers are sent."""

import contextlib
import errno

import torch
from safetensors.torch import save_file

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"


class Adapter:
    """An adapter of one layer. `bias` is what it adds to the logit of token 0."""

    name, bias, is_off = "lora-run", 0.0, False

    def tensors(self):
        b = torch.full((2, 4), 0.0 if self.is_off else self.bias / 8)
        return {A: torch.zeros(4, 2), B: b}

    def factors(self):
        return {"x.weight": (self.tensors()[A], self.tensors()[B])}

    def write(self, folder):
        save_file(self.tensors(), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"r": 4}')

    @contextlib.contextmanager
    def off(self):
        before, self.is_off = self.is_off, True
        yield
        self.is_off = before


def out_of_space(folder):
    """Fail as Adapter.write does on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device", str(folder))


class Learner:
    """A learner whose frozen weights are these, and whose merged weights are twice these."""

    def __init__(self, model):
        self.model, self.version, self.adapter = model, 0, Adapter()

    def named_weights(self, dtype=None):
        factor = 1 if self.adapter.is_off else 2
        for name, tensor in self.model.state_dict().items():
            yield name, tensor * factor
