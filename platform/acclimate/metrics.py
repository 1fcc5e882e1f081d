"""Prometheus metrics of one API process: a registry of its own, no global state.

What may be here. `GET /v1/rounds` tells everybody each round's phase and how many entrants and submissions it has, `…/stages` the
state of each piece of work, and the log every record as it comes. So sums of these over all rounds tell nothing new, and no metric
has a label that names a round, an account or a submission. What the public does not learn before a round's close is how large a
submitted model is: a size to the byte would give away a well-known model. So uploaded bytes and the free bytes of the blobs
are given in steps of 1 GiB. How often a route was called and refused does show that somebody was at work, which is one of the reasons why the
page is there only where the settings say so.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from acclimate import __version__
from acclimate.facts import Facts

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STEP = 1 << 30
"""Bytes: how coarse the numbers are that could tell a model's size."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


@dataclass(frozen=True)
class Seen:
    """What a scrape shows of the installation; None where it can't be told now."""

    facts: Facts | None
    offset: float | None
    free: int | None
    checks: dict[str, bool]


class Metrics:
    """The metrics of one application.

    Args:
        code: the code digest.
        see: called at each scrape for what only the store knows.
    """

    def __init__(self, *, code: str, see: Callable[[], Seen]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._see = see
        labels = ("method", "route", "status")
        self._requests = Counter(
            "acclimate_http_requests", "Requests answered, by route template.", labels, registry=self._registry
        )
        self._seconds = Histogram(
            "acclimate_http_request_seconds",
            "Seconds from a request's first byte to its answer's last.",
            labels[:2],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._active = Gauge("acclimate_http_requests_in_progress", "Requests under way.", registry=self._registry)
        build = Gauge("acclimate_build_info", "Version and code digest.", ("version", "code"), registry=self._registry)
        build.labels(__version__, code).set(1)
        self._uploaded, self._lock = 0, threading.Lock()
        self._registry.register(self)

    def began(self) -> None:
        """A request has come."""
        self._active.inc()

    def ended(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """It was answered; `route` is the template, so that there are as many series as routes."""
        self._active.dec()
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def uploaded(self, size: int) -> None:
        """So many bytes of uploads have come."""
        with self._lock:
            self._uploaded += size

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What is looked up at each scrape; called by the registry."""
        seen = self._see()
        uploads = CounterMetricFamily("acclimate_upload_bytes", "Bytes of uploads, in steps of 1 GiB.")
        uploads.add_metric([], self._uploaded // STEP * STEP)
        yield uploads
        yield _gauge("acclimate_check_ok", "What /readyz looks at: 1 fine, 0 not.", seen.checks, label="check")
        yield _gauge("acclimate_ready", "Whether /readyz answers 200.", float(all(seen.checks.values())))
        if seen.offset is not None:
            about = "Seconds by which the database's clock is ahead of this machine's."
            yield _gauge("acclimate_database_clock_offset_seconds", about, seen.offset)
        if seen.free is not None:
            about = "Free bytes of the blobs' folder, in steps of 1 GiB."
            yield _gauge("acclimate_blobs_free_bytes", about, seen.free // STEP * STEP)
        if seen.facts is not None:
            yield from _of(seen.facts)

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry would otherwise ask the store while the application is made."""
        return iter(())


def _of(facts: Facts) -> Iterator[Metric]:
    yield _gauge("acclimate_log_entries", "Entries of the log.", facts.log.entries)
    yield _gauge("acclimate_log_unsigned_entries", "Entries that no checkpoint holds yet.", facts.log.unsigned)
    about = "Seconds since the oldest entry that no checkpoint holds; 0 where all are signed."
    yield _gauge("acclimate_log_unsigned_age_seconds", about, facts.log.unsigned_age)
    if facts.log.checkpoint_age is not None:
        about = "Seconds since the newest checkpoint was signed."
        yield _gauge("acclimate_log_checkpoint_age_seconds", about, facts.log.checkpoint_age)
    if facts.cosigned is not None:
        about = "Entries of the newest checkpoint that a witness cosigned."
        yield _gauge("acclimate_witness_entries", about, dict(facts.cosigned.witnesses), label="witness")
        about = "Entries that no checkpoint with a quorum's cosignatures holds yet."
        yield _gauge("acclimate_log_uncosigned_entries", about, facts.cosigned.missing)
        about = "Seconds since the oldest entry that no checkpoint with a quorum's cosignatures holds; 0 where all are in one."
        yield _gauge("acclimate_log_uncosigned_age_seconds", about, facts.cosigned.age)
    yield _gauge("acclimate_rounds", "Rounds by phase.", facts.rounds, label="phase")
    yield _gauge("acclimate_stages", "Pieces of work by state, of all rounds.", facts.stages, label="state")
    yield _gauge("acclimate_accounts", "Accounts by role.", facts.accounts, label="role")
    leads = facts.lease is not None and facts.lease > 0
    yield _gauge("acclimate_dispatch_leader", "Whether a dispatcher leads.", float(leads))
    if facts.lease is not None:
        about = "Seconds for which its lease still holds; negative once it is over."
        yield _gauge("acclimate_dispatch_lease_seconds", about, facts.lease)
    if facts.pool is not None:
        yield _gauge("acclimate_pool_machines", "Machines that the dispatcher last saw.", facts.pool.machines)
        yield _gauge("acclimate_pool_slots", "Attempts that the pool takes at once.", facts.pool.slots)
        yield _gauge(
            "acclimate_pool_problem", "Whether the dispatcher has no pool to work with.", float(facts.pool.problem)
        )
        yield _gauge(
            "acclimate_pool_age_seconds", "Seconds since the dispatcher last wrote of its pool.", facts.pool.age
        )


def _gauge(name: str, about: str, value: float | dict[str, int] | dict[str, bool], *, label: str = "") -> Metric:
    if not isinstance(value, dict):
        return GaugeMetricFamily(name, about, value=value)
    family = GaugeMetricFamily(name, about, labels=[label])
    for key, count in sorted(value.items()):
        family.add_metric([key], float(count))
    return family
