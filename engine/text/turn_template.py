"""The chat template's texts around the turns of a conversation, taken from it once."""

from dataclasses import dataclass

from engine.text.chat_template import has_template, place, render, template_around
from engine.text.prompts import PromptReader
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TurnTemplate:
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
    def of(cls, reader: PromptReader, system: str | None) -> "TurnTemplate":
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
