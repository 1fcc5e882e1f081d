"""`acclimate witness` as processes on real files: made, run, killed at any moment, run twice, robbed of its memory, on a full disk."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import witnessed
from typer.testing import CliRunner
from waiting import WITHIN
from witnessed import SmallLog, acclimate

from acclimate import log, notes, witness_folder
from acclimate.cli.main import app
from acclimate.witness import LARGEST_REQUEST
from acclimate_competitions.errors import Refusal

NAME = "witness.example/w1"


@pytest.fixture
def small() -> SmallLog:
    return SmallLog(size=5)


def refused(*words: str) -> Refusal:
    """The refusal of a command line, in this process."""
    done = CliRunner().invoke(app, ["witness", *words])
    assert isinstance(done.exception, Refusal), done.output
    assert done.exception.hint
    return done.exception


def lines(running: witnessed.Running) -> list[dict[str, object]]:
    return [json.loads(line) for line in running.errors.read_text("utf-8").splitlines()]


def cosigned(running: witnessed.Running, small: SmallLog, answer: httpx.Response, size: int) -> int:
    assert answer.status_code == 200, answer.text
    witness = notes.parse_vkey(running.vkey)
    opened = log.open_checkpoint(small.checkpoint(size) + answer.text, small.signer.verifier, [witness])
    return opened.cosigned[running.vkey]


# ---- made and run ------------------------------------------------------------------------------------------------------


def test_a_partner_makes_a_witness_runs_it_and_looks_at_it(tmp_path: Path, small: SmallLog) -> None:
    folder = tmp_path / "w1"
    made = acclimate("witness", "keygen", "--name", NAME, "--keys", str(folder))
    assert made.returncode == 0, made.stderr
    vkey = made.stdout.strip()
    assert notes.parse_vkey(vkey).kind == notes.COSIGNATURE
    assert (folder / "witness.vkey").read_text("utf-8").strip() == vkey
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir() if path.name != "witness.vkey"} == {
        "ed25519.pem": 0, "witness.db": 0,
    }  # fmt: skip
    (tmp_path / "log.vkey").write_text(f"{small.vkey}\n", "utf-8")
    with witnessed.witness(folder, [str(tmp_path / "log.vkey")]) as running:
        assert running.vkey == vkey
        at = cosigned(running, small, running.post(small.request(0)), 5)
        assert abs(at - time.time()) < WITHIN
        assert running.post(small.request(0)).status_code == 409
        shown = json.loads(acclimate("witness", "status", "--keys", str(folder), "--json").stdout)
        assert (shown["witness"], shown["running"], shown["refused"]) == (vkey, True, [])
        assert [(one["origin"], one["size"]) for one in shown["logs"]] == [(small.signer.origin, 5)]
        log.open_checkpoint(shown["logs"][0]["checkpoint"], small.signer.verifier)
        assert running.end() == 0
    events = [(line["event"], line.get("status")) for line in lines(running)]
    assert events == [("started", None), ("add-checkpoint", 200), ("add-checkpoint", 409), ("stopped", None)]
    after = acclimate("witness", "status", "--keys", str(folder))
    assert after.returncode == 0 and "not running" in after.stdout and small.signer.origin in after.stdout


def refusals(folder: Path) -> dict[tuple[str | None, int], int]:
    shown = json.loads(acclimate("witness", "status", "--keys", str(folder), "--json").stdout)
    return {(one["origin"], one["status"]): one["count"] for one in shown["refusals"]}


def test_every_refusal_is_counted_by_log_and_kind_also_after_a_restart(tmp_path: Path, small: SmallLog) -> None:
    folder, origin = tmp_path / "w1", small.signer.origin
    acclimate("witness", "keygen", "--name", NAME, "--keys", str(folder))
    forged, stranger = SmallLog(origin, size=5), SmallLog("log.elsewhere.example", size=5)
    with witnessed.witness(folder, [small.vkey]) as running:
        assert refusals(folder) == {}
        for body, status in (
            (forged.request(0), 403),
            (forged.request(0), 403),
            (stranger.request(0), 404),
            (b"nothing", 400),
            (b"x" * (LARGEST_REQUEST + 1), 413),
            (small.request(3), 409),
            (small.request(0), 200),
        ):
            assert running.post(body).status_code == status
        expected = {(origin, 403): 2, (origin, 409): 1, (None, 400): 1, (None, 404): 1, (None, 413): 1}
        until = time.monotonic() + WITHIN
        while refusals(folder) != expected and time.monotonic() < until:
            time.sleep(0.2)
        assert refusals(folder) == expected
        assert running.end() == 0
    with witnessed.witness(folder, [small.vkey]) as running:
        assert running.post(forged.request(0)).status_code == 403
        assert running.end() == 0  # what was counted last is written when it ends
    assert refusals(folder) == expected | {(origin, 403): 3}
    text = acclimate("witness", "status", "--keys", str(folder))
    assert text.returncode == 0 and re.search(
        rf"{re.escape(origin)} +403  not signed by a known key of the log +3 ", text.stdout
    )
    # The table's own column counts all of the log.
    assert re.search(rf"{re.escape(origin)} +5 .* 4$", text.stdout, re.MULTILINE), text.stdout


def test_a_finished_witness_is_not_made_again(tmp_path: Path) -> None:
    vkey = witnessed.make(tmp_path / "w1", NAME)
    again = acclimate("witness", "keygen", "--name", NAME, "--keys", str(tmp_path / "w1"), "--json")
    assert json.loads(again.stdout) == {"name": NAME, "vkey": vkey}
    other = refused("keygen", "--name", "another.example", "--keys", str(tmp_path / "w1"))
    assert other.code == "key_refused" and f"is the witness {NAME}, not another.example" in other.sentence
    for name in ("", "two words", "a+b", "tab\t", "https://w.example.org", "w.example.org/", "a\u202eb", "x" * 201):
        odd = refused("keygen", "--name", name, "--keys", str(tmp_path / "w2"))
        assert odd.code == "name_invalid" and not (tmp_path / "w2").exists()


def test_what_is_no_log_key_is_refused_before_anything_runs(tmp_path: Path) -> None:
    vkey = witnessed.make(tmp_path / "w1")
    for word, said in ((vkey, "kind 0x04, a log's is 0x01"), ("x+y", "is no verifier key"), ("./gone", "no such file")):
        for option in ("--log-key", "--log"):  # --log is of the first version
            assert said in refused("run", "--keys", str(tmp_path / "w1"), "--port", "0", option, word).sentence
    none = acclimate("witness", "run", "--keys", str(tmp_path / "w1"), "--port", "0")
    assert none.returncode == 2 and "--log-key KEY" in none.stderr
    assert "--log " not in acclimate("witness", "run", "--help").stdout


def test_where_there_is_no_witness_the_hint_says_how_to_make_one(tmp_path: Path, small: SmallLog) -> None:
    where = str(tmp_path / "nowhere")
    for words in (("status", "--keys", where), ("run", "--keys", where, "--log-key", small.vkey)):
        found = refused(*words)
        assert found.code == "file_unreadable" and f"keygen --name NAME --keys {where}" in found.hint


# ---- two on one memory -------------------------------------------------------------------------------------------------


def test_a_second_witness_on_the_folder_is_refused_and_told_who_has_it(tmp_path: Path, small: SmallLog) -> None:
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        done = acclimate("witness", "run", "--keys", str(tmp_path / "w1"), "--port", "0", "--log-key", small.vkey)
        assert done.returncode == 1 and f"process {running.process.pid} holds witness.lock" in done.stderr
        assert running.post(small.request(0)).status_code == 200


def test_a_taken_port_is_refused(tmp_path: Path, small: SmallLog) -> None:
    witnessed.make(tmp_path / "w2", "two.example")
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        port = running.url.rpartition(":")[2]
        done = refused("run", "--keys", str(tmp_path / "w2"), "--port", port, "--log-key", small.vkey)
        assert done.code == "config_invalid" and "choose another with --port" in done.hint


def test_of_many_that_ask_at_once_one_is_cosigned_and_the_others_are_told(tmp_path: Path, small: SmallLog) -> None:
    """Different growths and forks of one size at once, over sockets: one of them is the history from then on."""
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        assert running.post(small.request(0)).status_code == 200
        ways = [small.fork(5, 6 + number) for number in range(12)]
        with ThreadPoolExecutor(len(ways)) as pool:
            answers = list(pool.map(lambda way: running.post(way.request(5)), ways))
        assert sorted(answer.status_code for answer in answers) == [200, *[409] * 11]
        (winner,) = (way for way, answer in zip(ways, answers, strict=True) if answer.status_code == 200)
        assert {answer.text for answer in answers if answer.status_code == 409} == {f"{len(winner.entries)}\n"}


# ---- killed ------------------------------------------------------------------------------------------------------------

KILLED_AT = """
import os, signal, sys
from pathlib import Path
from acclimate import witness_folder

