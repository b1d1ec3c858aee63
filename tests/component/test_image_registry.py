"""The registry client's verdicts, against a real registry with real gaps, and with a fault proxy before it."""

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional
from urllib.parse import parse_qs, urlsplit

import pytest

from mcdaemon.image.authorization import Endpoint
from mcdaemon.image.connection import Limits
from mcdaemon.image.credentials import Credentials, Login
from mcdaemon.image.findings import Contents, Unavailable, Verdict
from mcdaemon.image.manifest import BYTES_LIMIT
from mcdaemon.image.registry import RegistryClient
from tests.stand import images
from tests.stand.faultproxy import FaultProxy
from tests.stand.isolation import private
from tests.stand.registry import PASSWORD, USER, Registry, make_certificate

IMAGE = images.layer_on(images.os_image(), {"/usr/share/more": images.File(b"more")})
LAYERS = [layer.digest for layer in IMAGE.layers]
SIZE = len(IMAGE.config) + sum(len(layer.blob) for layer in IMAGE.layers)
QUICK = Limits(connect=2.0, read=1.0, total=3.0)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("standing")) as running:
        images.push(IMAGE, f"{running.host}/team/os:1")
        yield running


@pytest.fixture
def registry(standing: Registry) -> Registry:
    """For tests that take nothing away."""
    standing.forget_requests()
    return standing


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Registry]:
    """For tests that delete."""
    with Registry(tmp_path / "registry") as running:
        images.push(IMAGE, f"{running.host}/team/os:1")
        yield running


@pytest.fixture
def proxy(registry: Registry) -> Iterator[FaultProxy]:
    with FaultProxy(registry.host) as running:
        yield running


def check(
    host: str,
    digest: str = IMAGE.digest,
    path: str = "team/os",
    login: Optional[Login] = None,
    limits: Limits = QUICK,
    insecure: bool = True,
    bundle: Optional[Path] = None,
) -> Contents:
    credentials = Credentials(Path("/test/auth.json"), {host: login}) if login else Credentials()
    with RegistryClient(credentials, bundle, limits) as client:
        return client.check(Endpoint(host, path, insecure), digest)


def whole(found: Contents) -> tuple[str, str, int]:
    return found.digest, found.image_digest, found.size


def refusal(host: str, digest: str = IMAGE.digest, **more: Any) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        check(host, digest, **more)
    return caught.value


def skopeo_copies(host: str, digest: str, folder: Path) -> bool:
    """The oracle: would containers/image pull it?"""
    argv = ["skopeo", "--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", "--retry-times=0"]
    source = f"docker://{host}/team/os@{digest}"
    return subprocess.run(private([*argv, source, f"dir:{folder}"]), capture_output=True, timeout=30).returncode == 0


def test_a_whole_image_is_complete_and_nothing_of_it_is_fetched(registry: Registry, tmp_path: Path) -> None:
    assert whole(check(registry.host)) == (IMAGE.digest, IMAGE.digest, SIZE)
    seen = [(request.method, request.path.rpartition("/")[2]) for request in registry.requests()]
    expected = [("GET", IMAGE.digest)] + [("HEAD", blob) for blob in [IMAGE.config_digest, *LAYERS]]
    assert sorted(seen) == sorted(expected)
    assert registry.blob_fetches() == ()
    assert skopeo_copies(registry.host, IMAGE.digest, tmp_path / "copy")


VERSIONED = images.os_image(version="417.94.7")


def described(registry: Registry, digest: str) -> Contents:
    with RegistryClient(Credentials(), None, QUICK) as client:
        return client.check(Endpoint(registry.host, "team/os", True), digest, describe=True)


def test_a_version_that_is_asked_for_costs_no_request_more_and_no_layer(registry: Registry) -> None:
    """The config is read in place of the HEAD for it."""
    images.push(VERSIONED, f"{registry.host}/team/os:v")
    registry.forget_requests()
    found = described(registry, VERSIONED.digest)
    assert found.description.version == "417.94.7" and found.layers[0].digest == VERSIONED.layers[0].digest
    seen = [(request.method, request.path.rpartition("/")[2]) for request in registry.requests()]
    assert sorted(seen) == sorted([("GET", VERSIONED.digest), ("GET", VERSIONED.config_digest),
                                   *(("HEAD", layer.digest) for layer in VERSIONED.layers)])  # fmt: skip


