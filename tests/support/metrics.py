"""Rows of a run's metrics.jsonl."""

import json


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(row):
    """Return a metrics row without the fields that depend on the clock."""
    clocks = ("time/", "async/")
    return {k: v for k, v in row.items() if not k.startswith(clocks) and "per_second" not in k}