for step in range(100):
    left = step
    def watch(event, arguments):
        global left
        writes = event in ("os.link", "os.rename", "os.remove", "os.mkdir", "os.chmod", "sqlite3.connect")
        if writes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_CREAT)):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
    child = os.fork()
    if child == 0:
        sys.addaudithook(watch)
        witness_folder.create(Path(sys.argv[1]) / f"w{step}", sys.argv[2], now=1_700_000_000)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
    if status != -signal.SIGKILL:
        break
"""


def test_a_keygen_that_is_killed_at_any_step_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """SIGKILL before each thing that it does to the disk, in folders of their own, until one is not reached any more."""
    command = [sys.executable, "-c", KILLED_AT, str(tmp_path), NAME]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN)
    *killed, last = map(int, done.stdout.split())
    assert set(killed) == {-signal.SIGKILL} and last == 0, done.stderr
    unfinished = 0
    for step in range(len(killed)):
        folder = tmp_path / f"w{step}"
        key = (folder / "ed25519.pem").read_bytes() if (folder / "ed25519.pem").exists() else None
        if not (folder / "witness.vkey").exists():
            unfinished += 1
            with pytest.raises(Refusal):
                witness_folder.load(folder)
        made = witness_folder.create(folder, NAME, now=1_700_000_000)
        assert witness_folder.load(folder).verifier == made.verifier
        assert key is None or (folder / "ed25519.pem").read_bytes() == key
        made.memory().close()
    assert unfinished > 5


def keep_asking(
    running: witnessed.Running, small: SmallLog, given: list[tuple[int, str]], ended: threading.Event
) -> None:
    """Grow the log as fast as it is cosigned, and write down every cosignature that came."""
    while not ended.is_set():
        try:
            size = given[-1][0] if given else 0
            answer = running.post(small.request(size, size + 1))
            if answer.status_code == 409:
                # Cosigned, but the answer was lost with the process.
                size = int(answer.text)
                answer = running.post(small.request(size, size + 1))
            if answer.status_code == 200:
                given.append((size + 1, answer.text))
        except httpx.HTTPError:
            return


def killed_and_again(folder: Path, small: SmallLog, times: int, seed: int) -> None:
    """Kill the witness at random moments of its work. Whatever it has given it still knows, and the next one goes on from there."""
    given: list[tuple[int, str]] = []
    moments = random.Random(seed)
    port = "0"
    for _ in range(times):
        with witnessed.witness(folder, [small.vkey], "--port", port) as running:
            port = running.url.rpartition(":")[2]
            if given:
                size = int(running.post(small.request(0)).text)
                # Given means written down; written down need not mean given.
                assert given[-1][0] <= size <= given[-1][0] + 1
                other = small.fork(size - 1, size + 1)
                assert running.post(other.request(size)).status_code == 422
            ended, before = threading.Event(), len(given)
            thread = threading.Thread(target=keep_asking, args=(running, small, given, ended))
            thread.start()
            deadline = time.monotonic() + WITHIN
            while len(given) < before + 2:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(moments.random() / 20)
            running.kill()
            ended.set()
            thread.join()
            for size, text in given[before:]:
                log.open_checkpoint(
                    small.checkpoint(size) + text, small.signer.verifier, [notes.parse_vkey(running.vkey)]
                )
    assert [size for size, _ in given] == sorted({size for size, _ in given})


def test_a_witness_that_is_killed_knows_all_that_it_gave(tmp_path: Path) -> None:
    killed_and_again(tmp_path / "w1", SmallLog(size=400), times=3, seed=1)


@pytest.mark.slow
def test_a_witness_that_is_killed_forty_times_knows_all_that_it_gave(tmp_path: Path) -> None:
    killed_and_again(tmp_path / "w1", SmallLog(size=4000), times=40, seed=2)


@pytest.fixture
def strace(tmp_path: Path) -> Iterator[str]:
    """The command strace, where it is installed and may trace."""
    found = shutil.which("strace")
    if not found or subprocess.run([found, "-o", os.devnull, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs strace, and the right to trace")
    yield found


def test_the_answer_leaves_after_the_memory_is_on_the_disk(tmp_path: Path, small: SmallLog, strace: str) -> None:
    """In the order of system calls: journal and database are synced, the journal goes and its folder is synced, then the answer."""
    witnessed.make(tmp_path / "w1")
    trace = tmp_path / "trace"
    calls = "trace=fsync,fdatasync,unlink,unlinkat,sendto,sendmsg,write,writev"
    running = witnessed.start(
        tmp_path / "w1", [small.vkey], before=[strace, "-f", "-y", "-s", "12", "-e", calls, "-o", str(trace)]
    )
    try:
        assert running.post(small.request(0)).status_code == 200
        # strace goes on as long as the witness; it is this process's child, the witness its.
        pid = int((tmp_path / "w1" / "witness.lock").read_text("ascii"))
        os.kill(pid, signal.SIGTERM)
        running.process.wait(WITHIN)
    finally:
        running.close()
    text = trace.read_text("utf-8", "replace")
    answered = text.index("HTTP/1.1 200")
    synced = [found[1] for found in re.finditer(r"f(?:data)?sync\(\d+<([^>]*)>\)", text[:answered])]
    folder = str(tmp_path / "w1")
    assert f"{folder}/witness.db-journal" in synced
    after = synced[synced.index(f"{folder}/witness.db-journal") :]
    assert after.index(f"{folder}/witness.db") < len(after) - 1 - after[::-1].index(folder)


@pytest.mark.slow
def test_a_witness_killed_at_each_system_call_of_a_request_knows_what_it_gave(tmp_path: Path, strace: str) -> None:
    """SIGKILL in the place of the n-th write, sync or unlink of the whole process, for every n of one request."""
    small = SmallLog(size=50)
    size, killed = 0, 0
    for kind in ("pwrite64", "fsync,fdatasync", "unlink"):
        for number in range(1, 40):
            folder = tmp_path / "w1"
            if not folder.exists():
                witnessed.make(folder)
            inject = f"inject={kind}:signal=KILL:when={number}"
            running = witnessed.start(folder, [small.vkey], before=[strace, "-f", "-o", os.devnull, "-e", inject])
            try:
                answer = None
                try:
                    answer = running.post(small.request(size, size + 1))
                except httpx.HTTPError:
                    killed += 1
                if answer is not None:
                    # The request needed fewer calls of this kind than this.
                    assert answer.status_code == 200
                    size += 1
                    os.kill(int((folder / "witness.lock").read_text("ascii")), signal.SIGTERM)
                    running.process.wait(WITHIN)
                    break
                running.process.wait(WITHIN)
            finally:
                running.close()
            with witnessed.witness(folder, [small.vkey]) as after:
                found = after.post(small.request(size, size + 1))
                if found.status_code == 409:
                    # It had been written down, and the answer was lost.
                    assert int(found.text) == size + 1
                    assert after.post(small.request(size + 1, size + 1)).status_code == 200
                else:
                    assert found.status_code == 200
                size += 1
        else:
            raise AssertionError(f"a request needs forty calls of {kind}")
    assert killed >= 8


def test_what_is_under_way_is_finished_when_the_witness_is_asked_to_end(tmp_path: Path, small: SmallLog) -> None:
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        with ThreadPoolExecutor(20) as pool:
            ways = [small.fork(5, 30) for _ in range(20)]
            answers = [pool.submit(running.post, way.request(0, 5)) for way in ways]
            running.process.send_signal(signal.SIGTERM)
            codes = [found.result().status_code for found in answers if not found.exception()]
        assert set(codes) <= {200, 409} and running.process.wait(WITHIN) == 0


# ---- the memory --------------------------------------------------------------------------------------------------------


def test_a_witness_without_its_memory_does_not_begin_anew(tmp_path: Path, small: SmallLog) -> None:
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        running.post(small.request(0))
        running.end()
    (tmp_path / "w1" / "witness.db").rename(tmp_path / "kept.db")
    keys = ("--keys", str(tmp_path / "w1"))
    making = ("keygen", "--name", NAME, *keys)
    forgot = "does not know what it has cosigned"
    for words in (("run", *keys, "--port", "0", "--log-key", small.vkey), making, ("status", *keys)):
        assert forgot in refused(*words).sentence
    # Without its name the key is no unfinished witness either.
    (tmp_path / "w1" / "witness.vkey").unlink()
    assert forgot in refused(*making).sentence
    # Nor is the memory, once used, given to another key.
    (tmp_path / "kept.db").rename(tmp_path / "w1" / "witness.db")
    (tmp_path / "w1" / "ed25519.pem").rename(tmp_path / "kept.pem")
    assert "whose key is not here" in refused(*making).sentence
    (tmp_path / "kept.pem").rename(tmp_path / "w1" / "ed25519.pem")
    assert acclimate("witness", *making).returncode == 0
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        assert running.post(small.request(0)).status_code == 409


def test_a_memory_that_is_taken_or_replaced_under_a_running_witness_stops_it(tmp_path: Path, small: SmallLog) -> None:
    """Else it would go on in a file that nobody has any more, and know nothing of it after the next start."""
    folder = tmp_path / "w1"
    with witnessed.witness(folder, [small.vkey]) as running:
        assert running.post(small.request(0)).status_code == 200
        shutil.copyfile(folder / "witness.db", tmp_path / "old.db")
        assert running.post(small.grow(2).request(5)).status_code == 200
        (folder / "witness.db").rename(tmp_path / "moved.db")
        assert running.post(small.grow(2).request(7)).status_code == 503
        shutil.copyfile(tmp_path / "old.db", folder / "witness.db")
        assert running.post(small.request(7)).status_code == 503
        (tmp_path / "moved.db").rename(folder / "witness.db")
        assert cosigned(running, small, running.post(small.request(7)), 9)
        assert [line["event"] for line in lines(running)].count("memory failed") == 2


def test_a_key_that_others_may_read_is_not_used(tmp_path: Path, small: SmallLog) -> None:
    witnessed.make(tmp_path / "w1")
    (tmp_path / "w1" / "ed25519.pem").chmod(0o644)
    done = refused("run", "--keys", str(tmp_path / "w1"), "--port", "0", "--log-key", small.vkey)
    assert "mode 0644" in done.sentence and "chmod 600" in done.hint


def test_on_a_full_disk_nothing_is_cosigned_and_afterwards_it_goes_on(tmp_path: Path, small: SmallLog) -> None:
    """The process may write no file beyond its first page, so neither journal nor memory: SQLite meets what a full disk says."""
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        assert running.post(small.request(0)).status_code == 200
        running.end()
    code = (
        "import os, resource, sys; most = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (most, most));"
        " os.execv(sys.argv[2], sys.argv[2:])"
    )
    limited = witnessed.start(tmp_path / "w1", [small.vkey], before=[sys.executable, "-c", code, "4096"])
    try:
        answer = limited.post(small.grow(3).request(5))
        assert answer.status_code == 503 and "operator" in answer.text and str(tmp_path) not in answer.text
        assert ("memory failed", "no_space") in [(line["event"], line.get("code")) for line in lines(limited)]
        # It still answers what it knows.
        assert limited.post(small.request(0)).text == "5\n"
    finally:
        limited.close()
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        assert cosigned(running, small, running.post(small.request(5)), 8)
