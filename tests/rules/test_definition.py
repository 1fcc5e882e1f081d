import dataclasses
import json
import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from acclimate_competitions import definition, digests, metrics, parsing, tasks
from acclimate_competitions.errors import Refusal

SHIPPED = (definition.shipped("digits") / "competition.toml").read_text("utf-8")
DATES = """
opens = 2027-03-01T00:00:00Z
closes = 2027-04-01T12:00:00+02:00
closes_latest = { local = 2027-04-15T12:00:00, zone = "Europe/Berlin" }
release_by = 2027-05-01T00:00:00Z
"""
BASE = SHIPPED.replace('name = "2027-1"', 'name = "2027-1"' + DATES.rstrip())


def problems(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(Refusal) as caught:
        definition.parse(text.encode() if isinstance(text, str) else text)
    assert caught.value.code == "definition_invalid"
    assert caught.value.hint or "UTF-8" in caught.value.sentence
    return caught.value.problems


def test_the_shipped_definition_parses_to_its_values():
    competition = definition.parse(BASE.encode())
    assert competition.digest == digests.of_bytes(BASE.encode())
    assert [task.name for task in competition.tasks] == ["digit", "parity", "at-least-five", "prime"]
    assert competition.round.opens == datetime(2027, 3, 1, tzinfo=UTC)
    assert competition.round.closes == datetime(2027, 4, 1, 10, tzinfo=UTC)
    assert competition.round.closes_latest == datetime(2027, 4, 15, 10, tzinfo=UTC)
    assert competition.round.grace == timedelta(minutes=10)
    assert competition.preparation.lr_grid == (0.002, 0.005)
    assert competition.preparation.seeds == (11, 12, 13)
    assert competition.isolation.memory == 2 * 2**30
    assert competition.isolation.wall == timedelta(minutes=30)
    assert competition.entrants_see == "tail:200"
    assert competition.ranking.baselines == ("majority", "untrained")


def test_dates_may_be_absent():
    settings = definition.parse(SHIPPED.encode()).round
    assert (settings.opens, settings.closes, settings.closes_latest, settings.release_by) == (None, None, None, None)


def test_who_publishes_is_the_definitions_to_say():
    said = {
        'publish = "manual"': ("manual", None),
        'publish = "auto"': ("auto", None),
        'publish_within = "14d"': ("manual", timedelta(days=14)),
    }
    for text, expected in said.items():
        settings = definition.parse(SHIPPED.replace('publish = "manual"', text).encode()).round
        assert (settings.publish, settings.publish_within) == expected


def test_every_value_in_force_has_an_origin():
    short = BASE.replace("clip = 1.0\n", "").replace('[isolation]\nmemory = "2GiB"\nwall = "30m"\n', "")
    competition = definition.parse(short.encode())
    values = competition.effective()
    assert set(values) == set(competition.origins)
    assert (values["preparation.clip"], competition.origins["preparation.clip"]) == (1.0, "default")
    assert (values["isolation.memory"], competition.origins["isolation.memory"]) == (2**31, "default")
    line = short.splitlines().index("threads = 1") + 1
    assert competition.origins["preparation.threads"] == f"line {line}"
    assert values["round.closes"] == "2027-04-01T10:00:00Z"


def test_values_are_shown_as_a_file_has_them():
    """What is shown of durations and sizes may be typed into a definition, and means the same."""
    for lines, shown in (("90s", "90s"), ("120m", "2h"), ("0s", "0s"), ("48h", "2d")):
        text = re.sub(r'grace = "[^"]*"', f'grace = "{lines}"', BASE)
        written = definition.parse(text.encode()).written()
        assert written["round.grace"] == shown
        again = text.replace(f'grace = "{lines}"', f'grace = "{shown}"')
        assert definition.parse(again.encode()).effective() == definition.parse(text.encode()).effective()
    for lines, shown in (("2GiB", "2GiB"), ("3000MB", "3GB"), ("2048MiB", "2GiB"), ("1500B", "1500B")):
        found = definition.parse(BASE.replace('memory = "2GiB"', f'memory = "{lines}"').encode())
        assert found.written()["isolation.memory"] == shown
    assert found.written()["compute.memory"] == "0"
    plain = {name: value for name, value in found.effective().items() if not isinstance(value, int)}
    assert plain.items() <= found.written().items() and set(found.written()) == set(found.effective())


def test_what_an_attempt_takes_of_a_machine():
    plain = definition.parse(BASE.encode())
    assert (plain.compute.cpus, plain.compute.gpus, plain.compute.memory, dict(plain.compute.labels)) == (1, 0, 0, {})
    assert plain.effective()["compute.labels"] == {} and plain.origins["compute.labels"] == "default"
    lines = 'cpus = 2\ngpus = 0.25\nmemory = "3GiB"\nlabels = { pool = "a", "ray.io/accelerator-type" = "H100" }\n'
    text = BASE.replace("[compute]\n", f"[compute]\n{lines}")
    asked = definition.parse(text.encode())
    values = asked.effective()
    assert (values["compute.cpus"], values["compute.gpus"], values["compute.memory"]) == (2, 0.25, 3 * 2**30)
    assert values["compute.labels.ray.io/accelerator-type"] == "H100" and set(values) == set(asked.origins)
    line = text.splitlines().index("gpus = 0.25") + 1
    assert asked.origins["compute.gpus"] == f"line {line}"
    assert asked.origins["compute.labels.pool"] == f"line {line + 2}"
    # It is no part of what a result follows from.
    assert asked.preparation.digest == plain.preparation.digest and asked.ranking.digest == plain.ranking.digest


def test_a_recipe_of_adapters_names_their_rank_weight_and_targets():
    from acclimate_competitions.recipe import Lora

    text = BASE.replace('method = "full"', 'method = "lora"\nlora = { rank = 8, alpha = 16 }')
    found = definition.parse(text.encode())
    assert (found.preparation.method, found.preparation.lora) == ("lora", Lora(8, 16.0, ("attention", "mlp")))
    values = found.effective()
    assert set(values) == set(found.origins) and values["preparation.lora.rank"] == 8
    assert found.origins["preparation.lora.targets"] == "default"
    line = text.splitlines().index("lora = { rank = 8, alpha = 16 }") + 1
    assert found.origins["preparation.lora.alpha"] == f"line {line}"
    as_table = BASE.replace('method = "full"', 'method = "lora"') + "[preparation.lora]\nrank = 8\nalpha = 16.0\n"
    assert definition.parse(as_table.encode()).preparation == found.preparation
    plain = definition.parse(BASE.encode())
    assert plain.preparation.lora is None and plain.effective()["preparation.lora"] is None
    assert found.preparation.digest != plain.preparation.digest
    mlp = definition.parse(text.replace("alpha = 16", 'alpha = 16, targets = ["mlp"]').encode())
    assert mlp.preparation.lora == Lora(8, 16.0, ("mlp",))


@pytest.mark.parametrize("lines", ['memory = "0"', "labels = {}", "gpus = 8", "cpus = 0.07"])
def test_what_an_attempt_may_take(lines: str):
    found = definition.parse(BASE.replace("[compute]\n", f"[compute]\n{lines}\n").encode())
    assert set(found.effective()) == set(found.origins)


def test_the_digest_is_over_the_bytes_not_the_meaning():
    assert definition.parse(BASE.encode() + b"\n").digest != definition.parse(BASE.encode()).digest


def test_metrics_of_definitions_exist():
    for kind, names in tasks.METRICS.items():
        assert set(names) == {name for name, metric in metrics.METRICS.items() if kind in metric.kinds}


def test_one_metric_for_all_tasks():
    mixed = BASE.replace('metric = "accuracy"', 'metric = "nll"', 1)
    assert len(problems(mixed)) == 3
    tasks = definition.parse(
        BASE.replace('metric = "accuracy"', 'metric = "nll"').replace("chance = 0.1\n", "").encode()
    ).tasks
    assert tasks[0].chance == pytest.approx(2.302585)


CASES = [
    # old text, new text, what the problem says
    ("epochs = 6", "epochs = 6\nepoches = 6", "preparation.epoches is not a known key; did you mean preparation.epochs?"),
    ("[compute]", "[computer]", "computer is not a known key; did you mean compute?"),
    ("clip = 1.0", "clip = 1.0\nclip = 2.0", "preparation.clip stands twice, first on line"),
    ("[compute]", "[custody]\nthreshold = 2\n[compute]", "custody stands twice, first on line"),
    ("opens = 2027-03-01T00:00:00Z", "opens = 2027-03-01T00:00:00", "has no offset: write 2027-03-01T00:00:00Z"),
    ("opens = 2027-03-01T00:00:00Z", "opens = 2027-03-01", 'zone = "Europe/Berlin"'),
    ("opens = 2027-03-01T00:00:00Z", 'opens = "2027-03-01T00:00:00Z"', "round.opens must be a time"),
    ("opens = 2027-03-01T00:00:00Z", "opens = 0001-01-01T00:00:00+14:00", "must be in the years 2000 to 2999"),
    ("local = 2027-04-15T12:00:00", "local = 2027-10-31T02:30:00", "write 2027-10-31T00:30:00Z or 2027-10-31T01:30:00Z"),
    ("local = 2027-04-15T12:00:00", "local = 2027-03-28T02:30:00", "does not exist"),
    ("local = 2027-04-15T12:00:00", "local = 2027-04-15T12:00:00Z", "round.closes_latest must be {"),
    ('zone = "Europe/Berlin"', 'zone = "Europe/Atlantis"', 'zone "Europe/Atlantis" is unknown'),
    ('zone = "Europe/Berlin"', 'zone = "../etc/passwd"', "is unknown"),
    ("closes = 2027-04-01T12:00:00+02:00", "closes = 2027-03-01T02:00:00+02:00", "round.closes = 2027-03-01T00:00:00Z: must be after opens"),
    ("closes = 2027-04-01T12:00:00+02:00", "closes = 2027-04-15T12:00:01+02:00", "closes, 2027-04-15T10:00:01Z"),
    ("release_by = 2027-05-01T00:00:00Z", "release_by = 2027-04-15T10:00:00Z", "must be after closes_latest"),
    ('grace = "10m"', 'grace = "60"', "round.grace must be a duration"),
    ('grace = "10m"', "grace = 60", "round.grace must be a duration"),
    ('grace = "10m"', 'grace = "-5s"', "round.grace must be a duration"),
    ('publish = "manual"', 'publish = "manuel"', "did you mean 'manual'?"),
    ('publish = "manual"', 'publish = "auto"\npublish_within = "7d"', 'round.publish_within is for `publish = "manual"`'),
    ('publish = "manual"', 'publish_within = "59s"', "round.publish_within = '59s': must be from 60s"),
    ('holdout_after = "public"', 'holdout_after = "private"', 'round.holdout_after = "private": needs `auditor`'),
    ("audits = 0", "audits = 2", "round.audits = 2: needs `auditor`, the name of a second operator"),
    ("audits = 0", 'audits = 2\nauditor = "custodian-a"', 'round.auditor = "custodian-a" is a custodian, too'),
    ("audits = 0", 'audits = 2\nauditor = "the lab"', "round.auditor = 'the lab': must be"),
    ("audits = 0", 'audits = 2\nauditor = "lab"\naudit_tolerance = -1', "must not be negative"),
    ('name = "2027-1"', 'name = "2027/1"', "round.name = '2027/1': must be lower-case"),
    ("threshold = 2", "threshold = 4", "custody.threshold = 4: there are only 3 custodians"),
    ("threshold = 2", "threshold = 0", "custody.threshold = 0: must be at least 1"),
    ("threshold = 2", "threshold = 2.0", "custody.threshold must be a whole number, not 2.0"),
    ("threshold = 2", "threshold = true", "custody.threshold must be a whole number, not true"),
    ('"custodian-b", ', '"custodian-a", ', 'custody.custodians[1] = "custodian-a" stands twice'),
    ('"custodian-b", ', '"Custodian B", ', "custody.custodians[1] = 'Custodian B': must be lower-case"),
    ('kinds = ["hf-causal-lm"]', 'kinds = ["hf-image-classifier"]', 'submission.kinds: hf-image-classifier goes with tasks that all have an `image`'),
    ('["llama", "gpt2", "gpt_neox"]', '["lama"]', "submission.architectures[0] = \"lama\" is unknown: did you mean 'llama'?"),
    ('["llama", "gpt2", "gpt_neox"]', "[]", "submission.architectures must not be empty"),
    ("max_bytes = 20_000_000", "max_bytes = 0", "submission.max_bytes = 0: must be at least 1"),
    ("max_bytes = 20_000_000", "max_bytes = 9007199254740993", "must be at most 9007199254740991"),
    ('day = "UTC"', 'day = "Moon"', "no such time zone"),
    ("per_day = 5", "per_day = 0", "submission.per_entrant.per_day = 0: must be at least 1"),
    ('name = "parity"', 'name = "digit"', 'tasks[1].name = "digit" is the name of another task'),
    ('name = "parity"', 'name = "../x"', "tasks[1].name = '../x': must be"),
    ('choices = ["even", "odd"]\n', "", "tasks[1].choices is missing"),
    ('choices = ["even", "odd"]', 'choices = ["even", "even"]', 'tasks[1].choices[1] = "even" stands twice'),
    ('choices = ["even", "odd"]', 'choices = ["even"]', "tasks[1].choices are 1: must be at least 2"),
    ('choices = ["even", "odd"]', 'choices = ["even", " "]', "tasks[1].choices[1] must not be blank"),
    ('metric = "accuracy"', 'metric = "f1"', 'tasks[0].metric = "f1" is unknown'),
    ("chance = 0.1", "chance = 1.5", "tasks[0].chance = 1.5: must be at most 1"),
    ("chance = 0.1", "chance = nan", "tasks[0].chance = nan: must be finite"),
    ('method = "full"', 'method = "lora"', 'preparation.lora is missing: `method = "lora"` needs it, such as lora = {'),
    ("seeds = [11, 12, 13]", "seeds = [0, 12, 13]", "preparation.seeds[0] = 0 is the selection seed"),
    ("seeds = [11, 12, 13]", "seeds = [11, 12]", "preparation.seeds are 2: at least 3 reporting seeds"),
    ("seeds = [11, 12, 13]", "seeds = [11, 12, 12]", "preparation.seeds[2] = 12 stands twice"),
    ("seeds = [11, 12, 13]", "seeds = [11, 12, -3]", "preparation.seeds[2] = -3: must not be negative"),
    ("lr_grid = [2e-3, 5e-3]", "lr_grid = []", "preparation.lr_grid must not be empty"),
    ("lr_grid = [2e-3, 5e-3]", "lr_grid = [2e-3, inf]", "preparation.lr_grid[1] = inf: must be finite"),
    ("lr_grid = [2e-3, 5e-3]", "lr_grid = [2e-3, -1]", "preparation.lr_grid[1] = -1.0: must be above 0"),
    ("clip = 1.0", "clip = -1.0", "preparation.clip = -1.0: must be above 0"),
    ("beta1 = 0.9", "beta1 = 1.0", "preparation.optimizer.beta1 = 1.0: must be below 1"),
    ("weight_decay = 0.01", "weight_decay = -0.01", "preparation.optimizer.weight_decay = -0.01: must not be negative"),
    ("warmup_steps = 10", "warmup_step = 10", "preparation.schedule.warmup_step is not a known key"),
    ("epochs = 6", "epochs = -1", "preparation.epochs = -1: must be at least 1"),
    ('aggregate = "mean"', 'aggregate = "casp"', 'ranking.aggregate = "casp" is unknown: allowed is "mean", "mean_rank"'),
    ("level = 0.95", "level = 1", "ranking.interval.level = 1: must be below 1"),
    ("level = 0.95", "level = 0", "ranking.interval.level = 0: must be above 0"),
    ("tolerance = 0.0", "tolerance = -0.1", "ranking.ties.tolerance = -0.1: must not be negative"),
    ('["majority", "untrained"]', '["majority", "majority"]', 'ranking.baselines[1] = "majority" stands twice'),
    ('["majority", "untrained"]', '["majority", 3]', "ranking.baselines[1] must be text, not 3"),
    ('memory = "2GiB"', 'memory = "2G"', "isolation.memory must be a size"),
    ('memory = "2GiB"', "memory = 2147483648", "isolation.memory must be a size"),
    ('wall = "30m"', 'wall = "0s"', "isolation.wall = '0s': must be from 1s"),
    ('entrants_see = "tail:200"', 'entrants_see = "tail:0"', "logs.entrants_see = 'tail:0': must be"),
    ("schema = 1", "schema = 2", "schema = 2 is unknown"),
    ("schema = 1", "schema = true", "schema = true is unknown"),
    ('title = "Handwritten', 'title = "\\u202eHandwritten', "title must be text of 1 to 2000 characters without control"),
    ("data_is_public = true", "data_is_public = 1", "data_is_public must be true or false, not 1"),
    ("seeds = [11, 12, 13]", "seeds = [11, 12, 4294967296]", "preparation.seeds[2] = 4294967296: must be at most 4294967295"),
    ("seed = 0,", "seed = 9_300_000_000_000,", "preparation.selection.seed = 9300000000000: must be at most 4294967295"),
    ("seed = 1 }", "seed = 4294967296 }", "ranking.interval.seed = 4294967296: must be at most 4294967295"),
    ("draws = 10_000", "draws = 100_001", "ranking.interval.draws = 100001: must be at most 100000"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\ncpus = 0", "compute.cpus = 0: must be above 0"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\ncpus = 0.005", "compute.cpus = 0.005: must be a multiple of 0.01"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\ngpus = -1", "compute.gpus = -1: must not be negative"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\ngpus = 1.5", "compute.gpus = 1.5: must be whole, or a share below 1 of one GPU"),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\ngpus = "1"', 'compute.gpus must be a number, not "1"'),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\nmemory = 0", "compute.memory must be a size"),
    ('hardware = "cpu"', 'hardware = "tpu"', "compute.hardware = 'tpu': must be cpu or cuda"),
    ('hardware = "cpu"', 'hardware = "cuda/NVIDIA-H200"\ngpus = 0', "compute.gpus = 0: hardware = \"cuda\" computes on a GPU"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\nprocesses = 2", "compute.processes = 2: each needs a CPU, cpus is 1"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\nprocesses = 65", "compute.processes = 65: must be at most 64"),
    ('hardware = "cpu"', 'hardware = "cuda"\ngpus = 2\nprocesses = 1', "compute.processes = 1: each has a GPU of its own, gpus is 2"),
    ('hardware = "cpu"', 'hardware = "cuda"\ngpus = 0.5\nprocesses = 2\ncpus = 2', "compute.processes = 2: each has a GPU of its own"),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\nweights = "shards"', 'compute.weights = "shards": of one process there is one shard only'),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\nweights = "shard"', "compute.weights = \"shard\" is unknown: did you mean 'shards'?"),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\nmemory = "0GiB"', "compute.memory = '0GiB': must be above 0"),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\nlabels = ["H100"]', "compute.labels must be a table"),
    ("max_gpu_hours = 0", "max_gpu_hours = 0\nlabels = { zone = 3 }", "compute.labels.zone must be text, not 3"),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\nlabels = { zone = "in(a,b)" }', "compute.labels.zone = 'in(a,b)': must be at most 63"),
    ("max_gpu_hours = 0", f'max_gpu_hours = 0\nlabels = {{ "{"a." * 126}aa/x" = "a" }}', "/x is not a name that is allowed here"),
    ("max_gpu_hours = 0", 'max_gpu_hours = 0\nlabels = { "-x" = "a" }', "compute.labels.-x is not a name that is allowed here: at most 63"),
    ('method = "full"', 'method = "lorra"', "preparation.method = \"lorra\" is unknown: did you mean 'lora'?"),
    ('method = "full"', 'method = "full"\nlora = { rank = 8, alpha = 16 }', 'preparation.lora is for `method = "lora"`: with "full"'),
    ('method = "full"', 'lora = { rank = 8, alpha = 16 }', 'preparation.lora is for `method = "lora"`'),
    ('method = "full"', 'method = "lora"\nlora = { rank = 0, alpha = 16 }', "preparation.lora.rank = 0: must be at least 1"),
    ('method = "full"', 'method = "lora"\nlora = { rank = -8, alpha = 16 }', "preparation.lora.rank = -8: must be at least 1"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 1025, alpha = 16 }', "preparation.lora.rank = 1025: must be at most 1024"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8.0, alpha = 16 }', "preparation.lora.rank must be a whole number, not 8.0"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8, alpha = 0 }', "preparation.lora.alpha = 0: must be above 0"),
    ('method = "full"', 'method = "lora"\nlora = { alpha = 16 }', "preparation.lora.rank is missing"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8 }', "preparation.lora.alpha is missing"),
    ('method = "full"', 'method = "lora"\nlora = {}', "preparation.lora.rank is missing"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8, alpha = 16, targets = ["atention"] }', "preparation.lora.targets[0] = \"atention\" is unknown: did you mean 'attention'?"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8, alpha = 16, targets = ["mlp", "q_proj"] }', 'preparation.lora.targets[1] = "q_proj" is unknown: allowed is "attention", "mlp"'),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8, alpha = 16, targets = [] }', "preparation.lora.targets must not be empty"),
    ('method = "full"', 'method = "lora"\nlora = { rank = 8, alpha = 16, dropout = 0.1 }', "preparation.lora.dropout is not a known key"),
    ('method = "full"', 'method = "lora"\nlora = 8', "preparation.lora must be a table"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "says"), CASES, ids=[f"{index}-{case[1][:40]}" for index, case in enumerate(CASES)]
)
def test_bad_values_are_named_with_their_line_and_all_at_once(old: str, new: str, says: str):
    assert old in BASE
    text = BASE.replace(old, new, 1)
    found = problems(text + "nonsense = 1\n")
    hits = [problem for problem in found if says in problem]
    assert hits, found
    begin = BASE[: BASE.index(old)].count("\n") + 1
    # The problem stands on a line of the changed text, on that of the table a key is missing in, or on that of a later date.
    line = int(hits[0].split(":")[0].removeprefix("line "))
    near = BASE.splitlines().index("[[tasks]]") if not new or "missing" in says else begin
    assert near <= line <= begin + max(new.count("\n"), 12 if not new else 1 if "closes" in old else 0), (
        hits[0],
        begin,
    )
    last = text.count("\n") + 1
    assert f"line {last}: logs.nonsense is not a known key" in found
    assert len(found) <= 4


