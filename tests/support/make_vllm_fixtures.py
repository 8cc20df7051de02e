"""Make the fixtures of test_vllm_generations.py with the code of released vLLM wheels. No engine
runs: not live runs.

    for v in 0.20.2 0.21.0 0.22.0 0.28.0 0.31.0 0.33.0; do
      pip download --no-deps --only-binary=:all: -d wheels vllm==$v
      unzip -q wheels/vllm-$v-*.whl 'vllm/*.py' -d sources/$v
    done
    fixtures=tests/unit/replay/payloads/fixtures
    PYTHONPATH=tests python -m support.make_vllm_fixtures sources $fixtures

Of each wheel this runs the code between the routers and the caller: the capture buffer, the store
of routes, the scheduler's lines that read it, `RequestState`'s lines that build the output, and the
lines that encode it for HTTP. Modules they import are replaced by empty ones; the copy from the GPU
(0.21) by a copy on the CPU. Two requests with one prompt are played, the second with its first
block in the prefix cache.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
from pathlib import Path
from threading import Lock
from types import SimpleNamespace as Bag
from typing import Any

import numpy as np
import torch

from support.wheel_source import Wheel

LAYERS, MOE, TOP_K, BLOCK = 4, (1, 3), 2, 4
PROMPT, COMPLETION = 5, 4
FED = PROMPT + COMPLETION - 1
REQUESTS = {"first": ([3, 1], 0), "again": ([3, 2], BLOCK)}
"""Blocks of the cache, tokens that were in it."""
STEPS = {"first": [(0, PROMPT)], "again": [(BLOCK, PROMPT)]}
"""[start, stop) of the fed tokens, one entry per step."""
for steps in STEPS.values():
    steps += [(t, t + 1) for t in range(PROMPT, FED)]


def experts(token: int, layer: int, num_experts: int) -> list[int]:
    """Return the experts that the router of `layer` chose for the token, in its own order; prompt
    and decode alike in both requests."""
    first = (37 * token + 11 * layer) % num_experts
    return [first, (first + 1 + token % 3) % num_experts]


def chosen(start: int, stop: int, layer: int, num_experts: int) -> torch.Tensor:
    """Return [stop - start, K] int32."""
    rows = [experts(t, layer, num_experts) for t in range(start, stop)]
    return torch.tensor(rows, dtype=torch.int32)


CAPTURER = "vllm/model_executor/layers/fused_moe/routed_experts_capturer.py"
SCHEDULER, PROCESSOR = "vllm/v1/core/sched/scheduler.py", "vllm/v1/engine/output_processor.py"
COMPLETIONS, OUTPUTS = "vllm/entrypoints/openai/completion/serving.py", "vllm/outputs.py"


def config(num_experts: int) -> Any:
    """Return the part of a VllmConfig that the capture code reads."""
    hf = Bag(num_hidden_layers=LAYERS, num_experts_per_tok=TOP_K, num_experts=num_experts)
    hf.model_type = "fixture"
    hf.mlp_only_layers, hf.decoder_sparse_step = [i for i in range(LAYERS) if i not in MOE], 1
    model = Bag(
        hf_text_config=hf,
        enable_return_routed_experts=True,
        get_total_num_hidden_layers=lambda: LAYERS,
        get_num_experts=lambda: num_experts,
        get_num_experts_per_tok=lambda: TOP_K,
    )
    parallel = Bag(data_parallel_rank=0, tensor_parallel_size=1)
    return Bag(model_config=model, parallel_config=parallel, instance_id="fixture")


class Rest(Bag):
    """A namespace whose other attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


class FullAttentionSpec:
    block_size = BLOCK


CACHE = Bag(kv_cache_groups=[Bag(kv_cache_spec=FullAttentionSpec())], num_blocks=8)
GIVEN = {
    "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
    "vllm.forward_context": {
        "get_forward_context": lambda: Bag(dp_metadata=None, batch_descriptor=None)
    },
    "vllm.platforms": {"current_platform": Bag(device_type="cpu")},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
    "vllm.v1.worker.ubatching": {"dbo_current_ubatch_token_offset": lambda: 0},
    "vllm.logger": {"init_logger": lambda name: Bag(info=print, warning=print, debug=print)},
}


def slots(blocks: list[int], start: int, stop: int) -> np.ndarray:
    return np.array([blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(start, stop)])


def play_0_20(wheel: Wheel, num_experts: int) -> dict[str, Any]:
    module = wheel.module(CAPTURER)
    capturer, reader = module.RoutedExpertsCapturer.create(), module.RoutedExpertsReader.create()
    capturer.init_buffer(
        max_num_batched_tokens=16, max_num_kv_tokens=32, vllm_config=config(num_experts)
    )
    reader.attach_buffer(max_num_kv_tokens=32, vllm_config=config(num_experts))
    read = wheel.function(SCHEDULER, "_get_routed_experts", {"np": np})
    found = {}
    for name, (blocks, _) in REQUESTS.items():
        for start, stop in STEPS[name]:
            capturer.clear_buffer()
            for layer in MOE:
                capturer.capture(layer, chosen(start, stop, layer, num_experts))
            capturer.save_captured_experts(slots(blocks, start, stop))
        scheduler = Bag(
            vllm_config=config(num_experts),
            kv_cache_manager=Bag(
                get_blocks=lambda name, blocks=blocks: Bag(get_block_ids=lambda: [blocks])
            ),
            routed_experts_attn_gid=0,
            kv_cache_config=CACHE,
            routed_experts_reader=reader,
        )
        found[name] = {"routed_experts": read(scheduler, Bag(request_id=name, num_tokens=FED + 1))}
    reader.cleanup()
    capturer.cleanup()
    return found


