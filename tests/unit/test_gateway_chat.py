"""What a chat's messages are for its template."""

from __future__ import annotations

from typing import Any

import pytest

from lmpool.gateway.chat import Message, _plain

CALLS = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"content": "hi"}, {"content": "hi"}),
        ({"content": None}, {}),
        ({"content": None, "refusal": None, "tool_calls": None}, {}),
        ({"content": "hi", "tool_calls": None}, {"content": "hi"}),
        # Templates ask whether it is none, and take what is not there to be there.
        ({"content": None, "tool_calls": CALLS}, {"content": None, "tool_calls": CALLS}),
        ({"tool_calls": CALLS}, {"tool_calls": CALLS}),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"content": "ab"},
        ),
    ],
)
def test_what_is_null_is_not_there_but_content_that_something_else_stands_for(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    message = Message.model_validate({"role": "assistant", **given})
    assert _plain(message) == {"role": "assistant", **found}
