"""Whether what a client asks for fits the context, and whether it can ever fit the server's limits.

What fits only later is the engine's to refuse (``engine.scheduling.backlog``).
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.config import EngineConfig
from engine.sampling.sampling_params import SamplingParams
from engine.server.bodies import Body
from engine.server.errors import ApiError


def fit(
    body: Body,
    params: SamplingParams,
    prompt_lens: Sequence[int],
    config: EngineConfig,
    max_model_len: int,
) -> SamplingParams:
    """The parameters for prompts of so many tokens. The limit of a client that gave none is cut to
    what ``max_total_tokens`` leaves. Raises ``ApiError`` with the number that would do."""
    _check_count(len(prompt_lens), config)
    cut = params.truncate_prompt_tokens
    if cut is not None:
        most = max_model_len - 1 if cut == -1 else cut
        prompt_lens = [min(each, most) for each in prompt_lens]
    if max(prompt_lens, default=0) >= max_model_len:
        return params  # the engine says how much of the prompt to cut
    _check_context(body, prompt_lens, max_model_len)
    limit = config.max_total_tokens
    num_samples = params.n * len(prompt_lens)
    if limit is None or _most_tokens(params, prompt_lens, max_model_len) <= limit:
        return params
    room = (limit - sum(prompt_lens)) // num_samples
    name, asked = body.limit()
    if room < 1:
        message = (
            f"the prompts have {sum(prompt_lens)} tokens, and this server takes {limit} of prompts "
            f"and answers together: cut at least {sum(prompt_lens) + num_samples - limit}"
        )
        raise ApiError(400, message, code="context_length_exceeded")
    if asked is None:
        return replace(params, max_tokens=room)
    message = (
        f"{name}: {num_samples} answers of {asked} tokens behind {sum(prompt_lens)} of prompts are "
        f"more than the {limit} that this server takes together; ask for at most {room}"
    )
    raise ApiError(400, message, param=name, code="context_length_exceeded")


def _check_count(num_prompts: int, config: EngineConfig) -> None:
    if config.max_num_waiting is None:
        return
    most = config.max_num_seqs + config.max_num_waiting
    if num_prompts > most:
        message = f"prompt: {num_prompts} at once are more than this server takes; send at most"
        raise ApiError(400, f"{message} {most}", param="prompt")


def _check_context(body: Body, prompt_lens: Sequence[int], max_model_len: int) -> None:
    name, asked = body.limit()
    for num_prompt in prompt_lens:
        room = max_model_len - num_prompt
        if asked is not None and room < asked:
            message = (
                f"{name}: {asked} tokens behind a prompt of {num_prompt} are more than the context "
                f"of {max_model_len}; ask for at most {room}"
            )
            raise ApiError(400, message, param=name, code="context_length_exceeded")


def _most_tokens(params: SamplingParams, prompt_lens: Sequence[int], max_model_len: int) -> int:
    """As the backlog counts them."""
    most = max_model_len if params.max_tokens is None else params.max_tokens
    return sum(each + params.n * min(most, max_model_len - each) for each in prompt_lens)
