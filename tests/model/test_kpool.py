"""The indexer: selection rules, ties, visibility, and what arrives in pieces."""

import torch

from glmflash.model.kpool import finish_pools, score_pools, select_best


def test_best_pools_in_ascending_order() -> None:
    scores = torch.tensor([[1.0, 5.0, -2.0, 4.0, 3.0]])
    assert select_best(scores, torch.tensor([5]), 3).tolist() == [[1, 3, 4]]


def test_equal_scores_go_to_the_lower_pool() -> None:
    scores = torch.tensor([[0.0, 0.0, 7.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert select_best(scores, torch.tensor([5, 5]), 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_only_visible_pools_compete() -> None:
    scores = torch.tensor([[1.0, 9.0, 9.0], [1.0, 0.0, 9.0], [1.0, 2.0, 3.0]])
    chosen = select_best(scores, torch.tensor([0, 2, 3]), 2)
    assert chosen.tolist() == [[-1, -1], [0, 1], [1, 2]]


def test_negative_scores_are_taken_while_room_remains() -> None:
    scores = torch.tensor([[-3.0, -1.0]])
    assert select_best(scores, torch.tensor([2]), 2).tolist() == [[0, 1]]


def test_against_a_sort() -> None:
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 3, (40, 50), generator=rng).float()  # many ties
    visible = torch.randint(0, 51, (40,), generator=rng)
    chosen = select_best(scores, visible, 8)
    for row in range(40):
        ranked = sorted(range(int(visible[row])), key=lambda p: (-float(scores[row, p]), p))
        expected = sorted(ranked[:8])
        assert [p for p in chosen[row].tolist() if p >= 0] == expected


def test_scores_by_hand() -> None:
    queries = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]])
    pools = torch.tensor([[4.0, 1.0, 0.0, 0.0], [-4.0, 3.0, 0.0, 0.0]])
    # 1/sqrt(4) * dots = [[2, -2], [1, 3]]; relu; weights 1 and -1
    assert score_pools(queries, torch.tensor([[1.0, -1.0]]), pools).tolist() == [[1.0, -3.0]]


def test_pool_weights_are_a_softmax_per_channel() -> None:
    keys = torch.tensor([[[1.0, 1.0], [3.0, 5.0]]])
    gates = torch.tensor([[[0.0, 100.0], [0.0, 0.0]]])
    ape = torch.tensor([[0.0, 0.0], [torch.log(torch.tensor(3.0)), 0.0]])
    expected = torch.tensor([[0.25 * 1 + 0.75 * 3, 1.0]])
    torch.testing.assert_close(finish_pools(keys, gates, ape), expected)
