"""`examples/records.py`: what is kept of the metrics of a run that was killed."""

import json
import pathlib

import pytest
from records import resume_metrics


def write_records(path: pathlib.Path, steps: list[int], end: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step, "reward": step / 2}) + "\n" for step in steps) + end)


@pytest.mark.parametrize("end", ["", '{"step": 5, "rew', "12", '{"step": 1, "reward": 0.5'])
def test_resume_metrics(end, tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_records(path, [0, 1, 2, 3, 4], end)
    records = resume_metrics(path, 3)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [json.loads(line) for line in path.read_text().splitlines()] == records and path.read_text()[-1] == "\n"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert resume_metrics(path, 0) == [] and path.read_text() == ""


def test_resume_metrics_completes_a_last_line_without_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_records(path, [0], '{"step": 1}')
    assert resume_metrics(path, 2)[-1] == {"step": 1}
    assert path.read_text().endswith('{"step": 1}\n')


def test_resume_metrics_without_a_file(tmp_path):
    assert resume_metrics(tmp_path / "metrics.jsonl", 3) == [] and not list(tmp_path.iterdir())


def test_resume_metrics_refuses_a_torn_middle(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 1, is no record of a step"):
        resume_metrics(path, 3)
    assert path.read_text() == '{"st\n{"step": 1}\n'
