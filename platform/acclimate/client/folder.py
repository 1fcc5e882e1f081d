"""What the client keeps in an actor's key folder, beside the keys: account.json, log.vkey, log.checkpoint, pins.json, submissions/, receipts/, seals/, holdouts/.

Those that hold a secret (a token, a nonce) have mode 0600. A command that was killed finds here what it had done.
"""

import base64
import dataclasses
import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate import files, hand_overs, log
from acclimate import keys as key_files
from acclimate.client import key_chain
from acclimate.client.connection import Client, Request
from acclimate.keys import Keys
from acclimate.log_keys import GivenUp, LogKeys
from acclimate.quorum import Quorum
from acclimate_competitions import digests, reading
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

ACCOUNT_FILE = "account.json"
LOG_KEY_FILE = "log.vkey"
OLDER_LOG_KEYS_FILE = "log.older.vkeys"
PINS_FILE = "pins.json"
DOCUMENT_FILE = "custodian.json"


@dataclass(frozen=True)
class Account:
    """An account at a server.

    Attributes:
        server: the server's address.
        id: the account's id there; for an entrant its name in every round, for good.
        role: organizer | entrant | custodian | auditor | analyst.
        token: the API token, a secret.
    """

    server: str
    id: str
    role: str
    token: str = dataclasses.field(repr=False)

    def connect(self, folder: Path | None = None) -> Client:
        """A client that speaks for this account; with its key folder it signs requests for secrets, too."""
        key = (lambda: key_files.load(folder).ed25519) if folder is not None else None
        renewal = self.renewal(folder) if folder is not None else ""
        return Client(self.server, token=self.token, key=key, renewal=renewal)

    def renewal(self, folder: Path) -> str:
        """The hint how an account gets a new token, as a command that can be copied."""
        words = ("--server", self.server, "--name", self.id, "--role", self.role, "--keys", str(folder))
        return f"with the same key there is a new one: {shlex.join(('acclimate', 'register', '--renew', *words))}"


def register_account(
    client: Client,
    keys: Keys,
    *,
    name: str,
    role: str = "entrant",
    invitation: str | None = None,
    renew: bool = False,
) -> Account:
    """Make an account at the client's server for these keys, and keep it in their folder.

    The proof is a signature by the account's own key over the log's key and the server's challenge, so that nobody registers another's, and a
    proof that was seen by others is of no use. Called again for the account that is
    there already, it answers with that; with `renew` it gets a new token, and the old one ends. With `renew` the server may have moved to
    another address: then it must have the log whose key the folder keeps.

    Raises:
        Refusal: conflict, where the folder is somebody else's; log_inconsistent, where another address has another log; whatever the server
            refuses.
    """
    path = keys.folder / ACCOUNT_FILE
    check_owner(keys.folder, client.url, name=name, role=role, moved=renew)
    if path.exists() and not renew:
        return load_account(keys.folder)
    log_key(client, keys.folder, follow=True)

    about = client.server()
    asked = {
        "name": name,
        "role": role,
        "ed25519": keys.public,
        "log": about.get("log"),
        "challenge": about.get("challenge"),
    }
    if not isinstance(asked["challenge"], str):
        raise Refusal(
            "challenge_invalid",
            f"{client.url} gives no challenge that the registration could sign",
            hint=f"it runs an older version of Acclimate, {about.get('version')}: install that one, or ask its operator",
        )
    proof = keys.ed25519.sign(b"acclimate/account/v2\n" + digests.canonical(asked))
    answer = client.make_account(
        name,
        role=role,
        ed25519=keys.public,
        proof=base64.b64encode(proof).decode(),
        challenge=asked["challenge"],
        invitation=invitation,
    )
    account = Account(client.url, str(answer["id"]), str(answer["role"]), str(answer["token"]))
    files.write_json(path, dataclasses.asdict(account))
    return account


def check_owner(folder: Path, server: str, *, name: str, role: str, moved: bool = False) -> None:
    """Refuse a key folder that has another account, or the document of another custodian.

    Args:
        folder: the key folder.
        server: the server's address.
        name: the account's.
        role: the account's.
        moved: whether the account's server may have another address now; its log is known by the key that the folder keeps.

    Raises:
        Refusal: conflict, file_unreadable.
    """
    path = folder / ACCOUNT_FILE
    if path.exists():
        account = load_account(folder)
        if (account.id, account.role) != (name, role):
            raise _other_account(path, account, name)
        if account.server != server and not (moved and (folder / LOG_KEY_FILE).exists()):
            raise _elsewhere(path, account)
    path = folder / DOCUMENT_FILE
    if path.exists():
        document = files.read_json(path)
        own = document.get("name") if isinstance(document, dict) else None
        if (own, "custodian") != (name, role):
            raise Refusal(
                "conflict",
                f"{path} is of the custodian {own!r}, asked for was {name!r} as {role}",
                hint=f"--name {own} --role custodian --invitation CODE; or name another folder",
            )


