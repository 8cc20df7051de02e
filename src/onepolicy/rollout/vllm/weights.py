"""Weight sync to a running vLLM by its own reload, with fixes for three of its bugs."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from torch import nn

from onepolicy.config import TrainingError
from onepolicy.interfaces import NamedWeights
from onepolicy.sync.broadcast import ReceiverLost, Sender
from onepolicy.sync.group import start_in_daemon_thread


def reload_weights(worker: Any, weights: NamedWeights) -> None:
    """Load weights into a vLLM worker.

    weights: under their checkpoint names, those of a layer together; read once.
    """
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    except BaseException:
        abort_reload(worker)
        raise
    finish_reload(worker.get_model())


async def send_to_workers(llm: Any, weights: NamedWeights, version: int, workers: int) -> None:
    """Send weights to the worker processes of an LLMEngine on this machine, and wait for them.

    Raises TrainingError, with the first cause, if one of them has not loaded all weights.
    """
    with Sender(receivers=workers) as sender:

        def load() -> None:
            try:
                results = llm.collective_rpc("onepolicy_receive", args=(sender.invitation, version))
                problems = [each["problem"] for each in results if each["problem"]]
                if problems:
                    raise TrainingError(problems[0])
            except BaseException:
                sender.cancel()
                raise

        loading = start_in_daemon_thread(load)
        try:
            sender.send(weights, version)
        except ReceiverLost:
            loading.result()
            raise
        finally:
            wait([loading])  # vLLM takes one call at a time
        loading.result()


def abort_reload(worker: Any) -> None:
    """Restore the old tensors of every layer that a failed reload did not finish.

    vLLM 0.30.0 leaves such layers without tensors, which ends the engine at the next request, and
    its next reload would start from the leftovers. Tensors collected for a layer are dropped first,
    because loading them may be the failure.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.get_model()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.vllm_config.model_config)


def finish_reload(model: nn.Module) -> None:
    """Renew the tensors that vLLM derives from weights and does not itself renew."""
    pack_experts(model)
    renew_convolutions(model)


def renew_convolutions(model: nn.Module) -> None:
    """Give Mamba-2 layers the convolutions that were loaded.

    vLLM 0.30.0 computes with a view of the first weights, which a reload puts into new memory: the
    convolutions would keep their first weights without an error.
    """
    for module in model.modules():
        held, layer = (getattr(module, name, None) for name in ("conv_weights", "conv1d"))
        if held is None or layer is None:
            continue
        loaded = getattr(layer, "_cpu_unpacked_conv_weight", None)  # where the CPU has packed it
        if loaded is None:
            loaded = layer.weight
        held.copy_(loaded.view(held.shape))


def pack_experts(model: nn.Module) -> None:
    """Pack reloaded experts for the CPU kernel, which vLLM 0.30.0 does at the first load only.

    `UnquantizedFusedMoEMethod._setup_kernel` skips it when weights are updated. The kernel then
    reads unpacked experts as packed ones: wrong values without an error.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is None or not hasattr(module, "w13_weight"):
            continue
        if module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
