"""``kvstore serve``: OpenAI's HTTP interface over one model and its cache."""

import importlib.util
from typing import Any

import click

from engine.config import EngineConfig
from kvstore.errors import ConfigError
from tools.command import Command
from tools.engine_options import cache_dir_option, engine_options, engine_settings
from tools.parameters import Number
from tools.settings import option_names
from tools.terminal import say


def _serve(
    host: str,
    port: int,
    api_key: str | None,
    served_model_name: str | None,
    grace: float,
    **parameters: Any,
) -> int:
    if not all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")):
        raise ConfigError("serve needs FastAPI and uvicorn: pip install fastapi uvicorn")
    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key: it is empty; give a key, or leave it out")

    from engine.server.listener import Listener

    listener = Listener(host, port)
    try:
        if api_key is None and not listener.is_loopback:
            say(
                f"anyone who reaches {listener.url} may use it: give an --api-key, or listen on "
                "127.0.0.1"
            )
        with option_names(EngineConfig):
            settings = engine_settings(parameters)
            from engine.async_llm import AsyncLLM
            from engine.server.running import serve

            llm = AsyncLLM(**settings)
    except BaseException:
        listener.close()
        raise
    name = served_model_name or settings["model"]
    serve(
        llm,
        listener,
        model_name=name,
        api_key=api_key,
        grace_s=grace,
        on_ready=lambda: click.echo(f"serving {name} at {listener.url}"),
    )
    return 0


serve = Command(
    name="serve",
    callback=_serve,
    help="Serve a model over HTTP with OpenAI's interface, and keep what it has read in "
    "--cache-dir. Prints one line with the address when it is ready. SIGTERM and Ctrl-C end it "
    "after the answers under way, and write what is not on disk yet.",
    examples=(
        "kvstore serve --model ./llama --cache-dir ~/kv-cache",
        "kvstore serve --host 0.0.0.0 --port 8080 --api-key SECRET",
    ),
    params=[
        click.Option(
            ["--host"],
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; 0.0.0.0 for all of this machine's.",
        ),
        click.Option(
            ["--port"],
            type=click.IntRange(0, 65535),
            default=8000,
            show_default=True,
            help="0 takes any free one.",
        ),
        click.Option(
            ["--api-key"],
            envvar="KVSTORE_API_KEY",
            show_envvar=True,
            help="What clients must show as a bearer token. Other users of this machine can read a "
            "command line, and not the environment variable.",
        ),
        click.Option(
            ["--served-model-name"], help="What clients call the model.  [default: as --model]"
        ),
        click.Option(
            ["--grace"],
            type=Number(0),
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="What answers under way get to end by themselves after SIGTERM or Ctrl-C.",
        ),
        cache_dir_option(),
    ],
    sections={"Engine": engine_options()},
)
