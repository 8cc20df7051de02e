"""The folder of a gateway's socket: it is there while its process lives, and the next one cleans
up."""

import os

import pytest

from onepolicy.gateway.socket_folder import PREFIX, SocketFolder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def names(home):
    return sorted(file.name for file in home.iterdir())


def test_a_folder_is_there_until_it_is_removed(home):
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.socket.touch()
    other = SocketFolder()
    assert names(home) == sorted([folder.path.name, other.path.name])
    folder.remove()
    folder.remove()
    assert names(home) == [other.path.name]
    del other
    assert names(home) == []


def test_a_forked_process_leaves_the_folder_of_its_parent(home, monkeypatch):
    folder, child = SocketFolder(), os.getpid() + 1
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: child)
        folder.remove()
    assert names(home) == [folder.path.name]


def test_what_a_killed_process_left_is_removed_and_nothing_else(home):
    for name in (f"{PREFIX}killed", f"{PREFIX}full", "onepolicy-sync-0"):
        (home / name).mkdir()
    (home / f"{PREFIX}killed" / "gateway.sock").touch()
    (home / f"{PREFIX}full" / "mine").touch()
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "gateway.sock").touch()
    os.symlink(home / "elsewhere", home / f"{PREFIX}link")
    folder = SocketFolder()
    left = [folder.path.name, f"{PREFIX}full", f"{PREFIX}link", "elsewhere", "onepolicy-sync-0"]
    assert names(home) == sorted(left)
    assert (home / "elsewhere" / "gateway.sock").exists()


def test_a_folder_of_another_user_stays(home, monkeypatch):
    (home / f"{PREFIX}theirs").mkdir()
    user = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    folder = SocketFolder()
    assert names(home) == sorted([folder.path.name, f"{PREFIX}theirs"])
