"""``kvtiers explain`` on files and on addresses of metrics. ``core/test_record.py`` has the reasons."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvtiers.connector.commands.explain import LINE_BYTES_MAX
from kvtiers.connector.commands.session import ExitCode
from kvtiers.tiers.exporter import MetricsServer
from kvtiers.tiers.metrics import Metrics
from tests.connector.commands.test_storage_commands import ok, result_of, run


def line(request: str, reason: str, **fields: Any) -> str:
    return json.dumps({"time": 1e9, "request": request, "reason": reason} | fields) + "\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file, and the one that was full before."""
    path = tmp_path / "requests.jsonl"
    Path(f"{path}.1").write_text(line("a", "removed:ttl", tier="disk", facts={"ago": "9 min"}))
    path.write_text(
        line("b", "found", tokens=1000, engine_tokens=200, loaded_tokens=600, asked=2, loaded=2, found={"disk": 2})
        + "{torn\n"
        + line("d", "found", time=1e300)
        + "x" * 2 * LINE_BYTES_MAX  # it is read and counted in pieces
        + "\n"
        + line("c\x1b[2J", "removed:ttl", tier="disk", facts={"ago": "12 min"}, new_field=1)
    )
    return path


def test_explain_of_file_lists_requests_and_then_reasons(trace: Path) -> None:
    code, out = run("explain", str(trace))
    assert code == ExitCode.OK
    skipped, *lines = out.splitlines()
    assert skipped == f"5 lines of {trace} could not be read and were skipped"
    assert "a: 0 of 0 blocks were loaded: tier disk removed the next block 9 min ago" in lines[0]
    told = "b: of 1,000 prompt tokens 200 were in the engine's cache, 600 were loaded and 200 computed; 2 of 2 blocks"
    assert told in lines[1]
    assert "\x1b" not in out
    assert lines[3:5] == ["", "Of 3 requests:"]
    assert lines[5] == (
        "        2  67%  removed:ttl: tier disk removed the next block 12 min ago: it was not used for its ttl"
    )
    assert lines[6].strip() == "fix: raise ttl"


def test_json_of_explain_has_latest_requests_and_counts_of_all_requests(trace: Path) -> None:
    result = result_of(ok("explain", str(trace), "--last", "1", "--json"))
    assert [one["record"]["request"] for one in result["requests"]] == ["c\x1b[2J"]
    assert [(one["reason"], one["count"]) for one in result["reasons"]] == [("removed:ttl", 2), ("found", 1)]
    (one,) = result_of(ok("explain", str(trace), "--request", "b", "--json"))["requests"]
    assert (one["record"]["loaded"], one["record"]["found"]) == (2, {"disk": 2})


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("none.jsonl", ExitCode.BAD_INPUT, "none.jsonl: cannot be read: No such file or directory; give the file"),
        ("empty.jsonl", ExitCode.FAILED, "empty.jsonl has no request that has ended"),
        ("http://127.0.0.1:9/metrics", ExitCode.FAILED, "http://127.0.0.1:9/metrics does not answer"),
        ("http://me:secret@127.0.0.1:9/", ExitCode.FAILED, "http://***@127.0.0.1:9/ does not answer"),
        ("http://two words/metrics", ExitCode.FAILED, "does not answer: URL can't contain control characters"),
    ],
)
def test_source_without_requests_is_an_error(
    source: str, code: ExitCode, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    got, out = run("explain", source)
    assert (got, said in out, "secret" in out) == (code, True, False)
    got, out = run("explain", source, "--json")
    assert got == code
    assert json.loads(out.splitlines()[-1])["ok"] is False


def explain_served_by(serve: Callable[[socket.socket, threading.Event], None]) -> tuple[int, str]:
    """Run ``kvtiers explain`` on a server that takes one request; the event is set when the command has ended."""
    has_ended = threading.Event()

    def accept() -> None:
        with server.accept()[0] as connection:
            connection.recv(4096)
            serve(connection, has_ended)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        served = pool.submit(accept)
        code, out = run("explain", f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        has_ended.set()
        served.result()
    return code, out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer: SSH-2.0"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answers 404 Not Found"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno length", "does not answer: IncompleteRead"),
        (b'HTTP/1.1 200 OK\r\n\r\nkvtiers_requests_total{reason="found"} +Inf', "has no metrics of kvtiers"),
        (b"", "does not answer"),
        (None, "does not answer: no complete answer within 0.2 s"),
    ],
)
def test_server_with_other_answer_or_none_is_an_error(
    answer: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtiers.connector.commands.explain.ANSWER_S_MAX", 0.2 if answer is None else 60.0)

    def serve(connection: socket.socket, has_ended: threading.Event) -> None:
        if answer is None:
            has_ended.wait(60)
        else:
            connection.sendall(answer)

    code, out = explain_served_by(serve)
    assert (code, said in out) == (ExitCode.FAILED, True), out


def test_server_that_trickles_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the whole answer never."""
    monkeypatch.setattr("kvtiers.connector.commands.explain.ANSWER_S_MAX", 0.5)

    def serve(connection: socket.socket, has_ended: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(OSError):
            while not has_ended.wait(0.05):
                connection.sendall(b"#")

    code, out = explain_served_by(serve)
    assert (code, "does not answer: no complete answer within 0.5 s" in out) == (ExitCode.FAILED, True), out


@pytest.fixture
def engine() -> Iterator[tuple[Metrics, str]]:
    metrics = Metrics()
    with closing(MetricsServer([metrics], port=0)) as server:
        yield metrics, server.url


def test_explain_of_metrics_url_gives_counts_and_mentions_trace_requests(engine: tuple[Metrics, str]) -> None:
    metrics, url = engine
    assert run("explain", url)[0] == ExitCode.FAILED  # no request has ended
    metrics.inc("kvtiers_requests_total", "not_stored", by=3)
    metrics.inc("kvtiers_requests_total", "store:queue_full")
    metrics.set("kvtiers_stored_since_load_bytes", "disk", value=3 << 30)
    _, out = run("explain", url)
    assert "3  75%  not_stored: no engine with this namespace has stored the next block" in out
    assert "1  25%  store:queue_full: the next block was not stored: too many stores were under way in tier …" in out
    assert "tier disk: 3 GiB stored since it was last loaded from" in out
    assert "set trace_requests" in out
    result = result_of(ok("explain", url, "--json"))
    assert (result["requests"], result["stored_since_load_bytes"]) == ([], {"disk": 3 << 30})
    assert run("explain", url, "--request", "a")[0] == ExitCode.BAD_INPUT


def test_counts_of_vllm_endpoint_are_summed_over_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "\n".join(
        [
            "# HELP vllm:kvtiers_requests_total x",
            'vllm:kvtiers_requests_total{engine="0",model_name="m",reason="found"} 2.0',
            'vllm:kvtiers_requests_total{engine="1",model_name="m",reason="found"} 3.0',
            'vllm:kvtiers_stored_since_load_bytes{engine="0",model_name="a\\"b",tier="s3"} NaN',
            "vllm:num_requests_running 1.0",
        ]
    )
    monkeypatch.setattr("kvtiers.connector.commands.explain._get", lambda _: page)
    result = result_of(ok("explain", "http://vllm:8000/metrics", "--json"))
    assert [(one["reason"], one["count"]) for one in result["reasons"]] == [("found", 5)]
    assert result["stored_since_load_bytes"] == {}
    monkeypatch.setattr("kvtiers.connector.commands.explain._get", lambda _: "up 1")
    code, out = run("explain", "http://vllm:8000/metrics")
    assert (code, "has no metrics of kvtiers" in out) == (ExitCode.FAILED, True)