def test_all_problems_of_a_file_come_at_once_by_line():
    text = BASE
    chosen = [3, 24, 41, 48, 52, 66]
    for old, new, _ in (CASES[index] for index in chosen):
        text = text.replace(old, new, 1)
    text = text.replace('title = "', 'title = "" # "', 1).replace("clip = 1.0", "clip = 1.0\nclip = 2.0")
    found = problems(text)
    for says in ("title must be text", "preparation.clip stands twice", *(CASES[index][2] for index in chosen)):
        assert any(says in problem for problem in found), (says, found)
    lines = [int(problem.split(":")[0].removeprefix("line ")) for problem in found]
    assert lines == sorted(lines)


def test_missing_tables_are_one_problem_each():
    found = problems('schema = 1\nslug = "x"\ntitle = "X"\nlicence = "none"\ncontact = "x@example.org"\n')
    assert sorted(found) == [
        "line 1: custody is missing: write a table [custody]",
        "line 1: preparation is missing: write a table [preparation]",
        "line 1: round is missing: write a table [round]",
        "line 1: submission is missing: write a table [submission]",
        "line 1: tasks is missing: write at least one [[tasks]]",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = 1\ntitle = \n", "line 2: not TOML: invalid value"),
        ("schema = 1\n\n[round\nname = 3\n", "line 3: not TOML"),
        ('schema = 1\ntitle = "x', "line 2: not TOML"),
        ("schema = 1\nx = {a = 1, a = 2}\n", "line 2: not TOML"),
        (b"schema = 1\n\ntitle = '\xff'\n", "line 3: a byte is not UTF-8"),
        ("x = " + "[" * 3000, "not TOML"),
        ("x = " + "9" * 5000, "not TOML"),
    ],
    ids=range(7),
)  # fmt: skip
def test_what_is_not_toml_is_refused_with_its_line(text: str | bytes, says: str):
    assert any(says in problem for problem in problems(text))


