from megajax.core.hardware import CARDS, find_card


def test_cards_are_found_by_jaxs_names():
    assert find_card("NVIDIA H100 80GB HBM3") is CARDS["H100"]
    assert find_card("NVIDIA H200") is CARDS["H200"]
    assert find_card("NVIDIA A100-SXM4-80GB") is CARDS["A100"]
    assert find_card("cpu") is None


def test_a100_peak_is_the_one_that_megascale_divides_by():
    assert CARDS["A100"].flops["bfloat16"] == 312e12
