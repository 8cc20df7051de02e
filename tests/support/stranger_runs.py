"""Damage to whole run folders as a stranger can make them: every file is framed right, checksums
fit, and links, holes, pickles and odd numbers stand where a command reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from support.fuzz import JUNK, Damage
from support.odd_dumps import MARKUP, ODD_NAMES, TERMINAL

LINES = ("metrics.jsonl", "samples.jsonl")
OBJECTS = ("config.json", "run.json", "summary.json")
HUGE = 2**42
"""Bytes of a file that is one hole."""
FAMILIES = (
    *("mismatch/k3_turn@{}", "train/tokens_turn@{}", "counterfactual/mismatch/k3_turn@{}"),
    *("mismatch/k3_staleness@{}", "staleness/tokens@{}", "eval/{}", "time/{}", "tools/{}", "{}"),
    *("eval/avg@{}", "routing/{}", "async/{}", "correction/rejected/{}"),
)
NUMBERS = (
    *(0, 1, -1, 0.5, 1e308, -1e308, 1e100, 1e-320, 10**18, 10**400, None, True, "1", [1], {"a": 1}),
    *(float("nan"), float("inf")),
)
KINDS = ("F32", "F16", "BF16", "F64", "I64", "I32", "I8", "U8", "BOOL", "F4", "F8_E4M3", "C64")
Change = tuple[str, Any]
"""A file's name in the run, and its bytes, or a verb of `apply`."""


def changes(damage: Damage, whole: dict[str, bytes]) -> list[Change]:
    """Return one to three changes of a run folder with these files."""
    pick = damage.random
    made = [_change(damage, whole) for _ in range(pick.choice((1, 1, 1, 2, 3)))]
    return list(dict(made).items())


def _change(damage: Damage, whole: dict[str, bytes]) -> Change:
    pick = damage.random
    if pick.random() < 0.15:
        return _placed(pick, whole)
    kinds = {
        **dict.fromkeys(LINES, _lines),
        **dict.fromkeys(OBJECTS, _object),
    }
    deep = [name for name in whole if name not in kinds]
    name = pick.choice((*LINES, *LINES, *OBJECTS, *OBJECTS, *pick.sample(deep, 4)))
    change = kinds.get(name)
    if change is None and name.endswith(".safetensors"):
        change = _tensors
    elif change is None and name.endswith(".json"):
        change = _object
    if change is None or pick.random() < 0.1:
        return name, damage.data(whole[name])
    return name, change(damage, whole[name])


def _placed(pick: Any, whole: dict[str, bytes]) -> Change:
    """Return a file or folder that is a link, a hole, a pipe, a pickle, or none."""
    folders = sorted({str(Path(name).parent) for name in whole} - {"."})
    name = pick.choice((*whole, *folders))
    verb = pick.choice(("link", "link", "loop", "hole", "pipe", "folder", "none", "pickle"))
    if verb == "pickle":
        names = ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng.pkl", "model.pt")
        name = f"{pick.choice(folders)}/{pick.choice(names)}"
    return name, verb


def _lines(damage: Damage, data: bytes) -> bytes:
    pick = damage.random
    rows = [json.loads(line) for line in data.splitlines()]
    for _ in range(pick.randint(1, 3)):
        at = pick.randrange(len(rows))
        match pick.randrange(9):
            case 0:
                pick.shuffle(rows)
            case 1:
                rows += rows[at : at + 1] * pick.choice((1, 300))
            case 2:
                rows[at]["step"] = pick.choice(NUMBERS)
            case 3:
                for name in list(rows[at]):
                    rows[at][name] = pick.choice(NUMBERS)
            case 4:
                name = pick.choice(list(rows[at]))
                for row in rows:
                    row[name] = pick.choice(NUMBERS[:9])
            case 5:
                family = pick.choice(FAMILIES)
                count = pick.choice((1, 30, 1000))
                rows[at] |= {family.format(n): pick.choice(NUMBERS[:7]) for n in range(count)}
            case 6:
                family = pick.choice(FAMILIES)
                rows[at][family.format(pick.choice(ODD_NAMES))] = pick.choice(NUMBERS)
            case 7:
                name = pick.choice(list(rows[at]))
                rows[at][name] = pick.choice((MARKUP, TERMINAL, "x" * 10**6, "\ud800", {"a": [{}]}))
            case _:
                rows[at] = damage.tree(rows[at])
                if not isinstance(rows[at], dict):
                    break
        if not all(isinstance(row, dict) and row for row in rows):
            break
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _object(damage: Damage, data: bytes) -> bytes:
    pick, tree = damage.random, json.loads(data)
    if pick.random() < 0.6:
        tree = damage.tree(tree)
    else:
        for of, key in pick.sample(places := list(_values(tree)), min(len(places), 3)):
            of[key] = pick.choice((*NUMBERS, *JUNK, MARKUP, TERMINAL, "../x", "/etc/passwd"))
    return json.dumps(tree).encode()


