"""Curves and bars in characters."""

import pytest

from doubly.cli.curves import bar, curve


def dots(lines):
    """(column, height from below) of every dot."""
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    return {
        (2 * column + dx, 4 * len(lines) - 1 - (4 * row + dy))
        for row, line in enumerate(lines)
        for column, letter in enumerate(line)
        for bit, (dx, dy) in enumerate(places)
        if ord(letter) - 0x2800 >> bit & 1
    }


def test_a_straight_line_goes_from_corner_to_corner():
    drawn = curve([(0, 1.0), (1, 5.0)], 1, width=4, height=2)
    assert [len(line) for line in drawn] == [4, 4]
    assert dots(drawn) == {(i, i) for i in range(8)}
    assert dots(curve([(0, 5.0), (1, 1.0)], 1, 4, 2)) == {(i, 7 - i) for i in range(8)}


def test_a_steep_line_has_no_gaps():
    drawn = dots(curve([(0, 0.0), (1, 1.0), (2, 0.0)], 2, width=2, height=4))
    assert {height for _, height in drawn} == set(range(16)) and {column for column, _ in drawn} == set(range(4))


def test_no_peak_is_lost_among_thousands_of_points():
    points = [(i, 1.0 if i == 3333 else 0.0) for i in range(10_000)]
    drawn = dots(curve(points, 9_999, width=10, height=2))
    assert {column for column, height in drawn if height == 7} == {round(19 * 3333 / 9_999)}
    assert {column for column, height in drawn if height == 0} == set(range(20))


def test_points_that_begin_late_are_drawn_where_they_belong():
    drawn = dots(curve([(5, 1.0), (10, 2.0)], 10, width=5, height=1))
    assert min(drawn) == (4, 0) and max(drawn) == (9, 3)


@pytest.mark.parametrize("points", [[(0, 3.0)], [(0, 3.0), (1, 3.0)], [(0, -2.0), (1, -2.0), (2, -2.0)]])
def test_what_does_not_change_lies_in_the_middle(points):
    drawn = dots(curve(points, points[-1][0], width=3, height=3))
    assert {height for _, height in drawn} == {5}
    assert len(drawn) == (1 if len(points) == 1 else 6)


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "    "), (1, "████"), (0.5, "██  "), (1 / 32, "▏   "), (0.4, "█▋  "), (7, "████"), (-1, "    ")],
)
def test_a_bar_fills_its_share(share, drawn):
    assert bar(share, 4) == drawn
