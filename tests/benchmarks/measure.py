"""`make bench`: how long the parts of the demo take here, what sealing costs beside plain SHA-256, log appends, dispatch.

Writes Markdown to stdout.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import admission
import control_plane
import evaluating
import log_appends
import log_verify
import makespan
import on_ray
import overhead
import preparing
import rank_confidence
import rounds_read
import seal
import takeover

from acclimate_competitions import records


def demo(folder: Path) -> list[tuple[str, float]]:
    """Seconds of the demo's parts: those it notes itself, and the phases of its round."""
    out = folder / "result.json"
    command = [sys.executable, "-m", "acclimate", "demo", "--data", str(folder / "data"), "--json", str(out)]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = list(json.loads((folder / "data" / "timings.json").read_text("utf-8")).items())
    phases = json.loads(out.read_text("utf-8"))["phases"]
    for before, after in zip(phases, phases[1:], strict=False):
        seconds = records.parse_time(after["at"]) - records.parse_time(before["at"])
        rows.append((f"… of it {before['phase']} → {after['phase']}", seconds.total_seconds()))
    return [*rows, ("whole demo", time.monotonic() - began)]


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = demo(folder)
        append_rows = log_appends.measure(folder / "appends")
        verify_rows = log_verify.measure(folder / "verify")
        dispatch_rows = admission.measure(folder / "admission") + takeover.measure(folder / "takeover")
        dispatch_rows += overhead.measure(folder / "overhead") + control_plane.measure(folder / "control")
        read_rows = rounds_read.measure(folder / "rounds")
        ray_rows, ratios = on_ray.measure(folder / "ray")
        evaluation_rows = evaluating.measure(folder / "evaluating")
        preparation_rows = preparing.measure(folder / "preparing")
        rank_lines = rank_confidence.lines()
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}",
        "",
        "| part | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.1f} |" for name, seconds in rows),
        "",
        *seal.lines(),
        "",
        "| log | a second |",
        "| --- | --- |",
        *(f"| {name} | {rate:.0f} |" for name, rate in append_rows),
        "",
        "| audit | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in verify_rows),
        "",
        "| dispatch | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in [*dispatch_rows, *ray_rows]),
        "",
        "| reading rounds from MLflow | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in read_rows),
        "",
        *rank_lines,
        "",
        "| multiple choice, examples a second of one thread's processor time | |",
        "| --- | --- |",
        *(f"| {name} | {rate:.0f} |" for name, rate in evaluation_rows),
        "",
        "| preparation, tokens a second of one thread's processor time; of the clock | |",
        "| --- | --- |",
        *(f"| {name} | {words} |" for name, words in preparation_rows),
        "",
        "| simulated makespan over max(total / slots, longest) | |",
        "| --- | --- |",
        *(f"| {name} | {ratio:.3f} |" for name, ratio in makespan.measure()),
        "",
        "| makespan on a cluster of Ray over max(total / slots, longest) | |",
        "| --- | --- |",
        *(f"| {name} | {ratio:.3f} |" for name, ratio in ratios),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