def test_an_empty_file_lacks_everything():
    assert len(problems("")) == 10


TRICKY = '''\
# a comment with [brackets] and key = value
a.b . "c d" = 1
'lit.eral' = """
not = "a key"
\\"""
still [text] ""\""
list = [ # comment ]
  1,
  # two
  [2, { deep = 3, 'er'.x = "]}" }],
  \'\'\'
  x = [
  \'\'\',
]
[t]   # header
[t.u]
z = { p = [1,
  2], q = { r = 1979-05-27 07:32:00Z } }
[[arr]]
n = 1
[arr.sub]
m = 1
[[arr]]
n = +inf
[[arr.deep]]
[[arr.deep]]
k = 0x_f
'''.replace("0x_f", "0xf")


def paths(value: object, path: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path} - {()} | {p for key, item in items for p in paths(item, (*path, key))}


@pytest.mark.parametrize("text", [TRICKY, BASE, TRICKY.replace("\n", "\r\n")], ids=["tricky", "digits", "crlf"])
def test_the_scan_finds_exactly_the_keys_that_tomllib_finds(text: str):
    parsed = parsing.parse(text.encode())
    assert parsed.problems == ()
    assert parsed.values == tomllib.loads(text)
    assert set(parsed.lines) == paths(parsed.values)


