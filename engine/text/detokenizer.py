"""From tokens to text, a token at a time.

A token is not a piece of text: a character may take several (byte fallback, byte-level BPE), and
whether a word begins with a space depends on what stands before it. So text is always taken as the
difference of two decodings that begin at the same earlier token, and an unfinished character at
the end is held back until it is whole.
"""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)

# Tokens of the prompt that the first output token is decoded behind.
_PROMPT_TOKENS = 6

# A character has at most four bytes, hence four tokens. What is still undecodable after twice as
# many is no character, but for what may be the beginning of one at its end; holding it would make
# every further decoding longer.
_MAX_HELD_TOKENS = 8
_MOST_OF_A_CHARACTER = 3


class Detokenizer:
    """The text of one output sequence, cut at the first stop string.

    tokenizer         has ``decode`` of transformers' tokenizers
    prompt_token_ids  what stands before the output; only its end is used
    stop              strings that end the text; neither they nor what follows stay in ``text``
    include_stop      the string that ended the text stays in it
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        # Tokens from where both decodings begin; the first num_read of them are in the text.
        self._window = list(prompt_token_ids[-_PROMPT_TOKENS:])
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        self._num_delivered = 0
        self.text = ""
        self.stop_reason: str | None = None

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add one token. Returns the stop string that this completes, or None.

        With ``may_stop`` off none is looked for that ends in what this adds. After a stop string
        further tokens must not be added.
        """
        assert self.stop_reason is None, "the text has ended"
        self._window.append(token_id)
        decoded = self._decode(self._window)
        is_whole = len(decoded) > len(self._read_text) and not decoded.endswith(_REPLACEMENT)
        if is_whole:
            return self._advance(decoded, may_stop)
        if len(self._window) - self._num_read >= _MAX_HELD_TOKENS:
            begun = self._window[-_MOST_OF_A_CHARACTER:]
            del self._window[-_MOST_OF_A_CHARACTER:]
            stop = self._advance(self._decode(self._window), may_stop)
            self._window += begun
            return stop
        return None

    def finish(self, *, may_stop: bool = True) -> str | None:
        """Add what was held back as an unfinished character. Returns as ``append`` does."""
        if self.stop_reason is not None or len(self._window) == self._num_read:
            return None
        return self._advance(self._decode(self._window), may_stop)

    def take_delta(self, *, is_finished: bool = False) -> str:
        """Text that was not taken before. What may become a stop string is kept until it can't."""
        end = len(self.text)
        if not is_finished and self.stop_reason is None:
            end -= self._num_possible_stop()
        delta = self.text[self._num_delivered : end]
        self._num_delivered = max(self._num_delivered, end)
        return delta

    def token_text(self, token_id: int) -> str:
        """What one token says on its own, special tokens included; to show logprobs."""
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _advance(self, decoded: str, may_stop: bool = True) -> str | None:
        new = decoded[len(self._read_text) :]
        if not new:  # special tokens: they give the next one no context, so the old one stays
            del self._window[self._num_read :]
            return None
        # The next token is decoded behind the tokens that were new now.
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        num_old = len(self.text)
        self.text += new
        return self._cut(num_old) if may_stop else None

    def _cut(self, num_old: int) -> str | None:
        """End the text at the first stop string that ends behind what was there before."""
        found = [
            (at, stop)
            for stop in self._stop
            if (at := self.text.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if found:
            at, self.stop_reason = min(found, key=lambda match: match[0])
            self.text = self.text[: at + (len(self.stop_reason) if self._include_stop else 0)]
        return self.stop_reason

    def _num_possible_stop(self) -> int:
        """Length of the longest end of the text that may become a stop string and go."""
        if self._include_stop:
            return 0
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
