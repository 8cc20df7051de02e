"""Writes that fail leave nothing behind; their errors name the path and end a command cleanly."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from onepolicy.cli import main
from onepolicy.config.policy import PolicyConfig
from onepolicy.files import replace_atomically, write_folder, write_text_atomically
from onepolicy.tiny.model import save_policy
from support.audit_dumps import gaussian_rows, write_jsonl

FULL = "I/O error: No space left on device (os error 28)"
ERRORS = [
    (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC, "No space left"),
    (SafetensorError(FULL), errno.EIO, "No space left"),
]


def written(path):
    """Return what is in the folder of a path."""
    return sorted(each.name for each in path.parent.iterdir())


def fail(write, path, error):
    with write(path) as temporary:
        half = temporary
        if temporary.is_dir():
            half = temporary / "file"
        half.write_text("half")
        raise error


@pytest.mark.parametrize(("error", "number", "words"), ERRORS)
@pytest.mark.parametrize("write", [replace_atomically, write_folder])
def test_a_failed_write_leaves_nothing_and_names_its_path(write, error, number, words, tmp_path):
    path = tmp_path / "out"
    with pytest.raises(OSError, match=words) as caught:
        fail(write, path, error)
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert written(path) == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = write_text_atomically(tmp_path / "out", "old")
    with pytest.raises(KeyboardInterrupt):
        fail(replace_atomically, path, KeyboardInterrupt())
    assert (path.read_text(), written(path)) == ("old", ["out"])


def test_a_pipe_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no regular file") as caught:
        write_text_atomically(pipe, "new")
    assert caught.value.filename == str(pipe)
    assert (pipe.is_fifo(), written(pipe)) == (True, ["pipe"])


def test_a_policy_on_a_full_disk_is_absent(tmp_path):
    def save_pretrained(folder):
        (folder / "model.safetensors").write_text("half")
        raise SafetensorError(FULL)

    model = SimpleNamespace(save_pretrained=save_pretrained)
    with pytest.raises(OSError, match="No space left on device"):
        save_policy(model, None, PolicyConfig(), tmp_path / "policy")
    assert written(tmp_path / "policy") == []


def test_an_audit_on_a_full_disk_fails_with_a_reason(tmp_path, monkeypatch, capsys):
    dump, out = write_jsonl(tmp_path / "d.jsonl", gaussian_rows(4e-3)), tmp_path / "out"
    write = Path.write_text

    def full(path, text, **how):
        write(path, text[:9], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["audit", str(dump), "--out", str(out)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    words = "No space left on device; make room there (or mend the disk) and repeat the command"
    assert told == f"onepolicy: {out / 'audit.json'}: {words}"
    assert written(out / "audit.json") == []


def test_a_write_follows_no_link_that_stands_in_its_temporary_place(tmp_path):
    """A stranger's run folder may have one, to a file of the person who resumes the run."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".out.writing").symlink_to(victim)
    write_text_atomically(tmp_path / "out", "new")
    assert victim.read_text() == "precious"
    assert (tmp_path / "out").read_text() == "new"
    assert not (tmp_path / "out").is_symlink()