def play_0_21(wheel: Wheel, num_experts: int) -> dict[str, Any]:
    module = wheel.module(CAPTURER)
    count = module._count_moe_layers(config(num_experts).model_config.hf_text_config)
    device = module._RoutedExpertsDeviceCache(16, count, TOP_K, "cpu")
    real = module._RoutedExpertsCapturerReal
    capturer = real.__new__(real)  # without CUDA streams
    capturer.host_cache = module._RoutedExpertsHostCache(count, TOP_K, 64)
    capturer.device_cache, capturer._has_pending_copy = device, False
    found = {}
    for name in REQUESTS:
        for start, stop in STEPS[name]:
            for column, layer in enumerate(MOE):
                capturer.capture(column, chosen(start, stop, layer, num_experts))
            capturer._pinned_staging = device.buffer.clone()
            capturer._pending_positions = np.arange(start, stop)
            capturer._pending_num_scheduled = {name: stop - start}
            capturer._pending_total_tokens = stop - start
            capturer._scatter_to_host()
        rows = capturer.get_routed_experts(name, free_slot=False)
        prompt, completion = module.split_routed_experts(rows, PROMPT, COMPLETION)
        found[name] = {"prompt_routed_experts": prompt, "routed_experts": completion}
    return found


def play_0_22(wheel: Wheel, num_experts: int) -> dict[str, Any]:
    module = wheel.module(CAPTURER)
    arguments = {"vllm_config": config(num_experts), "kv_cache_config": CACHE}
    taken = 1 if wheel.version < "0.28" else 2
    capturer = module.RoutedExpertsCapturer(16, *list(arguments.values())[:taken])
    manager = module.RoutedExpertsManager(**arguments)
    store = wheel.statement(SCHEDULER, "self.routed_experts_mgr.store_batch(")
    read = wheel.statement(SCHEDULER, "self._re_block_ids.pop(")
    found = {}
    for name, (blocks, _) in REQUESTS.items():
        chunks = []
        for step, (start, stop) in enumerate(STEPS[name]):
            for layer in MOE:
                capturer.capture(layer, chosen(start, stop, layer, num_experts))
            data = capturer.get_device_buffer()[: stop - start].clone().numpy()
            space: dict[str, Any] = {
                "self": Bag(
                    routed_experts_mgr=manager,
                    enable_return_routed_experts=True,
                    _re_block_ids={name: blocks},
                ),
                "model_runner_output": Bag(
                    routed_experts=Bag(routing_data=data, slot_mapping=slots(blocks, start, stop)),
                    req_ids=[name],
                ),
                "num_scheduled_tokens": {name: stop - start},
                "routing_data": None,
                "routing_offsets": {},
                "req_id": name,
                "new_token_ids": [7],
                "num_tokens_scheduled": stop - start,
                "num_output_tokens_before": step,
                "scheduled_spec_token_ids": None,
                "request": Bag(
                    sampling_params=Bag(routed_experts_prompt_start=0), num_prompt_tokens=PROMPT
                ),
            }
            exec(store, space)
            exec(read, space)
            chunks.append(space["routed_experts"])
        found[name] = {"chunks": chunks}
    return found


def play_0_31(wheel: Wheel, num_experts: int) -> dict[str, Any]:
    folder = "vllm/distributed/aux_output_connector/"
    names = ("store", "routed_experts", "connector")
    store, experts_module, control = (wheel.module(f"{folder}{name}.py") for name in names)
    capturer = wheel.module(CAPTURER).RoutedExpertsCapturer(16, config(num_experts))
    worker_module = wheel.module(folder + "worker.py")
    dtype, shape = np.dtype(capturer.output_dtype_name), capturer.shape_per_token
    size = BLOCK * int(np.prod(shape)) * dtype.itemsize
    worker = worker_module.AuxOutputWorkerConnector.__new__(worker_module.AuxOutputWorkerConnector)
    worker._capturer, worker._max_concurrent_batches = capturer, 1
    worker._store = store.BackgroundBlockObjectStore(
        store.BlockObjectStore(max_bytes=8 * size, object_nbytes=size), max_pending_batches=4
    )
    worker._buffer = experts_module.RoutedExpertsBuffer(dtype, shape, BLOCK, 2, 16, 1)
    worker._requests, worker._pending_outputs, worker._lock, worker._generation = {}, [], Lock(), 0
    # of the prompt's block, and of the one decoding fills
    hashes = [bytes([number]) * 16 for number in (1, 2)]
    found = {}
    for name in REQUESTS:
        chunks, sent = [], 0
        for step, (start, stop) in enumerate(STEPS[name]):
            keyed = stop // BLOCK
            new = control.PackedBlockHashes(b"".join(hashes[sent:keyed]), 16)
            sent, emitted = keyed, 0 if step == 0 else start
            given = {name: new} if new.data else {}
            worker.begin_step(control.AuxOutputConnectorMetadata(0, {name: emitted}, given, ()))
            for layer in MOE:
                capturer.capture(layer, chosen(start, stop, layer, num_experts))
            batch = Bag(
                req_ids=[name],
                query_start_loc_np=np.array([0, stop - start]),
                num_computed_tokens_np=np.array([start]),
            )
            pending = worker.prepare_output(batch)
            pending.enqueue_cpu_copy(np.array([1]), np.array([0]))
            request = Bag(request_id=name, num_tokens=stop + 1, is_finished=lambda: False)
            take = control.AuxOutputSchedulerConnector.take_output
            chunks.append(take(None, request, pending.process_output()))
        found[name] = {"chunks": chunks}
    worker.close()
    return found


