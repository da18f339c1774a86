"""The built-in tasks, by the names used on the command line."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace

from ragkv.errors import UsageError
from ragkv.evaluation.io import Spec
from ragkv.evaluation.metrics import Task
from ragkv.evaluation.tasks.ruler import cwe, fwe, niah_multikey_2, niah_multikey_3, niah_single_1, secret_code, vt
from ragkv.evaluation.tasks.worlds import cloze, icl, passages, variables, worlds

TASKS: Mapping[str, Callable[..., Task]] = {
    "worlds": worlds,
    "cloze": cloze,
    "secret-code": secret_code,
    "niah_single_1": niah_single_1,
    "niah_multikey_2": niah_multikey_2,
    "niah_multikey_3": niah_multikey_3,
    "vt": vt,
    "variables": variables,
    "cwe": cwe,
    "fwe": fwe,
    "icl": icl,
    "passages": passages,
}
"""Functions of `seed`, `limit` (examples), `chunks` (per example) and further keyword options."""


def make_task(spec: Spec, *, seed: int, limit: int, chunks: int) -> Task:
    """Make the task that `spec` names. Its options override the arguments. Raises UsageError for unknown ones."""
    if spec.name not in TASKS:
        raise UsageError(f"Unknown task {spec.name!r}; choose one of {', '.join(TASKS)}, or give a file.")
    function = TASKS[spec.name]
    hints = typing.get_type_hints(function)
    known = inspect.signature(function).parameters
    for key, value in spec.options.items():
        if key not in known:
            raise UsageError(f"Task {spec.name} has no option {key!r}; it has {', '.join(known)}.")
        if typing.get_origin(hint := hints[key]) is typing.Literal:
            if value not in typing.get_args(hint):
                choices = ", ".join(map(str, typing.get_args(hint)))
                raise UsageError(f"{key} of task {spec.name} must be one of {choices}, not {value!r}.")
        elif not isinstance(value, (int, float) if hint is float else hint) or (
            isinstance(value, bool) and hint is not bool
        ):
            raise UsageError(f"{key} of task {spec.name} must be of type {hint.__name__}, not {value!r}.")
    task = function(**{"seed": seed, "limit": limit, "chunks": chunks, **spec.options})
    return replace(task, name=f"{spec}/{spec.options.get('chunks', chunks)}") if spec.options else task


def described() -> list[tuple[str, str, dict[str, object]]]:
    """(name, first line of the function's docstring, options with their defaults) of every task."""
    return [
        (
            name,
            (inspect.getdoc(function) or "").split("\n")[0],
            {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()},
        )
        for name, function in TASKS.items()
    ]