def test_the_scan_knows_the_line_of_each_key():
    lines = {parsing.dotted(path): line for path, line in parsing.parse(TRICKY.encode()).lines.items()}
    expected = {
        "a.b.c d": 2, "lit.eral": 3, "list": 7, "list[0]": 8, "list[1]": 10, "list[1][1].deep": 10, "list[2]": 11,
        "t": 15, "t.u": 16, "t.u.z": 17, "t.u.z.p[1]": 18, "t.u.z.q.r": 18, "arr[0].n": 20, "arr[0].sub": 21,
        "arr[1]": 23, "arr[1].deep[0]": 25, "arr[1].deep[1].k": 27,
    }  # fmt: skip
    assert {name: lines[name] for name in expected} == expected


def test_load_takes_a_folder_and_names_a_missing_file(tmp_path: Path):
    (tmp_path / "competition.toml").write_text(BASE, "utf-8")
    assert definition.load(tmp_path) == definition.load(tmp_path / "competition.toml")
    with pytest.raises(Refusal, match=r"nowhere\.toml") as caught:
        definition.load(tmp_path / "nowhere.toml")
    assert caught.value.code == "file_unreadable"


@pytest.mark.parametrize("slug", ["nothing", "../digits", "", "acclimate_competitions"])
def test_an_unknown_slug_is_refused_with_what_there_is(slug: str):
    with pytest.raises(Refusal, match="comes with Acclimate") as caught:
        definition.shipped(slug)
    assert "digits" in caught.value.hint


