"""The client's connection: one method for each route of `/v1`.

A refusal of the server arrives as the same Refusal, with its code, sentence, hint and problems. A call that may be repeated (all but making an
account: a signed request is answered the same when sent twice) is repeated with growing pauses while the server can't be
reached or says 503. Bodies of any size are streamed in pieces of at most 1 MiB.
"""

import base64
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import acclimate
from acclimate.client.problems import refusal_of
from acclimate.files import is_full
from acclimate.log import LONGEST_RECEIPT, parse_note
from acclimate.notes import LARGEST_NOTE
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

CHUNK = 1 << 20
LARGEST_ANSWER = 1 << 28
"""Bytes of an answer that is held in memory; a page of the log has a limit of its own."""
_LARGEST_PAGE = 1000 * (records.MAX_BYTES + 1)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
_NO_LOG = "no log of Acclimate shows this: check the address, keep the message, and ask the server's operator"
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
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise Refusal("config_invalid", f"server {url!r}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Refusal(
                "config_invalid", f"server {url!r} is not an http address", hint="such as https://rounds.example.org"
            )
        self.url = str(parsed).rstrip("/")
        self._patience, self._key = patience, key
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
        return self._object("GET", "/v1/server")

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
        return self._object("POST", "/v1/accounts", body=body)

    def put_blob(self, path: Path, *, digest: str | None = None, progress: Progress | None = None) -> str:
        """Upload a file as a blob; the digest. Bytes that changed since the digest was taken are refused by the server."""
        digest = digest or digests.of_file(path)
        self._upload(f"/v1/blobs/{digest}", path, progress)
        return digest

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def define(self, request: Request) -> dict[str, Any]:
        """{round, index} of a signed RoundDefined."""
        return self._object("POST", "/v1/rounds", body=request)

    def rounds(self) -> list[dict[str, Any]]:
        """All rounds, in short."""
        answer = self._json("GET", "/v1/rounds")
        # A list, alone or under the one key that a page of it has.
        found = answer.get("rounds") if isinstance(answer, dict) else answer
        return _list(found, self.url)

    def round(self, round_id: str) -> dict[str, Any]:
        """A round's state; round_id may be any unique prefix."""
        return self._object("GET", _round(round_id))

    def definition(self, round_id: str) -> bytes:
        """The definition's bytes."""
        return self._bytes(f"{_round(round_id)}/definition")

    def file(self, round_id: str, name: str, to: Path) -> Path:
        """Download a public file of the round."""
        return self._download(f"{_round(round_id)}/files/{quote(name)}", to)

    def records(self, round_id: str, *, start: int = 0, limit: int | None = None) -> list[tuple[int, Record]]:
        """The round's records with their log indices, parsed strictly: all from the log index `start` on, or `limit` of them."""
        page = f"?start={start}" + (f"&limit={limit}" if limit is not None else "")
        answer = self._json("GET", f"{_round(round_id)}/records{page}")
        try:
            return [(int(item["index"]), _record(item["record"])) for item in _list(answer, self.url)]
        except (KeyError, TypeError, ValueError) as error:
            raise _odd_answer(self.url) from error
        except Refusal as refusal:
            raise refusal.of(f"a record of {round_id} that {self.url} shows", hint=_NO_LOG) from refusal

    def stages(self, round_id: str) -> list[dict[str, Any]]:
        """[{kind, entrant, task, seed, protocol, state, attempts, progress, reason, heartbeat}]."""
        return _list(self._json("GET", f"{_round(round_id)}/stages"), self.url)

    def seal(self, round_id: str, request: Request, *, envelopes: Json) -> dict[str, Any]:
        """{index, record} of a signed HoldoutSealed, whose ciphertext is a blob already."""
        return self._object("POST", f"{_round(round_id)}/seal", body={"record": request, "envelopes": envelopes})

    def rehearse(self, round_id: str, fields: Json, *, envelopes: Json) -> dict[str, Any]:
        """Hand in the dummy seal."""
        return self._object("POST", f"{_round(round_id)}/rehearsal", body={"fields": fields, "envelopes": envelopes})

    def envelopes(self, round_id: str) -> dict[str, Any]:
        """{real: {seal, envelopes}, rehearsal: {seal, envelopes}}."""
        return self._object("GET", f"{_round(round_id)}/envelopes")

    def rehearsal_share(self, round_id: str, *, index: int, document: str) -> dict[str, Any]:
        """Hand in the dummy seal's share document (base64)."""
        body = {"index": index, "document": document}
        return self._object("POST", f"{_round(round_id)}/rehearsal/shares", body=body)

    def post(self, round_id: str, what: str, request: Request) -> dict[str, Any]:
        """{index, record, …} of a signed request; what: acknowledgements | extension | entrants | withdrawals | void | draw | audits | reports."""
        return self._object("POST", f"{_round(round_id)}/{what}", body=request)

    def release(self, round_id: str, request: Request, *, document: str) -> dict[str, Any]:
        """{index, record} of a signed ShareReleased with its share document (base64)."""
        return self._object("POST", f"{_round(round_id)}/shares", body={"record": request, "document": document})

    def audits(self, round_id: str) -> list[dict[str, Any]]:
        """[{submission, entrant, task, seed, files: {name: digest}, versions}] of the drawn jobs, for the round's auditor."""
        return _list(self._json("GET", f"{_round(round_id)}/audits", signed=True), self.url)

    def audit_file(self, round_id: str, digest: str, to: Path, *, progress: Progress | None = None) -> Path:
        """Download a file of a drawn job."""
        return self._download(f"{_round(round_id)}/audits/files/{quote(digest)}", to, progress, signed=True)

    def publish(self, round_id: str, request: Request, *, ranking: Json) -> dict[str, Any]:
        """{index, record} of a signed RankingPublished with the ranking's document."""
        return self._object("POST", f"{_round(round_id)}/ranking", body={"record": request, "ranking": ranking})

    def ranking(self, round_id: str) -> dict[str, Any]:
        """ranking.json."""
        return self._object("GET", f"{_round(round_id)}/ranking")

    def bundle(self, round_id: str, to: Path, *, whole: bool = False, progress: Progress | None = None) -> Path:
        """Download the bundle as a ZIP; `whole`: with what only organizer and auditor get where the holdout stays private."""
        return self._download(f"{_round(round_id)}/bundle{'?whole=true' if whole else ''}", to, progress, signed=whole)

    def report(self, round_id: str, to: Path) -> Path:
        """Download the report (HTML)."""
        return self._download(f"{_round(round_id)}/report", to)

    # ---- submissions -----------------------------------------------------------------------------------------------

    def submit(
        self, round_id: str, *, committed: Request, accepted: Request, nonce: str, manifest: Json
    ) -> dict[str, Any]:
        """{submission, state, index, missing: [digest]}."""
        body = {"committed": committed, "accepted": accepted, "nonce": nonce, "manifest": manifest}
        return self._object("POST", f"{_round(round_id)}/submissions", body=body)

    def put_file(self, submission: str, path: Path, *, digest: str, progress: Progress | None = None) -> None:
        """Upload one file of a submission."""
        self._upload(f"/v1/submissions/{quote(submission, safe='')}/files/{digest}", path, progress)

    def complete(self, submission: str) -> dict[str, Any]:
        """{state: checking}: all files are there."""
        return self._object("POST", f"/v1/submissions/{quote(submission, safe='')}/complete")

    def submission(self, submission: str) -> dict[str, Any]:
        """{submission, round, entrant, state, reason, committed_index, accepted_index}."""
        return self._object("GET", f"/v1/submissions/{quote(submission, safe='')}")

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
            raise _odd_answer(self.url) from error

    def consistency(self, first: int, second: int) -> list[bytes]:
        """The proof that the log of `first` entries is the beginning of that of `second`.

        Raises:
            Refusal: entry_unknown; server_unreachable, where the answer is no proof.
        """
        answer = self._object("GET", f"/v1/log/consistency?first={first}&second={second}")
        try:
            return [base64.b64decode(node, validate=True) for node in answer["proof"]]
        except (KeyError, TypeError, ValueError) as error:
            raise _odd_answer(self.url) from error

    def hand_overs(self) -> list[str]:
        """Receipts of all hand-overs of the log's key, in the log's order, as text."""
        found = _list(self._object("GET", "/v1/log/rotations").get("receipts"), self.url)
        if not all(isinstance(text, str) for text in found):
            raise _odd_answer(self.url)
        return found

    # ---- how it is sent --------------------------------------------------------------------------------------------

    def _object(self, method: str, path: str, *, body: Json = None, repeatable: bool = True) -> dict[str, Any]:
        answer = self._json(method, path, body=body, repeatable=repeatable)
        if not isinstance(answer, dict):
            raise _odd_answer(self.url)
        return answer

    def _json(
        self, method: str, path: str, *, body: Json = None, repeatable: bool = True, signed: bool = False
    ) -> Json:
        def send() -> httpx.Response:
            return self._ask(method, path, json=body, headers=self._proof(path) if signed else None)

        response = self._repeat(send, repeatable=repeatable)
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise _odd_answer(self.url) from error

    def _bytes(self, path: str, *, params: Mapping[str, int | str] | None = None, most: int = LARGEST_ANSWER) -> bytes:
        return self._repeat(lambda: self._ask("GET", path, most=most, params=params)).content

    def _ask(self, method: str, path: str, *, most: int = LARGEST_ANSWER, **request: Any) -> httpx.Response:
        """The answer, read to its end or to `most` bytes, whichever comes first: no server fills this machine's memory."""
        with self._http.stream(method, path, **request) as response:
            return self._read(response, most)

    def _read(self, response: httpx.Response, most: int) -> httpx.Response:
        held = bytearray()
        try:
            for chunk in response.iter_bytes(CHUNK):
                held += chunk
                if len(held) > most:
                    raise Refusal(
                        "server_unreachable",
                        f"{self.url} answers {response.request.url.path} with more than {most} bytes",
                        hint="no Acclimate server sends so much: check the address, and ask its operator",
                    )
        except httpx.DecodingError as error:
            raise _odd_answer(self.url) from error
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
                    return self._read(response, LARGEST_NOTE)
                size = int(response.headers.get("Content-Length", 0))
                with part.open("wb") as stream:
                    for chunk in response.iter_bytes(CHUNK):
                        stream.write(chunk)
                        if progress is not None:
                            progress(response.num_bytes_downloaded, size)
                return response

        try:
            self._repeat(send)
            part.replace(to)
        except OSError as error:
            if is_full(error):
                hint = "free some space and repeat the command; nothing of it was kept"
                raise Refusal("no_space", f"no space to write {to}", hint=hint) from error
            raise Refusal(
                "file_unreadable", f"{to}: {error.strerror}", hint="check the name and who owns it"
            ) from error
        finally:
            part.unlink(missing_ok=True)
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
                refusal = _unreachable(self.url, error)
                again = repeatable or never_sent
            else:
                if response.is_success:
                    return response
                refusal = refusal_of(response)
                again = repeatable and response.status_code == 503
            if not again or time.monotonic() + pause > until:
                raise refusal
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def require_round(round_id: str) -> str:
    """A round's id or its beginning, as it was given; an empty one means none, never the only round that there is.

    Raises:
        Refusal: round_unknown.
    """
    if not round_id.strip():
        raise Refusal(
            "round_unknown", "the round's id is empty: is $ROUND set in this terminal?", hint="export ROUND=… sets it"
        )
    return round_id


def _round(round_id: str) -> str:
    # What follows it in an address must stay below the round: a name with a slash or of dots is one that somebody mailed, or made up.
    if "/" in round_id or round_id in (".", ".."):
        raise Refusal(
            "round_unknown",
            f"{round_id[:80]!r} is no round's id: letters, digits, dots and hyphens, such as digits-2027-1-0a7b65ef6e43",
            hint="acclimate status --server URL shows the rounds that there are",
        )
    return f"/v1/rounds/{quote(require_round(round_id), safe='', errors='replace')}"


def _list(value: Json, url: str) -> list[Any]:
    if not isinstance(value, list):
        raise _odd_answer(url)
    return value


def _record(value: Json) -> Record:
    # Whatever JSON the server wrapped it in, the entry's bytes are its canonical form.
    return records.parse(value.encode() if isinstance(value, str) else digests.canonical(value))


def _unreachable(url: str, error: Exception) -> Refusal:
    what = str(error) or type(error).__name__
    return Refusal(
        "server_unreachable", f"{url} does not answer: {what}", hint="check the address, and that the server runs"
    )


def _odd_answer(url: str) -> Refusal:
    return Refusal("server_unreachable", f"{url} answers, but not as an Acclimate server", hint="check the address")
