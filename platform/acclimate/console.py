"""What a server process says to its operator: one JSON line an event on standard error; ids and reasons, never a key or a token."""

import json
import sys
import time
from typing import Any


def say(event: str, **facts: Any) -> None:
    """Write one line."""
    sys.stderr.write(json.dumps({"at": round(time.time(), 3), "event": event, **facts}) + "\n")
    sys.stderr.flush()
