"""What recording and replay do to one family, measured once per session, and docs/families.md made from it.

python tests/tiny/family_results.py      writes docs/families.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from families import NO_CAUSAL_LM, REFUSED, TABLE, Family
from replay_models import loss_and_grads, random_trace
from torch import Tensor, nn

from onepolicy import bind_routers
from onepolicy.replay import Routers

DOCS = Path(__file__).parents[2] / "docs" / "families.md"
ROWS = 21  # 3 sequences of 7 tokens


@dataclass(frozen=True)
class Result:
    layers: tuple[int, ...]
    varied: bool  # the model's own routes are not the same for all tokens
    logits: bool  # replaying its own routes keeps every bit
    changed: tuple[str, ...]  # parameters whose gradient bits that replay changed
    filled: bool  # rows without a route take the router's own, which is reported
    moved: bool  # random routes move the logits
    reached: bool  # they are the ones the experts got
    weighed: bool  # with weights other than 0
    router_grad: bool  # and a gradient to every router


@cache
def examine(model_type: str, run: int) -> Result:
    """Own routes, then random routes. run: 0 or 1, see Family.runs."""
    family = TABLE[model_type]
    model = family.model(**family.runs()[run])
    ids = 1 + torch.randperm(60, generator=torch.Generator().manual_seed(1))[:ROWS].view(3, -1)  # all different
    routers = bind_routers(model)
    with routers.record() as tape:
        plain, plain_grads = loss_and_grads(model, ids)
    own = tape.trace()
    with routers.replay(own):
        logits, grads = loss_and_grads(model, ids)
    changed = tuple(n for n, g in plain_grads.items() if n not in grads or not torch.equal(grads[n], g))

    routes = random_trace(ROWS, routers.layers, routers.num_experts, routers.top_k)
    missing = torch.arange(ROWS) % 3 == 0
    mixed = torch.where(missing[:, None, None], routes.ids, own.ids)
    with routers.replay(replace(own, ids=mixed, valid=~missing), native=True) as replayed:
        filled = torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
    filled = filled and torch.equal(replayed.native().ids, own.ids)

    with experts_seen(routers) as seen, routers.replay(routes):
        other, other_grads = loss_and_grads(model, ids)
    paths = [router.path for router in routers._routers]
    routers.self_test()
    asked = [_chosen(routes.ids[:, column].long(), routers.num_experts) for column in range(len(routers.layers))]
    if model_type == "zaya":  # hands the class that skips the experts over as expert 0 with weight 0
        asked = [_without_skip(chosen) for chosen in asked]
    return Result(
        layers=routers.layers,
        varied=bool((own.ids != own.ids[:1]).any(0).any(-1).all()),
        logits=torch.equal(logits, plain),
        changed=changed,
        filled=filled,
        moved=not torch.equal(other, plain),
        reached=all(torch.equal(seen[path].chosen, chosen) for path, chosen in zip(paths, asked, strict=True)),
        weighed=all(seen[path].weighed for path in paths),
        router_grad=all(_has_gradient(path, other_grads) for path in paths),
    )


def _chosen(ids: Tensor, experts: int) -> Tensor:  # [T, K] -> [T, E] bool
    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter_(1, ids, True)


def _without_skip(chosen: Tensor) -> Tensor:  # [T, E + 1] -> [T, E]
    experts = chosen[:, :-1].clone()
    experts[chosen[:, -1], 0] = True
    return experts


def _has_gradient(path: str, grads: dict[str, Tensor]) -> bool:
    own = [g for n, g in grads.items() if n.startswith(f"{path}.") and "expert" not in n.removeprefix(f"{path}.")]
    return bool(own) and any((g != 0).any() for g in own)


# --- what the experts really got ----------------------------------------------------------------------------------


@dataclass
class Seen:
    chosen: Tensor  # [T, E] bool
    weighed: bool  # no chosen expert has weight 0


@contextmanager
def experts_seen(routers: Routers) -> Iterator[dict[str, Seen]]:
    """By router path: which experts computed which tokens, read from the inputs of the modules that compute them."""
    seen: dict[str, Seen] = {}
    hooks = []
    for router in routers._routers:
        block = routers._model.get_submodule(router.path.rpartition(".")[0])
        if type(block).__name__ in ("JetMoeMoE", "JetMoeMoA"):
            hooks += _jetmoe(block, router.path, seen)
            continue
        experts = block.experts if hasattr(block, "experts") else router.module.experts
        look = _llama4 if type(block).__name__ == "Llama4TextMoe" else _usual
        hooks.append(experts.register_forward_pre_hook(partial(look, router.path, seen)))
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


def _usual(path: str, seen: dict[str, Seen], experts: nn.Module, args: tuple) -> None:
    _, ids, weights = args
    total = getattr(experts, "total_experts", None) or experts.num_experts  # longcat: with those that return the input
    skipped = (ids == 0) & (weights == 0) if type(experts).__name__ == "ZayaExperts" else torch.zeros(()).bool()
    seen[path] = Seen(_chosen(ids, total), bool(((weights != 0) | skipped).all()))


def _llama4(path: str, seen: dict[str, Seen], experts: nn.Module, args: tuple) -> None:
    """Every expert gets every token times its weight, which is 0 unless it was selected."""
    rows = args[0].view(experts.num_experts, -1, args[0].shape[-1])
    seen[path] = Seen((rows != 0).any(-1).T, True)


def _jetmoe(block: nn.Module, path: str, seen: dict[str, Seen]) -> list:
    """Experts get the rows of their tokens, sorted by expert: find each row among the block's tokens."""
    routed: list[Tensor] = []

    def after_router(_: nn.Module, args: tuple, out: tuple) -> None:
        routed[:] = [args[0], out[2]]

    def before_experts(_: nn.Module, args: tuple) -> None:
        (rows, sizes), (hidden, weights) = args, routed
        expert = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        same = (rows[:, None] == hidden[None]).all(-1)  # [T * K, T]
        assert (same.sum(1) == 1).all(), "two tokens of the test look the same to the experts"
        chosen = torch.zeros(len(hidden), len(sizes), dtype=torch.bool)
        chosen[same.int().argmax(1), expert] = True
        seen[path] = Seen(chosen, bool((weights != 0).all()))

    return [
        block.router.register_forward_hook(after_router),
        block.input_linear.register_forward_pre_hook(before_experts),
    ]


