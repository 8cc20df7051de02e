"""The second process of a program's sandbox: a door to the gateway, and the program.

The sandbox's Python runs the text of this file behind that of envs/tools/sandbox_init.py, which has
set the limits. So it imports nothing of onepolicy. The sandbox has a network of its own, with a
loopback and nothing else. A relay listens there and passes every connection on to the gateway's
Unix socket, the one way out. This process starts the program, waits for it, and reports. As the
program is of the same user, the script that calls this forbids it to open this process's files.
"""

import base64
import json
import os
import socket
import stat
import sys

PORT, SOCKET, SCRATCH = 8300, "/gateway.sock", "/scratch"


def run_program(report: int) -> None:
    """Run the program that stdin describes, and write how it ended to the descriptor `report`."""
    import subprocess
    import tempfile

    os.set_inheritable(report, False)
    os.write(report, b" ")  # so what comes without a report is no failure of bubblewrap
    given = json.load(sys.stdin)
    _start_relay(report)
    ended: dict[str, object] = {"status": None, "error": "", "file": None}
    with tempfile.TemporaryFile(dir=SCRATCH) as stdin:
        stdin.write(given["stdin"].encode(errors="replace"))
        stdin.seek(0)
        try:
            done = subprocess.run(
                given["command"], stdin=stdin, env=given["env"], cwd=SCRATCH, check=False
            )
            ended["status"] = done.returncode
        except (OSError, ValueError) as error:  # a NUL in a word, for instance
            ended["error"] = f"{type(error).__name__}: {error}"
    if given["file"] is not None:
        ended["file"] = _read(os.path.join(SCRATCH, given["file"]), given["most_bytes"])
    os.write(report, json.dumps(ended).encode())


def _read(path: str, most_bytes: int) -> str | None:
    """Return the end of a file in base64, None if there is none. A pipe is no file."""
    try:
        # A pipe would be waited for, and a link may lead to any file that the program can read.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode):
                file.seek(max(0, about.st_size - most_bytes))
                return base64.b64encode(file.read(most_bytes)).decode()
    except (OSError, ValueError):
        pass
    return None


def _start_relay(report: int) -> None:
    """Listen on the loopback and leave a process behind that passes connections on."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=128)
    child = os.fork()
    if child:
        listener.close()
        os.waitpid(child, 0)
        return
    if os.fork():  # the relay is then a child of the first process, not one that is waited for here
        os._exit(0)
    import asyncio

    os.close(report)
    for descriptor in range(3):
        os.close(descriptor)
    asyncio.run(_relay(listener))
    os._exit(0)


async def _relay(listener: socket.socket) -> None:
    import asyncio

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = await reader.read(1 << 16)
            while data:
                writer.write(data)
                await writer.drain()
                data = await reader.read(1 << 16)
        except OSError:
            pass  # the other side has gone
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gateway_reader, gateway_writer = await asyncio.open_unix_connection(SOCKET)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, gateway_writer), copy(gateway_reader, writer))

    server = await asyncio.start_server(serve, sock=listener)
    await server.serve_forever()
