import io
import json
import sys

import pytest

from crossattn.train import processes
from crossattn.train.errors import MissingPackage, TrainError
from crossattn.train.writers import (
    Console,
    Jsonl,
    Several,
    TensorBoard,
    WeightsAndBiases,
    default_writers,
)

TRAIN = {"loss": 2.5, "tokens_per_second": 1234.0}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def resumed(path):
    writer = Jsonl(path)
    writer.start(2)
    return writer


def test_jsonl_has_one_object_a_line(tmp_path):
    writer = Jsonl(tmp_path / "m.jsonl")
    writer.start(0)
    writer.write(5, "train", TRAIN)
    writer.write(5, "eval", {"bleu": float("nan")})
    writer.close()
    assert lines(tmp_path / "m.jsonl") == [
        {"step": 5, "kind": "train", **TRAIN},
        {"step": 5, "kind": "eval", "bleu": None},
    ]


def test_lines_past_the_step_gone_on_from_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3, 4)) + '{"step": 2, "')
    resumed(path).write(3, "train", {})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "tail",
    [
        b'{"step": 3, "kind": "tr',
        b"\xff\xfe\x00",
        b'{"step": ' + b"9" * 5000 + b"}\n",
        b"[" * 100_000 + b"\n",
        b'{"step": true}\n',
        b"7\n",
    ],
)
def test_a_damaged_end_belongs_to_no_step(tmp_path, tail, caplog):
    path = tmp_path / "m.jsonl"
    good = b'{"step": 1}\n{"step": 2, "note": "\\ud800"}\n'
    path.write_bytes(good + tail)
    resumed(path)
    assert path.read_bytes() == good and not caplog.records


def test_damaged_lines_before_the_end_are_counted(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"st\n{"step": 1}\n\n{"step": 2}\n')
    resumed(path)
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert caplog.messages == [f"{path}: 2 damaged lines are left out"]


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(TrainError, match="cannot be written: Is a directory"):
        Jsonl(tmp_path).start(0)


def test_tensorboard_reads_what_was_written_and_not_what_was_undone(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    for start, steps in [(0, (1, 2, 3)), (2, (3, 4))]:
        writer = TensorBoard(tmp_path)
        writer.start(start)
        for step in steps:
            writer.write(step, "train", {"loss": step + start / 10})
        writer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(e.step, round(e.value, 3)) for e in events] == [(1, 1), (2, 2), (3, 3.2), (4, 4.2)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left():
    out = Terminal()
    console = Console(10, out)
    console.start(4)
    console.tick(5, TRAIN)
    console.note("hello")
    console.tick(10, TRAIN)
    console.close()
    shown = out.getvalue()
    assert "10/10" in shown and "loss 2.500  1,234 tokens/s" in shown and "<" in shown
    assert "hello\n" in shown


def test_anything_else_gets_plain_lines():
    out = io.StringIO()
    console = Console(10, out)
    console.start(0)
    console.tick(1, TRAIN)
    console.write(5, "train", TRAIN)
    console.write(5, "eval", {"bleu": 12.345})
    console.close()
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 5/10  loss 2.500  1,234 tokens/s  0:00 left")
    assert second == "evaluation at step 5: bleu 12.35"


@pytest.mark.parametrize(
    ("package", "make"),
    [("tensorboardX", lambda path: TensorBoard(path)), ("wandb", lambda _: WeightsAndBiases())],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    package, make, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=f"pip install {package}"):
        make(tmp_path)


def test_weights_and_biases_gets_what_the_others_get_and_goes_on(monkeypatch, tmp_path):
    class Run:
        logged, finished, id = [], False, "abc"

        def log(self, values, step):
            self.logged.append((values, step))

        def finish(self):
            Run.finished = True

    class Wandb:
        @staticmethod
        def init(**options):
            asked.append(options)
            return Run()

    asked = []
    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    writer = WeightsAndBiases(project="p")
    writer.start(0)
    writer.write(3, "eval", {"bleu": 1.0})
    writer.close()
    assert Run.logged == [({"eval/bleu": 1.0}, 3)] and Run.finished
    for step in (0, 5, 0):  # the last begins anew
        WeightsAndBiases(tmp_path, project="p").start(step)
    again = {"project": "p", "id": "abc", "resume": "allow"}
    assert asked == [{"project": "p"}, {"project": "p"}, again, {"project": "p"}]


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "is_main", lambda: False)
    log = Several(default_writers(tmp_path, 10))
    log.start(0)
    log.write(1, "train", TRAIN)
    log.close()
    assert list(tmp_path.iterdir()) == []
