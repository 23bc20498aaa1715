"""The address a server listens on, taken before a model is loaded. Importable without torch."""

import contextlib
import ipaddress
import socket

from kvstore.errors import ConfigError


class Listener:
    """A bound address. Nobody is answered before ``serve`` listens."""

    def __init__(self, host: str, port: int) -> None:
        """``port`` 0 takes any free one. Raises ``ConfigError`` for what cannot be had."""
        try:
            ((family, _, _, _, address), *_) = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.socket = socket.socket(family)
            with contextlib.ExitStack() as on_error:
                on_error.callback(self.socket.close)
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(address)
                on_error.pop_all()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot listen on {host} port {port}: {reason}; choose another --host or --port "
                "(0 takes any free port)"
            ) from None
        self.host, self.port = self.socket.getsockname()[:2]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def close(self) -> None:
        self.socket.close()
