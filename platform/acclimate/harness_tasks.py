"""`acclimate competition import-lm-eval`: a task of lm-evaluation-harness as `[[tasks]]` of a definition, and a report of the rest.

Every setting of the file is told of: carried; of the data, which build.py must make; without meaning here; or lost, with the reason. A task is carried wholly where nothing is lost.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acclimate import harness_files
from acclimate.harness_files import Function, said
from acclimate_competitions import answers, definition, tasks
from acclimate_competitions.errors import Refusal

_NEEDLESS = {
    **dict.fromkeys(("tag", "group", "group_alias", "task_alias", "metadata"), "names and notes change no number"),
    **dict.fromkeys(("should_decontaminate", "doc_to_decontamination_query"), "splits are compared by `acclimate competition check`"),
    **dict.fromkeys(("fewshot_split", "fewshot_config", "fewshot_delimiter"), "no examples are shown: the preparation teaches"),
    **dict.fromkeys(("unsafe_code", "dataset_kwargs"), "nothing is fetched or run here"),
}  # fmt: skip
_DATA = ("dataset_path", "dataset_name", "training_split", "validation_split", "test_split")
_DEFAULT_METRICS = {
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
    "loglikelihood_rolling": ("bits_per_byte",),
}
_METRICS = {
    "multiple_choice": {"acc": "accuracy", "acc_norm": "acc_norm"},
    "generate_until": {"exact_match": "exact_match", "f1": "token_f1"},
    "loglikelihood_rolling": {"bits_per_byte": "bits_per_byte"},
}
_KINDS = {"multiple_choice": "choice", "generate_until": "generate", "loglikelihood_rolling": "perplexity"}
_BESIDE = ("word_perplexity", "byte_perplexity", "acc", "acc_norm")
_OF_TEXTS = ("ignore_case", "ignore_punctuation", "ignore_numbers", "regexes_to_ignore")
_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_COLUMN = re.compile(r"[A-Za-z_]\w*")
_DEFAULT_TOKENS = 256

SKELETON = """\
schema = 1
slug = {slug}
title = {title}
licence = "say whose the data are"
contact = "organizers@example.org"

[round]
name = "1"

[custody]
threshold = 2
custodians = ["custodian-a", "custodian-b", "custodian-c"]

[submission]
architectures = ["llama", "gpt2", "gpt_neox", "mistral", "qwen2", "qwen3"]
max_parameters = 200_000_000
max_bytes = 1_000_000_000

{tasks}
[preparation]
epochs = 2
global_batch = 32
max_length = {max_length}
lr_grid = [1e-5, 3e-5, 1e-4]
seeds = [11, 12, 13]

[ranking]
baselines = ["majority"]
"""


@dataclass
class _Importing:
    """A task on its way.

    Attributes:
        config: what of the file is not looked at yet.
        values: of `[[tasks]]`.
        carried, needless, lost: setting -> what became of it.
        data: what build.py must know.
        notes: where numbers will differ from the harness's, though nothing is lost.
        taken: settings of the file that were looked at.
    """

    config: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """A setting's value, which is looked at now."""
        if key in self.config:
            self.taken.append(key)
        value = self.config.pop(key, None)
        return default if value is None else value

    def is_told(self, key: str) -> bool:
        """Whether the report has a setting, or a part of it."""
        told = [*self.carried, *self.needless, *self.lost]
        return any(each == key or each.startswith(f"{key}.") for each in told)

    def lose(self, key: str, value: Any, reason: str) -> None:
        """A setting that can't be carried."""
        self.lost[key] = f"{said(value)}: {reason}"


def imported(path: Path) -> dict[str, Any]:
    """A task file as a task of ours.

    Returns:
        {"file", "task": the values of `[[tasks]]`, or None where there can be none, "toml": the same as text, "definition": a whole definition with it,
        "carried", "needless", "lost": {setting: what became of it}, "data": what build.py must know, "notes", "whole": whether nothing is lost}.

    Raises:
        Refusal: extra_missing, file_unreadable.
    """
    config = harness_files.load(path)
    work = _Importing(dict(config))
    kind = config.get("output_type")
    if isinstance(config.get("task"), list) or ("task" not in config and "group" in config):
        work.lose("task", config.get("task", config.get("group")), "a group of tasks; import each of them")
    elif not isinstance(kind, str) or kind not in _KINDS:
        why = (
            "a continuation's greedy match is no metric here"
            if kind == "loglikelihood"
            else "none of " + ", ".join(_KINDS)
        )
        work.lose("output_type", kind, why)
    else:
        _carry(work, work.take("output_type"))
    work.needless |= {key: "it says what holds here anyway" for key in work.taken if not work.is_told(key)}
    for key, value in work.config.items():
        if key in _NEEDLESS:
            work.needless[key] = _NEEDLESS[key]
        elif key not in work.lost and key not in work.carried:
            work.lose(
                key,
                value,
                "unknown, or of no use without the others" if not isinstance(value, Function) else "a Python function",
            )
    return _result(path, work)


