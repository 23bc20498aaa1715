"""Runs the server: signals, and an orderly end."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine.async_llm import AsyncLLM
from engine.server.app import make_app
from engine.server.listener import Listener

_FLUSH_S = 30.0  # to write what is dirty at the end
_STUCK_S = 5.0  # beyond the grace, for responses whose client does not read


def serve(
    llm: AsyncLLM,
    listener: Listener,
    *,
    model_name: str,
    api_key: str | None = None,
    grace_s: float = 10.0,
    on_ready: Callable[[], Any] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then close ``llm``, which writes what is dirty. Blocks.

    From the signal on nobody new is answered, nor who has not sent a whole request, and answers
    under way have ``grace_s`` seconds to end by themselves; then they end where they are, as
    aborted ones. Raises ``KeyboardInterrupt`` after Ctrl-C, when everything is closed.
    """
    app = make_app(llm, model_name=model_name, api_key=api_key)
    server = _Uvicorn(app, llm, grace_s, on_ready)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        if is_main:  # uvicorn raises again what ended it; SIGTERM has done its work by then
            signal.signal(signal.SIGTERM, lambda *_: None)
        asyncio.run(server.serve(sockets=[listener.socket]))
    finally:
        listener.close()
        asyncio.run(llm.close(_FLUSH_S))
        if is_main:
            signal.signal(signal.SIGTERM, before)


class _Uvicorn(uvicorn.Server):
    def __init__(
        self, app: FastAPI, llm: AsyncLLM, grace_s: float, on_ready: Callable[[], Any]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(grace_s + _STUCK_S + 1),
            )
        )
        self._is_ending: asyncio.Event = app.state.is_ending
        self._llm = llm
        self._grace_s = grace_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_ending.set()
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(self._grace_s)
        await self._llm.abort_all()
