"""``lmpool demo --gateway``: a private pool behind HTTP, and how it is asked."""

from __future__ import annotations

from typing import Final

from lmpool.cli.gateway import serve_pool
from lmpool.cli.terminal import escape, lines
from lmpool.producer import embedded

POOL: Final = "tiny"

CURL: Final = """\
curl {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{pool}", "prompt": "Return the number of", "max_tokens": 12, "seed": 1}}'"""

OPENAI: Final = """\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.completions.create(
    model="{pool}", prompt="Return the number of", max_tokens=12, seed=1, logprobs=3
)
print(answer.choices[0].text)
print(answer.choices[0].logprobs.top_logprobs[0])"""


def run_over_http(*, workers: int, engine: str, model: str) -> None:
    """Start, show how to ask, and serve until Ctrl-C or SIGTERM. Leaves nothing behind."""
    console = lines()
    with console.status("starting a server and workers"):
        lm = embedded(model, engine, workers, pool=POOL, framework="numpy")

    def show(url: str) -> None:
        console.print(f"\n[bold]{url}/v1 answers as OpenAI's API does[/], until Ctrl-C")
        console.print(f"[bold]{url}/[/] shows the pool in a browser, and lets you try it")
        console.print("\nFrom a terminal:\n")
        console.print(escape(CURL.format(url=url, pool=POOL)))
        console.print("\nFrom Python, with pip install openai:\n")
        console.print(escape(OPENAI.format(url=url, pool=POOL)))
        console.print(f"\nAll that it can is at {url}/docs")
        console.file.flush()

    with lm:
        serve_pool(lm.url, POOL, show)
