"""The application: routes, error handlers and the layers before them; starts nothing."""

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from seawall.process.supervisor import Supervisor
from seawall.server import chat, completions, dashboard, native, operations, text_routes
from seawall.server.errors import handlers
from seawall.server.gate import Gate
from seawall.server.service import Service


def create_app(service: Service, supervisor: Supervisor, version: str) -> FastAPI:
    """The application that serves one engine."""
    options = service.options
    layers = [Middleware(Gate, options=options, metrics=service.metrics)]
    if options.cors_origins:
        layers.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
            ),
        )
    app = FastAPI(
        title="seawall",
        version=version,
        middleware=layers,
        # Pages of documentation load scripts from elsewhere; the OpenAPI document does not.
        docs_url=None,
        redoc_url=None,
        exception_handlers=handlers(service.note_error),
    )
    app.router.redirect_slashes = False
    app.include_router(native.routes(service))
    app.include_router(completions.routes(service))
    app.include_router(chat.routes(service))
    app.include_router(text_routes.routes(service))
    app.include_router(operations.routes(service, supervisor))
    app.include_router(dashboard.routes(service, supervisor))
    return app
