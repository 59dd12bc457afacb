"""A web server over a folder: it lists names without sizes and does not know ranges. It can be told what to answer."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WebServer(http.server.ThreadingHTTPServer):
    """``status``: what every request is answered with, once it is set."""

    daemon_threads = True
    status: int | None = None

    def __init__(self, folder: Path) -> None:
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def do_GET(self) -> None:
                if server.status is None:
                    super().do_GET()
                else:
                    self.send_error(server.status)

            def do_HEAD(self) -> None:
                if server.status is None:
                    super().do_HEAD()
                else:
                    self.send_error(server.status)

            def log_message(self, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve_folder(folder: Path) -> Iterator[WebServer]:
    """Serve what is in ``folder`` at the server's ``url``."""
    with WebServer(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
