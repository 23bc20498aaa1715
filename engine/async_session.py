"""A chat on an event loop."""

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from engine.async_stream import AsyncOutputStream
from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from engine.session import Session, Turn

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM


class AsyncSession:
    """Made by ``AsyncLLM.session``: a ``Session`` whose answers are awaited, or iterated over."""

    def __init__(self, llm: "AsyncLLM", session: Session) -> None:
        self._llm = llm
        self._session = session

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The conversation so far, as ``AsyncLLM.chat`` takes it."""
        return self._session.messages

    @property
    def token_ids(self) -> list[int]:
        """Everything so far, the template's tokens included: what the next turn is put behind."""
        return self._session.token_ids

    @overload
    def ask(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Coroutine[Any, Any, RequestOutput]: ...

    @overload
    def ask(
        self, text: str, sampling_params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> AsyncOutputStream: ...

    def ask(
        self, text: str, sampling_params: SamplingParams | None = None, *, stream: bool = False
    ) -> Coroutine[Any, Any, RequestOutput] | AsyncOutputStream:
        """As ``Session.ask``: what it keeps of a stream that is closed early, too. Cancelled, an
        awaited turn is undone."""
        if stream:
            return AsyncOutputStream(
                self._llm._llm._core, lambda: self._submit(text, sampling_params)
            )
        return self._answer(text, sampling_params)

    def fork(self) -> "AsyncSession":
        """A second conversation with the same past; its blocks are those of this one."""
        return AsyncSession(self._llm, self._session.fork())

    def __repr__(self) -> str:
        return f"Async{self._session!r}"

    async def _answer(self, text: str, params: SamplingParams | None) -> RequestOutput:
        turn = Turn(self._session, text, params)
        try:
            (output,) = await self._llm._run(lambda: [turn.request()], is_held=True)
            turn.heard(output)
            return output
        except BaseException:
            turn.ended()
            raise

    async def _submit(self, text: str, params: SamplingParams | None) -> list[Request]:
        turn = Turn(self._session, text, params)
        try:
            return await self._llm._submit(lambda: [turn.request(is_streamed=True)], is_held=True)
        except BaseException:
            turn.ended()
            raise