def log_key(client: Client, folder: Path, *, follow: bool = False) -> str:
    """The key of the server's log; where the folder keeps one, the same, or one to which it was handed over.

    Args:
        client: a connection to the server.
        folder: the key folder.
        follow: whether to take the later key where hand-overs lead to it.

    Raises:
        Refusal: server_unreachable, proof_invalid, rotation_invalid; log_inconsistent, where the folder keeps another.
    """
    found = str(client.server().get("log"))
    log.parse_vkey(found)
    path = folder / LOG_KEY_FILE
    if path.exists() and (kept := _read_text(path)) != found:
        chain = key_chain.chain_to(client, kept)
        if not follow:
            told = "; ".join(f"log entry {hand_over.index}: {hand_over.reason}" for hand_over in chain.hand_overs)
            raise Refusal(
                "log_inconsistent",
                f"{client.url} has the log {found}, {path} keeps {kept}, which was handed over ({told})",
                hint="the old key signed it: the same command with --renew takes the new one, and gets a new token",
            )
    return found


def given_up(client: Client, folder: Path) -> tuple[GivenUp, ...]:
    """Where the key that the folder keeps, and each one after it, was handed over; none where the server still has it.

    Raises:
        Refusal: log_inconsistent, rotation_invalid, proof_invalid.
    """
    path = folder / LOG_KEY_FILE
    if not path.exists():
        return ()
    turns = key_chain.chain_to(client, _read_text(path)).hand_overs
    return tuple(GivenUp(turn.old.text(), turn.index, turn.root) for turn in turns)


def keep_log_key(folder: Path, vkey: str, *, ended: Sequence[GivenUp] = ()) -> None:
    """Keep a log's key in the key folder, for `--log-key DIR`; `log_key` has said that it may follow one that is there.

    That one is kept, too, in `log.older.vkeys`, with where it was given up: what it signed is of its time, and of no later one.
    """
    path = folder / LOG_KEY_FILE
    before = _read_text(path) if path.exists() else vkey
    if before != vkey:
        left = {one.vkey: one for one in [*_older(folder), *(ended or [GivenUp(before)])] if one.vkey != vkey}
        lines = "".join(f"{one.text()}\n" for one in left.values())
        files.write(folder / OLDER_LOG_KEYS_FILE, lines.encode(), mode=0o644)
    if before != vkey or not path.exists():
        files.write(path, f"{vkey}\n".encode(), mode=0o644)


def known_logs(folder: Path) -> list[LogKeys]:
    """The logs whose keys a key folder keeps: that of log.vkey, with its older keys, then those of a custodian's pins.

    Raises:
        Refusal: file_unreadable.
    """
    newest, *others = kept_log_keys(folder) or [""]
    if not (folder / LOG_KEY_FILE).exists():
        return [LogKeys(key) for key in [newest, *others] if key]
    own = LogKeys(newest)
    left = {one.vkey: one for one in _older(folder)}
    # A round was pinned under it once; that it is another one now is all that is known.
    left |= {key: GivenUp(key) for key in _pinned(folder) if LogKeys(key).origin == own.origin and key not in left}
    return [LogKeys(newest, tuple(one for one in left.values() if one.vkey != newest)), *map(LogKeys, others)]


def _older(folder: Path) -> list[GivenUp]:
    path = folder / OLDER_LOG_KEYS_FILE
    return [GivenUp.parse(line) for line in _read_text(path).splitlines()] if path.exists() else []


def kept_log_keys(folder: Path) -> list[str]:
    """The log keys that a key folder takes for those of now, each once: of log.vkey, and of a custodian's pins.json.

    A pin of the log that log.vkey is of counts for nothing beside it: its key may have been given up since.

    Raises:
        Refusal: file_unreadable.
    """
    own = [_read_text(folder / LOG_KEY_FILE)] if (folder / LOG_KEY_FILE).exists() else []
    pinned = [key for key in _pinned(folder) if all(LogKeys(key).origin != LogKeys(kept).origin for kept in own)]
    return list(dict.fromkeys([*own, *pinned]))


