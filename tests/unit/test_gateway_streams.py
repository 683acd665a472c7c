"""Streams whose readers take their time: what they hold meanwhile, and what they do not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmpool.gateway.binary import HELD_BYTES, _Call
from lmpool.gateway.calls import Prompt
from lmpool.gateway.completions import CompletionRequest, _Completions
from lmpool.gateway.drawing import drawn_together, parts
from lmpool.gateway.errors import ApiError
from lmpool.gateway.options import GatewayOptions, PoolAddress
from lmpool.gateway.sampling import Drawing
from lmpool.gateway.state import Gateway
from lmpool.gateway.text_stops import StopTexts
from lmpool.gateway.unread import UNREAD_BYTES, Unread
from lmpool.gateway.words import Words
from lmpool.producer import Piece
from lmpool.producer.deadline import Deadline
from lmpool.wants import Row

BYTES = Words([bytes([i]) for i in range(256)], 256)
TURNS = 10_000
"""Of the event loop, within which what can happen has happened."""


class Model:
    """A pool's, which draws a text a byte at a time, and says which of its streams are over."""

    def __init__(self, text: bytes, turns: int = 1) -> None:
        self.words, self.lora_name, self.lm, self.name = BYTES, None, self, "m"
        self.running = self.most = 0
        self.drawn = 0
        self._text = text
        self._turns = turns

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Piece]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for at, byte in enumerate(self._text):
                for _turn in range(self._turns):
                    await asyncio.sleep(0)
                self.drawn += 1
                last = "length" if at == len(self._text) - 1 else None
                yield Piece(at, np.array([byte], np.int32), finish_reason=last)  # type: ignore[arg-type]
        finally:
            self.running -= 1


def a_gateway(**options: Any) -> Gateway:
    return Gateway(GatewayOptions((PoolAddress("pool"),), **options))


def drawing(stops: tuple[str, ...] = ()) -> Drawing:
    return Drawing(
        max_tokens=4000, room=5000, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1,
        eos_token_ids=(), stop_token_ids=frozenset(), stops=StopTexts(stops) if stops else None,
        hints=(), include_stop=False, skip_special=True, logprobs=False, top_logprobs=0,
    )  # fmt: skip


def streams(gateway: Gateway, model: Any, count: int = 1, **more: Any) -> Any:
    drawn = drawing(**more)
    each = [parts(gateway, model, [1], drawn, Deadline(None)) for _ in range(count)]
    return aclosing(drawn_together(gateway, each))


class Rows(Model):
    """Answers so many asks at once, an answer a turn."""

    info = SimpleNamespace(max_prompt_tokens=100)

    def __init__(self) -> None:
        super().__init__(b"")
        self.asked = 0

    async def ask_iter(
        self, asks: Iterator[Any], in_flight: int, **_: Any
    ) -> AsyncGenerator[tuple[int, Any]]:
        under_way: deque[int] = deque()
        number = 0
        while True:
            for _ask in islice(asks, in_flight - len(under_way)):
                under_way.append(number)
                number += 1
                self.asked += 1
            if not under_way:
                return
            await asyncio.sleep(0)
            yield under_way.popleft(), np.zeros(3, np.float32)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to that")


@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_who_takes_nothing_more_holds_no_place_once_its_streams_are_drawn(
    count: int,
) -> None:
    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=count), Model(b"x" * 300)
        async with streams(gateway, model, count) as slow:
            told = [await anext(slow)]
            assert gateway.room.free == 0
            await until(lambda: gateway.room.free == count)
            assert model.drawn == 300 * count
            async with streams(gateway, Model(b"y")) as other:  # which has room at once
                assert [part.text async for _, part in other] == ["y"]
            told += [each async for each in slow]
            for number in range(count):
                its = [part for i, part in told if i == number]
                assert "".join(part.text for part in its) == "x" * 300
                assert its[-1].finish_reason == "length"
        assert gateway.unread.total == 0

    asyncio.run(test())


def test_a_stop_text_ends_a_stream_whether_or_not_it_is_read() -> None:
    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=1), Model(b"ab" * 100 + b"stop" + b"c" * 3000)
        async with streams(gateway, model, stops=("stop",)) as slow:
            await anext(slow)
            await until(lambda: gateway.room.free == 1)
            assert model.drawn == 204
            assert "".join([part.text async for _, part in slow]) == "b" + "ab" * 99

    asyncio.run(test())


