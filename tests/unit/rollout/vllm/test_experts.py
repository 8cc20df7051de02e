"""The kernel of a vLLM's experts, around a stand-in for the function that chooses it."""

import dataclasses
import sys
from types import ModuleType

import pytest

from onepolicy.rollout.vllm.adapter import cpu_experts


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    is_lora_enabled: bool
    experts: int


def test_experts_keep_the_kernel_that_they_have_without_adapters(monkeypatch):
    names = ["vllm", "model_executor", "layers", "fused_moe", "unquantized_fused_moe_method"]
    path, above = "", None
    for name in names:
        path = f"{path}.{name}".lstrip(".")
        module = ModuleType(path)
        monkeypatch.setitem(sys.modules, path, module)
        if above is not None:
            setattr(above, name, module)
        above = module

    def select(moe_config):
        return moe_config

    module.select_unquantized_moe_backend = select
    asked = MoEConfig(is_lora_enabled=True, experts=8)

    def load():
        with cpu_experts():
            assert module.select_unquantized_moe_backend(moe_config=asked) == MoEConfig(False, 8)
            raise MemoryError

    with pytest.raises(MemoryError):
        load()
    assert module.select_unquantized_moe_backend is select
