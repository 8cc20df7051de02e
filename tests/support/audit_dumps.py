"""Synthetic dumps with known answers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from onepolicy.record.schema import COLUMNS, Scored, write_parquet

Rows = list[dict]
ROWS, LENGTH, VOCABULARY = 24, 40, 50
SUFFIXES = (".parquet", ".jsonl", ".npz", ".safetensors", ".pt")


def gaussian_rows(
    kl: float, *, rows: int = 50, length: int = 80, seed: int = 0, entropy: bool = True, **extra
) -> Rows:
    """Return rows with log rho normal, mean -kl and variance 2 kl under the rollout: E[rho] = 1, KL
    = kl. Each has two prompt tokens."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(rows):
        rollout = -(10 + rng.random(length) * 6)  # never above 0, whatever the noise
        trainer = rollout + rng.normal(-kl, math.sqrt(2 * kl), length)
        mask = np.arange(length) >= 2
        row = {"tokens": np.arange(length), "mask": mask}
        row |= {"logp_rollout": rollout, "logp_trainer": trainer}
        row |= {"entropy": np.full(length, 13.0)} if entropy else {}
        rollout[:2] = np.nan  # prompts carry no log-probability
        out.append({name: value.tolist() for name, value in row.items()} | extra)
    return out


def world_rows(
    seed: int,
    *,
    noise: float = 0.05,
    temperature: float = 1.0,
    shift: int = 0,
    stale: float = 0.0,
    entropy: bool = False,
) -> Rows:
    """Return rows of two engines whose softmaxes have the same logits but for noise, with one
    planted cause. stale: half of the rows were sampled by weights this far from the trainer's, and
    `version` shows it."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, LENGTH, VOCABULARY, generator=g)
    logits = logits * (3 * torch.rand(ROWS, LENGTH, 1, generator=g) + 0.5)
    rollout_logits = logits + noise * torch.randn(logits.shape, generator=g)
    if stale:
        rollout_logits[::2] += stale * torch.randn(rollout_logits[::2].shape, generator=g)
    p = (rollout_logits / temperature).softmax(-1)
    tokens = torch.multinomial(p.flatten(0, 1), 1, generator=g).reshape(ROWS, LENGTH)
    rollout = p.log().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    trainer = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).roll(shift, 1)
    h = torch.distributions.Categorical(logits=logits).entropy()
    rows = []
    for i in range(ROWS):
        row = {"tokens": tokens[i].tolist(), "mask": [True] * LENGTH}
        row |= {"logp_rollout": rollout[i].tolist(), "logp_trainer": trainer[i].tolist()}
        row |= {"entropy": h[i].tolist()} if entropy else {}
        row |= {"version": 6 + i % 2} if stale else {}
        rows.append(row)
    return rows


def with_routes(
    rows: Rows, *, layers: int = 4, experts: int = 16, k: int = 4, noise: float = 0.02, seed=0
) -> Rows:
    """Add routes: both sides route every token to the same experts, but a fraction `noise` of the
    routers differs in one expert."""
    rng = np.random.default_rng(seed)
    out = []
    for row in rows:
        tokens = len(row["tokens"])
        rollout = rng.random((tokens, layers, experts)).argsort(-1)[..., : k + 1]
        trainer, differs = rollout[..., :k].copy(), rng.random((tokens, layers)) < noise
        trainer[..., 0] = np.where(differs, rollout[..., k], trainer[..., 0])
        sides = {"routes_rollout": rollout[..., :k], "routes_trainer": trainer}
        both = {name: ids.reshape(-1).tolist() for name, ids in sides.items()}
        out.append(row | both | {"route_layers": layers, "route_top_k": k})
    return out


def moved_routes(rows: Rows, how: str) -> Rows:
    """Move the rollout's routes one layer on, one row late, or to the next sample."""
    out = []
    for i, row in enumerate(rows):
        shape = len(row["tokens"]), row["route_layers"], row["route_top_k"]
        ids = np.array(row["routes_rollout"]).reshape(shape)
        match how:
            case "layer":
                ids = np.roll(ids, 1, axis=1)
            case "row":
                ids = np.roll(ids, 1, axis=0)
            case "swap":
                ids = np.array(rows[i ^ 1]["routes_rollout"]).reshape(shape)
        out.append(row | {"routes_rollout": ids.reshape(-1).tolist()})
    return out


def write_dump(path: Path, rows: Rows) -> Path:
    """Write the dump in the format of the suffix. Arrays: flat, with `length`."""
    if path.suffix == ".parquet":
        write_parquet(path, rows)
        return path
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    arrays = {"length": np.array([len(row["tokens"]) for row in rows])}
    for name in rows[0]:
        lists = isinstance(rows[0][name], list)
        values = [row[name] for row in rows]
        array = np.concatenate([np.array(v) for v in values]) if lists else np.array(values)
        arrays[name] = array.astype(np.float32) if COLUMNS[name].kind == "float" else array
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


def write_jsonl(path: Path, rows: Sequence[dict]) -> Path:
    import json

    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rewrite(path: Path, data: bytes) -> None:
    """Replace the file's content. A file system may wait for its disk where a file is emptied
    first."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(handle, data)
    os.ftruncate(handle, len(data))
    os.close(handle)


def check_blocks(blocks: list[Scored]) -> None:
    """Check the inputs of the statistics, independently of the readers."""
    rows = 0
    assert blocks
    for block in blocks:
        assert block.first_row == rows
        rows += len(block.lengths)
        assert (block.lengths >= 0).all()
        tokens = int(block.lengths.sum())
        mask = block.columns["mask"]
        assert mask.dtype == bool
        for name in ("tokens", "mask", "logp_rollout", "logp_trainer"):
            assert block.columns[name].shape == (tokens,)
        for name in ("tokens", "version"):  # the size of -2**63 is below 2**31 as well
            values = block.columns.get(name, np.zeros(1))
            assert -(2**31) < values.min(initial=0) <= values.max(initial=0) < 2**31
        for name in ("logp_rollout", "logp_trainer"):
            inside = block.columns[name][mask]
            assert np.isfinite(inside).all()
            assert ((inside <= 1e-3) & (inside >= -1e6)).all()
        if "routes_rollout" in block.columns:
            both = (block.columns["routes_rollout"], block.columns["routes_trainer"])
            assert all(ids.ndim == 3 and len(ids) == tokens for ids in both)
            assert all(ids.min(initial=0) >= -1 for ids in both)
            assert both[0].shape == both[1].shape
    assert rows
