"""Runs the Python blocks of documents, one after another, as a reader would.

``python -m tests.support.run_blocks docs/asking.md --url redis://...``: `EXAMPLE_URL` becomes the
server that is given, and `EXAMPLE_GATEWAYS` the gateway. ``await`` stands outside of functions, as
in a notebook. Names that a page does not make itself are in `given`.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import types
from pathlib import Path
from typing import Any, Final

import lmpool
from tests.support.code_blocks import blocks

EXAMPLE_URL: Final = "redis://localhost:6379/0"
EXAMPLE_POOL: Final = "llama"
EXAMPLE_GATEWAYS: Final = ("http://localhost:8000", "http://gateway:8000")


def given(url: str, gateway: str) -> dict[str, Any]:
    """What pages speak of as there already."""
    lm = lmpool.connect(url, pool=EXAMPLE_POOL)
    ids = lm.encode("The function returns")
    return {
        "__name__": "__main__", "lm": lm, "ids": ids, "url": gateway,
        "sequence": ids, "sequence_ids": ids,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--gateway", default=EXAMPLE_GATEWAYS[0])
    chosen = parser.parse_args()
    for document in chosen.documents:
        run_document(document.resolve(), chosen.url, chosen.gateway)


def run_document(document: Path, url: str, gateway: str) -> None:
    """Run all that it has but tests, and say where each block is."""
    names = given(url, gateway)
    clients = {id(names["lm"]): names["lm"]}
    for block in blocks(document):
        if not block.runs or block.has_tests:
            continue
        text = block.body.replace(EXAMPLE_URL, url)
        for address in EXAMPLE_GATEWAYS:
            text = text.replace(address, gateway)
        print(f"--- {block.place}", flush=True)
        # Lines are those of the document, in a traceback too.
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile("\n" * block.line + text, block.document, "exec", flags)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(_awaited(code, names))
        else:
            exec(code, names)
        clients[id(names["lm"])] = names["lm"]
    for lm in clients.values():
        lm.close()


async def _awaited(code: types.CodeType, names: dict[str, Any]) -> None:
    await types.FunctionType(code, names)()


if __name__ == "__main__":
    main()
