"""Files that are written for good: whole, lasting, and refused by the right name where the disk gives no more."""

import subprocess
import sys
from pathlib import Path

WRITTEN = """
import sys
from pathlib import Path
from acclimate import files
place, said = Path(sys.argv[1]), []
def hook(event, arguments):
    if event in ("open", "os.rename") and str(place) in str(arguments[0]):
        said.append((event, Path(str(arguments[0])).name))
sys.addaudithook(hook)
files.write(place / "pins.json", b"x")
print(said[-2][0], said[-1])
"""

LIMITED = """
import resource, signal, sys
from pathlib import Path
from acclimate import files
from acclimate_competitions.errors import Refusal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    files.write(Path(sys.argv[1]) / "pins.json", b"x" * 2000)
except Refusal as refusal:
    print(refusal.code)
"""


def ran(code: str, where: Path) -> str:
    words = [sys.executable, "-c", code, str(where)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_a_file_s_new_name_is_made_to_last_before_the_command_goes_on(tmp_path: Path) -> None:
    assert ran(WRITTEN, tmp_path) == f"os.rename ('open', '{tmp_path.name}')"
    assert (tmp_path / "pins.json").read_bytes() == b"x"


def test_a_file_that_may_not_grow_so_far_is_no_space_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    assert ran(LIMITED, tmp_path) == "no_space"
    assert list(tmp_path.iterdir()) == []
