"""Routes about rounds that read: where a round stands, its files, records, stages, results."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from acclimate.api.access import Guarded, require_proof
from acclimate.api.answers import RECORD, AnyCaller, Here, RoundId, WholeNumber, answers
from acclimate.api.downloads import Download
from acclimate.api.state import Services
from acclimate.service import finding, judging, publish, reading
from acclimate.service.accounts import Account
from acclimate_competitions.errors import Refusal

router = APIRouter(route_class=Guarded, tags=["rounds"])
Start = Annotated[WholeNumber, Query(ge=0, le=2**53 - 1)]
Limit = Annotated[WholeNumber | None, Query(ge=1, le=2**31 - 1)]
Version = Annotated[WholeNumber | None, Query(ge=1, le=2**31 - 1, description="which version; else the newest")]
Whole = Annotated[bool, Query(description="with what a private holdout's public bundle withholds")]
_SUMMARY = {
    "round": "digits-2027-1-0123456789ab",
    "competition": "digits",
    "name": "2027-1",
    "title": "Handwritten digits under four rules",
    "phase": "open",
    "opens": "2027-03-01T00:00:00.000000Z",
    "closes": "2027-04-01T12:00:00.000000Z",
    "now": "2027-03-05T10:00:00.000000Z",
    "data_is_public": True,
    "entrants": 12,
    "submissions": 17,
}


@router.get("/v1/rounds", summary="All rounds, the newest first", responses=answers([_SUMMARY]))
def rounds(here: Here) -> list[dict[str, Any]]:
    """In short; each alone says more."""
    return reading.rounds_list(here.store)


@router.get(
    "/v1/rounds/{round_id}",
    summary="Where a round stands and what comes next",
    responses=answers(
        {
            **_SUMMARY,
            "next": "the round closes 2027-04-01T12:00:00.000000Z",
            "next_at": "2027-04-01T12:00:00.000000Z",
            "waiting_for": [],
            "problem": None,
            "stages": {"committed": 3},
            "phases": [{"phase": "draft", "at": "2027-02-01T09:00:00.000000Z"}],
            "log": {"first": 4, "last": 31},
        }
    ),
)
def status(round_id: RoundId, here: Here, account: AnyCaller) -> dict[str, Any]:
    """`next` says in words what happens next and when; `waiting_for` what it needs; `problem` what went wrong."""
    return reading.status(here.store, account, round_id)


@router.get(
    "/v1/rounds/{round_id}/definition",
    summary="The competition's definition",
    responses=answers("schema = 1", media="application/toml", meaning="the bytes that RoundDefined names"),
)
def definition(round_id: RoundId, here: Here) -> Response:
    """competition.toml, byte for byte."""
    return Response(reading.definition(here.store, round_id), media_type="application/toml")


@router.get(
    "/v1/rounds/{round_id}/files/{name:path}",
    summary="A public file of the round",
    responses=answers("…", media="application/octet-stream", meaning="the bytes that RoundDefined names"),
)
def public_file(round_id: RoundId, name: str, here: Here) -> Response:
    """Such as splits/digit/preparation.parquet or tokenizer.json."""
    digest = reading.public_file(here.store, round_id, name)
    stream, size = here.store.blobs.sized(digest)
    return Download(stream, size, lane=here.downloads, headers={"ETag": f'"{digest}"'})


@router.get("/v1/rounds/{round_id}/records", summary="The round's log records", responses=answers([RECORD]))
def records(round_id: RoundId, here: Here, start: Start = 0, limit: Limit = None) -> list[dict[str, Any]]:
    """In the order of the log; a record's canonical JSON is the entry's bytes. `start` is a log index, `limit` how many at most."""
    return reading.records(here.store, round_id, start=start, limit=limit)


@router.get(
    "/v1/rounds/{round_id}/ranking",
    summary="The ranking",
    responses=answers({"policy": {}, "ranking": [], "baselines": [], "tasks": {}}),
)
def ranking(round_id: RoundId, here: Here, account: AnyCaller, version: Version = None) -> Response:
    """ranking.json in canonical form, the newest version or the one asked for: once published, to all; once evaluated, to the round's organizer."""
    found = publish.document(here.store, account, round_id, version=version)
    return Response(found, media_type="application/json")


