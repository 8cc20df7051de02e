"""Settings that have a new name. Recipes, overrides and stored run folders may use the old one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from onepolicy.errors import UsageError

Tree = dict[str, Any]
LOG = logging.getLogger(__name__)

ENGINE_KEYS = {
    "slots": "max_num_seqs",
    "prefix_reuse": "enable_prefix_caching",
    "cache_gib": "kv_cache_gib",
}
QUANT_KEYS = {"also": "extra_modules"}
RUN_KEYS = {
    **{f"rollout.engine.{old}": f"rollout.engine.{new}" for old, new in ENGINE_KEYS.items()},
    **{f"rollout.quant.{old}": f"rollout.quant.{new}" for old, new in QUANT_KEYS.items()},
    "rollout.engine.patience_s": "rollout.engine.recovery_timeout_s",
    "rollout.min_survivors": "rollout.min_group_size",
    "replay.rows": "replay.duplicate_routes",
    "objective.mini_steps": "objective.num_minibatches",
    "optim.decay": "optim.lr_decay",
    "train.compute": "train.fsdp_param_dtype",
    "cluster.weights": "cluster.sync",
    "cluster.shared_dir": "cluster.sync_dir",
}
"""Settings of a run: old dotted path -> new dotted path in the same section."""
SERVE_KEYS = {
    **ENGINE_KEYS,
    **{f"quant.{old}": f"quant.{new}" for old, new in QUANT_KEYS.items()},
}
"""Settings of `onepolicy engine serve`."""


def rename_keys(tree: Tree, renamed: Mapping[str, str]) -> tuple[Tree, list[str]]:
    """Return the settings under their new names, and the old names that were in use.

    Raises UsageError if a setting is there under both names.
    """
    found = []
    for old, new in renamed.items():
        *sections, name = old.split(".")
        parents = _sections(tree, sections)
        if parents is None or name not in parents[-1]:
            continue
        new_name = new.rpartition(".")[2]
        if new_name in parents[-1]:
            raise _both(old, new)
        section = {key: value for key, value in parents[-1].items() if key != name}
        node: Any = section | {new_name: parents[-1][name]}
        for parent, key in zip(reversed(parents[:-1]), reversed(sections), strict=True):
            node = parent | {key: node}
        tree = node
        found.append(old)
    return tree, found


def rename_overrides(
    overrides: Iterable[str], renamed: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the overrides `a.b=c` under their new names, and the old names that were in use.

    Raises UsageError if a setting is overridden under both names.
    """
    overrides = list(overrides)
    names = {override.partition("=")[0] for override in overrides}
    found = [old for old in renamed if old in names]
    for old in found:
        if renamed[old] in names:
            raise _both(old, renamed[old])
    current = []
    for override in overrides:
        name, sign, value = override.partition("=")
        current.append(f"{renamed.get(name, name)}{sign}{value}")
    return current, found


def warn_renamed(old_names: Iterable[str], renamed: Mapping[str, str]) -> None:
    """Write one line on stderr for each old name, once in a process."""
    for old in old_names:
        _warn(old, renamed[old])


@contextmanager
def without_warnings() -> Iterator[None]:
    """Write no line about old names inside the block."""
    LOG.disabled = True
    try:
        yield
    finally:
        LOG.disabled = False


@functools.cache
def _warn(old: str, new: str) -> None:
    LOG.warning("%s is now %s; the old name still works", old, new)


def _both(old: str, new: str) -> UsageError:
    return UsageError(f"{old}: is the old name of {new}, and both are set; leave {old} out")


def _sections(tree: Tree, names: list[str]) -> list[Tree] | None:
    """Return the tree and the section under each name in turn, or None if one is missing."""
    sections = [tree]
    for name in names:
        section = sections[-1].get(name)
        if not isinstance(section, dict):
            return None
        sections.append(section)
    return sections
