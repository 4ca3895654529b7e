"""Who may ask: keys by three headers, no strange names and pages, and a salt for each key.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import base64
import os
import pty
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError
from dflash_moe.server.api_keys import read_api_keys
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.guard import Guard
from dflash_moe.server.front.http_protocol import HEADER_S
from dflash_moe.server.listening import bind
from dflash_moe.server.server_settings import ServerSettings
from tests.server.served import served

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
KEYS = ["key-of-the-first-one", "key-of-the-second-one"]


def headers(**given: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in given.items()]


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()


def status(guard: Guard, path: str = "/v1/models", **given: str) -> int:
    try:
        guard.admit(path, headers(**given))
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "given", [{"authorization": f"Bearer {KEYS[0]}"}, {"x_api_key": KEYS[0]}, {"authorization": basic(KEYS[0])}]
)
def test_a_key_is_taken_from_three_headers(given):
    guard = Guard(KEYS, hosts=(), origins=())
    salt, is_known = guard.admit("/v1/models", headers(**given))
    assert is_known
    assert len(salt) == 16
    assert guard.admit("/v1/models", headers(x_api_key=KEYS[1]))[0] != salt


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"authorization": "Bearer no"},
        {"authorization": "Basic %%%"},
        {"authorization": KEYS[0]},
        {"x_api_key": KEYS[0] + "x"},
        {"x_api_key": ""},
    ],
)
def test_without_a_right_key_nobody_is_let_in_but_to_what_says_whether_it_works(given):
    guard = Guard(KEYS, hosts=(), origins=())
    assert status(guard, **given) == 401
    assert guard.admit("/ready", headers(**given)) == (b"", False)


def test_without_keys_strange_names_of_this_machine_are_refused():
    guard = Guard((), hosts=("proxy.example",), origins=())
    for name in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LocalHost:80", "proxy.example", "a.localhost", "127.8.8.8"):
        assert status(guard, host=name) == 200, name
    for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[2001:db8::1]"):
        assert status(guard, host=name) == 403, name
    assert status(Guard(KEYS, hosts=(), origins=()), host="any.example", x_api_key=KEYS[0]) == 200


def test_pages_of_other_sites_are_refused_with_and_without_keys():
    for guard, given in (
        (Guard((), hosts=(), origins=("https://chat.example",)), {}),
        (Guard(KEYS, hosts=(), origins=("https://chat.example",)), {"x_api_key": KEYS[0]}),
    ):
        assert status(guard, host="localhost:8000", origin="https://evil.example", **given) == 403
        assert status(guard, host="localhost:8000", origin="null", **given) == 403
        assert status(guard, host="localhost:8000", origin="http://localhost:9000", **given) == 403
        assert status(guard, host="localhost:8000", origin="http://localhost:8000", **given) == 200
        assert status(guard, host="localhost:8000", origin="https://chat.example", **given) == 200


@pytest.mark.parametrize("name", [b"host", b"origin", b"authorization", b"x-api-key"])
@pytest.mark.parametrize("keys", [[], KEYS])
def test_what_says_who_asks_is_said_once(keys, name):
    guard = Guard(keys, hosts=(), origins=("*",))
    with pytest.raises(ApiError, match=f"{name.decode()} is given more than once") as caught:
        guard.admit("/health", [(name, b"localhost")] * 2)
    assert caught.value.status == 400


def test_a_page_that_may_ask_reads_why_it_was_refused_and_may_send_any_header():
    page = "https://chat.example"
    with served(keys=KEYS, origins=[page]) as front:
        status, answer, found = front.ask("GET", "/v1/models", headers={"origin": page})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert found["access-control-allow-origin"] == page
        assert "www-authenticate" in found
        asked = {"origin": page, "access-control-request-method": "POST", "access-control-request-headers": "x-stainless-os"}
        status, _, found = front.ask("OPTIONS", "/v1/chat/completions", headers=asked)
        assert (status, found["access-control-allow-headers"]) == (204, "*, authorization")
        status, _, found = front.ask("GET", "/v1/models", headers={"origin": "https://evil.example"})
        assert status == 403
        assert "access-control-allow-origin" not in found


def certificate(folder: Path, *given: str) -> tuple[Path, Path]:
    """A certificate of its own making, and its key."""
    found = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-subj",
        "/CN=localhost",
        "-out",
        found[0],
        "-keyout",
        found[1],
    ]
    subprocess.run([*command, *given], capture_output=True, timeout=60, check=True)
    return found


@needs_openssl
def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(tmp_path):
    cert, key = certificate(tmp_path, "-passout", "pass:secret")
    program = (
        "import sys; from pathlib import Path; from dflash_moe.errors import ConfigError\n"
        "from dflash_moe.server.listening import bind\n"
        "from dflash_moe.server.server_settings import ServerSettings\n"
        "try: ServerSettings(names=['m'], tls_cert=Path(sys.argv[1]), tls_key=Path(sys.argv[2])).check(bind('127.0.0.1', 0))\n"
        "except ConfigError as error: print(error)"
    )
    ours, theirs = pty.openpty()
    # A terminal of its own, as somebody has it who starts a server.
    command = ["setsid", "--ctty", "--wait", sys.executable, "-c", program, str(cert), str(key)]
    found = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    os.close(ours)
    os.close(theirs)
    assert found.stdout.startswith(f"--tls-cert {cert} --tls-key {key}: ")


@needs_openssl
def test_a_handshake_that_does_not_come_is_given_up_like_a_head(tmp_path):
    cert, key = certificate(tmp_path, "-nodes")
    with served(tls_cert=cert, tls_key=key) as front:
        trusting = ssl.create_default_context(cafile=str(cert))
        trusting.check_hostname = False
        with urllib.request.urlopen(front.bound.url(has_tls=True) + "/health", timeout=60, context=trusting) as answer:
            assert answer.status == 200
        with socket.create_connection(("127.0.0.1", front.bound.port), timeout=3 * HEADER_S) as silent:
            assert silent.recv(1) == b""


def test_a_name_of_this_machine_that_it_listens_at_is_one_to_ask_by(monkeypatch):
    found = []

    def noted(_bound: object, settings: ServerSettings) -> None:
        found.append(settings.for_front()["hosts"])
        raise ConfigError("enough")

    monkeypatch.setattr("dflash_moe.server.serving.Server", noted)
    command = ["serve", "--model", "demo", "--port", "0", "--host", "localhost", "--allow-host", "proxy.example"]
    assert run(command) == 2
    assert found == [["localhost", "proxy.example"]]


def test_keys_are_read_from_a_file_of_ones_own(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# clients\n{KEYS[0]}\n\n {KEYS[1]}\n")
    path.chmod(0o600)
    assert read_api_keys(path) == KEYS
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="0640.*chmod 600"):
        read_api_keys(path)


@pytest.mark.parametrize(
    "text", ["", "# none\n", "short\n", "a key with spaces in it\n", "x" * 600, "schlüssel-mit-umlauten\n"]
)
def test_what_is_no_file_of_keys_is_refused_without_quoting_it(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_api_keys(path)
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file.*openssl"):
        read_api_keys(tmp_path / "other")


def test_strangers_need_a_key_and_certificates_come_in_pairs(tmp_path):
    bound = bind("0.0.0.0", 0)
    try:
        with pytest.raises(ConfigError, match="api-key-file"):
            ServerSettings(names=["m"]).check(bound)
        ServerSettings(names=["m"], keys=KEYS).check(bound)
        with pytest.raises(ConfigError, match="belong together"):
            ServerSettings(names=["m"], keys=KEYS, tls_cert=tmp_path / "x").check(bound)
        with pytest.raises(ConfigError, match="PEM"):
            ServerSettings(names=["m"], keys=KEYS, tls_cert=tmp_path / "x", tls_key=tmp_path / "x").check(bound)
    finally:
        bound.sock.close()


def test_a_taken_port_and_a_strange_address_are_said():
    bound = bind("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=f"--port {bound.port}.*another port"):
            bind("127.0.0.1", bound.port)
        with pytest.raises(ConfigError, match="--host"):
            bind("192.0.2.1" if os.getuid() else "no.such.host.invalid", 0)
    finally:
        bound.sock.close()
