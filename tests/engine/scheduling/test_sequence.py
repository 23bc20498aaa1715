import pytest

from engine.sampling.sampler import SampledToken
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions, Sequence
from engine.text.detokenizer import Detokenizer


class Letters:
    """A tokenizer whose token 0 is "a", 1 is "b", and so on."""

    def decode(self, token_ids, **_):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


LETTERS = Letters()


def sequence(tokenizer=LETTERS, max_tokens: int = 10, eos: int = 25, **params) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(
        request_id="0",
        index=0,
        params=sampling,
        cache=CacheOptions(),
        token_ids=[0, 1],
        num_prompt=2,
        max_len=2 + max_tokens,
        eos_token_ids=frozenset({eos}),
        detokenizer=Detokenizer(
            tokenizer,
            [0, 1],
            sampling.stop_strings,
            include_stop=sampling.include_stop_str_in_output,
        ),
        generator=None,
    )


def appended(one: Sequence, *token_ids: int) -> Sequence:
    for token_id in token_ids:
        assert one.finish_reason is None
        one.append(SampledToken(token_id))
    return one


@pytest.mark.parametrize("params", [{"stop_token_ids": [4]}, {}])
def test_a_token_that_ends_the_answer_is_not_in_its_text(params):
    """vLLM leaves both kinds out: the model's end token and the request's stop tokens."""
    output = appended(sequence(eos=4, **params), 2, 3, 4).output()
    assert (output.text, output.token_ids) == ("cd", [2, 3, 4])
    assert output.finish_reason == "stop"


def test_a_stop_token_is_named_and_the_end_token_is_not():
    assert appended(sequence(stop_token_ids=[4]), 2, 4).stop_reason == 4
    assert appended(sequence(eos=4), 2, 4).stop_reason is None


def test_an_ignored_end_token_is_text():
    one = appended(sequence(eos=4, ignore_eos=True, max_tokens=3), 2, 4, 3)
    assert (one.output().text, one.finish_reason) == ("ced", "length")


@pytest.mark.parametrize("ending", [{"eos": 4}, {"stop_token_ids": [4]}, {"stop": ["e"]}])
def test_what_ended_the_answer_is_in_its_text_if_asked_for(ending):
    output = appended(sequence(**ending, include_stop_str_in_output=True), 2, 3, 4).output()
    assert (output.text, output.finish_reason) == ("cde", "stop")


def test_a_stop_string_counts_once_it_ends_behind_the_least_number_of_tokens():
    one = appended(sequence(stop=["de", "c"], min_tokens=3), 2, 3, 4, 2)
    assert (one.output().text, one.stop_reason) == ("cde", "c")
    across = appended(sequence(stop=["de"], min_tokens=2), 2, 3, 4)
    assert (across.output().text, across.stop_reason) == ("c", "de")


def test_a_stop_string_ends_the_answer_and_its_text():
    output = appended(sequence(stop=["de"]), 2, 3, 4).output()
    assert (output.text, output.stop_reason) == ("c", "de")


class SplitCharacters(Letters):
    """Its token 26 is the letter "x" and the first byte of a character, which 27 completes."""

    def decode(self, token_ids, **_):
        text = "".join({26: "x<", 27: ">"}.get(each) or chr(ord("a") + each) for each in token_ids)
        return text.replace("<>", "é").replace("<", "\ufffd")


@pytest.mark.parametrize("last", [(), (4,)], ids=["length", "end token"])
def test_a_stop_string_is_found_in_what_an_unfinished_character_held_back(last):
    """The text was cut at it, and the answer said that its length had ended it."""
    one = sequence(SplitCharacters(), max_tokens=2 + len(last), stop=["x"], eos=4)
    output = appended(one, 2, 26, *last).output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("c", "stop", "x")


def test_what_was_held_back_ends_no_answer_before_the_least_number_of_tokens():
    one = sequence(SplitCharacters(), max_tokens=2, min_tokens=2, stop=["x"])
    output = appended(one, 2, 26).output()
    assert (output.text, output.finish_reason) == ("cx\ufffd", "length")


def test_waiting_for_tiers_after_a_pause_is_taken_from_no_time_in_the_queue():
    """A reader that paused its answer made the time in the queue shrink, down to nothing."""
    one = sequence()
    one.times.begin_promoting(103.0)
    one.times.end_promoting(105.0)
    one.times.begin_running(106.0)
    one.times.begin_promoting(110.0)
    one.times.end_promoting(130.0)
    metrics = Request("0", None, [0, 1], one.params, 100.0, [one]).metrics()
    assert (metrics.queue_s, metrics.promote_s) == (4.0, 22.0)
