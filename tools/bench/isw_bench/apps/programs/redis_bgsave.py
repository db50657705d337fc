# SPDX-License-Identifier: Apache-2.0
"""`python redis_bgsave.py REDIS CLIENT MIB SECONDS`: Redis asked in the ETC mix while it saves.

From the first question on, one BGSAVE follows another until the client has ended: a child of the
server writes all values to a file below TMPDIR, and what changes meanwhile is copied. Server, child
and client run in the job's cgroup; the client's memory is locked. REDIS is Debian's
redis-check-rdb; it becomes the server when it is called redis-server. MIB is what the values take.

Prints what the client prints, with the number of keys at the end, those in the last file (0 when
redis-check-rdb does not accept it), and the number of saves.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONNECTIONS = 32
START_S = 30.0
SAVE_S = 600.0
LOOK_S = 0.02
ANSWER_S = 60.0
"""A command waits while the server waits for its memory."""


class Server:
    """Redis on a socket in a directory."""

    def __init__(self, program: str, directory: Path) -> None:
        self.path = directory / "socket"
        argv = ["redis-server", "--port", "0", "--unixsocket", str(self.path), "--save", ""]
        argv += ["--dir", str(directory), "--dbfilename", "dump.rdb", "--loglevel", "warning"]
        self.process = subprocess.Popen(argv, executable=program, stdout=subprocess.DEVNULL)

    def await_start(self) -> None:
        """Until it serves."""
        end_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                if self.ask("PING") == "+PONG":
                    return
            if self.process.poll() is not None or time.monotonic() > end_s:
                sys.exit("redis-server does not serve")
            time.sleep(LOOK_S)

    def ask(self, command: str) -> str:
        """The answer to a command on a connection of its own; a long one without its length."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(self.path))
            connection.sendall(f"{command}\r\n".encode())
            with connection.makefile("rb") as file:
                line = file.readline().decode().strip()
                if line.startswith("$"):
                    return file.read(int(line[1:])).decode()
        return line

    def info(self, section: str) -> dict[str, str]:
        """A part of INFO."""
        return dict(re.findall(r"^(\w+):(.*?)\r?$", self.ask(f"INFO {section}"), re.MULTILINE))

    @property
    def is_saving(self) -> bool:
        """Whether the child is at work."""
        found = self.info("persistence")
        if found["rdb_last_bgsave_status"] != "ok":
            sys.exit("redis-server could not save")
        return found["rdb_bgsave_in_progress"] != "0"

    def save(self) -> None:
        """Begins a save."""
        answer = self.ask("BGSAVE")
        if not answer.startswith("+Background saving"):
            sys.exit(f"redis-server does not save: {answer}")


@contextlib.contextmanager
def serving(program: str, directory: Path) -> Iterator[Server]:
    """A server, until the end."""
    server = Server(program, directory)
    try:
        server.await_start()
        yield server
    finally:
        server.process.kill()  # it would take its time to free memory
        server.process.wait()


def keep_saving(server: Server, client: "subprocess.Popen[str]") -> int:
    """One save after the other while the client asks; how many were finished."""
    while client.poll() is None and "cmdstat_get" not in server.info("commandstats"):
        time.sleep(LOOK_S)
    saves = 0
    while client.poll() is None:
        server.save()
        end_s = time.monotonic() + SAVE_S
        while server.is_saving:
            if time.monotonic() > end_s:
                sys.exit("a save does not end")
            time.sleep(LOOK_S)
        saves += 1
    return saves


def main(program: str, client: str, mebibytes: float, seconds: float) -> dict[str, object]:
    """Starts the server, asks and saves, checks the file."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        with serving(program, directory) as server:
            argv = [client, "--socket", str(server.path), "--protocol", "resp", "--mix", "etc"]
            argv += ["--bytes", str(int(mebibytes * 2**20)), "--connections", str(CONNECTIONS)]
            argv += ["--run-ms", str(round(seconds * 1000))]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as asking:
                saves = keep_saving(server, asking)
                said = asking.communicate()[0]
            if asking.returncode or not saves:
                sys.exit(f"the client ended with {asking.returncode} after {saves} saves")
            keys = int(server.ask("DBSIZE").removeprefix(":"))
        argv = [program, str(directory / "dump.rdb")]
        checking = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
        kept = re.search(r"(\d+) keys read", checking.stdout)
        found: dict[str, object] = json.loads(said)
        answers = found["check"]
        assert isinstance(answers, dict)
        found["check"] = {
            **answers,
            "keys": keys,
            "keys_in_file": int(kept[1]) if kept and not checking.returncode else 0,
        }
        return {**found, "saves": saves}


if __name__ == "__main__":
    redis_path, client_path, size, duration = sys.argv[1:]
    print(json.dumps(main(redis_path, client_path, float(size), float(duration))))
