"""Models and files that settings name, checked before torch is loaded.

The model `tiny` is the policy that `onepolicy make-policy` made.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from onepolicy.config.model import ModelConfig
from onepolicy.config.policy import PolicyConfig, cached_policy_path
from onepolicy.config.problems import check_held_out, read_prompts, read_task
from onepolicy.config.run import RunConfig
from onepolicy.config.task import (
    JsonlTask,
    ProgramTask,
    PromptsTask,
    ReActTask,
    SearchTool,
    TaskConfig,
)
from onepolicy.errors import UsageError

FOREIGN = {
    "adapter_config.json": "is an adapter of peft without its model; merge it: "
    "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(MERGED), "
    "and save the base's tokenizer there too",
    "model_world_size_*_rank_*.pt": "is a sharded checkpoint of verl; merge it: "
    "python -m verl.model_merger merge --backend fsdp --local_dir FOLDER --target_dir MERGED",
    "actor/model_world_size_*_rank_*.pt": "is a step of verl; merge its folder actor: "
    "python -m verl.model_merger merge --backend fsdp --local_dir actor --target_dir MERGED",
    "common.pt": "is a checkpoint of Megatron-core; export it: "
    "megatron.bridge.AutoBridge.from_hf_pretrained(BASE).export_ckpt(FOLDER, MERGED), "
    "or tools/convert_torch_dist_to_hf.py of slime",
    "latest_checkpointed_iteration.txt": "holds checkpoints of Megatron; export one: "
    "megatron.bridge.AutoBridge.from_hf_pretrained(BASE).export_ckpt(FOLDER, MERGED), "
    "or tools/convert_torch_dist_to_hf.py of slime",
    "*.distcp": "is a distributed checkpoint of torch; let its trainer save the model by "
    "save_pretrained",
}
"""Files by which a folder shows that a trainer wrote it for itself -> the way out."""


def check_input_files(config: RunConfig) -> None:
    """Raise UsageError for a model folder, a data file or a line that is missing or wrong."""
    check_model_path(config.model.path)
    check_run_task(config)


def check_run_task(config: RunConfig) -> None:
    """Raise UsageError for a data file of a run, as `check_task_files`."""
    check_task_files(config.task, config.eval.every and config.eval.problems)


def check_task_files(task: TaskConfig, evaluated: int = 0) -> None:
    """Raise UsageError for a data file that is missing, or a line of it that is wrong.

    evaluated: held-out problems that the run needs.
    """
    if isinstance(task, PromptsTask):
        read_prompts(task.path)
    if isinstance(task, JsonlTask):
        _check_problems(task, evaluated, "task")
    if isinstance(task, ReActTask | ProgramTask) and isinstance(task.problems, JsonlTask):
        _check_problems(task.problems, evaluated, "task.problems")
    if isinstance(task, ProgramTask):
        _check_program_files(task)
    if isinstance(task, ReActTask):
        for tool in task.tools:
            if isinstance(tool, SearchTool) and not Path(tool.corpus).is_file():
                raise UsageError(
                    f"task.tools: search cannot read its corpus {tool.corpus}: no such file; give "
                    "the path of a JSONL file"
                )


def _check_program_files(task: ProgramTask) -> None:
    """Raise UsageError for a file or folder of a program that is missing."""
    require_gateway("task.kind = program")
    if task.folder is not None and not Path(task.folder).is_dir():
        raise UsageError(f"task.folder: no folder {task.folder}; give that of the program")
    for path in task.readable:
        if not Path(path).is_absolute() or not Path(path).exists():
            raise UsageError(
                f"task.readable: {path} is no absolute path of a file or folder here; give one"
            )
    if task.template is not None:
        read_template(task.template, "task.template")


def require_gateway(what: str) -> None:
    """Raise UsageError unless the packages of the gateway's server are there. what: needs them."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {' and '.join(missing)}; pip install 'onepolicy[gateway]'")


def read_template(path: str, setting: str) -> str:
    """Return a chat template. Raises UsageError, with the setting's name, if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{setting}: {path} cannot be read: {error}; give a text file") from None


def _check_problems(task: JsonlTask, evaluated: int, section: str) -> None:
    train, held_out = read_task(task, section)
    check_held_out(task, evaluated, len(held_out), len(train) + len(held_out), section)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Replace the path `tiny` by the policy's folder in the user's cache."""
    if model.path != "tiny":
        return model
    return model.model_copy(update={"path": str(_tiny_policy())})


def absolute_path(path: str) -> str:
    """Return a path for a process with another working folder. `tiny` and hub ids stay."""
    if path != "tiny" and Path(path).exists():
        return str(Path(path).resolve())
    return path


def check_model_path(path: str) -> None:
    """Raise UsageError for a folder that holds no model. A possible hub id passes."""
    if path == "tiny":
        _tiny_policy()
        return
    folder = Path(path)
    if os.path.lexists(folder) and not (folder / "config.json").is_file():
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
    folder = cached_policy_path(PolicyConfig())
    if not folder.is_dir():
        raise UsageError(
            "model.path: the tiny policy has not been made yet; run `onepolicy make-policy` once, "
            "without settings (a policy of other settings is given by its folder)"
        )
    return folder


def _may_be_hub_id(path: str) -> bool:
    return not Path(path).is_absolute() and not path.startswith(".") and path.count("/") == 1
