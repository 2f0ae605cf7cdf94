"""The server as a process: signals, kills, sockets, TLS, tokens, and clients that stay silent."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ds4jax_server.app import channel_options
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.pb import generation_pb2_grpc as pb_grpc
from ds4jax_server.settings import ServerConfig, host_port

from ds4jax.client import Client, RequestFailed
from ds4jax.config import ConfigError, StoppingCriteria
from tests.serve_tools import Silence, failure, fake, serving, until

ROOT = Path(__file__).parents[1]
SHORT = StoppingCriteria(max_output_tokens=5)
ENDLESS = StoppingCriteria(ignore_eos=True)


class Process:
    """A server process; the port is known once it is bound."""

    def __init__(self, config: dict[str, Any], executor: dict[str, Any] | None = None) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
        command = [
            sys.executable, "-m", "tests.fake_server", json.dumps(config),
            json.dumps(executor or {}),
        ]  # fmt: skip
        self.popen = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().strip()
        if not line:
            raise OSError(self.popen.communicate()[1][-2000:])
        self.address = f"127.0.0.1:{line}" if line != "None" else f"unix:{config['unix']}"

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self, timeout: float = 20.0) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, err


@pytest.fixture
def start() -> Iterator[Any]:
    made: list[Process] = []

    def begin(*args: Any) -> Process:
        made.append(Process(*args))
        return made[-1]

    yield begin
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.communicate()


def wait_ready(client: Client) -> None:
    until(client.healthy, 15)


# ---- signals -----------------------------------------------------------------------------------


def test_sigterm_drains_and_a_second_one_stops(start: Any) -> None:
    drains = start({"port": 0, "grace": 20.0}, {"step_seconds": 0.01})
    stops = start({"port": 0, "grace": 600.0}, {"step_seconds": 0.01})
    with Client(drains.address, retries=0) as a, Client(stops.address, retries=0) as b:
        wait_ready(a)
        wait_ready(b)
        finishing = a.stream(prompt="x", stopping=StoppingCriteria(max_output_tokens=120))
        hanging = b.stream(prompt="x", stopping=ENDLESS)
        next(finishing), next(hanging)
        drains.signal(signal.SIGTERM)
        stops.signal(signal.SIGTERM)
        for client in (a, b):
            until(lambda client=client: not client.healthy())
            with pytest.raises(RequestFailed) as caught:
                client.generate(prompt="x", stopping=SHORT)
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "DRAINING")
        assert list(finishing)[-1].finish_reason == "length"  # type: ignore[union-attr]
        assert drains.end()[0] == 0
        next(hanging)
        assert stops.popen.poll() is None
        stops.signal(signal.SIGTERM)
        with pytest.raises(RequestFailed) as caught:
            list(hanging)
        assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "SHUTTING_DOWN")
        assert stops.end(10.0)[0] == 0


def test_sigterm_ends_a_server_that_hangs_before_it_is_ready(start: Any) -> None:
    process = start({"port": 0}, {"step_seconds": 600.0})  # in the first step of all
    with Client(process.address, retries=0) as client:
        with pytest.raises(RequestFailed) as caught:
            client.generate(prompt="x", stopping=SHORT)
        assert caught.value.reason == "MODEL_LOADING"
    process.signal(signal.SIGTERM)
    assert process.end(15.0)[0] == 0


def test_killed_and_started_again_on_the_same_addresses(start: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    first = start({"port": 0, "unix": path})
    port = int(first.address.rpartition(":")[2])
    with Client(f"unix:{path}", retries=0) as client:
        wait_ready(client)
        expected = client.generate(prompt="x", token_ids=True, stopping=SHORT, sampling=_seed(1))
        stream = client.stream(prompt="x", stopping=ENDLESS)
        next(stream)
        first.signal(signal.SIGKILL)
        with pytest.raises(RequestFailed) as caught:
            list(stream)
        assert caught.value.code == "UNAVAILABLE"
    first.end()
    assert Path(path).exists()  # nobody could clean up
    second = start({"port": port, "unix": path})
    for address in (f"unix:{path}", second.address):
        with Client(address) as client:
            wait_ready(client)
            again = client.generate(prompt="x", token_ids=True, stopping=SHORT, sampling=_seed(1))
            assert again.token_ids == expected.token_ids
    with pytest.raises(OSError, match="another server listens"):
        start({"port": None, "unix": path})
    with pytest.raises(OSError, match="cannot bind"):
        start({"port": port})


def _seed(seed: int) -> Any:
    from ds4jax.config import SamplingParams

    return SamplingParams(seed=seed)


def test_a_file_in_the_way_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="no socket"), serving(port=None, unix=str(path)):
        pass
    assert path.read_text() == "data"


# ---- TLS and tokens ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, server, client and stranger (of another authority): .pem and .key each."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder = tmp_path_factory.mktemp("pki")
    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, issuer: tuple[Any, Any] | None) -> tuple[Any, Any]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alt = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer[0].subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(alt), critical=False)
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), True)
            .sign(issuer[1] if issuer else key, hashes.SHA256())
        )
        (folder / f"{name}.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )  # fmt: skip
        return built, key

    authority = make("ca", None)
    make("server", authority)
    make("client", authority)
    make("stranger", make("other", None))
    (folder / "token").write_text("s3cret-token\n")
    return folder


def files(pki: Path, name: str) -> dict[str, str]:
    return {"cert": str(pki / f"{name}.pem"), "key": str(pki / f"{name}.key")}


def test_tls_and_mutual_tls(pki: Path) -> None:
    tls = {"tls_cert": str(pki / "server.pem"), "tls_key": str(pki / "server.key")}
    ca = str(pki / "ca.pem")
    with serving(**tls) as s:
        with Client(s.address, ca=ca) as client:
            assert client.generate(prompt="x", stopping=SHORT).text
        for wrong in ({}, {"ca": str(pki / "other.pem")}):
            with Client(s.address, retries=0, timeout=5, **wrong) as client:
                with pytest.raises(RequestFailed) as caught:
                    client.generate(prompt="x")
                assert caught.value.code == "UNAVAILABLE"
    with serving(**tls, tls_client_ca=ca) as s:
        with Client(s.address, ca=ca, **files(pki, "client")) as client:
            assert client.generate(prompt="x", stopping=SHORT).text
        for wrong in ({}, files(pki, "stranger")):
            with Client(s.address, ca=ca, retries=0, timeout=5, **wrong) as client:
                with pytest.raises(RequestFailed) as caught:
                    client.generate(prompt="x")
                assert caught.value.code == "UNAVAILABLE"


def test_files_that_are_no_certificates_are_named(pki: Path) -> None:
    ca = str(pki / "ca.pem")
    good = {"tls_cert": str(pki / "server.pem"), "tls_key": str(pki / "server.key")}
    assert not ServerConfig(**good, tls_client_ca=ca, host="0.0.0.0").warnings()
    for wrong, says in (
        ({"tls_key": ca}, r"ca\.pem are no certificate and its key"),
        ({"tls_cert": good["tls_key"]}, "no certificate"),
        ({"tls_key": str(pki / "client.key")}, "KEY_VALUES_MISMATCH"),
        ({"tls_client_ca": good["tls_key"]}, "holds no certificates"),
    ):
        with pytest.raises(ConfigError, match=says):
            ServerConfig(**{**good, "tls_client_ca": ca, **wrong})


def test_an_encrypted_key_is_refused_without_asking(pki: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_pem_private_key((pki / "server.key").read_bytes(), None)
    secret = form.BestAvailableEncryption(b"x")
    data = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, secret)
    (pki / "locked.key").write_bytes(data)
    with pytest.raises(ConfigError, match="not encrypted"):
        ServerConfig(tls_cert=str(pki / "server.pem"), tls_key=str(pki / "locked.key"))


def test_the_bearer_token(pki: Path) -> None:
    with serving(auth_token_file=str(pki / "token"), admin="127.0.0.1:0") as s:
        with Client(s.address, token="s3cret-token") as client:
            assert client.generate(prompt="x", stopping=SHORT).text
            assert client.model().id if hasattr(client.model(), "id") else client.model().name
        for token, reason in ((None, "TOKEN_REQUIRED"), ("wrong", "INVALID_TOKEN")):
            with Client(s.address, token=token, retries=0) as client:
                for call in (
                    lambda c=client: c.generate(prompt="x"), lambda c=client: c.tokenize("x"),
                ):  # fmt: skip
                    with pytest.raises(RequestFailed) as caught:
                        call()
                    assert (caught.value.code, caught.value.reason) == ("UNAUTHENTICATED", reason)
                assert client.healthy()  # health checks need no token
        with grpc.insecure_channel(f"127.0.0.1:{s.server.admin_port}") as channel:
            admin = pb_grpc.AdminServiceStub(channel)
            assert failure(lambda: admin.Drain(pb.DrainRequest()))["code"] == "UNAUTHENTICATED"
        call = s.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=None, response_deserializer=None,
        )  # fmt: skip
        assert failure(lambda: list(call(iter([b""]))))["code"] == "UNAUTHENTICATED"


def test_a_unix_socket_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "only")
    with serving(port=None, unix=path) as s:
        assert s.server.port is None
        with Client(f"unix:{path}") as client:
            assert client.generate(prompt="x", stopping=SHORT).text


def test_why_an_address_cannot_be_bound_is_told(tmp_path: Path) -> None:
    for where, says in (
        ({"unix": f"{tmp_path}/none/socket"}, "No such file"),
        ({"unix": f"{tmp_path}/{'x' * 200}"}, "path too long"),
        ({"host": "192.0.2.1"}, "Cannot assign"), ({"host": "host.invalid"}, r"(?!is it)\w+"),
        ({"admin": "192.0.2.1:0"}, "Cannot assign"),
    ):  # fmt: skip
        with pytest.raises(OSError, match=f"cannot bind .*{says}"), serving(**where):
            pass


def test_addresses_of_both_families(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ds4jax.server")
    assert host_port("::", 5) == host_port("[::]", 5) == "[::]:5"
    cases = [("127.0.0.1", "127.0.0.1")]
    if _has_ipv6():
        cases += [("::1", "[::1]"), ("[::1]", "[::1]")]
    for host, shown in cases:
        caplog.clear()
        with serving(host=host, metrics_host=host, metrics_port=0, admin=f"{host}:0") as s:
            with Client(f"{shown}:{s.server.port}") as client:
                assert client.generate(prompt="x", stopping=SHORT).text
            assert f"admin on {shown}:{s.server.admin_port}" in caplog.text
            assert f"metrics on http://{shown}:{s.server.metrics_port}/" in caplog.text


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_an_open_port_without_tls_warns(caplog: pytest.LogCaptureFixture) -> None:
    with serving(host="0.0.0.0"):
        assert "not encrypted" in caplog.text
    assert not ServerConfig(host="127.0.0.5").exposed and not ServerConfig(host="::1").exposed
    assert ServerConfig(host="::").exposed and ServerConfig(host="example.org").exposed


def test_settings_that_cannot_work_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(
            port=None, tls_cert="/nowhere.pem", tls_client_ca="/nowhere.ca", grace=-1,
            default_max_tokens=0, log_format="xml", metrics_port=1 << 20,
        )  # fmt: skip
    assert len(caught.value.problems) == 8
    for wrong in ("foo", "unix:", ":5", "127.0.0.1:99999", "127.0.0.1:http", "127.0.0.1:"):
        with pytest.raises(ConfigError, match="admin is"):
            ServerConfig(admin=wrong)
    with pytest.raises(ConfigError, match="unix is empty"):
        ServerConfig(unix="")
    empty = tmp_path / "token"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="token"):
        ServerConfig(auth_token_file=str(empty)).token()


def test_the_log_line_has_no_prompt_unless_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ds4jax.request")
    for log_prompts, log_format in ((False, "text"), (False, "json"), (True, "json")):
        caplog.clear()
        with serving(log_prompts=log_prompts, log_format=log_format) as s:
            s.generate(text="my secret", stopping=pb.StoppingCriteria(max_output_tokens=3))
            failure(lambda s=s: s.generate(text="my secret", candidate_count=9))
            until(lambda: len(caplog.records) == 2)
        lines = [r.getMessage() for r in caplog.records]
        assert any("my secret" in line for line in lines) == log_prompts
        if log_format == "text":
            fields = dict(x.split("=") for x in lines[0].split())
            assert fields["request_id"].startswith("req-") and fields["code"] == "OK"
            assert (fields["prompt_tokens"], fields["cached_tokens"]) == ("10", "0")
            assert (fields["output_tokens"], fields["finish"]) == ("3", "length")
            assert float(fields["ttft_s"]) > 0 and float(fields["tok_s"]) > 0
        if log_format == "json":
            first, second = (json.loads(line) for line in lines)
            assert (first["code"], first["finish"], first["output_tokens"]) == ("OK", "length", 3)
            assert first["ttft_s"] > 0 and second["code"] == "INVALID_ARGUMENT"
            assert second["reason"] == "INVALID_REQUEST"


# ---- the silent minute and the deaf client, side by side ----------------------------------------


def test_option_names_are_the_ones_grpc_knows() -> None:
    """A misspelt option is ignored without a word, so their names are compared with the library."""
    library = Path(grpc.__file__).parent / "_cython"
    binary = next(library.glob("cygrpc*.so")).read_bytes()
    for name, _ in channel_options(8):
        assert name.encode() + b"\0" in binary, name


@pytest.fixture(scope="module", autouse=True)
def silence() -> Iterator[Silence]:
    """Runs beside the other tests, so that its minute costs little."""
    client = Silence.shared()
    yield client
    client.close()


def test_ten_deaf_seconds_change_nothing_for_others() -> None:
    executor = fake(max_ctx=8192, num_pages=400, step_seconds=0.004)
    options = [("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0)]
    with serving(executor, stream_events=64) as s, Client(s.address) as client:
        work = {"prompt": "x", "token_ids": True, "sampling": _seed(1)}

        def five() -> tuple[list[Any], float]:
            out: list[Any] = [None] * 5

            def one(n: int) -> None:
                stopping = StoppingCriteria(max_output_tokens=300 + n, ignore_eos=True)
                out[n] = client.generate(**work, stopping=stopping).token_ids

            threads = [threading.Thread(target=one, args=(n,)) for n in range(5)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return out, time.monotonic() - began

        alone, _ = five()
        with grpc.insecure_channel(s.address, options=options) as channel:
            request = pb.GenerateRequest(text="y", output=pb.OutputOptions(top_logprobs=20))
            request.stopping.ignore_eos = True
            deaf = pb_grpc.GenerationServiceStub(channel).Generate(request)
            end = time.monotonic() + 10
            until(lambda: s.scheduler.counters.suspensions >= 1)
            while time.monotonic() < end:
                assert five()[0] == alone
            assert s.scheduler.counters.slow_clients == 0  # within the grace of 30 s
            deaf.cancel()
        until(lambda: s.scheduler.active == 0)


def test_a_silent_minute_with_pings_is_not_cut_off(silence: Silence) -> None:
    silence.join()
    assert silence.error is None and silence.tokens == 2
    assert silence.gap > 59


def test_the_port_is_free_after_the_end() -> None:
    with serving() as s:
        port = s.server.port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
