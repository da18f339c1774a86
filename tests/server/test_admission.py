"""Which requests are admitted, which wait, and how they are counted."""

import asyncio
import json

import pytest
from guarded import guarded

from ragkv.server.errors import ApiError
from ragkv.server.metrics import QUEUE, ConcurrencyLimiter

WAIT = 600


def test_a_request_that_waits_has_the_room_of_one_that_leaves():
    """First come, first served; no other request takes the slot meanwhile, and a cancelled request passes it on."""
    limiter = ConcurrencyLimiter(1, patience=WAIT)

    async def run():
        first = await limiter.admit("a")
        waiting = [asyncio.ensure_future(limiter.admit("a")) for _ in range(4)]
        await asyncio.sleep(0)
        assert b'ragkv:num_requests_waiting{model_name="a"} 5.0' in limiter.text()
        waiting[0].cancel()  # it gives up
        await asyncio.sleep(0)
        first.leave()
        waiting[1].cancel()  # the slot was just given to it
        last = asyncio.ensure_future(limiter.admit("a"))
        second = await waiting[2]
        assert not waiting[3].done()
        assert limiter.inside == 1
        second.leave()
        (await waiting[3]).leave()
        (await last).leave()
        assert limiter.inside == 0
        (await limiter.admit("a")).leave()

    asyncio.run(run())
    assert b'ragkv:num_requests_waiting{model_name="a"} 0.0' in limiter.text()


def test_more_than_a_few_are_told_to_come_again():
    limiter = ConcurrencyLimiter(1, patience=WAIT)

    async def run():
        await limiter.admit("a")
        waiting = [asyncio.ensure_future(limiter.admit("a")) for _ in range(QUEUE)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await limiter.admit("a")
        assert refused.value.status == 429
        limiter.stop()
        assert [each.status for each in await asyncio.gather(*waiting, return_exceptions=True)] == [503] * QUEUE
        with pytest.raises(ApiError) as refused:
            await limiter.admit("a")
        assert refused.value.status == 503

    asyncio.run(run())


def test_every_response_is_counted_by_its_status(app, limiter, call_on):
    def ask(method, path, **more):
        return call_on(app, method, path, around=lambda app: guarded(app, responded=limiter.responded), **more)

    chat = {"model": "two", "messages": [{"role": "user", "content": "Xyzzy?"}]}
    nothing = ask("POST", "/v1/chat/completions", json=chat).status_code
    ask("POST", "/v1/chat/completions", content=json.dumps(chat), headers={"content-type": "text/plain"})
    ask("GET", "/api/indexes/two/chunks/none")
    ask("GET", "/none")
    ask("HEAD", "/healthz")
    ask("BREW", "/healthz")
    trackers = [asyncio.run(limiter.admit("two")) for _ in range(8)]
    assert ask("POST", "/v1/chat/completions", json=chat).status_code == 429
    trackers[0].leave()
    result = ask("GET", "/metrics").text
    for method, handler, status in (
        ("POST", "/v1/chat/completions", nothing),
        ("POST", "/v1/chat/completions", 429),
        ("POST", "none", 415),
        ("GET", "/api/indexes/{name}/chunks/{chunk_id:path}", 404),
        ("GET", "none", 404),
        ("GET", "/healthz", 200),
        ("other", "/healthz", 405),
    ):
        assert f'ragkv:http_requests_total{{handler="{handler}",method="{method}",status="{status}"}} 1.0' in result
