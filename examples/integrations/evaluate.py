"""lm-evaluation-harness on a pool: a task of multiple choice, read from a file that this writes.

    python examples/integrations/evaluate.py                       # a private pool, the tiny model
    python examples/integrations/evaluate.py --url redis://server:6379/0 --pool llama

Needs ``pip install 'lmpool[lm-eval]'``. Tasks of the harness's own are evaluated the same way, by
their names: ``tasks=["hellaswag"]``, or on the command line ``python -m
lmpool.integrations.lm_eval run --model lmpool --tasks hellaswag``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import lmpool
from lmpool.integrations.lm_eval import LmpoolLM

QUESTIONS = [
    {"question": "If the file does not", "choices": ["exist", "walk"], "answer": 0},
    {"question": "Return the number of", "choices": ["blue", "bytes"], "answer": 1},
    {"question": "This function returns a", "choices": ["tuple", "eat"], "answer": 0},
]
TASK = """
task: sentences
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def main() -> None:
    """Evaluate what the command line says."""
    parser = argparse.ArgumentParser(description="lm-evaluation-harness on a pool.")
    parser.add_argument("--url", help="of a pool's server; without one a private pool is started")
    parser.add_argument("--pool")
    given = parser.parse_args()
    lm = lmpool.connect(given.url, given.pool) if given.url else lmpool.embedded("tiny", "hf")
    with lm, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentences.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), "utf-8")
        (Path(folder) / "sentences.yaml").write_text(TASK.format(file=file), "utf-8")
        results = lm_eval.simple_evaluate(
            model=LmpoolLM(lm),
            tasks=["sentences"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
        )
    print(f"accuracy {results['results']['sentences']['acc,none']:.2f}")


if __name__ == "__main__":
    main()
