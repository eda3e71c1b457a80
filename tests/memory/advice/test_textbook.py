"""The textbook functions against the figures that the sources print."""

from __future__ import annotations

from trainer.memory.advice import textbook as book

GB = 10**9


def test_full_fine_tuning_of_7b_is_112_gb():
    assert book.full_mixed_precision(7 * GB) == 112 * GB


def test_3b_full_is_48_gb_and_30_with_8_bit_state():
    assert book.full_mixed_precision(3 * GB) == 48 * GB
    assert book.full_mixed_precision(3 * GB, book.ADAM_8BIT) == 30 * GB


def test_7b_lora_and_qlora():
    trainable = book.lora_parameters(layers=32, projections=4, hidden=4096, rank=16)
    assert trainable == 16_777_216
    assert round(book.lora(7 * GB, trainable) / GB, 2) == 14.17
    assert round(book.qlora(7 * GB, trainable) / GB, 1) == 3.7


def test_13b_r8_on_four_projections():
    trainable = book.lora_parameters(layers=40, projections=4, hidden=5120, rank=8)
    assert trainable == 13_107_200


def test_activations_with_and_without_checkpointing():
    shape = {"batch": 2, "tokens": 4096, "hidden": 4096}
    assert book.activations_rule(**shape, layers=32) == 25_769_803_776
    assert book.activations_checkpointed(**shape, layers=32) == 2_147_483_648
    flash = book.activations_layer(**shape, heads=32, flash=True)
    assert flash == 34 * 4096 * 2 * 4096
    assert book.activations_layer(**shape, heads=32, flash=False) - flash == 5 * 32 * 4096**2 * 2


def test_square_root_placement_is_the_least_sum():
    for layers in (1, 2, 16, 24, 32, 48, 80):
        best = min(-(-layers // k) + k for k in range(1, layers + 1))
        assert book.sqrt_stored_inputs(layers) == best


def test_logits_of_65536_tokens():
    assert round(book.logits(65_536, 32_768) / GB, 1) == 8.6
