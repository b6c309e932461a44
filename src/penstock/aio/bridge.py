"""From asyncio to threads: calls run in threads of the store, and a cancelled task waits for its call.

Thread: one event loop for each store.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from penstock.arguments import seconds
from penstock.errors import Closed, WaitExpired

THREADS_MAX = 32
WAITING_MAX = 16  # threads that wait for what others write: the rest stay free for writes
STEP_S = 0.5  # such a wait is made of steps, and a cancelled one ends after its step
ROWS_AT_ONCE = 1_000  # of a scan, per change of threads

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
F = TypeVar("F")
P = ParamSpec("P")
C = TypeVar("C", bound=Callable[..., object])


class CallThreads:
    """The threads of one store."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="penstock-aio")
        self.waiting = asyncio.Semaphore(WAITING_MAX)
        self.closed = False

    async def run(self, act: Callable[[], T], *, undo: Callable[[T], object] | None = None, always: bool = False) -> T:
        """Call `act` in a thread. If the caller is cancelled: wait for `act`, `undo` its result, then raise.

        A call that has not begun by then is not made; `always`: it is, because it gives something back.
        """
        if self.closed:
            raise Closed("the store was closed: open it again")
        begun = self._pool.submit(act)
        outcome = asyncio.wrap_future(begun)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if always or not begun.cancel():
                await _wait_until_done(outcome)
                if undo is not None and not outcome.cancelled() and outcome.exception() is None:
                    await _wait_until_done(asyncio.wrap_future(self._pool.submit(undo, outcome.result())))
            raise

    async def wait(self, take: Callable[[float], Awaitable[T | None]], timeout_s: float) -> T | None:
        """Wait up to `timeout_s` until `take` returns an item; None if it does not.

        The wait is made of steps: `take` is called with the seconds of each.

        Many callers may wait: they take turns, and each ends by its own deadline.
        """
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + timeout_s
        while clock() < deadline_s:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self.waiting.acquire()
            except TimeoutError:
                break
            try:
                item = await take(max(0.0, min(deadline_s - clock(), STEP_S)))
            finally:
                self.waiting.release()
            if item is not None:
                return item
        return await take(0.0)

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown(wait=False)


async def _wait_until_done(outcome: asyncio.Future[Any]) -> None:
    """Wait for a call that cannot be stopped, however often the waiting task is cancelled meanwhile."""
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except asyncio.CancelledError:
            continue
    if not outcome.cancelled():
        outcome.exception()  # retrieved, so that asyncio does not report it


class AsyncForm(Generic[S_co]):
    """The asyncio form of an object."""

    def __init__(self, sync: S_co, threads: CallThreads) -> None:
        self._sync = sync
        self._threads = threads

    def __repr__(self) -> str:
        return f"<asyncio form of {self._sync!r}>"


def _documented(call: C, method: Callable[..., object], how: str) -> C:
    """Give a form the name and docstring of its method, with a reference to the method in place of an example."""
    functools.update_wrapper(call, method)
    text = inspect.getdoc(method) or ""
    if ">>>" in text:
        where = f"The example of `{method.__name__}` in the class without `Async` holds here, {how}."
        call.__doc__ = text.partition(">>>")[0] + where
    return call