def _carry(work: _Importing, kind: str) -> None:
    work.values["name"] = _name(work)
    work.values["kind"] = _KINDS[kind]
    work.carried["output_type"] = f"kind {_KINDS[kind]}"
    _data(work)
    {"multiple_choice": _choice, "generate_until": _generate, "loglikelihood_rolling": _perplexity}[kind](work)
    _metric(work, kind)
    if (shots := work.take("num_fewshot", 0)) != 0:
        work.lose("num_fewshot", shots, "no examples are shown: the preparation teaches the form of an answer")
    if (repeats := work.take("repeats", 1)) != 1:
        work.lose("repeats", repeats, "one answer an example: the likeliest token is always taken")


def _name(work: _Importing) -> str:
    given = str(work.take("task", "task"))
    name = re.sub(r"[^a-z0-9]+", "-", given.lower()).strip("-")[:63].strip("-") or "task"
    work.carried["task"] = f"name {name}"
    return name


def _data(work: _Importing) -> None:
    for key in _DATA:
        if key in work.config:
            value = work.take(key)
            if isinstance(value, Function):
                work.lose(key, value, "a Python function makes the data")
            elif value is not None:
                work.data[key], work.carried[key] = value, "data to be fetched by build.py, once"
            else:
                work.needless[key] = "there is none"


def _template(work: _Importing, key: str, value: Any) -> str | None:
    """A Jinja template of a setting that is a template or a column's name; None, and lost, where it is neither."""
    if not isinstance(value, str):
        work.lose(
            key, value, "a Python function" if isinstance(value, Function) else "neither a template nor a column's name"
        )
        return None
    text = f"{{{{ {value} }}}}" if _COLUMN.fullmatch(value) else value
    if reason := _unusable(text):
        work.lose(key, value, reason)
        return None
    return text


def _unusable(template: str) -> str:
    """Why a template can't fill a prompt from columns of text; "" where it can. It is parsed, not filled."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment()
    try:
        tree = environment.parse(template)
        environment.compile(tree)
    except (TemplateError, RecursionError, OverflowError, MemoryError) as error:
        return f"no template that is known here: {' '.join(str(error).split())[:120]}"
    columns = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
    for node in tree.find_all((nodes.Getitem, nodes.Getattr, nodes.For)):
        inner: Any = node.iter if isinstance(node, nodes.For) else getattr(node, "node", None)
        called = isinstance(node, nodes.Getattr) and hasattr(str, node.attr)
        if isinstance(inner, nodes.Name) and inner.name in columns and not called:
            return f"it looks into the column {inner.name}, and columns are text: let build.py write what it finds into one"
    return ""


def _prompt(work: _Importing, *, delimiter: str) -> None:
    text = _template(work, "doc_to_text", work.take("doc_to_text", ""))
    head = work.take("description", "")
    if head:
        head = _template(work, "description", head if not _COLUMN.fullmatch(str(head)) else f"{head} ") or ""
        work.carried["description"] = "at the prompt's head"
    if (prefix := work.take("gen_prefix")) is not None:
        work.lose("gen_prefix", prefix, "a begun answer; put it into the prompt by hand")
    if text is None:
        return
    prompt = head + text + delimiter
    if not prompt.strip() or len(prompt) > tasks.LONGEST_PROMPT:
        work.lose("doc_to_text", text, f"a prompt has 1 to {tasks.LONGEST_PROMPT} characters")
        return
    work.values["prompt"], work.carried["doc_to_text"] = prompt, "prompt"


def _target(work: _Importing, *, how: str) -> None:
    value = work.take("doc_to_target")
    if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
        work.data["target"] = {"from": value, "how": how}
        work.carried["doc_to_target"] = "the column target, which build.py makes"
    else:
        work.lose(
            "doc_to_target",
            value,
            "a Python function" if isinstance(value, Function) else "no template, column or number",
        )


def _choice(work: _Importing) -> None:
    delimiter = work.take("target_delimiter", " ")
    work.carried["target_delimiter"] = "at the prompt's end"
    _prompt(work, delimiter=str(delimiter))
    _target(work, how="the choice itself, or its number counted from 0")
    given = work.take("doc_to_choice")
    choices = _literal(given)
    if choices is None:
        reason = (
            "a Python function"
            if isinstance(given, Function)
            else "choices that differ from row to row; a task's are the same for all"
        )
        work.lose("doc_to_choice", given, reason)
    else:
        work.values["choices"], work.carried["doc_to_choice"] = choices, "choices"
    work.values["tokenize"] = "together"


def _literal(value: Any) -> list[str] | None:
    """Choices that are written out: a list, a mapping's values, or a literal list as text or as a template without names."""
    if isinstance(value, str):
        bare = re.fullmatch(r"\s*(?:\{\{)?(.*?)(?:\}\})?\s*", value, re.DOTALL)
        try:
            value = ast.literal_eval(bare.group(1).strip()) if bare else None
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    values = list(value.values()) if isinstance(value, Mapping) else value
    fine = isinstance(values, list | tuple) and all(isinstance(each, str) and "{{" not in each for each in values)
    return list(values) if fine else None


