"""The vLLM server of soak.py: on one port, started again whenever it has ended."""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Self

LIMIT_S = 600  # of the first start
SETTINGS = ["dtype=float32", "max_num_seqs=32", "kv_cache_gib=0.125", "block_size=32"]


class Server:
    """A context in which the server runs. kill() strikes all its processes at once, as the death of
    its host would."""

    def __init__(self, command: list[str], policy: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.command = [*command, "engine", "serve", str(policy), "--port", str(port), *SETTINGS]
        url = f"http://127.0.0.1:{port}"
        patient = "timeout_s = 30, retries = 2, recovery_timeout_s = 600"
        self.setting = (
            f'{{ kind = "vllm-server", url = "{url}", dtype = "float32", '
            f"max_num_seqs = 32, {patient} }}"
        )
        self.log, self.lives = log, 0
        self._done = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        self._start()
        self._keeper.start()
        end = time.monotonic() + LIMIT_S
        while "ready after" not in self.log.read_text(errors="replace"):
            assert self.lives == 1, f"the server ended; see {self.log}"
            assert time.monotonic() < end, f"the server does not start; see {self.log}"
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.kill()
        self._keeper.join()

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        self.lives += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, process_group=0)

    def _keep(self) -> None:
        while True:
            self._process.wait()
            if self._done.is_set():
                return
            self._start()
