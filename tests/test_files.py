"""Files: what is written back is what was read, but for the gaps."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remasker import InvalidConfigError, InvalidTableError, RemaskerError
from remasker.cells import CellFormat
from remasker.files import TextOptions, check_target, read_table, write_bytes, write_table

QUIRKS = (
    "code,sci,price,day,when,country,flag,name,n\n"
    '007,1e3,1.10,2020-01-31,2020-01-31T10:00:00Z,"NA",true,"Smith, ""J""",1\n'
    "012,2.5e2,2.5,2020-02-01,2020-02-01T11:30:00Z,IT,FALSE,Doe,2\n"
    ',NA,?,,,FR,,"multi\nline",\n'
    "007,3e3,3.25,2020-02-03,2020-02-03T12:00:00Z,,true, Foo ,+4\n"
)


def put(folder: Path, text: str | bytes, name: str = "table.csv") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def completed(frame: pd.DataFrame, **cells: Any) -> pd.DataFrame:
    """The frame with the gaps of some columns filled with a value."""
    result = frame.copy()
    for name, value in cells.items():
        result[name] = result[name].fillna(value)
    return result


@pytest.mark.parametrize(
    "text",
    [
        QUIRKS,
        QUIRKS.replace("\n", "\r\n"),
        QUIRKS.rstrip("\n"),
        "\ufeff" + QUIRKS,
        QUIRKS.replace(",", ";"),
        QUIRKS.replace(",", "\t"),
        QUIRKS.replace(",", "|"),
        '"a" , b\n 1 ,"x, y" \n 2 , z\n',
        'a,b\n5" pipe,1\n"unclosed,2\n',
        "x\n1\n\n3\n",
        "a,b,\n1,2,\n3,,\n",
        ",x\n0,1.5\n1,\n",
        'a,b\n"1","NA"\n"2",""\n',
    ],
)
def test_a_text_file_comes_back_byte_for_byte(tmp_path: Path, text: str) -> None:
    table = read_table(put(tmp_path, text))
    assert table.render(table.frame, "out.csv" if "\t" not in text else "-") == text.encode()


def test_what_quirks_mean(tmp_path: Path) -> None:
    frame = read_table(put(tmp_path, QUIRKS)).frame
    assert frame.dtypes.map(str).to_dict() == {
        "code": "str",
        "sci": "float64",
        "price": "float64",
        "day": "datetime64[us]",
        "when": "datetime64[us, UTC]",
        "country": "str",
        "flag": "boolean",
        "name": "str",
        "n": "Int64",
    }
    assert frame["country"].tolist()[:1] == ["NA"]
    assert frame["name"].tolist() == ['Smith, "J"', "Doe", "multi\nline", "Foo"]
    assert frame.isna().sum().to_dict() == {
        "code": 1, "sci": 1, "price": 1, "day": 1, "when": 1, "country": 1, "flag": 1, "name": 0,
        "n": 1,
    }  # fmt: skip


def test_new_cells_look_like_their_column(tmp_path: Path) -> None:
    table = read_table(put(tmp_path, QUIRKS))
    full = completed(
        table.frame,
        code="012",
        sci=1234.5678,
        price=2.0,
        day=pd.Timestamp("2020-02-02"),
        when=pd.Timestamp("2020-02-02T12:15Z"),
        country="NA",
        flag=False,
        n=3,
    )
    lines = table.render(full, "-").decode().split("\n")
    assert lines[3:5] == [
        '012,1234.57,2.00,2020-02-02,2020-02-02T12:15:00Z,FR,FALSE,"multi',
        'line",3',
    ]
    # A level that would be read as a gap is quoted.
    assert lines[5] == '007,3e3,3.25,2020-02-03,2020-02-03T12:00:00Z,"NA",true, Foo ,+4'


