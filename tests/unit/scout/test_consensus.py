import pytest

from lmres.scout.consensus import judge, ranks


@pytest.mark.parametrize(
    ("groups", "wrong", "right"),
    [
        ([[0, 2], [1]], (1,), (0, 2)),
        ([[0], [1, 2, 3]], (0,), (1, 2, 3)),
        ([[0, 1, 2], [3], [4]], (3, 4), (0, 1, 2)),
        ([[0], [1]], (), ()),
        ([[0, 1], [2, 3]], (), ()),
        ([[0, 1], [2], [3]], (), ()),
        ([[0], [1], [2]], (), ()),
    ],
)
def test_a_strict_majority_of_three_or_more_decides(groups, wrong, right):
    opinion = judge(groups)
    assert (opinion.wrong, opinion.right) == (wrong, right)
    assert opinion.attributed == bool(wrong)


def test_ranks_in_words():
    assert [ranks([3]), ranks([0, 2]), ranks((0, 1, 5))] == ["rank 3", "ranks 0 and 2", "ranks 0, 1 and 5"]
