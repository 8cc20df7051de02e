"""Start of the on-policy mode: check this build of torch, make a model invariant, check the model.

The invariant operators rely on properties of the build, so they are tested on each one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.invariant import ops
from onepolicy.invariant.attention import attend
from onepolicy.invariant.delta_rule import delta_rule
from onepolicy.invariant.mode import Invariant, install_invariant
from onepolicy.invariant.ops import TERMS
from onepolicy.invariant.switch import TILE
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.embedding_bag_matmul import weighted_rows
from onepolicy.models.packed_attention import round_up
from onepolicy.models.recurrent.segments import Row, Segments

CUTS = (1, 2, 9, 26, 60)  # a check cuts its rows here, into calls of their own
LENGTHS = (7, 4, 23)  # tokens of the samples a model is checked with


def enable_invariant(model: PreTrainedModel) -> None:
    """Make a model invariant for the rest of its life.

    Raises:
        UsageError: this build or one of the model's operators is not invariant.
    """
    check_build(model.device, torch.get_num_threads())
    install_invariant(model)
    check_model(model)


@torch.no_grad()
def check_model(model: PreTrainedModel) -> None:
    """Raise UsageError unless the model's operators are invariant and packing changes no logit."""
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    ids = torch.arange(3, 3 + sum(LENGTHS), device=model.device) % vocabulary
    samples = list(ids.split(LENGTHS))
    with Invariant(model, strict=True):
        alone = [_logits(model, [sample]) for sample in samples]
    together = _logits(model, samples[::-1]).split(LENGTHS[::-1])[::-1]
    if not all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)):
        raise UsageError(
            f"numerics: {type(model).__name__} computes other logits for samples packed together "
            f"than for them alone, although each of its operators is known ({describe_build()}); "
            "use numerics = fast"
        )


def _logits(model: PreTrainedModel, samples: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, samples)]).cumsum(0).int()
    positions = torch.cat([torch.arange(len(sample), device=sample.device) for sample in samples])
    packing = BucketedPacking.of(bounds, model.device, multiple=TILE)
    ids = torch.cat(samples)[None]
    return model(
        input_ids=ids, position_ids=positions[None], use_cache=False, packing=packing
    ).logits[0]


def describe_build() -> str:
    """Return this build's name for messages."""
    return ", ".join(
        (
            f"torch {torch.__version__}",
            torch.backends.cpu.get_cpu_capability(),
            f"MKL {torch.backends.mkl.is_available()}",
            f"oneDNN {torch.backends.mkldnn.is_available()}",
            f"{torch.get_num_threads()} threads",
        )
    )


@cache
@torch.no_grad()
def check_build(device: torch.device, threads: int) -> None:
    """Raise unless every operator's result for a row is the same in calls of other shapes.

    threads: the number in use. It is part of the cache's key.

    Raises:
        UsageError: an operator's result differs. The message names the operator.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    for name, whole, parts in itertools.chain(
        _check_rows(normal),
        _check_attention(normal),
        _check_weighted_rows(normal),
        _check_delta_rule(normal),
    ):
        if not torch.equal(whole, parts):
            raise UsageError(
                f"numerics: {name} depends on what else is computed on {device} with "
                f"{describe_build()}, so on-policy numerics cannot hold there; use numerics = fast"
            )


Normal = Callable[..., Tensor]
# Name of an operator, and its result computed in two ways, which must be equal to the bit
Check = tuple[str, Tensor, Tensor]


def _check_rows(normal: Normal) -> Iterator[Check]:
    """Yield operators over all rows at once, and in calls of a few rows."""
    for terms, columns in ((32, 128), (TERMS, 64), (TERMS, 1024), (300, 24), (300, 256), (77, 5)):
        for dtype in (torch.float32, torch.bfloat16):
            linear = partial(
                ops.linear, weight=normal(columns, terms).to(dtype), bias=normal(columns).to(dtype)
            )
            yield _in_parts(
                f"linear {terms}x{columns} in {dtype}", linear, normal(300, terms).to(dtype)
            )
    for name, function in {
        **EVEN_FUNCTIONS,
        **{name: getattr(ops, name) for name in REPLACED},
    }.items():
        yield _in_parts(name, function, 4 * normal(2000), size=7)
    for name, function in ROW_FUNCTIONS.items():
        # CUDA has another kernel above 1,024, whose order of sums can follow a row's alignment: a
        # multiple of 8, as nearly all vocabularies are
        for width in (5, 48, 700, 4104):
            yield _in_parts(f"{name} of {width}", function, normal(300, width))


ROW_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: _as_in_a_model(lambda: x.pow(2).mean(-1, keepdim=True)),
    "sum": lambda x: _as_in_a_model(lambda: x.sum(-1, keepdim=True)),
}


def _as_in_a_model(call: Callable[[], Tensor]) -> Tensor:
    """Return the result under the mode that an invariant model's forward holds."""
    with ops.InvariantFunctions():
        return call()


