"""A log's side of its witnesses: who they are, and asking one to cosign a checkpoint (C2SP tlog-witness, add-checkpoint).

A witness keeps the newest checkpoint of a log that it cosigned, and cosigns another only where a consistency proof leads there. So it is
told from which size the proof starts; where it has another, it says which (409), and is asked again from there. Nothing of an
answer is believed before the cosignature verifies under the witness's known key and its time is near this machine's.
"""

import base64
import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from acclimate import notes
from acclimate.log import Checkpoint, parse_checkpoint
from acclimate.redaction import hidden
from acclimate.service import names
from acclimate_competitions import vkeys
from acclimate_competitions.errors import Refusal

CLOCK_TOLERANCE = 300
"""Seconds by which a witness's clock may differ from this machine's."""
_TRIES = 3
_PATIENCE = 30.0  # seconds for a whole exchange: a timeout of the connection starts again with every byte
_LARGEST_ANSWER = 65_536
_SIZE_TYPE = "text/x.tlog.size"
_SIZE = re.compile(rb"(0|[1-9][0-9]{0,18})\n")


@dataclass(frozen=True)
class Endpoint:
    """Where a witness listens, and the key by which it is known.

    Attributes:
        url: its submission prefix, without a slash at the end.
        verifier: its key, of kind notes.COSIGNATURE.
    """

    url: str
    verifier: notes.Verifier

    def text(self) -> str:
        """The text that parse_endpoint reads."""
        return f"{self.url} {self.verifier.text()}"


def parse_endpoint(text: str) -> Endpoint:
    """A witness from `https://w.example.org/x NAME+hash+key`: its address, a blank, its verifier key.

    Raises:
        Refusal: config_invalid.
    """
    hint = "a witness is its address, a blank and its key: https://witness.example.org witness.example.org+hash+key"
    parts = text.split() if isinstance(text, str) else []
    if len(parts) != 2:
        raise Refusal("config_invalid", f"witness {hidden(str(text))!r}: {len(parts)} words, expected 2", hint=hint)
    url, vkey = parts[0].rstrip("/"), parts[1]
    shown = hidden(url)
    try:
        parsed = httpx.URL(url)
        verifier = notes.parse_vkey(vkey)
        names.check(verifier.name, what="its name", longest=vkeys.LONGEST_NAME)
    except (httpx.InvalidURL, ValueError) as error:
        raise Refusal("config_invalid", f"witness {shown!r}: {error}", hint=hint) from error
    except Refusal as refusal:
        raise Refusal("config_invalid", f"witness {shown!r}: {refusal.sentence}", hint=hint) from refusal
    plain = (
        parsed.scheme in ("http", "https") and parsed.host and not (parsed.query or parsed.fragment or parsed.userinfo)
    )
    if not plain or not (parsed.port is None or 0 < parsed.port < 65_536):
        raise Refusal("config_invalid", f"witness {shown!r} is not a plain http address", hint=hint)
    if verifier.kind != notes.COSIGNATURE:
        kinds = f"kind {verifier.kind:#04x}, expected {notes.COSIGNATURE:#04x}"
        raise Refusal("config_invalid", f"witness {shown!r}: the key {verifier.name} has {kinds}", hint=hint)
    return Endpoint(url, verifier)


def parse_endpoints(texts: Sequence[str]) -> tuple[Endpoint, ...]:
    """Several witnesses, each with a key of its own: a cosignature does not cover its witness's name.

    Raises:
        Refusal: config_invalid.
    """
    endpoints = tuple(map(parse_endpoint, texts))
    seen: dict[bytes, Endpoint] = {}
    for endpoint in endpoints:
        if (other := seen.setdefault(endpoint.verifier.public, endpoint)) is not endpoint:
            names = f"{other.verifier.name} at {other.url} and {endpoint.verifier.name} at {endpoint.url}"
            raise Refusal("config_invalid", f"two witnesses have one key: {names}", hint="name each witness once")
    return endpoints


