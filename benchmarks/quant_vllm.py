"""vLLM's own quantisation methods that load the tiny policy on this machine, and the errors of the
others; needs vLLM.

VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 python benchmarks/quant_vllm.py
"""

from __future__ import annotations

import argparse

from onepolicy.config import ModelConfig
from onepolicy.config.input_files import resolve_model

METHODS = [
    "fp8",
    "fp8_per_tensor",
    "fp8_per_channel",
    "experts_int8",
    "int8_per_channel_weight_only",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    from vllm import LLM

    path = resolve_model(ModelConfig(path=options.model)).path
    print("| quantization | result |\n| --- | --- |")
    for method in options.methods:
        try:
            LLM(
                model=path,
                quantization=method,
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=128,
            )
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(
                f"| {method} | {type(error).__name__}: {str(error).splitlines()[0]} |", flush=True
            )
        else:
            print(f"| {method} | loads |", flush=True)


if __name__ == "__main__":
    main()
