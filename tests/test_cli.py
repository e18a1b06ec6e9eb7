"""The command line, as a user meets it: in-process where that is the same, else in a real shell."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tuning.cli import main

PROJECT = Path(__file__).resolve().parent.parent
TINY = ["--epochs", "1", "--width", "8", "--set", "heads=2", "--set", "encoder_depth=1"]
TINY += ["--set", "decoder_depth=1", "--set", "device=cpu", "--members", "1"]
TABLE = (
    "id,zip,age,paid,since,city\n"
    "p-01,007,31,true,2020-01-31,Rome\n"
    "p-02,012,,false,2020-02-01,Oslo\n"
    'p-03,,47,,2020-02-03,"NA"\n'
    "p-04,007,52,true,,Rome\n"
    "p-05,012,28,false,2020-02-05,\n"
    "p-06,007,?,true,2020-02-06,Oslo\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(TABLE)
    return tmp_path


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = int(str(stop.code))
    out, err = capsys.readouterr()
    return code, out, err


def test_fit_then_impute(folder: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "fit", "people.csv", "-o", "model", "--exclude", "id", *TINY)
    assert (code, out) == (0, "")
    assert err == "remasker: learned from 6 rows and 5 of 6 columns (6 gaps); wrote model\n"
    code, out, err = run(capsys, "impute", "people.csv", "-m", "model", "-o", "full.csv")
    assert (code, out, err) == (0, "", "remasker: filled 6 of 6 gaps in 6 rows\n")
    before = TABLE.replace("\n", ",").split(",")[:-1]
    after = Path("full.csv").read_text().replace("\n", ",").split(",")[:-1]
    for old, new in zip(before, after, strict=True):
        assert new == old or old in ("", "?")
        assert new not in ("", "?")
    assert Path("full.csv").read_text().count('"NA"') >= 1
    # The model knows that `zip` is a code, although this file looks like numbers.
    Path("new.csv").write_text("city,id,zip,age,paid,since\nOslo,q,12,,true,2021-01-01\n")
    code, _, _ = run(capsys, "impute", "new.csv", "-m", "model", "-o", "new.parquet")
    assert code == 0
    assert pq.read_table("new.parquet")["zip"].to_pylist() == ["12"]


@pytest.mark.slow
def test_impute_without_a_model(folder: Path, capsys: Any) -> None:
    rows = (f"{i},{2 * i if i % 3 else ''},{'ab'[i > 30]},note {i}\n" for i in range(60))
    Path("gaps.csv").write_text("n,twice,half,note\n" + "".join(rows))
    code, out, err = run(capsys, "impute", "gaps.csv", "-o", "full.csv", "--exclude", "note")
    assert (code, out) == (0, "")
    said = err.splitlines()
    assert said[0].startswith("remasker: filled 20 of 20 gaps in 60 rows; ")
    assert said[1].startswith("remasker: expected error: 0.")
    full, gaps = (pd.read_csv(name, dtype=str) for name in ("full.csv", "gaps.csv"))
    pd.testing.assert_frame_equal(full.where(gaps.notna()), gaps)
    assert (full["twice"].astype(int) - 2 * full["n"].astype(int)).abs().max() < 12
    assert not Path("model").exists()


def test_impute_without_a_model_is_for_one_table(folder: Path, capsys: Any) -> None:
    for arguments in (["people.csv", "people.csv", "-o", "out/"], ["people.csv", "-o", "out/"]):
        code, _, err = run(capsys, "impute", *arguments)
        assert code == 2
        assert "need the model they have in common" in err
    code, _, err = run(capsys, "impute", "people.csv", "-m", "model", "-o", "x", "--exclude", "id")
    assert (code, err) == (2, "remasker: --exclude: the model knows the columns; leave it out\n")
    assert not Path("out").exists()


def test_draws_are_several_tables_that_differ_in_the_gaps(folder: Path, capsys: Any) -> None:
    run(capsys, "fit", "people.csv", "-o", "model", "--exclude", "id", *TINY)
    Path("people.2024.csv").write_text(TABLE)
    command = ("impute", "people.2024.csv", "-m", "model", "-o", "draws", "--draws", "10")
    code, out, err = run(capsys, *command)
    assert (code, out) == (0, "")
    assert err.startswith("remasker: 10 tables are in draws; analyse each")
    names = sorted(path.name for path in Path("draws").iterdir())
    assert names[0] == "people.2024-01.csv"
    assert names[-1] == "people.2024-10.csv"
    texts = [(folder / "draws" / name).read_text() for name in names]
    assert len(set(texts)) > 1
    before = TABLE.replace("\n", ",").split(",")[:-1]
    for text in texts:
        for old, new in zip(before, text.replace("\n", ",").split(",")[:-1], strict=True):
            assert new == old or old in ("", "?")
            assert new not in ("", "?")
    assert run(capsys, *command)[0] == 2  # they are there
    assert run(capsys, *command, "--force")[0] == 0
    assert [(folder / "draws" / name).read_text() for name in names] == texts
    assert run(capsys, *command, "--force", "--seed", "1")[0] == 0
    assert [(folder / "draws" / name).read_text() for name in names] != texts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draws", "0"], "--draws: expected a number of at least 1, got 0"),
        (["--draws", "2", "--resume"], "--draws: made at once"),
        (["people.csv", "other.csv", "--draws", "2"], "--draws: expected one table, got 2"),
        (["--text", "raise"], "--text: the model knows the columns"),
        (["-", "--draws", "2"], "standard input goes to a file"),
    ],
)
def test_options_that_do_not_go_together(
    folder: Path, capsys: Any, arguments: list[str], said: str
) -> None:
    Path("other.csv").write_text(TABLE)
    data = (
        [] if arguments[0].endswith((".csv", "-")) and arguments[0] != "--draws" else ["people.csv"]
    )
    code, _, err = run(capsys, "impute", *data, *arguments, "-m", "model", "-o", "out")
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_standard_input_and_output(
    folder: Path, capsysbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        buffer = io.BytesIO(TABLE.encode())

    monkeypatch.setattr("sys.stdin", Stream)
    assert main(["fit", "-", "-o", "model", *TINY]) == 0
    Stream.buffer.seek(0)
    assert main(["impute", "-", "-m", "model", "-o", "-"]) == 0
    out, _ = capsysbinary.readouterr()
    assert out.splitlines()[1] == b"p-01,007,31,true,2020-01-31,Rome"
    assert not (pd.read_csv(io.BytesIO(out), dtype=str, keep_default_na=False) == "").any(axis=None)


def test_simulate(folder: Path, capsys: Any) -> None:
    rows = "".join(f"{i},{i * 0.5:.2f},{'ab'[i % 2]}\n" for i in range(50))
    Path("full.csv").write_text("n,x,c\n" + rows)
    arguments = ["simulate", "full.csv", "--mechanism", "MCAR", "--columns", "x", "--ratio", "0.4"]
    code, _, err = run(capsys, *arguments, "-o", "gaps.csv")
    assert code == 0
    made = sum(",," in line for line in Path("gaps.csv").read_text().splitlines())
    assert err == f"remasker: made {made} gaps in 50 rows (MCAR, seed 0)\n"
    assert 8 < made < 32
    run(capsys, *arguments, "-o", "again.csv")
    assert Path("again.csv").read_text() == Path("gaps.csv").read_text()


def test_describe_a_table_and_a_model(folder: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, "describe", "people.csv")
    assert code == 0
    assert out.splitlines() == [
        "people.csv: 6 rows, 6 columns, 6 gaps (17% of the cells)",
        "",
        "column  kind      gaps  example     what would be done",
        "id      category        p-01        nothing missing; helps to fill the others",
        "zip     category  17%   007         filled with one of 2 levels",
        "age     integer   33%   31          filled with whole numbers",
        "paid    boolean   17%   true        filled with true or false",
        "since   datetime  17%   2020-01-31  filled with dates",
        "city    category  17%   Rome        filled with one of 3 levels",
        "",
        "next: remasker impute people.csv -o OUT, or remasker tune people.csv",
    ]
    run(capsys, "fit", "people.csv", "-o", "model", *TINY)
    code, out, _ = run(capsys, "describe", "model")
    assert code == 0
    assert "a model of 6 of 6 columns, fitted on 6 rows of people.csv" in out
    assert "1 member:" in out
    assert "paid    boolean   17%          False, True" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", "nope.csv", "-o", "m"], "cannot read nope.csv: No such file or directory"),
        (["fit", ".", "-o", "m"], "cannot read .: Is a directory"),
        (["fit", "people.csv", "-o", "people.csv"], "people.csv exists; it is no model"),
        (
            ["fit", "people.csv", "-o", "m", "--set", "widht=8"],
            "--set: unknown parameter 'widht'; did you mean 'width'?",
        ),
        (
            ["fit", "people.csv", "-o", "m", "--set", "width=wide"],
            "width: expected an integer of at least 2, got 'wide'",
        ),
        (
            ["fit", "people.csv", "-o", "m", "--set", "kinds=3"],
            "--set kinds: use --kinds",
        ),
        (
            ["fit", "people.csv", "-o", "m", "--kinds", "zip"],
            "--kinds: expected NAME=VALUE, got 'zip'",
        ),
        (
            ["fit", "people.csv", "-o", "m", "--kinds", "city=number"],
            "column 'city': expected numbers, found 'Rome' in row 2; list it with --na, or name "
            "the column with --exclude",
        ),
        (
            ["fit", "people.csv", "-o", "m", "--exclude", "agee"],
            "--exclude names column 'agee', which the table does not have; did you mean 'age'?",
        ),
        (
            ["fit", "people.csv", "-o", "m", "--bounds", "age=5:1"],
            "--bounds of column 'age': the lower one is larger in (5, 1)",
        ),
        (
            ["impute", "people.csv", "-m", "none", "-o", "full.csv"],
            "none is not a saved model: it has no model.json; give the directory that save() or "
            "`remasker fit -o` wrote",
        ),
        (
            ["impute", "people.csv", "-m", "none", "-o", "people.csv"],
            "people.csv exists; add --force to replace it",
        ),
        (
            ["impute", "people.csv", "-m", "none", "-o", "no/full.csv"],
            "cannot write no/full.csv: there is no directory no",
        ),
        (["simulate", "people.csv", "-o", "x.csv", "--columns", "agee"], "agee"),
        (
            ["imputee"],
            "argument COMMAND: invalid choice: 'imputee' (choose from",
        ),
        (
            ["fit"],
            "the following arguments are required: -o/--output; see `remasker fit --help`",
        ),
        ([], "the following arguments are required: COMMAND; see `remasker --help`"),
    ],
)
def test_user_errors_are_one_sentence(
    folder: Path, capsys: Any, arguments: list[str], sentence: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("remasker: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert sorted(p.name for p in folder.iterdir()) == ["people.csv"]


def test_a_bad_table_at_impute(folder: Path, capsys: Any) -> None:
    run(capsys, "fit", "people.csv", "-o", "model", *TINY)
    for text, sentence in (
        ("id,zip,age\n1,2,3\n", "the columns differ from those of fit: missing 'paid', 'since', "),
        (TABLE.replace("31", "old"), "column 'age': expected numbers, found 'old' in row 2; "),
        (TABLE.replace("31", "inf"), "column 'age': found inf in row 2; "),
        (TABLE + "p-07,1\n", "bad.csv: line 8 has 2 cells, the first line has 6 (separator ','): "),
    ):
        Path("bad.csv").write_text(text)
        code, _, err = run(capsys, "impute", "bad.csv", "-m", "model", "-o", "out.csv")
        assert code == 2
        assert err.startswith(f"remasker: {sentence}")
        assert not Path("out.csv").exists()


def test_warnings_speak_the_language_of_the_shell(folder: Path, capsys: Any) -> None:
    rows = "".join(f"person {i} lives here,{i}\n" for i in range(20))
    Path("text.csv").write_text("note,x\n" + rows)
    code, _, err = run(capsys, "fit", "text.csv", "-o", "model", *TINY)
    assert code == 0
    assert err.splitlines()[0] == (
        "remasker: warning: column 'note': almost every value is different, so this is free text "
        "or an identifier; left as it is (to model it anyway: --kinds note=category)"
    )


def test_nothing_is_replaced_without_force(folder: Path, capsys: Any) -> None:
    assert run(capsys, "fit", "people.csv", "-o", "model", *TINY)[0] == 0
    code, _, err = run(capsys, "fit", "people.csv", "-o", "model", *TINY)
    assert (code, err) == (2, "remasker: model exists; add --force to replace it\n")
    assert run(capsys, "fit", "people.csv", "-o", "model", "--force", *TINY)[0] == 0
    code, _, _ = run(capsys, "impute", "people.csv", "-m", "model", "-o", "people.csv", "--force")
    assert code == 0
    assert "?" not in Path("people.csv").read_text()


def test_na_decimal_and_separator_are_remembered_or_given(folder: Path, capsys: Any) -> None:
    rows = "".join(f"{i},5;{'abc'[i % 3]}\n" for i in range(9))
    Path("euro.csv").write_text("x;c\n" + rows + "-999;a\n4,25;b\n")
    assert run(capsys, "fit", "euro.csv", "-o", "m", "--na", "-999", *TINY)[0] == 0
    assert run(capsys, "impute", "euro.csv", "-m", "m", "-o", "out.csv")[0] == 0
    filled = Path("out.csv").read_text().splitlines()[10].split(";")[0]
    assert filled != "-999"
    assert len(filled.partition(",")[2]) == 2


def test_a_bug_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("remasker.files.read_table", broken)
    with pytest.raises(ZeroDivisionError):
        main(["describe", "people.csv"])


def test_help_is_fast_and_teaches() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tuning.cli", "--help"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert "remasker impute people.csv -o full.csv" in done.stdout
    for heavy in ("torch", "pandas", "sklearn", "ray", "pyarrow"):
        assert f" {heavy}\n" not in done.stderr


def test_errors_are_sentences_in_the_background_too(folder: Path, capsys: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, _, err = run(capsys, "fit", "people.csv", "-o", "m", "--set", "widht=3")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 2
    assert "did you mean 'width'?" in err


def test_interrupted_where_libraries_make_another_error_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def importing(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            raise ImportError("numpy._core.multiarray failed to import") from None

    monkeypatch.setattr("remasker.files.read_table", importing)
    # A suite that was started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, out, err = run(capsys, "describe", "people.csv")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, out, err) == (130, "", "remasker: interrupted; nothing was written\n")


@pytest.mark.slow
def test_interrupted_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text(TABLE)
    command = [sys.executable, "-m", "tuning.cli", "fit", "people.csv", "-o", "model"]
    command += ["--epochs", "1000000", "--set", "patience=none"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that was started in the background would hand on that it ignores Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(15)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "remasker: interrupted; nothing was written\n")
    assert [p.name for p in tmp_path.iterdir()] == ["people.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away(tmp_path: Path, unbuffered: str) -> None:
    rows = "".join(f"{i},word{i % 7}\n" for i in range(200_000))
    (tmp_path / "long.csv").write_text("n,c\n" + rows)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment |= {"PYTHONUNBUFFERED": unbuffered}
    line = (
        f"{sys.executable} -m tuning.cli simulate long.csv -o - --mechanism MCAR --columns c "
        "| head -1; echo ${PIPESTATUS[0]}"
    )
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "n,c\n141\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_demo(folder: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, "demo", "--rows", "80", "--trials", "1", "--time-budget", "40s")
    assert code == 0
    assert "ReMasker" in out
    assert sorted(p.name for p in (folder / "demo").iterdir()) == [
        "gaps.csv",
        "runs",
        "truth.csv",
    ]
    assert (folder / "demo" / "runs" / "gaps" / "report.html").is_file()
