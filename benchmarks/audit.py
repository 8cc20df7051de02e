"""Tokens per second and peak memory of `onepolicy audit`: the numbers of docs/costs.md.

    python benchmarks/audit.py --millions 1 5 20
    python benchmarks/audit.py --millions 1 --layers 24

Writes a synthetic dump of 2000-token samples in 50 steps (Gaussian log-ratio), then audits it in a
fresh process, whose peak resident memory is read at the end. The child that parses the file counts
in the CPU seconds only: Linux says of its memory that of the process that started it. `baseline`:
the process after its imports, before it reads. layers: both sides' routes too, top 8 of 128 in so
many layers.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH, STEPS, TOP_K = 2000, 50, 8


def write(path: Path, tokens: int, layers: int) -> None:
    """Write the dump in parts, so that writing needs no more memory than reading. Columns and row
    groups are those of write_parquet."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from onepolicy.record.schema import ROW_GROUP_ENTRIES

    rng, rows = np.random.default_rng(0), tokens // LENGTH
    each = layers * TOP_K  # routes of a token
    part = max(1, ROW_GROUP_ENTRIES // (LENGTH * (4 + 2 * each)))
    writer, kl = None, 1e-3
    for first in range(0, rows, part):
        count = min(part, rows - first)
        n = count * LENGTH
        rollout = -rng.exponential(0.5, n)
        trainer = np.minimum(rollout + rng.normal(-kl, math.sqrt(2 * kl), n), 0.0)
        flat = {
            "tokens": rng.integers(0, 150_000, n, dtype=np.int32),
            "mask": np.ones(n, bool),
            "logp_rollout": rollout.astype(np.float32),
            "logp_trainer": trainer.astype(np.float32),
        }
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * LENGTH)
        columns = {
            name: pa.ListArray.from_arrays(offsets, pa.array(values))
            for name, values in flat.items()
        }
        columns["step"] = pa.array(
            (np.arange(first, first + count) * STEPS // rows).astype(np.int32)
        )
        if layers:
            ids = rng.integers(0, 16, (n, layers, TOP_K), dtype=np.int32) + 16 * np.arange(
                TOP_K, dtype=np.int32
            )
            other = np.where(rng.random((n, layers, 1)) < 0.02, (ids + 1) % 128, ids)
            routed = pa.array(np.arange(count + 1, dtype=np.int32) * LENGTH * each)
            for name, routes in (("routes_rollout", ids), ("routes_trainer", other)):
                columns[name] = pa.ListArray.from_arrays(routed, pa.array(routes.reshape(-1)))
            for name, size in (("route_layers", layers), ("route_top_k", TOP_K)):
                columns[name] = pa.array(np.full(count, size, np.int32))
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def measure(path: Path) -> None:
    """Audit in the child process and print one JSON line."""
    from onepolicy.audit.run import audit

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def cpu_seconds() -> float:
        return sum(
            used.ru_utime + used.ru_stime
            for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    baseline, start, cpu = peak(), time.perf_counter(), cpu_seconds()
    found = audit(path, {})
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    assert found.accumulated.overall is not None
    row = {
        "tokens": found.accumulated.overall.tokens,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "k3": found.accumulated.overall.statistics()["k3"],
    }
    print(
        json.dumps(
            row | {"baseline_mib": baseline, "peak_mib": peak(), "verdict": found.verdict.action}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.child)
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for millions in args.millions:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dump.parquet"
            write(path, millions * 1_000_000, args.layers)
            size = path.stat().st_size / 2**20
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(path)],
                check=True,
                capture_output=True,
                text=True,
            )
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{row['tokens'] / 1e6:.0f}M tokens ({size:.0f} MiB): "
            f"{row['tokens'] / row['seconds'] / 1e6:.2f}M tokens/s "
            f"({row['tokens'] / row['cpu_seconds'] / 1e6:.2f}M per CPU second), "
            f"peak {row['peak_mib']:.0f} MiB "
            f"(imports alone {row['baseline_mib']:.0f}), k3 {row['k3']:.3e}, {row['verdict']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