def test_who_leaves_the_most_unread_is_ended_and_nobody_else() -> None:
    async def test() -> None:
        gateway = a_gateway(max_in_flight=4)
        gateway.unread = Unread(700 << 10)  # of parts that take somewhat more than 1 KiB each
        one, two = Model(b"x" * 300), Model(b"y" * 1000)
        async with streams(gateway, one) as little, streams(gateway, two) as much:
            await anext(little)
            await until(lambda: gateway.room.free == 4)
            assert one.drawn == 300
            before = gateway.unread.total
            await anext(much)
            await until(lambda: not two.running)
            assert two.drawn < 1000  # its job was withdrawn
            assert gateway.room.free == 4
            assert gateway.unread.total == before
            with pytest.raises(ApiError, match="waits to be read: read faster") as ended:
                await anext(much)
            assert ended.value.status == 503
            assert "".join([part.text async for _, part in little]) == "x" * 299
        assert gateway.unread.total == 0

    asyncio.run(test())


def test_who_goes_leaves_nothing_on_a_shelf() -> None:
    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=2), Model(b"x" * 300)
        async with streams(gateway, model, 2) as gone:
            await anext(gone)
            await until(lambda: gateway.unread.total > 0)
        assert gateway.unread.total == 0
        assert gateway.room.free == 2
        assert model.running == 0

    asyncio.run(test())


def test_an_error_comes_behind_what_was_drawn_before_it() -> None:
    class Failing(Model):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Piece]:
            yield Piece(0, np.array([97], np.int32))
            raise ApiError(500, "it failed")

    async def test() -> None:
        async with streams(a_gateway(), Failing(b"")) as failing:
            for _turn in range(10):
                await asyncio.sleep(0)
            assert (await anext(failing))[1].text == "a"
            with pytest.raises(ApiError, match="it failed"):
                await anext(failing)

    asyncio.run(test())


def test_more_streams_of_a_request_than_there_are_places_wait_for_each_other() -> None:
    """However long that takes, which is no want of room."""

    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=2, queue_timeout=0.0), Model(b"abc")
        async with streams(gateway, model, 7) as found:
            told = [part.text async for _, part in found]
        assert sorted(told) == sorted("abc" * 7)
        assert model.most == 2

    asyncio.run(test())


def test_a_reader_of_binary_answers_holds_places_for_those_alone_that_are_asked() -> None:
    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=4), Rows()
        call = _Call(gateway, model, Deadline(None))  # type: ignore[arg-type]
        call.prompts, call.wants = [[1]] * 30, [Row()] * 30
        call.bytes = 30 * (HELD_BYTES // 4)
        async with aclosing(call.read_on()) as slow:
            seen = [(await anext(slow))[0]]
            assert gateway.held.free == 2 * UNREAD_BYTES - HELD_BYTES
            await until(lambda: gateway.room.free == 4)
            asked = model.asked
            assert (
                asked <= 4 + 4 + 1
            )  # as many as wait, as were under way, and the one that is read
            for _turn in range(100):
                await asyncio.sleep(0)
            assert (model.asked, gateway.room.free) == (asked, 4)
            seen += [number async for number, _ in slow]
        assert sorted(seen) == list(range(30))
        assert (model.asked, gateway.room.free) == (30, 4)
        assert gateway.held.free == 2 * UNREAD_BYTES

    asyncio.run(test())


def test_a_binary_stream_that_has_begun_waits_for_room_as_long_as_it_may_take() -> None:
    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=4, queue_timeout=0.01), Rows()
        call = _Call(gateway, model, Deadline(None))  # type: ignore[arg-type]
        call.prompts, call.wants = [[1]] * 30, [Row()] * 30
        call.bytes = 30 * (HELD_BYTES // 4)
        async with aclosing(call.read_on()) as answers:
            seen = [(await anext(answers))[0]]
            await until(lambda: gateway.room.free == 4)

            async def others() -> None:
                async with gateway.room.hold(4, None):
                    await asyncio.sleep(0.1)  # beyond what a request waits that has not begun

            full = asyncio.create_task(others())
            await until(lambda: gateway.room.free == 0)
            seen += [number async for number, _ in answers]
            await full
        assert sorted(seen) == list(range(30))

    asyncio.run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_continuations_up_to_a_stop_text_wait_for_each_other_too(stream: bool) -> None:
    async def test() -> None:
        gateway, model = a_gateway(max_in_flight=2, queue_timeout=0.0), Model(b"ab.")
        body = CompletionRequest.model_validate({"prompt": [[1]] * 7, "stop": ".", "max_tokens": 9})
        call = _Completions(gateway, model, body, Deadline(None), "x")  # type: ignore[arg-type]
        call.prompts, call.drawing = [Prompt([1])] * 7, drawing(stops=(".",))
        if stream:
            found = [chunk["choices"][0]["text"] async for chunk in call.chunks()]
        else:
            found = [answered.drawn[0].text for answered in await call.answered()]
        assert sorted("".join(found)) == sorted("ab" * 7)
        assert model.most == 2

    asyncio.run(test())
