"""Progress that an agent tells a server like that of Kubeflow's controller."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from resilience.agent.operator.kubeflow import TrainJobProgress, take_server
from resilience.agent.processes.output import Output
from resilience.agent.processes.worker import WorkerStream
from resilience.events import Event

TOLD_S = 20.0


class Controller:
    """Takes statuses by TLS, and answers with `answer`."""

    def __init__(self, folder: Path) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.answer = 200
        self.told = threading.Semaphore(0)
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                controller.bodies.append(json.loads(body)["trainerStatus"])
                controller.tokens.append(self.headers["Authorization"])
                self.send_response(controller.answer)
                self.end_headers()
                controller.told.release()

            def log_message(self, *given: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        make_pair(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        (folder / "token").write_text("first\n")
        self.variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self._server.server_port}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def make_pair(folder: Path) -> None:
    """Write a key, and a certificate of 127.0.0.1 that vouches for itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "controller")])
    own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - day).not_valid_after(now + day)
    made = made.add_extension(own, critical=False)
    certificate = made.sign(key, hashes.SHA256())
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


@pytest.fixture
def output(tmp_path: Path, controller: Controller) -> Output:
    made = Output(tmp_path / "events.jsonl", tmp_path / "logs", "n0")
    made.tell_progress(controller.variables, 40)
    return made


def event(step: int, **fields: Any) -> Event:
    return Event(time=0.0, node="n0", rank=0, generation=0, step=step, event="step", fields=fields)


@pytest.mark.parametrize(
    ("num_steps", "step", "fields", "told"),
    [
        (40, 9, {"duration_s": 2.0}, (25, 60)),
        (40, 39, {"duration_s": 2.0}, (100, 0)),
        (40, 40, {}, (100, None)),
        (3, 1, {"duration_s": 1e300}, (66, 2**31 - 1)),
        (0, 9, {"duration_s": 2.0}, (None, None)),
    ],
)
def test_a_step_says_how_far_the_run_is(
    num_steps: int, step: int, fields: dict[str, Any], told: tuple[int | None, int | None]
) -> None:
    found = TrainJobProgress(num_steps).describe(event(step, **fields))

    assert (found.get("progressPercentage"), found.get("estimatedRemainingSeconds")) == told
    assert found["metrics"] == [{"name": "step", "value": str(step + 1)}]
    assert found["lastUpdatedTime"] == "1970-01-01T00:00:00+00:00"


def test_metrics_are_what_the_schema_takes() -> None:
    found = TrainJobProgress(0).describe(event(0, loss="NaN", lr="", grad_norm="x" * 99, other=1))

    assert [(each["name"], each["value"]) for each in found["metrics"]] == [
        ("step", "1"),
        ("loss", "NaN"),
        ("grad_norm", "x" * 64),
    ]


def test_workers_do_not_see_where_the_agent_tells_progress(controller: Controller) -> None:
    del controller.variables["KUBEFLOW_TRAINER_SERVER_TOKEN"]

    assert take_server(controller.variables) is None
    assert controller.variables == {}


def test_the_newest_step_is_told_and_at_the_end_the_last(
    controller: Controller, output: Output, tmp_path: Path
) -> None:
    log = output.open_log()

    log.write("step", step=0, loss=2.5, duration_s=1.0)
    assert controller.told.acquire(timeout=TOLD_S)
    (tmp_path / "token").write_text("second")
    noise = [b"no event at all", b'{"event":"step"}', b'{"time":1,"event":"step","step":[]}']
    output.write(0, 0, noise, WorkerStream.EVENTS)
    for step in range(1, 40):
        log.write("step", step=step, loss=1.5, duration_s=1.0)
    output.close(60.0)

    first, last = controller.bodies
    assert (first["progressPercentage"], first["estimatedRemainingSeconds"]) == (2, 39)
    assert last["progressPercentage"] == 100
    assert {"name": "loss", "value": "1.5"} in last["metrics"]
    assert controller.tokens == ["Bearer first", "Bearer second"]


def test_a_server_that_refuses_is_named_once(
    controller: Controller, output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    controller.answer = 403
    log = output.open_log()

    log.write("step", step=0)
    assert controller.told.acquire(timeout=TOLD_S)
    log.write("step", step=1)
    output.close(60.0)

    said = capfd.readouterr().err
    assert said.count("cannot tell Kubeflow's controller of progress: HTTP Error 403") == 1
    assert len(controller.bodies) == 2


def test_another_authority_is_not_trusted(
    controller: Controller, output: Output, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_pair(tmp_path)

    output.open_log().write("step", step=0)
    output.close(60.0)

    assert "CERTIFICATE_VERIFY_FAILED" in capfd.readouterr().err
    assert controller.bodies == []


def test_a_plain_address_is_no_server(controller: Controller) -> None:
    controller.variables["KUBEFLOW_TRAINER_SERVER_URL"] = "http://127.0.0.1/status"

    assert take_server(controller.variables) is None