@router.get(
    "/v1/rounds/{round_id}/versions",
    summary="All versions of the ranking",
    responses=answers(
        [
            {
                "version": 1,
                "ranking": "sha256:" + "7" * 64,
                "reason": "",
                "at": "2027-05-02T10:00:00.000000Z",
                "correction": None,
                "corrected": None,
                "changes": [],
            }
        ]
    ),
)
def versions(round_id: RoundId, here: Here) -> list[dict[str, Any]]:
    """The first one first, each with its reason, its correction and whose rank or score it changed; none before a ranking is published."""
    return judging.versions(here.store, round_id)


@router.get(
    "/v1/rounds/{round_id}/bundle",
    summary="The bundle that an auditor verifies",
    responses=answers("…", media="application/zip", meaning="a ZIP for `acclimate verify`"),
)
def bundle(round_id: RoundId, request: Request, here: Here, account: AnyCaller, whole: Whole = False) -> FileResponse:
    """Once published, to all; once evaluated, to the round's organizer.

    Where the holdout stays private, the public bundle has neither shares nor holdout, predictions and scores; with `whole` the round's
    organizer and its auditor get them, where the header `Acclimate-Proof` signs the request.
    """
    whole = whole and publish.admit_whole(here.store, account, round_id)
    if whole and account is not None:
        require_proof(request, account)

    def make(services: Services, name: str, out: Path) -> None:
        from acclimate import bundle as bundles

        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            folder = bundles.write(services.store, services.store.blobs, name, Path(work) / "bundle", whole=whole)
            bundles.zip_(folder, out)

    return _made(here, account, round_id, "whole-bundle.zip" if whole else "bundle.zip", make, media="application/zip")


@router.get(
    "/v1/rounds/{round_id}/report",
    summary="The stability report",
    responses=answers("<!doctype html>", media="text/html", meaning="one HTML page"),
)
def report(round_id: RoundId, here: Here, account: AnyCaller) -> FileResponse:
    """Once published, to all; once evaluated, to the round's organizer."""

    def make(services: Services, name: str, out: Path) -> None:
        publish.report(services.store, name, out)

    return _made(here, account, round_id, "report.html", make, media="text/html; charset=utf-8")


def _made(
    here: Services,
    account: Account | None,
    given: str,
    file: str,
    make: Callable[[Services, str, Path], None],
    *,
    media: str,
) -> FileResponse:
    """A file of the round's results, made on first demand and again where the log of the round has grown, or witnesses have cosigned it.

    One is made at a time, and nobody waits for it in a thread that others need: whoever comes meanwhile is told to ask again.

    Raises:
        Refusal: phase_wrong; busy, while a file of results is being made.
    """
    from acclimate import bundle as bundles

    with here.store.snapshot() as tx:
        state = finding.find(tx, given)
        publish.require_results(tx, state, account)
        last, cosigned = tx.last(state.id), bundles.is_cosigned(tx, state)
    folder = here.settings.reports / state.id
    path = folder / f"{last}-{file if cosigned else f'uncosigned-{file}'}"
    if not path.exists():
        if not here.making.acquire(blocking=False):
            sentence = f"{file.partition('.')[0]} of round {state.id}: results are being made, one file at a time"
            raise Refusal("busy", sentence, hint="the same request again in a moment will do")
        try:
            if not path.exists():
                for made in (folder.parent, folder):
                    made.mkdir(parents=True, exist_ok=True, mode=0o700)
                draft = folder / f".draft-{file}"
                make(here, state.id, draft)
                draft.replace(path)
        finally:
            here.making.release()
    return FileResponse(path, media_type=media, filename=f"{state.id}-{file}")
