"""A plan for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lmpool.plan.arithmetic import Plan


def as_dict(found: Plan) -> dict[str, Any]:
    """A plan as JSON takes it."""
    model, demand = found.demand.model, found.demand
    return {
        "model": {
            "name": model.name,
            "vocab_size": model.vocab_size,
            "dtype": model.dtype,
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
        },
        "gpus": demand.gpus,
        "engine": demand.engine,
        "prompt_rate": demand.prompt_rate,
        "prompt_tokens": demand.prompt_tokens,
        "ttl": demand.ttl,
        "distinct": demand.distinct,
        "clients": demand.clients,
        "encoding": demand.encoding or model.encoding,
        "wants": [
            {"want": w.text, "share": w.share, "bytes": w.stored, "footprint": w.footprint}
            for w in found.wants
        ],
        "values": {line.name: line.value for line in found.lines},
        "lines": [asdict(line) for line in found.lines],
        "warnings": list(found.warnings),
        "unknown": list(found.unknown),
    }
