"""A chat whose every turn reuses all that was said before, the model's own answers included."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, overload

from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions
from engine.stream import OutputStream, Stream
from engine.text.turn_template import TurnTemplate
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from engine.llm import LLM

_DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=128)


class Session:
    """Made by ``LLM.session``. One question at a time.

    Its tokens are only ever appended to. The template is not rendered again, and an answer stays
    the tokens that the model wrote: those are the ones whose blocks are cached.
    """

    def __init__(self, llm: "LLM", system: str | None, cache: CacheOptions) -> None:
        self._llm = llm
        self._cache = cache
        self._template = TurnTemplate.of(llm._reader, system)
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._token_ids = list(self._template.opening)
        self._num_turns = 0
        self._answering = threading.Lock()  # held by the turn under way, on whichever thread it is

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The conversation so far, as ``LLM.chat`` takes it."""
        return [dict(message) for message in self._messages]

    @property
    def token_ids(self) -> list[int]:
        """Everything so far, the template's tokens included: what the next turn is put behind."""
        return list(self._token_ids)

    @overload
    def ask(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> RequestOutput: ...

    @overload
    def ask(
        self, text: str, sampling_params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> OutputStream: ...

    def ask(
        self, text: str, sampling_params: SamplingParams | None = None, *, stream: bool = False
    ) -> RequestOutput | OutputStream:
        """The model's answer to the user's next message. Default: greedy, at most 128 tokens.

        An answer that was cut short, by ``max_tokens`` or a stop string, is closed as the template
        closes one. With ``stream`` it comes as an iterator of what is new, and is part of the
        conversation when that has been read to its end. Of a stream that is closed early the turn
        stays, with as much of the answer as was read; unread, or ended by an error, it is undone.

        Raises ``ConfigError`` when the conversation and this turn are longer than the model's
        context, and while another turn is under way; nothing has been added then.
        """
        turn = Turn(self, text, sampling_params)
        try:
            if stream:
                return self._llm._stream([turn.request(is_streamed=True)])
            (output,) = self._llm._run([turn.request()], show_progress=False)
            turn.heard(output)
            return output
        except BaseException:
            turn.ended()
            raise

    def fork(self) -> "Session":
        """A second conversation with the same past; its blocks are those of this one. A turn that
        is under way belongs to this one alone."""
        fork = object.__new__(Session)
        fork._llm, fork._cache, fork._template = self._llm, self._cache, self._template
        fork._messages, fork._token_ids = list(self._messages), list(self._token_ids)
        fork._num_turns, fork._answering = self._num_turns, threading.Lock()
        return fork

    def __repr__(self) -> str:
        state = ", answering" if self._answering.locked() else ""
        return (
            f"Session(model={self._llm.config.model!r}, num_turns={self._num_turns}, "
            f"num_tokens={len(self._token_ids)}{state})"
        )


class Turn:
    """One question of a session, and what has been heard of the answer.

    Kept as it was heard, also when the listener has left early: that is what the user has seen, and
    may refer to. Undone when nothing was heard, and when an error ended it: who asks again must not
    find the question twice.
    """

    def __init__(self, session: Session, question: str, params: SamplingParams | None) -> None:
        """Raises ``ConfigError`` while the session has another one."""
        if not session._answering.acquire(blocking=False):
            raise ConfigError(
                "this session is answering already: read that stream to its end or close it, or "
                "ask a fork()"
            )
        self._session = session
        self._question = question
        self._params = params or _DEFAULT_PARAMS
        self._request: Request | None = None
        self._prompt: list[int] = []
        self._text = ""
        self._token_ids: list[int] = []
        self._is_over = False

    def request(self, *, is_streamed: bool = False) -> Request:
        """Raises ``ConfigError`` for a question that cannot be asked."""
        session = self._session
        self._prompt = session._token_ids + self._asked()
        self._request = session._llm._requests.make(
            self._question,
            self._prompt,
            self._params,
            session._cache,
            stream=Stream(self) if is_streamed else None,
        )
        if self._params.n != 1:
            raise ConfigError(
                f"n: a session goes on from one answer, got {self._params.n}; fork() it"
            )
        return self._request

    def heard(self, delta: RequestOutput) -> None:
        for part in delta.outputs:
            self._text += part.text
            self._token_ids += part.token_ids
        if delta.finished:
            self.ended()

    def ended(self) -> None:
        """The session may go on. Calling it again does nothing."""
        if self._is_over:
            return
        self._is_over = True
        session, request = self._session, self._request
        if request is not None and self._token_ids and not _has_failed(request):
            session._token_ids = self._prompt + self._closed()
            session._messages += (
                {"role": "user", "content": self._question},
                {"role": "assistant", "content": self._text},
            )
            session._num_turns += 1
        session._answering.release()

    def _asked(self) -> list[int]:
        """The tokens of the question, the template's around it included."""
        session, text = self._session, self._question
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"a question is text, and not empty, got {text!r}")
        template = session._template
        asking = template.asking if session._num_turns else []
        content = session._llm._reader.encode(text.strip() if template.strips_text else text)
        tokens = asking + content + template.answering
        excess = len(session._token_ids) + len(tokens) + 1 - session._llm.max_model_len
        if excess > 0:
            raise ConfigError(
                f"the conversation has {len(session._token_ids)} tokens, this turn adds "
                f"{len(tokens)}, and the model's context is {session._llm.max_model_len}: {excess} "
                "too many for an answer of one token; ask less, or start a new session"
            )
        return tokens

    def _closed(self) -> list[int]:
        """The answer's tokens, ended as the template ends them: whatever token the model ended it
        with, the template's is the one that stays."""
        ending = self._session._template.ending
        token_ids = list(self._token_ids)
        if token_ids[-1] in {*self._session._llm._loaded.eos_token_ids, *ending[:1]}:
            token_ids.pop()
        return token_ids + ending


def _has_failed(request: Request) -> bool:
    return request.result.done() and request.result.exception() is not None
