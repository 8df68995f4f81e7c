"""Digests: the same on every device and however the bytes are cut, another one for any other bytes."""

from __future__ import annotations

import pytest
import torch

from workers.engine.torch.weights.digest import WORDS, XXH3, algorithm_of, digest, native, words

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
on_cpu, on_gpu = pytest.mark.torch, pytest.mark.gpu


def random(count: int, dtype: torch.dtype = torch.uint8, seed: int = 1) -> torch.Tensor:
    size = torch.tensor([], dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype)


@pytest.mark.sampled(6)
@on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1001])
def test_chunks_change_nothing(count, dtype):
    found = random(count, dtype)
    assert {words(found, chunk) for chunk in (1, 2, 3, 125, 1 << 20)} == {words(found.view(torch.uint8))}


def written_out(raw: bytes) -> str:
    """With integers that have no end: what the sums are meant to be."""
    mask, first, second = (1 << 64) - 1, len(raw), 0
    for index in range(-(-len(raw) // 8)):
        word = int.from_bytes(raw[8 * index : 8 * index + 8].ljust(8, b"\0"), "little")
        word = (word + (index + 1) * 0x9E3779B97F4A7C15) & mask
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        word ^= word >> 31
        first, second = first + word, second + (2 * index + 1) * word
    return f"{first & mask:016x}{second & mask:016x}"


@on_cpu
@pytest.mark.parametrize("nbytes", [0, 1, 8, 13, 800])
def test_it_is_what_is_written_out(nbytes):
    found = random(nbytes)
    assert digest(found, WORDS) == f"words:{written_out(bytes(found.tolist()))}"


@on_cpu
def test_each_device_has_its_own_and_says_so():
    assert (native(CPU), native(CUDA)) == (XXH3, WORDS)
    assert digest(torch.zeros(3)) == digest(torch.zeros(3), XXH3) != digest(torch.zeros(3), WORDS)


@on_cpu
@pytest.mark.parametrize("algorithm", [XXH3, WORDS])
@pytest.mark.parametrize("nbytes", [8, 13, 64])
def test_one_flipped_bit_shows_wherever_it_is(algorithm, nbytes):
    raw = random(nbytes)
    before, seen = digest(raw, algorithm), set()
    for bit in range(8 * nbytes):
        changed = raw.clone()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(digest(changed, algorithm))
    assert len(seen) == 8 * nbytes
    assert before not in seen


@on_cpu
@pytest.mark.parametrize("algorithm", [XXH3, WORDS])
def test_two_signs_that_flip_and_words_that_change_places_show(algorithm):
    """What differs in the highest bits alone is what a plain sum of products cannot see."""
    raw = random(16, torch.int64)
    before = digest(raw, algorithm)
    for one in range(16):
        for other in range(one):
            flipped = raw.clone()
            flipped[[one, other]] ^= -(1 << 63)
            assert digest(flipped, algorithm) != before
            swapped = raw.clone()
            swapped[[one, other]] = raw[[other, one]]
            assert digest(swapped, algorithm) != before
            near = raw.clone()
            near[other] = near[one] ^ -(1 << 63)
            there = near.clone()
            there[[one, other]] = near[[other, one]]
            assert digest(there, algorithm) != digest(near, algorithm)


@on_cpu
@pytest.mark.parametrize("algorithm", [XXH3, WORDS])
def test_zeros_that_move_or_are_left_away_show(algorithm):
    body, zeros = random(24), torch.zeros(40, dtype=torch.uint8)
    forms = [
        torch.cat((zeros[:before], body, zeros[: total - before]))
        for total in (0, 1, 8, 16, 40)
        for before in sorted({0, min(1, total), min(8, total), total})
    ]
    forms += [zeros[:count] for count in range(41)]
    assert len({digest(form, algorithm) for form in forms}) == len(forms)


@on_cpu
def test_a_slice_of_something_wider_is_digested_like_a_copy_of_it():
    wide = random(50 * 31, torch.bfloat16).view(50, 31)
    for part in (wide[:, 3:20], wide[3:29], wide[:, :1], wide[1, 3:], wide.t(), wide[:, 5]):
        for chunk in (1, 2, 7, 1 << 20):
            assert words(part, chunk) == words(part.clone(memory_format=torch.contiguous_format)), part.shape
    assert words(wide[0, 0]) == words(wide[0, 0].reshape(1))


@on_cpu
@pytest.mark.parametrize("said", ["", "0123456789abcdef", "md5:00", ":00"])
def test_digests_of_other_versions_are_not_taken_for_anything(said):
    with pytest.raises(ValueError, match="is not a digest of a known algorithm"):
        algorithm_of(said)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 1001, 5_000_003])
def test_a_device_makes_what_the_cpu_makes(count, dtype):
    found = random(count, dtype)
    assert digest(found.to(CUDA)) == digest(found, WORDS)
    if count > 8:
        assert digest(found.to(CUDA)[3:]) == digest(found[3:], WORDS), "wherever it begins"


@on_gpu
def test_a_device_needs_no_second_models_worth_of_memory():
    found = torch.zeros(64 << 20, dtype=torch.float32, device=CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    before = torch.cuda.max_memory_allocated(CUDA)
    digest(found)
    assert torch.cuda.max_memory_allocated(CUDA) - before < 65 << 20
