"""What the routes work with: store, settings, identity, sequencer; made once for an application."""

import threading
from dataclasses import dataclass, field

from fastapi import Request

from acclimate.config import Settings
from acclimate.sequencer import Sequencer
from acclimate.service.identity import Identity
from acclimate.store import Store


@dataclass(frozen=True)
class Services:
    """What a route gets by its parameter; `making` is held while a bundle or report is made, so that it is made once."""

    settings: Settings
    store: Store
    identity: Identity
    sequencer: Sequencer
    making: threading.Lock = field(default_factory=threading.Lock)


def services_of(request: Request) -> Services:
    """The services of the application that serves this request."""
    found: Services = request.app.state.services
    return found
