"""`make zero-arms`: what each protection is worth in bfloat16, and who names its lack.

    python benchmarks/zero/arms.py [--out runs/zero-arms] [a.b=value ...]

The policy and the program of run.py. bfloat16 rollouts under routing pressure, float32 trainer, R3,
top_p 0.95, weights that change between turns. Each step's conversations are scored with every
protection, and then with one off at a time, as a trainer without it would score them. Each scoring
is a dump, and the verdict on it is `onepolicy audit`'s. Three arms are this product's own switches:
replay off, no supports, the newest weights for all tokens. Two are faults planted here: histories
rendered from what the client sent, and recurrent layers that are not told where samples begin.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from zero.run import play
from zero.witness import Witness

from onepolicy.audit.run import audit
from onepolicy.build.components import Components
from onepolicy.cli.common import prepare_process
from onepolicy.gateway.traces import dump_rows
from onepolicy.gateway.turns import Reason
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.packing_check import check_packing
from onepolicy.models.recurrent.segments import Row, Segments
from onepolicy.notation import number
from onepolicy.record.export import write_step
from onepolicy.run.step import Hook, StepResult, StepTimer
from onepolicy.train.own_weights import OwnWeights
from onepolicy.train.pack import pack
from onepolicy.types import Sample, TokenBatch

FAST = (
    *("numerics=fast", "steps=6", "rollout.engine.dtype=bfloat16", "log.report=false"),
    *("log.counterfactual_every=0", "checkpoint.every=6", "replay.min_agreement=0"),
    *("rollout.pressure.scale=0.15", "optim.lr=3e-4"),
)
"""The pressure makes about as many routes differ as the R3 paper saw, a tenth. bfloat16 alone makes
so few differ in a policy this small and sure that none of them is sampled. At the larger rate two
weights that follow on each other differ."""
THOUGHT = re.compile(r"<think>.*?</think>\n", re.DOTALL)
ALL = "all protections"
OFF = {
    "R3": "the trainer routes every token itself (replay.mode = off)",
    "support": "the trainer scores over the whole vocabulary",
    "exact ids of history": "planted: histories without thoughts, as the client sends them back",
    "reset of recurrent states": "planted: recurrent layers take a packed row for one sample",
    "weight versions": "the newest weights score all tokens, and the dump does not say so",
}
"""What is off -> how."""


class Arms(Hook):
    """Scores every step's samples with all protections and with each one off, as dumps."""

    def __init__(self, components: Components, folder: Path) -> None:
        most = components.config.rollout.max_staleness
        assert most is not None
        self.scorer = components.learner.scorer  # type: ignore[union-attr]
        self.tokenizer = components.environment.tokenizer  # type: ignore[attr-defined]
        self.folder, self.own = folder, OwnWeights(self.scorer, most)

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        batch = pack(result.groups)
        as_sent = [
            replace(g, samples=tuple(without_thoughts(s, self.tokenizer) for s in g.samples))
            for g in result.groups
        ]
        native = self._score(batch, replay=False)
        self._write(ALL, step, self._score(batch), native=native)
        self._write("R3", step, native)
        whole = self._score(batch.replace(support=None)).replace(support=batch.support)
        self._write("support", step, whole)
        self._write("exact ids of history", step, self._score(pack(as_sent)))
        with one_sample():
            self._write("reset of recurrent states", step, self._score(batch))
        newest = self.scorer.score_unchecked(batch, replay=True)
        self._write("weight versions", step, newest, says_version=False)
        self.own.keep()

    def _score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        """Return the batch scored under the weights that sampled each token."""
        merged: TokenBatch | None = None
        for version in sorted(set(batch.version[batch.trainable].tolist())):
            with self.own.weights_of(version):
                scored = self.scorer.score_unchecked(batch, replay=replay)
            if merged is None:
                merged = scored
            of = batch.version == version
            for name in ("logp_old", "entropy", "logp_vocabulary"):
                into = getattr(merged, name)
                if into is not None:
                    into[of] = getattr(scored, name)[of]
        assert merged is not None
        return merged

    def _write(
        self,
        arm: str,
        step: int,
        scored: TokenBatch,
        *,
        native: TokenBatch | None = None,
        says_version: bool = True,
    ) -> None:
        rows = dump_rows(scored, native, step=step, reward=0.0)
        for row in rows:
            if says_version:
                row["trained_version"] = row["version"]
        write_step(self.folder / folder_of(arm), step, rows)


def folder_of(arm: str) -> str:
    return arm.replace(" ", "_")