def test_nobody_reads_a_config_for_a_version_that_nobody_asked_for(registry: Registry) -> None:
    images.push(VERSIONED, f"{registry.host}/team/os:v")
    registry.forget_requests()
    assert check(registry.host, VERSIONED.digest).description.version == ""
    assert registry.blob_fetches() == ()


def test_a_config_that_is_gone_makes_the_image_incomplete_with_a_version_too(fresh: Registry) -> None:
    images.push(VERSIONED, f"{fresh.host}/team/os:v")
    fresh.delete_blob("team/os", VERSIONED.config_digest)
    with pytest.raises(Unavailable, match="config cannot be had") as caught:
        described(fresh, VERSIONED.digest)
    assert caught.value.verdict is Verdict.INCOMPLETE


def test_a_tag_is_asked_for_once(registry: Registry) -> None:
    with RegistryClient(Credentials(), None, QUICK) as client:
        endpoint = Endpoint(registry.host, "team/os", True)
        digest = client.digest(endpoint, "1")
        assert client.check(endpoint, digest).size == SIZE
    assert [request.path for request in registry.requests() if request.method == "GET"] == ["/v2/team/os/manifests/1"]


def test_an_index_leads_to_the_image_of_this_platform(registry: Registry) -> None:
    other = images.os_image(architecture="s390x")
    attestation = {
        "mediaType": images.MANIFEST,
        "digest": images.sha256(b"attestation"),
        "size": 11,
        "platform": {"architecture": "unknown", "os": "unknown"},
    }
    index = images.Index((other, IMAGE))
    images.push(index, f"{registry.host}/team/os:multi")
    assert whole(check(registry.host, index.digest)) == (index.digest, IMAGE.digest, SIZE)
    with_attestation = images.Index((IMAGE,), (attestation,))
    assert with_attestation.digest != index.digest


def test_an_index_without_this_platform_says_which_it_has(registry: Registry) -> None:
    index = images.Index((images.os_image(architecture="s390x"),))
    images.push(index, f"{registry.host}/team/os:other")
    error = refusal(registry.host, index.digest)
    assert error.verdict is Verdict.ABSENT
    assert "only for linux/s390x" in error.reason


def test_an_index_whose_child_is_gone_is_incomplete(fresh: Registry) -> None:
    child = images.os_image({"/etc/child": images.File(b"")})
    index = images.Index((child,))
    images.push(index, f"{fresh.host}/team/os:multi")
    fresh.delete("team/os", child.digest)
    error = refusal(fresh.host, index.digest)
    assert error.verdict is Verdict.INCOMPLETE
    assert error.opened


def test_a_deleted_manifest_is_absent(fresh: Registry, tmp_path: Path) -> None:
    fresh.delete("team/os", IMAGE.digest)
    error = refusal(fresh.host)
    assert (error.verdict, error.reason, error.opened) == (Verdict.ABSENT, "manifest unknown", False)
    assert not skopeo_copies(fresh.host, IMAGE.digest, tmp_path / "copy")


def test_an_unknown_repository_is_absent(registry: Registry) -> None:
    assert refusal(registry.host, path="team/nothing").verdict is Verdict.ABSENT


@pytest.mark.parametrize("gone", [*LAYERS, IMAGE.config_digest])
def test_one_deleted_blob_makes_it_incomplete(fresh: Registry, tmp_path: Path, gone: str) -> None:
    fresh.delete_blob("team/os", gone)
    error = refusal(fresh.host)
    assert error.verdict is Verdict.INCOMPLETE
    assert error.reason == f"1 of its 3 blobs cannot be had: {gone} is missing"
    assert error.opened
    assert not skopeo_copies(fresh.host, IMAGE.digest, tmp_path / "copy")


def test_a_layer_of_another_size_makes_it_incomplete(proxy: FaultProxy) -> None:
    proxy.answer(f"HEAD .*{LAYERS[0]}", 200, body=b"short")
    error = refusal(proxy.host)
    assert error.verdict is Verdict.INCOMPLETE
    assert "has 5 bytes instead of" in error.reason


