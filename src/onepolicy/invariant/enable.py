"""Start-up: what the invariant operators rest on are properties of this build of torch, so they are checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.invariant import ops
from onepolicy.invariant.attention import attend
from onepolicy.invariant.mode import Invariant, install_invariant
from onepolicy.invariant.ops import TERMS
from onepolicy.invariant.switch import TILE
from onepolicy.models.embedding_bag_matmul import weighted_rows
from onepolicy.models.packed_attention import Packing

CUTS = (1, 2, 9, 26, 60)  # where the rows of a check are cut into calls of their own
LENGTHS = (7, 4, 23)  # tokens of the samples a model is checked with


def enable_invariant(model: PreTrainedModel) -> None:
    """Make this model invariant for the rest of its life. UsageError if its build or one of its operators is not."""
    check_build(model.device, torch.get_num_threads())
    install_invariant(model)
    check_model(model)


@torch.no_grad()
def check_model(model: PreTrainedModel) -> None:
    """UsageError for an operator without an invariant version, or if samples packed together are not those alone."""
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    ids = torch.arange(3, 3 + sum(LENGTHS), device=model.device) % vocabulary
    samples = list(ids.split(LENGTHS))
    with Invariant(model, strict=True):
        alone = [_logits(model, [sample]) for sample in samples]
    together = _logits(model, samples[::-1]).split(LENGTHS[::-1])[::-1]
    if not all(torch.equal(a, b) for a, b in zip(alone, together, strict=True)):
        raise UsageError(
            f"numerics: {type(model).__name__} computes other logits for samples packed together than for them alone, "
            f"although each of its operators is known ({describe_build()}); use numerics = fast"
        )


def _logits(model: PreTrainedModel, samples: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, samples)]).cumsum(0).int()
    positions = torch.cat([torch.arange(len(sample), device=sample.device) for sample in samples])
    packing = Packing.of(bounds, model.device, multiple=TILE)
    ids = torch.cat(samples)[None]
    return model(
        input_ids=ids, position_ids=positions[None], use_cache=False, packing=packing
    ).logits[0]


def describe_build() -> str:
    """This build, as errors name it."""
    kernels = (
        f"MKL {torch.backends.mkl.is_available()}, oneDNN {torch.backends.mkldnn.is_available()}"
    )
    threads = f"{torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {kernels}, {threads}"


@cache
@torch.no_grad()
def check_build(device: torch.device, threads: int) -> None:
    """UsageError, naming the operator, unless every row comes out the same in calls of other shapes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    for name, whole, parts in itertools.chain(_rows(normal), _attention(normal), _chains(normal)):
        if not torch.equal(whole, parts):
            raise UsageError(
                f"numerics: {name} depends on what else is computed on {device} with {describe_build()}, so on-policy numerics "
                "cannot hold there; use numerics = fast"
            )


Normal = Callable[..., Tensor]
Check = tuple[
    str, Tensor, Tensor
]  # what is checked, and its result by two ways that must agree to the bit


def _rows(normal: Normal) -> Iterator[Check]:
    """All rows at once, and in calls of a few."""
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
        for width in (5, 48, 700):
            yield _in_parts(f"{name} of {width}", function, normal(300, width))


ROW_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
}
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
    parts = torch.tensor_split(rows, CUTS) if size is None else rows.split(size)
    return name, function(rows), torch.cat([function(part) for part in parts])


def _attention(normal: Normal) -> Iterator[Check]:
    """Many queries over all keys, and each alone over hardly more keys than it sees."""
    size, last = 528, (0, 14, 15, 16, 62, 130, 257, 527)
    q, key, value = normal(1, size, 4, 40), normal(1, 2, size, 40), normal(1, 2, size, 24)
    for sinks in (None, normal(4)):

        def attended(queries: list[int], keys: int, sinks: Tensor | None = sinks) -> Tensor:
            seen = (
                torch.arange(keys, device=q.device)
                <= torch.tensor(queries, device=q.device)[:, None]
            )
            bias = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
            rows = q[:, queries], key[:, :, :keys], value[:, :, :keys]
            return attend(*rows, bias=bias, scale=0.2, sinks=sinks)[0]

        whole = attended(list(range(size)), size)[list(last)]
        alone = torch.cat([attended([place], ops.round_up(place + 1, TILE)) for place in last])
        yield f"attention {'without' if sinks is None else 'with'} sinks", whole, alone


def _chains(normal: Normal) -> Iterator[Check]:
    """On a CPU sums over rows of a table stand in for matmuls when decoding."""
    for terms, columns in ((32, 128), (TERMS, 64), (TERMS + 40, 16)):
        x, weight = normal(70, terms), normal(terms, columns)
        if x.device.type == "cpu":
            index = torch.arange(terms, dtype=torch.int32).expand(len(x), -1).contiguous()
            table = weighted_rows(weight, index, x, TERMS)
            yield f"the sum of {terms} weighted rows", ops.linear(x, weight.T), table
