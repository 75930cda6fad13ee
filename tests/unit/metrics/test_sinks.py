"""Sinks with the real TensorBoard and W&B (offline): what is written, and resuming."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from megappo.config.schema import WandbConfig
from megappo.metrics.sinks import Jsonl, MetricLogger, TensorBoard, Wandb
from megappo.records import StepMetrics


def step(number: int, **values: float) -> StepMetrics:
    """Metrics ``train/...`` of a step."""
    return StepMetrics(number, {f"train/{name}": value for name, value in values.items()})


def lines(path: Path) -> list[dict[str, float | None]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_is_readable_after_every_step(tmp_path: Path) -> None:
    """Each step is on disk when log returns; what is not finite is null."""
    path = tmp_path / "run" / "metrics.jsonl"
    sink = Jsonl(path)
    sink.log(step(1, kl=0.25, loss=float("nan")))
    assert lines(path) == [{"step": 1, "train/kl": 0.25, "train/loss": None}]
    sink.log(step(2, kl=float("-inf")))
    assert lines(path)[1] == {"step": 2, "train/kl": None}
    sink.close()


@pytest.mark.parametrize(
    ("resume_step", "kept"),
    [(None, []), (0, [0]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_jsonl_resume(tmp_path: Path, resume_step: int | None, kept: list[int]) -> None:
    """Steps beyond the resumed one go, and so does a line that a crash cut off."""
    path = tmp_path / "metrics.jsonl"
    sink = Jsonl(path)
    for number in range(4):
        sink.log(step(number, kl=number / 2))
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 1, "train/k')
    again = Jsonl(path, resume_step)
    again.log(step(9, kl=1.0))
    again.close()
    assert [line["step"] for line in lines(path)] == [*kept, 9]


@pytest.mark.parametrize("before", [None, "", "not json\n", '{"step": 5}\n{"step": 6}'])
def test_jsonl_resume_from_odd_files(tmp_path: Path, before: str | None) -> None:
    """A missing, empty or broken file is no reason to fail."""
    path = tmp_path / "metrics.jsonl"
    if before is not None:
        path.write_text(before)
    sink = Jsonl(path, resume_step=4)
    sink.log(step(5, kl=1.0))
    sink.close()
    assert lines(path) == [{"step": 5, "train/kl": 1.0}]


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values as TensorBoard shows them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard(tmp_path: Path) -> None:
    """Scalars can be read back; a resume hides later steps, a fresh run all earlier ones."""
    sink = TensorBoard(tmp_path)
    for number in (1, 2, 3):
        sink.log(step(number, kl=number / 4))
    assert scalars(tmp_path, "train/kl") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    sink.close()
    resumed = TensorBoard(tmp_path, resume_step=2)
    resumed.log(step(3, kl=8.0))
    resumed.close()
    assert scalars(tmp_path, "train/kl") == [(1, 0.25), (2, 0.5), (3, 8.0)]
    fresh = TensorBoard(tmp_path)
    fresh.log(step(1, kl=16.0))
    fresh.close()
    assert scalars(tmp_path, "train/kl") == [(1, 16.0)]


def wandb_records(path: Path) -> list[Any]:
    """Records of an offline run's log: checksum, length, kind (1: whole), protobuf message."""
    data, offset, records = path.read_bytes(), 7, []
    while offset + 7 < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        assert kind == 1, "the log is longer than one block"
        if offset + 7 + length > len(data):
            break  # it is still being written
        record = vars(wandb_internal_pb2)["Record"]()
        record.ParseFromString(data[offset + 7 : offset + 7 + length])
        offset += 7 + length
        records.append(record)
    return records


def wandb_history(run_folder: Path) -> list[dict[str, float]]:
    """Logged metrics of an offline run, once W&B's own process has written its last record."""
    (path,) = run_folder.glob("*.wandb")
    deadline = time.monotonic() + 30
    while not (records := wandb_records(path)) or not records[-1].HasField("exit"):
        assert time.monotonic() < deadline, "the log has no end"
        time.sleep(0.1)
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]


def test_wandb_offline_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run holds the metrics; a resumed one keeps the id."""
    monkeypatch.setenv("WANDB_MODE", "online")  # the configuration decides, not the environment
    config = WandbConfig(project="tests", run_name="first", mode="offline")
    sink = Wandb(config, tmp_path, {"train": {"seed": 1}})
    sink.log(step(1, kl=0.25))
    sink.log(step(2, kl=0.5))
    sink.close()
    resumed = Wandb(config, tmp_path, {}, run_id=sink.run_id)
    resumed.log(step(2, kl=4.0))
    resumed.close()
    assert resumed.run_id == sink.run_id
    folders = sorted((tmp_path / "wandb").glob(f"offline-run-*-{sink.run_id}"))
    logged = [
        (row["_step"], row["global_step"], row["train/kl"])
        for folder in folders
        for row in wandb_history(folder)
    ]
    assert logged == [(1, 1, 0.25), (2, 2, 0.5), (2, 2, 4.0)]


class Recorder:
    """A sink that remembers, and may fail at the end."""

    def __init__(self, fails: bool = False) -> None:
        """Nothing logged yet."""
        self.steps: list[int] = []
        self.closed = 0
        self.fails = fails

    def log(self, metrics: StepMetrics) -> None:
        """Remember the step."""
        self.steps.append(metrics.step)

    def close(self) -> None:
        """Count, and fail if told to."""
        self.closed += 1
        if self.fails:
            raise OSError("disk full")


def test_logger_feeds_and_closes_all() -> None:
    """Every sink gets every step and is closed once, also when one fails."""
    sinks = [Recorder(), Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"), MetricLogger(sinks) as logger:
        logger.log(step(1))
        logger.log(step(2))
    logger.close()
    assert [(sink.steps, sink.closed) for sink in sinks] == [([1, 2], 1)] * 3
