"""The example's overrides fit verl's real configuration and onepolicy's checks."""

from __future__ import annotations

import os
import subprocess

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.process]


def overrides_of(script, folder):
    """Run the script with a `python` that prints its arguments, and return those of main_ppo."""
    printing = folder / "python"
    printing.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    printing.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        [script, "trainer.nnodes=2"],
        env=os.environ | {"PATH": path},
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    module, *overrides = done.stdout.splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    return overrides


def test_the_example_fits(tmp_path):
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from onepolicy.integrations.verl.preflight import check_config, replays
    from onepolicy.integrations.verl.settings import read_settings

    overrides = overrides_of(ROOT / "examples" / "verl_ppo.sh", tmp_path)
    overrides.append(f"actor_rollout_ref.model.path={tmp_path}")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    settings = read_settings(dict(config.trainer.onepolicy))
    assert settings.fixed is not None
    assert replays(config)
    assert config.trainer.nnodes == 2
    assert config.trainer.v1.trainer_mode == "onepolicy_sync"
    workers = config.ray_kwargs.ray_init.runtime_env.env_vars
    check_config(config, settings, dict(workers)).finish()
    validate_config(config, need_reference_policy(config), need_critic(config))