@pytest.mark.parametrize(
    ("cells", "value", "written"),
    [
        (["1,5", "2,25"], 3.1, "3,10"),
        (["01.02.2020", "31.12.2020"], pd.Timestamp("2021-03-04"), "04.03.2021"),
        (["1/31/2020", "2/1/2020"], pd.Timestamp("2021-03-04"), "3/4/2021"),
        (["2020-01-01 10:00", "2020-01-01 11:00"], pd.Timestamp("2021-03-04"), "2021-03-04 00:00"),
        (
            ["2020-01-01T10:00:00.123+02:00", "2020-01-01T11:00:00.5+02:00"],
            pd.Timestamp("2021-03-04T00:00Z"),
            "2021-03-04T02:00:00.000+02:00",
        ),
        (["True", "False"], True, "True"),
        (["1.0", "2.0"], 3.0, "3.0"),
        (["-0.1", "0.1"], -0.01, "0.0"),
        (["12345678901234567890", "1"], 7.0, "7"),
    ],
)
def test_formats(tmp_path: Path, cells: list[str], value: Any, written: str) -> None:
    table = read_table(put(tmp_path, "k;x\n" + "".join(f"a;{c}\n" for c in cells) + "a;\n"))
    out = table.render(completed(table.frame, x=value), "-").decode().split("\n")
    assert out[1:4] == [*(f"a;{cell}" for cell in cells), f"a;{written}"]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["007", "12"], "category"),
        (["0", "0.5"], "number"),
        (["1", "1000"], "integer"),
        (["01/02/2020", "03/04/2020"], "category"),
        (["2020-13-01", "2020-01-01"], "category"),
        (["1,234", "5,678"], "category"),
        (["yes", "no"], "category"),
        (["1", "x"], "category"),
        (["12:30", "13:00"], "category"),
    ],
)
def test_kinds(tmp_path: Path, cells: list[str], kind: str) -> None:
    table = read_table(put(tmp_path, "k;x\n" + "".join(f"a;{c}\n" for c in cells)))
    assert CellFormat.from_dict(table.memory["columns"]["x"]).kind == kind


def test_dates_that_can_be_read_in_two_ways(tmp_path: Path) -> None:
    path = put(tmp_path, "x\n01/02/2020\n03/04/2020\n")
    with pytest.raises(InvalidTableError) as raised:
        read_table(path, TextOptions(kinds={"x": "datetime"}))
    assert str(raised.value) == (
        "column 'x': '01/02/2020' may mean the day or the month first; give its format, such as "
        "x=datetime:%d/%m/%Y"
    )
    frame = read_table(path, TextOptions(kinds={"x": "datetime:%d/%m/%Y"})).frame
    assert frame["x"].tolist() == [pd.Timestamp("2020-02-01"), pd.Timestamp("2020-04-03")]


def test_gaps_by_name(tmp_path: Path) -> None:
    path = put(tmp_path, 'x,y\n1,-\n-999,b\n-999.0,"NA"\n')
    table = read_table(path, TextOptions(na_values=["-999", "-"]))
    assert table.frame["x"].isna().tolist() == [False, True, True]
    assert table.frame["y"].isna().tolist() == [True, False, False]
    strict = read_table(put(tmp_path, "x\nNA\nb\n"), TextOptions(default_na=False))
    assert strict.frame["x"].tolist() == ["NA", "b"]
    quoted = read_table(put(tmp_path, 'x\n"1"\n"NA"\n"2"\n')).frame
    assert quoted["x"].isna().tolist() == [False, True, False]


def test_a_word_among_numbers_is_spoken_of(tmp_path: Path) -> None:
    table = read_table(put(tmp_path, "x\n1\n2\nunknown\n3\n"))
    assert table.notes == [
        "column 'x': read as text because of 'unknown' in row 4; if that marks a gap, name it "
        "with --na"
    ]


def test_what_a_model_remembers_drives_reading(tmp_path: Path) -> None:
    first = read_table(
        put(tmp_path, "zip,x,t\n007,1.25,31.01.2020\n123,-9,\n"), TextOptions(na_values=["-9"])
    )
    from remasker.table import TableEncoder

    columns = TableEncoder().fit(first.frame).columns
    new = read_table(
        put(tmp_path, "zip,x,t\n123,-9,01.02.2020\n124,,\n"),
        columns=columns,
        remembered=first.memory,
    )
    assert new.frame["zip"].tolist() == ["123", "124"]
    assert new.frame["x"].isna().all()
    assert new.frame["t"][2] == pd.Timestamp("2020-02-01")
    text = new.render(completed(new.frame, x=3.0, t=pd.Timestamp("2020-05-06")), "-").decode()
    assert text == "zip,x,t\n123,3.00,01.02.2020\n124,3.00,06.05.2020\n"


