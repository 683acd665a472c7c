"""What a gateway is told: its pools, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmpool.settings import GatewaySettings

Compress = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """A pool behind the gateway: the name under which models are asked, and where it is."""

    name: str
    url: str | None = None


_USUAL: Any = {name: field.default for name, field in GatewaySettings.model_fields.items()}


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """A gateway's pools and bounds. Times are in seconds; None is no bound, or nothing."""

    pools: tuple[PoolAddress, ...]
    url: str | None = None
    """The server of pools that name none."""
    api_keys: Path | None = None
    chat_template: Path | None = None
    queue_timeout: float = _USUAL["queue_timeout"]
    """How long a request may wait for room, workers, or a server."""
    request_timeout: float = _USUAL["timeout"]
    """How long all of a request may take."""
    body_timeout: float = _USUAL["body_timeout"]
    """How long a request's head, and then its body, may take to arrive."""
    max_body_bytes: int = _USUAL["max_body"]
    max_response_bytes: int = _USUAL["max_response"]
    max_prompts: int = _USUAL["max_prompts"]
    """Of one request, times `n`."""
    max_n: int = _USUAL["max_n"]
    max_logprobs: int = _USUAL["max_logprobs"]
    """Of the likeliest tokens at a position."""
    max_in_flight: int = _USUAL["max_in_flight"]
    """Prompts that are asked of pools at once; the others wait."""
    max_requests: int = 4096
    """Requests that are held at once; further ones are refused."""
    key_requests: int | None = None
    """Requests at once of a key whose line in the file says nothing else."""
    compress: Compress = _USUAL["compress"]
    cache_bytes: int = 64 << 20
    """Of each pool's client, for answers that were asked before."""
