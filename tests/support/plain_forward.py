"""Log-probabilities of a batch by plain forwards of a stock model, a sample at a time."""

import itertools

import torch


def each_sample(model, batch, temperature=1.0):
    """Yield (slice of the slots, log-probabilities [n, V]) of every sample."""
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        logits = model(input_ids=batch.input_ids[None, start:end], use_cache=False).logits[0]
        yield slice(start, end), torch.log_softmax(logits / temperature, -1)


def of_targets(logp, batch, part):
    """Return the log-probability of each slot's own token."""
    return logp.gather(-1, batch.target_ids[part, None].long())[:, 0]
