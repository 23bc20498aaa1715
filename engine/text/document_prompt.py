"""The tokens of a document and of the questions about it: the document's do not depend on the
question (``engine.text.chat_template``)."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.chat_template import has_template, place, render, split, template_around
from engine.text.document_file import names_a_file, read_document
from engine.text.prompts import Message, PromptReader, as_message, check_text
from kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

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
    def of(
        cls, reader: PromptReader, document: str | os.PathLike[str] | Sequence[Message]
    ) -> "DocumentPrompt":
        """Of a text, of the file at a path, or of messages. Raises ``ConfigError`` as they do."""
        if isinstance(document, os.PathLike):
            return cls.of_text(reader, read_document(document))
        if not isinstance(document, str):
            return cls.of_messages(reader, document)
        if names_a_file(document):
            logger.warning(
                "the document is the text %r, not that file; pass a Path to read it", document
            )
        return cls.of_text(reader, document)

    @classmethod
    def of_text(cls, reader: PromptReader, text: str) -> "DocumentPrompt":
        """Raises ``ConfigError`` for an empty text, and for a template that has no place for it."""
        if not text.strip():
            raise ConfigError("the document is empty")
        before, between, after = template_parts(reader.need_tokenizer("a document"))
        check_text(text)
        reader.check_length(text, "document")
        return cls(
            reader.encode(before, is_template=True) + reader.encode(text),
            reader.encode(between, is_template=True),
            reader.encode(after, is_template=True),
        )

    @classmethod
    def of_messages(cls, reader: PromptReader, messages: Sequence[Message]) -> "DocumentPrompt":
        """A conversation so far; a question is the user's next message."""
        if not isinstance(messages, Sequence):
            raise ConfigError(f"a document is text, a Path, or messages, got {messages!r}")
        conversation = [as_message(message) for message in messages]
        if not conversation:
            raise ConfigError("the document is empty: it has no messages")
        reader.check_length("".join(each["content"] for each in conversation), "document")
        tokenizer = reader.need_tokenizer("a document")
        if not has_template(tokenizer):
            raise ConfigError("messages need a model with a chat template; give the text instead")
        *parts, after = template_around(tokenizer, [*conversation, {"role": "user", "content": ""}])
        prefix = []
        for template, message in zip(parts, conversation, strict=False):
            prefix += reader.encode(template, is_template=True) + reader.encode(message["content"])
        prefix += reader.encode(parts[-1], is_template=True)
        return cls(prefix, [], reader.encode(after, is_template=True))

    def ask(self, reader: PromptReader, question: str) -> list[int]:
        """The whole prompt of one question."""
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(f"a question is text, and not empty, got {question!r}")
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
    if not has_template(tokenizer):
        return tokenizer.bos_token or "", "\n\nQuestion: ", "\nAnswer:"
    content = f"{place(0)}\n\n{place(1)}"
    before, between, after = split(render(tokenizer, [{"role": "user", "content": content}]), 2)
    return before, between, after
