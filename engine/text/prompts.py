"""What callers give as prompts and messages, as token ids.

Everything wrong with it is found here, in the caller's thread: ``ConfigError`` in one line.
"""

import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from engine.sampling.sampling_params import SamplingParams
from engine.text.token_bound import TokenBound
from kvstore.errors import ConfigError

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_MOST_BYTES_A_LETTER = 4  # as UTF-8; a token is a byte at least

_ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptReader:
    """Reads prompts for one model. Any thread.

    tokenizer       None where the engine has none
    max_model_len   what no text may be longer than, in tokens; None: whoever asks looks
    """

    def __init__(self, tokenizer: Any, max_model_len: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        # Whether special tokens are read is a state of the tokenizer that each call sets first.
        self._encoding = threading.Lock()

    def need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(
                f"{what} needs a tokenizer: pass token ids, or leave skip_tokenizer_init off"
            )
        return self.tokenizer

    @cached_property
    def _bound(self) -> TokenBound | None:
        return TokenBound.of(self.tokenizer)

    def check_length(self, text: str, what: str) -> None:
        """Raises ``ConfigError`` for a text that is too long however it is tokenised, which would
        keep everybody else's waiting."""
        most = self._max_model_len
        if most is None or len(text) * _MOST_BYTES_A_LETTER <= most or self._bound is None:
            return
        least = self._bound.least_tokens(text)
        if least > most:
            raise ConfigError(
                f"the {what} has at least {least} tokens and the model's context is {most}: cut at "
                f"least {least - most} tokens"
            )

    def read(self, prompt: Prompt, *, is_cut: bool = False) -> tuple[str | None, list[int]]:
        """A prompt's text, None when it came without, and its token ids. With ``is_cut`` the caller
        takes some of them, however many there are."""
        if isinstance(prompt, Mapping):
            content = [prompt[name] for name in prompt if name != "cache_salt"]
            if {"role", "content"} <= set(prompt):
                raise ConfigError("a prompt is no message: messages are for chat()")
            if set(prompt) - {"cache_salt"} not in ({"prompt"}, {"prompt_token_ids"}):
                raise ConfigError(
                    'a prompt dictionary has one key, "prompt" or "prompt_token_ids", and perhaps '
                    '"cache_salt", got ' + ", ".join(map(repr, prompt))
                )
            (prompt,) = content
        if isinstance(prompt, str):
            tokenizer = self.need_tokenizer("a text prompt")
            check_text(prompt)
            if not is_cut:
                self.check_length(prompt, "prompt")
            with self._encoding:
                return prompt, list(tokenizer(prompt, verbose=False)["input_ids"])
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise ConfigError(f"a prompt is text or a list of token ids, got {prompt!r}")
        try:
            token_ids: Iterable[Any] = prompt
            return None, [operator.index(token_id) for token_id in token_ids]
        except TypeError:
            raise ConfigError(
                "a prompt is text or a list of token ids, which are integers"
            ) from None

    def read_messages(self, messages: Sequence[Message], *, is_cut: bool = False) -> list[int]:
        """Token ids of a conversation, up to where the model's next message begins. ``is_cut`` as
        of ``read``."""
        tokenizer = self.need_tokenizer("chat()")
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise ConfigError(
                "chat() takes a list of messages, "
                f'[{{"role": "user", "content": …}}], got {messages!r}'
            )
        conversation = [as_message(message) for message in messages]
        if not conversation:
            raise ConfigError("the conversation has no messages")
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "chat() needs a chat template and the tokenizer has none: set chat_template of "
                "get_tokenizer(), pass tokenizer= of a chat model, or write the prompt yourself"
            )
        try:
            # As the template prints them: it may leave out some of what they say.
            text = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
            if not is_cut:
                self.check_length(text, "prompt")
            with self._encoding:
                encoded = tokenizer(text, add_special_tokens=False, verbose=False)
            return list(encoded["input_ids"])
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template refuses the messages: {error}") from error

    def encode(self, text: str, *, is_template: bool = False) -> list[int]:
        """A part of a prompt, without what a tokenizer puts around a whole one.

        Only in text of a template are special tokens read as such: a user's text that looks like
        one stays text."""
        check_text(text)
        self.check_length(text, "text")
        with self._encoding:
            encoded = self.need_tokenizer("a text")(
                text,
                add_special_tokens=False,
                split_special_tokens=not is_template,
                verbose=False,
            )
        return list(encoded["input_ids"])


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(
            f"prompts are text, lists of token ids, or a list of them, got {prompts!r}"
        )
    many: list[Any] = list(prompts)
    is_one = bool(many) and all(isinstance(item, int) for item in many)
    return [many] if is_one else many


def salt_of(prompt: Prompt, salt: str | None) -> str | None:
    """What a prompt brings as ``"cache_salt"``, else the ``salt`` of the call it came with."""
    own = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if own is not None and salt is not None and own != salt:
        raise ConfigError("cache_salt: the prompt has one and the call has another: leave one out")
    return salt if own is None else own


def refuse_adapter(lora_request: object) -> None:
    """vLLM's argument, which scripts pass as None."""
    if lora_request is not None:
        raise ConfigError(
            "lora_request: this engine has no adapters: merge it into the model's weights"
        )


def are_messages(given: Any) -> bool:
    """Whether it is one conversation: not a text, nor a list of token ids or of conversations."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    return is_list and bool(given) and isinstance(given[0], Mapping)


def as_message(message: Any) -> dict[str, str]:
    """A message with text content; vLLM's list of text parts is joined."""
    problem = ConfigError(
        f"a message is a dictionary with role and content, both text, got {message!r}"
    )
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise problem
    content = message["content"]
    if isinstance(content, list):
        parts: list[Any] = [
            part.get("text") if isinstance(part, Mapping) else part for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise problem
        content = "\n".join(parts)
    if not isinstance(content, str) or not isinstance(message["role"], str):
        raise problem
    if message["role"] not in _ROLES:  # which a template would print, whatever it is
        raise ConfigError(f"role: expected {', '.join(_ROLES)}, got {message['role']!r}")
    check_text(content)
    return {**message, "content": content}


def check_text(text: str) -> None:
    """Raises ``ConfigError`` for half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a text is Unicode, and {text[error.start]!r} at character {error.start} is half of a "
            "surrogate pair: decode it anew, or replace it"
        ) from None


def is_cut(params: SamplingParams | None) -> bool:
    """Whether a prompt may be longer than the context."""
    return getattr(params, "truncate_prompt_tokens", None) is not None


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One ``SamplingParams`` a prompt, of one for all, one each, or none."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise ConfigError(
            f"sampling_params: expected SamplingParams, or a list of them, got {params!r}"
        )
    if len(params) != count:
        raise ConfigError(
            f"sampling_params: expected one for all or {count}, one a prompt, got {len(params)}"
        )
    return list(params)
