"""The HTTP door: pools behind an OpenAI-compatible API. ``lmpool gateway`` serves it.

`app.py` puts it together. A request comes through `door.py` (keys, limits, hang-ups) and is read by
a route (`completions.py`, `chat.py`, `tokens.py`, `models.py`, `health.py`, `binary.py`,
`inference.py`), which asks a pool of `pools.py` through `state.py` (room, deadlines, errors). What
was drawn becomes text in `drawing.py`, and its log-probabilities JSON in `prompt_logprobs_json.py`.
It needs the extra ``gateway``, and no torch.
"""