def test_levels_of_a_model_that_was_not_fitted_on_text(tmp_path: Path) -> None:
    from remasker.table import TableEncoder

    frame = pd.DataFrame({"n": [0, 1, 0], "b": [True, False, True]})
    columns = TableEncoder(kinds={"n": "category"}).fit(frame).columns
    new = read_table(put(tmp_path, "n,b\n1.0,TRUE\nother,\n,false\n0,true\n"), columns=columns)
    assert new.frame["n"].tolist() == [1, "other", None, 0]
    assert new.frame["b"].tolist() == [True, pd.NA, False, True]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "{path} is empty: expected a line of column names"),
        (b"\n \n", "{path} is empty: expected a line of column names"),
        (b"a,b\n", "{path}: the table has no rows below its column names"),
        (b"a,b,a\n1,2,3\n", "column name 'a' appears more than once; rename the columns"),
        (
            b'a,b\n1,"x\ny"\n3\n',
            "{path}: line 4 has 1 cells, the first line has 2 (separator ','): '3'",
        ),
        (
            b"a,b\ncaf\xe9,1\n",
            "{path} is not utf-8 text (byte 0xe9 at 7); give its encoding, such as --encoding "
            "latin-1",
        ),
        (b"PK\x03\x04\x00\x00", "{path} is not a text table; expected CSV, TSV or Parquet"),
    ],
)
def test_bad_text_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = put(tmp_path, data)
    with pytest.raises(RemaskerError) as raised:
        read_table(path)
    assert str(raised.value) == message.format(path=path)


def test_other_encodings(tmp_path: Path) -> None:
    text = "a,b\ncafé,1\nthé,\n"
    for encoding, told in (("latin-1", "latin-1"), ("utf-16", None)):
        table = read_table(put(tmp_path, text.encode(encoding)), TextOptions(encoding=told))
        assert table.frame["a"].tolist() == ["café", "thé"]
        assert table.render(table.frame, "-") == text.encode(encoding)
    with pytest.raises(InvalidConfigError, match="Python knows no encoding 'klingon'"):
        read_table(put(tmp_path, text), TextOptions(encoding="klingon"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": ";;"}, "separator: expected one character such as ',', ';' or 'tab', got"),
        ({"decimal": "x"}, "decimal: expected '.' or ',', got 'x'"),
    ],
)
def test_bad_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        TextOptions(**options)  # type: ignore[arg-type]


def test_gzip_and_other_separators_by_name(tmp_path: Path) -> None:
    table = read_table(put(tmp_path, gzip.compress(b'a,b\n1,"x,y"\n,z\n'), "t.csv.gz"))
    full = completed(table.frame, a=2)
    write_table(table, full, str(tmp_path / "out.tsv.gz"))
    assert gzip.decompress((tmp_path / "out.tsv.gz").read_bytes()) == b'a\tb\n1\t"x,y"\n2\tz\n'
    write_table(table, full, str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet").to_pydict() == {"a": [1, 2], "b": ["x,y", "z"]}


def test_gaps_can_be_made(tmp_path: Path) -> None:
    for text, gap in (("a,b\n1,x\n2,y\n", b""), ("a,b\n?,x\n2,y\n?,z\n", b"?")):
        table = read_table(put(tmp_path, text))
        holed = table.frame.copy()
        holed.loc[2, "b"] = None
        assert table.render(holed, "-").split(b"\n")[1].endswith(b"," + gap)


def test_parquet_keeps_types_and_every_cell(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": pa.array([2**53 + 1, None, 3], pa.int64()),
            "c": pa.array(["a", None, "b"]).dictionary_encode(),
            "d": pa.array([1, None, 2], pa.int32()).cast(pa.date32()),
            "l": [[1], None, [2]],
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    read = read_table(str(tmp_path / "t.parquet"))
    full = read.frame.copy()
    full["n"] = full["n"].fillna(5)
    again = pq.read_table(io.BytesIO(read.render(full, "out.parquet")))
    assert again.schema.types == table.schema.types
    assert again["n"].to_pylist() == [2**53 + 1, 5, 3]
    assert again.drop_columns(["n"]).to_pydict() == table.drop_columns(["n"]).to_pydict()
    with pytest.raises(RemaskerError, match="is not a Parquet file"):
        read_table(put(tmp_path, "a,b\n1,2\n", "bad.parquet"))
    with pytest.raises(RemaskerError, match="is not a readable Parquet file"):
        read_table(put(tmp_path, b"PAR1 but no more", "worse.parquet"))


def test_nothing_is_overwritten_or_half_written(tmp_path: Path, monkeypatch: Any) -> None:
    path = put(tmp_path, "old")
    with pytest.raises(RemaskerError, match="exists; add --force to replace it"):
        check_target(path, force=False)
    check_target(path, force=True)
    with pytest.raises(RemaskerError, match="there is no directory"):
        check_target(str(tmp_path / "no" / "t.csv"), force=False)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RemaskerError, match=r"cannot write .*: No space left on device"):
        write_bytes(b"new", path)
    assert Path(path).read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


def test_a_large_file_is_read_in_seconds(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [f'{i},"a ""b"", c",{x:.3f},NA' for i, x in enumerate(random.random(20_000))]
    text = "i,s,x,e\n" + "\n".join(rows) + "\n"
    table = read_table(put(tmp_path, text))
    assert table.render(table.frame, "-") == text.encode()
