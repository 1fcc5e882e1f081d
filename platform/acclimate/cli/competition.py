"""`acclimate competition`: build a competition's splits, check its folder, show its definition, train a model to try with."""

import importlib.util
import json
import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.output import dumps, emit, plain
from acclimate_competitions import definition
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal, installing

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build a competition's splits, check its folder, show its definition, train a model to try with.",
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command(
    epilog="Example: acclimate competition build digits --out digits-data, or your own folder: "
    "acclimate competition build ./my-competition --out my-data"
)
def build(
    slug: Annotated[str, typer.Argument(help="A competition that comes with Acclimate, or a folder with a build.py.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write; an earlier build there is replaced.")],
    as_json: _Json = False,
) -> None:
    """Build the splits of a competition into a folder, and check them."""
    from rich.console import Console

    with Console(stderr=True).status(f"building {slug}"):
        result = build_into(_source(slug, "build.py"), out)
    _print_checked(result, as_json=as_json)


@app.command(epilog="Example: acclimate competition check digits-data")
def check(
    folder: Annotated[Path, typer.Argument(help="A built competition: competition.toml, splits/, tokenizer.json.")],
    as_json: _Json = False,
) -> None:
    """Check a competition's definition and splits; all problems are reported at once."""
    _print_checked(checked(folder), as_json=as_json)


@app.command(epilog="Example: acclimate competition show digits")
def show(
    folder: Annotated[str, typer.Argument(help="A folder, or a competition that comes with Acclimate.")],
    as_json: _Json = False,
) -> None:
    """Show the definition in force: every value as the file would have it, and whether it comes from a line of the file or is the default.

    With --json durations are seconds, and sizes bytes.
    """
    competition = definition.load(_source(folder, "competition.toml"))
    if as_json:
        values = competition.effective()
        rows = {key: {"value": value, "from": competition.origins.get(key, "default")} for key, value in values.items()}
        typer.echo(dumps({"digest": competition.digest, "values": rows}, indent=1))
        return
    values = competition.written()
    width = max(len(key) for key in values)
    typer.echo(plain(f"{competition.title} ({competition.slug}), definition {competition.digest}"))
    for key, value in values.items():
        text = json.dumps(value, ensure_ascii=False) if value is not None else "-"
        typer.echo(plain(f"{key:<{width}}  {text}  # {competition.origins.get(key, 'default')}"))


