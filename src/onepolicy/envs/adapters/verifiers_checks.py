"""Environments and tasks of verifiers that our engine can play, and refusals of others."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

from onepolicy.config import UsageError, VerifiersTask
from onepolicy.errors import LIBRARY_ERRORS


def load_single_agent_env(config: VerifiersTask) -> tuple[Any, str]:
    """Return the environment and the name of its one agent.

    Raises UsageError if it is unsupported.
    """
    if find_spec("verifiers") is None:
        raise UsageError("task.kind: verifiers is not installed; pip install 'verifiers>=0.4,<0.5'")
    if find_spec("verifiers.v1") is None:
        raise UsageError(
            "task.kind: this release of verifiers has no verifiers.v1; pip install "
            "'verifiers>=0.4,<0.5'"
        )
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    try:
        env = load_environment(resolve_env_config(dict(config.env)))
    except (ImportError, *LIBRARY_ERRORS) as error:
        raise UsageError(f"task.env: verifiers cannot load {config.env!r}: {error}") from error
    _check_environment(env)
    return env, _single_agent(env)


def _single_agent(env: Any) -> str:
    """Return the name of the environment's agent. Raises UsageError if it is unsupported."""
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id

    agents = agent_config_fields(env.config)
    if len(agents) != 1:
        raise UsageError(
            f"task.env: {env.config.env_id} has {len(agents)} agents, {', '.join(agents)}; one can "
            "be trained"
        )
    ((agent_name, config),) = agents.items()
    # bash is the harness that verifiers assumes for a taskset without one.
    if default_harness_id(env.config.taskset.id) != "bash":
        raise UsageError(
            f"task.env: {env.config.taskset.id} brings a harness of its own; only plain chat is "
            "played"
        )
    for name in ("harness", "runtime", "model", "client", "sampling", "timeout", "retries"):
        if getattr(config, name) != AgentConfig.model_fields[name].default:
            raise UsageError(
                f"task.env.{agent_name}.{name}: has no effect, our engine plays the turns; leave "
                "it out"
            )
    return agent_name


def _check_environment(env: Any) -> None:
    import verifiers.v1 as vf

    for name in ("timeout", "retries", "max_concurrent_agents", "interception"):
        if getattr(env.config, name) != vf.EnvConfig.model_fields[name].default:
            raise UsageError(
                f"task.env.{name}: has no effect here; leave it out (task.seconds limits an "
                "episode)"
            )
    if type(env).start is not vf.Env.start or env.taskset.toolsets(env.taskset.config):
        raise UsageError(
            f"task.env: {env.config.env_id} starts servers of its own, which are not run here"
        )


def check_task_supported(task: Any) -> None:
    """Raise UsageError if a task needs more than text and its trace."""
    from verifiers.v1.utils.decorators import discover_decorated

    needs = {
        "a container": task.NEEDS_CONTAINER or task.data.image is not None,
        "tool servers": bool(task.toolsets(task.config)),
        "skills or artifacts in a runtime": bool(task.data.skills or task.data.artifacts),
        "judge models": bool(task.plugged_judges()),
        "to intercept requests": bool(discover_decorated(task, "intercept")),
        "to see requests": _has_stop_on_requests(task),
    }
    missing = [need for need, needed in needs.items() if needed]
    missing += [f"a runtime (in {hook.__name__})" for hook in _hooks(task) if _needs_runtime(hook)]
    if missing:
        raise UsageError(
            f"task.env: {type(task).__name__} needs {' and '.join(missing)}, which is not run "
            "here; take a taskset of text"
        )


def _has_stop_on_requests(task: Any) -> bool:
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary

    stops = task.hooks("stop")
    return any(hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in stops)


def _hooks(task: Any) -> list[Any]:
    """Return the reward and metric hooks, and setup and finalize if the task overrides them."""
    import verifiers.v1 as vf

    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    for name in ("setup", "finalize"):
        if getattr(type(task), name) is not getattr(vf.Task, name):
            hooks.append(getattr(task, name))
    return hooks


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