# --- the page -----------------------------------------------------------------------------------------------------

_HEAD = """# Routing replay by model family

Every MoE causal LM of transformers {version}, as a tiny random model (fp32, CPU): 3 x 7 tokens, 8 experts, routers and
selection biases perturbed; once with the stock experts function, once with the eager loop. *Own routes*: the routes a
forward recorded are replayed; are the logits and the gradients of all parameters the same bits? *Random routes*: random
valid routes are replayed; are they what the module that computes the experts was given, with weights other than 0, and
does every router get a gradient?

Written by `python tests/tiny/family_results.py`; `tests/tiny/test_replay_families.py` measures it again and compares.

| model type | weights from | layers | own logits | own gradients | random: at the experts | weights, gradient | note |
|---|---|---|---|---|---|---|---|
"""
_FOOT = """
## Refused by `bind_routers`
{refused}

## Without a causal LM class
Not bound by the tests; most reuse a router of the table above: {outside}.
"""


def page() -> str:
    rows = [_row(TABLE[name]) for name in sorted(TABLE)]
    refused = "\n".join(f"- `{name}`: {reason}" for name, reason in REFUSED.items())
    outside = ", ".join(f"`{name}` ({what})" for name, what in NO_CAUSAL_LM.items())
    head = _HEAD.format(version=transformers.__version__)
    return head + "\n".join(rows) + "\n" + _FOOT.format(refused=refused, outside=outside)


def _row(family: Family) -> str:
    results = [examine(family.model_type, run) for run in (0, 1)]
    first = results[0]
    cells = [
        f"`{family.model_type}`",
        family.scoring + (", `norm_topk_prob` on and off" if family.norms else ""),
        f"{', '.join(map(str, first.layers))} of {family.config().num_hidden_layers}",
        "bit-equal" if all(r.logits for r in results) else "differ",
        "bit-equal" if not any(r.changed for r in results) else "differ",
        "yes" if all(r.reached and r.moved for r in results) else "NO",
        "not 0" if all(r.weighed and r.router_grad for r in results) else "0",
        family.note,
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    DOCS.write_text(page(), encoding="utf-8")
