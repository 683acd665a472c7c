"""inspect_ai on a pool: an evaluation whose scorer reads how sure the model was.

    python examples/integrations/inspect_task.py                   # a private pool, the tiny model
    python examples/integrations/inspect_task.py --url redis://server:6379/0 --pool llama

Needs ``pip install 'lmpool[inspect-ai]'``. The same from a terminal, of any task:
``LMPOOL_URL=... inspect eval task.py --model lmpool/llama --logprobs true``.
"""

from __future__ import annotations

import argparse
import math
import tempfile

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState, generate

import lmpool

STARTS = ["If the file does not", "Return the number of", "The class is used to"]


@scorer(metrics=[mean()])
def sureness() -> Scorer:
    """The probability of an answer's first token."""

    async def score(state: TaskState, target: Target) -> Score:
        logprobs = state.output.choices[0].logprobs
        assert logprobs is not None
        return Score(value=math.exp(logprobs.content[0].logprob), answer=state.output.completion)

    return score


def main() -> None:
    """Evaluate what the command line says."""
    parser = argparse.ArgumentParser(description="inspect_ai on a pool.")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    task = inspect_ai.Task(
        dataset=[Sample(text) for text in STARTS], solver=generate(), scorer=sureness()
    )
    with lm, tempfile.TemporaryDirectory() as logs:
        # raw: the tiny model has no chat template.
        model = get_model(f"lmpool/{lm.pool}", base_url=lm.url, raw=True)
        (log,) = inspect_ai.eval(
            task, model=model, max_tokens=4, temperature=0, logprobs=True, log_dir=logs,
            display="none",
        )  # fmt: skip
        model.api.close()
        for sample in log.samples or []:
            (found,) = (sample.scores or {}).values()
            print(f"{found.value:6.1%}  {sample.input}{found.answer}")


if __name__ == "__main__":
    main()