def test_a_stopped_registry_is_unreachable_and_the_cause_is_told(fresh: Registry) -> None:
    fresh.stop()
    error = refusal(fresh.host)
    assert (error.verdict, error.reason) == (Verdict.UNREACHABLE, f"{fresh.host}: Connection refused")


def test_a_name_that_cannot_be_looked_up_is_unreachable() -> None:
    error = refusal("registry.invalid:5000")
    assert error.verdict is Verdict.UNREACHABLE
    assert "its name cannot be looked up" in error.reason


def test_a_registry_that_says_nothing_is_unreachable_in_time(proxy: FaultProxy) -> None:
    proxy.stall("GET .*/manifests/")
    error = refusal(proxy.host)
    assert error.verdict is Verdict.UNREACHABLE


def test_an_answer_that_drips_is_given_up_in_time(proxy: FaultProxy) -> None:
    proxy.slow("GET .*/manifests/", 100)
    error = refusal(proxy.host, limits=Limits(2.0, 5.0, 1.5))
    assert error.verdict is Verdict.UNREACHABLE
    assert "does not finish its answer" in error.reason


def test_a_manifest_that_is_cut_off_is_unreachable_and_not_malformed(proxy: FaultProxy) -> None:
    proxy.cut("GET .*/manifests/", after=100)
    assert refusal(proxy.host).verdict is Verdict.UNREACHABLE


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_registry_in_trouble_is_unreachable(proxy: FaultProxy, status: int) -> None:
    proxy.answer("GET .*/manifests/", status, headers={"Retry-After": "9"})
    error = refusal(proxy.host)
    assert (error.verdict, error.retry_after) == (Verdict.UNREACHABLE, 9.0)


def test_too_many_requests_carries_the_wait(proxy: FaultProxy) -> None:
    proxy.answer("GET .*/manifests/", 429, b'{"errors":[{"code":"TOOMANYREQUESTS"}]}', {"Retry-After": "17"})
    error = refusal(proxy.host)
    assert (error.verdict, error.retry_after) == (Verdict.RATE_LIMITED, 17.0)
    assert error.reason.endswith("TOOMANYREQUESTS")


@pytest.mark.parametrize(
    ("said", "heard"),
    [("", None), ("soon", None), ("-5", None), ("999999", 3600.0), ("Thu, 01 Jan 2015 00:00:00 GMT", 0.0)],
)
def test_a_strange_retry_after_is_bounded(proxy: FaultProxy, said: str, heard: Optional[float]) -> None:
    proxy.answer("GET .*/manifests/", 429, headers={"Retry-After": said})
    assert refusal(proxy.host).retry_after == heard


def test_a_rate_limit_in_the_middle_of_the_blobs_is_one(proxy: FaultProxy) -> None:
    proxy.answer(f"HEAD .*{LAYERS[1]}", 429, headers={"Retry-After": "3"})
    error = refusal(proxy.host)
    assert (error.verdict, error.retry_after) == (Verdict.RATE_LIMITED, 3.0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>captive portal</html>", "instead of"),
        (b"", "instead of"),
        (IMAGE.manifest[:-10], "instead of"),
        (images.os_image(version="other").manifest, "instead of"),
    ],
)
def test_img_23_another_body_than_the_digests_is_malformed(
    proxy: FaultProxy, tmp_path: Path, body: bytes, says: str
) -> None:
    proxy.replace_body("GET .*/manifests/", body)
    error = refusal(proxy.host)
    assert error.verdict is Verdict.MALFORMED
    assert says in error.reason
    assert not skopeo_copies(proxy.host, IMAGE.digest, tmp_path / "copy")


