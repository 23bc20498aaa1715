"""What a model's chat template prints around the texts of a conversation.

The parts of a prompt, template and texts, are tokenised apart and joined, so that no token spans a
border, and a text that looks like a special token is not read as one.
"""

import datetime
from collections.abc import Sequence
from typing import Any

from engine.text.prompts import Message
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


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def template_around(
    tokenizer: Any, messages: Sequence[Message], *, for_answer: bool = True
) -> list[str]:
    """The template's text before, between and after the contents of ``messages``; with
    ``for_answer`` it ends where the model's next message begins.

    Raises ``ConfigError`` for messages that the template refuses, or prints twice.
    """
    placed = [{**message, "content": place(number)} for number, message in enumerate(messages)]
    return split(render(tokenizer, placed, for_answer=for_answer), len(messages))


def render(tokenizer: Any, messages: Sequence[Message], *, for_answer: bool = True) -> str:
    try:
        template: str = tokenizer.get_chat_template()
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=_DATE_MACRO + template if "strftime_now" in template else template,
            add_generation_prompt=for_answer,
            tokenize=False,
            date_string=_DATE.strftime("%d %b %Y"),
        )
    except Exception as error:  # what the template raises, and Jinja
        raise ConfigError(f"the model's chat template refuses the messages: {error}") from error
    return text


def split(rendered: str, count: int) -> list[str]:
    """The text around the first ``count`` places."""
    parts = []
    for number in range(count):
        part, _, rest = rendered.partition(place(number))
        if rendered.count(place(number)) != 1:
            raise ConfigError(
                "the model's chat template does not print each message once and in order"
            )
        parts.append(part)
        rendered = rest
    return [*parts, rendered]


def place(number: int) -> str:
    """Stands for a text."""
    return f"\ue000{number}\ue000"  # of the private use area: in no text