# ---- tasks of other kinds ------------------------------------------------------------------------------------------

GENERATE = """[[tasks]]
name = "sums"
kind = "generate"
prompt = "{{ input }} ="
stop = ["\\n", "."]
max_tokens = 8
extract = "(-?[0-9]+)"
take = "last"
normalize = ["strip", "lower"]
metric = "exact_match"
"""
PERPLEXITY = """[[tasks]]
name = "prose"
kind = "perplexity"
metric = "bits_per_byte"
"""


def with_tasks(*texts: str, aggregate: str = "mean") -> str:
    head, _, rest = BASE.partition("[[tasks]]")
    tail = rest[rest.index("\n[preparation]") :]
    return (head + "\n".join(texts) + tail).replace('aggregate = "mean"', f'aggregate = "{aggregate}"')


def test_tasks_of_other_kinds_are_read():
    competition = definition.parse(with_tasks(GENERATE, PERPLEXITY, aggregate="win_rate").encode())
    sums, prose = competition.tasks
    assert (sums.stop, sums.max_tokens, sums.extract, sums.take) == (("\n", "."), 8, "(-?[0-9]+)", "last")
    assert (sums.normalize, sums.chance, sums.truth) == (("strip", "lower"), 0.0, "target")
    assert (prose.prompt, prose.chance, prose.truth, prose.choices) == ("{{ input }}", 8.0, "input", ())
    assert set(prose.document()) == {"name", "kind", "metric", "chance", "tokenize"}
    assert competition.effective()["tasks[0].stop"] == ["\n", "."] and "tasks[1].prompt" not in competition.effective()
    for task in competition.tasks:
        assert tasks.from_values(json.loads(json.dumps(dataclasses.asdict(task)))) == task


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('stop = ["\\n", "."]', "stop = []", "tasks[0].stop are 0: must be 1 to 8"),
        ('stop = ["\\n", "."]', 'stop = [""]', "tasks[0].stop[0] must have 1 to 64 characters"),
        ("max_tokens = 8", "max_tokens = 0", "tasks[0].max_tokens = 0: must be at least 1"),
        ("max_tokens = 8", "max_tokens = 32", "tasks[0].max_tokens = 32: must be below preparation.max_length, 32"),
        ('"(-?[0-9]+)"', '"[0-9]+"', "tasks[0].extract has no group: write the answer's part in parentheses"),
        ('"(-?[0-9]+)"', '"([0-9]+"', "tasks[0].extract is no regular expression of RE2: missing )"),
        ('extract = "(-?[0-9]+)"\n', "", "tasks[0].take is for `extract`"),
        ('"lower"]', '"upper"]', "tasks[0].normalize[1] = \"upper\" is unknown"),
        ('metric = "exact_match"', 'metric = "accuracy"', 'tasks[0].metric = "accuracy" is unknown: allowed is'),
        ('kind = "perplexity"', 'kind = "perplexity"\nprompt = "x"', "tasks[1].prompt is not a known key"),
        ('kind = "perplexity"', 'kind = "perplexity"\nchance = 0', "tasks[1].chance = 0: must be above 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tasks_of_other_kinds_is_named(old: str, new: str, says: str):
    text = with_tasks(GENERATE, PERPLEXITY, aggregate="win_rate")
    assert old in text
    assert [problem for problem in problems(text.replace(old, new, 1)) if says in problem]


def test_metrics_of_several_scales_have_no_mean():
    (problem,) = problems(with_tasks(GENERATE, PERPLEXITY))
    assert 'tasks[1].metric = "bits_per_byte": the mean over tasks needs one metric' in problem
