"""The files of the adapter in a vLLM of this process. No vLLM is started here."""

import sys
import tempfile
from types import SimpleNamespace

from onepolicy.rollout.vllm.adapter import LoadedAdapter


class LoRAs:
    """The calls of vLLM's LLMEngine that load adapters."""

    def __init__(self):
        self.numbers = set()

    def add_lora(self, request):
        self.numbers.add(request.lora_int_id)

    def remove_lora(self, number):
        self.numbers.remove(number)

    def list_loras(self):
        return self.numbers


class Adapter:
    name = "lora-run"

    def write(self, folder):
        (folder / "adapter_config.json").write_text("{}")


def test_files_of_the_newest_adapter_alone_are_kept_and_end_with_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    requests = SimpleNamespace(LoRARequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", requests)
    loaded = LoadedAdapter(LoRAs())
    for version in (1, 2):
        loaded.load(Adapter(), version)
        (file,) = tmp_path.rglob("adapter_config.json")
        assert loaded.request.lora_path == str(file.parent)
    del loaded
    assert not list(tmp_path.rglob("adapter_config.json"))