def finish(wheel: Wheel, found: dict[str, Any]) -> dict[str, Any]:
    """Return the wheel's own CompletionOutput of the scheduler's result."""
    completion_output = wheel.module(OUTPUTS).CompletionOutput
    names = {"np": np, "CompletionOutput": completion_output, "RequestOutputKind": Bag(DELTA=1)}
    build = wheel.function(PROCESSOR, "_new_completion_output", names)
    request = Rest(
        request_index=0, routed_experts_chunks=found.get("chunks"), logprobs_processor=Rest()
    )
    request._weight_version_spans = lambda: None
    request.detokenizer = Bag(
        get_next_output_text=lambda finished, delta: "", output_token_ids=[7] * COMPLETION
    )
    given = {"routed_experts": found["routed_experts"]} if "routed_experts" in found else {}
    completion = build(request, [7], "length", None, **given)
    return {"output": completion, "prompt_routed_experts": found.get("prompt_routed_experts")}


def reply(wheel: Wheel, done: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of /v1/completions that hold routes, encoded by the wheel's own lines."""
    if wheel.version < "0.21":
        return None
    output = done["output"]
    space: dict[str, Any] = {"output": output, "np": np, "io": io, "base64": base64}
    if wheel.version < "0.22":
        prompt = {"pre": done["prompt_routed_experts"]}
        line = "prompt_routed_experts = pre.tolist()"
        exec(wheel.statement(COMPLETIONS, line, ast.Assign), prompt)
        given = wheel.argument(COMPLETIONS, "CompletionResponseChoice", "routed_experts")
        choice = eval(given, space)
        choices = [{"index": 0, "routed_experts": choice}]
        return {"prompt_routed_experts": prompt["prompt_routed_experts"], "choices": choices}
    if wheel.version < "0.28":
        exec(wheel.statement(COMPLETIONS, "np.save(buf, output.routed_experts)"), space)
    else:
        modules = sorted((wheel.root / "vllm").rglob("*.py"))
        serial = next(p for p in modules if "def numpy2base64(" in p.read_text())
        names = {"np": np, "io": io, "pybase64": base64}
        path = str(serial.relative_to(wheel.root))
        space["numpy2base64"] = wheel.function(path, "numpy2base64", names)
        exec(wheel.statement(COMPLETIONS, "numpy2base64(output.routed_experts)", ast.Assign), space)
    return {"choices": [{"index": 0, "routed_experts": space["routed_experts_b64"]}]}


PLAY = {"0.20.2": play_0_20, "0.21.0": play_0_21, "0.22.0": play_0_22, "0.28.0": play_0_22}
PLAY |= {"0.31.0": play_0_31, "0.33.0": play_0_31}


def array(found: np.ndarray | None) -> Any:
    return None if found is None else {"dtype": str(found.dtype), "rows": found.tolist()}


def make(root: Path, version: str, num_experts: int) -> dict[str, Any]:
    requests = {}
    with Wheel(root, version, GIVEN) as wheel:
        for name, found in PLAY[version](wheel, num_experts).items():
            done = finish(wheel, found)
            requests[name] = {
                "cached": REQUESTS[name][1],
                "prompt_routed_experts": array(done["prompt_routed_experts"]),
                "routed_experts": array(done["output"].routed_experts),
                "reply": reply(wheel, done),
            }
    return {
        "made_with": f"the serialiser of vllm {version}, not a live run; see make_vllm_fixtures.py",
        "version": version,
        "num_experts": num_experts,
        "prompt": PROMPT,
        "completion": COMPLETION,
        "layers": MOE,
        "depth": LAYERS,
        "chosen": [[experts(t, layer, num_experts) for layer in MOE] for t in range(FED)],
        "requests": requests,
    }


def main() -> None:
    root, out = map(Path, sys.argv[1:])
    for version in PLAY:
        for num_experts in (8, 300):
            text = json.dumps(make(root, version, num_experts), separators=(",", ":"))
            (out / f"vllm-{version}-e{num_experts}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