DESCRIPTOR = {"mediaType": images.LAYER, "digest": IMAGE.layers[0].digest, "size": 1}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("not json", "not JSON"),
        ([], "not a JSON object"),
        ({"schemaVersion": 1, "fsLayers": []}, "neither an image nor an index of images \\(schemaVersion 1\\)"),
        ({"manifests": [], "config": DESCRIPTOR, "layers": []}, "neither an image nor an index"),
        ({"config": DESCRIPTOR, "layers": [{}]}, "no proper digest"),
        ({"config": DESCRIPTOR, "layers": [{"digest": "sha256:1", "size": 1}]}, "no proper digest"),
        ({"config": DESCRIPTOR, "layers": [{**DESCRIPTOR, "size": -1}]}, "is not a number"),
        ({"config": DESCRIPTOR, "layers": [{**DESCRIPTOR, "size": True}]}, "is not a number"),
        ({"config": DESCRIPTOR, "layers": "many"}, "layers in its manifest is not a list"),
        ({"config": DESCRIPTOR, "layers": [DESCRIPTOR] * 1001}, "not a list of at most 1000"),
        ({"config": 5, "layers": []}, "descriptor in its manifest is not"),
        ({"mediaType": images.INDEX, "config": DESCRIPTOR, "layers": []}, "which cannot be used"),
        ({"mediaType": images.INDEX, "manifests": [DESCRIPTOR, {"digest": "../../etc"}]}, "no proper digest"),
    ],
)
def test_a_tag_that_leads_to_garbage_is_malformed(proxy: FaultProxy, document: object, says: str) -> None:
    body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
    proxy.replace_body("GET .*/manifests/", body)
    with RegistryClient(Credentials(), None, QUICK) as client, pytest.raises(Unavailable, match=says) as caught:
        client.digest(Endpoint(proxy.host, "team/os", True), "1")
    assert caught.value.verdict is Verdict.MALFORMED


def test_a_manifest_without_bound_is_not_read_to_the_end(proxy: FaultProxy) -> None:
    proxy.replace_body("GET .*/manifests/", b" " * (BYTES_LIMIT + 2_000_000))
    error = refusal(proxy.host)
    assert error.verdict is Verdict.MALFORMED
    assert f"more than {BYTES_LIMIT} bytes" in error.reason


def test_what_a_registry_says_is_made_fit_for_a_log(proxy: FaultProxy) -> None:
    said = "gone\nINFO all is well\x1b[31m" + "x" * 5000
    proxy.answer("GET .*/manifests/", 404, json.dumps({"errors": [{"message": said}]}).encode())
    reason = refusal(proxy.host).reason
    assert reason.startswith("gone INFO all is well [31mxxx")
    assert reason.isprintable()
    assert len(reason) < 400


class TestCredentialsOnTheWire:
    @pytest.fixture
    def closed(self, tmp_path: Path) -> Iterator[Registry]:
        with Registry(tmp_path / "closed", password_needed=True) as running:
            images.push(IMAGE, f"{running.host}/team/os:1", credentials=f"{USER}:{PASSWORD}")
            running.forget_requests()
            yield running

    def test_a_login_opens_it(self, closed: Registry) -> None:
        assert check(closed.host, login=Login(USER, PASSWORD)).size == SIZE

    def test_a_stranger_is_unauthorized_and_told_why(self, closed: Registry) -> None:
        error = refusal(closed.host)
        assert error.verdict is Verdict.UNAUTHORIZED
        assert error.reason.endswith("for team/os: there is no auth.json, so it was asked anonymously")

    def test_img_30_a_wrong_password_names_host_and_file_and_not_the_password(self, closed: Registry) -> None:
        error = refusal(closed.host, login=Login(USER, "hunter2"))
        assert error.verdict is Verdict.UNAUTHORIZED
        assert error.reason == f"{closed.host} answers 401 for team/os: it refused the credentials in /test/auth.json"
        assert len([request for request in closed.requests() if request.status == 401]) == 2

    def test_a_403_is_unauthorized(self, proxy: FaultProxy) -> None:
        proxy.answer("GET .*/manifests/", 403, b'{"errors":[{"code":"DENIED"}]}')
        assert refusal(proxy.host).verdict is Verdict.UNAUTHORIZED

    def test_credentials_do_not_follow_a_redirect_to_another_host(self, closed: Registry, registry: Registry) -> None:
        with FaultProxy(closed.host) as front, FaultProxy(registry.host) as blob_store:
            for digest in [IMAGE.config_digest, *LAYERS]:
                location = {"Location": f"http://{blob_store.host}/v2/team/os/blobs/{digest}"}
                front.answer(f"HEAD .*{digest}", 307, headers=location)
            assert check(front.host, login=Login(USER, PASSWORD)).size == SIZE
            assert len(blob_store.requests()) == 3
            assert not any("authorization" in seen.headers for seen in blob_store.requests())
            assert all("authorization" in seen.headers for seen in front.requests() if seen.method == "HEAD")

    def test_a_blob_store_that_answers_no_head_does_not_hide_a_blob(self, proxy: FaultProxy) -> None:
        with FaultProxy(proxy.host) as blob_store:
            blob_store.answer("HEAD", 403)
            location = {"Location": f"http://{blob_store.host}/signed-for-get"}
            proxy.answer(f"HEAD .*{LAYERS[0]}", 307, headers=location)
            assert check(proxy.host).size == SIZE

    def test_a_blob_store_that_has_lost_a_blob_makes_it_incomplete(self, proxy: FaultProxy) -> None:
        with FaultProxy(proxy.host) as blob_store:
            blob_store.answer("HEAD", 404)
            proxy.answer(f"HEAD .*{LAYERS[0]}", 307, headers={"Location": f"http://{blob_store.host}/gone"})
            assert refusal(proxy.host).verdict is Verdict.INCOMPLETE

    @pytest.mark.parametrize("location", ["/again", "file:///etc/shadow", "http://[broken"])
    def test_a_redirect_to_nowhere_ends(self, proxy: FaultProxy, location: str) -> None:
        proxy.answer("(manifests|again)", 307, headers={"Location": location})
        assert refusal(proxy.host).verdict is Verdict.MALFORMED


