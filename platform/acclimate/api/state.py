"""What the routes work with: store, settings, identity, sequencer, health, metrics; made once for an application."""

import threading
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request

from acclimate.api import downloads
from acclimate.api.lane import Lane
from acclimate.config import Settings
from acclimate.cosignature_collector import CosignatureCollector
from acclimate.health import Health
from acclimate.metrics import Metrics
from acclimate.sequencer import Sequencer
from acclimate.service.identity import Identity
from acclimate.store import Store


@dataclass(frozen=True)
class Services:
    """What a route gets by its parameter.

    Attributes:
        begun: set once the application may serve.
        lane: threads for work on blobs, apart from the others.
        looks: threads for whoever asks how the server is.
        downloads: places and threads of what is streamed out of the blobs.
        making: held while a bundle or report is made, so that it is made once.
    """

    settings: Settings
    store: Store
    identity: Identity
    sequencer: Sequencer
    health: Health
    metrics: Metrics
    collector: CosignatureCollector
    begun: threading.Event = field(default_factory=threading.Event)
    lane: Lane = field(default_factory=Lane)
    looks: Lane = field(default_factory=Lane)
    downloads: Lane = field(default_factory=partial(Lane, downloads.OPEN))
    making: threading.Lock = field(default_factory=threading.Lock)


def services_of(request: Request) -> Services:
    """The services of the application that serves this request."""
    found: Services = request.app.state.services
    return found