def _values(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in items:
        yield tree, key
        if isinstance(child, dict | list):
            yield from _values(child)


def _tensors(damage: Damage, data: bytes) -> bytes:
    """Return safetensors bytes with other names, kinds, shapes or numbers, framed right."""
    pick, size = damage.random, int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(pick.randint(1, 2)):
        name = pick.choice(names)
        about = header.get(name)
        if not isinstance(about, dict) or not isinstance(about.get("data_offsets"), list):
            break
        start, stop = about["data_offsets"]
        match pick.randrange(7):
            case 0:
                about["dtype"] = pick.choice(KINDS)
            case 1:
                about["shape"] = pick.choice(
                    ([], [0], [1], [-1], [10**9, 10**9], about["shape"][::-1])
                )
            case 2:
                header[pick.choice((*ODD_NAMES[:20], *names))] = header.pop(name)
            case 3:
                number = struct.pack(
                    "<f", pick.choice((0, 1, -1, 1e38, float("nan"), float("inf")))
                )
                body[start:stop] = (number * ((stop - start) // 4 + 1))[: stop - start]
            case 4:
                body[start:stop] = pick.randbytes(stop - start)
            case 5:
                header["__metadata__"] = pick.choice(
                    (
                        {},
                        {"fingerprint": "[]"},
                        {"fingerprint": "{}", "rollout": "[3]"},
                        {"a": 1},
                        3,
                    )
                )
            case _:
                header = damage.tree(header)
                if not isinstance(header, dict) or not set(names) <= header.keys():
                    break
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + bytes(body)


def apply(run: Path, made: list[Change], outside: Path, trap: bytes) -> None:
    """Change the run folder. outside: what links lead to. trap: a pickle that runs code."""
    for name, what in made:
        path = run / name
        remove(path)
        if not path.parent.is_dir():  # another change put a file or a link there
            continue
        match what:
            case bytes():
                path.write_bytes(what)
            case "link":
                path.symlink_to(outside / name)
            case "loop":
                path.symlink_to(path.name)
            case "hole":
                with path.open("wb") as file:
                    file.truncate(HUGE)
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "pickle":
                path.write_bytes(trap)
    changed = {Path(name).parent for name, _ in made if name.startswith("checkpoints/step")}
    for folder in changed:
        _fit(run / folder / "state.json", {name for name, _ in made})


def _fit(state: Path, changed: set[str]) -> None:
    """Write sizes and checksums of the files that were changed, as a stranger would."""
    if not state.is_file() or state.stat().st_size > 10**8:
        return
    try:
        tree = json.loads(state.read_bytes())
        for name in tree["files"]:
            path = state.parent / name
            if not any(each.endswith(f"/{name}") for each in changed):
                continue
            if path.is_file() and path.stat().st_size < 10**8:
                tree["files"][name] = path.stat().st_size
                tree["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
        tree.pop("sha256 of the rest", None)
        state.write_text(json.dumps(tree))
    except (ValueError, TypeError, LookupError, OSError, RecursionError, AttributeError):
        return


def restore(run: Path, made: list[Change], whole: dict[str, bytes]) -> None:
    """Put back what `apply` has changed, and what commands write."""
    touched = [name for name, _ in made]
    for name in touched:
        remove(run / name)
    for name, data in whole.items():
        path = run / name
        written = name.endswith("state.json") or name in ("summary.json", *LINES, *OBJECTS)
        if written or any(name == each or name.startswith(f"{each}/") for each in touched):
            remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def remove(path: Path) -> None:
    """Remove a file, folder or link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
