"""A real S3 server (moto's) behind a proxy that keeps a log of what left, and misbehaves when told to."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "weights"


@dataclass(frozen=True, slots=True)
class Request:
    """As it came, before it is answered. `start`, `stop`: the range asked for; 0, 0 without one."""

    method: str
    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to an answer: another status, or its body ended after `after` bytes, by a reset if asked, or slowed down."""

    status: int | None = None
    body: bytes = b""  # of that status
    after: int | None = None
    reset: bool = False
    drip: tuple[int, float] | None = None  # bytes, and seconds before each


@dataclass
class Log:
    """What left the server: (path, first byte, bytes that were sent), one for each answered GET of a range."""

    sent: list[tuple[str, int, int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def clear(self) -> None:
        self.sent.clear()
        self.requests.clear()

    def nbytes(self) -> int:
        return sum(count for _, _, count in self.sent)


class Proxy:
    """`fault` decides, for each request, what goes wrong; None: nothing."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.log = Log()
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                proxy._answer(self, upstream)

            do_HEAD = do_PUT = do_DELETE = do_GET

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # connections that were cut on purpose

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05}).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, client: BaseHTTPRequestHandler, upstream: tuple[str, int]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", client.headers.get("Range", ""))
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
        request = Request(client.command, client.path.partition("?")[0], start, stop)
        self.log.requests.append(request)
        sent = client.rfile.read(int(client.headers.get("Content-Length", 0)))
        fault = self.fault(request) or Fault()
        if fault.status is not None:
            client.send_response(fault.status)
            client.send_header("Content-Length", str(len(fault.body)))
            client.end_headers()
            client.wfile.write(fault.body if client.command == "GET" else b"")
            return
        connection = http.client.HTTPConnection(*upstream)
        connection.request(client.command, client.path, sent or None, dict(client.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        client.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                client.send_header(name, value)
        client.end_headers()
        cut = body if fault.after is None else body[: fault.after]
        if found and answer.status == 206:
            self.log.sent.append((request.path, start, len(cut)))
        if fault.drip is None:
            client.wfile.write(cut)
        else:
            size, pause = fault.drip
            for i in range(0, len(cut), size):
                time.sleep(pause)
                client.wfile.write(cut[i : i + size])
        if len(cut) < len(body):
            client.close_connection = True
            if fault.reset:
                client.wfile.flush()
                client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.connection.close()


@dataclass(frozen=True)
class Store:
    proxy: Proxy
    direct: str  # the server's own address

    def upload(self, folder: Path, prefix: str) -> str:
        """Every file of a folder -> its url."""
        client = self.client()
        for file in folder.iterdir():
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{file.name}", Body=file.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def client(self) -> object:
        return boto3.client("s3", endpoint_url=self.direct)


@contextmanager
def running_store() -> Iterator[Store]:
    """With credentials in the environment, as boto3 finds them."""
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    upstream = server.get_host_and_port()
    direct = f"http://{upstream[0]}:{upstream[1]}"
    boto3.client("s3", endpoint_url=direct).create_bucket(Bucket=BUCKET)
    proxy = Proxy(upstream)
    try:
        yield Store(proxy, direct)
    finally:
        proxy.close()
        server.stop()
        patch.undo()
