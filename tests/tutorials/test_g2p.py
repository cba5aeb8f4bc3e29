"""The g2p-en model in plain torch: decoding, padding, scoring, and the float baseline that int8 is held against."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

Array = npt.NDArray[Any]


def test_alphabets_fit_the_checkpoint(g2p: ModuleType) -> None:
    assert (len(g2p.GRAPHEMES), len(g2p.PHONEMES), len(set(g2p.PHONEMES))) == (29, 74, 74)
    assert (g2p.PHONEMES[g2p.START_PHONEME], g2p.PHONEMES[g2p.END_PHONEME]) == ("<s>", "</s>")


def test_encode_words_ends_and_pads(g2p: ModuleType) -> None:
    encoded = g2p.encode_words(["ab", "it's", ""])
    assert encoded.tolist() == [[3, 4, 2, 0, 0], [11, 22, 1, 21, 2], [2, 0, 0, 0, 0]]
    assert encoded.dtype == torch.int64


def test_padding_changes_no_state(g2p: ModuleType) -> None:
    torch.manual_seed(0)
    model = g2p.G2P().eval()
    batch = ["a", "quantisation", "int", "zzzzz"]
    with torch.no_grad():
        together = model.encode(g2p.encode_words(batch))
        alone = torch.cat([model.encode(g2p.encode_words([word])) for word in batch])
    # Float sums of 512 products in another order: 512 * 2**-24 times values below 1, twelve steps.
    torch.testing.assert_close(together, alone, rtol=0, atol=512 * 2**-24)


def test_a_batch_decodes_as_its_words_alone(g2p: ModuleType, g2p_data: None) -> None:
    model = g2p.load()
    words = g2p.words(300, seed=1)
    together = g2p.predict(model, words)
    assert together == g2p.predict(model, words, batch_size=1)
    assert len({len(word) for word in words}) > 8  # else there was no padding to get wrong


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gru_ref(x: Array, h: Array, weights: dict[str, Array]) -> Array:
    """One GRU step in float64, as the documentation of nn.GRU writes it; gates reset, update, new."""
    i_r, i_z, i_n = np.split(weights["w_ih"] @ x + weights["b_ih"], 3)
    h_r, h_z, h_n = np.split(weights["w_hh"] @ h + weights["b_hh"], 3)
    reset, update = sigmoid(i_r + h_r), sigmoid(i_z + h_z)
    new = np.tanh(i_n + reset * h_n)
    return np.asarray((1 - update) * new + update * h)


def test_equals_the_equations_on_the_checkpoint(g2p: ModuleType, fetch: ModuleType, g2p_data: None) -> None:
    with np.load(fetch.fetch(fetch.G2P_EN) / "g2p_en" / "checkpoint20.npz", allow_pickle=False) as file:
        arrays = {name: file[name].astype(np.float64) for name in file.files}
    encoder, decoder = ({n[4:]: a for n, a in arrays.items() if n.startswith(side)} for side in ("enc_", "dec_"))
    words = ["photograph", "activationist", *g2p.words(40, seed=2)]
    for word, said in zip(words, g2p.predict(g2p.load(), words), strict=True):
        h = np.zeros(256)
        for letter in g2p.encode_words([word])[0].tolist():
            h = gru_ref(encoder["emb"][letter], h, encoder)
        expected: list[str] = []
        phoneme = g2p.START_PHONEME
        while len(expected) < g2p.MAX_PHONEMES:
            h = gru_ref(decoder["emb"][phoneme], h, decoder)
            phoneme = int(np.argmax(arrays["fc_w"] @ h + arrays["fc_b"]))
            if phoneme == g2p.END_PHONEME:
                break
            expected.append(g2p.PHONEMES[phoneme])
        assert said == tuple(expected), word
    assert " ".join(g2p.predict(g2p.load(), ["photograph"])[0]) == "F OW1 T AH0 G R AE2 F"


def test_what_follows_the_end_of_a_word_is_the_end(g2p: ModuleType, g2p_data: None) -> None:
    rows = g2p.load()(g2p.encode_words(["a", "photograph", "internationalisation"])).tolist()
    for row in rows:
        length = row.index(g2p.END_PHONEME) if g2p.END_PHONEME in row else len(row)
        assert set(row[length:]) <= {g2p.END_PHONEME}
    assert rows[0][5:] == [g2p.END_PHONEME] * (len(rows[0]) - 5) != []


def test_decoding_stops(g2p: ModuleType) -> None:
    model = g2p.G2P().eval()
    torch.nn.init.zeros_(model.output.weight)
    with torch.no_grad():
        model.output.bias.copy_(torch.arange(74) == 10)
    assert model(g2p.encode_words(["word"])).tolist() == [[10] * g2p.MAX_PHONEMES]
    with torch.no_grad():
        model.output.bias.copy_(torch.arange(74) == g2p.END_PHONEME)
    assert model(g2p.encode_words(["two", "words"])).shape == (2, 0)
    assert g2p.predict(model, ["two", "words"]) == [(), ()]


def test_float_baseline(g2p: ModuleType, g2p_data: None) -> None:
    found = g2p.word_accuracy(g2p.load(), g2p.words(1000))
    assert found.words == 1000
    # Measured 0.685 and 0.1003; a tie that falls the other way on another CPU may move a word or two.
    assert found.word_accuracy == pytest.approx(0.685, abs=0.003)
    assert found.phoneme_error == pytest.approx(0.1003, abs=0.002)


def test_words_and_split_depend_on_the_seed_alone(g2p: ModuleType, g2p_data: None) -> None:
    assert g2p.words(10) == g2p.words(500)[:10]
    assert g2p.words(10, seed=1) != g2p.words(10)
    calibration, scored = g2p.split(200, 300)
    assert (len(calibration), len(scored)) == (200, 300)
    assert not set(calibration) & set(scored)
    assert len(g2p.pronunciations()) == len(g2p.words()) == 126_052


def test_pronunciations_have_variants_and_no_comments(g2p: ModuleType, g2p_data: None) -> None:
    dictionary = g2p.pronunciations()
    assert dictionary["a"] == (("AH0",), ("EY1",))
    assert dictionary["aalborg"][0] == ("AO1", "L", "B", "AO0", "R", "G")  # "# place, danish" follows in the file
    assert {phoneme for said in dictionary.values() for one in said for phoneme in one} <= set(g2p.PHONEMES)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_edit_distance(g2p: ModuleType, a: str, b: str, distance: int) -> None:
    assert g2p.edit_distance(a, b) == g2p.edit_distance(b, a) == distance


def test_score_takes_the_nearest_pronunciation(g2p: ModuleType) -> None:
    wanted = [(("AH0",), ("EY1", "B")), (("K", "AE1", "T"),)]
    assert g2p.score([("EY1", "B"), ("K", "AE2")], wanted) == (0.5, 2 / 5, 2)
    with pytest.raises(ValueError, match="no words"):
        g2p.score([], [])
