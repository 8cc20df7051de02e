"""Distance of each format's rollout from the trainer, on the same problems with the same seeds.

    python benchmarks/quant_gap.py                   # the tiny policy, 40 sequences
    python benchmarks/quant_gap.py --model FOLDER rollout.prompts_per_step=20

The numbers are those of `onepolicy measure --quant FORMAT` for one format, without its waterfall,
and TIS as predicted at that k3.
"""

from __future__ import annotations

import argparse
import asyncio

from onepolicy.build.calibrate import calibrate
from onepolicy.build.measure import build_measure_components, measure_config
from onepolicy.correct.predict import predict
from onepolicy.measure.measure import score_rollouts
from onepolicy.train.rescore import mismatch_of

FORMATS = {
    "bf16": (),
    "int8": ("rollout.quant=int8",),
    "int8, static": ("rollout.quant.format=int8", "rollout.quant.activations=static"),
    "fp8": ("rollout.quant=fp8",),
    "fp8-weight": ("rollout.quant=fp8-weight",),
    "simulated, 4 bits": ("rollout.quant.format=simulated", "rollout.quant.bits=4"),
    "simulated, 3 bits": ("rollout.quant.format=simulated", "rollout.quant.bits=3"),
}
HEADER = (
    "rollouts",
    "k3",
    "with replay",
    "largest difference of p",
    "F(1.25)",
    "F(2)",
    "TIS keeps",
    "TIS step",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for name, quant in FORMATS.items():
        settings = [
            "rollout.group_size=4",
            "correction.preset=tis",
            "train.threads=1",
            *options.overrides,
            *quant,
        ]
        print(
            f"| {name} | " + " | ".join(asyncio.run(gap(settings, options.model))) + " |",
            flush=True,
        )


async def gap(settings: list[str], model: str) -> tuple[str, ...]:
    parts, _ = build_measure_components(measure_config({}, settings, model))
    await calibrate(parts.config, parts.engine, parts.environment, parts.sampling.stop, None)
    seen = await score_rollouts(parts)
    found = seen.found
    replayed = "" if seen.replayed is None else f"{mismatch_of(seen.replayed).k3:.2g}"
    length = found.tokens // seen.native.num_samples
    would = predict(parts.config.correction, found.k3, length)
    extreme = (f"{found.extreme(tau):.2%}" for tau in (1.25, 2))
    return (
        f"{found.k3:.2g}",
        replayed,
        f"{found.max_dp:.3f}",
        *extreme,
        f"{would.keep:.1%}",
        f"{would.attenuation:.4f}",
    )


if __name__ == "__main__":
    main()
