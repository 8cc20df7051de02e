"""The memory of a micro-batch is that of the dry run that `onepolicy plan` makes of it."""

import pytest
import torch
from gpu.shapes import QWEN3_06B
from transformers import AutoModelForCausalLM, Qwen3Config

from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.train.dry_run import DryRunModel, MicroBatchShape, PeakMemory
from onepolicy.train.forward import SlotLayout, forward
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample

MARGIN = 0.05
SMALL = {**QWEN3_06B, "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096}


def batch_of(micro):
    """Return a packed batch of this shape and its layout."""
    samples = []
    for slots, last in zip(micro.slots, micro.trainable, strict=True):
        trainable = torch.arange(slots) >= slots - last
        zeros = torch.zeros(slots, dtype=torch.int32)
        tokens, logp = torch.arange(slots + 1).int() % 1000, torch.where(trainable, -1.0, torch.nan)
        sample = Sample(tokens, trainable, logp, zeros, zeros, 1.0, 0.0, "stop", outcome=1.0)
        samples.append(sample)
    return pack([Group(0, tuple(samples))])


def model_of(config, dtype, chunk, device):
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    prepare_for_training(model, device)
    slots = slots_per_chunk(chunk, config.vocab_size)
    if slots:
        install_logits_chunks(model, slots)
    return model


def measured(model, micro, device):
    """Return the most bytes that a forward and backward hold beside parameters and gradients."""
    batch = batch_of(micro)
    chosen = batch.trainable.nonzero()[:, 0].to(device)
    layout = SlotLayout(chosen, BucketedPacking.of(batch.cu_seqlens, device))
    batch = batch.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run():
        forward(model, batch, layout).logp.sum().backward()

    run()
    if device.type == "cpu":
        existing = [*model.parameters(), *(p.grad for p in model.parameters())]
        with PeakMemory(existing) as memory:
            run()
        return memory.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.full
@pytest.mark.parametrize("chunk", [0, None], ids=["whole logits", "chunks"])
def test_memory_is_that_of_the_dry_run(chunk, device):
    """On the GPU: Qwen3-0.6B in bfloat16, 28 layers."""
    config, dtype, sizes = Qwen3Config(**QWEN3_06B), torch.bfloat16, (8192, 16_384)
    if device.type == "cpu":
        config, dtype, sizes = Qwen3Config(**SMALL), torch.float32, (128, 256)
        chunk = chunk if chunk == 0 else 64
    dry = DryRunModel(config, dtype=dtype, cpu=device.type == "cpu", logits_chunk=chunk)
    model = model_of(config, dtype, chunk, device)
    for slots in sizes:
        micro = MicroBatchShape((slots // 4,) * 4, (slots // 4 - 16,) * 4)
        predicted = dry.micro_batch_memory(micro, checkpointing=False).peak
        assert measured(model, micro, device) == pytest.approx(predicted, rel=MARGIN), slots