def ask(
    endpoint: Endpoint,
    note: str,
    *,
    old: int,
    proof_of: Callable[[int], list[bytes]],
    client: httpx.Client,
    clock: Callable[[], float] = time.time,
) -> notes.Signature:
    """A witness's cosignature of a log's checkpoint.

    1. The witness is asked from the size that it is thought to have; where it has another, again from that one.
    2. A size above the checkpoint's refuses: a newer checkpoint was cosigned already.
    3. A proof that the witness does not accept refuses: it has seen another history.
    4. The cosignature is the known key's, verifies over this checkpoint, and its time is near this machine's.

    Args:
        endpoint: the witness.
        note: the checkpoint as signed by its log.
        old: size of the newest checkpoint that this witness is known to have cosigned, 0 where none is known.
        proof_of: the consistency proof from a size (0 < size ≤ the checkpoint's) to the checkpoint's.
        client: how requests are sent; its timeouts hold, redirects are not followed.
        clock: seconds since 1970.

    Raises:
        Refusal: witness_unreachable, where there is no answer or none that can be used; witness_ahead; witness_disagrees; entry_unknown or
            whatever proof_of raises.
    """
    parsed = parse_checkpoint(notes.parse_note(note).text)
    # 1
    for _ in range(_TRIES):
        old = min(old, parsed.size)
        proof = proof_of(old) if 0 < old < parsed.size else []
        status, kind, body = _send(endpoint, "POST", "add-checkpoint", client, request(note, old=old, proof=proof))
        if status != 409:
            break
        has = _size_of(endpoint, kind, body)
        # 2
        if has > parsed.size:
            raise Refusal(
                "witness_ahead",
                f"witness {endpoint.verifier.name} has cosigned {has} entries of {parsed.origin}; it was asked for {parsed.size}",
                hint="ask for the newest checkpoint; where the log has no more entries than that, an older log was put back",
            )
        old = has
    # 3
    if status == 422:
        _disagrees(endpoint, parsed, old, client)
    if status != 200:
        raise _unusable(endpoint, f"answers {status}", _HINTS.get(status, "ask its operator"), said=_words(body))
    # 4
    return _cosignature(endpoint, note, body, clock())


def request(note: str, *, old: int, proof: Sequence[bytes]) -> bytes:
    """The body of an add-checkpoint request."""
    lines = (f"old {old}", *map(_base64, proof), "")
    return ("".join(f"{line}\n" for line in lines) + note).encode()


@dataclass(frozen=True)
class About:
    """What a witness says of itself: its key, and those of the logs that it knows."""

    witness: str
    logs: tuple[str, ...]


def about(endpoint: Endpoint, *, client: httpx.Client) -> About | None:
    """What a witness says of itself, as Acclimate's do; None where it says nothing of the kind, which it need not.

    Raises:
        Refusal: witness_unreachable.
    """
    status, _, body = _send(endpoint, "GET", "", client)
    words = [line.split() for line in body.decode("utf-8", "replace").splitlines()] if status == 200 else []
    named = [(word[0], word[1]) for word in words if len(word) == 2]
    found = [key for kind, key in named if kind == "witness"]
    return About(found[0], tuple(key for kind, key in named if kind == "log")) if len(found) == 1 else None


def cosigned(endpoint: Endpoint, origin: str, *, client: httpx.Client) -> int | None:
    """How many entries of a log a witness says it has cosigned, unverified; None where it has none of it.

    Raises:
        Refusal: witness_unreachable.
    """
    try:
        return parse_checkpoint(notes.parse_note(latest(endpoint, origin, client=client)).text).size
    except Refusal as refusal:
        if refusal.code != "entry_unknown":
            raise
        return None