def _generate(work: _Importing) -> None:
    delimiter = work.take("target_delimiter", " ")
    work.carried["target_delimiter"] = "before the target, in build.py"
    _prompt(work, delimiter="")
    _target(work, how=f"behind {delimiter!r}, which stands between prompt and answer")
    work.values["tokenize"] = "together"
    _generation(work, work.take("generation_kwargs", {}))
    work.values["normalize"] = ["strip"]
    _filters(work, work.take("filter_list", []))
    work.notes.append(
        "blanks around answers are removed before they are compared; the harness does so only by a filter"
    )


def _generation(work: _Importing, given: Any) -> None:
    key = "generation_kwargs"
    if not isinstance(given, dict):
        work.lose(key, given, "no mapping")
        given = {}
    given = dict(given)
    until = given.pop("until", None)
    stops = [until] if isinstance(until, str) else until if isinstance(until, list) else []
    fine = [stop for stop in dict.fromkeys(stops) if isinstance(stop, str) and 0 < len(stop) <= 64]
    if fine != [stop for stop in stops if stop] or len(fine) > 8:
        work.lose(f"{key}.until", until, "1 to 8 different strings of at most 64 characters stop a text")
    if not fine:
        work.notes.append("no stop string is named: the preparation teaches to end a text with an empty line")
    work.values["stop"] = fine[:8] or ["\n\n"]
    counts = [given.pop(name) for name in _TOKENS if name in given]
    most = counts[0] if counts and isinstance(counts[0], int) and counts[0] > 0 else _DEFAULT_TOKENS
    if most > tasks.MOST_TOKENS:
        work.lose(f"{key}.max_gen_toks", most, f"a text has at most {tasks.MOST_TOKENS} tokens")
    work.values["max_tokens"] = min(most, tasks.MOST_TOKENS)
    sampled = given.pop("do_sample", False) not in (False, "false")
    warm = given.pop("temperature", 0) not in (0, 0.0, "0.0", None)
    if sampled and warm:
        work.lose(f"{key}.do_sample", True, "the likeliest token is always taken")
    for name, value in given.items():
        if name in ("top_p", "top_k") and not (sampled and warm):
            work.needless[f"{key}.{name}"] = "nothing is drawn"
        else:
            work.lose(f"{key}.{name}", value, "unknown here")
    work.carried[key] = "stop and max_tokens"


def _filters(work: _Importing, given: Any) -> None:
    """The first pipeline that can be carried is how an answer is found."""
    chosen, reasons = None, []
    for number, pipeline in enumerate(given if isinstance(given, list) else []):
        name = str(pipeline.get("name", number)) if isinstance(pipeline, dict) else str(number)
        found = _pipeline(pipeline.get("filter") if isinstance(pipeline, dict) else None)
        if isinstance(found, str):
            reasons.append((name, found))
        elif chosen is None:
            chosen = name
            work.values |= {key: value for key, value in found.items() if key != "normalize"}
            work.values["normalize"] += [word for word in found["normalize"] if word not in work.values["normalize"]]
        else:
            work.needless[f"filter_list.{name}"] = f"an answer is found in one way, that of {chosen!r}"
    if chosen is not None:
        work.carried["filter_list"] = f"extract, take and normalize, as {chosen!r}"
    for name, reason in reasons:
        work.lose(f"filter_list.{name}", name, reason)
    if given and not isinstance(given, list):
        work.lose("filter_list", given, "no list of filters")


def _pipeline(steps: Any) -> dict[str, Any] | str:
    """What a pipeline of filters says of the answer, or why it can't be carried."""
    found: dict[str, Any] = {"normalize": []}
    for step in steps if isinstance(steps, list) else [{}]:
        function = step.get("function") if isinstance(step, dict) else None
        if function == "regex" and "extract" not in found:
            pattern = one_group(str(step.get("regex_pattern", r"#### (\-?[0-9\.\,]+)")))
            if problem := answers.pattern_problem(pattern):
                return f"its expression {problem}"
            place = step.get("group_select", 0)
            if place not in (0, -1):
                return f"the find of number {place}, where the first or the last can be taken"
            found |= {"extract": pattern} | ({"take": "last"} if place == -1 else {})
        elif function == "lowercase":
            found["normalize"].append("lower")
        elif function not in ("take_first", "remove_whitespace"):
            return f"the filter {said(function)} is not known here"
    return found


