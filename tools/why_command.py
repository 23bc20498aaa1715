"""``kvstore why DIR --prompt-file F``: where the match of a prompt ends, and why."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvstore.config import expand_home
from kvstore.errors import ConfigError
from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import File, directory_argument
from tools.sizes import format_count
from tools.text import check_text, escape, read_stdin


def _why(
    directory: str,
    prompt_file: str,
    only: str | None,
    cache_salt: str,
    as_json: bool,
    **settings: Any,
) -> int:
    from engine.model.offline import OfflineModel
    from engine.text.document_file import read_document
    from kvstore.disk.offline.browse import Browser
    from kvstore.disk.slices import existing, reading

    existing(directory)
    check_text(cache_salt, "--cache-salt")
    text = read_stdin("prompt -") if prompt_file == "-" else read_document(Path(prompt_file))
    if not text:
        raise ConfigError(f"prompt {prompt_file}: it is empty")
    model = OfflineModel(**settings)
    with reading(directory) as env:
        explanations = _explanations(Browser(env), model, text, only, cache_salt)
        read_as, _, found = max(explanations, key=_closeness)
    if as_json:
        shown = {"path": str(expand_home(directory).absolute()), "read_as": read_as}
        click.echo(json_text(shown | found.as_dict()))
    else:
        click.echo(_describe(read_as, found))
    return 0 if found.is_cached else 1


def _explanations(
    browser: Any, model: Any, text: str, only: str | None, salt: str
) -> Iterator[tuple[str, int, Any]]:
    """One for each way in which the text may be meant, with the tokens before the text."""
    from engine.model.offline import document_tokens, prompt_tokens
    from kvstore.hashing import namespace_id
    from kvstore.why.explain import explain
    from kvstore.why.explanation import Asked

    registered = browser.namespaces()
    for identity in model.candidates(registered):
        description = registered.get(namespace_id(identity), {})
        described = _described(description, identity, registered.values())
        tokenizer = model.tokenizer(described)
        readings = {}
        template = described.get("document_template")
        if only != "document":
            readings["prompt"] = 0, prompt_tokens(tokenizer, text)
        if only != "prompt" and template:
            num_before = len(document_tokens(tokenizer, template, ""))
            readings["document"] = num_before, document_tokens(tokenizer, template, text)
        if not readings:
            raise ConfigError(
                f"--read-as document: no engine has used this cache with {model.source.name}, so "
                "how it reads documents is not known"
            )
        for read_as, (num_before, token_ids) in readings.items():
            asked = Asked(token_ids, identity, model.source.name, salt)
            found = explain(browser, asked, decode=partial(_decode, tokenizer))
            yield read_as, num_before, found


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False))


def _described(
    description: Mapping[str, Any], identity: Mapping[str, Any], others: Any
) -> Mapping[str, Any]:
    """How the model's texts become tokens: its own namespace says so, or one of the same model in
    another dtype, with another block size, …"""
    if "tokenizer" in description:
        return description
    alike = (other for other in others if other.get("weights") == identity["weights"])
    return next((other for other in alike if "tokenizer" in other), description)


def _closeness(reading: tuple[str, int, Any]) -> tuple[bool, int, bool, int]:
    """How well the cache fits a reading of the text: the best one is what was meant. What comes
    before the text is the same for all documents and tells little."""
    _, num_before, found = reading
    equal = found.difference.position if found.difference else found.cached_tokens
    tokens = max([equal, *(other.cached_tokens for other in found.elsewhere)])
    return found.is_cached, max(tokens - num_before, 0), found.was_there, tokens


def _describe(read_as: str, found: Any) -> str:
    lines = [
        f"why         {found.sentence}",
        f"cached      {found.cached_tokens:,} of {format_count(found.prompt_tokens, 'token')}, "
        f"{found.cached_blocks:,} of {format_count(found.prompt_blocks, 'block')} of "
        f"{found.block_size}",
        f"model       {escape(str(found.model))} (namespace {found.namespace[:12]})",
        f"read as     {'a document that ask is asked about' if read_as == 'document' else read_as}",
    ]
    if difference := found.difference:
        texts = (difference.before, difference.prompt, difference.cached)
        before, prompt, cached = (None if text is None else escape(text) for text in texts)
        lines += [
            "",
            f"token {difference.position:,}, after  {before!s}"
            if before
            else f"token {difference.position:,}",
            f"  the prompt    {prompt if prompt is not None else difference.prompt_tokens}",
            f"  the cache     {cached if cached is not None else difference.cached_tokens}",
        ]
    for other in found.elsewhere:
        lines += [
            "",
            f"elsewhere   {format_count(other.cached_tokens, 'token')} in namespace "
            f"{other.namespace[:12]} ({escape(str(other.model))})"
            + (f", salt {other.salt[:12]}" if other.salt else ""),
        ]
        lines += [
            f"  {name:12}  {_value(values['cached'])} there, {_value(values['asked'])} asked for"
            for name, values in other.fields.items()
        ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    text = escape(str(value))
    return text if len(text) <= 40 else f"{text[:12]}…"


why = Command(
    name="why",
    callback=_why,
    help="Explain what a cache holds of a prompt: where the match ends, and the reason. The text "
    "is read as a prompt and as a document of kvstore ask, and explained as what the cache holds "
    "more of. Exit status 0 when all of it is cached, 1 when a miss was explained. Does not load "
    "the model; an engine may be using the directory.",
    examples=(
        "kvstore why ~/.cache/kvstore/cache --prompt-file contract.txt",
        "kvstore why kv-cache --model ./llama --prompt-file - --json < prompt.txt",
    ),
    params=[
        directory_argument(),
        click.Option(
            ["--prompt-file"],
            required=True,
            metavar="FILE",
            type=File(),
            help="The text; - for stdin.",
        ),
        click.Option(
            ["--read-as", "only"],
            type=click.Choice(["prompt", "document"]),
            help="Read the text in this way only.",
        ),
        click.Option(["--cache-salt"], default="", help="As the request gives it."),
        JSON_OPTION,
    ],
    sections={
        "The model, as LLM is given it": [
            click.Option(["--model"], default="demo", show_default=True),
            click.Option(["--dtype"], default="auto", show_default=True),
            click.Option(["--block-size"], type=int, default=16, show_default=True),
            click.Option(["--max-model-len"], type=int, help="Counts with dynamic rope only."),
            click.Option(["--tokenizer"], metavar="PATH", help="A directory or tokenizer.json."),
            click.Option(["--revision"], help="Of a hub id."),
            click.Option(["--trust-remote-code"], is_flag=True),
            click.Option(["--deterministic"], is_flag=True),
        ]
    },
)