class TokenServer:
    """A token service as the distribution specification has it, in a thread; it knows one account and counts."""

    def __init__(self) -> None:
        self.asked: list[dict[str, list[str]]] = []
        self.valid: set[str] = set()
        self.status = 200
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self, parse_qs(urlsplit(self.path).query))

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                server.answer(self, parse_qs(self.rfile.read(length).decode()))

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.realm = f"http://127.0.0.1:{self._server.server_port}/token"

    def answer(self, handler: http.server.BaseHTTPRequestHandler, query: dict[str, list[str]]) -> None:
        self.asked.append({**query, "authorization": [handler.headers.get("Authorization", "")]})
        token = f"token-{len(self.asked)}"
        self.valid = {f"Bearer {token}"}
        body = json.dumps({"token": token}).encode() if self.status == 200 else b"{}"
        handler.send_response(self.status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class TestTokens:
    @pytest.fixture
    def tokens(self) -> Iterator[TokenServer]:
        running = TokenServer()
        yield running
        running.close()

    @pytest.fixture
    def guarded(self, proxy: FaultProxy, tokens: TokenServer) -> FaultProxy:
        """The registry, for those who bring a token that the server gave last."""
        challenge = {"WWW-Authenticate": f'Bearer realm="{tokens.realm}",service="stand"'}
        proxy.answer_if(lambda seen: seen.headers.get("authorization", "") not in tokens.valid, 401, challenge)
        return proxy

    def test_one_token_serves_the_whole_check(self, guarded: FaultProxy, tokens: TokenServer) -> None:
        assert check(guarded.host).size == SIZE
        assert tokens.asked == [{"scope": ["repository:team/os:pull"], "service": ["stand"], "authorization": [""]}]

    def test_the_login_goes_to_the_token_server_and_not_to_the_registry(
        self, guarded: FaultProxy, tokens: TokenServer
    ) -> None:
        check(guarded.host, login=Login(USER, PASSWORD))
        basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        assert tokens.asked[0]["authorization"] == [basic]
        assert tokens.asked[0]["account"] == [USER]
        assert not any(seen.headers.get("authorization", "") == basic for seen in guarded.requests())

    def test_an_identity_token_is_exchanged(self, guarded: FaultProxy, tokens: TokenServer) -> None:
        check(guarded.host, login=Login(identity_token="refresh-me"))
        assert tokens.asked[0]["grant_type"] == ["refresh_token"]
        assert tokens.asked[0]["refresh_token"] == ["refresh-me"]

    def test_img_49_a_token_that_expires_in_the_middle_is_renewed_once(
        self, guarded: FaultProxy, tokens: TokenServer
    ) -> None:
        with RegistryClient(Credentials(), None, QUICK) as client:
            endpoint = Endpoint(guarded.host, "team/os", True)
            client.digest(endpoint, "1")
            tokens.valid = set()
            assert client.check(endpoint, IMAGE.digest).size == SIZE
        assert len(tokens.asked) == 2

    @pytest.mark.parametrize(
        ("status", "verdict"),
        [
            (401, Verdict.UNAUTHORIZED),
            (403, Verdict.UNAUTHORIZED),
            (429, Verdict.RATE_LIMITED),
            (503, Verdict.UNREACHABLE),
        ],
    )
    def test_the_token_servers_refusal_is_the_verdict(
        self, guarded: FaultProxy, tokens: TokenServer, status: int, verdict: Verdict
    ) -> None:
        tokens.status = status
        assert refusal(guarded.host).verdict is verdict

    def test_a_token_that_is_never_good_enough_ends(self, proxy: FaultProxy, tokens: TokenServer) -> None:
        challenge = {"WWW-Authenticate": f'Bearer realm="{tokens.realm}"'}
        proxy.answer("manifests", 401, headers=challenge)
        assert refusal(proxy.host).verdict is Verdict.UNAUTHORIZED
        assert len(tokens.asked) == 1

    @pytest.mark.parametrize("realm", ["", "file:///etc/passwd", "gopher://x"])
    def test_a_token_server_that_cannot_be_asked_is_malformed(self, proxy: FaultProxy, realm: str) -> None:
        proxy.answer("manifests", 401, headers={"WWW-Authenticate": f'Bearer realm="{realm}"'})
        assert refusal(proxy.host).verdict is Verdict.MALFORMED


class TestTls:
    @pytest.fixture
    def secure(self, tmp_path: Path) -> Iterator[tuple[Registry, Path]]:
        made = make_certificate(tmp_path / "tls")
        with Registry(tmp_path / "secure", certificate=made) as running:
            images.push(IMAGE, f"{running.host}/team/os:1")
            yield running, made.certificate

    def test_a_certificate_in_the_hosts_bundle_is_trusted(self, secure: tuple[Registry, Path]) -> None:
        registry, bundle = secure
        assert check(registry.host, insecure=False, bundle=bundle).size == SIZE

    def test_an_unknown_certificate_is_a_tls_verdict(self, secure: tuple[Registry, Path], tmp_path: Path) -> None:
        other = make_certificate(tmp_path / "other").certificate
        error = refusal(secure[0].host, insecure=False, bundle=other)
        assert error.verdict is Verdict.TLS
        assert "self-signed certificate" in error.reason

    def test_a_host_without_a_bundle_trusts_nobody_and_never_certifi(self, secure: tuple[Registry, Path]) -> None:
        error = refusal(secure[0].host, insecure=False, bundle=None)
        assert error.verdict is Verdict.TLS
        assert "no CA bundle" in error.reason

    def test_the_environment_cannot_widen_the_trust(
        self, secure: tuple[Registry, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(secure[1]))
        monkeypatch.setenv("CURL_CA_BUNDLE", str(secure[1]))
        other = make_certificate(tmp_path / "other").certificate
        assert refusal(secure[0].host, insecure=False, bundle=other).verdict is Verdict.TLS

    def test_an_insecure_registry_is_not_verified(self, secure: tuple[Registry, Path]) -> None:
        assert check(secure[0].host, insecure=True).size == SIZE

    def test_a_plain_registry_that_is_not_called_insecure_is_a_tls_verdict(
        self, registry: Registry, tmp_path: Path
    ) -> None:
        bundle = make_certificate(tmp_path / "tls").certificate
        error = refusal(registry.host, insecure=False, bundle=bundle)
        assert error.verdict is Verdict.TLS
        assert registry.blob_fetches() == ()


def test_a_proxy_in_the_environment_is_not_for_the_loopback(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert check(registry.host).size == SIZE


def test_a_proxy_in_the_environment_is_for_everybody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuser(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    asked: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuser) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.server_port}")
        bundle = Path("/etc/ssl/certs/ca-certificates.crt")
        error = refusal("registry.invalid", insecure=False, bundle=bundle)
        server.shutdown()
    assert error.verdict is Verdict.UNREACHABLE
    assert asked == ["registry.invalid:443"]