def one_group(pattern: str) -> str:
    """An expression with one group that finds what the harness's finds: all of it where there is none, alternatives that are a group each made one."""
    if not re.search(r"(?<!\\)\((?!\?)", pattern):
        return f"({pattern})"
    parts = re.fullmatch(r"\(([^()]*)\)(?:\|\(([^()]*)\))+", pattern)
    if parts is None or pattern.count("(") == 1:
        return pattern
    return "(" + "|".join(f"(?:{part})" for part in re.findall(r"\(([^()]*)\)", pattern)) + ")"


def _perplexity(work: _Importing) -> None:
    if (text := work.take("doc_to_text", "")) != "":
        work.lose("doc_to_text", text, "a text that is read as a whole has no prompt")
    else:
        work.carried["doc_to_text"] = "there is none"
    value = work.take("doc_to_target")
    if isinstance(value, str) and value:
        work.data["input"], work.carried["doc_to_target"] = {"from": value}, "the column input, which build.py makes"
    else:
        work.lose(
            "doc_to_target", value, "a Python function" if isinstance(value, Function) else "no template or column"
        )
    work.values["tokenize"] = "together"
    work.notes.append("bits per byte are the mean over texts; the harness divides all bits by all bytes")


def _metric(work: _Importing, kind: str) -> None:
    """The first metric that is known is the task's."""
    listed = work.take("metric_list")
    given = listed if isinstance(listed, list) else [{"metric": name} for name in _DEFAULT_METRICS[kind]]
    for entry in given:
        entry = entry if isinstance(entry, dict) else {"metric": entry}
        name = entry.get("metric")
        own = _METRICS[kind].get(name) if isinstance(name, str) else None
        if own is not None and "metric" not in work.values:
            work.values["metric"] = own
            work.carried["metric_list"] = f"metric {own}"
            _metric_options(work, entry)
        elif isinstance(name, str) and (own is not None or name in _BESIDE and kind != "generate_until"):
            work.needless[f"metric_list.{name}"] = "one metric ranks; this one follows from the same predictions"
        else:
            work.lose(f"metric_list.{said(name)}", name, "no metric that ranks here")
    if "metric" not in work.values:
        work.lose("metric_list", listed, f"none of them ranks here; {', '.join(_METRICS[kind])} would")


def _metric_options(work: _Importing, entry: Mapping[str, Any]) -> None:
    for option, value in entry.items():
        if option in ("metric", "higher_is_better", "hf_evaluate") or (option, value) == ("aggregation", "mean"):
            continue
        if option == "aggregation" and entry["metric"] == "bits_per_byte":
            continue
        where = f"metric_list.{entry['metric']}.{option}"
        if option == "weight_by_size":
            work.needless[where] = "of a group's mean, not of the task"
            continue
        if option in _OF_TEXTS and work.values["kind"] != "generate":
            work.needless[where] = "of texts that are compared; here log-likelihoods are"
            continue
        if option in ("ignore_case", "ignore_punctuation") and "normalize" in work.values:
            word = {"ignore_case": "lower", "ignore_punctuation": "punctuation"}[option]
            if value in (True, "true") and word not in work.values["normalize"]:
                work.values["normalize"].append(word)
        elif value not in (False, "false", None, [], ""):
            work.lose(where, value, "no such option here")


# ---- what comes out ------------------------------------------------------------------------------------------------


def _result(path: Path, work: _Importing) -> dict[str, Any]:
    toml = _toml(work.values) if not {"output_type", "task"} & set(work.lost) else ""
    whole = SKELETON.format(
        slug=_text(str(work.values.get("name", "task"))),
        title=_text(f"Imported from {path.name}"),
        tasks=toml,
        max_length=max(1024, 2 * int(work.values.get("max_tokens", 0))),
    )
    if toml:
        try:
            definition.parse(whole.encode())
        except Refusal as refusal:
            toml = ""
            problems = [problem.partition(": ")[2] for problem in refusal.problems or [refusal.sentence]]
            work.lost.setdefault("[[tasks]]", f"it makes no task: {'; '.join(problems)}")
    return {
        "file": str(path),
        "task": work.values if toml else None,
        "toml": toml or None,
        "definition": whole if toml else None,
        "carried": work.carried,
        "needless": work.needless,
        "lost": work.lost,
        "data": work.data,
        "notes": work.notes,
        "whole": not work.lost,
    }


def _toml(values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_value(value)}" for key, value in values.items()]
    return "[[tasks]]\n" + "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return _text(value) if isinstance(value, str) else str(value)


def _text(value: str) -> str:
    """A TOML basic string."""
    import json

    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
