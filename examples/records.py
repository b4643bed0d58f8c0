"""The metrics.jsonl of a run: a JSON object a line, each with the "step" it is of."""

import json
import os
import pathlib
from typing import Any


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records; the last line may be torn, as a killed run leaves it, and is then left out.

    Raises:
        ValueError: a line before the last is no record of a step.
    """
    records, lines = [], path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.append(record | {"step": int(record["step"])})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}, is no record of a step: {line[:60]!r}") from error
    return records


def resume_metrics(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Keeps of the file the records of steps below `step`, in one move, and returns them; where there is no file, none
    is made."""
    if not path.exists():
        return []
    kept = [record for record in read_records(path) if record["step"] < step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(temporary, path)
    return kept