@app.command(epilog="Example: acclimate competition model digits-public birch --out my-model")
def model(
    folder: Annotated[
        Path, typer.Argument(help="A competition's folder: built, or as `acclimate round files` makes it.")
    ],
    name: Annotated[str, typer.Argument(help="One of the demo's line-up; a wrong name lists them.", metavar="NAME")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write; it must be new.", metavar="DIR")],
    as_json: _Json = False,
) -> None:
    """Train one of the demo's tiny models from a competition's public rows, to try the way with.

    Takes seconds on one core. It is no good model: it shows what a submission looks like. `untrained` is the baseline of
    that name.
    """
    from rich.console import Console

    from acclimate.cli.options import need

    need("runner", "torch", "transformers")
    from acclimate_runners import lineup

    known = [spec.name for spec in lineup.LINEUP]
    if name not in known:
        raise Refusal("file_unreadable", f"there is no {name!r} in the line-up", hint=f"one of {', '.join(known)}")
    if out.exists():
        raise Refusal("file_unreadable", f"{out} exists already", hint="name a new folder with --out")
    if not (folder / "tokenizer.json").is_file():
        raise Refusal(
            "file_unreadable",
            f"{folder} fixes no tokenizer, and the line-up's models have none of their own",
            hint="it is for competitions such as digits; with others a model brings its own tokenizer.json",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary,
        Console(stderr=True).status(f"training {name}"),
    ):
        definition.load(folder)
        lineup.make(Path(temporary), folder, processes=1, names=[name])
        (Path(temporary) / name).rename(out)
    about = json.loads((out / "entrant.json").read_text("utf-8"))
    text = f"{about['title']}, {about['parameters']} parameters: {out}"
    emit({"folder": str(out), **about}, as_json=as_json, text=text)


@app.command("import-lm-eval", epilog="Example: acclimate competition import-lm-eval gsm8k.yaml --out my-competition")
def import_lm_eval(
    file: Annotated[Path, typer.Argument(help="A task's YAML file of lm-evaluation-harness.", metavar="FILE")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new folder for a whole competition.toml.", metavar="DIR")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Make a task of lm-evaluation-harness a task of a definition, and say what of it can't be carried.

    Prints the [[tasks]] part, or writes a competition.toml to go on from, and imported.json with the report. Nothing is fetched or
    run. Ends with 1 where something that can change a number is lost.
    """
    from acclimate import files, harness_tasks
    from acclimate.cli.options import need

    need("runner", "yaml", "jinja2")
    if out is not None and out.exists():
        raise Refusal("conflict", f"{out} exists already", hint="name a new folder with --out")
    found = harness_tasks.imported(file)
    if out is not None and found["definition"] is not None:
        out.mkdir(parents=True)
        files.write(out / "competition.toml", found["definition"].encode(), mode=0o644)
        report = {key: value for key, value in found.items() if key != "definition"}
        files.write(out / "imported.json", (dumps(report, indent=1) + "\n").encode(), mode=0o644)
    if as_json:
        typer.echo(dumps(found, indent=1))
    else:
        # On stdout only what goes into a definition, so that it can be sent there.
        typer.echo(found["toml"] or "", nl=False) if out is None else None
        typer.echo(_imported(found, out), err=True)
    if not found["whole"]:
        raise typer.Exit(1)


def _imported(found: dict[str, Any], out: Path | None) -> str:
    lines = [] if found["toml"] else ["no task can be made of it, so nothing is written"]
    if found["toml"] and out is not None:
        from acclimate_competitions import splits

        lines = [
            f"wrote {out}/competition.toml; next: what of it is yours to say (licence, contact, custodians), and its splits:"
        ]
        lines += [f"  {splits.unbuilt(out, definition.parse(found['definition'].encode()))}"]
        lines += [f"  then: acclimate competition check {out}"]
    for head in ("carried", "needless", "lost"):
        lines += [f"{head:<9} {key}: {why}" for key, why in found[head].items()]
    lines += [f"{'data':<9} {key}: {value}" for key, value in found["data"].items()]
    lines += [f"{'note':<9} {note}" for note in found["notes"]]
    lines.append("carried wholly" if found["whole"] else f"lost: {len(found['lost'])}")
    return "\n".join(plain(line) for text in lines for line in text.splitlines())


def build_into(source: Path, out: Path) -> dict[str, Any]:
    """Run a folder's build.py, check what it made, and put it at out, replacing an earlier build.

    A build that fails, or is killed, leaves out as it was.

    Raises:
        Refusal: file_unreadable, definition_invalid, splits_invalid, extra_missing.
    """
    script = source / "build.py"
    competition = definition.load(source)
    if not script.is_file():
        from acclimate_competitions import splits

        built = (source / "splits").is_dir()
        hint = f"it is built already: acclimate competition check {source}"
        hint = (
            hint if built else f"{splits.unbuilt(source, competition)}; or a build.py whose main(out) writes all of it"
        )
        raise Refusal("file_unreadable", f"{source} has no build.py", hint=hint)
    _require_no_source(out, script)
    if out.exists() and not (out / "competition.toml").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal(
            "file_unreadable",
            f"{out} holds something else than a built competition",
            hint="name a new folder with --out",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        made = Path(temporary) / "made"
        _run_main(script, made)
        result = checked(made)
        if out.exists():
            out.rename(Path(temporary) / "before")
        made.rename(out)
    return result | {"folder": str(out)}


def _require_no_source(out: Path, script: Path) -> None:
    """Refuse to replace a folder that a competition is built from: what builds it would be lost.

    Raises:
        Refusal: file_unreadable.
    """
    other = out / "build.py"
    around = out.resolve() in (script.resolve().parent, *script.resolve().parent.parents)
    if around or (other.is_file() and other.read_bytes() != script.read_bytes()):
        raise Refusal(
            "file_unreadable",
            f"{out} is what {'this competition' if around else 'a competition'} is built from, and a build there would replace it",
            hint="name a new folder with --out",
        )


def checked(folder: Path) -> dict[str, Any]:
    """What a built competition's folder holds: {competition, title, digest, folder, tasks, tokenizer, bases}.

    Raises:
        Refusal: file_unreadable, definition_invalid, splits_invalid.
    """
    from acclimate_competitions import splits
    from acclimate_runners import adapter_files, prompts

    competition: Competition = definition.load(folder)
    held = splits.check(folder, competition)
    prompts.check(folder, competition)
    adapter_files.check_bases(folder, competition)
    return {
        "competition": competition.slug,
        "title": competition.title,
        "digest": competition.digest,
        "folder": str(folder),
        **held,
        "bases": dict(competition.submission.bases),
    }


def _source(name: str, file: str) -> Path:
    """A folder by its path, where it has the file that is asked for; else a competition that comes with Acclimate, where one has this name.

    What `competition build digits --out digits` makes has no build.py: the same command builds it anew. A folder of that name with a
    definition of its own is not passed over.

    Raises:
        Refusal: file_unreadable, also where the name may mean either of two competitions.
    """
    path = Path(name)
    if (path / file).is_file() or len(path.parts) != 1:
        return path
    try:
        found = definition.shipped(name)
    except Refusal:
        if path.exists():
            return path
        raise
    own, comes = path / "competition.toml", found / "competition.toml"
    if own.is_file() and own.read_bytes() != comes.read_bytes():
        raise Refusal(
            "file_unreadable",
            f"{name!r} is a competition that comes with Acclimate, and a folder here that has no {file} and another competition.toml",
            hint=f"for the folder: ./{name}; for what comes with Acclimate: {shlex.quote(str(found))}",
        )
    return found


def _run_main(script: Path, out: Path) -> None:
    spec = importlib.util.spec_from_file_location("acclimate_build", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.main(out)
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra_missing",
            f"{script.parent.name}/build.py needs the package {error.name!r}, which is not installed",
            hint=installing("runner,analysis"),
        ) from error


def _print_checked(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(dumps(result, indent=1))
        return
    typer.echo(plain(f"{result['title']} ({result['competition']}), definition {result['digest']}"))
    for task, found in result["tasks"].items():
        rows = ", ".join(f"{split} {part['rows']}" for split, part in found.items())
        typer.echo(plain(f"  {task}: {rows}"))
    for base, digest in result["bases"].items():
        typer.echo(plain(f"  base for adapters: {base}, {digest}"))
    typer.echo(plain(f"ok: {result['folder']}"))
