"""Results of recording and replay for one family, and the section of docs/replay.md made from them.

PYTHONPATH=tests python -m support.family_results writes it, with the newest
transformers: older ones lack families
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import transformers
from torch import Tensor, nn

from onepolicy import bind_routers
from onepolicy.replay import Routers
from onepolicy.types import RoutingTrace
from support.families import NEWEST, NO_CAUSAL_LM, REFUSED, TABLE, VISION, Family
from support.paths import ROOT
from support.replay_models import loss_and_grads, random_trace

DOCS = ROOT / "docs" / "replay.md"
ROWS = 21  # 3 sequences of 7 tokens


@dataclass(frozen=True)
class Result:
    layers: tuple[int, ...]
    varied: bool  # the model's own routes are not the same for all tokens
    logits: bool  # replaying its own routes keeps every bit
    changed: tuple[str, ...]  # parameters whose gradient bits that replay changed
    recomputed: tuple[str, ...] | None  # with activation checkpointing; None: not in transformers
    decoded: bool  # what later forwards of one recording read is what the experts got
    filled: bool  # rows without a route take the router's own, which is reported
    moved: bool  # random routes move the logits
    reached: bool  # they are the ones the experts got
    weighed: bool  # with weights other than 0
    router_grad: bool  # and a gradient to every router


@cache
def examine(model_type: str, run: int) -> Result:
    """Replay own routes, then random ones. run 0: fp32, stock experts; 1: bf16, eager loop, the
    family's second setting."""
    family = TABLE[model_type]
    changes = {}
    if run == 1:
        changes = {"dtype": torch.bfloat16, "experts": "eager", **family.second}
    model = family.model(**changes)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    ids = 1 + order[:ROWS].view(3, -1)  # all different
    routers = bind_routers(model)
    with routers.record() as tape:
        plain, plain_grads = loss_and_grads(model, ids)
    own = tape.trace()
    with routers.replay(own, check=False):
        logits, grads = loss_and_grads(model, ids)
    routes = random_trace(ROWS, routers.layers, routers.num_experts, routers.top_k)
    missing = torch.arange(ROWS) % 3 == 0
    mixed = torch.where(missing[:, None, None], routes.ids, own.ids)
    partial_own = replace(own, ids=mixed, valid=~missing)
    with routers.replay(partial_own, native=True, check=False) as replayed:
        filled = torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
    filled = filled and torch.equal(replayed.native().ids, own.ids)

    with experts_seen(routers) as seen, routers.replay(routes, check=False):
        other, other_grads = loss_and_grads(model, ids)
    paths = [router.path for router in routers._routers]
    routers.self_test()
    asked = [_asked(routes.ids[:, column], routers) for column in range(len(paths))]
    return Result(
        layers=routers.layers,
        varied=bool((own.ids != own.ids[:1]).any(0).any(-1).all()),
        logits=torch.equal(logits, plain),
        changed=_changed(plain_grads, grads),
        recomputed=_recomputed(routers, own, ids, plain_grads)
        if model.supports_gradient_checkpointing
        else None,
        decoded=_decoded(routers, ids),
        filled=filled,
        moved=not torch.equal(other, plain),
        reached=all(
            torch.equal(seen[path].chosen, chosen)
            for path, chosen in zip(paths, asked, strict=True)
        ),
        weighed=all(seen[path].weighed for path in paths),
        router_grad=all(_has_gradient(path, other_grads) for path in paths),
    )


