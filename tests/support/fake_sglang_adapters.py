"""Adapters of the server of fake_sglang.py: loaded from folders, unloaded, named in requests."""

from pathlib import Path

from safetensors.torch import load_file

from support.fake_sglang_updates import Refused, fields
from support.waiting import LIMIT_S

TAKES_ADAPTERS = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"],
}
"""What /server_info says of --enable-lora --max-lora-rank 8 --lora-target-modules ..."""


class Adapters:
    """Adapters of a server with info, running and change.

    Contract of SGLang 0.5.23 (srt/managers/tokenizer_control_mixin.py, srt/lora/lora_manager.py):
    a name is loaded once; unloading waits for the requests that name it; a request that names an
    adapter which was unloaded loads it again from its folder.
    """

    def start_adapters(self):
        self.adapters = {}  # name -> folder
        self.tensors = {}  # name -> tensors of its file when it was loaded
        self.known = {}  # name -> folder, also of those that were unloaded
        self.naming = []  # adapters of the running requests
        self.loads, self.reloads = [], []  # names, in order

    def has_adapters(self):
        if not self.info.get("enable_lora"):
            raise Refused("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")

    def load_adapter(self, body, _):
        fields(body, {"lora_name", "lora_path", "pinned"}, {"lora_name", "lora_path"})
        self.has_adapters()
        with self.change:
            self.read_adapter(body["lora_name"], body["lora_path"])
            self.loads.append(body["lora_name"])
        return self.adapter_reply()

    def read_adapter(self, name, folder):
        if name in self.adapters:
            raise Refused(f"Failed to load LoRA adapter {name} because it is already loaded")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise Refused(f"Failed to load LoRA adapter {name}: no {folder}/adapter_config.json")
        self.tensors[name] = load_file(Path(folder) / "adapter_model.safetensors")
        self.adapters[name] = self.known[name] = folder

    def unload_adapter(self, body, _):
        fields(body, {"lora_name"}, {"lora_name"})
        self.has_adapters()
        name = body["lora_name"]
        with self.change:
            if name not in self.adapters:
                raise Refused(f"LoRA with name {name} does not exist")
            del self.adapters[name]
            assert self.change.wait_for(lambda: name not in self.naming, LIMIT_S)
            del self.tensors[name]
        return self.adapter_reply()

    def adapter_reply(self):
        return {"success": True, "error_message": "", "loaded_adapters": dict(self.adapters)}

    def models(self, _):
        cards = [{"id": name, "parent": self.folder} for name in self.adapters]
        return {"data": [{"id": self.folder, "parent": None}, *cards]}

    def resolve_adapter(self, name):
        """Return the tensors of the adapter that a request names. Called with `change` held."""
        if name is None:
            return None
        self.has_adapters()
        if name not in self.known:
            raise Refused(f"Got LoRA adapter that has never been loaded: {name}")
        if name not in self.adapters:
            self.read_adapter(name, self.known[name])
            self.reloads.append(name)
        return self.tensors[name]
