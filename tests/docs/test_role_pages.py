"""The pages of the roles are programs: their commands parse, their names exist, and one round is played by them.

In these pages a block fenced as `sh` is run, in the order printed, by the person whose page it is, in a home and a work folder of their own. A
`text` block after it is what it prints, compared loosely: `…` stands for anything, columns may be wider. A `console` block belongs to another
machine or another day; its `acclimate` commands are parsed only. What a reader fills in stands at the top of the page, in lines
`export NAME=value`; those values, and no others, are replaced here (`Person.own`).
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from chosen_ports import free_port
from pages_read import DOCS, ROOT, Block, blocks, command_lines, commands, exported, page, spoken

from acclimate.api.access import ACCESS
from acclimate.config import SETTINGS
from acclimate.service import accounts
from acclimate_competitions.errors import CODES

WITHIN = 240.0
"""Seconds that a process may take; not from waiting.py, as this file is also imported without its neighbours."""

ROLES = ("organizers", "entrants", "custodians", "operators", "auditors")
PLAYED = {
    "organizers": tuple(f"{number} " for number in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12)),
    "entrants": ("1 ", "2 ", "3 ", "Try it at home", "4 ", "5 ", "6 ", "After the close"),
    "custodians": ("Before", "Day 1", "Day 2", "Day 3"),
    "operators": ("1 ", "2 ", "3 ", "4 ", "5 ", "Backup", "Remove what nobody needs"),
    "auditors": ("1 ", "2 ", "4 ", "What the lines mean", "5 "),
}
"""Page -> the headings under which a round is played, as they begin; what stands under others and is to be typed is fenced as `console`."""
MUST_SHOW = {
    "organizers": (
        "register", "competition build", "competition check", "competition show", "plan", "round create", "round seal",
        "status", "enter", "submit", "round extend", "round publish", "round bundle", "round report", "round void",
        "ranking",
    ),
    "entrants": (
        "register", "status", "round files", "competition model", "check", "prepare", "evaluate", "enter", "submit", "submission status",
        "submission withdraw", "receipt verify", "ranking", "round bundle",
    ),
    "custodians": (
        "custodian keygen", "register", "custodian ack", "custodian inspect", "custodian release",
        "custodian approve-void", "custodian void", "custodian send",
    ),
    "operators": (
        "doctor", "up", "invite", "config", "db check", "db upgrade", "db accept-loss", "backup", "restore", "blobs gc", "log rotate", "api", "dispatch", "mlflow", "plan", "status",
    ),
    "auditors": ("round bundle", "verify", "receipt verify", "log mirror", "log check", "log keys", "audit keygen", "audit run", "audit status", "audit report"),
}  # fmt: skip
CLIENTS_OWN = {"ACCLIMATE_KEYS", "ACCLIMATE_SERVER", "ACCLIMATE_TOKEN", "ACCLIMATE_CONFIG"}


# ---- what a page says exists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROLES)
def test_each_command_line_of_a_page_parses(name: str) -> None:
    known = commands()
    lines = list(command_lines(name))
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)[1:]
        path = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        assert path in known, f"{name}.md: {line}"
        try:
            known[path].make_context(path, words[len(path.split()) :])  # type: ignore[attr-defined]
        except Exception as error:
            pytest.fail(f"{name}.md: {line}: {error}")


@pytest.mark.parametrize("name", ROLES)
def test_a_page_shows_its_roles_commands(name: str) -> None:
    said = spoken(name)
    assert [
        command for command in MUST_SHOW[name] if not any(f"{text} ".startswith(f"{command} ") for text in said)
    ] == []


def test_operators_read_how_to_invite_each_role_that_has_a_page_and_needs_it() -> None:
    invited = set(re.findall(r"acclimate invite --role ([a-z]+)", page("operators")))
    assert invited == {role for role in accounts.ROLES if f"{role}s" in ROLES}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for path in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:|mailto:", link):
                continue
            target, _, anchor = link.partition("#")
            there = (path.parent / target).resolve() if target else path
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors that headings of a Markdown file have."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("name", ROLES)
def test_refusals_settings_and_routes_named_on_a_page_exist(name: str) -> None:
    text = page(name)
    table = re.search(r"^\| (?:code|it says) \|.*?(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert table, f"{name}.md has no table of refusals"
    codes = {
        code for row in table[0].splitlines()[2:] for code in re.findall(r"`([a-z]+_?[a-z_]*)`", row.split(" | ")[0])
    }
    codes |= set(re.findall(r"\[`([a-z_]+)`\]\(errors\.md\)", text))
    assert len(codes) >= 5
    assert codes <= set(CODES), codes - set(CODES)
    variables = {word for word in re.findall(r"\bACCLIMATE_[A-Z_]+", text)} - CLIENTS_OWN
    assert {word.removeprefix("ACCLIMATE_").lower() for word in variables} <= {*SETTINGS, "data"}
    for setting in re.findall(r"(?<!of )\bsettings? `([a-z_]+)`", text):
        assert setting in SETTINGS, setting
    routes = set(re.findall(r"`(/(?:v1/\w+|healthz|readyz|metrics))`", text))
    assert routes <= {path for _, path in ACCESS}, routes


@pytest.mark.parametrize("name", ROLES)
def test_a_page_can_be_copied_once_its_names_are_set(name: str) -> None:
    known = {"HOME"}
    for block in blocks(name):
        assert block.language in ("sh", "console", "text", "ini", "nginx", "toml"), f"{name}.md:{block.line}"
        if block.language != "sh":
            continue
        text = re.sub(r"(^|\s)#.*$", "", block.text, flags=re.MULTILINE)
        for line in text.splitlines():
            used = set(re.findall(r"\$\{?([A-Za-z][A-Za-z_]*)", re.sub(r"'[^']*'", "", line)))
            known |= set(re.findall(r"\b([A-Z][A-Z_]*)=", line)) if line.startswith("export ") else set()
            known |= set(re.findall(r"\bfor (\w+) in", line))
            assert used <= known | {"ROUND"}, f"{name}.md:{block.line}: {line}"


# ---- one round, played by the pages --------------------------------------------------------------------------------


@dataclass
class Person:
    """Somebody who reads a page and types what it says, in a home and a work folder of their own.

    Attributes:
        own: what this person fills in where the page has `export NAME=value`.
        done: how many blocks of the page have been run.
    """

    name: str
    page: str
    root: Path
    own: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        self.home, self.work = self.root / self.name, self.root / self.name / "work"
        self.work.mkdir(parents=True)
        (self.home / "terminal").touch()
        self.blocks = [block for block in blocks(self.page) if block.language in ("sh", "text")]

    def variables(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
        return {**clean, "HOME": str(self.home), "PATH": path, "TZ": "UTC", **self.environment}

    def script(self, text: str) -> str:
        """A block as this person types it: their own values, in a terminal that remembers what was exported."""

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            return f"{name}={shlex.quote(self.own[name])}" if name in self.own else match[0]

        lines = [
            re.sub(r"\b([A-Z][A-Z_]*)=([^\s$#]+)", fill, line) if line.startswith("export ") else line
            for line in text.splitlines()
        ]
        return "\n".join([". ~/terminal", *lines, "export -p > ~/terminal"])

    def type(self, line: str) -> None:
        """Type a line into the terminal, whose exports stay."""
        with (self.home / "terminal").open("a") as terminal:
            terminal.write(f"{line}\n")

    def next(self, heading: str) -> Block:
        assert heading in PLAYED[self.page]
        block = self.blocks[self.done]
        assert block.language == "sh", f"{self.page}.md:{block.line}: output of nothing"
        assert block.heading.startswith(heading), f"{self.page}.md:{block.line}: {block.heading}, expected {heading}"
        self.done += 1
        return block

    def act(self, *headings: str) -> str:
        """Run all blocks under these headings, in order; what they printed."""
        printed = ""
        for heading in headings:
            self.next_is(heading)
            while self.done < len(self.blocks) and self.blocks[self.done].heading.startswith(heading):
                printed += self.run(self.next(heading))
        return printed

    def again(self, heading: str) -> None:
        """Run the blocks under a heading once more."""
        done, self.done = self.done, next(i for i, block in enumerate(self.blocks) if block.heading.startswith(heading))
        self.act(heading)
        self.done = done

    def put_off(self, heading: str) -> None:
        """Pass over the blocks under a heading, which `again` runs later: what takes long and needs no round."""
        self.next_is(heading)
        while self.blocks[self.done].heading.startswith(heading):
            self.done += 1

    def next_is(self, heading: str) -> None:
        assert self.done < len(self.blocks), f"{self.page}.md has nothing to run under {heading!r}"
        assert self.blocks[self.done].heading.startswith(heading)

    def run(self, block: Block) -> str:
        line = ["bash", "-euo", "pipefail", "-c", self.script(block.text)]
        ran = subprocess.run(
            line, cwd=self.work, env=self.variables(), capture_output=True, text=True, timeout=900, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        where = f"{self.name}, {self.page}.md:{block.line}"
        assert ran.returncode == 0, f"{where}\n{block.text}\n{ran.stdout}\n{ran.stderr}"
        self.compare(ran.stdout + ran.stderr, where)
        return ran.stdout

    def compare(self, printed: str, where: str) -> None:
        """Hold what was printed against the text block that follows, if one does."""
        if self.done == len(self.blocks) or self.blocks[self.done].language != "text":
            return
        shown = self.blocks[self.done]
        self.done += 1
        found = "\n".join(" ".join(line.split()) for line in printed.splitlines())
        examples = exported(self.page)
        for line in filter(str.strip, shown.text.splitlines()):
            for name in ("NAME", "SERVER", "ACCLIMATE_PORT", "ACCLIMATE_MLFLOW_PORT"):
                if name in self.own and name in examples:
                    line = line.replace(examples[name], self.own[name])
            pattern = r"\s+".join(re.escape(word).replace("…", ".*") for word in line.split())
            assert re.search(pattern, found), f"{where}: the page shows {line!r}, printed was\n{printed}"

    @property
    def finished(self) -> bool:
        return self.done == len(self.blocks)


def bound(line: list[str]) -> list[str]:
    """A program that the kernel ends (SIGTERM) when the process that starts it is gone, however that was ended."""
    path = shutil.which(line[0])
    assert path is not None
    code = "import sys; from acclimate.supervision import bind; bind(int(sys.argv[1]), sys.argv[2:])"
    return [sys.executable, "-c", code, str(os.getpid()), path, *line[1:]]


@pytest.mark.parametrize("name", ROLES)
def test_whatever_a_page_has_to_run_is_run_where_a_round_is_played(name: str) -> None:
    """The round itself is played by a slow test; a block that nobody runs there is seen here."""
    lost = [
        f"{name}.md:{block.line}: {block.heading}"
        for block in blocks(name)
        if block.language in ("sh", "text") and not block.heading.startswith(PLAYED[name])
    ]
    assert lost == []
    assert [found for found in PLAYED[name] if not any(b.heading.startswith(found) for b in blocks(name))] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_what_the_pages_start_ends_when_pytest_is_killed(tmp_path: Path) -> None:
    told, ended = tmp_path / "pid", tmp_path / "ended"
    line = (
        f"echo $$ > {told}.draft; trap 'touch {ended}; exit' TERM; mv {told}.draft {told}; while :; do sleep 0.05; done"
    )
    code = (
        "import subprocess, sys, time; sys.path[:0] = sys.argv[2:]; from test_role_pages import bound;"
        " subprocess.Popen(bound(['bash', '-c', sys.argv[1]]), start_new_session=True); time.sleep(600)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, line, *sys.path], cwd=tmp_path)
    until = time.monotonic() + WITHIN
    try:
        while not told.exists():
            assert killed.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.2)
        assert not ended.exists()
    finally:
        killed.kill()
        killed.wait()
    while not ended.exists():
        assert time.monotonic() < until, f"process {told.read_text()} goes on"
        time.sleep(0.05)


def wait_for(url: str, process: "subprocess.Popen[str]", log: Path) -> None:
    until = time.monotonic() + WITHIN
    while True:
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        try:
            if httpx.get(url, trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)


def await_line(log: Path, text: str) -> str:
    """What a log says, once it has a whole line with this."""
    until = time.monotonic() + WITHIN
    while text not in (said := log.read_text()).rpartition("\n")[0]:
        assert time.monotonic() < until, said
        time.sleep(0.1)
    return said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_round_is_played_by_the_pages(tmp_path: Path) -> None:
    port, pages_port = free_port(), free_port()
    server = f"http://127.0.0.1:{port}"

    # The operator.
    ports = {"ACCLIMATE_PORT": str(port), "ACCLIMATE_MLFLOW_PORT": str(pages_port)}
    operator = Person(
        "operator", "operators", tmp_path, {**ports, "ACCLIMATE_DATA": str(tmp_path / "srv"), "BACKUP": str(tmp_path / "backup")},
        # Ray has tests of its own; here it would cost a minute.
        {"ACCLIMATE_RUNNER": "local"},
    )  # fmt: skip
    operator.act("1 ", "2 ")
    block = operator.next("3 ")
    log = tmp_path / "up.log"
    with log.open("w") as stream:
        line = bound(["bash", "-euo", "pipefail", "-c", ". ~/terminal\nexec " + block.text])
        up = subprocess.Popen(
            line, cwd=operator.work, env=operator.variables(), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(f"{server}/readyz", up, log)
        wait_for(f"http://127.0.0.1:{pages_port}/health", up, log)
        operator.compare(await_line(log, "Ctrl-C stops everything"), "operators.md, 3")
        play(operator, tmp_path, server, pages_port)
        operator.act("Backup", "Remove what nobody needs")
        assert (tmp_path / "backup/BACKUP.json").exists() and (tmp_path / "backup/keys/log.pem").exists()
        assert operator.finished
        up.send_signal(signal.SIGINT)
        assert up.wait(WITHIN) == 0
    finally:
        if up.poll() is None:
            os.killpg(up.pid, signal.SIGKILL)
            up.wait()


def play(operator: Person, root: Path, server: str, pages_port: int) -> None:
    """Everybody else's part of the round, in the order of a real one."""
    invitations = operator.act("4 ").split()
    assert len(invitations) == 4

    # The organizer, before the round; the custodians' first day.
    began = time.monotonic()
    own = {"SERVER": server, "INVITATION": invitations[0], "NAME": "acme", "OPENS": "+0s", "LATEST": "+3h"}
    organizer = Person("organizer", "organizers", root, own)
    organizer.act("1 ", "2 ", "3 ")
    custodians = []
    for name, code in zip(("custodian-a", "custodian-b", "custodian-c"), invitations[1:], strict=True):
        own = {"SERVER": server, "INVITATION": code, "NAME": name, "BACKUP": str(root / f"stick-{name}" / "key.txt")}
        (root / f"stick-{name}").mkdir()
        custodians.append(Person(name, "custodians", root, own))
        custodians[-1].act("Before", "Day 1")
        # The mail.
        shutil.copy(custodians[-1].home / "custodian-keys/custodian.json", organizer.work / f"{name}.json")
    # How long it is open follows from how fast this machine has been so far.
    pace = time.monotonic() - began
    window = max(60.0, 5 * pace)
    organizer.own["CLOSES"] = f"+{window:.0f}s"
    closes = time.monotonic() + window
    round_id = organizer.act("5 ").split()[-1]

    # Sealed, acknowledged, open; extended, as a round may be.
    organizer.act("6 ")
    for person in custodians:
        # Another day, another terminal: what was missing on the first day is filled in.
        person.type(f"export ROUND={round_id}")
        person.act("Day 2")
    organizer.act("7 ")
    organizer.own["LATER"] = later = f"+{max(closes - time.monotonic(), 20 + 1.5 * pace) + 10:.0f}s"
    closes = time.monotonic() + float(later[1:-1])
    organizer.act("8 ", "9 ")
    entrants = []
    for name, model in (("ada", "birch"), ("bela", "elm")):
        own = {"SERVER": server, "ROUND": round_id, "NAME": name, "MODEL": model}
        entrants.append(Person(name, "entrants", root, own))
        began = time.monotonic()
        entrants[-1].act("1 ", "2 ", "3 ")
        entrants[-1].put_off("Try it at home")
        took = time.monotonic() - began
        if closes - time.monotonic() < 1.5 * took + 15:
            # A slow machine: the organizer types the same again.
            more = 2.5 * took + 20
            organizer.own["LATER"], closes = f"+{more:.0f}s", time.monotonic() + more
            organizer.again("8 ")
        entrants[-1].act("4 ", "5 ", "6 ")
    operator.type(f"export ROUND={round_id}")
    operator.act("5 ")

    # Closed, prepared, released, evaluated, published.
    organizer.act("10 ")
    for person in custodians[:2]:
        person.act("Day 3")
        assert person.finished
    organizer.act("11 ", "12 ")
    assert organizer.finished
    for person in entrants:
        person.act("After the close")
        assert person.finished
    entrants[0].again("Try it at home")
    ranked = subprocess.run(
        ["acclimate", "ranking", round_id, "--server", server], env=organizer.variables(), capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    assert all(re.search(rf"\b{person.name}\b", ranked) for person in entrants)
    assert "untrained (baseline)" in ranked

    # The auditor has the log's key from a custodian, and the receipts from an entrant.
    auditor = Person("auditor", "auditors", root, {"SERVER": server, "ROUND": round_id})
    shutil.copy(custodians[0].home / "custodian-keys/log.vkey", auditor.work / "log.vkey")
    shutil.copytree(entrants[0].home / "my-keys/receipts", auditor.work / "receipts")
    auditor.act("1 ", "2 ", "4 ", "What the lines mean", "5 ")
    assert auditor.finished

    # The analyst has MLflow's address, and nothing else.
    analyst = re.search(r"^```python\n(.*?)^```$", page("analysts"), re.MULTILINE | re.DOTALL)
    assert analyst
    names = f'tracking_uri = "http://127.0.0.1:{pages_port}"\ncompetition = "digits"\nround_name = "2027-1"\n'
    until = time.monotonic() + WITHIN
    while True:
        ran = subprocess.run(
            [sys.executable, "-c", names + analyst[1]], env=organizer.variables(), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        # MLflow gets the results after the record has them.
        if ran.returncode == 0 and all(person.name in ran.stdout for person in entrants):
            return
        assert time.monotonic() < until, ran.stdout + ran.stderr
        time.sleep(2)
