"""The page over HTTP, for this machine alone: 127.0.0.1, its own origin, small uploads, nothing stored."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fewshot_dpkl.pictures.page.session import Session

FOLDER = Path(__file__).parent
QUESTION_BYTES = 2**20


def make_server(session: Session, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on 127.0.0.1, `port` 0 takes a free one: call its `serve_forever`."""

    class Handler(_Handler):
        pass

    Handler.session = session
    server = Server(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


class Server(ThreadingHTTPServer):
    """A browser may go away in the middle of anything: that is nothing to tell."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def page(nonce: str) -> str:
    """The page with its style and script inside; `nonce` allows them to run."""
    text = (FOLDER / "page.html").read_text(encoding="utf-8").replace("{{nonce}}", nonce)
    for name in ("page.css", "page.js", "asking.js"):
        text = text.replace(f"{{{{{name}}}}}", (FOLDER / name).read_text(encoding="utf-8"))
    return text


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    session: Session
    timeout = 30  # seconds for a client that stops in the middle
    server_version, sys_version = "fewshot-dpkl", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> tuple[str, bytes]:
        if urlsplit(self.path).path == "/":
            return "text/html; charset=utf-8", b""
        if self.path == "/about":
            return _json(self.session.about())
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _post(self) -> tuple[str, bytes]:
        # A page of another site may send us forms; its origin gives it away.
        if self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
            raise Refused(HTTPStatus.FORBIDDEN, "only the page itself may ask this")
        parts = urlsplit(self.path)
        if parts.path == "/picture":
            backbone = parse_qs(parts.query).get("backbone", [""])[0]
            return _json(self.session.add(backbone, self._body(self.session.limits.picture_bytes)))
        if parts.path == "/load":
            return _json(self.session.load(self._body(self.session.limits.model_bytes)))
        if parts.path in ("/classify", "/model"):
            question = json.loads(self._body(QUESTION_BYTES))
            if parts.path == "/classify":
                return _json(self.session.classify(question))
            return "application/octet-stream", self.session.model(question)
        raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _body(self, most: int) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit()) or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long the upload is")
        if int(text) > most:
            self._drain(min(int(text), 4 * most))  # a browser reads the answer only after it has sent all
            sentence = f"{int(text) / 2**20:.1f} MB are too many, at most {most / 2**20:.0f} are taken"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence)
        content = self.rfile.read(int(text))
        if len(content) < int(text):
            raise Refused(HTTPStatus.BAD_REQUEST, "the upload stopped half-way")
        return content

    def _drain(self, length: int) -> None:
        while length > 0 and (piece := self.rfile.read(min(length, 2**16))):
            length -= len(piece)

    def _answer(self, make: Callable[[], tuple[str, bytes]]) -> None:
        """Send what `make()` returns, or one sentence of what was wrong."""
        nonce = secrets.token_urlsafe(16)
        try:
            # A name of another site that leads to 127.0.0.1 (DNS rebinding) shows in the Host header.
            port = self.connection.getsockname()[1]
            if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
                raise Refused(HTTPStatus.FORBIDDEN, "this page is for this machine alone")
            kind, content = make()
            status = HTTPStatus.OK
            if kind.startswith("text/html"):
                content = page(nonce).encode()
        except Refused as error:
            status, (kind, content) = error.status, _json({"error": str(error)})
        except (ValueError, OSError, RecursionError) as error:
            status, (kind, content) = HTTPStatus.BAD_REQUEST, _json({"error": " ".join(str(error).split())})
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "same-origin")
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src blob: data:;"
            " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet: a page of pictures would fill the terminal."""


def _json(value: object) -> tuple[str, bytes]:
    return "application/json", json.dumps(value).encode()
