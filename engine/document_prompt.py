"""The tokens of a document and of the questions about it.

The parts of a prompt, template, document and question, are tokenised apart and joined, so that no
token spans a border and the document's tokens do not depend on the question. Text that looks like a
special token is not read as one.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.prompts import Message, PromptReader, as_message
from kvstore.errors import ConfigError

# What a chat template that prints the day prints: with the real one, a document would be read anew
# every day.
_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)

# Templates take no functions, so that date reaches them as a macro of the same name, which hides
# theirs. The empty expression keeps the newline that a template may begin with.
_DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(
        f"|replace('%{letter}', '{_DATE.strftime(f'%{letter}')}')"
        for letter in "aAbBdeHIjmMpSwyYzZ"
    )
    + " }}{% endmacro %}{{ '' }}"
)

_LEAST_QUESTION, _LEAST_ANSWER = 1, 1  # tokens


@dataclass(frozen=True, slots=True)
class DocumentPrompt:
    """Token ids.

    prefix    what all questions share: the template's beginning, and the document
    between   template between document and question
    after     template after the question
    """

    prefix: list[int]
    between: list[int]
    after: list[int]

    @classmethod
    def of_text(cls, reader: PromptReader, text: str) -> "DocumentPrompt":
        """Raises ``ConfigError`` for an empty text, and for a template that has no place for it."""
        if not text.strip():
            raise ConfigError("the document is empty")
        before, between, after = template_parts(reader.need_tokenizer("a document"))
        return cls(
            reader.encode(before, is_template=True) + reader.encode(text),
            reader.encode(between, is_template=True),
            reader.encode(after, is_template=True),
        )

    @classmethod
    def of_messages(cls, reader: PromptReader, messages: Sequence[Message]) -> "DocumentPrompt":
        """A conversation so far; a question is the user's next message."""
        conversation = [as_message(message) for message in messages]
        if not conversation:
            raise ConfigError("the document is empty: it has no messages")
        tokenizer = reader.need_tokenizer("a document")
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("messages need a model with a chat template; give the text instead")
        *parts, after = _rendered(
            tokenizer, [*conversation, {"role": "user", "content": ""}], len(conversation) + 1
        )
        prefix = []
        for template, message in zip(parts, conversation, strict=False):
            prefix += reader.encode(template, is_template=True) + reader.encode(message["content"])
        prefix += reader.encode(parts[-1], is_template=True)
        return cls(prefix, [], reader.encode(after, is_template=True))

    def ask(self, reader: PromptReader, question: str) -> list[int]:
        """The whole prompt of one question."""
        if not question.strip():
            raise ConfigError("the question is empty")
        return self.prefix + self.between + reader.encode(question) + self.after

    def check_fits(self, max_model_len: int) -> None:
        """Raises ``ConfigError`` when the shortest question and answer have no room behind it."""
        around = len(self.between) + len(self.after) + _LEAST_QUESTION + _LEAST_ANSWER
        excess = len(self.prefix) + around - max_model_len
        if excess > 0:
            raise ConfigError(
                f"the document has {len(self.prefix)} tokens and the model's context is "
                f"{max_model_len}: cut at least {excess} tokens, or use a model with a longer "
                "context"
            )


def template_parts(tokenizer: Any) -> tuple[str, str, str]:
    """Text before the document, between document and question, and after the question."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.bos_token or "", "\n\nQuestion: ", "\nAnswer:"
    content = f"{_place(0)}\n\n{_place(1)}"
    before, between, after = _split(_render(tokenizer, [{"role": "user", "content": content}]), 2)
    return before, between, after


def _rendered(tokenizer: Any, messages: Sequence[Message], count: int) -> list[str]:
    """The template's text around the contents of ``count`` messages."""
    placed = [{**message, "content": _place(number)} for number, message in enumerate(messages)]
    return _split(_render(tokenizer, placed), count)


def _render(tokenizer: Any, messages: Sequence[Message]) -> str:
    try:
        template: str = tokenizer.get_chat_template()
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=_DATE_MACRO + template if "strftime_now" in template else template,
            add_generation_prompt=True,
            tokenize=False,
            date_string=_DATE.strftime("%d %b %Y"),
        )
    except Exception as error:  # what the template raises, and Jinja
        raise ConfigError(f"the model's chat template refuses the messages: {error}") from error
    return text


def _split(rendered: str, count: int) -> list[str]:
    parts = []
    for number in range(count):
        part, _, rest = rendered.partition(_place(number))
        if rendered.count(_place(number)) != 1:
            raise ConfigError(
                "the model's chat template does not print each message once and in order"
            )
        parts.append(part)
        rendered = rest
    return [*parts, rendered]


def _place(number: int) -> str:
    return f"\ue000{number}\ue000"  # of the private use area: in no text