def shown(texts: Sequence[str], origin: str, *, within: float = 5.0) -> dict[str, str]:
    """What each witness shows as the newest checkpoint of a log, as a note, unverified, by the witness's name and address.

    All are asked at once. Who gives no answer in so many seconds, or none that can be used, is left out.

    Args:
        texts: the witnesses, as the setting `witnesses` names them.
        origin: the log's name.
        within: seconds.

    Raises:
        Refusal: config_invalid.
    """
    endpoints = parse_endpoints(texts)

    def one(endpoint: Endpoint) -> str:
        try:
            with httpx.Client(timeout=within) as client:
                return latest(endpoint, origin, client=client, within=within)
        except Refusal:
            return ""

    with ThreadPoolExecutor(max(1, len(endpoints)), thread_name_prefix="witness") as threads:
        came = list(threads.map(one, endpoints))
    return {f"{each.verifier.name} at {each.url}": note for each, note in zip(endpoints, came, strict=True) if note}


def latest(endpoint: Endpoint, origin: str, *, client: httpx.Client, within: float | None = None) -> str:
    """The newest checkpoint of a log that a witness says it cosigned, as a note, unverified.

    Args:
        endpoint: the witness.
        origin: the log's name.
        client: how the request is sent.
        within: seconds for the whole exchange; 30 unless told.

    Raises:
        Refusal: witness_unreachable; entry_unknown, where it has cosigned none.
    """
    path = f"{hashlib.sha256(origin.encode()).hexdigest()}/checkpoint"
    status, _, body = _send(endpoint, "GET", path, client, within=within)
    try:
        if status == 200:
            notes.parse_note(body)
            return body.decode()
    except Refusal as refusal:
        raise _unusable(endpoint, "shows no checkpoint", said=refusal.sentence) from refusal
    if status == 404:
        raise Refusal(
            "entry_unknown",
            f"witness {endpoint.verifier.name} has cosigned no checkpoint of {origin}",
            hint=_HINTS[404],
        )
    raise _unusable(endpoint, f"shows no checkpoint of {origin}", said=f"{status} {_words(body)}")


_HINTS = {
    403: "the witness knows another key of this log; give its operator the log's key",
    404: "the witness does not know this log, or its address is another; give its operator the log's key",
    409: "other processes ask it at the same time; ask again",
}


def _send(
    endpoint: Endpoint, method: str, path: str, client: httpx.Client, body: bytes = b"", *, within: float | None = None
) -> tuple[int, str, bytes]:
    """(status, media type, body) of the witness's answer, which is bounded in size, and in time from the connection on."""
    answer, within = b"", _PATIENCE if within is None else within
    with _cut_after(within) as (over, trace):
        try:
            # A connection of its own: what cuts it off can then touch no other exchange.
            headers = {"Connection": "close"} | ({"Content-Type": "text/plain; charset=utf-8"} if body else {})
            with client.stream(
                method,
                f"{endpoint.url}/{path}",
                content=body or None,
                headers=headers,
                follow_redirects=False,
                extensions={"trace": trace},
            ) as response:
                for chunk in response.iter_bytes():
                    answer += chunk
                    if len(answer) > _LARGEST_ANSWER:
                        raise _unusable(endpoint, f"answers with more than {_LARGEST_ANSWER} bytes")
                    if over.is_set():
                        raise _late(endpoint, within)
                # A connection that was cut off ends an answer of no declared length, as if that were whole.
                if over.is_set():
                    raise _late(endpoint, within)
                media = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                return response.status_code, media, answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if over.is_set():
                raise _late(endpoint, within) from error
            raise _unusable(endpoint, "does not answer", said=f"{error or type(error).__name__}") from error


