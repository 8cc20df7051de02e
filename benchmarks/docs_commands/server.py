"""A server of the commands: started, waited for, stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path


class Server:
    """A command that says `ready` and then serves, in a process group of its own."""

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]):
        self.output = folder / "server.txt"
        program = shutil.which(words[0], path=environment["PATH"])
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [str(program), *words[1:]],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait(self, limit: float) -> tuple[int, str]:
        """Return (0, the line with `ready`), or (status, the last line) if it ended or is late."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            lines = self.output.read_text(errors="replace").splitlines() or [""]
            for line in lines:
                if "ready" in line:
                    return 0, "ready"
            status = self.process.poll()
            if status is not None:
                return status or 1, lines[-1]
            time.sleep(0.5)
        return 124, f"not ready after {limit} s"

    def stop(self) -> None:
        """End the whole group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(60)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
