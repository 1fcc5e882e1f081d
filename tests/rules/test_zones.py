"""UTC needs no database of time zones: images without one verify rounds too."""

import os
import subprocess
import sys


def test_utc_is_known_without_a_database_of_zones():
    code = (
        "import sys\nsys.modules['tzdata'] = None\nfrom acclimate_competitions import zones\n"
        "print(zones.zone('UTC'), zones.zone(''))\ntry:\n    zones.zone('Europe/Berlin')\n"
        "except __import__('zoneinfo').ZoneInfoNotFoundError:\n    print('unknown')\n"
    )
    environment = {**os.environ, "PYTHONTZPATH": ""}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert found.stdout == "UTC UTC\nunknown\n", found.stderr
