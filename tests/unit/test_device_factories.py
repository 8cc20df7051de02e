"""Tensors are made on a device that the line names. On a CPU nothing else would show a mistake."""

import ast

from support.paths import ROOT

SOURCE = ROOT / "src" / "onepolicy"
ROOMS = ("models", "train", "rollout/hf")
FACTORIES = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"
CPU_KERNEL = "a kernel of the CPU only"
SCORES = "scores of a whole step are collected in host memory"
COMPLETION = "completions are in host memory"
SENT_ONCE = "index arithmetic on the host, sent to the device once"
FAKE = "a dry run computes nothing on any device"
SCALAR = "a tensor without dimensions goes with those of any device"
ON_THE_HOST = {
    "models/decode_attention.py:_steps": CPU_KERNEL,
    "models/decode_experts.py:experts": CPU_KERNEL,
    "models/decode_experts.py:rows_of_experts": CPU_KERNEL,
    "models/embedding_bag_matmul.py:bag_offsets": CPU_KERNEL,
    "models/embedding_bag_matmul.py:_arange": CPU_KERNEL,
    "models/buckets.py:_bucket": SENT_ONCE,
    "models/prepare.py:_packed_logits": "sample bounds, which are read on the host",
    "models/product_check.py:product_errors": "the exact product is computed on the host",
    "models/quant/layers.py:set_weight": CPU_KERNEL,
    "models/quant/layers.py:by_rows": CPU_KERNEL,
    "models/quant/quantise.py:reset_statistics": SCALAR,
    "models/quant/quantise.py:calibrate": SCALAR,
    "models/quant/quantise.py:check_kernels": CPU_KERNEL,
    "train/shared_prompts.py:of_paths": CPU_KERNEL,
    "train/shared_prompts.py:_bucket": CPU_KERNEL,
    "rollout/hf/continuous_batch.py:_complete_row": COMPLETION,
    "rollout/hf/continuous_batch.py:_trace": COMPLETION,
    "rollout/hf/forward.py:_prefill_step": SENT_ONCE,
    "rollout/hf/pressure.py:__init__": "empty until it is drawn",
    "rollout/hf/pressure.py:draw": "the same noise on every device",
    "rollout/hf/runner_up.py:__init__": "empty until a forward feeds tokens",
    "rollout/hf/scheduler.py:empty_completion": COMPLETION,
    "rollout/hf/static_batch.py:_completion": COMPLETION,
    "rollout/hf/static_batch.py:_trace": COMPLETION,
    "train/dry_run.py:_slot_layout": FAKE,
    "train/dry_run.py:_fake_batch": FAKE,
    "train/fake_kernels.py:_sort_evenly": FAKE,
    "train/optim.py:_norm": SCALAR,
    "train/pack.py:pack": "a step's batch is in host memory, micro-batches go to the device",
    "train/rescore.py:_ranks": SCORES,
    "train/own_weights.py:score": SCORES,
    "train/own_weights.py:_route_versions": SCORES,
    "train/own_weights.py:_empty_trace": SCORES,
    "train/scorer.py:compute_per_slot": SCORES,
    "train/scorer.py:__init__": SCORES,
    "train/scorer.py:_add_rows": SCORES,
    "train/scorer.py:_add_native": SCORES,
    "train/scorer.py:_add_gate_mass": SCORES,
    "train/scorer.py:fill_batch": SCORES,
    "train/shared_prompts.py:share_prompts": "micro-batches of a step in host memory",
    "train/sharded/export.py:_read_weights": "weights go from file to file",
    "train/sharded/fsdp.py:_copy_from_rank_0": "sent to the device in the next line",
    "train/sharded/learner.py:merge_scores": SCORES,
}
"""file:function -> why its tensors are in host memory on purpose."""


def device_less(source: str) -> list[tuple[str, int]]:
    """Return (function, line) of every torch factory that is called without `device=`."""
    found = []

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = node.name
        if isinstance(node, ast.Call) and _is_factory(node.func):
            named = {keyword.arg for keyword in node.keywords}
            if not named & {"device", None}:
                found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def _is_factory(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and function.attr in FACTORIES.split()
    )


def calls() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in (path for room in ROOMS for path in (SOURCE / room).rglob("*.py")):
        for function, line in device_less(path.read_text()):
            found.setdefault(f"{path.relative_to(SOURCE)}:{function}", []).append(line)
    return found


def test_every_factory_names_its_device_and_no_reason_is_left_over():
    found = calls()
    unnamed = {name: lines for name, lines in found.items() if name not in ON_THE_HOST}
    assert not unnamed, f"give these torch factories a device=: {unnamed}"
    assert set(ON_THE_HOST) <= set(found)


def test_the_lint_sees():
    for line, count in {
        "torch.zeros(3)": 1,
        "torch.zeros(3, device=x.device)": 0,
        "torch.zeros(3, **like)": 0,
        "x.new_zeros(3)": 0,
        "torch.zeros_like(x)": 0,
        "torch.stack([torch.arange(n) for n in lengths])": 1,
    }.items():
        assert len(device_less(f"def f(x):\n    return {line}")) == count, line
