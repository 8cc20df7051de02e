"""The folder or hub id of a model. `tiny` is the policy that `onepolicy make-policy` made."""

from __future__ import annotations

import os
from pathlib import Path

from onepolicy.config.model import ModelConfig
from onepolicy.errors import UsageError


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Replace the path `tiny` by the policy's folder in the user's cache."""
    if model.path != "tiny":
        return model
    return model.model_copy(update={"path": str(_tiny_policy())})


def check_model_path(path: str) -> None:
    """Raise UsageError for a folder that holds no model. A possible hub id passes."""
    if path == "tiny":
        _tiny_policy()
        return
    folder = Path(path)
    if os.path.lexists(folder) and not (folder / "config.json").is_file():
        from onepolicy.config.foreign_folders import FOREIGN

        for pattern, layout in FOREIGN.items():
            if any(folder.glob(pattern)):
                raise UsageError(f"model.path: {path} {layout}")
        raise UsageError(
            f"model.path: {path} has no config.json; give a folder saved by transformers' "
            "save_pretrained"
        )
    if not folder.exists() and not _may_be_hub_id(path):
        raise UsageError(
            f"model.path: no folder {path}; give a saved model, a hub id (org/name) or `tiny`"
        )


def _tiny_policy() -> Path:
    """Return the folder of the tiny policy. Raises UsageError if it has not been made."""
    from onepolicy.config.policy import PolicyConfig, cached_policy_path

    folder = cached_policy_path(PolicyConfig())
    if not folder.is_dir():
        raise UsageError(
            "model.path: the tiny policy has not been made yet; run `onepolicy make-policy` once"
        )
    return folder


def _may_be_hub_id(path: str) -> bool:
    return not Path(path).is_absolute() and not path.startswith(".") and path.count("/") == 1
