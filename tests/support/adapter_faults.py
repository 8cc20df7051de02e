"""The five published failures of LoRA syncs, planted in real engines, and the table of where each
is named.

`PYTHONPATH=src:tests python -m support.adapter_faults POLICY hf merged` prints an engine's rows of
the table in docs/lora_measured.md, without training: an update adds noise to the adapter.
"""

import asyncio
import contextlib
import dataclasses
import sys

import torch

from onepolicy.build.components import build_components
from onepolicy.config import TrainingError, resolve
from onepolicy.models import lora
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.run.adapter_start import start_adapter
from onepolicy.run.step import push_and_check

FAULTS = {
    "never delivered": "verl#7495",
    "never named": "miles#2075",
    "base weights sampled": "NeMo-RL#3696, SkyRL#1776",
    "merged twice": "",
    "stale by one": "",
}
ON_TOP = "merged into the last merge"
LATE = ("merged twice", ON_TOP)
"""Faults that begin at the second update, after a first one that arrived as it should."""
UPDATE = 5e-3  # noise on every element of A and B
LAST = 3  # updates until a fault counts as not seen
WORDS = (
    ("requests do not name", "the reply names no adapter"),
    ("it is stale", "the reply's version"),
    ("A and B of", "A and B in the engine"),
    ("of what it changes in the trainer's", "log-probabilities"),
    ("was pushed, 'model.", "weights in the engine"),
)
"""Part of an error -> what showed the fault."""


def settings(policy, kind="hf", sync="merged", dtype="bfloat16", ranks=0, base="same", **engine):
    lora = {"rank": 4, "sync": sync, "base": base}
    if sync == "native" and kind != "hf":
        lora["targets"] = ["attention"]
    return resolve(
        {
            "out": "runs/faults",
            "steps": LAST,
            "model": {"path": str(policy)},
            "task": {"kind": "chain", "ops": 2},
            "rollout": {
                "sampling": {"max_tokens": 32},
                "engine": {"kind": kind, "dtype": dtype, "max_num_seqs": 32, **engine},
            },
            "train": {"threads": 1, "ranks": ranks, "device": "cpu", "lora": lora},
            "eval": {"every": 0},
            "log": {"tensorboard": False, "report": False},
        },
        [],
    )


def plant(fault, components):
    """Make the engine, or what it is given, faulty from now on."""
    engine, learner = components.engine, components.learner
    name = "load_adapter" if engine.caps.takes_adapter else "load_weights"
    real, before = getattr(engine, name), {}

    def given():
        """Return what this sync gives: merged tensors, or A and B."""
        if engine.caps.takes_adapter:
            return learner.adapter.copy_factors()
        tensors = learner.named_weights(engine.caps.weights_dtype)
        return {n: t.clone() for n, t in tensors}

    def without():
        with learner.adapter.off():
            return given()

    def wrong():
        now = given()
        if fault == "stale by one":
            last = before.get("sent", without())
            before["sent"] = now
            return last
        if fault == ON_TOP:
            base, held = without(), before["held"]
            added = {n: held[n].float() + t.float() - base[n].float() for n, t in now.items()}
            before["held"] = {n: t.to(now[n].dtype) for n, t in added.items()}
            return before["held"]
        if fault == "merged twice" and engine.caps.takes_adapter:
            return {n: (a, 2 * b) for n, (a, b) in now.items()}
        if fault == "merged twice":
            base = without()
            return {n: 2 * t.float() - base[n].float() for n, t in now.items()}
        return without()

    if fault == ON_TOP:
        before["held"] = given()  # of the last update that arrived

    async def load(_, version):
        if fault == "never delivered":
            engine.version = version
        elif engine.caps.takes_adapter:
            await real(_Given(learner.adapter, wrong()), version)
        else:
            await real(wrong().items(), version)

    in_requests = fault == "never named" or (
        fault == "base weights sampled" and engine.caps.takes_adapter
    )
    if in_requests:
        _plant_in_requests(engine, named=fault != "never named")
    else:
        setattr(engine, name, load)


class _Given:
    """The learner's adapter with other tensors."""

    def __init__(self, adapter, factors):
        self.name, self._adapter, self._factors = adapter.name, adapter, factors

    def factors(self):
        return self._factors

    def write(self, folder):
        with lora.other_factors(self._adapter.model, self._factors):
            self._adapter.write(folder)


