"""What a pool needs, before one buys it: reckoned from a model's config and what is asked of it.

::

    from lmpool.plan import Demand, plan, read_model

    llama = read_model("llama/config.json")
    found = plan(Demand(llama, prompt_rate=2000, wants=("top:20",)))
    print(found["maxmemory"].value, found.warnings)

`lmpool.plan.arithmetic` has the arithmetic, `measured` what it takes from benchmarks.
"""

from lmpool.plan.arithmetic import Line, Plan, plan
from lmpool.plan.demand import Demand
from lmpool.plan.model import PlannedModel, read_model

__all__ = ["Demand", "Line", "Plan", "PlannedModel", "plan", "read_model"]
