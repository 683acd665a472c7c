"""A pool of the SGLang engine, beside one of transformers."""

from __future__ import annotations

import pytest

from tests.support.engines import check_engines

pytest.importorskip("sglang")

pytestmark = [pytest.mark.engine]


@pytest.mark.usefixtures("server_binary")
def test_it_answers_as_one_of_transformers() -> None:
    check_engines("sglang")