def _plant_in_requests(engine, *, named):
    """Sample without the adapter. named: the reply names it all the same.

    Otherwise what vLLM or a server reports is left as it is. The embedded engine and merged weights
    have no report: there the name is ours, and it is left out."""
    real = engine.generate
    reports = engine.caps.takes_adapter and not hasattr(engine, "held_factors")

    async def generate(prompt_ids, sampling, *, seed):
        context = contextlib.nullcontext()
        if hasattr(engine, "loaded"):  # vLLM: the request does not name it
            engine.loaded.request = None
        elif getattr(engine, "_adapters", None) is not None:  # a server
            engine._adapters.name = None
        elif engine.caps.takes_adapter:
            context = _frozen(engine)
        with context:
            found = await real(prompt_ids, sampling, seed=seed)
        if named:
            return dataclasses.replace(found, adapter=engine.adapter)
        if not reports:
            return dataclasses.replace(found, adapter=None)
        return found

    engine.generate = generate


@contextlib.contextmanager
def _frozen(engine):
    """Compute without the adapter of the embedded engine inside the context."""
    saved = []
    for name, frozen in engine._held._frozen.items():
        parameter = engine.model.get_parameter(name)
        saved.append((parameter, parameter.data))
        parameter.data = frozen
    with lora.adapters_off(engine.model):
        yield
    for parameter, data in saved:
        parameter.data = data


@torch.no_grad()
def update(learner):
    """Stand in for an optimiser step. On several ranks it is rank 0's adapter that is sent."""
    learner = getattr(learner, "rank_0", learner)
    generator = torch.Generator().manual_seed(learner.version)
    for tensor in lora.adapter_tensors(learner.model).values():
        tensor += UPDATE * torch.randn(tensor.shape, generator=generator)
    learner.version += 1
    learner.updates += 1


async def first_seen(components, fault, *, by_weights=True, since=1):
    """Return after which update the fault is named, and the error; (None, "") if it never is.

    by_weights: the engine's weights are compared too, where they can be read. since: the first
    update that the fault is there for; those before arrive as they should."""
    original = AdapterCheck._check_weights
    try:
        if not by_weights:
            AdapterCheck._check_weights = lambda _: None
        if fault is not None and since == 0:
            plant(fault, components)
        await start_adapter(components, lambda _: None)
        for number in range(1, LAST + 1):
            if fault is not None and number == since:
                plant(fault, components)
            update(components.learner)
            await push_and_check(components)
    except TrainingError as error:
        return components.learner.version, str(error)
    finally:
        AdapterCheck._check_weights = original
    return None, ""


def seen_by(message):
    return next((words for part, words in WORDS if part in message), message)


def rows(policy, kind, sync, faults=tuple(FAULTS), *, since=1, **engine):
    """Return the rows of an engine's table: after which update each check names a fault."""
    late = ""
    if since > 1:
        late = f" from update {since} on"
    found = []
    for fault in faults:
        cells = []
        readings = (True, False) if kind == "hf" else (False,)
        for by_weights in readings:
            components, _ = build_components(settings(policy, kind, sync, **engine))
            found_by = first_seen(components, fault, by_weights=by_weights, since=since)
            step, message = asyncio.run(found_by)
            cells.append("not seen" if step is None else f"{step}: {seen_by(message)}")
        found.append(f"| {kind} | {sync} | {fault}{late} | {'; '.join(dict.fromkeys(cells))} |")
    return found


VLLM = {"kv_cache_gib": 0.25, "block_size": 32}


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, policy, kind, sync, *faults = sys.argv
    engine = VLLM if kind == "vllm" else {}
    served = contextlib.nullcontext()
    if kind == "vllm-server":
        from support.vllm_engines import serving_adapters

        served = serving_adapters(policy)
    with served as server:
        if server is not None:
            engine = {"url": server.url}
        print("\n".join(rows(policy, kind, sync, faults or tuple(FAULTS), **engine)))
    if sync == "merged" and not faults:
        print("\n".join(rows(policy, kind, sync, LATE, since=2, **engine)))
