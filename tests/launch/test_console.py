"""Streams and tables as a reader sees them."""

import io

from rorqual.launch.console import StreamPrinter, shorten, table


def test_one_text_is_printed_as_it_comes():
    out = io.StringIO()
    printer = StreamPrinter(["[0]"], out)
    printer.add(0, "a\nb", False)
    assert out.getvalue() == "a\nb"
    printer.add(0, " c", True)
    assert out.getvalue() == "a\nb c\n"


def test_several_texts_are_printed_by_the_line():
    out = io.StringIO()
    printer = StreamPrinter(["[0]", "[1]"], out, width=40)
    printer.add(0, "one ", False)
    printer.add(1, "two\nthr", False)
    assert out.getvalue() == "[1] two\n"
    printer.add(1, "ee", True)
    printer.add(0, "end", True)
    assert out.getvalue() == "[1] two\n[1] three\n[0] one end\n"


def test_long_lines_are_folded_at_a_space_and_lose_nothing():
    out = io.StringIO()
    text = "word " * 30 + "x" * 100
    printer = StreamPrinter(["[0]", "[1]"], out, width=30)
    for letter in text:
        printer.add(0, letter, False)
    printer.add(0, "", True)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 30 and line.startswith("[0] ") for line in lines)
    assert "".join(line[4:] for line in lines).replace(" ", "") == text.replace(" ", "")
    assert all(not line.endswith("wor") for line in lines)


def test_empty_lines_are_left_out_and_no_text_prints_nothing():
    out = io.StringIO()
    printer = StreamPrinter(["[0]", "[1]"], out, width=40)
    printer.add(0, " a\n\n \nb", True)
    printer.add(1, "", True)
    assert out.getvalue() == "[0] a\n[0] b\n"


def test_table_aligns_numbers_right_and_texts_left():
    assert table(["name", "n"], [["a", 1000], ["bbbbb", None]]) == "name       n\na      1,000\nbbbbb      -"
    assert table(["name"], []) == "name"


def test_shorten_keeps_both_ends():
    assert shorten("abc", 10) == "abc"
    short = shorten("a" * 50 + "b" * 50, 25)
    assert len(short) <= 25 and short.startswith("a") and short.endswith("b") and " ... " in short