def _pinned(folder: Path) -> list[str]:
    if not (folder / PINS_FILE).exists():
        return []
    try:
        return [str(pin["log"]) for pin in files.read_json(folder / PINS_FILE).values()]
    except (AttributeError, KeyError, TypeError) as error:
        raise Refusal("file_unreadable", f"{folder / PINS_FILE} does not hold pins") from error


def load_account(folder: Path) -> Account:
    """The account of a key folder.

    Raises:
        Refusal: file_unreadable, key_refused.
    """
    path = folder / ACCOUNT_FILE
    if not path.exists():
        raise Refusal(
            "file_unreadable",
            f"{path} does not exist: these keys have no account yet",
            hint=f"acclimate register --server URL --name NAME --keys {folder}",
        )
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise Refusal("key_refused", f"{path} holds a token and others may read it", hint=f"chmod 600 {path}")
    values = files.read_json(path)
    names = {field.name for field in dataclasses.fields(Account)}
    sound = isinstance(values, dict) and set(values) == names
    if not sound or not all(
        isinstance(value, str) and value.isascii() and value.isprintable() for value in values.values()
    ):
        raise Refusal(
            "file_unreadable",
            f"{path} is not an account",
            hint=f"restore it, or ask for a new token: acclimate register --renew --keys {folder} …",
        )
    return Account(**values)


def save_receipt(client: Client, path: Path, *, index: int, vkey: str, request: Request) -> Path:
    """Fetch the receipt of a log entry, check it, and write it to a file.

    Args:
        client: a connection to the log's server.
        path: where to write it.
        index: the entry's index.
        vkey: the log's key, as text.
        request: the signed request that the entry must be the record of.

    Raises:
        Refusal: proof_invalid, where the receipt does not verify or is of something else.
    """
    text = client.proof(index)
    receipt = log.Receipt.parse(text)
    record = receipt.verify(_signer(client, receipt, vkey))
    found = {"type": record.type, "round": record.round, "fields": record.fields, "by": record.by, "sig": record.sig}
    if receipt.index != index or found != request:
        raise Refusal(
            "proof_invalid", f"the receipt of log entry {index} is of something else: {record.type} by {record.by}"
        )
    files.write(path, text.encode(), mode=0o644)
    return path


def lacks_quorum(client: Client, path: Path, defined: Record) -> bool:
    """Whether a receipt has fewer cosignatures than its round asks for.

    Raises:
        Refusal: proof_invalid, file_unreadable, server_unreachable.
    """
    quorum = Quorum.of(defined.fields)
    if quorum.needed == 0:
        return False
    receipt = log.Receipt.parse(_read_text(path) + "\n")
    return not quorum.reached(receipt.open(_signer(client, receipt, defined["log"]), quorum.witnesses)[1])


def _signer(client: Client, receipt: log.Receipt, vkey: str) -> log.Verifier:
    """Whose checkpoint a receipt has: the round's key, or one that it was handed over to since, when the round was long over."""
    chain = hand_overs.Chain(log.parse_vkey(vkey))
    if chain.first.key_id not in {signature.key_id for signature in log.parse_note(receipt.checkpoint).signatures}:
        chain = hand_overs.follow(key_chain.receipts(client), chain.first)
    return chain.of(receipt.checkpoint)


def _other_account(path: Path, account: Account, name: str) -> Refusal:
    hint = "one folder holds the keys of one account; name another folder"
    if account.id == name:
        hint = f"for this account add --role {account.role}; an account in another role has another name and folder"
    sentence = f"{path} is the account {account.id!r} ({account.role}) at {account.server}"
    return Refusal("conflict", sentence, hint=hint)


def _elsewhere(path: Path, account: Account) -> Refusal:
    hint = "has the server moved? the same command with --renew takes the new address, where it has the same log; else name another folder"
    if not (path.parent / LOG_KEY_FILE).exists():
        hint = f"has the server moved? put the log's key, as you got it elsewhere, into {path.parent / LOG_KEY_FILE}, then add --renew"
    return Refusal("conflict", f"{path} is the account {account.id!r} ({account.role}) at {account.server}", hint=hint)


def _read_text(path: Path) -> str:
    return reading.text(path, log.LONGEST_RECEIPT).strip()
