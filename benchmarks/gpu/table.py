"""Write into docs/measured.md what leases of a GPU have answered: a row for every row of the page.

    python benchmarks/gpu/table.py                    # from benchmarks/gpu/h100.jsonl
    python benchmarks/gpu/table.py OUT/results.jsonl  # print it for other results

The last run of a case counts. A test keeps the page and the results together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu.lease import parsed  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "measured.md", ROOT / "benchmarks" / "gpu" / "h100.jsonl"
BEGIN = "<!-- lease: written by benchmarks/gpu/table.py -->\n"
END = "<!-- end of lease -->"
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Number:
    """A measured value: of a case, of its result of that name (`name*`: that begins so)."""

    case: str
    name: str
    key: str
    text: str  # with {} for the value
    form: Callable[[Any], str] = "{:.3g}".format

    def failed(self, rows: Rows) -> bool:
        """Return whether its result is an error."""
        return any(
            row.get("case") == self.case
            and fnmatchcase(row.get("name", ""), self.name)
            and "error" in row
            for row in rows
        )

    def read(self, rows: Rows) -> str | None:
        """Return the text with the value, None if there is none."""
        found = [
            row[self.key]
            for row in rows
            if row.get("case") == self.case
            and fnmatchcase(row.get("name", ""), self.name)
            and self.key in row
        ]
        return self.text.format(self.form(found[-1])) if found else None


@dataclass(frozen=True)
class Answer:
    """What a lease says to one row of the page.

    tests: parts of the names of its tests, any of which belong to it. needs: what a lease of one
    GPU with this image lacks for it.
    """

    row: str
    what: str
    tests: tuple[str, ...] = ()
    numbers: tuple[Number, ...] = ()
    needs: str = ""

    def line(self, rows: Rows) -> str:
        outcomes = self._outcomes(rows)
        passed = sum(outcome == "passed" for outcome in outcomes.values())
        failed = sum(outcome == "failed" for outcome in outcomes.values())
        failed += any(number.failed(rows) for number in self.numbers)
        found = [text for number in self.numbers if (text := number.read(rows))]
        if outcomes:
            found.insert(0, f"{passed} of {len(outcomes)} tests pass{self._early_end(rows)}")
        state = self.needs or "not reached"
        if failed:
            state = "**breaks**"
        elif passed or found:
            state = f"in part, {self.needs}" if self.needs else "runs"
        return f"| {self.row} | {self.what} | {state} | {'; '.join(found)} |"

    def has_result(self, rows: Rows) -> bool:
        """Return whether a test or a number of it has an outcome, good or bad."""
        measured = any(number.read(rows) or number.failed(rows) for number in self.numbers)
        return measured or bool(self._outcomes(rows))

    def _early_end(self, rows: Rows) -> str:
        """Return a remark if the case of its tests did not come to its end."""
        ends = {row["case"]: "lost" for row in rows if self._is_mine(row)}
        for row in rows:
            if row.get("case") in ends and "ended" in row:
                ends[row["case"]] = row["ended"]
        early = sorted(end for end in ends.values() if end not in ("done", "done, with errors"))
        return f", of a file that was {early[0]}" if early else ""

    def _is_mine(self, row: dict[str, Any]) -> bool:
        return row.get("outcome", "skipped") != "skipped" and any(
            part in row["name"] for part in self.tests
        )

    def _outcomes(self, rows: Rows) -> dict[str, str]:
        """Return the last outcome of each of its tests."""
        return {row["name"]: row["outcome"] for row in rows if self._is_mine(row)}


def per_cent(value: float) -> str:
    return f"{100 * value:.2g}%"


def per_cent_change(value: float) -> str:
    return f"{100 * value:+.1f}%"


def milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * sorted(seconds)[len(seconds) // 2]:.2g}"


ATTENTION, GRADIENTS = "test_attention_kernels.py", "test_training_step.py"
ANSWERS = (
    Answer(
        "card",
        "what the card can do at most",
        numbers=(
            Number("smoke", "ceilings", "tflops", "{} TFLOP/s of a bfloat16 product"),
            Number("smoke", "ceilings", "gb_per_second", "a copy {} GB/s", "{:,.0f}".format),
        ),
    ),
    Answer("B1", "the cache of a vLLM server", needs="needs vLLM"),
    Answer(
        "B2", "`sync = nccl`", ("test_a_rank_trains_and_resumes_over_nccl",), needs="needs two GPUs"
    ),
    Answer("B3", "room of the embedded engine beside the learner", ("gpu/test_room.py",)),
    Answer("B4", "vLLM beside the learner", needs="needs vLLM"),
    Answer(
        "B5",
        "weights cast before they travel",
        numbers=(Number("sync", "cast", "gb_per_second", "{} GB/s"),),
    ),
    Answer(
        "B6",
        "memory of logits",
        ("test_memory.py",),
        (
            Number(
                "head",
                "chunks, 32768*",
                "beyond_the_layer_gb",
                "{} GB at 32k slots in chunks (under 3)",
            ),
            Number("head", "whole, 32768*", "beyond_the_layer_gb", "{} whole"),
        ),
    ),
    Answer(
        "B7",
        "attention with sinks",
        (
            f"{ATTENTION}::test_values_and_gradients_without_the_math_kernel[cuda-sinks",
            f"{ATTENTION}::test_values_and_gradients_without_the_math_kernel[cuda-window and",
        ),
    ),
    Answer(
        "B8",
        "packed attention by the flash kernel",
        tuple(
            f"{ATTENTION}::test_values_and_gradients_without_the_math_kernel[cuda-{shape}]"
            for shape in ("grouped", "latent", "window")
        ),
        (
            Number(
                "attention", "onepolicy, 64*", "seconds", "64 samples of 1k: {} ms", milliseconds
            ),
            Number("attention", "SDPA padded, 64*", "seconds", "padded {}", milliseconds),
            Number("attention", "varlen_attn, 64*", "seconds", "the bare kernel {}", milliseconds),
            Number(
                "attention", "onepolicy, 8 *", "seconds", "8 samples of 8k: {} ms", milliseconds
            ),
            Number("attention", "SDPA padded, 8 *", "seconds", "SDPA {}", milliseconds),
        ),
    ),
    Answer("B9", "SGLang's broadcast", needs="needs SGLang"),
    Answer("B10", "a server's long answers", needs="needs vLLM"),
    Answer("B11", "checkpoints in MXFP4", ("test_mxfp4_is_dequantised",)),
    Answer("B12", "the check of the first push", ("test_a_push_of",)),
    Answer("B13", "what a server imports of us", ("test_server_imports.py",), needs="needs vLLM"),
    Answer(
        "P1",
        "an update in bfloat16",
        numbers=(
            Number("step", "padded / onepolicy, bfloat16", "ratio", "{} times a padded step (1.3)"),
            Number(
                "step", "onepolicy, bfloat16", "share_of_peak", "{} of the peak (35%)", per_cent
            ),
        ),
    ),
    Answer(
        "P2",
        "experts under autocast",
        (f"{GRADIENTS}::test_gradients_in_bfloat16",),
        (Number("step", "padded / onepolicy, autocast", "ratio", "dense: {} times a padded step"),),
    ),
    Answer(
        "P3",
        "launches of the embedded engine",
        numbers=(
            Number("engine", "profile, 64*", "launches_per_step", "{} a step", "{:.0f}".format),
            Number("engine", "profile, 64*", "step_ms", "{} ms a step"),
            Number("engine", "profile, 64*", "gpu_busy", "GPU busy {}", per_cent),
            Number(
                "engine",
                "onepolicy, 64*",
                "tokens_per_second",
                "{} tokens/s of 64 requests",
                "{:,.0f}".format,
            ),
            Number(
                "engine",
                "generate, dynamic cache, 64*",
                "tokens_per_second",
                "`generate` {}",
                "{:,.0f}".format,
            ),
            Number("engine", "onepolicy, 256*", "tokens_per_second", "{} of 256", "{:,.0f}".format),
        ),
    ),
    Answer(
        "P4",
        "reading the cache of keys",
        numbers=(
            Number(
                "attention",
                "onepolicy, decode 256 rows with 4096*",
                "seconds",
                "256 rows of 4k keys: {} ms a layer",
                milliseconds,
            ),
        ),
    ),
    Answer("P5", "route checks", needs="a matter of CPUs"),
    Answer(
        "P6",
        "`rollout.quant` of the embedded engine",
        ("test_quant_cuda.py",),
        (
            Number(
                "decode",
                "decode step of 4 layers of 30B-A3B, quant int8",
                "over_bfloat16",
                "int8 {} times bfloat16",
            ),
        ),
    ),
    Answer(
        "P7",
        "checksums and buckets of a push",
        numbers=(
            Number("sync", "checksum", "gb_per_second", "checksums {} GB/s"),
            Number("sync", "receive", "gb_per_second", "receiving {}"),
            Number("sync", "all together", "gb_per_second", "all together {} GB/s (50)"),
        ),
        needs="needs two GPUs",
    ),
    Answer(
        "P8",
        "learner beside engine",
        numbers=(
            Number(
                "decode",
                "overlap",
                "both_over_one_after_the_other",
                "both at once take {} of one after the other",
                per_cent,
            ),
        ),
    ),
    Answer(
        "P9",
        "DeepSeek's latent cache",
        numbers=(
            Number(
                "decode",
                "decode step of 4 layers of DeepSeek, 128*",
                "ms",
                "4 layers, 64 rows, 128 tokens cached: {} ms a step",
            ),
            Number("decode", "decode step of 4 layers of DeepSeek, 2048*", "ms", "2,048: {} ms"),
        ),
    ),
    Answer("P10", "engines of several devices", needs="needs vLLM"),
    Answer("P11", "recurrent families in the embedded engine"),
    Answer(
        "P12",
        "long prompts",
        numbers=(
            Number("decode", "a prompt of*", "tokens_per_s", "{} tokens/s", "{:,.0f}".format),
        ),
    ),
    Answer(
        "R3",
        "replay in forward and backward, 4 layers of Qwen3-30B-A3B",
        ("test_steps.py", f"{GRADIENTS}::test_the_host", f"{GRADIENTS}::test_recomputed"),
        (
            Number("moe", "replay", "over_off", "{} over off (under +3%)", per_cent_change),
            Number("moe", "waits*", "waits", "{} waits", str),
            Number("moe", "stock", "over_off", "transformers' own forward {}", per_cent_change),
        ),
    ),
    Answer("on-policy", "rollout is training, to the bit", ("test_on_policy.py",)),
    Answer(
        "commands",
        "`train`, `--resume`, `audit`, one rank over NCCL",
        ("test_cuda.py",),
        (
            Number(
                "smoke", "train", "mismatch/k3", "k3 {} of bfloat16 with replay", "{:.1e}".format
            ),
            Number("smoke", "one rank", "seconds", "a rank in {} s"),
        ),
    ),
)


def of_real_shapes(rows: Rows) -> Rows:
    """Return the rows without those of rehearsals, leases of toy shapes."""
    found, rehearsed = [], False
    for row in rows:
        if "lease" in row:
            rehearsed = row.get("tiny", False)
        if not rehearsed:
            found.append(row)
    return found


def last_runs(rows: Rows) -> Rows:
    """Return the rows of the last run of every case, but for rehearsals."""
    runs: dict[str, list[dict[str, Any]]] = {}
    complete: dict[str, bool] = {}
    for row in of_real_shapes(rows):
        if "lease" in row:
            complete.clear()
        if "case" not in row:
            continue
        if complete.get(row["case"], True):
            runs[row["case"]] = []
        runs[row["case"]].append(row)
        complete[row["case"]] = "ended" in row
    return [row for run in runs.values() for row in run]


def table(rows: Rows) -> str:
    """Return the sentence of the leases and the table."""
    leases = [row for row in of_real_shapes(rows) if "lease" in row]
    if not leases:
        return "No lease of real shapes yet.\n"
    cards = sorted({row["machine"]["device"].split(",")[0] for row in leases})
    machine = leases[-1]["machine"]
    days = sorted({row["lease"][:10] for row in leases})
    commits = ", ".join(row["commit"][:8] for row in leases)
    count = f"{len(leases)} leases" if len(leases) > 1 else "1 lease"
    driver = machine["device"].split(", ")[-1]
    sentence = (
        f"{count} of one {' or '.join(cards)}, {' to '.join(days)}: torch {machine['torch']},\n"
        f"transformers {machine['transformers']}, Python {machine['python']}, driver {driver}; "
        f"commits {commits}.\nThe last run of each case is shown, targets in brackets.\n"
    )
    rows = last_runs(rows)
    lines = [answer.line(rows) for answer in ANSWERS if answer.has_result(rows)]
    missing = [answer for answer in ANSWERS if not answer.has_result(rows)]
    named = [f"{each.what} ({each.needs or 'not reached'})" for each in missing]
    parts = [sentence, "| | what | state | measured |", "|---|---|---|---|", *lines]
    return "\n".join([*parts, "", f"Not run: {', '.join(named)}."]) + "\n"


def written(page: str, rows: Rows) -> str:
    """Return the page with the table between its marks."""
    block = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert len(block.findall(page)) == 1, f"{PAGE.name} has no place for the table"
    return block.sub(lambda _: BEGIN + table(rows) + END, page)


def main() -> int:
    if len(sys.argv) > 1:
        print(table(parsed(Path(sys.argv[1]))))
        return 0
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), parsed(RESULTS)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
