"""A run's settings as a reader wants them: every one with its description, and the command that repeats the run."""

import ast
import dataclasses
import inspect
import shlex
import textwrap
from functools import cache
from typing import Any

from semclust.config import Settings, to_json


def settings_table(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, value, description of every setting in config.json, and whether it differs from the default."""
    defaults, described = to_json(Settings()), descriptions()
    return [
        {
            "name": name,
            "value": in_words(value),
            "default": in_words(defaults[name]),
            "changed": value != defaults[name],
            "description": described[name],
        }
        for name, value in stored.items()
    ]


def in_words(value: Any) -> str:
    if value is None:
        return "automatic"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@cache
def descriptions() -> dict[str, str]:
    """The docstring under each field of Settings; Python itself does not keep them."""
    (settings,) = ast.parse(textwrap.dedent(inspect.getsource(Settings))).body
    assert isinstance(settings, ast.ClassDef)
    found = {}
    for statement, following in zip(settings.body, settings.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return found


def fit_command(config: dict[str, Any], whole_epochs: bool = True) -> str:
    """The line that fits the same images with the same settings again. Of a run that kept to its minutes, for as many
    epochs as these gave it or, where they were not ``whole_epochs``, for as many minutes."""
    stored, defaults = config["settings"], to_json(Settings())
    words = ["semclust", "fit", str(config.get("data")), "-k", str(stored["n_clusters"])]
    if config.get("labels"):
        words += ["--labels", str(config["labels"])]
    follows = "minutes" if whole_epochs or stored.get("minutes") is None else "epochs"  # from the other
    for field in dataclasses.fields(Settings):
        name, value = field.name, stored.get(field.name, defaults[field.name])
        if name in ("n_clusters", follows) or value == defaults[name]:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return " ".join(map(shlex.quote, words))