@contextmanager
def _cut_after(seconds: float) -> Iterator[tuple[threading.Event, Callable[[str, Mapping[str, Any]], None]]]:
    """Shuts the connections of an exchange down when its time is over, whatever it waits for: handshake, headers or body.

    Yields:
        (set once the time is over, httpx's extension `trace`, which tells of each connection).
    """
    over, held = threading.Event(), list[socket.socket]()

    def cut() -> None:
        over.set()
        for one in held:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def trace(event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            # A second handle of the same connection: TLS takes the first one away, and its number may become another's.
            held.append(info["return_value"].get_extra_info("socket").dup())
            if over.is_set():
                cut()

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield over, trace
    finally:
        timer.cancel()
        timer.join()
        for one in held:
            one.close()


def _size_of(endpoint: Endpoint, kind: str, body: bytes) -> int:
    if kind != _SIZE_TYPE or not _SIZE.fullmatch(body) or int(body) >= 2**63:
        said = f"{kind or 'no type'} {_words(body)}, expected {_SIZE_TYPE} and a size"
        raise _unusable(endpoint, "answers 409 without a size", said=said)
    return int(body)


def _cosignature(endpoint: Endpoint, note: str, body: bytes, now: float) -> notes.Signature:
    known = endpoint.verifier
    text = notes.parse_note(note).text
    try:
        found = notes.parse_note(f"{text}\n".encode() + body).signatures
        mine = next((one for one in found if (one.name, one.key_id) == (known.name, known.key_id)), None)
        if mine is None:
            names = ", ".join(f"{one.name}+{one.key_id.hex()}" for one in found)
            raise _unusable(
                endpoint,
                "signed with another key",
                "another witness listens there, or it has a new key: ask its operator, elsewhere than there",
                said=f"signed as {names}, expected {known.name}+{known.key_id.hex()}",
            )
        at = known.verify(text, mine.data) or 0
    except Refusal as refusal:
        if refusal.code != "proof_invalid":
            raise
        raise _unusable(endpoint, "gave no valid cosignature", said=refusal.sentence) from refusal
    if not abs(at - now) <= CLOCK_TOLERANCE:
        raise _unusable(
            endpoint,
            "cosigned with a time that is too far from this machine's",
            "one of the two clocks is wrong: compare both with a third",
            said=f"the time {at}, this machine's clock says {now:.0f}, {abs(at - now):.0f} s apart, at most {CLOCK_TOLERANCE} are allowed",
        )
    return mine


def _disagrees(endpoint: Endpoint, parsed: Checkpoint, old: int, client: httpx.Client) -> NoReturn:
    """Refuse with both histories, as far as the witness shows its own."""
    shown = f"{parsed.size} entries with root {_base64(parsed.root)}"
    other = f"{old} entries with another root"
    try:
        kept = notes.open_note(latest(endpoint, parsed.origin, client=client), [endpoint.verifier])
        its = parse_checkpoint(kept.text)
        other = f"{its.size} entries with root {_base64(its.root)}"
    except Refusal as refusal:
        # The refusal stands without it: a witness need not show what it has.
        other += f" (it doesn't show it: {refusal.sentence})"
    raise Refusal(
        "witness_disagrees",
        f"witness {endpoint.verifier.name} has cosigned {other} of {parsed.origin}, to which {shown} is no continuation",
        hint="keep both checkpoints: together they show that the log was changed, or shown differently to different people",
    )


def for_anybody(endpoint: Endpoint, refusal: Refusal) -> str:
    """What a witness did, as anybody may read it who may not know its address: of a refusal what is in our own words."""
    if not refusal.code.startswith("witness_"):
        return refusal.code
    for beginning in (f"witness {endpoint.verifier.name} at {endpoint.url} ", f"witness {endpoint.verifier.name} "):
        if refusal.sentence.startswith(beginning):
            # What follows a colon, whoever listens there may have said, or it names hosts.
            return f"{refusal.code}: {refusal.sentence.removeprefix(beginning).partition(': ')[0]}"
    return refusal.code


def _unusable(endpoint: Endpoint, what: str, hint: str = "ask its operator", *, said: str = "") -> Refusal:
    """What a witness did, in our own words, and then what it or a library said."""
    sentence = f"witness {endpoint.verifier.name} at {endpoint.url} {what}" + (f": {said}" if said else "")
    return Refusal("witness_unreachable", sentence, hint=hint)


def _late(endpoint: Endpoint, within: float) -> Refusal:
    return _unusable(endpoint, f"has not finished its answer within {within:.0f} s")


def _words(body: bytes) -> str:
    return repr(body[:200].decode("utf-8", "replace"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
