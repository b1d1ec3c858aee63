"""What the kubelet and the API server say: kubeconfigs of every kind, TLS for real, and servers that do not behave."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mcdaemon.document import read_yaml
from mcdaemon.errors import Broken
from mcdaemon.host import kubelet
from mcdaemon.host.kubelet import Access, Kubelet, Unreachable, not_ready, read_access
from tests.stand.apiserver import NODE, TOKEN, ApiServer, Authority, node_object

BOOT = "11111111-2222-3333-4444-555555555555"
SHARED = Path(os.environ.get("MCDAEMON_SHARED", Path(__file__).parents[3] / "shared"))
RECORDED = SHARED / "data" / "cluster" / "node-worker-0.yaml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api")) as running:
        yield running


@pytest.fixture(autouse=True)
def well(server: ApiServer) -> None:
    server.node, server.status, server.slow = node_object(BOOT), 200, False
    server.asked.clear()


def write(folder: Path, text: str) -> str:
    path = folder / "kubeconfig"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def trouble(folder: Path, text: str, node: str = "") -> str:
    return Kubelet("", write(folder, text), node, BOOT).trouble()


# -- the node's Ready condition ---------------------------------------------------------------------------------------


def test_a_ready_node_is_well_and_was_asked_for_by_the_name_in_the_client_certificate(
    server: ApiServer, tmp_path: Path
) -> None:
    assert trouble(tmp_path, server.kubeconfig()) == ""
    assert server.asked == [(f"system:node:{NODE}", f"/api/v1/nodes/{NODE}")]


def test_certificate_and_key_may_be_one_file_beside_the_kubeconfig_as_the_kubelet_keeps_them(
    server: ApiServer, tmp_path: Path
) -> None:
    certificate, key = server.client()
    pair = tmp_path / "pki"
    pair.mkdir()
    (pair / "kubelet-client-1.pem").write_text(certificate.read_text() + key.read_text())
    (pair / "kubelet-client-1.pem").chmod(0o600)
    (pair / "kubelet-client-current.pem").symlink_to("kubelet-client-1.pem")
    name = "pki/kubelet-client-current.pem"
    assert trouble(tmp_path, server.kubeconfig({"client-certificate": name, "client-key": name})) == ""
    assert server.asked[0][0] == f"system:node:{NODE}"


def test_a_token_is_taken_too_also_from_a_file_and_never_shown(server: ApiServer, tmp_path: Path) -> None:
    assert trouble(tmp_path, server.kubeconfig({"token": TOKEN}), NODE) == ""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    path = write(tmp_path, server.kubeconfig({"tokenFile": "token"}))
    assert Kubelet("", path, NODE, BOOT).trouble() == ""
    assert TOKEN not in repr(read_access(path))


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (node_object(BOOT, "False", "runtime network not ready"), "is not Ready: runtime network not ready"),
        (node_object(BOOT, "Unknown", "Kubelet stopped posting node status."), "is not Ready: Kubelet stopped"),
        (node_object("of-the-last-boot"), "has not reported itself"),
        ({**node_object(BOOT), "status": {"conditions": [], "nodeInfo": {"bootID": BOOT}}}, "no such condition"),
        ({"kind": "Status", "code": 404}, "not a node"),
        ({}, "not a node"),
    ],
)
def test_a_node_that_is_not_ready_in_this_boot_is_told_with_the_reason(
    server: ApiServer, tmp_path: Path, node: dict[str, Any], said: str
) -> None:
    server.node = node
    assert said in trouble(tmp_path, server.kubeconfig())


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_is_an_answer(server: ApiServer, tmp_path: Path, status: int) -> None:
    server.status = status
    assert f"answers {status} when asked for the node {NODE}" in trouble(tmp_path, server.kubeconfig())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_counts_as_out_of_reach(server: ApiServer, tmp_path: Path, status: int) -> None:
    server.status = status
    with pytest.raises(Unreachable, match=str(status)):
        trouble(tmp_path, server.kubeconfig())


def test_an_answer_without_end_is_cut(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubelet, "TOTAL_TIMEOUT", 0.3)
    server.slow = True
    with pytest.raises(Unreachable, match="does not come to an end"):
        trouble(tmp_path, server.kubeconfig())


def test_a_server_that_is_away_or_silent_is_out_of_reach(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unreachable, match=r"cannot reach 127\.0\.0\.1:\d+: "):
            trouble(tmp_path, server.kubeconfig(cluster={"server": address}))
        silent.listen()
        monkeypatch.setattr(kubelet, "READ_TIMEOUT", 0.2)
        monkeypatch.setattr(kubelet, "CONNECT_TIMEOUT", 0.2)
        with pytest.raises(Unreachable, match="does not answer in time"):
            trouble(tmp_path, server.kubeconfig(cluster={"server": address}))


def test_only_the_authority_of_the_kubeconfig_is_trusted(server: ApiServer, tmp_path: Path) -> None:
    """And nobody is told the token before the server has proved who it is."""
    other = Authority(tmp_path / "other").certificate
    other.chmod(0o644)
    text = server.kubeconfig({"token": TOKEN}, {"certificate-authority-data": "", "certificate-authority": str(other)})
    with pytest.raises(Unreachable, match="certificate"):
        trouble(tmp_path, text, NODE)
    assert server.asked == []


def test_proxies_of_the_environment_have_no_say(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nonexistent")
    assert trouble(tmp_path, server.kubeconfig()) == ""
    with pytest.raises(Unreachable):
        trouble(tmp_path, server.kubeconfig(cluster={"proxy-url": "http://127.0.0.1:1"}))


@pytest.mark.parametrize(
    ("user", "cluster", "said"),
    [
        ({"exec": {"command": "x"}}, {}, "exec is not supported"),
        ({}, {"server": "http://127.0.0.1:1"}, "not an https:// URL"),
        ({}, {"certificate-authority-data": ""}, "no certificate authority"),
        ({}, {"insecure-skip-tls-verify": True}, "unverified server"),
        ({"client-certificate": "gone.pem"}, {}, "gone.pem is not there"),
        ({"client-key-data": "%%%"}, {}, "client-key-data is not base64"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_trouble_with_its_place(
    server: ApiServer, tmp_path: Path, user: Any, cluster: Any, said: str
) -> None:
    found = trouble(tmp_path, server.kubeconfig(user, cluster))
    assert said in found and str(tmp_path) in found
    assert server.asked == []


@pytest.mark.parametrize("text", ["", "[]", "current-context: x\n", "a: [", '{"contexts": 5, "current-context": "x"}'])
def test_a_torn_kubeconfig_is_a_sentence(tmp_path: Path, text: str) -> None:
    assert "cannot use the kubeconfig" in trouble(tmp_path, text)


def test_a_kubeconfig_that_is_not_there_yet_or_that_others_can_write_is_a_sentence(tmp_path: Path) -> None:
    """The kubelet writes it when it has joined the cluster."""
    assert "no such file" in Kubelet("", str(tmp_path / "kubeconfig"), "", BOOT).trouble()
    path = write(tmp_path, "{}")
    os.chmod(path, 0o666)
    assert "others than root can write it" in Kubelet("", path, "", BOOT).trouble()


@pytest.mark.parametrize("pem", [b"", b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----", b"\xff"])
def test_a_certificate_that_names_no_node_leaves_the_name_open(pem: bytes) -> None:
    assert Access("https://x", b"", pem).node == ""


def test_a_long_name_in_the_certificate_is_read_whole(tmp_path: Path) -> None:
    name = "a" * 52  # what X.509 leaves for it: 64 with the prefix
    certificate, _key = Authority(tmp_path).issue("client", f"/O=system:nodes/CN=system:node:{name}")
    assert Access("https://x", b"", certificate.read_bytes()).node == name


@pytest.mark.skipif(not RECORDED.is_file(), reason=f"no recorded node in {RECORDED}; set MCDAEMON_SHARED")
def test_a_node_that_a_real_api_server_gave_is_understood() -> None:
    found: Any = read_yaml(RECORDED.read_text())[0].data
    assert not_ready(found, found["status"]["nodeInfo"]["bootID"]) == ""
    assert "worker-0 has not reported itself" in not_ready(found, BOOT)


# -- the kubelet's own endpoint ---------------------------------------------------------------------------------------


class _Endpoint(HTTPServer):
    answer: tuple[int, bytes] = (200, b"ok")


@pytest.fixture
def endpoint() -> Iterator[_Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert isinstance(self.server, _Endpoint)
            status, body = self.server.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    server = _Endpoint(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def at(endpoint: _Endpoint) -> str:
    return f"http://127.0.0.1:{endpoint.server_address[1]}/healthz"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"ok"), ""),
        ((200, b"ok\n"), ""),
        ((200, b"not ok: pleg"), "answers 200: not ok: pleg"),
        ((500, b"[-]syncloop failed"), "answers 500: [-]syncloop failed"),
        ((302, b""), "answers 302"),
    ],
)
def test_the_kubelet_is_well_when_it_says_ok_and_nothing_else(
    endpoint: _Endpoint, answer: tuple[int, bytes], said: str
) -> None:
    """The machine-config-daemon takes every answer for a good one (mcd.md, defect 49)."""
    endpoint.answer = answer
    found = Kubelet(at(endpoint), "", "", BOOT).trouble()
    assert said in found and bool(found) == bool(said)


def test_a_kubelet_that_does_not_listen_is_trouble_and_not_an_outage_of_the_api(endpoint: _Endpoint) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/healthz"
        assert "health endpoint: cannot reach" in Kubelet(url, "", "", BOOT).trouble()


def test_the_api_server_is_not_asked_while_the_kubelet_itself_is_not_well(
    endpoint: _Endpoint, server: ApiServer, tmp_path: Path
) -> None:
    endpoint.answer = (500, b"no")
    path = write(tmp_path, server.kubeconfig())
    assert "answers 500" in Kubelet(at(endpoint), path, "", BOOT).trouble()
    assert server.asked == []
    endpoint.answer = (200, b"ok")
    assert Kubelet(at(endpoint), path, "", BOOT).trouble() == "" and len(server.asked) == 1


def test_an_error_is_of_the_agents_own_kind(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        read_access(write(tmp_path, json.dumps([])))
