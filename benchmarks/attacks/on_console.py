"""What `make test-attacks` does to the console: passwords guessed at two processes at once, a session that opens
sockets in a loop, and strangers who ask for the OpenAPI document in a loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from typing import NamedTuple

import aiohttp

from benchmarks.servers.engines import running, spawn
from benchmarks.servers.stack import Stack
from workers.supervisor.plan import console_module
from workers.supervisor.ports import free_port

PER_ACCOUNT = 5
GUESSES = 40
SOCKETS, MOST_SOCKETS = 60, 40
SETTLED_S = 2.0  # in which the console closes what is too much
PERSON = "olga"
ASKING, ASKED_S, MOST_WAIT_S = 8, 3.0, 1.0  # clients in a loop, for so long; the longest that somebody else waits


class Consoles(NamedTuple):
    """Two processes with one database and Redis, and somebody's password there."""

    urls: tuple[str, str]
    password: str


@contextlib.contextmanager
def consoles(stack: Stack) -> Iterator[Consoles]:
    """All guesses come from one address here, so only the limit by account is left as tight as it is served."""
    password = secrets.token_urlsafe(16)
    os.environ["DJANGO_SUPERUSER_PASSWORD"] = password
    try:
        stack.manage("manage.py", "createsuperuser", "--skip-checks", "--noinput", "--username", PERSON, "--email", "")
    finally:
        del os.environ["DJANGO_SUPERUSER_PASSWORD"]
    limits = {"SIGN_INS_PER_ACCOUNT": str(PER_ACCOUNT), "SIGN_INS_PER_ADDRESS": "100000"}
    made = []
    for number in (1, 2):
        port = free_port()
        given = {**stack.environment, **limits, "SLACKLINE_ROLE": "console", "CONSOLE_PORT": str(port)}
        command = [sys.executable, "-m", *console_module(port)]
        made.append(spawn(f"console-{number}", command, port, stack.folder / "logs", given))
    with running(made, "/livez") as [first, second]:
        yield Consoles((first.url, second.url), password)


async def guesses(found: Consoles) -> tuple[bool, str]:
    """One account's password is guessed `GUESSES` times at once, half of them at each process."""
    account = f"nobody-{secrets.token_hex(4)}"
    asked = [sign_in(found.urls[number % 2], account, f"guess-{number}") for number in range(GUESSES)]
    statuses = [status for status, _ in await asyncio.gather(*asked)]
    judged, refused = statuses.count(200), statuses.count(429)
    told = f"{judged} of {GUESSES} guesses judged, {refused} refused, by two processes together"
    return judged == PER_ACCOUNT and judged + refused == GUESSES, told


async def sockets(found: Consoles) -> tuple[bool, str]:
    """A page opens `SOCKETS` live connections with one session, and keeps all that it gets."""
    url = found.urls[0]
    status, cookies = await sign_in(url, PERSON, found.password)
    async with aiohttp.ClientSession(cookies=cookies, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        opened = [await session.ws_connect(f"{url}/ws/overview", origin=url) for _ in range(SOCKETS)]
        reading = [asyncio.get_running_loop().create_task(_until_closed(each)) for each in opened]
        _, still = await asyncio.wait(reading, timeout=SETTLED_S)
        for each in opened:
            await each.close()
        await asyncio.gather(*reading)
    told = f"sign-in {status}; {len(still)} of {SOCKETS} sockets of a session stay open"
    return len(still) == MOST_SOCKETS, told


async def documents(found: Consoles) -> tuple[bool, str]:
    """Strangers ask for the OpenAPI document in a loop, while somebody looks at the sign-in page again and again."""
    url, loop = found.urls[0], asyncio.get_running_loop()
    end, got, waits = loop.time() + ASKED_S, 0, [0.0]

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal got
        while loop.time() < end:
            async with session.get(f"{url}/api/schema") as answer:
                await answer.read()
                got += answer.status == 200

    async def look(session: aiohttp.ClientSession) -> None:
        while loop.time() < end:
            began = loop.time()
            async with session.get(f"{url}/login/") as page:
                await page.read()
            waits.append(loop.time() - began)
            await asyncio.sleep(0.05)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(look(session), *(ask(session) for _ in range(ASKING)))
    return max(waits) < MOST_WAIT_S, f"{got} documents sent; a page took {max(waits):.2f} s at most meanwhile"


async def _until_closed(socket: aiohttp.ClientWebSocketResponse) -> None:
    async for _ in socket:
        pass


async def sign_in(url: str, name: str, password: str) -> tuple[int, dict[str, str]]:
    """Status of the answer, and the cookies of whoever is signed in then."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        async with session.get(f"{url}/login/") as page:
            await page.read()
        csrf = next(each.value for each in session.cookie_jar if each.key.startswith("slackline_csrf"))
        form = {"username": name, "password": password, "csrfmiddlewaretoken": csrf}
        async with session.post(f"{url}/login/", data=form, allow_redirects=False) as answer:
            await answer.read()
            return answer.status, {each.key: each.value for each in session.cookie_jar}
