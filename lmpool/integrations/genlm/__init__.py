"""genlm-control on a pool, by scores and draws where genlm-control itself asks for whole rows.

::

    from genlm.control import BoolFSA
    from lmpool.integrations.genlm import AWRS, PromptedLLM

    llm = PromptedLLM(lm)  # of lmpool.connect or lmpool.embedded
    llm.set_prompt_from_str("The function returns")
    words = BoolFSA.from_regex(" [a-z ]+").coerce(llm, f=b"".join)
    sequences = await AWRS(llm, words).smc(n_particles=8, ess_threshold=0.5, max_tokens=20)

Both stand in for genlm-control's classes of the same names, with the same results. A row at
V=128,256 is 513 kB; a token that `AWRS` draws takes about 100 bytes, a scored token 7.
"""

from __future__ import annotations

try:
    from lmpool.integrations.genlm.awrs import AWRS
    from lmpool.integrations.genlm.prompted_llm import PromptedLLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: lmpool.integrations.genlm needs genlm-control, pip install 'lmpool[genlm]'",
        name=error.name,
    ) from error

__all__ = ["AWRS", "PromptedLLM"]
