"""What vLLM's parameters mean, a token at a time and straight from their definitions."""

from collections.abc import Sequence

from engine.sampling.sampling_params import SamplingParams


def edited(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Logits of the next token as they are when a token is chosen, before the temperature."""
    never, scores = float("-inf"), list(logits)
    for token in range(len(scores)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = never
        for word in bad_words:
            so_far = list(output)[len(output) - len(word) + 1 :]
            if token == word[-1] and len(output) >= len(word) - 1 and so_far == list(word[:-1]):
                scores[token] = never
        if token in end_token_ids and len(output) < params.min_tokens:
            scores[token] = never
        scores[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        times = list(output).count(token)
        scores[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    return scores
