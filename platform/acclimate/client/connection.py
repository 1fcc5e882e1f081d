"""The client's connection: one method for each route of `/v1`.

A refusal of the server arrives as the same Refusal, with its code, sentence, hint and problems. A call that may be repeated (all but making an
account: a signed request is answered the same when sent twice) is repeated with growing pauses while the server can't be
reached or says 503. Bodies of any size are streamed in pieces of at most 1 MiB.
"""

import base64
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import acclimate
from acclimate.client import answers
from acclimate.client.addresses import below, round_path, segment, stage_path, submission_path
from acclimate.client.problems import fitting, no_room, odd_answer, refusal_of, require_pace, unreachable
from acclimate.files import is_full
from acclimate.log import LONGEST_RECEIPT, parse_note
from acclimate.notes import LARGEST_NOTE
from acclimate_competitions import digests, reading, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

CHUNK = 1 << 20
LARGEST_ANSWER = 1 << 28
"""Bytes of an answer that is held in memory; a page of the log has a limit of its own."""
_LARGEST_PAGE = 1000 * (records.MAX_BYTES + 1)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
_NO_LOG = "no log of Acclimate shows this: check the address, keep the message, and ask the server's operator"
ANYTHING: Mapping[str, Any] = {}
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Json = Any
Request = dict[str, Any]
"""A signed request, as records.sign returns it."""
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Client:
    """A connection to one server; close it, or use it as a context manager.

    Args:
        url: where the server is, such as https://rounds.example.org.
        token: the account's API token; None for what everybody may read.
        patience: seconds for which a repeatable call is tried again while the server can't be reached.
        key: gives the account's key, where a request must be signed; None: such requests are refused by the server.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        patience: float = 8.0,
        key: Callable[[], Ed25519PrivateKey] | None = None,
        renewal: str = "",
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise Refusal("config_invalid", f"server {url!r}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Refusal(
                "config_invalid", f"server {url!r} is not an http address", hint="such as https://example.org"
            )
        self.url = str(parsed).rstrip("/")
        self._patience, self._key, self._renewal = patience, key, renewal
        headers = {"User-Agent": f"acclimate/{acclimate.__version__}"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(60.0, connect=5.0),
            # A proxy is never the way to this machine itself.
            trust_env=parsed.host not in LOOPBACK,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ---- server and accounts ---------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the server answers and can serve; never waits or raises."""
        try:
            return self._http.get("/readyz", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def server(self) -> dict[str, Any]:
        """{version, origin, log (vkey), evaluators, code, witnesses, quorum, now, challenge}."""
        return self._object("GET", "/v1/server", form=answers.SERVER)

    def terms(self) -> dict[str, Any]:
        """As `server`, where what a round is defined by must be in it: now, code, evaluators, witnesses, quorum."""
        return self._object("GET", "/v1/server", form=answers.TERMS)

    def pool(self) -> dict[str, Any]:
        """{leads, runner, slots, machines: [{name, cpus, gpus, memory, labels}], problem, at, age (seconds), now}."""
        return self._object("GET", "/v1/pool")

    def make_account(
        self, name: str, *, role: str, ed25519: str, proof: str, challenge: str, invitation: str | None = None
    ) -> dict[str, Any]:
        """{id, role, token}; for the same name, role and key again a new token, which ends the old one."""
        body = {"name": name, "role": role, "ed25519": ed25519, "proof": proof, "challenge": challenge}
        if invitation is not None:
            body["invitation"] = invitation
        return self._object("POST", "/v1/accounts", body=body, form=answers.ACCOUNT)

    def put_blob(self, path: Path, *, digest: str | None = None, progress: Progress | None = None) -> str:
        """Upload a file as a blob; the digest. Bytes that changed since the digest was taken are refused by the server."""
        digest = digest or digests.of_file(path)
        self._upload(f"/v1/blobs/{segment(digest)}", path, progress)
        return digest

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def define(self, request: Request) -> dict[str, Any]:
        """{round, index} of a signed RoundDefined."""
        return self._object("POST", "/v1/rounds", body=request, form=answers.DEFINED)

    def rounds(self) -> list[dict[str, Any]]:
        """All rounds, in short."""
        answer = self._json("GET", "/v1/rounds")
        # A list, alone or under the one key that a page of it has.
        found = answer.get("rounds") if isinstance(answer, dict) else answer
        return self._list(found, answers.SUMMARY)

    def round(self, round_id: str) -> dict[str, Any]:
        """A round's state; round_id may be any unique prefix."""
        return self._object("GET", round_path(round_id), form=answers.ROUND)

    def definition(self, round_id: str) -> bytes:
        """The definition's bytes."""
        return self._bytes(f"{round_path(round_id)}/definition")

    def file(self, round_id: str, name: str, to: Path) -> Path:
        """Download a public file of the round."""
        return self._download(f"{round_path(round_id)}/files/{below(name)}", to)

    def records(self, round_id: str, *, start: int = 0, limit: int | None = None) -> list[tuple[int, Record]]:
        """The round's records with their log indices, parsed strictly: all from the log index `start` on, or `limit` of them."""
        page = f"?start={start}" + (f"&limit={limit}" if limit is not None else "")
        answer = self._json("GET", f"{round_path(round_id)}/records{page}")
        try:
            return [(item["index"], answers.record(item["record"])) for item in self._list(answer, answers.LOGGED)]
        except Refusal as refusal:
            raise refusal.of(f"a record of {round_id} that {self.url} shows", hint=_NO_LOG) from refusal

    def stages(self, round_id: str) -> list[dict[str, Any]]:
        """The round's stages, as service/attempts.py tells them."""
        return self._list(self._json("GET", f"{round_path(round_id)}/stages"), answers.STAGE)

    def forecast(self, round_id: str) -> dict[str, Any]:
        """{round, entries, preparations, evaluations}: of each entry the seconds of its attempts, as far as one may know them."""
        return self._object("GET", f"{round_path(round_id)}/forecast", form=answers.FORECAST)

    def stage(self, round_id: str, key: str) -> dict[str, Any]:
        """{stage, history} of a stage by its key or a unique beginning of it."""
        return self._object("GET", stage_path(round_id, key), form=answers.STORY)

    def outputs(self, round_id: str, key: str) -> list[dict[str, Any]]:
        """[{fence, ended, code, text, left_out, problem}] of the failed tries at a stage, for the round's organizer."""
        return self._list(self._json("GET", f"{stage_path(round_id, key)}/outputs", signed=True), answers.OUTPUT)

    def retry(self, round_id: str, keys: Sequence[str]) -> dict[str, Any]:
        """{round, stages} of the blocked stages that will be tried again: those named, or all."""
        body = {"stages": list(keys)}
        return self._object("POST", f"{round_path(round_id)}/retries", body=body, form=answers.RETRIED)

    def give_up(self, round_id: str, keys: Sequence[str], *, reason: str) -> dict[str, Any]:
        """{round, stages} of the blocked stages that will be recorded as failed: those named, and what is blocked with them."""
        body = {"stages": list(keys), "reason": reason}
        return self._object("POST", f"{round_path(round_id)}/given-up", body=body, form=answers.RETRIED)

    def seal(self, round_id: str, request: Request, *, envelopes: Json) -> dict[str, Any]:
        """{index, record} of a signed HoldoutSealed, whose ciphertext is a blob already."""
        body = {"record": request, "envelopes": envelopes}
        return self._object("POST", f"{round_path(round_id)}/seal", body=body, form=answers.INDEXED)

    def rehearse(self, round_id: str, fields: Json, *, envelopes: Json) -> dict[str, Any]:
        """Hand in the dummy seal."""
        body = {"fields": fields, "envelopes": envelopes}
        return self._object("POST", f"{round_path(round_id)}/rehearsal", body=body)

    def envelopes(self, round_id: str) -> dict[str, Any]:
        """{real: {seal, envelopes}, rehearsal: {seal, envelopes}}."""
        return self._object("GET", f"{round_path(round_id)}/envelopes", form=answers.ENVELOPES)

    def rehearsal_share(self, round_id: str, *, index: int, document: str) -> dict[str, Any]:
        """Hand in the dummy seal's share document (base64)."""
        body = {"index": index, "document": document}
        return self._object("POST", f"{round_path(round_id)}/rehearsal/shares", body=body)

    def post(self, round_id: str, what: str, request: Request) -> dict[str, Any]:
        """{index, record, …} of a signed request; what: acknowledgements | extension | entrants | withdrawals | void | draw | audits | reports."""
        return self._object("POST", f"{round_path(round_id)}/{segment(what)}", body=request, form=answers.INDEXED)

    def release(self, round_id: str, request: Request, *, document: str) -> dict[str, Any]:
        """{index, record} of a signed ShareReleased with its share document (base64)."""
        body = {"record": request, "document": document}
        return self._object("POST", f"{round_path(round_id)}/shares", body=body, form=answers.INDEXED)

    def audits(self, round_id: str) -> list[dict[str, Any]]:
        """[{submission, entrant, task, seed, files: {name: digest}, versions}] of the drawn jobs, for the round's auditor."""
        return self._list(self._json("GET", f"{round_path(round_id)}/audits", signed=True), answers.JOB)

    def audit_file(self, round_id: str, digest: str, to: Path, *, progress: Progress | None = None) -> Path:
        """Download a file of a drawn job."""
        return self._download(f"{round_path(round_id)}/audits/files/{segment(digest)}", to, progress, signed=True)

    def publish(self, round_id: str, request: Request, *, ranking: Json) -> dict[str, Any]:
        """{index, record} of a signed RankingPublished with the ranking's document."""
        body = {"record": request, "ranking": ranking}
        return self._object("POST", f"{round_path(round_id)}/ranking", body=body, form=answers.INDEXED)

    def revise(self, round_id: str, request: Request, *, ranking: Json, correction: Json) -> dict[str, Any]:
        """{index, record} of a signed RankingRevised with the ranking and the correction."""
        body = {"record": request, "ranking": ranking, "correction": correction}
        return self._object("POST", f"{round_path(round_id)}/revisions", body=body, form=answers.INDEXED)

    def ranking(self, round_id: str, *, version: int | None = None) -> dict[str, Any]:
        """ranking.json of a version; None: of the newest."""
        page = "" if version is None else f"?version={version}"
        return self._object("GET", f"{round_path(round_id)}/ranking{page}", form=answers.RANKING)

    def versions(self, round_id: str) -> list[dict[str, Any]]:
        """[{version, ranking, reason, at, correction, corrected, changes}], the first one first."""
        return self._list(self._json("GET", f"{round_path(round_id)}/versions"), answers.VERSION)

    def bundle(self, round_id: str, to: Path, *, whole: bool = False, progress: Progress | None = None) -> Path:
        """Download the bundle as a ZIP; `whole`: with what only organizer and auditor get where the holdout stays private."""
        return self._download(
            f"{round_path(round_id)}/bundle{'?whole=true' if whole else ''}", to, progress, signed=whole
        )

    def report(self, round_id: str, to: Path) -> Path:
        """Download the report (HTML)."""
        return self._download(f"{round_path(round_id)}/report", to)

    # ---- submissions -----------------------------------------------------------------------------------------------

    def submit(
        self, round_id: str, *, committed: Request, accepted: Request, nonce: str, manifest: Json
    ) -> dict[str, Any]:
        """{submission, state, index, missing: [digest]}."""
        body = {"committed": committed, "accepted": accepted, "nonce": nonce, "manifest": manifest}
        return self._object("POST", f"{round_path(round_id)}/submissions", body=body, form=answers.SUBMITTED)

    def put_file(self, submission: str, path: Path, *, digest: str, progress: Progress | None = None) -> None:
        """Upload one file of a submission."""
        self._upload(f"{submission_path(submission)}/files/{segment(digest)}", path, progress)

    def complete(self, submission: str) -> dict[str, Any]:
        """{state: checking}: all files are there."""
        return self._object("POST", f"{submission_path(submission)}/complete", form=answers.COMPLETED)

    def submission(self, submission: str) -> dict[str, Any]:
        """{submission, round, entrant, state, reason, committed_index, accepted_index}."""
        return self._object("GET", submission_path(submission), form=answers.SUBMISSION)

    # ---- log -------------------------------------------------------------------------------------------------------

    def checkpoint(self, *, cosigned: bool = False, round_id: str | None = None) -> str:
        """The newest signed checkpoint, a note, unverified.

        Args:
            cosigned: the newest one that a quorum of witnesses cosigned.
            round_id: whose witnesses; None: the server's own.

        Raises:
            Refusal: quorum_missing; proof_invalid, where the answer is no note.
        """
        params: dict[str, int | str] = {"cosigned": "true"} if cosigned else {}
        params |= {"round": round_id} if round_id is not None else {}
        answer = self._bytes("/v1/log/checkpoint", params=params or None, most=LARGEST_NOTE)
        try:
            return parse_note(answer).encode()
        except Refusal as refusal:
            raise refusal.of(f"the checkpoint that {self.url} shows", hint=_NO_LOG) from refusal

    def entries(self, *, start: int, end: int) -> Iterator[bytes]:
        """The log's entries start ≤ index < end, asked for in as many pages as the server makes of them; no more, and none longer than a record.

        Raises:
            Refusal: entry_unknown, where the log ends before, or more is given than was asked for; record_invalid.
        """
        while start < end:
            page = self._bytes("/v1/log/entries", params={"start": start, "end": end}, most=_LARGEST_PAGE)
            whole = page.removesuffix(b"\n")
            count = whole.count(b"\n") + 1 if page else 0
            if not 0 < count <= end - start:
                raise Refusal(
                    "entry_unknown",
                    f"{self.url} gave {count} log entries from {start} on, not up to {end}",
                    hint=_NO_LOG,
                )
            for index, entry in enumerate(whole.split(b"\n"), start=start):
                if len(entry) > records.MAX_BYTES:
                    sentence = (
                        f"log entry {index} of {self.url} has {len(entry)} bytes, a record at most {records.MAX_BYTES}"
                    )
                    raise Refusal("record_invalid", sentence, hint=_NO_LOG)
                yield entry
            start += count

    def proof(self, index: int) -> str:
        """The receipt of a log entry, as text."""
        try:
            return self._bytes(f"/v1/log/proof/{index}", most=LONGEST_RECEIPT).decode("utf-8")
        except UnicodeDecodeError as error:
            raise odd_answer(self.url) from error

    def consistency(self, first: int, second: int) -> list[bytes]:
        """The proof that the log of `first` entries is the beginning of that of `second`.

        Raises:
            Refusal: entry_unknown; server_unreachable, where the answer is no proof.
        """
        path = f"/v1/log/consistency?first={first}&second={second}"
        answer = self._object("GET", path, form=answers.PROOF)
        try:
            return [base64.b64decode(node, validate=True) for node in answer["proof"]]
        except ValueError as error:
            raise odd_answer(self.url) from error

    def hand_overs(self) -> list[str]:
        """Receipts of all hand-overs of the log's key, in the log's order, as text."""
        found: list[str] = self._object("GET", "/v1/log/rotations", form=answers.RECEIPTS)["receipts"]
        return found

    # ---- how it is sent --------------------------------------------------------------------------------------------

    def _object(
        self, method: str, path: str, *, body: Json = None, repeatable: bool = True, form: Mapping[str, Any] = ANYTHING
    ) -> dict[str, Any]:
        answer = self._json(method, path, body=body, repeatable=repeatable)
        if not isinstance(answer, dict) or not answers.fits(answer, form):
            raise odd_answer(self.url)
        return answer

    def _list(self, value: Json, form: Mapping[str, Any]) -> list[Any]:
        if not isinstance(value, list) or not answers.fits(value, [form]):
            raise odd_answer(self.url)
        return value

    def _json(
        self, method: str, path: str, *, body: Json = None, repeatable: bool = True, signed: bool = False
    ) -> Json:
        def send() -> httpx.Response:
            return self._ask(method, path, json=body, headers=self._proof(path) if signed else None)

        response = self._repeat(send, repeatable=repeatable)
        try:
            return reading.parse_json(response.content)
        except ValueError as error:
            raise odd_answer(self.url) from error

    def _bytes(self, path: str, *, params: Mapping[str, int | str] | None = None, most: int = LARGEST_ANSWER) -> bytes:
        return self._repeat(lambda: self._ask("GET", path, most=most, params=params)).content

    def _ask(self, method: str, path: str, *, most: int = LARGEST_ANSWER, **request: Any) -> httpx.Response:
        """The answer, read to its end or to `most` bytes, whichever comes first: no server fills this machine's memory."""
        with self._http.stream(method, path, **request) as response:
            return self._read(response, most)

    def _read(self, response: httpx.Response, most: int) -> httpx.Response:
        held, begun = bytearray(), time.monotonic()
        try:
            # Each piece as it comes: pieces of a size would be waited for.
            for chunk in response.iter_bytes():
                held += chunk
                require_pace(self.url, begun, len(held))
                if len(held) > most:
                    raise Refusal(
                        "server_unreachable",
                        f"{self.url} answers {response.request.url.path} with more than {most} bytes",
                        hint="no Acclimate server sends so much: check the address, and ask its operator",
                    )
        except httpx.DecodingError as error:
            raise odd_answer(self.url) from error
        # What is held is decoded already.
        headers = [pair for pair in response.headers.multi_items() if pair[0].lower() not in _OF_THE_TRANSFER]
        return httpx.Response(response.status_code, headers=headers, content=bytes(held), request=response.request)

    def _proof(self, path: str) -> dict[str, str]:
        """The header by which the account's key signs a GET request, with a new challenge of the server."""
        if self._key is None:
            return {}
        key, about = self._key(), self.server()
        log, challenge = str(about.get("log")), str(about.get("challenge"))
        address, _, query = path.partition("?")
        by = records.public_text(key.public_key())
        sig = key.sign(records.request_statement(unquote(address), query, by=by, log=log, challenge=challenge))
        return {"Acclimate-Proof": f"{challenge} {base64.b64encode(sig).decode()}"}

    def _upload(self, path: str, file: Path, progress: Progress | None) -> None:
        try:
            size = file.stat().st_size
        except OSError as error:
            hint = "check the name and who owns it"
            raise Refusal("file_unreadable", f"{file}: {error.strerror}", hint=hint) from error

        def pieces() -> Iterator[bytes]:
            done = 0
            with file.open("rb") as stream:
                while chunk := stream.read(CHUNK):
                    yield chunk
                    done += len(chunk)
                    if progress is not None:
                        progress(done, size)

        def send() -> httpx.Response:
            headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
            try:
                return self._ask("PUT", path, content=pieces(), headers=headers)
            except httpx.LocalProtocolError as error:
                raise Refusal("upload_mismatch", f"{file} changed while it was sent", hint="send it again") from error

        self._repeat(send)

    def _download(self, path: str, to: Path, progress: Progress | None = None, *, signed: bool = False) -> Path:
        part = to.with_name(f"{to.name}.part")

        def send() -> httpx.Response:
            with self._http.stream("GET", path, headers=self._proof(path) if signed else None) as response:
                if response.status_code != 200:
                    if response.is_success:
                        raise odd_answer(self.url)
                    return self._read(response, LARGEST_NOTE)
                size = int(response.headers.get("Content-Length", 0))
                most, done, begun = fitting(to.parent), 0, time.monotonic()
                with part.open("wb") as stream:
                    for chunk in response.iter_bytes():
                        done += len(chunk)
                        require_pace(self.url, begun, done)
                        if done > most:
                            raise no_room(to)
                        stream.write(chunk)
                        if progress is not None:
                            progress(response.num_bytes_downloaded, size)
                return response

        try:
            self._repeat(send)
            part.replace(to)
        except httpx.DecodingError as error:
            raise odd_answer(self.url) from error
        except OSError as error:
            if is_full(error):
                raise no_room(to) from error
            raise Refusal(
                "file_unreadable", f"{to}: {error.strerror}", hint="check the name and who owns it"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
        return to

    def _repeat(self, send: Callable[[], httpx.Response], *, repeatable: bool = True) -> httpx.Response:
        """Send until the server answers with something other than 503, or patience ends; then the answer or its refusal."""
        until, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            refusal: Refusal
            try:
                response = send()
            except httpx.TransportError as error:
                never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                refusal = unreachable(self.url, error)
                again = repeatable or never_sent
            else:
                if response.is_success:
                    return response
                refusal = refusal_of(response, url=self.url, renewal=self._renewal)
                again = repeatable and response.status_code == 503
            if not again or time.monotonic() + pause > until:
                raise refusal
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
