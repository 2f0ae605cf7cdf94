"""Settings of a server, and what it says of the model it serves. Plain data, checked."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ds4jax import config
from ds4jax.plan import Executor
from ds4jax.scheduler import SchedulerConfig
from ds4jax.tokenizer import Tokenizer

MAX_CANDIDATES = 8
RECEIVE_BYTES = 16 << 20
SEND_BYTES = 4 << 20
SPARE_STREAMS = 16
"""Streams beyond lanes + queue, so that health checks and refusals get through."""
PROBE_STREAMS = 64
"""Streams of health and reflection at the same time, beyond all others."""
FIRST_MESSAGE_SECONDS = 30.0
"""A call whose request does not come within this time is ended: it holds a stream."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how to serve. Times in seconds.

    Raises:
        ConfigError: listing every value that cannot work.
    """

    host: str = "127.0.0.1"
    port: int | None = 50051  # 0: any free one; None: no TCP port
    unix: str | None = None  # path of a socket
    admin: str | None = None  # HOST:PORT or unix:PATH of the admin service; None: off
    metrics_port: int | None = None  # None: off
    metrics_host: str = "127.0.0.1"
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None  # mutual TLS
    auth_token_file: str | None = None
    grace: float = 30.0
    default_max_tokens: int | None = None  # cap of answers that name no budget
    log_prompts: bool = False
    log_format: str = "text"  # or "json"
    stream_events: int = 256
    stream_bytes: int = 256 * 1024
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    shown: tuple[tuple[str, str], ...] = ()  # effective flags, for GetStatus and reports

    def __post_init__(self) -> None:
        problems = []
        if self.port is None and self.unix is None:
            problems.append("neither a port nor a unix socket is given: set one of them")
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                problems.append(f"{name} is {value}, must be in 0..65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            problems.append("tls_cert and tls_key go together: give both or neither")
        if self.admin is not None and not _is_address(self.admin):
            problems.append(f"admin is {self.admin!r}, must be HOST:PORT or unix:PATH")
        if self.unix == "":
            problems.append("unix is empty, must be a path")
        if self.tls_client_ca and not self.tls_cert:
            problems.append("tls_client_ca needs tls_cert and tls_key")
        missing = []
        for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                missing.append(f"{name}: no file {path}")
        problems += missing or self._tls_problems()
        if self.grace < 0:
            problems.append(f"grace is {self.grace}, must be at least 0 seconds")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            problems.append(f"default_max_tokens is {self.default_max_tokens}, must be at least 1")
        if self.log_format not in ("text", "json"):
            problems.append(f"log_format is {self.log_format!r}, must be 'text' or 'json'")
        if problems:
            raise config.ConfigError("server", problems)

    def _tls_problems(self) -> list[str]:
        """What is wrong with the files: the library below would only say that it cannot bind."""
        out = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.tls_cert is not None and self.tls_key is not None:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: b"")
            except (ssl.SSLError, OSError) as error:
                out.append(
                    f"tls_cert, tls_key: {self.tls_cert} and {self.tls_key} are no certificate and"
                    f" its key, not encrypted, in PEM form ({_ssl_reason(error)})"
                )
        if self.tls_client_ca is not None:
            try:
                context.load_verify_locations(self.tls_client_ca)
            except (ssl.SSLError, OSError) as error:
                out.append(
                    f"tls_client_ca: {self.tls_client_ca} holds no certificates in PEM form"
                    f" ({_ssl_reason(error)})"
                )
        return out

    @property
    def exposed(self) -> bool:
        """Whether the port can be reached from other machines."""
        return self.port is not None and _is_exposed(self.host)

    def warnings(self) -> list[str]:
        """What is allowed and nevertheless dangerous."""
        out = []
        text = "can be reached from other machines and is not encrypted"
        if self.exposed and not self.tls_cert:
            out.append(f"{self.host} {text}: set --tls-cert and --tls-key, or bind to 127.0.0.1")
        admin = self.admin or "unix:"
        if not admin.startswith("unix:") and _is_exposed(admin.rpartition(":")[0]):
            out.append(f"the admin service on {admin} {text}: bind it to 127.0.0.1 or unix:PATH")
        return out

    def token(self) -> str | None:
        """The bearer token, read from its file.

        Raises:
            ConfigError: the file is empty or not ASCII.
        """
        if self.auth_token_file is None:
            return None
        text = Path(self.auth_token_file).read_text(encoding="utf-8").strip()
        if not text or not text.isascii() or not text.isprintable():
            raise config.ConfigError(
                "server",
                [f"auth_token_file: {self.auth_token_file} holds no printable ASCII token"],
            )
        return text


def host_port(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _ssl_reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def _is_address(text: str) -> bool:
    """Whether a text is HOST:PORT or unix:PATH."""
    host, _, port = text.rpartition(":")
    if host == "unix" or text.startswith("unix:"):
        return len(text) > len("unix:")
    return bool(host) and port.isascii() and port.isdecimal() and int(port) <= 65535


def _is_exposed(host: str) -> bool:
    """Whether an address to bind is one of this machine's to others."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """The model behind the service; `tokenizer` None: ids only."""

    id: str
    display_name: str
    vocab_size: int
    tokenizer: Tokenizer | None = None
    chat_profile: str = "v4-0731"
    numerics: str = "plain"
    dtype: str = "float32"
    quantisation: str = ""
    digest: str = ""
    fingerprint: str = ""
    experts_per_token: int = 0
    approximate: bool = False
    unqualified: bool = False
    has_drafter: bool = False
    platform: str = "cpu"
    settings: tuple[tuple[str, str], ...] = ()  # what the run came to, for GetStatus and reports

    @property
    def name(self) -> str:
        """Resource name."""
        return f"models/{self.id}"

    @property
    def numerics_label(self) -> str:
        """Numerics profile, with every deviation from the model named."""
        return self.numerics + (" approximate" if self.approximate else "")


Report = Callable[[str, float], None]
"""Progress of loading: what is being done, and how much of it (0 to 1)."""

Loader = Callable[[Report], tuple[Executor, ServedModel]]
"""Makes the executor, in the engine thread, every program compiled."""
