"""The five published failures of LoRA syncs, planted in real engines, and the table of where each
is named.

`PYTHONPATH=src:tests python -m support.adapter_faults` plants them on a policy of the tree in the
engines it is given (all that run here), writes what came out to adapter_faults.json beside this
file, and the table into docs/measured.md. Nothing is trained: an update adds noise to the
adapter.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import torch

from onepolicy.build.components import build_components
from onepolicy.config import TrainingError, resolve
from onepolicy.models import lora
from onepolicy.run.adapter_check import AdapterCheck
from onepolicy.run.loop import start_adapter
from onepolicy.run.step import push_and_check
from support.paths import ROOT

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
            with lora.scaled_adapters(learner.model, 2):
                return given()
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
    inside = getattr(engine, "requests_inside", 0)
    engine.requests_inside = inside + 1
    if not inside:  # several requests are inside at a time
        engine.around = contextlib.ExitStack()
        for name, frozen in engine._held._frozen.items():
            parameter = engine.model.get_parameter(name)
            engine.around.callback(setattr, parameter, "data", parameter.data)
            parameter.data = frozen
        engine.around.enter_context(lora.adapters_off(engine.model))
    yield
    engine.requests_inside -= 1
    if not engine.requests_inside:
        engine.around.close()


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
    update that the fault is there for; those before arrive as they should. 0: it is there before
    the first push, and an error before the first update is "after update 0"."""
    original = AdapterCheck._wrong_weights
    try:
        if not by_weights:
            AdapterCheck._wrong_weights = lambda _: None
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
        AdapterCheck._wrong_weights = original
    return None, ""


def seen_by(message):
    return next((words for part, words in WORDS if part in message), message)


def planted(policy, kind, sync, fault, **engine):
    """Plant a fault from the start on. Return its entry of the table: what named it, and when.

    Where an engine has weights to read, the fault is tried again without them."""
    named = []
    readings = (True, False) if kind == "hf" else (False,)
    for by_weights in readings:
        components, _ = build_components(settings(policy, kind, sync, **engine))
        found = first_seen(components, fault, by_weights=by_weights, since=0)
        step, message = asyncio.run(found)
        cell = [step, seen_by(message) or "not seen"]
        if cell not in named:
            named.append(cell)
    return {"engine": kind, "sync": sync, "fault": fault, "named": named}


def table(entries):
    """Return the rows of docs/measured.md: one for the faults and engines of the same outcome."""
    found = ["| sync | planted | engines | named before step: by |", "|---|---|---|---|"]
    faults, engines = {}, {}
    for e in entries:
        cells = "; ".join(f"{step + 1}: {words}" for step, words in e["named"])
        faults.setdefault((e["engine"], e["sync"], cells), []).append(e["fault"])
    for (engine, sync, cells), named in faults.items():
        engines.setdefault((sync, ", ".join(named), cells), []).append(engine)
    for (sync, named, cells), same in engines.items():
        found.append(f"| {sync} | {named} | {', '.join(same)} | {cells} |")
    return found


def write_table(entries):
    """Write the table into its page, in place of the one that is there."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *table(entries), END + after]))


PAGE = ROOT / "docs" / "measured.md"
RESULTS = Path(__file__).with_suffix(".json")
POLICY = ROOT / "benchmarks" / "evidence" / "policies" / "one-of-8"
BEGIN = "<!-- planted failures: written by support.adapter_faults -->"
END = "<!-- end of the planted failures -->"
VLLM = {"kv_cache_gib": 0.25, "block_size": 32}
ENGINES, SYNCS = ("hf", "vllm", "vllm-server"), ("merged", "native")
SGLANG = "sglang"
"""Its entries are in float32; tests/e2e/rollout/sglang/test_lora.py plays them."""


def entries_there():
    """Return the entries of the table that were played before."""
    if not RESULTS.exists():
        return []
    return json.loads(RESULTS.read_text())


def write(entries):
    order = (*ENGINES, SGLANG)
    entries.sort(key=lambda e: (order.index(e["engine"]), SYNCS.index(e["sync"])))
    lines = ",\n".join(f" {json.dumps(entry)}" for entry in entries)
    RESULTS.write_text(f"[\n{lines}\n]\n")
    write_table(entries)


def main(kinds):
    """Plant what is not in the file yet. Delete the file to plant everything anew."""
    torch.set_num_threads(1)
    entries = entries_there()
    there = {(e["engine"], e["sync"], e["fault"]) for e in entries}
    for kind in kinds:
        cases = [(kind, sync, fault) for sync in SYNCS for fault in FAULTS]
        cases = [case for case in cases if case not in there]
        engine = {}
        if kind == "vllm":
            engine = VLLM
        served = contextlib.nullcontext()
        if kind == "vllm-server" and cases:
            from support.vllm_engines import serving_adapters

            served = serving_adapters(POLICY)
        with served as server:
            if server is not None:
                engine = {"url": server.url}
            for case in cases:
                entries.append(planted(POLICY, *case, **engine))
                print(entries[-1], flush=True)
                write(entries)
    write_table(entries)


if __name__ == "__main__":
    main(sys.argv[1:] or ENGINES)
