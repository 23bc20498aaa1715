"""The paths of the server. Does not know how it is run (``engine.server.running``)."""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from engine.async_llm import AsyncLLM
from engine.async_stream import AsyncOutputStream
from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.server.bodies import Body, BodyLimit, ChatBody, CompletionBody
from engine.server.errors import ApiError, handle_errors
from engine.server.replies import ChatReply, Reply, TextReply
from engine.server.room import fit
from kvstore.errors import StoreClosedError

T = TypeVar("T")

_EVENT_HEADERS = {"Cache-Control": "no-cache"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(llm: AsyncLLM, *, model_name: str, api_key: str | None = None) -> FastAPI:
    """An ASGI application over ``llm``, which stays the caller's to close.

    model_name   what clients call the model
    api_key      what they must show as a bearer token, on every path but ``/health``
    """
    app = FastAPI(title="tiered-kvstore", openapi_url=None)  # no pages that need no key
    app.state.is_ending = asyncio.Event()  # whoever ends it sets this first
    app.add_middleware(BodyLimit, is_ending=app.state.is_ending)
    handle_errors(app)
    server = _Server(llm, model_name, api_key)
    keyed = [Depends(server.check_key)]
    app.add_api_route("/health", server.health)
    app.add_api_route("/metrics", server.metrics, dependencies=keyed)
    app.add_api_route("/v1/models", server.models, dependencies=keyed)
    app.add_api_route("/v1/models/{name:path}", server.model, dependencies=keyed)
    for path, endpoint in (
        ("/v1/completions", server.complete),
        ("/v1/chat/completions", server.chat),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], dependencies=keyed, response_model=None)
    return app


class _Server:
    def __init__(self, llm: AsyncLLM, model_name: str, api_key: str | None) -> None:
        self._llm = llm
        self._model_name = model_name
        self._api_key = api_key
        self._created = int(time.time())

    async def check_key(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.encode("latin-1"), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            message = "this server wants its API key, as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    async def health(self) -> Response:
        try:
            await self._llm.check_health()
        except StoreClosedError:  # what ended it is not for strangers
            return JSONResponse({"status": "the engine has ended"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        return PlainTextResponse(await self._llm.metrics_text(), media_type=_METRICS_TYPE)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model()

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        self._check_model(body.model)
        params, prompts = body.sampling(), body.prompts()
        echoes = []
        if body.echo:
            echoes = [
                each if isinstance(each, str) else await self._llm.decode(each) for each in prompts
            ]
        reply = TextReply(body.model, params.n, wants_usage=body.wants_usage, echoes=echoes)
        read = [await self._llm.read(prompt, params) for prompt in prompts]
        return await self._reply(request, reply, read, params, body)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        self._check_model(body.model)
        params = body.sampling()
        prompt = await self._llm.read_messages(body.messages, params)
        reply = ChatReply(
            body.model,
            params.n,
            tokenizer=self._llm.get_tokenizer(),
            wants_usage=body.wants_usage,
            num_top=params.logprobs or 0,
        )
        return await self._reply(request, reply, [prompt], params, body)

    async def _reply(
        self,
        request: Request,
        reply: Reply,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        body: Body,
    ) -> Response:
        lens = [len(prompt) for prompt in prompts]
        params = fit(body, params, lens, self._llm.config, self._llm.max_model_len)
        numbered = [(prompt, f"{reply.id}-{number}") for number, prompt in enumerate(prompts)]
        try:
            if body.stream:
                streams = await self._open(numbered, params, body.cache_salt)
                events = _events(reply, streams)
                return StreamingResponse(events, 200, _EVENT_HEADERS, "text/event-stream")
            answers = (
                self._llm.answer(prompt, params, name, cache_salt=body.cache_salt)
                for prompt, name in numbered
            )
            outputs = await _while_connected(request, _all(answers))
            return JSONResponse(reply.whole(outputs))
        except Exception as error:  # one that nobody expects would also end the connection
            raise ApiError.of(error) from None

    async def _open(
        self, numbered: Sequence[tuple[list[int], str]], params: SamplingParams, salt: str | None
    ) -> list[AsyncOutputStream]:
        """A stream for each prompt, or none."""
        streams: list[AsyncOutputStream] = []
        try:
            for prompt, name in numbered:
                stream = await self._llm.open(prompt, params, name, cache_salt=salt)
                streams.append(stream)
        except BaseException:
            _close(streams)
            raise
        return streams

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            message = f"model: there is no {name!r} here, only {self._model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tiered-kvstore",
            "max_model_len": self._llm.max_model_len,
        }


async def _all(answers: Iterable[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """All of them, or the first error, which cancels the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer) for answer in answers]
    return [task.result() for task in tasks]


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the client goes away."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnection(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(400, "the client went away")  # nobody reads it
        return working.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(reply: Reply, streams: Sequence[AsyncOutputStream]) -> AsyncGenerator[str]:
    """Server-sent events of one response. Ending early aborts what is not finished."""
    try:
        for chunk in reply.opening(len(streams)):
            yield _event(chunk)
        async with contextlib.aclosing(_interleaved(streams)) as deltas:
            async for number, delta in deltas:
                for chunk in reply.chunks(number, delta):
                    yield _event(chunk)
        for chunk in reply.closing():
            yield _event(chunk)
    except Exception as error:  # the status has been sent already
        yield _event(ApiError.of(error).body())
        return
    finally:
        _close(streams)
    yield "data: [DONE]\n\n"


async def _interleaved(
    streams: Sequence[AsyncOutputStream],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Deltas of all streams as they come, each with its stream's number."""
    waiting = {asyncio.ensure_future(anext(each)): i for i, each in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, delta = waiting.pop(task), task.result()
                yield number, delta
                if not delta.finished:
                    waiting[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _close(streams: Sequence[AsyncOutputStream]) -> None:
    for stream in streams:
        stream.close()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
