"""The process of an arm of `onepolicy compare`: a command that ends when its stdin is closed.

The process that started it holds the other end of stdin, also when SIGKILL or SIGTERM ends it.
"""

from __future__ import annotations

import os
import sys
import threading

from onepolicy.cli import main


def end_with_stdin() -> None:
    """End this process as soon as its stdin is closed. Its children get an empty stdin."""
    owner = os.dup(0)  # not inherited
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_wait_for_end, args=(owner,), daemon=True).start()


def _wait_for_end(owner: int) -> None:
    while os.read(owner, 1024):
        pass
    os.write(2, b"onepolicy: the command that started this run has ended; so does the run\n")
    os._exit(1)


if __name__ == "__main__":
    end_with_stdin()
    sys.exit(main())
