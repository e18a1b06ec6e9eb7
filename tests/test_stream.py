"""Files that stream: batches give what the whole file gives, whoever dies meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import remasker.stream
from remasker import InvalidTableError, ReMaskerImputer
from remasker.files import from_arrow
from remasker.stream import Filled, impute_file
from tests.test_tuning_faults import alive, descendants, wait_for
from tuning.cli import main

PROJECT = Path(__file__).resolve().parent.parent
TINY: dict[str, Any] = {"width": 8, "heads": 2, "encoder_depth": 1, "decoder_depth": 1, "epochs": 1}


def make(n_rows: int, seed: int = 0, share: float = 0.2) -> pa.Table:
    """Every kind of column, with gaps, and metadata on the table and on a field."""
    rng = np.random.default_rng(seed)
    size = rng.normal(size=n_rows)
    seconds = (1_600_000_000 + 86400 * np.round(size * 100)).astype("int64")

    def gappy(cells: Any, type_: pa.DataType | None = None) -> pa.Array:
        return pa.array(cells, type_, mask=rng.random(n_rows) < share)

    columns = {
        "row": pa.array(np.arange(n_rows) + 2**53),
        "float": gappy(size.astype(np.float32)),
        "double": gappy(2 * size + rng.normal(size=n_rows)),
        "count": gappy(np.round(50 + 9 * size).astype(np.uint8)),
        "colour": gappy(np.where(size > 0, "red", "blue")),
        "letter": gappy(np.where(size > 0.5, "u", "v")).dictionary_encode(),
        "paid": gappy(size > 0.2),
        "when": gappy(seconds * 1000, pa.timestamp("ms", tz="Europe/Rome")),
    }
    schema = pa.table(columns).schema.with_metadata({"who": "us"})
    place = schema.get_field_index("double")
    schema = schema.set(place, schema.field(place).with_metadata({"unit": "kg"}))
    return pa.table(columns, schema=schema)


@pytest.fixture(scope="module")
def imputer() -> ReMaskerImputer:
    settings = {**TINY, "experts": None, "n_members": 1}
    return ReMaskerImputer(random_state=0, exclude=["row"], **settings).fit(from_arrow(make(60)))


@pytest.fixture(scope="module")
def stacked(one_stack: None) -> ReMaskerImputer:
    table = make(40).select(["double", "float", "colour"])
    return ReMaskerImputer(random_state=0, **TINY).fit(from_arrow(table))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remasker.stream, "MIN_ROWS", 16)
    monkeypatch.setattr(remasker.stream, "MAX_ROWS", 64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imputer: ReMaskerImputer) -> Path:
    monkeypatch.chdir(tmp_path)
    imputer.save("model")
    Path("big").mkdir()
    for k in range(3):
        pq.write_table(make(50 + k, seed=k), f"big/{k}.parquet")
    return tmp_path


def run(capsys: Any, *arguments: str) -> tuple[int, str]:
    try:
        code = main(["impute", *arguments, "-m", "model"])
    except SystemExit as stop:
        code = int(str(stop.code))
    return code, capsys.readouterr().err


def assert_filled(before: pa.Table, path: str | Path) -> None:
    """Same rows, order, schema and metadata; observed cells bit for bit; no gap left."""
    after = pq.read_table(path)
    assert after.schema.equals(before.schema, check_metadata=True)
    assert len(after) == len(before)
    for name in before.column_names:
        old, new = before[name], after[name]
        if pa.types.is_dictionary(old.type):  # Arrow compares their codes
            old, new = old.cast(pa.string()), new.cast(pa.string())
        known = pa.compute.is_valid(old)
        assert new.null_count == 0
        assert new.filter(known).equals(old.filter(known))


# ---------------------------------------------------------------------- one file


def same(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    """Numbers and times to the last digits: sums over smaller batches may round otherwise."""
    if pa.types.is_temporal(a.type):
        a, b = (pa.compute.cast(x, "int64").to_numpy() for x in (a, b))
        return bool(np.allclose(a, b, rtol=1e-7))
    if pa.types.is_floating(a.type):
        return bool(np.allclose(a.to_numpy(), b.to_numpy(), rtol=1e-4, atol=1e-5))
    return a.to_pylist() == b.to_pylist()


@pytest.mark.parametrize("row_group", [7, 64, 1000])
def test_streamed_is_whole(
    tmp_path: Path, small_batches: None, imputer: ReMaskerImputer, row_group: int
) -> None:
    table = make(200, seed=1)
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=row_group, compression="zstd")
    heard: list[int] = []
    filled = impute_file(
        imputer, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"), tell=heard.append
    )
    assert heard == [64, 128, 192, 200]
    assert_filled(table, tmp_path / "out.parquet")
    assert filled == Filled(rows=200, gaps=sum(c.null_count for c in table.columns), left=0)
    after = pq.read_table(tmp_path / "out.parquet")
    whole = imputer.transform(from_arrow(table))
    for name in table.column_names:
        assert same(after[name], pa.chunked_array(pa.array(whole[name], table[name].type)))
    assert pq.ParquetFile(tmp_path / "out.parquet").metadata.row_group(0).column(0).compression == (
        "ZSTD"
    )


def test_the_second_stage_streams_too(
    tmp_path: Path, small_batches: None, stacked: ReMaskerImputer
) -> None:
    assert stacked.ensemble_.experts
    table = make(150, seed=2).select(["double", "float", "colour"])
    pq.write_table(table, tmp_path / "in.parquet")
    impute_file(stacked, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"))
    assert_filled(table, tmp_path / "out.parquet")
    whole = stacked.transform(from_arrow(table))
    after = pq.read_table(tmp_path / "out.parquet")
    for name in table.column_names:
        assert same(after[name], pa.chunked_array(pa.array(whole[name], table[name].type)))


def test_a_batch_without_any_cell_of_a_column_changes_no_type(
    tmp_path: Path, small_batches: None, imputer: ReMaskerImputer
) -> None:
    table = make(200)
    for place, field in enumerate(table.schema):
        if field.name != "row":
            gone = pa.concat_arrays(
                [pa.nulls(100, field.type), table[place][100:].combine_chunks()]
            )
            table = table.set_column(place, field, gone)
    pq.write_table(table, tmp_path / "in.parquet")
    impute_file(imputer, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"))
    assert_filled(table, tmp_path / "out.parquet")


def test_decimals_stay_decimals(tmp_path: Path, small_batches: None) -> None:
    """Also in a batch that holds none of them."""
    size = np.random.default_rng(0).normal(size=200)
    prices = pa.array(np.round(size, 2)).cast(pa.decimal128(3, 2)).to_pylist()
    prices[:100] = [None] * 100
    table = pa.table({"size": size, "price": pa.array(prices, pa.decimal128(3, 2))})
    imputer = ReMaskerImputer(random_state=0, experts=None, n_members=1, **TINY)
    imputer.fit(from_arrow(table))
    pq.write_table(table, tmp_path / "in.parquet")
    impute_file(imputer, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"))
    assert_filled(table, tmp_path / "out.parquet")


def test_the_order_of_levels_is_kept(
    tmp_path: Path, small_batches: None, imputer: ReMaskerImputer
) -> None:
    table = make(200)
    place = table.schema.get_field_index("letter")
    codes = table["letter"].combine_chunks().indices.cast(pa.int8())
    levels = pa.array(["w", "v", "u"])
    ordered = pa.DictionaryArray.from_arrays(codes, levels, ordered=True)
    table = table.set_column(place, pa.field("letter", ordered.type), ordered)
    pq.write_table(table, tmp_path / "in.parquet")
    impute_file(imputer, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"))
    assert_filled(table, tmp_path / "out.parquet")
    for chunk in pq.read_table(tmp_path / "out.parquet")["letter"].chunks:
        assert chunk.dictionary.to_pylist() == ["w", "v", "u"]


def test_a_file_without_rows_and_a_column_without_type(
    tmp_path: Path, small_batches: None, imputer: ReMaskerImputer
) -> None:
    source, target = str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet")
    pq.write_table(make(0), source)
    assert impute_file(imputer, source, target).rows == 0
    assert pq.read_table(target).schema.equals(make(0).schema, check_metadata=True)
    # pandas writes a column of None as one of no type: the model knows better.
    table = make(90)
    for name in ("colour", "count", "double", "paid", "when"):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.nulls(90))
    pq.write_table(table, source)
    impute_file(imputer, source, target)
    after = pq.read_table(target)
    assert [c.null_count for c in after.columns] == [0] * 8
    assert pa.types.is_string(after.schema.field("colour").type) or pa.types.is_large_string(
        after.schema.field("colour").type
    )
    assert pa.types.is_floating(after.schema.field("double").type)


def test_errors_name_the_row_of_the_file_and_leave_nothing(
    tmp_path: Path, small_batches: None, imputer: ReMaskerImputer
) -> None:
    table = make(200, share=0.0)
    bad = table["double"].to_numpy().copy()
    bad[150] = np.inf
    pq.write_table(table.set_column(2, "double", pa.array(bad)), tmp_path / "in.parquet")
    with pytest.raises(InvalidTableError, match="column 'double': found inf in row 150"):
        impute_file(imputer, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"))
    wrong = make(50).set_column(4, "colour", pa.nulls(50, pa.binary(3)))
    pq.write_table(wrong, tmp_path / "in.parquet")
    with pytest.raises(InvalidTableError, match="column 'colour': "):
        impute_file(imputer, str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


# ---------------------------------------------------------------------- many files


def test_many_files_on_this_machine(folder: Path, capsys: Any) -> None:
    Path("big/notes.md").write_text("not a table")
    gaps = sum(c.null_count for k in range(3) for c in make(50 + k, seed=k).columns)
    said = f"remasker: filled {gaps} of {gaps} gaps in 153 rows, 3 files\n"
    assert run(capsys, "big/*.parquet", "-o", "out", "--workers", "1") == (0, said)
    assert sorted(path.name for path in Path("out").iterdir()) == [f"{k}.parquet" for k in range(3)]
    for k in range(3):
        assert_filled(make(50 + k, seed=k), f"out/{k}.parquet")
    # A directory, several paths, one file into a directory; nothing is replaced unasked.
    code, err = run(capsys, "big", "-o", "out/")
    assert code == 2
    assert err == (
        "remasker: out/0.parquet exists (and 2 more); add --resume to keep what is there and do "
        "the rest, or --force to replace it\n"
    )
    Path("out/1.parquet").unlink()
    stamp = Path("out/0.parquet").stat().st_mtime_ns
    code, err = run(capsys, "big", "-o", "out/", "--resume")
    assert code == 0
    assert err.splitlines()[0] == "remasker: 2 of 3 outputs are there already"
    assert " in 51 rows" in err
    assert Path("out/0.parquet").stat().st_mtime_ns == stamp
    assert run(capsys, "big", "-o", "out/", "--force", "--workers", "1")[0] == 0
    assert Path("out/0.parquet").stat().st_mtime_ns > stamp
    assert run(capsys, "big/0.parquet", "-o", "new/")[0] == 0
    assert_filled(make(50, seed=0), "new/0.parquet")


def test_a_bar_on_a_terminal(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, err = run(capsys, "big", "-o", "out", "--workers", "1")
    assert code == 0
    assert "imputing" in err
    assert "153/153" in err


def test_text_files_go_one_by_one(folder: Path, capsys: Any) -> None:
    for k in range(2):
        make(30, seed=k).to_pandas().to_csv(f"big/{k}.csv", index=False)
    assert run(capsys, "big/*.csv", "-o", "out", "--workers", "1")[0] == 0
    before = Path("big/0.csv").read_text().splitlines()
    after = Path("out/0.csv").read_text().splitlines()
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert all(a in (b, "") for a, b in zip(old.split(","), new.split(","), strict=True))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none/*.parquet", "-o", "out"], "no file matches 'none/*.parquet'"),
        (["model", "-o", "out"], "model holds no table: expected files that end in .parquet, "),
        (
            ["big/*.parquet", "-o", "README"],
            "cannot write 3 tables to README: expected a directory",
        ),
        (["big/*", "-o", "x.parquet"], "cannot write 3 tables to x.parquet: expected a directory"),
        (["big", "-o", "-"], "cannot write 3 tables to -: expected a directory, such as out/"),
        (["big", "-o", "no/out"], "cannot write no/out: there is no directory no"),
        (
            ["big", "other", "-o", "out"],
            "big/0.parquet and other/0.parquet would both become out/0.parquet; impute them into ",
        ),
        (["lacking/*", "big", "-o", "out"], "lacking/l.parquet: the columns differ from those of "),
        (["big", "gone.parquet", "-o", "out"], "cannot read gone.parquet: no such file"),
        (["-", "big", "-o", "out"], "-: standard input goes to a file or to -, not to a directory"),
        (["big", "-o", "out", "--workers", "0"], "--workers: expected a number of at least 1"),
        (["-", "-o", "-", "--address", "auto"], "-: a cluster reads and writes files; leave "),
        (["broken.parquet", "-o", "out"], "broken.parquet is not a readable Parquet file: "),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, capsys: Any, arguments: list[str], sentence: str
) -> None:
    Path("README").write_text("")
    Path("other").mkdir()
    Path("lacking").mkdir()
    pq.write_table(make(5), "other/0.parquet")
    pq.write_table(make(5).drop_columns(["paid"]), "lacking/l.parquet")
    Path("broken.parquet").write_bytes(b"PAR1 and no more")
    before = sorted(path.name for path in folder.iterdir())
    code, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith(f"remasker: {sentence}")
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == before


def test_one_bad_file_does_not_stop_the_others(folder: Path, capsys: Any) -> None:
    bad = make(5).set_column(2, "double", pa.array([1.0, 2.0, np.inf, 3.0, 4.0]))
    pq.write_table(bad, "big/1.parquet")
    code, err = run(capsys, "big", "-o", "out", "--workers", "1")
    assert code == 2
    assert err.startswith("remasker: big/1.parquet: column 'double': found inf in row 2; ")
    assert err.endswith("; 2 of 3 files are finished\n")
    assert sorted(path.name for path in Path("out").iterdir()) == ["0.parquet", "2.parquet"]


# ---------------------------------------------------------------------- killed, long, far away


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tuning.cli", "impute", "-m", "model", *words]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}


def write_files(n_files: int, n_rows: int) -> None:
    for k in range(n_files):
        pq.write_table(make(n_rows, seed=k), f"big/{k}.parquet")


@pytest.mark.slow
def test_a_killed_process_loses_and_doubles_nothing(folder: Path) -> None:
    write_files(4, 80_000)
    process = subprocess.Popen(
        command("big", "-o", "out", "--workers", "2"),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: list(Path("out").glob(".*.part")), 200)
    workers = [p for p, line in descendants(process.pid).items() if "spawn_main" in line]
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.endswith("gaps in 320000 rows, 4 files\n")
    assert sorted(path.name for path in Path("out").iterdir()) == [f"{k}.parquet" for k in range(4)]
    for k in range(4):
        assert_filled(make(80_000, seed=k), f"out/{k}.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_then_resumed(folder: Path, capsys: Any, how: signal.Signals) -> None:
    write_files(4, 60_000)
    process = subprocess.Popen(
        command("big", "-o", "out", "--workers", "2"),
        env=ENVIRONMENT,
        start_new_session=True,
        # A background job of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: list(Path("out").glob("*.parquet")), 200)
    workers = [p for p, line in descendants(process.pid).items() if "spawn_main" in line]
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    wait_for(lambda: not any(alive(pid) for pid in workers), 30)
    done = sorted(path.name for path in Path("out").glob("*.parquet"))
    assert 0 < len(done) < 4
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert err.count("\n") == 1
        assert err.startswith("remasker: interrupted; ")
        assert err.endswith(" of 4 files are finished; --resume goes on from here\n")
    code, err = run(capsys, "big", "-o", "out", "--resume")
    assert (code, err.splitlines()[0]) == (
        0,
        f"remasker: {len(done)} of 4 outputs are there already",
    )
    assert sorted(path.name for path in Path("out").iterdir()) == [f"{k}.parquet" for k in range(4)]
    for k in range(4):
        assert_filled(make(60_000, seed=k), f"out/{k}.parquet")


@pytest.mark.slow
def test_a_killed_worker_of_a_cluster(one_ray: None, folder: Path, capsys: Any) -> None:
    write_files(4, 80_000)
    killed: list[int] = []

    def kill_one() -> None:
        wait_for(lambda: list(Path("out").glob(".*.part")), 120)
        found = [p for p, line in descendants(os.getpid()).items() if "impute_on_node" in line]
        os.kill(found[0], signal.SIGKILL)
        killed.append(found[0])

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    code, err = run(capsys, "big", "-o", "out", "--address", "auto")
    killer.join(timeout=5)
    assert killed
    assert code == 0, err
    assert err.endswith("gaps in 320000 rows, 4 files\n")
    assert sorted(path.name for path in Path("out").iterdir()) == [f"{k}.parquet" for k in range(4)]
    for k in range(4):
        assert_filled(make(80_000, seed=k), f"out/{k}.parquet")


@pytest.mark.slow
def test_ray_is_not_loaded_without_an_address(folder: Path) -> None:
    words = [sys.executable, "-X", "importtime", *command("big/0.parquet", "-o", "out.parquet")[1:]]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "| ray\n" not in done.stderr.replace("|   ", "| ")
    assert not any(line.rstrip().endswith(" ray") for line in done.stderr.splitlines())
    assert_filled(make(50), "out.parquet")


def peak_megabytes(pid: int) -> float:
    """The most memory that a living process has held; 0 once it is gone."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


@pytest.mark.slow
def test_a_million_rows_in_bounded_memory(folder: Path) -> None:
    peaks, peak = [], 0.0
    for n_rows in (100_000, 1_000_000):
        pq.write_table(make(n_rows), "long.parquet")
        started = time.monotonic()
        process = subprocess.Popen(
            command("long.parquet", "-o", "out.parquet", "--force"), env=ENVIRONMENT
        )
        # Not `ru_maxrss`, which begins with the memory of the process that forked: this one's.
        while process.poll() is None:
            peak = peak_megabytes(process.pid) or peak
            time.sleep(0.02)
        assert process.returncode == 0
        peaks.append(peak)
        print(f"{n_rows} rows: {time.monotonic() - started:.0f} s, peak {peaks[-1]:.0f} MB")
    assert peaks[1] < 1000
    assert peaks[1] - peaks[0] < 250
    assert_filled(make(1_000_000), "out.parquet")
