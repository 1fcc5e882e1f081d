"""`acclimate api` as a process: one a data folder, one a port, and how it ends."""

import signal
import socket
from pathlib import Path

from apis import WITHIN, Api, acclimate, api, until

from acclimate import config, doctor_places, ports


def test_a_second_api_on_the_same_data_folder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with api(data) as first:
        done = acclimate("api", "--data", str(data), "--port", "0")
        assert done.returncode == 1 and done.stdout == ""
        assert f"process {first.process.pid} runs the api" in done.stderr and "hint: stop" in done.stderr
        # A taken port is refused before anything is made, and says who is there.
        done = acclimate("api", "--data", str(tmp_path / "other"), "--port", str(first.port))
        assert done.returncode == 1 and "an Acclimate API" in done.stderr
        assert not (tmp_path / "other").exists()
        assert first.end() == 0
    # The lock went with the process, though its file is there.
    assert (data / "api.lock").exists()
    with api(data) as again:
        assert again.get("/readyz").status_code == 200


def test_a_port_of_a_stranger_is_told_apart(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert ports.is_taken("127.0.0.1", port)
        assert ports.who_answers("127.0.0.1", port, timeout=0.2) == ""
        found = list(doctor_places.ports_(config.load(tmp_path, environ={}, given={"port": port, "mlflow_port": 0})))
        assert [(one.state, "another program" in one.found) for one in found] == [("missing", True)]
    assert not ports.is_taken("127.0.0.1", port)


def test_a_request_of_two_lengths_is_refused_and_its_connection_ends(tmp_path: Path) -> None:
    """What one program takes for the body, another would take for the next request."""
    second = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    body = b"2\r\n{}\r\n0\r\n\r\n" + second
    both = b"Content-Type: application/json\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    with (
        api(tmp_path / "data") as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN) as caller,
    ):
        caller.sendall(b"POST /v1/accounts HTTP/1.1\r\nHost: x\r\n" + both + body)
        answer = b"".join(iter(lambda: caller.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1, answer


# ---- the end ----------------------------------------------------------------------------------------------------------


def half_a_request(server: Api) -> socket.socket:
    """A request of which the body's second half is still to come."""
    caller = socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN)
    caller.sendall(
        b"POST /v1/accounts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
    )
    return caller


def test_an_api_that_is_asked_to_end_finishes_what_is_under_way(tmp_path: Path) -> None:
    with api(tmp_path / "data", ACCLIMATE_METRICS="on") as server, half_a_request(server) as caller:
        until(lambda: "acclimate_http_requests_in_progress 2.0" in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.answers())
        assert server.process.poll() is None
        caller.sendall(b'"a": 123}')
        assert caller.recv(100).startswith(b"HTTP/1.1 422 ")
        assert server.process.wait(WITHIN) == 0
        assert [line["event"] for line in server.lines()][-2:] == ["request", "stopped"]


def test_a_stopping_api_says_so_while_it_still_answers_and_a_second_signal_hurries_it(tmp_path: Path) -> None:
    with api(tmp_path / "data", ACCLIMATE_DRAIN="300") as server, half_a_request(server):
        assert server.get("/readyz").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        answer = until(lambda: (got := server.get("/readyz")).status_code == 503 and got)
        assert answer.json()["checks"]["stopping"] == "the server is stopping"
        assert server.get("/v1/rounds").status_code == 200
        # It would drain for minutes, and then wait for the half request.
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(WITHIN)