def awaited(
    method: Callable[Concatenate[S, P], T], *, always: bool = False
) -> Callable[Concatenate[AsyncForm[S], P], Coroutine[object, None, T]]:
    """Make the asyncio form of a method: the same arguments, and the result must be awaited.

    `always`: as for `CallThreads.run`.
    """
    name = method.__name__

    async def call(self: AsyncForm[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(partial(getattr(self._sync, name), *args, **kwargs), always=always)

    return _documented(call, method, "with `await`")


def waited(
    method: Callable[Concatenate[S, P], T], *, undo: Callable[[S, T], object] | None = None
) -> Callable[Concatenate[AsyncForm[S], P], Coroutine[object, None, T]]:
    """Make the asyncio form of a method that waits for others up to `timeout_s`, or raises `WaitExpired`.

    `undo`: as for `CallThreads.run`.
    """
    name, signature = method.__name__, inspect.signature(method)

    async def call(self: AsyncForm[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(self._sync, *args, **kwargs)
        bound.apply_defaults()
        timeout_s = seconds(bound.arguments["timeout_s"], "timeout_s", math.inf)
        for argument, value in bound.arguments.items():
            if isinstance(value, Iterator):  # each step reads it
                bound.arguments[argument] = list(value)
        undo_here = None if undo is None else partial(undo, self._sync)

        async def step(step_s: float) -> T | None:
            bound.arguments["timeout_s"] = step_s
            act = partial(getattr(self._sync, name), *bound.args[1:], **bound.kwargs)
            try:
                return await self._threads.run(act, undo=undo_here)
            except WaitExpired:
                return None

        result = await self._threads.wait(step, timeout_s)
        if result is None:
            raise WaitExpired(f"{name}: it did not happen within {timeout_s:g} s: wait again")
        return result

    return _documented(call, method, "with `await`")


def awaited_as(
    form: Callable[[T, CallThreads], F], method: Callable[Concatenate[S, P], T]
) -> Callable[Concatenate[AsyncForm[S], P], Coroutine[object, None, F]]:
    """Make the asyncio form of a method whose result, which must be awaited, has an asyncio form, too."""
    name = method.__name__

    async def call(self: AsyncForm[S], /, *args: P.args, **kwargs: P.kwargs) -> F:
        return form(await self._threads.run(partial(getattr(self._sync, name), *args, **kwargs)), self._threads)

    return _documented(call, method, "with `await`")


def formed(
    form: Callable[[T, CallThreads], F], method: Callable[Concatenate[S, P], T]
) -> Callable[Concatenate[AsyncForm[S], P], F]:
    """Make the asyncio form of a method that does not wait, and whose result has an asyncio form."""
    name = method.__name__

    def call(self: AsyncForm[S], /, *args: P.args, **kwargs: P.kwargs) -> F:
        return form(getattr(self._sync, name)(*args, **kwargs), self._threads)

    return _documented(call, method, "without `await`")


def immediate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[AsyncForm[S], P], T]:
    """Make the asyncio form of a method that only makes an object: it is not awaited."""
    name = method.__name__

    def call(self: AsyncForm[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(self._sync, name)(*args, **kwargs)
        return result

    return _documented(call, method, "without `await`")


def iterated(
    method: Callable[Concatenate[S, P], Iterable[T]],
) -> Callable[Concatenate[AsyncForm[S], P], AsyncIterator[T]]:
    """Make the asyncio form of a method that returns an iterator: `async for`, many rows per change of threads."""
    name = method.__name__

    async def iterate(self: AsyncForm[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        begin = partial(getattr(self._sync, name), *args, **kwargs)
        rows: Iterator[T] = await self._threads.run(lambda: iter(begin()))
        try:
            while batch := await self._threads.run(lambda: list(itertools.islice(rows, ROWS_AT_ONCE))):
                for row in batch:
                    yield row
        finally:
            close = getattr(rows, "close", None)
            if close is not None and not self._threads.closed:
                await self._threads.run(close, always=True)

    return _documented(iterate, method, "with `async for`")


class _Closing(Protocol):
    async def close(self) -> None: ...


A = TypeVar("A", bound=_Closing)


class AsyncOpening(Generic[S, A]):
    """A store or snapshot that `await` or `async with` opens."""

    def __init__(
        self,
        threads: CallThreads | None,
        opens: Callable[[], S],
        closes: Callable[[S], object],
        form: Callable[[S, CallThreads], A],
    ) -> None:
        self._threads = threads
        self._opens = opens
        self._closes = closes
        self._form = form
        self._opened: A | None = None

    if not TYPE_CHECKING:  # for type checkers it has no other attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"there is no {name} before it is opened: use async with, or await it first")

    async def _open(self) -> A:
        threads = self._threads or CallThreads()
        try:
            return self._form(await threads.run(self._opens, undo=self._closes), threads)
        except BaseException:
            if self._threads is None:
                threads.close()
            raise

    def __await__(self) -> Generator[Any, None, A]:
        return self._open().__await__()

    async def __aenter__(self) -> A:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        assert self._opened is not None
        await self._opened.close()