def without_thoughts(sample: Sample, tokenizer: Any) -> Sample:
    """Return the path as it is rendered from messages whose thoughts the client dropped.

    The last turn keeps its own. Each kept token has the values of its slot.
    """
    pieces = [tokenizer.decode([token]) for token in sample.tokens.tolist()]
    ends = torch.tensor([0, *map(len, pieces)]).cumsum(0)
    keep = torch.ones(len(pieces), dtype=torch.bool)
    last = int(sample.turn.max())
    for found in THOUGHT.finditer("".join(pieces)):
        first, stop = (int((ends <= place).sum()) - 1 for place in found.span())
        if first > 0 and int(sample.turn[first - 1]) != last:
            keep[first:stop] = False
    fed, target = keep[:-1].nonzero()[:, 0], keep[1:].nonzero()[:, 0]
    if not keep[-1]:
        fed = fed[:-1]
    changed: dict[str, Any] = {
        name: getattr(sample, name)[target]
        for name in ("trainable", "logp_rollout", "version", "turn")
    }
    if sample.routing is not None:
        changed["routing"] = sample.routing.at(fed)
    if sample.support is not None:
        changed["support"] = sample.support.at(target)
    return replace(sample, tokens=sample.tokens[keep], **changed)


@contextmanager
def one_sample() -> Iterator[None]:
    """Let recurrent layers take a packed row for one sample, whose state goes on through all."""

    def leaking(packing: BucketedPacking, layer: int) -> Row:
        assert packing.segments is not None
        whole = Segments((sum(packing.segments.lengths),), packing.segments.device)
        return Row(whole)

    with patch.object(BucketedPacking, "recurrent_row", leaking):
        yield


def packed_forward(model: Any) -> Callable[[list[Tensor]], Tensor]:
    """Return the trainer's packed forward, for `check_packing`."""

    def forward(samples: list[Tensor]) -> Tensor:
        lengths = torch.tensor([0, *map(len, samples)])
        positions = torch.cat([torch.arange(len(ids)) for ids in samples])
        packing = BucketedPacking.of(lengths.cumsum(0).int(), samples[0].device)
        ids = torch.cat(samples)[None]
        out = model(input_ids=ids, position_ids=positions[None], use_cache=False, packing=packing)
        logits: Tensor = out.logits[0]
        return logits

    return forward


def measure(folder: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Play a run into a new folder, and return a row for every arm."""
    hooks: list[Arms] = []

    def make(components: Components) -> Hook:
        hooks.append(Arms(components, folder))
        return hooks[0]

    witness = Witness(folder)
    play(folder, [*FAST, *settings], make, witness)
    with one_sample():
        model = hooks[0].scorer.model
        packing = check_packing(model, packed_forward(model))
    dropped = witness.counts.requests[Reason.THOUGHTS_DROPPED]
    found = {arm: judge(folder, arm) for arm in (ALL, *OFF)}
    (replay,) = [note for note in found[ALL]["notes"] if "replay" in note]
    also = {
        "R3": f"`audit` of {ALL}: {replay}",
        "exact ids of history": f"the gateway: {Reason.THOUGHTS_DROPPED}, {dropped} requests",
        "reset of recurrent states": f"op.check_packing: {packing}",
    }
    return [
        {"arm": arm, "how": OFF.get(arm, ""), **found[arm], "also": also.get(arm, "")}
        for arm in (ALL, *OFF)
    ]


def judge(folder: Path, arm: str) -> dict[str, Any]:
    """Return what the audit says of an arm's dump."""
    result = audit(folder / folder_of(arm), {}, label=arm)
    overall = result.accumulated.overall
    assert overall is not None
    return {
        "tokens": overall.tokens,
        "k3": overall.k3,
        "action": result.verdict.action,
        "causes": list(result.verdict.causes),
        "verdict": result.verdict.text(),
        "notes": list(result.notes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/zero-arms"))
    parser.add_argument("settings", nargs="*", help="of the run, a.b=value")
    options = parser.parse_args()
    prepare_process(1)
    folder = options.out
    for old in ("run", *map(folder_of, (ALL, *OFF))):  # of an earlier call
        shutil.rmtree(folder / old, ignore_errors=True)
    rows = measure(folder, options.settings)
    (folder / "arms.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        said = row["verdict"].partition("\n")[0]
        print(f"{row['arm']:<26} k3 {number(row['k3'])}  {said}")
        if row["also"]:
            print(f"{'':<26} {row['also']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
