"""What a user sees while something takes long: bars in a terminal, a few lines in a log file, and nothing left over."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vit_scale.record.progress import Activity, Signs, library_bars
from vit_scale.record.terminal import Terminal

COLUMNS = 120


class ClosedPipe(io.StringIO):
    """The write end of a pipe that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(scope="module")
def in_terminal(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a short run and an evaluation of it write to a terminal."""
    folder = tmp_path_factory.mktemp("terminal") / "run"
    options = ["track.wandb=disabled", "data.workers=0", "batch.eval=2", f"run.dir={folder}"]
    train = run_in_terminal(root, ["launch/train.py", "recipes/debug.yaml", *options])
    return train, run_in_terminal(root, ["launch/eval.py", str(folder)])


def run_in_terminal(root: Path, arguments: list[str]) -> str:
    main, side = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "50"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=root, env=environment, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    written = b""
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        written += chunk
    os.close(main)
    assert process.wait(60) == 0, written.decode()[-3000:]
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b["):
            number = int(part[2:-1] or 1) if part[2:-1].isdigit() or part[2:-1] == "" else 0
            if part.endswith("A"):
                row = max(0, row - number)
            elif part.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def test_bars_are_drawn_while_building_training_and_evaluating(in_terminal: tuple[str, str]) -> None:
    train, evaluation = in_terminal
    for text in ("Loading libraries", "Opening the data", "step 1", "Evaluating, batch"):
        assert text in train, text
    for text in ("Loading libraries", "Evaluating, batch"):
        assert text in evaluation, text


def test_no_bar_is_left_on_the_screen(in_terminal: tuple[str, str]) -> None:
    train, evaluation = map(screen, in_terminal)
    for lines in (train, evaluation):
        text = "\n".join(lines)
        assert not re.search(r"Loading|Opening|Building|Evaluating|Checking|[⠀-⣿━╸╺]", text), text
    assert train[0] == "Training recipes/debug.yaml"
    assert train[1].startswith("model       vit_mu")
    assert [line.split()[1] for line in train if line.startswith("eval ")] == ["6/12", "12/12"]
    assert "\nFinished\n" in "\n".join(train)


def test_log_file_gets_a_line_when_something_takes_long_and_few_afterwards() -> None:
    signs, started = Signs(print), time.monotonic()
    signs._activities.append(Activity("Opening the data", since=started))
    lines = []
    for second in range(7 * 24 * 3600):
        if line := signs.due(started + second):
            lines.append(line)
            signs._last = started + second
    assert lines[:3] == ["Opening the data (4s)", "Opening the data (8s)", "Opening the data (12s)"]
    assert len(lines) < 1000, "a log file of a week stays readable"


def test_logged_steps_delay_further_lines() -> None:
    signs, started = Signs(print), time.monotonic()
    signs._activities.append(Activity("step", 300, 7, since=started))
    signs._last = started + 20
    assert signs.due(started + 23) is None
    assert signs.due(started + 24) == "step 7/300 (24s)"


def test_nothing_is_printed_if_nothing_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(enabled=True)
    with terminal.phase("Opening the data"):
        terminal.info("line")
    assert capsys.readouterr().out == "line\n"


def test_bars_of_libraries_become_part_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    import tqdm.auto

    shown: list[str] = []
    with library_bars(shown.append):
        for _ in tqdm.auto.tqdm(range(3), desc="Downloading", mininterval=0):
            pass
        tqdm.auto.tqdm(range(3), "Generating", 3, True, disable=None).close()
    assert any(text.startswith("Downloading:") and "3/3" in text for text in shown)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    for _ in tqdm.auto.tqdm(range(3)):
        pass
    assert "3/3" in capfd.readouterr().err, "other bars are unchanged"


def test_reader_that_leaves_is_noticed_and_stops_nothing() -> None:
    terminal = Terminal(enabled=True)
    terminal.console.file = ClosedPipe()
    assert not terminal.is_closed
    terminal.info("text")
    assert terminal.is_closed
    terminal.rows({"a": "b"})


def test_last_words_go_to_standard_error_if_the_reader_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(enabled=True)
    terminal.console.file = ClosedPipe()
    terminal.last_words("Checkpoint saved.")
    assert capsys.readouterr().err == "Checkpoint saved.\n"


def test_other_ranks_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(enabled=False)
    terminal.title("title")
    with terminal.phase("phase") as phase:
        phase.advance()
    terminal.start(0, 1, ())
    terminal.advance(1)
    terminal.stop()
    terminal.last_words("end")
    assert capfd.readouterr() == ("", "")


def test_terminal_is_ready_before_torch_is_imported(root: Path) -> None:
    code = "import sys, vit_scale.record.terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
