"""lm-evaluation-harness' own command, which knows the model `lmpool`."""

from __future__ import annotations

import runpy

from lmpool.integrations.lm_eval import register

if __name__ == "__main__":
    register()
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
