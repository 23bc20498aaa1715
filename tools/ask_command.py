"""``kvstore ask FILE -q …``: answer questions about a document that is read once, ever."""

import sys
from pathlib import Path
from typing import Any

import click

from engine.config import EngineConfig
from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.text.document_file import read_document
from kvstore.errors import ConfigError
from tools.command import JSON_OPTION, Command
from tools.engine_options import cache_dir_option, engine_options, engine_settings
from tools.json_text import json_text
from tools.parameters import File
from tools.settings import given_values, option_names, options_for
from tools.sizes import format_count
from tools.terminal import say
from tools.text import check_text, read_stdin

_SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 128}


def _ask(
    file: str,
    questions: tuple[str, ...],
    cache_salt: str | None,
    as_json: bool,
    **parameters: Any,
) -> int:
    with option_names(EngineConfig, SamplingParams):
        return _answer(file, questions, cache_salt, as_json, parameters)


def _answer(
    file: str,
    questions: tuple[str, ...],
    cache_salt: str | None,
    as_json: bool,
    parameters: dict[str, Any],
) -> int:
    check_text(cache_salt or "", "--cache-salt")
    for question in questions:
        check_text(question, "-q")
        if not question.strip():
            raise ConfigError("-q: a question is empty; write what you want to know")
    settings = engine_settings(parameters)
    sampling = SamplingParams(**_SAMPLING_DEFAULTS | given_values(parameters, SamplingParams))
    text = read_stdin("document -") if file == "-" else read_document(Path(file))
    if not text.strip():
        raise ConfigError(f"document {file}: it is empty; give it some text to ask about")

    if sys.stderr.isatty():
        say(f"loading the model {settings['model']}")
    from engine.llm import LLM
    from engine.text.document_prompt import DocumentPrompt
    from engine.text.prompts import PromptReader

    def check_document(tokenizer: Any, context_len: int) -> None:
        DocumentPrompt.of_text(PromptReader(tokenizer, context_len), text).check_fits(context_len)

    with LLM(**settings, before_weights=check_document) as llm:
        disk = llm.stats().tiers["disk"]
        if disk.state == "off" and settings.get("enable_prefix_caching", True):
            say(f"going on without the disk tier: {disk.reason}")
        document = llm.document(text, prefill=False, cache_salt=cache_salt)
        answers = []
        for question in questions:
            output = document.ask(question, sampling)
            answers.append(_as_json(question, output))
            if not as_json:
                _print_answer(question, output, is_only=len(questions) == 1)
        if as_json:
            result = {
                "model": settings["model"],
                "document": {"tokens": document.num_tokens},
                "answers": answers,
            }
            click.echo(json_text(result))
    return 0


def _as_json(question: str, output: RequestOutput) -> dict[str, Any]:
    sample, metrics = output.outputs[0], output.metrics
    answer: dict[str, Any] = {
        "question": question,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": metrics.cached_tokens,
        "computed_tokens": metrics.computed_tokens,
        "ttft_s": metrics.ttft_s,
        "total_s": metrics.total_s,
        "finish_reason": sample.finish_reason,
    }
    if sample.logprobs is not None:
        answer["logprobs"] = _logprobs(sample)
    if len(output.outputs) > 1:
        answer["samples"] = [
            {
                "text": each.text,
                "token_ids": each.token_ids,
                "finish_reason": each.finish_reason,
                **({} if each.logprobs is None else {"logprobs": _logprobs(each)}),
            }
            for each in output.outputs
        ]
    return answer


def _logprobs(sample: CompletionOutput) -> list[dict[str, Any]]:
    """For each token its own log-probability, and the most likely ones; none unless asked for."""
    if sample.logprobs is None:
        return []
    rows = []
    for token_id, known in zip(sample.token_ids, sample.logprobs, strict=True):
        entries = [
            {"token_id": other, "token": each.decoded_token, "logprob": each.logprob}
            for other, each in known.items()
        ]
        (own,) = (entry for entry in entries if entry["token_id"] == token_id)
        rows.append(own | {"top": sorted(entries, key=lambda entry: -entry["logprob"])})
    return rows


def _print_answer(question: str, output: RequestOutput, *, is_only: bool) -> None:
    if not is_only:
        click.echo(f"> {question}")
    for number, sample in enumerate(output.outputs, start=1):
        label = f"[{number}] " if len(output.outputs) > 1 else ""
        click.echo(label + sample.text.strip())
        for row in _logprobs(sample):
            others = "".join(f"  {each['logprob']:.3f} {each['token']!r}" for each in row["top"])
            click.echo(f"    {row['logprob']:.3f} {row['token']!r:16} of{others}")
    if not is_only:
        click.echo()
    sys.stdout.flush()
    metrics = output.metrics
    found = [f"{count:,} from {tier}" for tier, count in metrics.cached_tokens.items() if count]
    say(
        format_count(len(output.prompt_token_ids), "prompt token")
        + ": "
        + ", ".join([*found, f"{metrics.computed_tokens:,} computed"])
        + f"; first token after {metrics.ttft_s:.2f} s, all after {metrics.total_s:.2f} s"
    )


ask = Command(
    name="ask",
    callback=_ask,
    help="Answer questions about the text in FILE (- for stdin), one after another. What the model "
    "made of the document is kept in --cache-dir, so that the next question, also one asked next "
    "week, does not read it again.",
    examples=(
        'kvstore ask contract.txt -q "Who are the parties?" -q "When does it end?"',
        'kvstore ask notes.md -q "What is missing?" --model ./llama --json',
    ),
    params=[
        click.Argument(["file"], metavar="FILE", type=File()),
        click.Option(
            ["-q", "--question", "questions"], multiple=True, required=True, help="May be repeated."
        ),
        cache_dir_option(),
        click.Option(
            ["--cache-salt"],
            help="Keep apart what is cached: it is found with the same salt only.",
        ),
        JSON_OPTION,
    ],
    sections={
        "Engine": engine_options(skip={"seed"}),
        "Sampling": [
            *options_for(SamplingParams, skip={"seed"}, defaults=_SAMPLING_DEFAULTS),
            click.Option(
                ["--seed"],
                type=int,
                help="Above --temperature 0 the same seed gives the same draws; the same answer, "
                "cached or not, with --deterministic. It is LLM's seed and SamplingParams' at "
                "once.  [default: 0]",
            ),
        ],
    },
)
