"""The application: routes, problems, the OpenAPI description. Imports neither ray, torch nor mlflow."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from acclimate import __version__, database, facts, installation
from acclimate.api import (
    access,
    accounts,
    actions,
    audits,
    health,
    logs,
    mirrors,
    pool,
    problems,
    rounds,
    submissions,
    work,
)
from acclimate.api.requests import Requests
from acclimate.api.state import Services
from acclimate.checkpoints import Copies
from acclimate.config import Settings
from acclimate.cosignature_collector import CosignatureCollector
from acclimate.health import Health
from acclimate.metrics import Metrics
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import Store
from acclimate.witness_client import parse_endpoints

_log = logging.getLogger("acclimate.api")

_ABOUT = """Blind evaluation rounds: sealed holdout, equal preparation, verifiable ranking.

A *signed request* is `{type, round, fields, by, sig}`. The server adds the receipt time by the database's clock, applies the
rules of the round, appends the record to the log and answers with its index. The same request again gets the same answer.
Errors are problem details (RFC 9457) with a `code`, a `hint` and a `request_id`.
"""


def create_app(settings: Settings, *, clock: database.Clock | None = None) -> FastAPI:
    """The API over a data folder, which is made on first use.

    Args:
        settings: the settings in force.
        clock: replaces the database's clock; for tests only.

    Raises:
        Refusal: data_version, config_invalid, key_refused, no_space, busy; log_inconsistent at start-up.
    """
    store = Store.open(settings, clock=clock)
    known = identity.begin(settings, store)
    # Nothing is written into a database that was upgraded or exchanged under this process.
    store = store.fenced(partial(installation.stands, found=known.installation.id, signs=known.vkey))
    copies = Copies.asking(settings, store.blobs, known.signer.verifier)
    sequencer = Sequencer(store, known.signer, copies=copies)
    collector = CosignatureCollector(store, sequencer, parse_endpoints(settings.witnesses), quorum=settings.quorum)
    watch = Health(store, settings, sequencer, collector)
    metrics = Metrics(code=known.code, see=watch.seen)
    services = Services(settings, store, known, sequencer, watch, metrics, collector)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(begin, services)
        try:
            yield
        finally:
            await run_in_threadpool(collector.close)
            await run_in_threadpool(sequencer.close)
            store.close()

    app = FastAPI(
        title="Acclimate",
        version=__version__,
        description=_ABOUT,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    for module in (health, accounts, rounds, actions, audits, submissions, logs, mirrors, pool, work):
        # As they are, not through include_router, whose copies differ between versions of FastAPI: the routes are the guarded ones.
        app.router.routes.extend(module.router.routes)
    app.add_route("/v1/openapi.json", _openapi, methods=["GET"], include_in_schema=False)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    problems.install(app)
    app.add_middleware(Requests, metrics=metrics)
    return app


def begin(services: Services) -> None:
    """Make an application ready to serve, once: read all rounds, check and sign the log, look at the clocks.

    Uvicorn would do it, too, but what is refused here would be a traceback of it then.

    Raises:
        Refusal: log_inconsistent, busy, database_unreachable, no_space.
    """
    if services.begun.is_set():
        return
    services.store.warm()
    services.sequencer.start()
    services.collector.start()
    if warning := facts.clock_warning(facts.clock_offset(services.store)):
        _log.warning("%s", warning)
    # So that the first who asks need not wait for the first look.
    services.health.state()
    services.begun.set()


async def _openapi(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, with who may call each route from the one table."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schema.setdefault("components", {})["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "an account's API token, acc_…"}
    }
    for route in app.routes:
        if not isinstance(route, APIRoute):
            continue
        for method in route.methods or ():
            row = access.ACCESS[method, route.path]
            operation = schema["paths"][route.path_format][method.lower()]
            who = "anyone" if "anonymous" in row.roles else ", ".join(sorted(row.roles))
            operation["description"] += f"\n\nWho: {who}{f' ({row.note})' if row.note else ''}."
            operation["security"] = [{"token": []}] + ([{}] if "anonymous" in row.roles else [])
    app.openapi_schema = schema
    return schema
