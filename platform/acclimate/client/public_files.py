"""A round's public files, downloaded as a folder that looks like the built competition without its holdout."""

from pathlib import Path

from acclimate import files
from acclimate.client.connection import Client
from acclimate.client.definitions import definition_of
from acclimate_competitions import bases, digests, splits
from acclimate_competitions.errors import Refusal

DEFINITION_FILE = "competition.toml"


def download(client: Client, round_id: str, out: Path) -> dict[str, str]:
    """Download a round's definition and public files, each checked against RoundDefined; digest by name.

    The folder is laid out as a built competition, without the holdout. A file that is there already and is the right one is
    kept, so that an interrupted call goes on where it stopped.

    Raises:
        Refusal: as definition_of; log_inconsistent; file_unreadable, where the folder holds something else.
    """
    defined, competition = definition_of(client, round_id)
    wanted = {DEFINITION_FILE: str(defined["definition"]), **defined["files"]}
    # What a server names is no path on this machine: only names that a competition can have are taken.
    known = {f"splits/{task.name}/{split}.parquet" for task in competition.tasks for split in splits.PUBLIC}
    odd = sorted(wanted.keys() - known - {DEFINITION_FILE, "tokenizer.json"})
    # The names of a base's files are checked, too.
    odd = [name for name in odd if not name.startswith(f"{bases.FOLDER}/")]
    if odd := odd or bases.problems(defined["files"], competition.submission.bases):
        raise Refusal("log_inconsistent", f"{defined.round} names a public file that no competition has: {odd[0]!r}")
    there = out / DEFINITION_FILE
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not there.is_file() or digests.of_file(there) != defined["definition"]:
            raise Refusal("file_unreadable", f"{out} holds something else", hint="name a new folder with --out")
    for name, digest in wanted.items():
        path = out / name
        if path.is_file() and digests.of_file(path) == digest:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == DEFINITION_FILE:
            files.write(path, client.definition(defined.round), mode=0o644)
        else:
            client.file(defined.round, name, path)
        if digests.of_file(path) != digest:
            path.unlink()
            raise Refusal("log_inconsistent", f"the server's {name} is not the file that {defined.round} commits to")
    return wanted