def _changed(plain: dict[str, Tensor], grads: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(
        name
        for name, grad in plain.items()
        if name not in grads or not torch.equal(grads[name], grad)
    )


def _recomputed(
    routers: Routers, own: RoutingTrace, ids: Tensor, plain: dict[str, Tensor]
) -> tuple[str, ...]:
    """Return parameters whose gradient bits differ from those of the forward without
    checkpointing."""
    model, calls = routers._model, []
    model.gradient_checkpointing_enable()
    model.train()  # or nothing is checkpointed
    router = routers._routers[-1].module
    if not TABLE[model.config.model_type].train:
        for other in routers._routers:
            other.module.eval()
    hook = router.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with routers.replay(own, check=False):
            _, grads = loss_and_grads(model, ids)
    finally:
        hook.remove()
        model.gradient_checkpointing_disable()
    assert len(calls) == 2, "the layer was not recomputed"
    return _changed(plain, grads)


def _decoded(routers: Routers, ids: Tensor) -> bool:
    """Return whether later forwards of a recorder read the ids that the experts got, from the
    router's output where they can."""
    with torch.no_grad(), routers.record() as tape, experts_seen(routers) as seen:
        for step in range(3):
            routers._model(input_ids=ids.roll(step, 1), use_cache=False)
            for taken, router in zip(tape.pop_ids(), routers._routers, strict=True):
                if not torch.equal(_asked(taken, routers), seen[router.path].chosen):
                    return False
    return True


def _asked(ids: Tensor, routers: Routers) -> Tensor:  # [T, K] -> [T, E] bool
    chosen = _chosen(ids.long(), routers.num_experts)
    if routers._model.config.model_type != "zaya":
        return chosen
    experts, skip = chosen[:, :-1].clone(), chosen[:, -1]  # handed over as expert 0 with weight 0
    experts[skip, 0] = True
    return experts


def _chosen(ids: Tensor, experts: int) -> Tensor:  # [T, K] -> [T, E] bool
    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter_(1, ids, True)


def _has_gradient(path: str, grads: dict[str, Tensor]) -> bool:
    own = [
        g
        for n, g in grads.items()
        if n.startswith(f"{path}.") and "expert" not in n.removeprefix(f"{path}.")
    ]
    return bool(own) and any((g != 0).any() for g in own)


# --- what the experts really got ------------------------------------------------------------------


@dataclass
class Seen:
    chosen: Tensor  # [T, E] bool
    weighed: bool  # no chosen expert has weight 0


@contextmanager
def experts_seen(routers: Routers) -> Iterator[dict[str, Seen]]:
    """Record by router path which experts computed which tokens, read from the inputs of the
    modules that compute them."""
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
    total = (
        getattr(experts, "total_experts", None) or experts.num_experts
    )  # longcat: with those that return the input
    skipped = (
        (ids == 0) & (weights == 0)
        if type(experts).__name__ == "ZayaExperts"
        else torch.zeros(()).bool()
    )
    seen[path] = Seen(_chosen(ids, total), bool(((weights != 0) | skipped).all()))


def _llama4(path: str, seen: dict[str, Seen], experts: nn.Module, args: tuple) -> None:
    """Record the tokens of each expert: every expert gets every token times its weight, which is 0
    unless it was selected."""
    rows = args[0].view(experts.num_experts, -1, args[0].shape[-1])
    seen[path] = Seen((rows != 0).any(-1).T, True)


def _jetmoe(block: nn.Module, path: str, seen: dict[str, Seen]) -> list:
    """Record the tokens of each expert. Experts get the rows of their tokens, sorted by expert:
    find each row among the block's tokens."""
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


# --- the page -------------------------------------------------------------------------------------

BEGIN, END = "<!-- families: written by support.family_results -->", "<!-- end of families -->"
_HEAD = """{begin}
Every MoE causal LM of transformers {newest} and of the older ones from 5.19, each as a tiny random
model on the CPU in two runs: fp32 with the stock experts function; bf16 with the eager loop over
experts and the setting behind the semicolon. For every family whose note does not say otherwise its
**own routes**, replayed, keep every bit of logits and gradients, under activation checkpointing
too, and **random routes** are what the experts get, with weights other than 0 and a gradient for
every router (`PYTHONPATH=tests python -m support.family_results`;
`tests/integration/replay/test_families.py` compares). Whether your trainer packs a model with
recurrent layers rightly, `op.check_packing(model)` says
([hybrids](hybrids.md#in-your-own-trainer)).

| weights from | model types |
|---|---|
"""
_NOTES = """
Notes:
"""
_FOOT = """
**Refused by `bind_routers`**: {refused}; `inkling2_loop_text` with more than one pass, whose
routers run several times a forward.

**Models of images and text**, whose routes of text are replayed to the bit with the image encoder
unused: {vision}.

**Without a causal LM class**, not in the tests but for those above; most reuse a router of the
table (`ernie4_5_vl_moe` has two a layer and is refused): {outside}.
{end}"""


def page(rows: dict[str, tuple[str, str]]) -> str:
    """Return the section with these families: where their weights come from, and a note or none."""
    kinds: dict[str, list[str]] = {}
    for name, (weights, _) in rows.items():
        kinds.setdefault(weights, []).append(f"`{name}`")
    table = [f"| {weights} | {', '.join(names)} |" for weights, names in sorted(kinds.items())]
    notes = [f"- `{name}`: {note}" for name, (_, note) in rows.items() if note]
    refused = "; ".join(f"`{name}`: {reason}" for name, reason in REFUSED.items())
    outside = ", ".join(f"`{name}` ({what})" for name, what in NO_CAUSAL_LM.items())
    vision = ", ".join(f"`{name}`" for name in VISION)
    foot = _FOOT.format(refused=refused, vision=vision, outside=outside, end=END)
    body = "\n".join([*table, _NOTES, *notes])
    return f"{_HEAD.format(begin=BEGIN, newest=NEWEST)}{body}\n{foot}"


def listed(text: str) -> dict[str, tuple[str, str]]:
    """Return the families of the section's text, as `page` takes them."""
    body = text[text.index("|---|---|") : text.index("\n**Refused")]
    notes = dict(re.findall(r"^- `(\w+)`: (.*)$", body, re.MULTILINE))
    found = {
        name: (weights, notes.get(name, ""))
        for weights, names in re.findall(r"^\| (.+?) \| (.+) \|$", body, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    return dict(sorted(found.items()))


def section() -> str:
    """Return the section as docs/replay.md has it."""
    text = DOCS.read_text(encoding="utf-8")
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def row(family: Family) -> tuple[str, str]:
    """Return what the page says of the family, measured."""
    results = [examine(family.model_type, run) for run in (0, 1)]
    first = results[0]
    equal = all(r.logits and not r.changed and not r.recomputed for r in results)
    used = all(r.reached and r.moved and r.weighed and r.router_grad for r in results)
    notes = [
        "" if equal else "own routes DIFFER",
        "" if used else "random routes NOT USED",
        "no checkpointing in transformers" if first.recomputed is None else "",
        family.note,
    ]
    second = "".join(f"; `{name}={value}`" for name, value in family.second.items())
    return family.scoring + second, "; ".join(filter(None, notes))


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert transformers.__version__ == NEWEST, f"needs transformers {NEWEST}"
    measured = {name: row(TABLE[name]) for name in sorted(TABLE)}
    whole = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(whole.replace(section(), page(measured)), encoding="utf-8")
