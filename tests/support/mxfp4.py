"""A tiny gpt-oss whose experts are stored as MXFP4, and its weights worked out by hand.

A block of 32 numbers has one scale, a power of two with 127 added; each number is four bits, two of
them in a byte, the first one in the low bits (OCP Microscaling Formats, version 1.0).
"""

import json

import torch
from safetensors.torch import load_file, save_file

from support.models import make

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = torch.tensor([*E2M1, *(-number for number in E2M1)])
PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4(folder):
    """Write the checkpoint. Return the float32 tensors that are stored, by name."""
    make("gpt_oss").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 16, 2), generator=generator)
        exponents = torch.randint(-7, -3, codes.shape[:3], generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        scaled = torch.ldexp(NUMBERS[codes].flatten(-2), exponents[..., None])
        expected[name] = scaled.flatten(-2).transpose(1, 2)  # [experts, inputs, outputs]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}
    path.write_text(json.dumps(config))
    return expected | {name: t for name, t in tensors.items() if t.is_floating_point()}
