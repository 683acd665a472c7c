"""The policy of lanes in pools of many workers, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmpool.affinity import Placement
from tests.simulation.depth import LONGEST, Making, placed, skew
from tests.simulation.drawing import Panel, draw
from tests.simulation.pool import BATCH, OWN, PREFIX, TOKEN_SECONDS, Load, Pool, moved

USUAL = Load(workers=20, utilization=0.3, jobs=4000, groups=160, kept=16)


def test_while_there_is_little_to_do_prompts_meet_their_home() -> None:
    found = Pool(USUAL).run()
    assert sum(found.jobs) == USUAL.jobs
    assert found.stolen_share < 0.05
    assert found.tokens_each < 3 * OWN
    # Without lanes each worker computes nearly every prefix, as it keeps few of them.
    alone = Pool(replace(USUAL, affinity=False, utilization=0.1)).run()
    assert alone.tokens_each > 0.7 * (PREFIX + OWN)


def test_one_lane_with_all_the_work_keeps_nobody_idle() -> None:
    skewed = replace(USUAL, groups=1, utilization=5.0, jobs=40_000)
    found = Pool(skewed).run()
    assert min(found.busy) > 0.8 * max(found.busy)
    even = Pool(replace(skewed, affinity=False)).run()
    assert found.ended < 1.05 * even.ended


def test_a_worker_of_double_speed_does_twice_the_work() -> None:
    found = Pool(replace(USUAL, workers=2, groups=32, utilization=3.0, speeds=(2.0, 1.0))).run()
    assert 0.6 <= found.jobs[0] / sum(found.jobs) <= 0.72


def test_nobody_waits_much_longer_than_computing_elsewhere_takes() -> None:
    found = Pool(replace(USUAL, utilization=0.5)).run()
    patience = (PREFIX + OWN) * TOKEN_SECONDS
    batch = BATCH * patience + 0.01
    assert np.quantile(found.waits, 0.99) < patience + batch


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("workers", [10, 100, 1000])
def test_joins_and_deaths_move_a_share_of_lanes(workers: int, join: bool) -> None:
    share = moved(workers, 16_384, join=join) * (workers + 1)
    assert 0.3 < share < 2.0


def test_curves_are_drawn() -> None:
    drawing = draw([Panel("title", "jobs", (0.1, 0.9), {"a": (0.0, 2.0), "b": (1.0, 1.0)}, 2.0)])
    assert drawing.startswith("<svg ")
    assert drawing.count("<polyline") == 2
    assert ">title<" in drawing


def test_a_template_before_all_prompts_makes_no_lane_of_them() -> None:
    chats = Making(1).chats(LONGEST)
    tokens, share = placed(chats, Placement(1, 1024))
    assert tokens < 1.1
    assert share < 0.1
    # It is longer than four blocks.
    tokens, share = placed(chats, Placement(1, 1024, blocks=4))
    assert tokens > 2
    assert share == 1.0


def test_prompts_that_grow_are_computed_anew_a_few_times_and_not_at_every_block() -> None:
    tokens, share = placed(Making(1).growing(), Placement(1, 1024))
    assert tokens < 1.7
    assert share < 0.1


def test_lanes_for_what_follows_a_common_prefix_bring_no_more_rows() -> None:
    thieves, deep = (skew(10, 2.0, deep=deep) for deep in (False, True))
    assert thieves.ended < 1.04 * deep.ended
    assert thieves.tokens_each < 1.1 * deep.tokens_each
