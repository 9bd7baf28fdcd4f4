"""Batches of what a network reads."""

from __future__ import annotations

import torch

from qkv.generate.inputs import batches, padded

LIKE = torch.zeros((), dtype=torch.bfloat16)


def test_inputs_of_like_length_share_a_batch_and_keep_their_numbers() -> None:
    texts = [[1, 2, 3], [4], [5, 6], [7]]
    found = [(numbers, ids_BS.tolist()) for numbers, ids_BS, _ in batches(texts, LIKE, 2, longest=8, end_id=None)]
    assert found == [([1, 3], [[4], [7]]), ([2, 0], [[5, 6, 0], [1, 2, 3]])]


def test_a_text_that_is_too_long_is_cut_and_still_ends() -> None:
    ((_, ids_BS, lengths_B),) = batches([[1, 2, 3, 4, 9]], LIKE, 4, longest=3, end_id=9)
    assert ids_BS.tolist() == [[1, 2, 9]]
    assert lengths_B is None


def test_features_are_padded_in_the_precision_of_the_network_and_never_cut() -> None:
    sounds = [torch.ones(5, 2), torch.ones(3, 2)]
    ((numbers, x_BSW, lengths_B),) = batches(sounds, LIKE, 4, longest=2, end_id=9)
    assert numbers == [1, 0]
    assert x_BSW.shape == (2, 5, 2)
    assert x_BSW.dtype == torch.bfloat16
    assert lengths_B is not None
    assert lengths_B.tolist() == [3, 5]
    assert not x_BSW[0, 3:].any()


def test_images_stand_beside_each_other_and_ids_may_be_a_tensor() -> None:
    images_BCHW, lengths_B = padded([torch.ones(3, 4, 4), torch.zeros(3, 4, 4)], LIKE)
    assert images_BCHW.shape == (2, 3, 4, 4)
    assert lengths_B is None
    ids_BS, _ = padded([torch.tensor([1, 2]), torch.tensor([3, 4])], LIKE)
    assert ids_BS.dtype == torch.int64
    assert ids_BS.tolist() == [[1, 2], [3, 4]]
