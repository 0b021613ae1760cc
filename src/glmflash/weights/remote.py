"""Reads the head of a remote checkpoint: config, index, template and the shards' headers.

Knows hub ids, repository and file URLs, HTTP ranges, and to whom an access token may be shown.
Never reads a tensor. Does not know what the files should hold: the readers of local files check
that for both.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from glmflash._version import __version__
from glmflash.config import read_config
from glmflash.errors import CheckpointError, GlmflashError, RemoteError
from glmflash.weights.headers import Header, header_size, parse_header
from glmflash.weights.index import INDEX_NAME, SINGLE_NAME, Checkpoint, check_index, parse_index

if TYPE_CHECKING:
    import httpx

DEFAULT_ENDPOINT = "https://huggingface.co"
FIRST_BYTES = 256 * 1024  # the release's headers take about 172 KB each: one request a shard
MAX_JSON = 1 << 28  # the release's index takes 8.4 MB
MAX_TEMPLATE = 1 << 20
WORKERS = 8
RETRY_SECONDS = (0.5, 1.5)
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_HUB_PATH = re.compile(
    r"/(?P<id>[\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?P<file>/.+)?)?"
)

Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Location:
    """Where a remote target is. folders: to be tried in turn; file: one named file in them."""

    folders: tuple[str, ...]
    file: str | None


@dataclass(frozen=True)
class RemoteFiles:
    """What was fetched. config: the content of config.json. checkpoint: the headers of all shards,
    not yet compared with the config; None for a config.json alone."""

    config: dict[str, Any] | None
    template: bytes | None
    checkpoint: Checkpoint | None


def locate(target: str) -> Location | None:
    """Understand a hub id (`org/name`, `org/name@revision`) or an http(s) URL; None for neither.

    A URL may name a repository page, a file in it, or a folder or file of a plain web server.
    """
    hub = _endpoint()
    if not re.match("https?://", target):
        repository = _HUB_ID.fullmatch(target)
        if not repository or target.endswith((".json", ".safetensors")):  # a mistyped path
            return None
        return Location((_resolve(hub, repository["id"], repository["revision"]),), None)
    url = re.split("[?#]", target)[0].rstrip("/")
    page = _HUB_PATH.fullmatch(url.removeprefix(hub)) if url.startswith(f"{hub}/") else None
    if page:
        url = _resolve(hub, page["id"], page["revision"]) + (page["file"] or "")
    if url.endswith((".json", ".safetensors")):
        folder, _, file = url.rpartition("/")
        return Location((folder,), None if file == INDEX_NAME else file)
    # A mirror of the hub that HF_ENDPOINT does not name looks like any folder: try both.
    mirror = re.fullmatch(r"(https?://[^/]+)/([\w.-]+/[\w.-]+)", url)
    return Location((url, _resolve(mirror[1], mirror[2], None)) if mirror else (url,), None)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def _resolve(hub: str, repository: str, revision: str | None) -> str:
    return f"{hub}/{repository}/resolve/{quote(unquote(revision or 'main'), safe='')}"


def fetch(location: Location, progress: Progress | None = None, timeout: float = 30) -> RemoteFiles:
    """Fetch what describes the checkpoint.

    progress: told (headers read, headers in all). timeout: seconds of silence that are accepted.
    Raises RemoteError where the server does not answer as needed, CheckpointError where the files
    are no checkpoint.
    """
    with _Reader(timeout) as reader:
        if location.file:
            return _fetch_file(reader, f"{location.folders[0]}/{location.file}")
        for folder in location.folders:
            files = _fetch_folder(reader, folder, progress)
            if files:
                return files
    raise RemoteError(
        f"no checkpoint at {location.folders[-1]} (404 for config.json and {INDEX_NAME}); "
        "check name and revision"
    )


def _fetch_file(reader: _Reader, url: str) -> RemoteFiles:
    if url.endswith(".safetensors"):
        folder, _, name = url.rpartition("/")
        checkpoint = _checkpoint(folder, None, {name: reader.header(url)})
        return RemoteFiles(None, None, checkpoint)
    config = reader.json(url)
    if config is None:
        raise RemoteError(f"{url}: not found (404); check the address")
    return RemoteFiles(config, None, None)


def _fetch_folder(reader: _Reader, folder: str, progress: Progress | None) -> RemoteFiles | None:
    """Everything under one folder; None where it holds nothing of a checkpoint."""
    config = reader.json(f"{folder}/config.json")
    index = reader.small(f"{folder}/{INDEX_NAME}", MAX_JSON)
    weight_map = None
    if index is not None:
        weight_map = parse_index(index, f"{folder}/{INDEX_NAME}")
    elif not reader.exists(f"{folder}/{SINGLE_NAME}"):
        if config is None:
            return None
        raise RemoteError(
            f"{folder}: has a config.json but neither {INDEX_NAME} nor {SINGLE_NAME}; "
            f"give {folder}/config.json to count from the config alone"
        )
    if config is None:
        raise CheckpointError(
            f"{folder}: has weights but no config.json, so they cannot be checked; "
            "give the address of one .safetensors file"
        )
    template = reader.small(f"{folder}/chat_template.jinja", MAX_TEMPLATE)
    shards = sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]
    headers = _fetch_headers(reader, folder, shards, progress)
    if weight_map:
        check_index(weight_map, {name: header for name, (header, _) in headers.items()}, folder)
    return RemoteFiles(config, template, _checkpoint(folder, config, headers))


def _fetch_headers(
    reader: _Reader, folder: str, shards: list[str], progress: Progress | None
) -> dict[str, tuple[Header, int]]:
    headers: dict[str, tuple[Header, int]] = {}
    pool = ThreadPoolExecutor(WORKERS)
    try:
        found = pool.map(reader.header, [f"{folder}/{quote(shard)}" for shard in shards])
        for shard, header in zip(shards, found, strict=True):
            headers[shard] = header
            if progress:
                progress(len(headers), len(shards))
    finally:
        pool.shutdown(cancel_futures=True)
    return headers


def _checkpoint(
    folder: str, config: dict[str, Any] | None, headers: dict[str, tuple[Header, int]]
) -> Checkpoint:
    """As if the files were local; the address stands where the directory would."""
    return Checkpoint(
        root=Path(folder.partition("://")[2]),
        config=read_config(config, f"{folder}/config.json") if config is not None else None,
        tensors={
            name: (shard, info)
            for shard, (header, _) in headers.items()
            for name, info in header.tensors.items()
        },
        shards={shard: size for shard, (_, size) in headers.items()},
    )


class _PassingError(RemoteError):
    """A failure that may be over a moment later."""


class _Reader:
    """HTTP with limits and patience. The token is shown to the hub's own origin only."""

    def __init__(self, timeout: float) -> None:
        import httpx
        from huggingface_hub import get_token

        self._httpx = httpx
        self._hub = urlsplit(_endpoint())[:2]
        self._token = get_token()  # HF_TOKEN, or the one that a login has stored
        self._timeout = timeout
        self._client = httpx.Client(
            follow_redirects=True,  # httpx drops Authorization where the origin changes
            timeout=timeout,
            headers={"User-Agent": f"glmflash/{__version__}", "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=WORKERS),
        )

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def exists(self, url: str) -> bool:
        """Whether the server has the file."""

        def read() -> bool:
            with self._get(url, {"Range": "bytes=0-0"}) as answer:
                return answer is not None

        return self._patiently(url, read)

    def json(self, url: str) -> dict[str, Any] | None:
        """The object in a JSON file; None where the server has no such file."""
        content = self.small(url, MAX_JSON)
        if content is None:
            return None
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{url}: the answer is not JSON; check the address") from error
        if not isinstance(value, dict):
            raise RemoteError(f"{url}: holds a JSON {type(value).__name__}; expected an object")
        return value

    def small(self, url: str, limit: int) -> bytes | None:
        """A whole file of at most `limit` bytes; None where the server has no such file."""

        def read() -> bytes | None:
            with self._get(url, {}) as answer:
                if answer is None:
                    return None
                content = bytearray()
                for piece in answer.iter_bytes():
                    content += piece
                    if len(content) > limit:
                        raise RemoteError(f"{url}: more than {limit:,} bytes; check the address")
                return bytes(content)

        return self._patiently(url, read)

    def header(self, url: str) -> tuple[Header, int]:
        """The header of a safetensors file and the file's size, read without its tensors."""
        content, size = self._part(url, 0, FIRST_BYTES)
        end = header_size(content, size, url)  # refuses impossible lengths before they are fetched
        if len(content) < end:
            content += self._part(url, len(content), end)[0]
        return parse_header(content, size, url), size

    def _part(self, url: str, start: int, stop: int) -> tuple[bytes, int]:
        """Bytes start..stop of a file, or up to its end, and the file's size.

        A server that ignores ranges answers from byte 0: then reading ends at `stop`.
        """

        def read() -> tuple[bytes, int]:
            with self._get(url, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
                if answer is None:
                    raise RemoteError(f"{url}: not found (404), though the index names it")
                size, first = _extent(answer, url, start)
                end = min(stop, size) - first
                content = bytearray()
                for piece in answer.iter_bytes():
                    content += piece
                    if len(content) > end:
                        break
                if len(content) < end:
                    raise _PassingError(f"{url}: sent {len(content):,} of {end:,} bytes; try again")
                return bytes(content[start - first : end]), size

        return self._patiently(url, read)

    @contextmanager
    def _get(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response | None]:
        """One streamed answer; None for 404. Raises RemoteError for other refusals."""
        if self._token and urlsplit(url)[:2] == self._hub:
            headers = {**headers, "Authorization": f"Bearer {self._token}"}
        with self._client.stream("GET", url, headers=headers) as answer:
            if answer.status_code in (200, 206):
                yield answer
            elif answer.status_code == 404:
                yield None
            else:
                raise self._refusal(url, answer.status_code)

    def _refusal(self, url: str, status: int) -> GlmflashError:
        if status in (401, 403):
            advice = (
                "the token (HF_TOKEN or login) may not read it: check its rights and the name"
                if self._token
                else "private, gated or misspelt: check the name, or set HF_TOKEN"
            )
            return RemoteError(f"{url}: access refused ({status}); {advice}")
        if status == 416:  # no byte at this position
            return CheckpointError(f"{url}: the file is empty or has changed; upload it again")
        if status in (429, 500, 502, 503, 504):
            return _PassingError(f"{url}: the server is busy or broken ({status}); try again later")
        return RemoteError(f"{url}: the server answered {status}; check the address")

    def _patiently(self, url: str, read: Callable[[], T]) -> T:
        """The result of `read`, tried again after failures that may pass."""
        for pause in RETRY_SECONDS:
            try:
                return self._once(url, read)
            except _PassingError:
                time.sleep(pause)
        return self._once(url, read)

    def _once(self, url: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except self._httpx.TimeoutException as error:
            raise RemoteError(
                f"{url}: no answer within {self._timeout:g} s; check the network or try later"
            ) from error
        except (self._httpx.RemoteProtocolError, self._httpx.ReadError) as error:
            raise _PassingError(f"{url}: the connection broke off ({error}); try again") from error
        except self._httpx.ConnectError as error:
            raise RemoteError(
                f"{url}: cannot connect ({error}); check the network, HF_ENDPOINT and the name"
            ) from error
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise RemoteError(f"{url}: cannot be read ({error}); check the address") from error


def _extent(answer: httpx.Response, url: str, start: int) -> tuple[int, int]:
    """Size of the whole file, and the position of the answer's first byte in it."""
    if answer.status_code == 200:
        length = answer.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RemoteError(f"{url}: the server does not tell the file's size; download it first")
        return int(length), 0
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
    if not span or int(span[1]) != start:
        raise RemoteError(f"{url}: the server sent another range than asked; download it first")
    return int(span[2]), start