REPLACED = ("sigmoid", "silu", "softplus", "gelu")
EVEN_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "cos": torch.cos,
    "sin": torch.sin,
}


def _in_parts(
    name: str, function: Callable[[Tensor], Tensor], rows: Tensor, size: int | None = None
) -> Check:
    """Return the function's results for all rows, and for calls of `size` rows (None: CUTS)."""
    if size is None:
        parts = torch.tensor_split(rows, CUTS)
    else:
        parts = rows.split(size)
    return name, function(rows), torch.cat([function(part) for part in parts])


def _check_attention(normal: Normal) -> Iterator[Check]:
    """Yield attention of many queries over all keys, and of single queries over their keys."""
    size, positions = 528, (0, 14, 15, 16, 62, 130, 257, 527)
    q, key, value = normal(1, size, 4, 40), normal(1, 2, size, 40), normal(1, 2, size, 24)
    for named, sinks in (("without", None), ("with", normal(4))):

        def attended(queries: list[int], keys: int, sinks: Tensor | None = sinks) -> Tensor:
            seen = (
                torch.arange(keys, device=q.device)
                <= torch.tensor(queries, device=q.device)[:, None]
            )
            bias = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
            rows = q[:, queries], key[:, :, :keys], value[:, :, :keys]
            return attend(*rows, bias=bias, scale=0.2, sinks=sinks)[0]

        whole = attended(list(range(size)), size)[list(positions)]
        alone = [attended([position], round_up(position + 1, TILE)) for position in positions]
        yield f"attention {named} sinks", whole, torch.cat(alone)


def _check_weighted_rows(normal: Normal) -> Iterator[Check]:
    """Yield products as matmuls, and as the sums of table rows that decoding uses on a CPU."""
    for terms, columns in ((32, 128), (TERMS, 64), (TERMS + 40, 16)):
        x, weight = normal(70, terms), normal(terms, columns)
        if x.device.type == "cpu":
            index = torch.arange(terms, dtype=torch.int32).expand(len(x), -1).contiguous()
            table = weighted_rows(weight, index, x, TERMS)
            yield f"the sum of {terms} weighted rows", ops.linear(x, weight.T), table


def _check_delta_rule(normal: Normal) -> Iterator[Check]:
    """Yield the rule over two packed samples, and over each in a chunk that is open at its end."""
    lengths = (2 * TILE + 3, TILE)
    q, k, v = (normal(1, sum(lengths), 2, width) for width in (40, 40, 24))
    rates = normal(1, sum(lengths), 2).sigmoid()
    tokens = (q, k, v, -rates, rates)

    def rule(lengths: tuple[int, ...], tokens: Iterable[Tensor]) -> Tensor:
        row = Row(Segments(lengths, q.device))
        return delta_rule(row, *tokens, use_qk_l2norm_in_kernel=True)[0][0]

    whole, parts = rule(lengths, tokens).split(lengths), []
    for first, length, out in zip((0, lengths[0]), lengths, whole, strict=True):
        for stop in (length - 1, length):
            part = (x[:, first : first + stop] for x in tokens)
            parts.append((out[:stop], rule((stop,), part)))
    together, alone = (torch.cat(x) for x in zip(*parts, strict=True))
    yield "the gated delta rule", together, alone
