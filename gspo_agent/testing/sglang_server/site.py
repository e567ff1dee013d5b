"""A port that is opened, closed in the middle of whatever goes on, and opened again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web


class Site:
    def __init__(self, host: str, port: int) -> None:
        """
        Args:
            port: 0 takes a free one at the first start and keeps it.
        """
        self.host, self.port = host, port
        self._runner: web.AppRunner | None = None

    @property
    def up(self) -> bool:
        return self._runner is not None

    async def open(self, routes: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]) -> None:
        """
        Args:
            routes: By methods and path, "POST|PUT /generate".
        """
        app = web.Application(client_max_size=1 << 30)
        for line, handler in routes.items():
            methods, path = line.split()
            for method in methods.split("|"):
                app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, self.host, self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    def cut(self) -> web.AppRunner | None:
        """Nobody can connect any more, and every connection is gone; what is left is to be cleaned up."""
        runner, self._runner = self._runner, None
        if runner is not None and runner.server is not None:
            for site in runner.sites:
                if (listener := getattr(site, "_server", None)) is not None:
                    listener.close()
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        return runner
