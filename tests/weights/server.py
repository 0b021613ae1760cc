"""A real HTTP server over a folder: ranges, redirects, tokens, and the ways a server misbehaves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

PIECE = 1 << 16


@dataclass
class Seen:
    """One request as it arrived, and how much of the body was written before the reader left."""

    path: str
    range: str | None
    authorization: str | None
    sent: int = 0


@dataclass
class Behaviour:
    """How the server behaves; changed by tests while it runs.

    prefix: what a path must start with (a hub's `/org/name/resolve/main`). redirect: answer 302 to
    the same path under this address. token: demand it. failures: statuses to answer first, used up
    one by one. cut: bytes to leave out at the end of each body. short: the same, but announced as
    the whole answer. stall: seconds before an answer. sizes: tell the length of a body. shift: say
    that a range begins so many bytes later.
    """

    prefix: str = ""
    ranges: bool = True
    redirect: str | None = None
    token: str | None = None
    failures: list[int] = field(default_factory=list)
    cut: int = 0
    short: int = 0
    stall: float = 0.0
    sizes: bool = True
    shift: int = 0
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    def asked(self, name: str) -> list[Seen]:
        """Requests for a file of this name."""
        return [seen for seen in self.seen if seen.path.endswith(f"/{name}")]


@contextmanager
def serving(root: Path, **settings: object) -> Iterator[Behaviour]:
    """Serve `root` on a free port of this machine."""
    behaviour = Behaviour(**settings)  # type: ignore[arg-type]

    class Handler(_Handler):
        folder, rules = root, behaviour

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    behaviour.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield behaviour
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    rules: Behaviour

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        seen = Seen(path, self.headers["Range"], self.headers["Authorization"])
        rules = self.rules
        rules.seen.append(seen)
        time.sleep(rules.stall)
        if rules.failures:
            return self._refuse(rules.failures.pop(0))
        if rules.token and seen.authorization != f"Bearer {rules.token}":
            return self._refuse(401)
        if rules.redirect:
            return self._refuse(302, {"Location": rules.redirect + self.path})
        file = self.folder / path.removeprefix(rules.prefix).lstrip("/")
        if not path.startswith(f"{rules.prefix}/") or not file.is_file():
            return self._refuse(404)
        return self._send(file, seen)

    def _refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, file: Path, seen: Seen) -> None:
        size = file.stat().st_size
        start, stop = 0, size
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", seen.range or "")
        if span and self.rules.ranges:
            start, stop = int(span[1]), min(int(span[2]) + 1, size)
            if start >= size:
                return self._refuse(416)
            self.send_response(206)
            shifted = start + self.rules.shift
            self.send_header("Content-Range", f"bytes {shifted}-{stop - 1}/{size}")
        else:
            self.send_response(200)
        if self.rules.sizes:
            self.send_header("Content-Length", str(stop - start - self.rules.short))
        else:
            self.close_connection = True
        self.end_headers()
        with file.open("rb") as content:
            content.seek(start)
            left = stop - start - self.rules.cut - self.rules.short
            try:
                while left > 0 and (piece := content.read(min(left, PIECE))):
                    self.wfile.write(piece)
                    left -= len(piece)
                    seen.sent += len(piece)
            except OSError:  # the reader has seen enough
                self.close_connection = True
        if self.rules.cut:
            self.close_connection = True
        return None
