"""What a server is told beside the engine's arguments: addresses, keys, limits, deadlines."""

from dataclasses import dataclass
from typing import Literal

from seawall.core.params import LogprobsMode

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of `seawall serve`.

    Attributes:
        served_model_name: what /v1/models says; None for the model's path.
        api_key: what clients must send as `Authorization: Bearer`; None lets everybody in.
        admin_api_key: the same for routes that change the engine. Without it they are served on
            a loopback address only.
        cors_origins: web pages of these origins may call; none by default.
        max_body_bytes: of one request; `bodies_bytes` of all that are being read.
        max_header_bytes: of one request line and its headers.
        header_seconds, body_seconds: how long a client may take to send them.
        write_seconds: how long a client may take to read what waits for it.
        drain_seconds: open requests may go on for so long after SIGTERM.
        hang_seconds: an engine process that owes an answer and is silent is killed after these.
        results_bytes: host memory of logprobs on their way to clients.
        max_logprobs: most alternatives a position on /v1/*.
        logprobs_mode: scale of output logprobs on /v1/*.
        incremental_streaming_output: streams of /generate carry what is new instead of all.
        use_generation_config: /v1/* takes sampling defaults from the model's folder.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    bodies_bytes: int = 256 << 20
    max_header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    drain_seconds: float = 25.0
    hang_seconds: float = 120.0
    results_bytes: int = 1 << 30
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw"
    incremental_streaming_output: bool = False
    use_generation_config: bool = True
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in _LOOPBACK
