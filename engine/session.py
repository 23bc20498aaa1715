"""A chat whose every turn reuses all that was said before, the model's own answers included."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.sequence import CacheOptions
from engine.text.chat_template import has_template, place, render, template_around
from engine.text.prompts import PromptReader
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from engine.llm import LLM

_DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=128)


@dataclass(frozen=True, slots=True)
class Turns:
    """The chat template's part of a conversation, as token ids.

    opening      before the first question, the system message included
    answering    after a question: where the model's answer begins
    ending       after an answer
    asking       before a later question
    strips_text  the template drops spaces around a text
    """

    opening: list[int]
    answering: list[int]
    ending: list[int]
    asking: list[int]
    strips_text: bool

    @classmethod
    def of(cls, reader: PromptReader, system: str | None) -> "Turns":
        """Raises ``ConfigError`` for a model without a chat template, or one that takes no system
        message."""
        tokenizer = reader.need_tokenizer("a session")
        if system is not None and not isinstance(system, str):
            raise ConfigError(f"system: expected text, got {system!r}")
        if not has_template(tokenizer):
            raise ConfigError("a session needs a model with a chat template; use generate()")
        user = {"role": "user", "content": ""}
        assistant = {"role": "assistant", "content": ""}
        first = [user] if system is None else [{"role": "system", "content": ""}, user]
        *before, answering = template_around(tokenizer, first)
        opening = reader.encode(before[0], is_template=True)
        if system is not None:
            opening += reader.encode(system) + reader.encode(before[1], is_template=True)
        ending = template_around(tokenizer, [user, assistant], for_answer=False)[-1]
        between = template_around(tokenizer, [user, assistant, user])[2]
        if not between.startswith(ending):  # a conversation ends otherwise than it goes on
            ending = ""
        spaced = f" {place(0)} "
        return cls(
            opening,
            reader.encode(answering, is_template=True),
            reader.encode(ending, is_template=True),
            reader.encode(between.removeprefix(ending), is_template=True),
            spaced not in render(tokenizer, [{**user, "content": spaced}]),
        )


class Session:
    """Made by ``LLM.session``. One thread at a time.

    Its tokens are only ever appended to. The template is not rendered again, and an answer stays
    the tokens that the model wrote: those are the ones whose blocks are cached.
    """

    def __init__(self, llm: "LLM", system: str | None, cache: CacheOptions) -> None:
        self._llm = llm
        self._cache = cache
        self._turns = Turns.of(llm._reader, system)
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._token_ids = list(self._turns.opening)
        self._has_begun = False

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The conversation so far, as ``LLM.chat`` takes it."""
        return [dict(message) for message in self._messages]

    @property
    def token_ids(self) -> list[int]:
        """Everything so far, the template's tokens included: what the next turn is put behind."""
        return list(self._token_ids)

    def ask(self, text: str, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The model's answer to the user's next message. Default: greedy, at most 128 tokens.

        An answer that was cut short, by ``max_tokens`` or a stop string, is closed as the template
        closes one. Raises ``ConfigError`` when the conversation and this turn are longer than the
        model's context; nothing has been added then.
        """
        params = sampling_params or _DEFAULT_PARAMS
        prompt = self._token_ids + self._turn(text)
        request = self._llm._requests.make(text, prompt, params, self._cache)
        if params.n != 1:
            raise ConfigError(f"n: a session goes on from one answer, got {params.n}; fork() it")
        (output,) = self._llm._run([request], show_progress=False)
        self._token_ids = prompt + self._closed(output.outputs[0])
        self._messages += (
            {"role": "user", "content": text},
            {"role": "assistant", "content": output.outputs[0].text},
        )
        self._has_begun = True
        return output

    def fork(self) -> "Session":
        """A second conversation with the same past; its blocks are those of this one."""
        fork = object.__new__(Session)
        fork._llm, fork._cache, fork._turns = self._llm, self._cache, self._turns
        fork._messages, fork._token_ids = list(self._messages), list(self._token_ids)
        fork._has_begun = self._has_begun
        return fork

    def _turn(self, text: str) -> list[int]:
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"a question is text, and not empty, got {text!r}")
        turns = self._turns
        asking = turns.asking if self._has_begun else []
        content = self._llm._reader.encode(text.strip() if turns.strips_text else text)
        turn = asking + content + turns.answering
        excess = len(self._token_ids) + len(turn) + 1 - self._llm.max_model_len
        if excess > 0:
            raise ConfigError(
                f"the conversation has {len(self._token_ids)} tokens, this turn adds {len(turn)}, "
                f"and the model's context is {self._llm.max_model_len}: {excess} too many for an "
                "answer of one token; ask less, or start a new session"
            )
        return turn

    def _closed(self, answer: CompletionOutput) -> list[int]:
        """The answer's tokens, ended as the template ends them: whatever token the model ended it
        with, the template's is the one that stays."""
        token_ids, ends = list(answer.token_ids), self._llm._loaded.eos_token_ids
        if token_ids and token_ids[-1] in {*ends, *self._turns.ending[:1]}:
            token_ids.pop()
        return token_ids + self._turns.ending
