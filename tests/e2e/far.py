"""A server that is far away, or behind a slow link: a TCP proxy whose answers arrive later."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


@contextmanager
def far(endpoint_url: str, delay_s: float, bytes_per_s: float = math.inf) -> Iterator[str]:
    """The same HTTP server under another address, where each answer takes so much longer.

    Args:
        bytes_per_s: bandwidth of all answers together.
    """
    link = _Link(bytes_per_s)
    target = urlsplit(endpoint_url)
    loop = asyncio.new_event_loop()

    async def serve(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        try:
            await asyncio.gather(_copy(client_reader, writer, 0.0), _copy(reader, client_writer, delay_s, link))
        except (OSError, asyncio.CancelledError):
            pass  # one of the two ended the connection, or all is over
        finally:
            writer.close()
            client_writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, backlog=512))
    thread = threading.Thread(target=loop.run_forever, name="far", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_cancel_others())
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Link:
    """Bandwidth that all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def send(self, size: int, now: float) -> float:
        """When a piece has passed that comes now."""
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        return self._free_at


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, link: _Link | None = None
) -> None:
    """Until the end, each piece ``delay_s`` after it came, or as late as the link has room for it."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

    async def receive() -> None:
        data = b"."
        while data:
            data = await reader.read(CHUNK_BYTES)
            passed_at = loop.time() if link is None else link.send(len(data), loop.time())
            await pieces.put((passed_at + delay_s, data))

    async def send() -> None:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    await asyncio.gather(receive(), send())
