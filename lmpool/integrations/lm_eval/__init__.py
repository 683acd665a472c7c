"""lm-evaluation-harness on a pool: the model `lmpool`, with the numbers of its own `hf`.

::

    python -m lmpool.integrations.lm_eval run --model lmpool \\
        --model_args url=redis://server:6379/0,pool=llama --tasks hellaswag

or, from Python::

    from lmpool.integrations.lm_eval import LmpoolLM
    results = lm_eval.simple_evaluate(model=LmpoolLM(lm), tasks=["hellaswag"])

A release of lm-evaluation-harness that reads the entry points `lm_eval.models` knows the name
`lmpool` by itself; 0.4.13 learns it from `register`, which the launcher calls.
"""

from __future__ import annotations

from lmpool.checks import check_working_directory

try:
    from lmpool.integrations.lm_eval.model import LmpoolLM, register
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: lmpool.integrations.lm_eval needs lm-evaluation-harness, "
        "pip install 'lmpool[lm-eval]'",
        name=error.name,
    ) from error
except FileNotFoundError:
    check_working_directory()  # libraries look for it as they load
    raise

__all__ = ["LmpoolLM", "register"]
