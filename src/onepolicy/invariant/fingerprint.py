"""The causes of a log-probability's bits besides weights and tokens: build, processor, settings.

A fingerprint is JSON with sorted keys. It travels with every rollout, so that a learner can tell
whether its own forward could give the engine's bits at all. Two processes of the same build and
processor may still differ in the kernels that a library chose at run time. The field `bits`, a
digest of kernels' results on fixed inputs, shows that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator

import torch
import transformers

import onepolicy

ENVIRONMENT_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
)
"""Variables by which torch and its libraries choose kernels."""
FREE_FIELDS = ("threads",)
"""Fields that log-probabilities of the on-policy mode do not depend on.

The weights after an update do depend on them.
"""


def compute_fingerprint(device: torch.device, numerics: str) -> str:
    """Return the fingerprint of this process on a device.

    numerics: the mode, "fast" or "on-policy".
    """
    fields = {
        "onepolicy": onepolicy.__version__,
        "transformers": transformers.__version__,
        "numerics": numerics,
    }
    fields |= _build() | _settings() | {"threads": str(torch.get_num_threads())}
    if device.type == "cpu":
        fields |= {"device": "cpu"} | _processor()
    else:
        fields |= _gpu(device)
    return json.dumps(fields | {"bits": _bits(device)}, sort_keys=True)


def fingerprint_differences(first: str, second: str) -> list[str]:
    """Return `name: first, second` of every field that differs, FREE_FIELDS left out."""
    a, b = json.loads(first), json.loads(second)
    names = sorted((a.keys() | b.keys()) - set(FREE_FIELDS))
    return [
        f"{name}: {a.get(name, 'unset')}, {b.get(name, 'unset')}"
        for name in names
        if a.get(name) != b.get(name)
    ]


def difference_reason(trainer: str, rollouts: Iterable[str]) -> str | None:
    """Return why the log-probabilities of trainer and rollouts may differ.

    trainer: its fingerprint. rollouts: the fingerprints of the samples. None if they must be equal.
    """
    fingerprints = sorted(rollouts)
    if not fingerprints:
        return "the rollouts carry no fingerprint: what computed them is not known"
    for fingerprint in fingerprints:
        differences = fingerprint_differences(trainer, fingerprint)
        if differences:
            return "trainer and rollout were not computed alike (trainer, rollout): " + "; ".join(
                differences
            )
    return None


def short_digest(text: str) -> str:
    """Return 12 hexadecimal digits that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _build() -> dict[str, str]:
    libraries = [
        line.strip(" -") for line in torch.__config__.show().splitlines() if "Intel(R)" in line
    ]
    return {
        "torch": f"{torch.__version__} {torch.version.git_version[:12]}",
        "libraries": "; ".join(libraries),
    }


def _settings() -> dict[str, str]:
    found = {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ}
    return found | {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }


def _processor() -> dict[str, str]:
    """Return the instruction set in use, and by what libraries choose kernels and block sizes."""
    known = torch.cpu.get_capabilities()
    flags = ",".join(sorted(name for name, has in known.items() if has is True))
    caches = f"{known.get('l1d_cache_size')}+{known.get('l2_cache_size')}"
    name = f"{known.get('cpu_name')} {known.get('architecture')}"
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": f"{name}, caches {caches}, flags {short_digest(flags)}",
    }


def _gpu(device: torch.device) -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability(device)
    matmul = torch.backends.cuda.matmul
    return {
        "device": f"{torch.cuda.get_device_name(device)} sm_{major}{minor}",
        "cuda": f"{torch.version.cuda}, cudnn {torch.backends.cudnn.version()}",
        "tf32": f"{matmul.allow_tf32}, {torch.backends.cudnn.allow_tf32}",
        "reduced_precision": str(matmul.allow_bf16_reduced_precision_reduction),
    }


@functools.cache
def _bits(device: torch.device) -> str:
    """Return a digest of the results of the kernels that a forward uses most."""
    whole = hashlib.blake2b(digest_size=6)
    with torch.no_grad():
        for result in _results(device):
            whole.update(result.float().cpu().numpy().tobytes())
    return whole.hexdigest()


def _results(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the kernels' results on inputs made of integers."""
    integers = (torch.arange(32 * 400, device=device) * 37 % 1009).view(32, 400)
    for dtype in (torch.float32, torch.bfloat16):
        x = (integers / 331 - 1.5).to(dtype)
        yield x @ x.T
        yield torch.softmax(x.float(), -1)
        yield torch.nn.functional.silu(x)
        yield x.float().square().mean(-1)
    yield torch.log_softmax(x.float(), -1)
